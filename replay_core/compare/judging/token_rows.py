"""How often each rank's tokens, or each micro-batch's, count in a lookup's gradient.

A lookup gives token t the row e_t of its weight, so dL/dW_v is the sum of dL/de_t over the tokens that are the word v.
The row of a word that one rank alone was given, or one micro-batch, is made of its tokens alone: beside the other run's
it says by what factor these count. What is missing is 0 there and not in the other run; what counts as a mean over its
own n tokens, where one over all N is due, is N / n times as much over the number of such means.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from replay_core import pages
from replay_core.compare.judging.faults import Fault, whose
from replay_core.compare.judging.products import Array, products_of
from replay_core.compare.pairing.ranks import HeldByRanks, named, standing_for
from replay_core.records import TensorRef

#: Rows that say how often a group's tokens count, at least.
_FEWEST = 3
#: Of the rows of words that are missing somewhere, so many are off: what a token adds may be nothing (no label).
_MOSTLY = 0.8
#: How far a group's rows may be from one multiple, of their norm; and factors from those that a rule makes.
_MULTIPLE, _NEAR = 3e-3, 2e-3
#: Of a gradient that lacks what one micro-batch made.
LOST_MICRO_BATCH = "lost micro-batch"
#: A factor that is not 1 is off it by more.
_WEIGHED = 0.01


class Given(Struct, frozen=True):
    """The token ids [N] that a rank was given in a micro-batch."""

    rank: int
    micro: int
    ids: NDArray[np.int64]


class Group(Struct):
    """Ranks and micro-batches that are asked for together, and their words."""

    ranks: list[int]
    micros: list[int]
    words: NDArray[np.int64]
    #: By what factor its rows are the other run's; None where they are no multiple, or too few.
    factor: float | None = None


def is_lookup(whole: TensorRef, given: Sequence[Given]) -> bool:
    """Whether a weight's gradient [V, H] is, by its values, that of a lookup: it is 0 in the rows of all words that
    nobody was given, and in those alone.
    """
    if len(whole.shape) != 2 or whole.numel > 1 << 26 or not given:
        return False
    words = np.unique(np.concatenate([one.ids for one in given]))
    if not words.size or words[0] < 0 or words[-1] >= whole.shape[0] or whole.shape[0] - words.size < _FEWEST:
        return False
    has_V = np.any(pages.array(whole) != 0, axis=1)
    return bool(has_V[words].mean() > 0.5) and int(has_V.sum()) == int(has_V[words].sum())


def of_rows(what: str, whole: TensorRef, held: HeldByRanks, given: Sequence[Given]) -> Fault | None:
    """Of a lookup's gradient, whole or a slice of the words on every rank: whose own tokens have no part in it, or
    count by a factor of their own.
    """
    if len(whole.shape) != 2 or whole.numel > 1 << 26 or (held.is_cut and held.axis != 0):
        return None
    by_place: dict[tuple[int, int], list[int]] = {}
    for number in range(len(held.ranks)):
        stretches = held.stretches[number] if held.is_cut else ((0, whole.shape[0]),)
        if len(stretches) != 1 or held.parts[number].shape != (stretches[0][1], whole.shape[1]):
            return None
        by_place.setdefault(stretches[0], []).append(number)
    there_VH = pages.array(whole).astype(np.float64)
    tried: tuple[Callable[[Given], Any], ...] = (
        lambda one: one.rank, lambda one: one.micro, lambda one: (one.rank, one.micro)
    )  # fmt: skip
    for number, key in enumerate(tried):
        groups = _groups(given, key)
        if len(groups) < 2 or (number and len({one.micro for one in given}) < 2):
            continue
        for (start, length), members in by_place.items():
            here_VH = pages.array(held.parts[members[0]]).astype(np.float64)
            _weigh(groups, there_VH[start : start + length], here_VH, start)
            ranks = tuple(held.ranks[member] for member in members)
            if (fault := told(what, ranks, held.ranks, groups)) is not None:
                return fault
            if not number and (fault := _weighed(what, groups)) is not None:
                return fault
    return _without_a_micro_batch(what, there_VH, held, given)


def _without_a_micro_batch(what: str, there_VH: Array, held: HeldByRanks, given: Sequence[Given]) -> Fault | None:
    """Whether all rows of words that one micro-batch alone has are exactly 0, be they few, and all rows of words that
    it does not have are the other run's.
    """
    groups = _groups(given, lambda one: one.micro)
    laid = standing_for(held)
    if len(groups) < 2 or laid.shape != there_VH.shape or any(len(one.micros) > 1 for one in groups):
        return None
    here_VH = pages.array(laid).astype(np.float64)
    size_V = np.linalg.norm(there_VH, axis=1)
    is_right_V = np.linalg.norm(here_VH - there_VH, axis=1) <= _MULTIPLE * size_V
    lost = []
    for number, group in enumerate(groups):
        elsewhere = np.concatenate([one.words for other, one in enumerate(groups) if other != number])
        own, rest = np.setdiff1d(group.words, elsewhere), np.setdiff1d(elsewhere, group.words)
        own, rest = (of[(of >= 0) & (of < len(size_V))] for of in (own, rest))
        own, rest = own[size_V[own] > 0], rest[size_V[rest] > 0]
        if own.size and not here_VH[own].any() and rest.size >= _FEWEST and is_right_V[rest].all():
            lost.append((group, own, rest))
    if len(lost) != 1:
        return None
    ((group, own, rest),) = lost
    words = f"token{'s' * (own.size > 1)} {named(own[:4].tolist())}{' and others' * (own.size > 4)}"
    return Fault(
        LOST_MICRO_BATCH, held.ranks,
        f"micro-batch {group.micros[0]}'s contribution is missing from {what} on {whose(held.ranks)}: "
        f"the row{'s' * (own.size > 1)} of {words}, which it alone was given, {'are' if own.size > 1 else 'is'} 0, and "
        f"those of all {rest.size} that it was not given are the other run's",
    )  # fmt: skip


def _weighed(what: str, groups: list[Group]) -> Fault | None:
    """Whether every rank's tokens count by one factor, of which some are not 1, whatever made these."""
    factors = {one.factor for one in groups}
    if None in factors or any(len(one.ranks) > 1 for one in groups):
        return None
    often = [one for one in groups if one.factor is not None and abs(one.factor - 1) > _WEIGHED]
    if not often or (len(often) == len(groups) and np.ptp(_of(groups)) <= _WEIGHED * max(_of(groups))):
        return None  # one factor for all: told without tokens
    said = ", ".join(f"{one.factor:.4g} on {whose(one.ranks)}" for one in groups[:8])
    return Fault(
        "weighed", tuple(sorted(rank for one in often for rank in one.ranks)),
        f"{what} weighs the tokens of each rank by a factor of its own ({said}), by the rows of the tokens that one "
        "rank alone was given: its loss is scaled, or its share of the sum over ranks (a weight, or a norm it clips "
        "by of its own)",
    )  # fmt: skip


