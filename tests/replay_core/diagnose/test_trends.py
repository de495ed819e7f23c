"""Robust statistics over steps, against hand-computed values."""

from __future__ import annotations

import math

from hypothesis import example, given
from hypothesis import strategies as st

from replay_core.diagnose.trends import DRIFT_Z, drift, level, line, outliers, sparkline, spread

NAN = float("nan")


def test_spread_is_the_median_and_the_scaled_mad() -> None:
    middle, sigma = spread([1.0, 2.0, 3.0, 4.0, 100.0])
    assert middle == 3.0
    assert math.isclose(sigma, 1.4826)  # deviations 2, 1, 0, 1, 97: their median is 1


def test_an_outlier_lies_beyond_six_sigmas() -> None:
    values = [1.0, 2.0, 3.0, 4.0, 5.0, 2.0, 3.0, 4.0]  # median 3, MAD 1: the limit is 8.8956
    assert outliers([*values, 3 + 8.8]) == []
    assert outliers([*values, 3 + 9.0]) == [8]
    assert outliers([*values, NAN, math.inf]) == [8, 9]


def test_few_values_and_constant_ones_have_no_outlier() -> None:
    assert outliers([1.0, 1.0, 1.1, 900.0]) == []
    assert outliers([1.0] * 20 + [1.1]) == []
    assert outliers([]) == []


def test_drift_is_mann_kendalls_z() -> None:
    # n = 8, all 28 pairs rise: (28 - 1) / sqrt(8 * 7 * 21 / 18).
    assert math.isclose(drift([float(n) for n in range(8)]), 27 / math.sqrt(8 * 7 * 21 / 18))
    assert drift([float(-n) for n in range(8)]) < -DRIFT_Z
    assert drift([1.0] * 20) == 0
    assert drift([1.0, 2.0, 3.0]) == 0
    assert abs(drift([1.0, 5.0, 2.0, 4.0, 3.0, 4.5, 1.5, 3.5, 2.5])) < DRIFT_Z


def test_level_is_the_median_of_the_end() -> None:
    assert level([9.0] * 20 + [1.0] * 10) == 1.0
    assert level([1.0, 2.0, 3.0]) == 2.0


@given(st.lists(st.floats(), max_size=200), st.integers(1, 60))
@example([8.988465674311579e307, 8.98846567431158e307], 1)
def test_any_series_has_marks_and_a_sparkline(values: list[float], width: int) -> None:
    line = sparkline(values, width)
    assert len(line) == min(len(values), width)
    assert ("×" in line) == any(not math.isfinite(value) for value in values)
    assert all(0 <= mark < len(values) for mark in outliers(values))
    assert math.isfinite(drift(values))


def test_a_sparkline_of_the_largest_numbers_is_one() -> None:
    assert sparkline([1.7e308, -1.7e308, 0.0]) == "█▁▅"
    assert sparkline([5e-324, 0.0]) == "▁▁"


def test_a_sparkline_rises_with_its_series() -> None:
    assert sparkline([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]) == "▁▂▃▄▅▆▇█"
    assert sparkline([2.0, 2.0, NAN]) == "▁▁×"


def test_squares_that_no_float_holds_are_no_line() -> None:
    assert line([0.0, 1.0, 2.0], [0.0, 1e300, -1e300]) == (0.0, 0.0)
    assert line([0.0, 1.0, 2.0], [1.0, 3.0, 5.0]) == (1.0, 2.0)


def test_nothing_has_come_to_no_level() -> None:
    assert math.isnan(level([]))
