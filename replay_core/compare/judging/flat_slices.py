"""Weights that the optimizer lays end to end, each rank keeping an even slice of the whole up to date and handing it to
all others (ZeRO): what a step that is off says of these slices. A slice begins and ends within a weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from msgspec import Struct

from replay_core import pages
from replay_core.compare.judging.faults import Fault, whose
from replay_core.compare.judging.products import Array
from replay_core.compare.pairing.ranks import HeldByRanks
from replay_core.records import FileBytes, TensorRef

#: A slice is right where it is off by no more than this part of its step: an element whose gradient is next to nothing
#: may be moved either way.
_RIGHT = 0.06
#: What part of a slice's step what explains it may leave; where gradients are taken some elements off, so much: what
#: elements next to each other share is less than that by far.
_LEFT, _LEFT_OF_SHIFT = 0.05, 0.3
#: How far the weights before may be from each other, of the step; by how many elements gradients may be off.
_BEFORE, _FARTHEST = 0.05, 16
_MOST, _FEWEST_WEIGHTS, _FEWEST = 1 << 26, 3, 64


class Moved(Struct, frozen=True):
    """A weight that every rank has whole, after a step and before it: of the other run, and of each rank."""

    name: str
    whole: TensorRef
    was_whole: TensorRef
    held: HeldByRanks
    was_held: HeldByRanks


def of_the_step(weights: Sequence[Moved], begun: int, now: int, ranks: tuple[int, ...]) -> Fault | None:
    """What a step did otherwise with slices of all weights, laid end to end as they are recorded.

    Raises:
        DumpError: the bytes of one cannot be read.
    """
    if len(ranks) < 2 or len(weights) < _FEWEST_WEIGHTS or sum(one.whole.numel for one in weights) > _MOST:
        return None
    if any(one.held.is_cut or one.held.ranks != ranks or one.was_held.ranks != ranks for one in weights):
        return None
    ordered = sorted(weights, key=_place)
    there, was_there = (_laid(refs) for refs in ([w.whole for w in ordered], [w.was_whole for w in ordered]))
    due = there - was_there
    long = -(-len(due) // len(ranks))
    if long < _FEWEST or long * (len(ranks) - 1) >= len(due):
        return None
    cuts = [slice(number * long, (number + 1) * long) for number in range(len(ranks))]
    sizes = [float(np.linalg.norm(due[cut])) for cut in cuts]
    if not all(sizes):
        return None
    every = []
    for number in range(len(ranks)):
        here, was_here = (
            _laid([refs.parts[number] for refs in of])
            for of in ([w.held for w in ordered], [w.was_held for w in ordered])
        )
        if len(here) != len(there) or len(was_here) != len(there) or not np.isfinite(here).all():
            return None
        if np.linalg.norm(was_here - was_there) > _BEFORE * np.linalg.norm(due):
            return None
        off = [
            at for at, (cut, size) in enumerate(zip(cuts, sizes, strict=True))
            if np.linalg.norm(here[cut] - there[cut]) > _RIGHT * size
        ]  # fmt: skip
        every.append((off, here, here - was_here))
    are_alike = all(off == every[0][0] for off, _, _ in every)
    if not are_alike:
        return _not_taken_over(every, cuts, sizes, begun, ranks)
    off, here, made = every[0]
    if not off or any(np.abs(one - here).max() > 0 for _, one, _ in every[1:]):
        return None
    if (fault := _in_another_order(here, there, cuts, sizes, off, ranks)) is not None:
        return fault
    # Where all slices are off, nothing shows that they are slices.
    return _moved_otherwise(made, due, cuts, off, begun, now, ranks) if len(off) < len(cuts) else None


def _place(one: Moved) -> tuple[str, int]:
    """Where a weight lies in its file, in which a model's are as the model has them."""
    source = one.held.parts[0].source
    return (str(source.path), source.offset) if isinstance(source, FileBytes) else ("", 0)


def _laid(refs: Sequence[TensorRef]) -> Array:
    return np.concatenate([pages.array(ref).astype(np.float64).reshape(-1) for ref in refs])


