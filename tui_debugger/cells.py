"""What one cell of a replay says in words: its setting, what was seen of it, and how it stands to its baseline."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from replay_core.errors import RldbgError
from replay_core.replay.flags import Flags
from tui_debugger import format as fmt

if TYPE_CHECKING:
    from replay_core.documents.comparison import ComparisonDocument
    from replay_core.documents.replay import CapturedDigests, CellEntry, ReplayDocument

#: Beside a cell's dump: what its replay found (`replay.cell_log`, which is the core's own).
_FOUND = ("logs", "replay.json")


def label(cell: CellEntry) -> str:
    """Its settings for a person: `packed, no block mask, sdpa`."""
    if cell["part"] == "recording":
        return "the recording"
    try:
        said = Flags.from_mapping(cell["flags"]).label()
    except RldbgError:  # flags of another rldbg
        said = fmt.flags(cell["flags"])
    return f"reference: {said}" if cell["part"] == "reference" else said


def held_to_baseline(document: ReplayDocument) -> tuple[CellEntry, CellEntry]:
    """(the baseline, the cell that was asked for, or the last beside it where that is the baseline itself)."""
    baseline = document["cells"][document["baseline"]]
    others = [cell for number, cell in enumerate(document["cells"]) if number != document["baseline"]]
    asked = [cell for cell in others if cell["part"] == "cell"]
    return baseline, (asked or others)[-1]


def recording_parts(document: ReplayDocument) -> str:
    """How what the trainer recorded is not what each row alone computes; empty where it is, or nothing tells."""
    baseline = document["cells"][document["baseline"]]
    # The first of several models to be ranked is no answer of its own.
    if document["ranking"]:
        return ""
    held, trained = baseline["recorded"], baseline["recorded_training"]
    if held and held[0]["verdict"] not in (None, "SAME", "CLOSE", "PADDING"):
        at = held[0]["at"]
        assert at is not None
        return (
            f"{held[0]['field']} is not what each row alone computes: {held[0]['reason']}; "
            f"worst at sample {at['sample']} position {at['position']}: recorded {fmt.number(at['recorded'], 5)}, "
            f"replayed {fmt.number(at['replayed'], 5)}"
        )
    if trained is not None and trained["agrees"] is False:
        return f"what was trained is not what each row alone gives: {trained['sentence']}"
    return ""


def sentence(cell: CellEntry) -> str:
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


def stated(comparison: ComparisonDocument, cell: CellEntry | None) -> ComparisonDocument:
    """The comparison of a cell, with what was seen as digests only counted as skipped: it is never called agreement."""
    told = None if cell is None else _told(cell)
    if cell is None or told is None or not told["not_in_full"]:
        return comparison
    counts, rest = comparison["counts"], told["not_in_full"]
    held = comparison.copy()
    held["counts"] = {**counts, "total": counts["total"] + rest, "skipped": counts["skipped"] + rest}
    held["problems"] = [*comparison["problems"], {"where": str(cell["dump"]), "what": sentence(cell)}]
    return held


def dump_beside(cell: CellEntry, other: CellEntry) -> str | None:
    """The dump of `cell` to hold against that of `other`: the baseline has one with the modules that `other` has."""
    told = _told(other)
    if cell["part"] == "reference" and told is not None and told["baseline_dump"]:
        return told["baseline_dump"]
    return cell["dump"]


def is_replays(dump: Path) -> bool:
    """Whether a dump is one of a replay that lies on the disk, with what it found."""
    return dump.resolve().parent.joinpath(*_FOUND).is_file()


def _told(cell: CellEntry) -> CapturedDigests | None:
    return cell["capture"]["hashes"] if cell["capture"] else None
