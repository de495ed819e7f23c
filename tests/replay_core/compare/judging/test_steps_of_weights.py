"""What a weight that is off says of the optimizer's step before it."""

from __future__ import annotations

import pytest
import torch

from replay_core.compare.judging import steps_of_weights
from tests.replay_core.compare.ranks.in_memory import alike, as_ref, cut
from tests.replay_core.compare.ranks.recorded import random

WEIGHT, STEP = random(8, 6), 0.01 * random(8, 6, seed=1)
OTHER = 0.01 * random(8, 6, seed=2)


def asked(made, *, gradient_is_off: bool | None = False, before_step=1, noise=0.0):
    """made: of each of two ranks, how its rows of the weight moved."""
    due = STEP.chunk(2)
    held = cut([w + s for w, s in zip(WEIGHT.chunk(2), made, strict=True)], 0)
    before = steps_of_weights.Before(before_step, as_ref(WEIGHT), cut(WEIGHT.chunk(2), 0), gradient_is_off, noise)
    parted = [rank for rank in (0, 1) if not made[rank].equal(due[rank])]
    return steps_of_weights.of_the_step("w", 2, as_ref(WEIGHT + STEP), held, parted, before, (0, 1))


@pytest.mark.parametrize(("times", "kind"), [(0.0, "stale weight"), (2.0, "another rate"), (3.0, "another rate")])
def test_one_ranks_slice_moved_otherwise(times, kind):
    first, second = STEP.chunk(2)
    fault = asked([first, times * second])
    assert fault is not None
    assert (fault.kind, fault.ranks) == (kind, (1,))


def test_a_shard_of_a_weight_that_all_ranks_have_whole():
    made = WEIGHT + STEP
    made[4:] += 2 * STEP[4:]
    before = steps_of_weights.Before(1, as_ref(WEIGHT), alike(WEIGHT, WEIGHT), None)
    fault = steps_of_weights.of_the_step("w", 2, as_ref(WEIGHT + STEP), alike(made, made), (0, 1), before, (0, 1))
    assert fault is not None
    assert (fault.kind, fault.ranks, fault.factor) == ("another rate", (1,), pytest.approx(3.0, rel=1e-3))


@pytest.mark.parametrize(("decay", "said"), [(0.002, "0.002 of the weight itself, less towards 0"),
                                             (-0.003, "0.003 of the weight itself, more towards 0")])  # fmt: skip
@pytest.mark.parametrize("gradient_is_off", [False, None])
def test_a_decay_that_is_another_is_told_by_the_weight_itself(
    decay: float, said: str, gradient_is_off: bool | None
) -> None:
    fault = asked([step + decay * was for step, was in zip(STEP.chunk(2), WEIGHT.chunk(2), strict=True)],
                  gradient_is_off=gradient_is_off)  # fmt: skip
    assert fault is not None
    assert (fault.kind, fault.ranks) == ("weight decay", (0, 1))
    assert said in fault.sentence
    assert ("or is not applied" in fault.sentence) is (decay > 0)


def test_weights_that_are_all_alike_do_not_tell_a_decay():
    was = torch.ones(8, 6) + WEIGHT / 100
    before = steps_of_weights.Before(1, as_ref(was), alike(was, was), False)
    made = was + STEP - 0.002
    fault = steps_of_weights.of_the_step("w", 2, as_ref(was + STEP), alike(made, made), (0, 1), before, (0, 1))
    assert fault is not None
    assert fault.kind == "optimizer's state"


def test_another_state_is_said_only_where_the_gradient_is_known_and_agrees():
    made = OTHER.chunk(2)
    fault = asked(made)
    assert fault is not None
    assert (fault.kind, fault.ranks) == ("optimizer's state", (0, 1))
    assert asked(made, gradient_is_off=None) is None
    assert asked(made, gradient_is_off=True) is None
    assert asked(made, before_step=0) is None  # what other steps did is not known
    assert asked(made, noise=0.03) is None  # of bfloat16: what is next to 0 is moved either way
    assert asked(STEP.chunk(2)) is None
