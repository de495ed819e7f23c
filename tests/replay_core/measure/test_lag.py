"""The lag between two rows of log-probabilities, from the numbers alone."""

from __future__ import annotations

import numpy as np
import pytest

from replay_core.measure.lag import detect_lag


@pytest.mark.parametrize("shift", [-1, 0, 1])
def test_the_lag_that_agrees_is_found(shift: int) -> None:
    rng = np.random.default_rng(0)
    rows = [rng.normal(size=n) for n in (12, 20, 7)]
    shifted = [np.roll(row + rng.normal(size=row.size) * 0.01, shift) for row in rows]
    found = detect_lag(rows, shifted)
    assert (found.lag, found.settled) == (shift, True)
    assert "detected" in found.sentence


def test_values_that_say_nothing_settle_nothing() -> None:
    constant = [np.zeros(50)]
    assert not detect_lag(constant, constant).settled
    assert not detect_lag([], []).settled
    rng = np.random.default_rng(1)
    unrelated = detect_lag([rng.normal(size=200)], [rng.normal(size=200)])
    assert (unrelated.lag, unrelated.settled) == (0, False)
    assert "not settled" in unrelated.sentence


def test_what_is_not_finite_is_left_out() -> None:
    rng = np.random.default_rng(2)
    row = rng.normal(size=40)
    other = np.roll(row, 1)
    other[3], row[9] = np.nan, np.inf
    assert detect_lag([row], [other]).lag == 1
