"""The weights document, from the judged parameters of an engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from replay_core.documents.version import SCHEMA_VERSION
from replay_core.export.documents import stamp
from replay_core.export.numbers import clean
from replay_core.weight_sync.arrival import SEVERITY, Destination, PartArrival, WeightSync
from replay_core.weight_sync.state import WeightState

if TYPE_CHECKING:
    from replay_core.documents.weights import DestinationEntry, WeightPart, WeightsDocument, WeightsSide


def weights_document(found: WeightSync, allowed: Sequence[str] = ()) -> WeightsDocument:
    """A weights document. `allowed` are arrivals that fail nothing."""
    counts = Counter(one.arrival for one in found.destinations)
    wrong = [one for one in found.destinations if one.arrival not in ("arrived", *allowed)]
    unread = [what for state in (found.known.sender, *found.received) for what in state.unread]
    states = [found.known.sender, *found.received, *found.known.older]
    doc: WeightsDocument = {
        "schema_version": SCHEMA_VERSION,
        "kind": "weights",
        **stamp(),
        "a": _side([found.known.sender]),
        "b": _side(found.received),
        "before": None if found.known.before is None else _side([found.known.before]),
        "older": [_side([state]) for state in found.known.older],
        "parallel": found.parallel,
        "agrees": not wrong and not found.not_sent and not unread,
        "allowed": list(allowed),
        "headline": _headline(found, wrong, unread),
        "counts": {word: counts[word] for word in SEVERITY if counts[word]},
        "destinations": [_destination(one) for one in found.destinations],
        "not_sent": found.not_sent,
        "coverage": {
            "destinations": len(found.destinations),
            "compared": sum(one.arrival not in ("unmapped", "unreadable", "shape") for one in found.destinations),
            "by_digest": sum(one.by_digest for one in found.destinations),
            "engine_own": found.engine_own,
            "unmoved": sum(one.is_unmoved for one in found.destinations),
            "padding_rows": sum(one.padding for one in found.destinations),
            "unread": len(unread),
        },
        "problems": [{"where": str(state.path), "what": what} for state in states for what in state.problems],
        "notes": found.notes,
    }
    return clean(doc)


def _side(states: Sequence[WeightState]) -> WeightsSide:
    first = states[0]
    return {
        "path": str(first.path),
        "step": first.step,
        "parameters": sum(len(state.tensors) for state in states),
        "ranks": [state.rank for state in states],
    }


def _headline(found: WeightSync, wrong: Sequence[Destination], unread: Sequence[str]) -> str:
    said = _said(found, wrong)
    if not unread:
        return said
    # What could not be read may be all that is wrong.
    more = f" (and {len(unread) - 1} more)" if len(unread) > 1 else ""
    return f"cannot be read: {unread[0]}{more}; of the rest, {said}"


def _said(found: WeightSync, wrong: Sequence[Destination]) -> str:
    total = len(found.destinations)
    lost = f"{len(found.not_sent)} of the trainer's {len(found.known.sender.tensors)} parameters have no destination"
    if not wrong:
        said = f"all {total} parameters of the engine hold what was sent"
        return f"{said}; {lost}" if found.not_sent else said
    counts = Counter(one.arrival for one in wrong)
    worst = min(wrong, key=lambda one: SEVERITY.index(one.arrival))
    words = ", ".join(f"{count} {word}" for word, count in counts.most_common())
    said = f"{len(wrong)} of {total} parameters of the engine do not hold what was sent: {words}"
    said = f"{said}; {worst.name}: {worst.what}"
    return f"{said}; {lost}" if found.not_sent else said


def _destination(one: Destination) -> DestinationEntry:
    shown = [part for part in one.parts if part.arrival != "arrived"] or (one.parts if len(one.parts) == 1 else [])
    return {
        "name": one.name,
        "rank": one.rank,
        "dtype": one.ref.dtype,
        "shape": list(one.ref.shape),
        "arrival": one.arrival,
        "what": one.what,
        "by_digest": one.by_digest,
        "parts": [_part(part) for part in shown],
    }


def _part(part: PartArrival) -> WeightPart:
    return {
        "part": part.block.piece.label,
        "source": part.block.piece.source,
        "arrival": part.arrival,
        "what": part.what,
        "rel_l2": part.rel_l2,
    }
