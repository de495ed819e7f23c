"""A run document as text: what `rldbg ls` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tui_debugger.format import safe
from tui_debugger.reports.columns import columns

if TYPE_CHECKING:
    from replay_core.documents.run import RecordLine, RunDocument


#: Records and problems printed; what is left out is counted.
ROWS = 100


def run_report(doc: RunDocument, *, show_all: bool = False) -> str:
    most = None if show_all else ROWS
    steps = [step for step in doc["steps"] if step is not None]
    span = f"steps {steps[0]}..{steps[-1]}" if len(steps) > 1 else f"step {steps[0]}" if steps else "no step numbers"
    lines = [f"{safe(doc['path'])}  {doc['dialect']}  {span}  {len(doc['records'])} records  checked: {doc['checked']}"]
    lines += [f"note: {safe(note)}" for note in doc["notes"]]
    if doc["records"]:
        lines.append("")
        # Files of no known dialect are told apart by what they are called.
        unknown = len(doc["records"]) > 1 and any(record["key"]["role"] is None for record in doc["records"])
        rows = [["step", "rank", "micro", "role", "stage", *(["file"] if unknown else []), "fields"]]
        rows += [_row(record, unknown) for record in doc["records"][:most]]
        lines += columns(rows, right=frozenset({0, 1, 2}))
        lines += _left_out(len(doc["records"]), "records", show_all)
    if doc["problems"]:
        lines.append("")
        lines += [f"problem: {safe(problem['what'])}\n  {safe(problem['where'])}" for problem in doc["problems"][:most]]
        lines += _left_out(len(doc["problems"]), "problems", show_all)
    return "\n".join(lines)


def _left_out(count: int, of: str, show_all: bool) -> list[str]:
    left = 0 if show_all else count - ROWS
    return [f"... and {left:,} more {of} (--all lists every one, --step chooses)"] if left > 0 else []


def _row(record: RecordLine, with_file: bool) -> list[str]:
    key, fields = record["key"], record["fields"]
    said = (key["step"], key["rank"], key["micro"], key["role"], key["stage"])
    parts = ["-" if part is None else str(part) for part in said]
    if with_file:
        parts.append(safe(record["path"].rpartition("/")[2]))
    if fields is None:
        return [*parts, "not read"]
    more = f" and {len(fields) - 5} more" if len(fields) > 5 else ""
    return [*parts, ", ".join(fields[:5]) + more]
