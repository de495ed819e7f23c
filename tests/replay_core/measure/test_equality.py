"""Equality across types: what a conversion would hide."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay_core.measure.equality import unequal

INTEGERS = st.integers(-(2**63), 2**63 - 1)


@given(st.lists(st.tuples(INTEGERS, st.floats(width=64)), min_size=1, max_size=20))
def test_an_integer_equals_a_float_as_python_says(pairs: list[tuple[int, float]]):
    whole = np.array([[one for one, _ in pairs]], dtype=np.int64)
    real = np.array([[other for _, other in pairs]])
    expected = [[one != other for one, other in pairs]]
    assert unequal(whole, real).tolist() == expected
    assert unequal(real, whole).tolist() == expected


@pytest.mark.parametrize(("whole", "real", "differs"), [
    (2**53 + 1, 2.0**53, True), (2**53, 2.0**53, False), (2**63 - 1, 2.0**63, True), (-(2**63), -(2.0**63), False),
    (3, 3.5, True), (0, np.nan, True), (0, np.inf, True), (0, -0.0, False),
])  # fmt: skip
def test_no_integer_is_rounded_to_be_compared(whole: int, real: float, differs: bool):
    assert unequal(np.array([[whole]]), np.array([[real]])).item() is differs


def test_unsigned_and_half_floats():
    assert unequal(np.array([[2**64 - 1]], dtype=np.uint64), np.array([[2.0**64]])).item() is True
    halves = np.array([[256, 257]]).astype(ml_dtypes.bfloat16)
    assert unequal(np.array([[256, 257]]), halves).tolist() == [[False, True]]
