"""What a cell says whose modules were captured as digests first: how many bits part, and what was seen in full."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tui_debugger import format as fmt


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
