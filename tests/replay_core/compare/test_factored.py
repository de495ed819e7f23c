"""Weights after steps of an optimizer that keeps a gradient's squares by rows and columns, whose gradients agree."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from replay_core.compare.updates import _WeightsAfter
from tests.replay_core.compare.ranks.recorded import random

WEIGHT, RATE, UNIT = random(24, 16), 0.01, 2.0**-24
GRADIENT = random(24, 16, seed=1)
#: The other run's, of which rounding left something else.
OTHER = GRADIENT * (1 + 0.01 * random(24, 16, seed=2))


def by_lines(gradient: Tensor, rows: Tensor | None = None) -> Tensor:
    squares = gradient.square() if rows is None else rows
    rows, columns = squares.mean(1, keepdim=True), squares.mean(0, keepdim=True)
    return gradient / (rows * columns / rows.mean()).sqrt()


def weights_after(right: Tensor, other: Tensor, before: Tensor | None = None) -> _WeightsAfter:
    """right, other: the two runs' steps."""
    after = [(WEIGHT - step).reshape(-1).numpy() for step in (right, other)]
    gradients = [one.reshape(-1).numpy() for one in (GRADIENT, OTHER)]
    known = None if before is None else [before.reshape(-1).numpy()] * 2
    return _WeightsAfter(after, [gradients], known, UNIT, tuple(WEIGHT.shape), lambda: 0.0, 0, None)


def test_a_first_step_by_rows_and_columns_is_told() -> None:
    found = weights_after(RATE * by_lines(GRADIENT), RATE * by_lines(OTHER))._as_first_factored()
    assert found is not None
    assert "a first step of 0.01 makes" in found[0]


#: What the other run did instead.
WRONG: dict[str, Callable[[], Tensor]] = {
    "rows of a slice alone": lambda: torch.cat([by_lines(part) for part in OTHER.chunk(2)]),
    "another rate": lambda: 1.2 * by_lines(OTHER),
    "not at all": lambda: 0 * OTHER,
    "the other way": lambda: -by_lines(OTHER),
}


@pytest.mark.parametrize("case", WRONG)
def test_another_first_step_is_not(case: str) -> None:
    assert weights_after(RATE * by_lines(GRADIENT), RATE * WRONG[case]())._as_first_factored() is None


def test_weights_that_are_off_far_more_than_gradients_are_no_first_step() -> None:
    """Of gradients that are apart by rounding alone some rate makes anything."""
    assert weights_after(400 * by_lines(GRADIENT), 400 * by_lines(OTHER))._as_first_factored() is None


def test_a_later_step_is_told_whatever_squares_were_kept() -> None:
    kept = 0.6 * GRADIENT.square() + 0.4 * random(24, 16, seed=3).square()
    steps = [RATE * by_lines(gradient, kept) for gradient in (GRADIENT, OTHER)]
    assert weights_after(steps[0], steps[1], WEIGHT)._as_factored() is not None
    assert weights_after(steps[0], 1.01 * steps[1], WEIGHT)._as_factored() is None
    assert weights_after(steps[0], 1.1 * steps[1], WEIGHT)._as_factored() is None
    halves = torch.cat([by_lines(part, own) for part, own in zip(OTHER.chunk(2), kept.chunk(2), strict=True)])
    assert weights_after(steps[0], RATE * halves, WEIGHT)._as_factored() is None


def test_a_step_that_squares_of_elements_made_is_not_of_lines() -> None:
    steps = [RATE * gradient / (gradient.square() + 0.1).sqrt() for gradient in (GRADIENT, OTHER)]
    assert weights_after(steps[0], steps[1], WEIGHT)._as_factored() is None
