"""Numbers of samples or tokens that were normalised over each rank's own, where all are due (advantages, rewards,
returns): on each rank they are the other run's times one factor plus one constant, which differ from rank to rank.

Two numbers are free for each rank, or for each group of ranks with the same samples or tokens. Where sequences were put
together before they were recorded, who made which tokens is not known: ranks share them end to end or in zigzag.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from msgspec import Struct

from replay_core import pages
from replay_core.compare.judging import dealt
from replay_core.compare.judging.faults import Fault, whose
from replay_core.compare.judging.own_rows import are_asked, each_of
from replay_core.compare.judging.products import Array
from replay_core.compare.pairing.ranks import HeldByRanks, named, standing_for
from replay_core.records import TensorRef

#: Fewer numbers, or fewer that are not the same, are a factor and a constant by chance.
_FEWEST, _FEWEST_VALUES = 8, 3
#: What part of a difference may be left.
_LEFT = 0.02
#: How near the mean and the deviation of numbers are to 0 and 1 that were made so.
_MADE_SO, _NEAR_ONE = 1e-3, 0.1
#: Factors and constants that differ by less are one.
_ONE = 1e-3
#: Tokens of a sample have one number where they are off it by no more than this part of the greatest.
_ONE_NUMBER = 1e-5


class _NormalisedPart(Struct):
    """Numbers that were normalised together: of the other run, and of these ranks."""

    ranks: tuple[int, ...]
    there: Array
    here: Array
    times: float = 1.0
    plus: float = 0.0


def explain(what: str, whole: TensorRef, held: HeldByRanks, parted: Sequence[int]) -> Fault | None:
    """What is said of numbers [sample] or [sample, token, ...] of which ranks have some or all."""
    if len(held.ranks) < 2 or len(whole.shape) > 3 or not are_asked(whole, held, parted):
        return None
    for axis, parts in _ways(whole, held, parted):
        if len(parts) < 2:
            continue
        # Where all tokens of a sample have its one number, samples were normalised, however long each is.
        by_sample = [_of_one_number_each(part) for part in parts] if axis == "samples" else []
        for tried in (parts, [one for one in by_sample if one is not None]):
            if len(tried) == len(parts) and (fault := _told(what, axis, tried)) is not None:
                return fault
    return None


def _of_one_number_each(part: _NormalisedPart) -> _NormalisedPart | None:
    """The samples' numbers; None where tokens of a sample have several, or there is one number a sample anyway."""
    if part.there.ndim != 2 or part.here.shape != part.there.shape:
        return None
    both: list[Array] = []
    for values in (part.there, part.here):
        one_B = _of_samples(values)
        if (np.abs(values - one_B[:, None])[values != 0] > _ONE_NUMBER * np.abs(values).max(initial=0.0)).any():
            return None
        both.append(one_B)
    there, here = both
    return _NormalisedPart(part.ranks, there, here)


def of_groups(what: str, whole: TensorRef, held: HeldByRanks, groups: TensorRef | None) -> Fault | None:
    """Of numbers of samples, of each of which the other run takes the mean of its group (of one prompt): whether the
    ranks that share a group take that of their own samples of it.
    """
    if groups is None or held.axis != 0 or not are_asked(whole, held, held.ranks) or not groups.is_readable:
        return None
    if groups.numel != whole.shape[0]:
        return None
    number_B = pages.array(groups).reshape(-1)
    there_B, here_B = (_of_samples(pages.array(ref).astype(np.float64)) for ref in (whole, standing_for(held)))
    if there_B.shape != here_B.shape or not (np.isfinite(there_B).all() and np.isfinite(here_B).all()):
        return None
    size = float(np.abs(here_B).max(initial=0.0))
    parted, split = [], 0
    for number in np.unique(number_B):
        of_group = number_B == number
        if abs(there_B[of_group].mean()) > _MADE_SO * np.abs(there_B[of_group]).max() + 1e-12:
            return None  # its mean is not taken off
        for rank, stretches in zip(held.ranks, held.stretches, strict=True):
            own = np.zeros(len(number_B), np.bool_)
            for start, length in stretches:
                own[start : start + length] = True
            own &= of_group
            if not own.any() or own.sum() == of_group.sum():
                continue
            if abs(here_B[own].mean()) > _MADE_SO * size:
                return None
            split += 1
            if abs(there_B[own].mean()) > _MADE_SO * np.abs(there_B[of_group]).max() * 10:
                parted.append(rank)
    if not parted or split < 2:
        return None
    those = tuple(sorted(set(parted)))
    return Fault(
        "normalised apart", those,
        f"{what}: groups of samples (of one prompt) are shared by several ranks, and what {whose(those)} have of a "
        "group has the mean 0 by itself, where that of the whole group is 0 in the other run: each rank takes the mean "
        "of a group over its own samples of it",
    )  # fmt: skip


