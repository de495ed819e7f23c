"""Two runs of as many ranks that number them otherwise (data-parallel ranks first, or tensor-parallel ones): which rank
of one has the place of which of the other, by the tokens each was given and the weights it holds.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

from replay_core import pages
from replay_core.compare.pairing.micro_batch_pair import MicroBatchPair, Side
from replay_core.compare.pairing.ranks import OF_ALL_SAMPLES, ids_of, same_values
from replay_core.errors import DumpError
from replay_core.records import RecordKey, TensorRef

#: Values off by this part of their norm are another slice's.
_NEAR = 0.1
#: Tensors of a rank that are looked at, and elements of the largest.
_LOOKED_AT, _MOST = 8, 1 << 22

#: rank -> what it recorded, of one micro-batch or of the whole step.
Ranked = dict[int, Side]


def in_one_numbering(micro_pairs: list[MicroBatchPair]) -> list[MicroBatchPair]:
    """The pairs of a step, of ranks that hold the same slices of the same samples in the two runs. Every side is
    loaded.
    """
    steps: dict[tuple[Any, ...], list[MicroBatchPair]] = defaultdict(list)
    for micro_pair in micro_pairs:
        steps[micro_pair.key.step, micro_pair.key.role].append(micro_pair)
    found: list[MicroBatchPair] = []
    for group in steps.values():
        by_micro: dict[int | None, list[MicroBatchPair]] = defaultdict(list)
        for micro_pair in group:
            by_micro[micro_pair.key.micro].append(micro_pair)
        micros = {micro: _ranked(pairs) for micro, pairs in by_micro.items()}
        known = {micro: sides for micro, sides in micros.items() if sides is not None}
        to_b = _to_b(known) if len(known) == len(micros) else None
        if to_b is None:
            found += group
            continue
        for pairs in by_micro.values():
            b = {one.b.records[0].key.rank: one.b for one in pairs}
            for one in pairs:
                key, rank = one.key, one.a.records[0].key.rank
                made = MicroBatchPair(RecordKey(key.step, key.micro, rank, key.role), one.a, b[to_b[rank or 0]])
                if to_b[rank or 0] != rank:
                    why = "has its samples and its slices of the weights"
                    made.notes.append(f"{made.where}: rank {to_b[rank or 0]} of b {why}; the two are compared")
                found.append(made)
    return found


def _ranked(pairs: list[MicroBatchPair]) -> tuple[Ranked, Ranked] | None:
    """The ranks of either run; None where they are not the same numbers, one in each pair."""
    if not all(one.a.records and one.b.records for one in pairs):
        return None
    a, b = (
        {side.records[0].key.rank: side for side in sides} for sides in zip(*((x.a, x.b) for x in pairs), strict=True)
    )
    if None in a or a.keys() != b.keys() or len(a) < len(pairs) or len(a) < 2:
        return None
    return {rank: side for rank, side in a.items() if rank is not None}, {
        rank: side for rank, side in b.items() if rank is not None
    }


def _to_b(micros: dict[int | None, tuple[Ranked, Ranked]]) -> dict[int, int] | None:
    """The number in b of every rank of a; None where it is its own, or nothing shows another."""
    for a, b in micros.values():
        ids_a, ids_b = ({rank: ids_of(side) for rank, side in sides.items()} for sides in (a, b))
        if any(ref is None for ref in (*ids_a.values(), *ids_b.values())):
            continue
        told = _by_tokens(ids_a, ids_b)
        if told is None or all(rank == other for rank, other in told.items()):
            return None
        if any(sides[0].keys() != told.keys() for sides in micros.values()):
            return None
        return told if _holds_the_same(told, micros) else None
    return None


def _by_tokens(a: dict[int, TensorRef | None], b: dict[int, TensorRef | None]) -> dict[int, int] | None:
    """Ranks of the same tokens, in the turn of their numbers among those that share these."""
    left, told = dict(b), dict[int, int]()
    for rank, ref in sorted(a.items()):
        other = next((one for one in sorted(left) if _alike(ref, left[one])), None)
        if other is None:
            return None
        told[rank] = other
        del left[other]
    return told


def _alike(one: TensorRef | None, other: TensorRef | None) -> bool:
    return one is not None and other is not None and same_values(one, other)


def _holds_the_same(told: dict[int, int], micros: dict[int | None, tuple[Ranked, Ranked]]) -> bool:
    """Whether weights or gradients are another slice's where rank faces rank, and not where these do."""
    better = 0
    for a, b in micros.values():
        for rank, other in told.items():
            if rank == other:
                continue
            places = [place for place in a[rank].tensors if place[1] in OF_ALL_SAMPLES]
            looked = 0
            for place in places:
                if looked == _LOOKED_AT or place not in b[rank].tensors or place not in b[other].tensors:
                    continue
                mine, same, its = (side.tensors[place][1] for side in (a[rank], b[rank], b[other]))
                if not mine.shape or mine.numel > _MOST:
                    continue
                looked += 1
                better += int(_is_near(mine, its)) - int(_is_near(mine, same))
    return better > 0


def _is_near(one: TensorRef, other: TensorRef) -> bool:
    if one.shape != other.shape or not one.is_readable or not other.is_readable or one.is_text:
        return False
    try:
        x, y = pages.array(one).astype(np.float64), pages.array(other).astype(np.float64)
    except DumpError:
        return False
    return bool(np.linalg.norm(x - y) <= _NEAR * np.linalg.norm(x))
