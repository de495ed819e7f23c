"""Whether engine and trainer agree in a run's first step and part with its updates: in all rows, or in some."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from replay_core.diagnose.flat import Array
from replay_core.diagnose.gap import DISAGREE

#: Steps that make a growth; what one set of weights comes to in them (nats per token); and how many times the first
#: step's figure the last ones have to be.
STEPS, AGREES, TIMES = 4, 0.01, 10.0
#: And how many times it where (nearly) every step has more than those before it, as chance and rounding do not make it;
#: the largest step is then past what one set of weights comes to.
ORDERLY, FEWER_TIMES = 0.7, 5.0
#: How much more the later half of the updates leaves than the earlier one, and Kendall's tau over all steps.
GROWS, ORDERED = 1.25, 0.4
#: Steps from which an engine that is never updated is told from one that samples some updates late, of which half
#: and more are after the oldest; and how much more the last third of them leaves than the middle one.
ENOUGH, STILL = 12, 1.15
#: Updates that the samples of an asynchronous run are behind, at most, where it records no versions of its weights.
OLDEST = 6
#: Of the rows that agree, the mismatch over that of those that do not; and the share of either that makes it a part.
APART, PART = 0.1, 0.1


@dataclass(frozen=True, slots=True)
class WeightsLeftBehind:
    """`first` and `last`: mean |d| of the first step and of the later half; `rows`: those of the last step that part,
    of how many; `prompts`: the same of prompts, where it is all rows of some and none of others.
    """

    first: float
    last: float
    rows: tuple[int, int]
    is_growing: bool = False
    """Whether it grows to the last step, over more steps than samples of an asynchronous run are old."""
    prompts: tuple[int, int] | None = None

    @property
    def is_in_part(self) -> bool:
        return self.rows[0] < self.rows[1]

    @property
    def where(self) -> str:
        """In words, which rows part; nothing where all of them do."""
        if self.prompts is not None:
            return f", in all rows of {self.prompts[0]} of {self.prompts[1]} prompts and in none of the others"
        return f", in a part of the rows ({self.rows[0]} of {self.rows[1]}), while the others agree"


def parting(by_step: Sequence[Array], prompts_B: Array | None) -> WeightsLeftBehind | None:
    """Of mean |d| per sample [B] by step, NaN where nothing is compared, and of the last step's prompts [B].

    Weights that the engine never gets leave none of it in the first step and ever more later. Other precision, another
    template or a temperature show in the first step as well; weights of a fixed age no longer grow once the run is
    older than they are. None where it comes to rest.
    """
    known = [each[np.isfinite(each)] for each in by_step]
    if len(known) < STEPS or any(each.size == 0 for each in known):
        return None
    first = float(known[0].mean())
    if first > AGREES:
        return None
    limit = max(DISAGREE, TIMES * first)
    off = [each > limit / 3 for each in known]
    shares = [float(each.mean()) for each in off[1:]]
    in_part = float(np.median(shares)) <= 1 - PART and all(
        mine.any() and float(each[~mine].mean()) < APART * float(each[mine].mean())
        for each, mine in zip(known[1:], off[1:], strict=True)
        if not mine.all()
    )
    in_part = in_part and max(shares) < 1 and min(shares) >= PART
    means = [first, *(float(each[mine].mean() if in_part else each.mean())
                      for each, mine in zip(known[1:], off[1:], strict=True))]  # fmt: skip
    later = means[1:]
    half = len(later) // 2
    early, late = float(np.median(later[: max(half, 1)])), float(np.median(later[half:]))
    signs = [float(np.sign(b - a)) for a, b in combinations(means, 2)]
    order = float(np.mean(signs))
    orderly = not in_part and order >= ORDERLY and late >= FEWER_TIMES * first and max(later) > DISAGREE
    if not (late >= limit or orderly) or late < GROWS * early or order < ORDERED or min(later) < 2 * first:
        return None
    if comes_to_rest(later):
        return None
    growing = len(known) >= ENOUGH
    if not in_part:
        return WeightsLeftBehind(first, late, (known[-1].size, known[-1].size), growing)
    return WeightsLeftBehind(
        first, late, (int(off[-1].sum()), known[-1].size), growing, _of_prompts(by_step[-1], limit / 3, prompts_B)
    )


def comes_to_rest(later: Sequence[float]) -> bool:
    """Whether the last third of the steps after the first leaves no more than the middle third, and what comes after
    the oldest samples that asynchronous runs take no more than what came just before: what weights of a fixed age come
    to. Fewer than six steps do not tell.
    """
    third = len(later) // 3
    if third < 2:
        return False
    if len(later) >= OLDEST + 3 and np.median(later[OLDEST:]) > GROWS * np.median(later[OLDEST - 3 : OLDEST]):
        return False
    return float(np.median(later[-third:])) <= STILL * float(np.median(later[third:-third]))


def _of_prompts(by_sample_B: Array, limit: float, prompts_B: Array | None) -> tuple[int, int] | None:
    if prompts_B is None:
        return None
    heard_B = np.isfinite(by_sample_B)
    off, fine = set(prompts_B[heard_B & (by_sample_B > limit)]), set(prompts_B[heard_B & (by_sample_B <= limit)])
    return None if off & fine else (len(off), len(off | fine))
