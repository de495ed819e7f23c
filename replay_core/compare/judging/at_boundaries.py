"""Outputs that are off just where a rank's stretch of a sequence begins or ends: what a local operator (a convolution,
a token shift, a window of attention, a recurrence) is to get of the neighbour's tokens is missing there.

Of a stretch that does not begin the sequence only the first k tokens are off, and all behind them are the other run's;
no token of the stretch that begins it is. A recurrence whose state is missing is off at all tokens behind, ever less as
the state decays, or at every stretch but the first, also on the rank that has the first one (zigzag).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from msgspec import Struct

from replay_core import pages
from replay_core.compare.judging import dealt
from replay_core.compare.judging.faults import Fault, whose
from replay_core.compare.judging.products import Array
from replay_core.compare.pairing.ranks import HeldByRanks, standing_for
from replay_core.records import TensorRef

#: A token is right where it is off by this part of what the worst one is off.
_RIGHT = 0.01
#: What part of a stretch is off at most, where a window or kernel of tokens says so.
_MOST_OF_IT = 0.5
#: And how many of the tokens up to the last that is off are off as well.
_MOST_OF_THEM = 0.75
#: How much less the last quarter of a stretch is off than its first, where a state decays.
_DECAYS = 0.5
#: A stretch has so many tokens at least.
_FEWEST = 4
_MOST = 1 << 24
BOUNDARY, STATE = "boundary tokens", "state lost"


def is_of_places(fault: Fault) -> bool:
    """Whether a fault is of some of the sequence's stretches, and of the ranks that have these."""
    return fault.kind in (BOUNDARY, STATE)


class _OffStretch(Struct, frozen=True):
    """Tokens that a rank has end to end, and how far each is off [length]."""

    ranks: tuple[int, ...]
    start: int
    off: Array


def explain(
    what: str, whole: TensorRef, held: HeldByRanks, tokens: int, *, has_weights: bool = True
) -> Fault | None:  # fmt: skip
    """Of an output of which each rank has some tokens, or which each made so and was put together since.

    tokens: the axis of tokens. has_weights: whether a weight makes it, of which a rank may have another.
    """
    if whole.numel > _MOST or len(whole.shape) <= tokens or not all(ref.is_readable for ref in (whole, *held.parts)):
        return None
    laid = standing_for(held) if held.is_cut else held.parts[0]
    if laid.shape != whole.shape or not laid.is_readable:
        return None
    there, here = (pages.array(ref).astype(np.float64) for ref in (whole, laid))
    if not (np.isfinite(there).all() and np.isfinite(here).all()):
        return None
    off_S = np.abs(np.moveaxis(here - there, tokens, 0)).reshape(there.shape[tokens], -1).max(1)
    if not off_S.any():
        return None
    for stretches in _dealt(held, tokens, len(off_S)):
        chunks = _chunks(held.ranks, stretches, off_S)
        if len(chunks) < 2 or min(len(one.off) for one in chunks) < _FEWEST:
            continue
        fault = _at_the_ends(what, chunks, off_S)
        for turn in (1, -1):
            fault = fault or _of_a_state(what, chunks, off_S, turn=turn, has_weights=has_weights)
        if fault is not None:
            return fault
    return None


def _dealt(held: HeldByRanks, tokens: int, count: int) -> Iterator[Sequence[Sequence[tuple[int, int]]]]:
    """How the ranks have the tokens: as they are cut; or, of what was put together since, may have had them."""
    if held.axis == tokens:
        yield held.stretches
    else:
        # Of ways that say as much, that in which every rank has its own.
        yield from sorted(dealt.ways(len(held.ranks), count), key=lambda way: -len(set(way)))


def _chunks(ranks: Sequence[int], stretches: Sequence[Sequence[tuple[int, int]]], off_S: Array) -> list[_OffStretch]:
    by_place: dict[tuple[int, int], list[int]] = {}
    for rank, own in zip(ranks, stretches, strict=True):
        joined: list[tuple[int, int]] = []
        for start, length in own:
            if joined and sum(joined[-1]) == start:
                joined[-1] = (joined[-1][0], joined[-1][1] + length)
            else:
                joined.append((start, length))
        for place in joined:
            by_place.setdefault(place, []).append(rank)
    return [
        _OffStretch(tuple(sorted(members)), start, off_S[start : start + length])
        for (start, length), members in sorted(by_place.items())
    ]  # fmt: skip