def _not_taken_over(
    every: Sequence[tuple[list[int], Array, Array]], cuts: Sequence[slice], sizes: Sequence[float], begun: int,
    ranks: tuple[int, ...],
) -> Fault | None:  # fmt: skip
    """Slices that are right on some ranks and were not moved on others."""
    stale = [
        (rank, off) for rank, (off, _, made) in zip(ranks, every, strict=True)
        if off and all(np.linalg.norm(made[cuts[at]]) <= 1e-3 * sizes[at] for at in off)
    ]  # fmt: skip
    if not stale or sum(bool(off) for off, _, _ in every) > len(stale) or any(off != stale[0][1] for _, off in stale):
        return None
    those, slices = tuple(rank for rank, _ in stale), stale[0][1]
    owners = [ranks[at] for at in slices]
    if len(slices) == len(cuts):
        return Fault(
            "stale weight", those,
            f"all weights are on {whose(those)} what they were at step {begun}, where all other ranks have the other "
            f"run's: {whose(those)} took no step, or did not receive the weights that others updated",
        )  # fmt: skip
    return Fault(
        "stale weight", those,
        f"of all weights laid end to end, the slice of {whose(owners)} is on {whose(those)} what it was at step "
        f"{begun}: stale there, the update of that slice was not taken over (ZeRO's all-gather); other ranks have it",
    )  # fmt: skip


def _in_another_order(
    here: Array, there: Array, cuts: Sequence[slice], sizes: Sequence[float], off: Sequence[int],
    ranks: tuple[int, ...],
) -> Fault | None:  # fmt: skip
    """Slices that are each the other run's of another place."""
    found = {}
    for at in off:
        for other, cut in enumerate(cuts):
            long = min(len(here[cuts[at]]), len(there[cut]))
            if other != at and np.linalg.norm(here[cuts[at]][:long] - there[cut][:long]) <= _RIGHT * sizes[other]:
                found[at] = other
                break
    if len(found) < len(off) or sorted(found.values()) != sorted(found):
        return None
    said = ", ".join(
        f"rank {ranks[other]}'s where rank {ranks[at]}'s should be" for at, other in list(found.items())[:4]
    )
    return Fault(
        "order", ranks,
        "the ranks' slices of all updated weights, laid end to end, are put together in another order on "
        f"{whose(ranks)}: {said} (ZeRO's all-gather)",
    )  # fmt: skip


def _moved_otherwise(
    made: Array, due: Array, cuts: Sequence[slice], off: Sequence[int], begun: int, now: int, ranks: tuple[int, ...]
) -> Fault | None:
    """Slices that moved otherwise on all ranks, each kept up to date by one, where all other slices are right."""
    told = {_told(made[cuts[at]], list(_shifted(due, cuts[at])), due[cuts[at]]) for at in off}
    if len(told) > 1 or None in told:
        return None
    ((kind, said),) = (one for one in told if one is not None)
    owners = tuple(ranks[at] for at in off)
    return Fault(
        kind, owners,
        f"of all weights laid end to end, the slice that {whose(owners)} keep{'s' * (len(owners) == 1)} up to date "
        f"{said.format(begun=begun, now=now)}; all other slices are the other run's (ZeRO)",
    )  # fmt: skip


def _told(own: Array, shifted: Sequence[tuple[int, Array]], due: Array) -> tuple[str, str] | None:
    size = float(np.linalg.norm(due))
    if np.linalg.norm(own) <= 1e-3 * size:
        return "stale weight", "is what it was at step {begun}: it was not updated, or its update reached no rank"
    for by, other in shifted:
        if np.linalg.norm(own - other) <= _LEFT_OF_SHIFT * size:
            way = "later" if by > 0 else "earlier"
            return "another place", (
                f"moved from step {{begun}} to {{now}} as the elements {abs(by)} places {way} did in the other run: it "
                "took the gradients of these"
            )
    times = float((own * due).sum()) / size**2
    if np.linalg.norm(own - times * due) <= _LEFT * np.linalg.norm(own) and abs(times - 1) > 0.01:
        return "another rate", (
            f"moved {times:.3g} x as far as the other run's from step {{begun}} to {{now}}: its learning rate is "
            "another, or how many steps its optimizer has counted (bias correction)"
        )
    return None


def _shifted(due: Array, cut: slice) -> Iterator[tuple[int, Array]]:
    """What other elements than those of a slice should have moved by, as many further on, or before; what lies past the
    slice as the slice's other end.
    """
    own = due[cut]
    for by in range(1, _FARTHEST + 1):
        for way in (by, -by):
            yield way, np.roll(own, -way)
