"""Measures against scipy's own and by hand; a correlation that is not defined is never a number."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from replay_core.parity.correlation import measure

FLOATS = st.floats(-1e3, 1e3, allow_nan=False, width=32)


@pytest.mark.long
@given(arrays(np.float64, 20, elements=FLOATS), arrays(np.float64, 20, elements=FLOATS))
def test_correlations_are_scipys(a: np.ndarray, b: np.ndarray):
    import scipy.stats  # half a second, of which collecting the tests should be free

    assume(np.ptp(a) > 1e-2 * np.abs(a).max() and np.ptp(b) > 1e-2 * np.abs(b).max())
    found = measure(a, b)
    assert found.pearson == pytest.approx(scipy.stats.pearsonr(a, b).statistic, abs=1e-9)
    assert found.spearman == pytest.approx(scipy.stats.spearmanr(a, b).statistic, abs=1e-9)


def test_slope_and_offset_see_what_correlation_cannot():
    a = np.linspace(-1, 1, 50)
    found = measure(a, 1.25 * a + 0.079)
    assert found.pearson == pytest.approx(1.0)
    assert found.slope == pytest.approx(1.25)
    assert found.offset == pytest.approx(0.079)
    assert found.residual_rms == pytest.approx(0.0, abs=1e-12)
    assert found.std_ratio == pytest.approx(1.25)


def test_the_threshold_of_nearly_identical_is_the_callers():
    a, b = np.zeros(4), np.array([0.0, 0.05, 0.2, 0.4])
    assert measure(a, b).nearly_identical == 50.0
    assert measure(a, b, threshold=0.3).nearly_identical == 75.0


@pytest.mark.parametrize(
    ("a", "b", "says"),
    [
        ([1.0, 1.0, 1.0], [1.0, 2.0, 3.0], "A is 1 at all 3"),
        ([1.0, 2.0, 3.0], [4.0, 4.0, 4.0], "B is 4 at all 3"),
        ([0.1, 0.1 + 1e-9], [1.0, 2.0], "A is 0.1"),
        ([1.0], [2.0], "needs two tokens, there is 1"),
    ],
)
def test_an_undefined_correlation_is_said(a: list[float], b: list[float], says: str):
    found = measure(a, b)
    assert found.pearson is None
    assert found.spearman is None
    assert says in str(found.undefined)
    assert found.max_abs == pytest.approx(max(abs(x - y) for x, y in zip(a, b, strict=True)))


def test_nothing_counted_gives_no_figure_and_values_that_are_no_numbers_are_counted_apart():
    empty = measure([1.0, 2.0], [1.0, 2.0], [False, False])
    assert (empty.n, empty.max_abs, empty.undefined) == (0, None, "no token is left to compare")
    found = measure([1.0, np.nan, 3.0, 4.0], [1.0, 2.0, np.inf, 4.5])
    assert (found.n, found.nonfinite, found.max_abs) == (2, 2, 0.5)


def test_shapes_must_agree():
    with pytest.raises(ValueError, match="cannot be held against"):
        measure(np.zeros((2, 3)), np.zeros((3, 2)))
