"""What one cell of a replay says in words: its setting, what was seen of it, and how it stands to its baseline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from replay_core.errors import RldbgError
from replay_core.replay.flags import Flags
from tui_debugger import format as fmt


def label(cell: Mapping[str, Any]) -> str:
    """Its settings for a person: `packed, no block mask, sdpa`."""
    if cell.get("part") == "recording":
        return "the recording"
    try:
        said = Flags.from_mapping(cell.get("flags") or {}).label()
    except RldbgError:  # flags of another rldbg
        said = fmt.flags(cell.get("flags"))
    return f"reference: {said}" if cell.get("part") == "reference" else said


def held_to_baseline(document: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the baseline, the cell that was asked for, or the last beside it where that is the baseline itself)."""
    baseline = document["cells"][document["baseline"]]
    others = [cell for number, cell in enumerate(document["cells"]) if number != document["baseline"]]
    asked = [cell for cell in others if cell["part"] == "cell"]
    return baseline, (asked or others)[-1]


def recording_parts(document: Mapping[str, Any]) -> str:
    """How what the trainer recorded is not what each row alone computes; empty where it is, or nothing tells."""
    held = document["cells"][document["baseline"]].get("recorded") or []
    # The first of several models to be ranked is no answer of its own.
    if not held or document.get("ranking") or held[0]["verdict"] in (None, "SAME", "CLOSE", "PADDING"):
        return ""
    at = held[0]["at"]
    return (
        f"{held[0]['field']} is not what each row alone computes: {held[0]['reason']}; "
        f"worst at sample {at['sample']} position {at['position']}: recorded {fmt.number(at['recorded'], 5)}, "
        f"replayed {fmt.number(at['replayed'], 5)}"
    )


def sentence(cell: Mapping[str, Any]) -> str:
    """In one line; empty where whole tensors were captured, or nothing was held to digests."""
    told = _told(cell)
    if told is None:
        return ""
    if not told["tensors"]:
        said = "compiled, so without digests"
    elif told["first"] is None:
        said = f"{told['equal']} of {told['tensors']} module tensors are bitwise the baseline's, by digest"
    else:
        said = (
            f"{told['differ']} of {told['tensors']} module tensors differ in their bits, first {told['first']['name']}"
        )
    rest = told["not_in_full"]
    seen = f"; {rest} {'was' if rest == 1 else 'were'} not compared in full" if rest else ""
    return fmt.safe(f"{said}{seen}")


def stated(comparison: dict[str, Any], cell: Mapping[str, Any]) -> dict[str, Any]:
    """The comparison of a cell, with what was seen as digests only counted as skipped: it is never called agreement."""
    told = _told(cell)
    if told is None or not told["not_in_full"]:
        return comparison
    counts, rest = comparison["counts"], told["not_in_full"]
    return {
        **comparison,
        "counts": {**counts, "total": counts["total"] + rest, "skipped": counts.get("skipped", 0) + rest},
        "problems": [*comparison.get("problems", []), {"where": str(cell.get("dump")), "what": sentence(cell)}],
    }


def dump_beside(cell: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """The dump of `cell` to hold against that of `other`: the baseline has one with the modules that `other` has."""
    told = _told(other)
    if cell.get("part") == "reference" and told is not None and told["baseline_dump"]:
        return str(told["baseline_dump"])
    return cell.get("dump")


def _told(cell: Mapping[str, Any]) -> Mapping[str, Any] | None:
    told: Mapping[str, Any] | None = (cell.get("capture") or {}).get("hashes")
    return told