def _of_samples(values: Array) -> Array:
    """The number of every sample: of a number for each of its tokens, the first that is not 0."""
    rows = values.reshape(len(values), -1)
    return np.asarray(rows[np.arange(len(rows)), (rows != 0).argmax(1)])


def _ways(whole: TensorRef, held: HeldByRanks, parted: Sequence[int]) -> Iterator[tuple[str, list[_NormalisedPart]]]:
    """What may have been normalised together, and what is then each rank's own."""
    if held.is_cut:
        by_place: dict[object, list[_NormalisedPart]] = {}
        places = dict(zip(held.ranks, held.stretches, strict=True))
        for own in each_of(whole, held, parted):
            if own.here.shape != own.there.shape:
                return
            by_place.setdefault(places[own.rank], []).append(_NormalisedPart((own.rank,), own.there, own.here))
        yield (
            "samples" if held.axis == 0 else "tokens",
            [
                _NormalisedPart(tuple(rank for one in of for rank in one.ranks), of[0].there, of[0].here)
                for of in by_place.values()
            ],
        )
    laid = standing_for(held) if held.is_cut else held.parts[0]
    if len(whole.shape) < 2 or held.axis == 1 or laid.shape != whole.shape or set(parted) != set(held.ranks):
        return
    there, here = (pages.array(ref).astype(np.float64) for ref in (whole, laid))
    for way in dealt.ways(len(held.ranks), whole.shape[1]):
        parts = []
        for stretches in dict.fromkeys(way):
            places_T = np.concatenate([np.arange(at, at + long) for at, long in stretches])
            ranks = tuple(rank for rank, own in zip(held.ranks, way, strict=True) if own == stretches)
            parts.append(_NormalisedPart(ranks, there[:, places_T], here[:, places_T]))
        yield "tokens", parts


def _told(what: str, shares: str, parts: list[_NormalisedPart]) -> Fault | None:
    are_few = False
    for part in parts:
        y, h = part.there.reshape(-1), part.here.reshape(-1)
        counts = (y != 0) & np.isfinite(y) & np.isfinite(h)
        y, h = y[counts], h[counts]
        if y.size < 2:
            return None
        part.there, part.here = y, h
        are_few |= y.size < _FEWEST or len(np.unique(y)) < _FEWEST_VALUES
        part.times = float(((h - h.mean()) * (y - y.mean())).sum() / max(float(np.square(y - y.mean()).sum()), 1e-300))
        part.plus = float(h.mean() - part.times * y.mean())
        if np.linalg.norm(h - part.times * y - part.plus) > _LEFT * np.linalg.norm(h - y) or part.times <= 0:
            return None
    size = max(float(np.abs(one.here).max()) for one in parts)
    are_one = np.ptp([one.times for one in parts]) <= _ONE and np.ptp([one.plus for one in parts]) <= _ONE * size
    # One factor and one constant on all are another scale, of which no rank's own numbers are the cause.
    if are_one:
        return None
    has_own_mean = all(abs(one.here.mean()) <= _MADE_SO * max(float(one.here.std()), 1e-300) for one in parts)
    moved = any(abs(one.there.mean()) > 10 * _MADE_SO * max(float(one.there.std()), 1e-300) for one in parts)
    if are_few and not (has_own_mean and moved):
        return None
    has_one = all(abs(float(one.here.std()) - 1) <= _NEAR_ONE for one in parts)
    ranks = tuple(sorted(rank for one in parts for rank in one.ranks))
    said = "; ".join(f"{one.times:.4g} times and {one.plus:+.3g} on {whose(one.ranks)}" for one in parts[:4])
    each = "rank" if all(len(one.ranks) == 1 for one in parts) else "group of ranks"
    made = f", and have the mean 0{' and the deviation 1' if has_one else ''} on each" if has_own_mean else ""
    return Fault(
        "normalised apart", ranks,
        f"{what} of {named(ranks)} are the other run's by a factor and a constant of each {each} ({said}){made}: every "
        f"{each} normalises (whitens) by the mean and deviation of its own {shares}, where all are due (they are not "
        f"reduced over the ranks that have the other {shares})",
    )  # fmt: skip
