"""Weights of which the ranks of two runs hold other slices each, so that no rank has any of them whole: how large they
are, and how the slices lie, by the values alone. Of all ways in which either run's may lie, those are taken that make
one weight of both.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from replay_core import pages
from replay_core.compare.pairing.micro_batch_pair import Side
from replay_core.compare.pairing.ranks import OF_ALL_SAMPLES, standing_for, ways, without_numbers
from replay_core.compare.pairing.whole_shapes import OF_ITS_OWN
from replay_core.errors import DumpError
from replay_core.records import TensorRef

Place = tuple[str, str]
#: Of either run, the ranks that have the same tokens.
Alike = tuple[list[list[int]], list[list[int]]]

#: Elements that are read, weights of one name that are asked, and what part of its norm two that are one are off.
_MOST, _ASKED, _ONE = 1 << 24, 4, 0.02


class SlicesOfBoth:
    """Asks of each name of weights once. ranks: of the run whose parts are to be laid; others: the other run's; alike:
    of either, the ranks that have the same tokens.
    """

    def __init__(self, ranks: dict[int, Side], others: dict[int, Side], alike: Alike) -> None:
        self._sides, self._alike = (ranks, others), alike
        self._shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]] | None] = {}
        #: By name without numbers, and how many ranks have it: the way in which slices lie.
        self.turns: dict[tuple[str, int], tuple[int, ...]] = {}

    def of(self, place: Place) -> tuple[int, ...] | None:
        """The shape of a weight or gradient as a whole; None where its values do not tell."""
        name, stage = place
        if stage not in OF_ALL_SAMPLES or not name.startswith(("grad.", "param.")):
            return None
        pattern = without_numbers(name)
        if pattern not in self._shapes:
            self._shapes[pattern] = self._told(pattern)
        known = self._shapes[pattern]
        own = next(side.tensors[place][1].shape for side in self._sides[0].values() if place in side.tensors)
        return known[1] if known is not None and known[0] == own else None

    def _told(self, pattern: str) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        places = {place for side in self._sides[0].values() for place in side.tensors if place[1] == "param"}
        for place in sorted(one for one in places if without_numbers(one[0]) == pattern)[:_ASKED]:
            both = [
                {rank: side.tensors[place][1] for rank, side in ranks.items() if place in side.tensors}
                for ranks in self._sides
            ]  # fmt: skip
            try:
                found = _laid(both[0], both[1], self._alike)
            except DumpError:
                continue
            if found is not None:
                shape, turn = found
                own = next(iter(both[0].values())).shape
                self.turns[pattern, len(both[0])] = turn
                return own, shape
        return None


def _laid(
    one: dict[int, TensorRef], other: dict[int, TensorRef], alike: Alike
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:  # fmt: skip
    """The shape of a weight that slices of both runs make, and the way in which those of the first lie."""
    slices = [_slices(refs) for refs in (one, other)]
    if min(slices) < 1 or slices[0] < 2:
        return None
    own, theirs = (next(iter(refs.values())) for refs in (one, other))
    if len(own.shape) != len(theirs.shape) or own.numel * slices[0] != theirs.numel * slices[1]:
        return None
    found: list[tuple[float, tuple[int, ...], tuple[int, ...]]] = []
    for shape in _shapes(own.shape, slices[0]):
        there = [_values(standing_for(held)) for held in ways(other, shape, alike[1]).values()]
        for turn, held in ways(one, shape, alike[0]).items():
            here = _values(standing_for(held))
            size = float(np.linalg.norm(here)) or 1.0
            left = min((float(np.linalg.norm(here - values)) / size for values in there), default=np.inf)
            found.append((left, shape, turn))
    # Of two that are as near the same slices face each other in both, and the first is as good.
    nearest = min(found, key=lambda one: one[0], default=None)
    return None if nearest is None or nearest[0] > _ONE else nearest[1:]


def _values(ref: TensorRef) -> NDArray[np.float64]:
    return pages.array(ref).astype(np.float64)


def _slices(refs: dict[int, TensorRef]) -> int:
    """Of how many slices ranks have one each, whose copies, if any, are on ranks so many apart; 0 where they have not,
    or cannot be read.
    """
    parts = list(refs.values())
    if not parts or any(ref.shape != parts[0].shape or not ref.is_readable or ref.is_text for ref in parts):
        return 0
    if parts[0].numel * len(parts) > _MOST or not parts[0].dtype.startswith(("float", "bfloat")):
        return 0
    different: list[NDArray[np.float64]] = []
    for number, ref in enumerate(parts):
        values = _values(ref)
        size = float(np.linalg.norm(values))
        near = [at for at, known in enumerate(different) if np.linalg.norm(values - known) <= OF_ITS_OWN * size]
        if not near:
            if len(different) < number:
                return 0
            different.append(values)
        elif near != [number % len(different)]:
            return 0
    return len(different) if len(parts) % len(different) == 0 else 0


def _shapes(own: tuple[int, ...], slices: int) -> Iterator[tuple[int, ...]]:
    """The shapes that so many slices may make, along one axis or two."""
    for axis in range(len(own)):
        yield (*own[:axis], own[axis] * slices, *own[axis + 1 :])
    for rows in range(2, slices):
        if slices % rows:
            continue
        for first in range(len(own)):
            for second in range(first + 1, len(own)):
                made = list(own)
                made[first] *= rows
                made[second] *= slices // rows
                yield tuple(made)
