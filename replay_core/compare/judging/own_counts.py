"""Losses of ranks that are divided by each rank's own number of tokens (or rows) that count, where the number of all is
due. Of shares L_r of a loss and counts n_r, the other run's loss is then sum L_r n_r / N, and neither the sum nor the
mean of the L_r; whatever the loss is made of.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from replay_core import pages
from replay_core.compare.judging import dealt
from replay_core.compare.judging.faults import Fault, whose
from replay_core.compare.pairing.micro_batch_pair import Side
from replay_core.compare.pairing.ranks import HeldByRanks, Together

#: How near a loss is to what shares make, of their size; and how many times nearer than their sum and mean.
_NEAR, _NEARER = 1e-4, 10.0
_MOST = 1 << 24
#: Names of which the mask of a loss may be.
_MASKS = ("loss_mask", "response_mask")


class Count(Struct, frozen=True):
    """A number of each rank, of what it is, and what of the batch it has."""

    numbers: tuple[float, ...]
    words: str
    places: tuple[object, ...]


def explain(
    what: str, whole: float, losses: Sequence[float], ranks: tuple[int, ...], counts: Sequence[Count]
) -> Fault | None:
    """What the losses are of ranks that count as they do, one of each place."""
    for count in counts:
        if len(count.numbers) != len(ranks) or min(count.numbers) < 0:
            continue
        first: dict[object, int] = {}
        for number, place in enumerate(count.places):
            first.setdefault(place, number)
        at = list(first.values())
        each, numbers = [losses[one] for one in at], [count.numbers[one] for one in at]
        if any(abs(losses[number] - losses[first[place]]) > _NEAR * abs(losses[number])
               for number, place in enumerate(count.places)):  # fmt: skip
            continue
        total = sum(numbers)
        if len(at) < 2 or len(set(numbers)) < 2 or not total:
            continue
        for times, divided in ((1, ""), (len(at), ", and by the number of ranks")):
            shares = [times * one * own / total for one, own in zip(each, numbers, strict=True)]
            size = sum(map(abs, shares))
            off = abs(sum(shares) - whole)
            others = abs(sum(each) - whole), abs(sum(each) / len(each) - whole)
            if off > _NEAR * size or min(others) < _NEARER * max(off, _NEAR * size):
                continue
            said = ", ".join(f"{own:g} on rank {ranks[one]}" for one, own in zip(at[:8], numbers, strict=False))
            return Fault(
                "own token count", ranks,
                f"{what} of each of {whose(ranks)} is divided by the {count.words} of its own ({said}; {total:g} "
                f"in all){divided}, where the number of all is due: times its own number by that of all, they add up "
                "to the other run's. The number is not summed over the ranks that have the other tokens",
            )  # fmt: skip
    return None


def counts(side: Side, other: Side, together: Together, ranks: tuple[int, ...]) -> Iterator[Count]:
    """What each rank may have divided by: tokens that count by its mask, rows that have such, and numbers that were
    recorded whose sum over ranks is the other run's.
    """
    for name in _MASKS:
        laid = side.find(name)
        held = None if laid is None else together.held.get(id(laid))
        if laid is None or held is None or held.ranks != ranks or laid.numel > _MOST:
            continue
        if not all(ref.is_readable for ref in held.parts):
            continue
        masks = [pages.array(ref) != 0 for ref in held.parts]
        places = held.stretches if held.is_cut else tuple((one.tobytes(), one.shape) for one in masks)
        yield Count(tuple(float(one.sum()) for one in masks), "number of tokens that count", tuple(places))
        if masks[0].ndim == 2:
            yield Count(tuple(float(one.any(1).sum()) for one in masks), "number of rows that count", tuple(places))
            yield from _gathered(masks, held)
    for place, (_, ref) in side.tensors.items():
        numbers = _numbers(together.held.get(id(ref)), ranks)
        there = other.tensors.get(place)
        if numbers is None or there is None or there[1].numel != 1 or not there[1].is_readable:
            continue
        total = float(pages.array(there[1]).reshape(-1)[0])
        if min(numbers) > 1 and all(one == int(one) for one in numbers) and sum(numbers) == total:
            yield Count(numbers, f"{place[0]}", tuple(range(len(ranks))))


def _gathered(masks: Sequence[NDArray[np.bool_]], held: HeldByRanks) -> Iterator[Count]:
    """Of sequences that were put together before they were recorded: the tokens that each rank may have had."""
    if held.axis == 1:
        return
    for way in dealt.ways(len(masks), masks[0].shape[1]):
        places = [np.concatenate([np.arange(at, at + long) for at, long in own]) for own in way]
        numbers = tuple(float(one[:, mine].sum()) for one, mine in zip(masks, places, strict=True))
        rows = held.stretches if held.is_cut else ((),) * len(masks)
        yield Count(numbers, "number of tokens that count", tuple(zip(way, rows, strict=True)))


def _numbers(held: HeldByRanks | None, ranks: tuple[int, ...]) -> tuple[float, ...] | None:
    if held is None or held.ranks != ranks or any(ref.numel != 1 or not ref.is_readable for ref in held.parts):
        return None
    return tuple(float(pages.array(ref).reshape(-1)[0]) for ref in held.parts)