def _of(groups: list[Group]) -> list[float]:
    return [one.factor for one in groups if one.factor is not None]


def reduced_of_some(what: str, whole: TensorRef, held: HeldByRanks, given: Sequence[Given]) -> Fault | None:
    """Of a lookup's gradient of which every rank has its own: whether the ranks have one micro-batch's of all of them,
    and of the others each its own alone. Rows of words that only missing tokens are differ, all others agree.
    """
    given = [one for one in given if not _is_of_all(one, given)]
    ranks, micros = held.ranks, sorted({one.micro for one in given})
    if held.is_cut or len(ranks) < 2 or len(micros) < 2 or any(ref.shape != whole.shape for ref in held.parts):
        return None
    if len(whole.shape) != 2 or whole.numel > 1 << 26:
        return None
    there_VH = pages.array(whole).astype(np.float64)
    size_V = np.linalg.norm(there_VH, axis=1)
    has_V = size_V > 0
    is_off = [
        np.linalg.norm(pages.array(ref).astype(np.float64) - there_VH, axis=1) > _MULTIPLE * np.maximum(size_V, 1e-300)
        for ref in held.parts
    ]  # fmt: skip
    own = {rank: [one for one in given if one.rank == rank] for rank in ranks}
    of_rank = {rank: np.unique(np.concatenate([one.ids for one in mine])) for rank, mine in own.items() if mine}
    if len(of_rank) < len(ranks):
        return None
    groups = _alike(held)
    group_of = {rank: number for number, members in enumerate(groups) for rank in members}
    for kept in micros:
        right, wrong, missed = 0, 0, 0
        for rank, is_off_V in zip(ranks, is_off, strict=True):
            lost = [
                one.ids for other in ranks
                if group_of[other] != group_of[rank] and not np.array_equal(of_rank[other], of_rank[rank])
                for one in own[other] if one.micro != kept
            ]  # fmt: skip
            if not lost:
                return None
            is_lost_V = np.zeros(len(has_V), np.bool_)
            words = np.unique(np.concatenate(lost))
            is_lost_V[words[(words >= 0) & (words < len(has_V))]] = True
            right += int((has_V & ~is_lost_V & ~is_off_V).sum())
            wrong += int((has_V & ~is_lost_V & is_off_V).sum())
            missed += int((has_V & is_lost_V & is_off_V).sum())
        lost_words = int(has_V.sum()) * len(ranks) - right - wrong
        if not wrong and right >= _FEWEST * len(ranks) and missed >= _MOSTLY * lost_words and missed >= _FEWEST:
            which = "last" if kept == micros[-1] else "first" if kept == micros[0] else f"{kept}."
            others = "the earlier ones" if kept == micros[-1] else "all others"
            said, over, each, alone = whose(ranks), "ranks", "each rank", "their own alone"
            if len(groups) < len(ranks):
                said = f"{'; '.join(named(one) for one in groups)} (ranks that hold the same, as replicas do)"
                over, each, alone = "replicas", "each such group (replica)", "what the group's own tokens made"
            return Fault(
                "reduced of some", ranks,
                f"{what}: of the {which} micro-batch {said} each have what all ranks made, of {others} {alone}: only "
                f"the {which} micro-batch's gradients are reduced over {over}, "
                f"{each} has its own part of the rest",
            )  # fmt: skip
    return None


