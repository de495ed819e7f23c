"""A replay document as text: the answer, then each cell against the reference, segment by segment."""

from __future__ import annotations

from typing import Any

from replay_core.jobs import Document
from tui_debugger import format as words
from tui_debugger.reports.columns import columns
from tui_debugger.reports.comparison import divergence

#: Segments printed of each cell; what is left out is counted.
SEGMENTS = 16


def replay_report(doc: Document) -> str:
    plan = doc["plan"]
    lines = [*_answer(doc), "", f"replay of {plan['dump']}  {words.scope(plan)}  model {plan['model']}", ""]
    rows = [["cell", "setting", "outcome", "agrees", "time", "peak", "attention that ran"]]
    rows += [_row(number, cell, doc["baseline"]) for number, cell in enumerate(doc["cells"])]
    lines += columns(rows)
    for number, cell in enumerate(doc["cells"]):
        if cell["segments"]:
            lines += ["", f"cell {number} against each row alone, per segment", *_segments(cell["segments"])]
        if cell["error"]:
            lines += ["", f"cell {number}: {cell['error']['message']}"]
            parts = ("file", "expected", "found", "hint")
            lines += [f"  {name}: {cell['error'][name]}" for name in parts if cell["error"][name]]
    if doc["notes"]:
        lines += ["", *(f"note: {note}" for note in doc["notes"])]
    dumps = [(number, cell["dump"]) for number, cell in enumerate(doc["cells"]) if cell["dump"]]
    if len(dumps) > 1:
        lines += ["", *(f"cell {number} dump  {dump}" for number, dump in dumps)]
        lines += ["", f"hint: rldbg {dumps[0][1]} {dumps[-1][1]}"]
    return "\n".join(lines)


def _answer(doc: Document) -> list[str]:
    """What the eye should meet first: who disagrees and where, else what was held to what."""
    lines = []
    others = [(number, cell) for number, cell in enumerate(doc["cells"]) if number != doc["baseline"]]
    for number, cell in others:
        if cell["agreement"]["agrees"] is False:
            name = words.flags(_telling(cell["flags"]))
            lines.append(f"DISAGREES  cell {number} ({name}) with each row alone{_pattern(cell['segments'])}")
            lines.append(divergence(cell["agreement"]["first_divergence"]))
        elif cell["agreement"]["agrees"] is None:
            lines.append(f"{cell['outcome'].upper()}  cell {number} ({words.flags(_telling(cell['flags']))})")
    agreeing = [cell for _, cell in others if cell["agreement"]["agrees"]]
    if agreeing and len(agreeing) == len(others):
        segments = [row for cell in agreeing for row in cell["segments"] or []]
        worst = max((float(row["worst_token"]["rel_l2"]) for row in segments if row["worst_token"]), default=0.0)
        logp = max(((row["valid"] or {}).get("logp_max") or 0.0 for row in segments), default=0.0)
        plural = "s" if len(agreeing) > 1 else ""
        lines.append(
            f"AGREES  {len(agreeing)} cell{plural} with each row alone, in every segment: "
            f"worst token {words.number(worst, 3)}, logprobs within {words.number(logp, 3)} nats"
        )
    return lines


def _pattern(segments: list[dict[str, Any]] | None) -> str:
    """The signature of a leak, where the segments show it: the first exact, later ones off."""
    if not segments:
        return ""
    off = [row["sample"] for row in segments if not _exact(row)]
    if off and not _exact(segments[0]):
        return f": {len(off)} of {len(segments)} segments off"
    if off and len(segments) > 1:
        span = f"{off[0]}..{off[-1]}" if len(off) > 1 else str(off[0])
        return f": segment 0 exact, {span} off"
    return ""


def _exact(row: dict[str, Any]) -> bool:
    # 1e-3 is the fp32 limit of a worst token; a leak is at least 100 times past it (facts: replay.md, numbers).
    return not row["worst_token"] or float(row["worst_token"]["rel_l2"]) <= 1e-3


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
    rows += [
        [
            str(row["sample"]),
            str(row["tokens"]),
            words.number((row["worst_token"] or {}).get("rel_l2"), 3),
            words.number((row["worst_token"] or {}).get("position")),
            words.number((row["valid"] or {}).get("logp_max"), 3),
            words.number((row["response"] or {}).get("logp_max"), 3),
        ]
        for row in segments[:SEGMENTS]
    ]
    lines = ["  " + line for line in columns(rows, right=frozenset(range(6)))]
    if len(segments) > SEGMENTS:
        lines.append(f"  ... and {len(segments) - SEGMENTS} more segments (--json holds them all)")
    return lines
