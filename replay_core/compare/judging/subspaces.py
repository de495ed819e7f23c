"""What a difference is made of, where its parts were not recorded: the directions that a rank's slice of a weight, or
an expert's tokens, can reach and nothing else can.

A part of a sum over ranks is `x_r W_r`: whatever its inputs were, it lies in what the columns of the rank's slice of
the weight span, which are fewer than the hidden size. A weight's gradient `g^T x` lies in what its inputs span: with
fewer tokens than the hidden size it says which tokens an expert was given.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from replay_core import pages
from replay_core.compare.judging.faults import Fault, whose
from replay_core.compare.judging.products import Array
from replay_core.compare.pairing.ranks import HeldByRanks
from replay_core.records import TensorRef

#: What part of itself a difference may have outside the directions that explain it; and must have outside all others.
_INSIDE, _OUTSIDE = 5e-3, 0.2
#: A tensor spans what it has above this part of its largest singular value.
_SPANNED = 1e-5
#: Directions of a larger share of the hidden size explain nothing: of a slice of a weight; of an expert's tokens, which
#: lie in each other's or do not.
_MOST_OF, _MOST_OF_TOKENS = 0.75, 0.96
#: More ranks are not held each against each; and half the rows that tell blocks of channels from each other, at least.
_EACH, _FEWEST_ROWS = 16, 4
#: Elements that are decomposed.
_MOST = 1 << 22


def through_a_slice(what: str, off_NH: Array, name: str, held: HeldByRanks) -> Fault | None:
    """The rank through whose slice of a weight all of a difference came, which is the sum over the ranks otherwise.

    what: the tensor that is off, by off_NH at each token. name, held: a weight of which every rank has a slice.
    """
    hidden = off_NH.shape[1]
    if not held.is_cut or held.axis is None or len(held.parts[0].shape) != 2 or off_NH.size > _MOST:
        return None
    inner = held.axis
    if any(ref.shape[1 - inner] != hidden or ref.shape[inner] > _MOST_OF * hidden for ref in held.parts):
        return None
    if off_NH.shape[0] < 2 * hidden // len(held.parts):
        return None
    left = []
    for ref in held.parts:
        weight = pages.array(ref).astype(np.float64)
        left.append(_outside(off_NH, _directions(weight.T if inner == 1 else weight)))
    order = sorted(range(len(left)), key=left.__getitem__)
    if left[order[0]] > _INSIDE or left[order[1]] < _OUTSIDE:
        return None
    rank = held.ranks[order[0]]
    return Fault(
        "contribution", (rank,),
        f"rank {rank}'s contribution to {what} through its slice of {name.removeprefix('param.')} is missing, there "
        "twice, or made of other inputs: all that is off lies in what that slice alone can reach",
    )  # fmt: skip


def of_a_slices_channels(what: str, off_NH: Array, name: str, held: HeldByRanks) -> Fault | None:
    """The rank whose rows of a weight [out, in] make all channels that are off, and no others: of a weight that is
    sharded along its rows and gathered before it is used. Where every rank recorded the whole, gathered, its rows are
    those that `torch.chunk` hands out, as FSDP does.

    what: the weight's own output, or the weight itself, by off_NH in every channel H.
    """
    count = off_NH.shape[1]
    if held.is_cut:
        stretches = held.stretches if held.axis == 0 else ()
    else:
        rows = -(-count // len(held.ranks))
        stretches = tuple(((start, min(rows, count - start)),) for start in range(0, count, rows))
    if len(held.ranks) < 2 or len(stretches) != len(held.ranks) or sum(n for one in stretches for _, n in one) != count:
        return None
    size_H = np.abs(off_NH).max(0, initial=0.0)
    is_off_H = size_H > _INSIDE * size_H.max(initial=0.0)
    for rank, own in zip(held.ranks, stretches, strict=True):
        is_own_H = np.zeros(count, bool)
        for start, length in own:
            is_own_H[start : start + length] = True
        if is_off_H[is_own_H].mean() > _MOST_OF and not is_off_H[~is_own_H].any():
            called = name.removeprefix("param.")
            shard = f"slice of {called}" if held.is_cut else f"shard of {called} (FSDP cuts rows in turn)"
            weight = held.parts[0]
            if not held.is_cut and weight.shape[0] == count and not pages.array(weight)[is_own_H].any():
                return Fault(
                    "zeros", (rank,),
                    f"{what} is off in what rank {rank}'s {shard} makes, and nowhere else: that one is all 0, as if it "
                    "was never loaded",
                    0.0,
                )  # fmt: skip
            return Fault(
                "apart", (rank,),
                f"{what} is off in what rank {rank}'s {shard} makes, and nowhere else: that one is another's or stale",
            )  # fmt: skip
    return None


def of_other_shards(what: str, here_NH: Array, there_NH: Array, ranks: tuple[int, ...]) -> Fault | None:
    """Whether channels that one rank's rows of a weight make (as `torch.chunk` hands them out) are, but for one
    constant each (a bias of their own), those that another rank's make in the other run: shards that stand in another
    order, or one of them twice.
    """
    count = here_NH.shape[1]
    rows = -(-count // len(ranks))
    if not 2 <= len(ranks) <= _EACH or count % len(ranks) or rows < 2 or len(here_NH) < 2 * _FEWEST_ROWS:
        return None
    if here_NH.size > _MOST:
        return None
    here, there = (one - one.mean(0) for one in (here_NH, there_NH))
    blocks = [slice(number * rows, (number + 1) * rows) for number in range(len(ranks))]
    stands: dict[int, int] = {}
    for number, own in enumerate(blocks):
        size = np.linalg.norm(there[:, own])
        if np.linalg.norm(here[:, own] - there[:, own]) <= _INSIDE * size:
            continue
        of = [other for other, block in enumerate(blocks) if other != number and there[:, block].any() and
              np.linalg.norm(here[:, own] - there[:, block]) <= _INSIDE * np.linalg.norm(there[:, block])]  # fmt: skip
        if len(of) != 1:
            return None
        stands[number] = of[0]
    if not stands:
        return None
    said = ", ".join(f"rank {ranks[number]} has rank {ranks[other]}'s" for number, other in stands.items())
    if sorted(stands) == sorted(stands.values()):
        return Fault(
            "order", tuple(ranks[number] for number in stands),
            f"{what}: the shards of its weight's rows stand in another order: {said}",
        )  # fmt: skip
    twice = tuple(sorted({ranks[number] for pair in stands.items() for number in pair}))
    lost = tuple(ranks[number] for number in stands if number not in stands.values())
    return Fault(
        "held twice", twice,
        f"{what}: {whose(twice)} have one shard of its weight's rows ({said}): what is {whose(lost)}'s is on no rank",
    )  # fmt: skip


def added_by_each(what: str, off_NH: Array, name: str, held: HeldByRanks) -> Fault | None:
    """Whether a difference is a vector that every rank holds, once more for each rank but one: a bias that each adds to
    its part before the sum.
    """
    ref = held.parts[0]
    if held.is_cut or ref.shape != off_NH.shape[1:] or len(held.parts) < 2:
        return None
    bias_H = pages.array(ref).astype(np.float64)
    more_NH = np.broadcast_to((len(held.parts) - 1) * bias_H, off_NH.shape)
    if not bias_H.any() or np.linalg.norm(off_NH - more_NH) > 10 * _INSIDE * np.linalg.norm(more_NH):
        return None
    return Fault(
        "too much", held.ranks,
        f"{name.removeprefix('param.')} is in {what} {len(held.parts)} times: each of {whose(held.ranks)} adds it to "
        "its part before the sum",
        float(len(held.parts)),
    )  # fmt: skip


def other_tokens(
    what: str, own: tuple[TensorRef, TensorRef], others: Iterator[tuple[str, TensorRef, tuple[int, ...]]],
    ranks: tuple[int, ...],
) -> Fault | None:  # fmt: skip
    """The expert whose tokens an expert's gradient is made of, where they are not its own.

    own: the gradient as the ranks have it, and as the other run has it. others: the other run's of the other experts,
    with their names and the ranks whose they are.
    """
    mine = _matrix(own[0])
    right = _matrix(own[1])
    if mine is None or right is None:
        return None
    for name, ref, of in others:
        other = _matrix(ref)
        if other is None or other.shape != mine.shape:
            continue
        for axis in (1, 0):
            ours, candidate, theirs = (one if axis else one.T for one in (mine, other, right))
            if _spans_alike(ours, candidate) and _spans_alike(ours, theirs) is False:
                called = name.removeprefix("grad.")
                those = tuple(sorted({*ranks, *of}))
                theirs_too = f", which is {whose(of)}'s" if of and of != ranks else ""
                return Fault(
                    "other tokens", those,
                    f"{what} on {whose(ranks)} is made of the tokens that the other run gave to {called}{theirs_too}: "
                    "the router's choices are sent to another expert",
                )  # fmt: skip
    return None


def _matrix(ref: TensorRef) -> Array | None:
    if len(ref.shape) != 2 or not ref.is_readable or not 0 < ref.numel <= _MOST:
        return None
    values = pages.array(ref).astype(np.float64)
    return values if np.isfinite(values).all() and values.any() else None


def _directions(rows: Array) -> Array:
    """An orthonormal basis of what rows span: [directions, width]."""
    _, sizes, basis = np.linalg.svd(rows, full_matrices=False)
    return np.asarray(basis[sizes > _SPANNED * sizes.max(initial=0.0)])


def _outside(rows: Array, basis: Array) -> float:
    """What part of rows lies outside of what a basis spans."""
    size = float(np.linalg.norm(rows))
    return float(np.linalg.norm(rows - (rows @ basis.T) @ basis)) / size if size else 1.0


def _spans_alike(one: Array, other: Array) -> bool | None:
    """Whether the rows of two matrices span the same; None where one spans so much that it says nothing."""
    a, b = _directions(one), _directions(other)
    if max(len(a), len(b)) > _MOST_OF_TOKENS * one.shape[1] or min(len(a), len(b)) < 2:
        return None
    left = _outside(one, b), _outside(other, a)
    return True if max(left) <= _INSIDE else False if max(left) >= 10 * _INSIDE else None
