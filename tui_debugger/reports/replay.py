"""A replay document as text: each cell against the reference, each segment, then the first divergence."""

from __future__ import annotations

from typing import Any

from replay_core.jobs import Document
from tui_debugger import format as words
from tui_debugger.reports.columns import columns
from tui_debugger.reports.comparison import headline


def replay_report(doc: Document) -> str:
    plan = doc["plan"]
    lines = [f"replay of {plan['dump']}  {words.scope(plan)}  model {plan['model']}", ""]
    rows = [["cell", "setting", "outcome", "agrees", "time", "peak", "attention that ran"]]
    rows += [_row(number, cell, doc["baseline"]) for number, cell in enumerate(doc["cells"])]
    lines += columns(rows)
    for number, cell in enumerate(doc["cells"]):
        if cell["segments"]:
            lines += ["", f"cell {number} against each row alone, per segment", *_segments(cell["segments"])]
        if cell["error"]:
            lines += ["", f"cell {number}: {cell['error']['message']}"]
            lines += [
                f"  {name}: {cell['error'][name]}" for name in ("expected", "found", "hint") if cell["error"][name]
            ]
        first = (cell["agreement"] or {}).get("first_divergence")
        if first:
            lines += ["", f"cell {number}", headline({"first_divergence": first})]
    if doc["notes"]:
        lines += ["", *(f"note: {note}" for note in doc["notes"])]
    dumps = [(number, cell["dump"]) for number, cell in enumerate(doc["cells"]) if cell["dump"]]
    if len(dumps) > 1:
        lines += ["", *(f"cell {number} dump  {dump}" for number, dump in dumps)]
        lines += ["", f"hint: rldbg {dumps[0][1]} {dumps[-1][1]}"]
    return "\n".join(lines)


def _row(number: int, cell: dict[str, Any], baseline: int) -> list[str]:
    agrees = "reference" if number == baseline else {True: "yes", False: "NO", None: "-"}[cell["agreement"]["agrees"]]
    effective = cell["effective"] or {}
    return [
        str(number),
        words.flags(_telling(cell["flags"])),
        cell["outcome"],
        agrees,
        words.seconds((cell["time"] or {}).get("steady_s")),
        words.mib((cell["memory"] or {}).get("peak_mib")),
        words.middle(_operators(effective.get("attention")), 60),
    ]


def _operators(attention: Any) -> str:
    if attention is None:
        return "-"
    return ", ".join(attention) if isinstance(attention, list) else str(attention)


def _telling(flags: dict[str, Any]) -> dict[str, Any]:
    """The flags that say something: block_mask only where it is off, device only where it is not the CPU."""
    hidden = {"block_mask": True, "device": "cpu", "threads": flags.get("threads")}
    return {name: value for name, value in flags.items() if name not in hidden or value != hidden[name]}


def _segments(segments: list[dict[str, Any]]) -> list[str]:
    rows = [["sample", "tokens", "worst token", "at position", "logp max (valid)", "logp max (response)"]]
    for row in segments:
        rows.append(
            [
                str(row["sample"]),
                str(row["tokens"]),
                words.number(row["worst_token"]["rel_l2"], 3),
                str(row["worst_token"]["position"]),
                words.number((row["valid"] or {}).get("logp_max"), 3),
                words.number((row["response"] or {}).get("logp_max"), 3),
            ]
        )
    return ["  " + line for line in columns(rows, right=frozenset(range(6)))]
