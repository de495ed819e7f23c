"""A run document as text: what `rldbg ls` prints."""

from __future__ import annotations

import os
from collections.abc import Iterator
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
    if "inside" in doc:
        rows = _runs(doc, doc["inside"][:most])
        lines += ["", *columns([["records", "steps", "run"], *rows], right=frozenset({0}))]
        lines += _left_out(len(doc["inside"]), "runs", show_all)
    elif doc["records"]:
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


def _runs(doc: RunDocument, runs: list[str]) -> list[list[str]]:
    """Records and steps of each run of a folder of runs, and where it lies below it."""
    known = set(runs)
    held: dict[str, list[int | None]] = {run: [] for run in runs}
    for record in doc["records"]:
        folder = next((one for one in _folders(record["path"], doc["path"]) if one in known), None)
        if folder is not None:
            held[folder].append(record["key"]["step"])
    rows = []
    for run, steps in held.items():
        numbers = sorted({step for step in steps if step is not None})
        span = "-" if not numbers else f"{numbers[0]}..{numbers[-1]}" if len(numbers) > 1 else str(numbers[0])
        rows.append([f"{len(steps):,}", span, safe(os.path.relpath(run, doc["path"]))])
    return rows


def _folders(path: str, above: str) -> Iterator[str]:
    """The folders that a path lies in, the nearest first, as far as `above`."""
    while len(path := os.path.dirname(path)) > len(above):
        yield path


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
