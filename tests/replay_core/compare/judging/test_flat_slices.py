"""Slices of all weights laid end to end, each of which one rank keeps up to date."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from replay_core.compare.judging.faults import Fault
from replay_core.compare.judging.flat_slices import Moved, of_the_step
from tests.replay_core.compare.ranks.in_memory import alike, as_ref
from tests.replay_core.compare.ranks.recorded import random

SIZES = (300, 36, 500, 7, 261)
BEFORE = random(sum(SIZES))
#: An adaptive optimizer's first step: every element as far, one way or the other.
STEP = 0.01 * random(sum(SIZES), seed=1).sign() * (1 - 0.1 * random(sum(SIZES), seed=2).abs())
AFTER, SLICE = BEFORE + STEP, sum(SIZES) // 4


def asked(*ranks: Tensor) -> Fault | None:
    """ranks: what each has of all weights after the step."""
    parts = [one.split(SIZES) for one in ranks]
    weights = [
        Moved(
            f"w{number}", as_ref(AFTER.split(SIZES)[number]), as_ref(was), alike(*(one[number] for one in parts)),
            alike(*[was] * len(ranks)),
        )
        for number, was in enumerate(BEFORE.split(SIZES))
    ]  # fmt: skip
    return of_the_step(weights, 0, 1, tuple(range(len(ranks))))


def changed(number: int, moved: Tensor) -> Tensor:
    """The weights, of which one slice moved otherwise."""
    made = AFTER.clone()
    here = slice(number * SLICE, (number + 1) * SLICE)
    made[here] = BEFORE[here] + moved
    return made


OWN = STEP[2 * SLICE : 3 * SLICE]
CASES = {
    "other gradients": (OWN.roll(3), "another place"),
    "another rate": (0.6 * OWN, "another rate"),
    "not moved": (0 * OWN, "stale weight"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_slice_that_its_rank_moved_otherwise(case: str) -> None:
    moved, kind = CASES[case]
    fault = asked(*[changed(2, moved)] * 4)
    assert fault is not None
    assert (fault.kind, fault.ranks) == (kind, (2,))


def test_a_slice_that_one_rank_did_not_take_over() -> None:
    fault = asked(changed(1, 0 * OWN), AFTER, AFTER, AFTER)
    assert fault is not None
    assert (fault.kind, fault.ranks) == ("stale weight", (0,))
    assert "the slice of rank 1 is on rank 0 what it was at step 0" in fault.sentence


def test_slices_in_another_order() -> None:
    first, second, *rest = AFTER.split(SLICE)
    fault = asked(*[torch.cat([second, first, *rest])] * 4)
    assert fault is not None
    assert (fault.kind, fault.ranks) == ("order", (0, 1, 2, 3))


def test_what_no_slice_explains_is_no_slices() -> None:
    one = BEFORE + STEP.split(SLICE)[0].mean() * random(len(BEFORE), seed=9)
    assert asked(*[AFTER] * 4) is None
    assert asked(*[one] * 4) is None
    assert asked(*[changed(2, 0.01 * random(SLICE, seed=8))] * 4) is None  # which state it is nobody knows
    half = AFTER.clone()
    half[SLICE // 2 : SLICE + SLICE // 2] = BEFORE[SLICE // 2 : SLICE + SLICE // 2]
    assert asked(*[half] * 4) is None  # no rank's slice