def _alike(held: HeldByRanks) -> list[list[int]]:
    """The ranks in groups that hold the same."""
    groups: list[tuple[TensorRef, list[int]]] = []
    for rank, ref in zip(held.ranks, held.parts, strict=True):
        for first, members in groups:
            products = products_of([first, ref])
            if products.norm({0: -1, 1: 1}) <= 1e-4 * products.norm({0: 1}):
                members.append(rank)
                break
        else:
            groups.append((ref, [rank]))
    return [members for _, members in groups]


def _is_of_all(one: Given, given: Sequence[Given]) -> bool:
    """Whether these are all that a rank was given in the step, said once more beside its micro-batches."""
    others = [other.ids for other in given if other.rank == one.rank and other is not one]
    return len(others) > 1 and np.array_equal(np.sort(one.ids), np.sort(np.concatenate(others)))


def dealt_otherwise(what: str, weight: HeldByRanks, given: Sequence[Given]) -> Fault | None:
    """Whether ranks that were given the same tokens do not hold every slice of a weight, one as often as another, which
    all of them together are to make what the weight puts out of these.
    """
    by_rank: dict[int, list[bytes]] = {}
    for one in sorted(given, key=lambda one: one.micro):
        by_rank.setdefault(one.rank, []).append(one.ids.tobytes())
    if by_rank.keys() != set(weight.ranks):
        return None
    groups: dict[tuple[bytes, ...], list[int]] = {}
    for rank in weight.ranks:
        groups.setdefault(tuple(by_rank[rank]), []).append(rank)
    slice_of = dict(zip(weight.ranks, weight.stretches, strict=True))
    every = set(weight.stretches)
    held = {members[0]: Counter(slice_of[one] for one in members) for members in groups.values()}
    odd = [members for members in groups.values() if len({held[members[0]][one] for one in every}) > 1]
    if not odd:
        return None
    slices = "; ".join(named([rank for rank in weight.ranks if slice_of[rank] == one]) for one in sorted(every))
    samples = "; ".join(named(members) for members in groups.values())
    return Fault(
        "dealt otherwise", tuple(sorted(rank for members in odd for rank in members)),
        f"{what}: ranks with the same slice of the weight are {slices}, and ranks that were given the same tokens are "
        f"{samples}: those of one tensor-parallel group, which hold each slice once, were not given the same samples "
        "(the sampler deals them by another rank's number)",
    )  # fmt: skip