def _at_the_ends(what: str, chunks: list[_OffStretch], off_S: Array) -> Fault | None:
    is_off = [one.off > _RIGHT * off_S.max() for one in chunks]
    for words, edge, inner, turn in (
        ("first", chunks[0], list(zip(chunks[1:], is_off[1:], strict=True)), 1),
        ("last", chunks[-1], list(zip(chunks[:-1], is_off[:-1], strict=True)), -1),
    ):
        if any(off.any() for one, off in zip(chunks, is_off, strict=True) if one is edge):
            continue
        # How many tokens at the end are off, and whether all of a stretch that are off are there.
        counts = [int(off[::turn].size - off[::-turn].argmax()) if off.any() else 0 for _, off in inner]
        if any(count > _MOST_OF_IT * len(off) for count, (_, off) in zip(counts, inner, strict=True)):
            continue
        # A token that is right before one that is off is in no window that reaches over the end.
        ends = [off[::turn][:count] for count, (_, off) in zip(counts, inner, strict=True)]
        if any(one.size and (not one[0] or one.mean() < _MOST_OF_THEM) for one in ends):
            continue
        those = [(one, count) for (one, _), count in zip(inner, counts, strict=True) if count]
        if not those or (len(those) < len(inner) and len(inner) < 3):
            continue
        ranks = tuple(sorted({rank for one, _ in those for rank in one.ranks}))
        most = max(count for _, count in those)
        said = "; ".join(
            f"{_range(one.start, one.off.size, count, turn)} on {whose(one.ranks)}" for one, count in those[:4]
        )
        side, kept = ("before", "left") if turn > 0 else ("behind", "right")
        many = f"{words} {most} tokens" if most > 1 else f"{words} token"
        return Fault(
            BOUNDARY, ranks,
            f"{what} is off at the {many} of a rank's stretch of the sequence alone ({said}), and right elsewhere: "
            f"what it is to get of the tokens {side} them, which another rank holds, is missing at the boundary (the "
            f"{kept} context or halo of a convolution, a shift by a token, a window; a next token's embedding or "
            "label), where ranks share a sequence (context or sequence parallelism)",
        )  # fmt: skip
    return None


def _range(start: int, length: int, count: int, turn: int) -> str:
    first, last = (start, start + count - 1) if turn > 0 else (start + length - count, start + length - 1)
    return f"position {first}" if first == last else f"positions {first} to {last}"


def _of_a_state(what: str, chunks: list[_OffStretch], off_S: Array, *, turn: int, has_weights: bool) -> Fault | None:
    """turn: 1 where what comes before a stretch is missing, -1 where what comes behind it is. has_weights: whether a
    weight makes it, of which a rank may have another.
    """
    first, *others = chunks[::turn]
    line = _RIGHT * off_S.max()
    ends = [one.off[::turn] for one in others]
    if (first.off > line).any() or any((one[: _FEWEST // 2] <= line).any() for one in ends):
        return None
    # Ranks that have one end of the sequence right and are off elsewhere have no other weights.
    is_by_place = any(set(first.ranks) & set(one.ranks) for one in others) or len(chunks) > 2 or not has_weights
    quarters = [max(len(one) // 4, 1) for one in ends]
    decay = [float(one[-n:].mean() / max(float(one[:n].mean()), 1e-300)) for one, n in zip(ends, quarters, strict=True)]
    decays = max(decay) <= _DECAYS
    if not (decays or is_by_place):
        return None
    ranks = tuple(sorted({rank for one in others for rank in one.ranks}))
    side, end = ("before", "begins") if turn > 0 else ("behind", "ends")
    if turn < 0:
        state = "a sum of what is to come (returns, advantages), which each rank takes over its own tokens"
    elif decays:
        state = "a state (of a recurrence, a scan, a running sum), and each stretch begins with zeros"
    else:
        state = "a state, keys and values, or positions counted from the sequence's beginning"
    how = f"most next to them and ever less away from them, as of {state}" if decays else f"at all tokens: {state}"
    return Fault(
        STATE, ranks,
        f"{what} is right in the stretch that {end} the sequence (positions {first.start} to "
        f"{first.start + len(first.off) - 1}, {whose(first.ranks)}), and off in every other ({whose(ranks)}): what is "
        f"to come from the tokens {side} these is missing, {how}",
    )  # fmt: skip
