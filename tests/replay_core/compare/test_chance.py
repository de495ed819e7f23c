"""Noise points nowhere, and a few values along a line do not."""

from __future__ import annotations

import numpy as np

from replay_core.compare.chance import Directions, SumAlong, errors, is_along


def test_few_values_along_a_line_are_told_from_noise():
    drawn = np.random.default_rng(0)
    line = drawn.normal(size=24)
    assert not any(is_along(drawn.normal(size=24), line) for _ in range(2000))
    assert is_along(line + 0.3 * drawn.normal(size=24), line)
    assert not is_along(np.ones(1), np.ones(1))
    assert not is_along(np.ones(24), np.zeros(24))


def test_a_sum_of_few_has_a_limit_of_its_own():
    assert errors(4) < errors(16) < errors(10**6) == 4.0
    sums = SumAlong()
    sums.take(np.ones(24))
    assert not sums.is_chance(24)
    few = SumAlong()
    few.take(np.ones(8))
    assert few.is_chance(1000), "of few among many that say nothing no sum tells"


def test_a_scaled_row_is_along_itself():
    drawn = np.random.default_rng(0)
    weight, noise = drawn.normal(size=(2, 8, 64))
    for factor, is_chance in ((0.0, True), (1.0, False)):
        left = 0.01 * noise
        left[2] += factor * weight[2]
        sums = Directions((8, 64))
        sums.take(0, left.reshape(-1), weight.reshape(-1))
        assert sums.are_chance(of_lines=False) is is_chance