def _groups(given: Sequence[Given], key: Callable[[Given], Any]) -> list[Group]:
    """Those that are asked for together, of one key each; of the same tokens (a tensor-parallel rank beside another)
    as one.
    """
    by_key: dict[Any, list[Given]] = {}
    for one in given:
        by_key.setdefault(key(one), []).append(one)
    found: list[Group] = []
    for members in by_key.values():
        words = np.unique(np.concatenate([one.ids for one in members]))
        micros = sorted({one.micro for one in members})
        ranks = sorted({one.rank for one in members})
        known = next((one for one in found if one.micros == micros and np.array_equal(one.words, words)), None)
        if known is None:
            found.append(Group(ranks, micros, words))
        else:
            known.ranks = sorted({*known.ranks, *ranks})
    return found


def _weigh(groups: Sequence[Group], there_VH: Array, here_VH: Array, start: int) -> None:
    """Say of every group by what factor the rows count that it alone makes."""
    has_V = np.any(there_VH != 0, axis=1)
    for number, group in enumerate(groups):
        others = [one.words for other, one in enumerate(groups) if other != number]
        own = np.setdiff1d(group.words, np.concatenate(others)) - start
        own = own[(own >= 0) & (own < len(has_V))]
        there, here = there_VH[own[has_V[own]]], here_VH[own[has_V[own]]]
        group.factor = None
        if len(there) < _FEWEST or not np.isfinite(here).all():
            continue
        factor = float((there * here).sum() / np.square(there).sum())
        if np.linalg.norm(here - factor * there) <= _MULTIPLE * np.linalg.norm(here):
            group.factor = factor


def told(
    what: str, ranks: tuple[int, ...], every: tuple[int, ...], groups: list[Group], *, by: str | None = None
) -> Fault | None:
    """What the factors say by which the tokens of groups count in a gradient.

    ranks: that hold this slice of the gradient, of `every` one. by: what the factors were told by; None where by the
    rows of tokens that a group alone was given.
    """
    if (kept := _of_one_end_alone(what, ranks, groups, by)) is not None:
        return kept
    for group in groups:
        lost = tuple(rank for rank in group.ranks if rank in ranks)
        others = [one.factor for one in groups if one is not group]
        if group.factor == 0 and lost and any(others):
            whom = _called(group, groups)
            alone = f"{whom} alone {'were' if len(group.ranks) > 1 and len(group.micros) != 1 else 'was'} given"
            why = (
                f"the rows of the tokens that {alone} are 0"
                if by is None
                else f"its tokens have no part in it, by {by}"
            )
            return Fault("missing", lost, f"{whom}'s contribution is missing from {what}: {why}")
    factors = [one.factor for one in groups if one.factor is not None]
    if len(factors) < len(groups) or min(factors) <= 0 or max(factors) - min(factors) < 0.01:
        return None
    said = ", ".join(f"{one.factor:.4g} on {_called(one, groups)}" for one in groups)
    # A mean over its own tokens is divided by the number of such means; or, of micro-batches, by nothing.
    micros = len({micro for one in groups for micro in one.micros})
    inverse = float(np.mean([1 / one for one in factors]))
    if any(abs(inverse * times - 1) <= _NEAR for times in {1, micros}):
        more = f" (times {micros}, for it is not divided by the micro-batches either)" if inverse < 0.9 else ""
        return Fault(
            "own token mean", every,
            f"{what} weighs each {'rank' if micros == 1 else 'micro-batch'}'s tokens by a factor of its own ({said}), "
            f"whose inverses have the mean 1{more}: each loss is the mean over its own number of tokens, not over all",
        )  # fmt: skip
    if all(len(one.micros) == micros for one in groups):
        return _counted_twice(what, groups, by)
    return _summed_again(what, every, groups, said) if len(groups) == micros else None


def _of_one_end_alone(what: str, ranks: tuple[int, ...], groups: Sequence[Group], by: str | None) -> Fault | None:
    """Whether of all micro-batches the last one alone, or the first, has a part in a gradient."""
    ordered = sorted(groups, key=lambda one: one.micros)
    if len(ordered) < 3 or any(len(one.micros) != 1 for one in ordered):
        return None
    if len({one.micros[0] for one in ordered}) < len(ordered):
        return None
    for kept, lost, which, why in (
        (ordered[-1], ordered[:-1], "last", "each backward overwrites what those before it added up (the gradient, or "
         "its buffer, is set to 0 or filled anew with every micro-batch)"),
        (ordered[0], ordered[1:], "first", "what later ones make is not added to it"),
    ):  # fmt: skip
        if kept.factor and all(one.factor == 0 for one in lost):
            told_by = "the rows of the tokens that they alone were given are 0" if by is None else by
            return Fault(
                "missing", ranks,
                f"only the {which} micro-batch's ({kept.micros[0]}) contribution is in {what} on {whose(ranks)}, and "
                f"those of micro-batches {named([one.micros[0] for one in lost])} are missing ({told_by}): the "
                f"accumulation over micro-batches is lost, {why}",
            )  # fmt: skip
    return None


def _counted_twice(what: str, groups: list[Group], by: str | None) -> Fault | None:
    """Whether what one rank's tokens make counts a whole number of times, and once what all others' do."""
    often = [one for one in groups if one.factor is not None and one.factor > 1 + _NEAR]
    if len(often) != 1 or often[0].factor is None:
        return None
    times = round(often[0].factor)
    if times < 2 or abs(often[0].factor - times) > _NEAR * times:
        return None
    if any(one.factor is None or abs(one.factor - 1) > _NEAR for one in groups if one is not often[0]):
        return None
    whom, count = whose(often[0].ranks), "twice" if times == 2 else f"{times} times"
    why = (
        f"the rows of the tokens that {whom} alone was given are {times} times the other run's, and those of all "
        "others' tokens are the other run's" if by is None else
        f"its tokens weigh {times} times what they do in the other run, and all others' as much, by {by}"
    )  # fmt: skip
    return Fault("twice", tuple(often[0].ranks), f"{whom}'s contribution is {count} in {what}: {why}")


def _summed_again(what: str, ranks: tuple[int, ...], groups: list[Group], said: str) -> Fault | None:
    """Whether each micro-batch counts as many times what the next one does as there are ranks: the sum over these is
    made after every micro-batch, of what is summed already.
    """
    ordered = [one.factor for one in sorted(groups, key=lambda one: one.micros) if one.factor is not None]
    times = [before / after for before, after in pairwise(ordered)]
    count = round(times[0])
    if count < 2 or len(ranks) % count or any(abs(one - count) > _NEAR * count for one in times):
        return None
    return Fault(
        "summed again", ranks,
        f"{what} holds each micro-batch {count} times what the next one counts ({said}): it is summed over ranks after "
        f"every micro-batch, and what was summed before is summed over {count} ranks again",
        float(count),
    )  # fmt: skip


def _called(group: Group, groups: Sequence[Group]) -> str:
    """`rank 1`, `micro-batch 0`, `micro-batch 0 of rank 1`."""
    micros = {micro for one in groups for micro in one.micros}
    if len(group.micros) == len(micros):
        return whose(group.ranks)
    called = f"micro-batch {named(group.micros)}"
    return called if len(groups) == len(micros) else f"{called} of {whose(group.ranks)}"


def in_micros(ref: TensorRef, rank: int, micros: Sequence[int]) -> Iterator[Given]:
    """What a rank was given, by micro-batch: of several that were laid together, each part of the token ids is one's.

    Raises:
        DumpError: the ids cannot be read.
    """
    parts = getattr(ref.source, "parts", ()) if len(micros) > 1 else (ref,)
    if len(parts) != len(micros):
        parts, micros = (ref,), micros[:1]
    for micro, part in zip(micros, parts, strict=True):
        yield Given(rank, micro, pages.array(part).reshape(-1).astype(np.int64))
