"""Figures of a pair against whole-tensor float64 numpy and torch."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replay_core.measure.figures import PairFigures
from replay_core.measure.pair import figures

DTYPES = (np.float16, np.float32, np.float64, ml_dtypes.bfloat16)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int]:
    """(a, b, rows of one chunk): noise, equal parts, and values that are not finite."""
    rows, columns = draw(st.integers(1, 12)), draw(st.integers(1, 9))
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))
    scale = draw(st.sampled_from([1e-8, 1.0, 1e4]))
    a = rng.normal(size=(rows, columns)) * scale
    b = a + rng.normal(size=a.shape) * scale * draw(st.sampled_from([0.0, 1e-3, 2.0])) * (rng.random(a.shape) < 0.5)
    for side in (a, b):
        if draw(st.booleans()):
            side[rng.random(a.shape) < 0.2] = draw(st.sampled_from([np.nan, np.inf, -np.inf, 0.0]))
    dtype = draw(st.sampled_from(DTYPES))
    with np.errstate(over="ignore"):
        return a.astype(dtype), b.astype(dtype), draw(st.integers(1, rows))


def chunked(a: np.ndarray, b: np.ndarray, rows: int):
    return ((a[start : start + rows], b[start : start + rows]) for start in range(0, len(a), rows))


def measured(a: np.ndarray, b: np.ndarray, rows: int = 3, **how: Any) -> PairFigures:
    return figures(chunked(a, b, rows), **how)


@pytest.mark.long
@given(pairs())
@settings(max_examples=150)
def test_figures_equal_those_of_the_whole_in_float64(case: tuple[np.ndarray, np.ndarray, int]):
    a, b, rows = case
    pair = measured(a, b, rows)
    x, y = a.astype(np.float64), b.astype(np.float64)
    equal = (x == y) | (np.isnan(x) & np.isnan(y))
    finite = np.isfinite(x) & np.isfinite(y)
    u, v = np.where(finite, x, 0), np.where(finite, y, 0)
    assert pair.compared == a.size
    assert pair.mismatched == int((~equal).sum())
    assert pair.nonfinite_mismatched == int((~equal & ~finite).sum())
    assert (pair.nan_a, pair.nan_b) == (int(np.isnan(x).sum()), int(np.isnan(y).sum()))
    assert pair.total.count == int(finite.sum())
    # Of two differences that float32 cannot tell apart either may be called the greatest.
    assert pair.max_abs == pytest.approx(np.abs(v - u).max(), rel=1e-7 if a.dtype.itemsize == 2 else 0)
    # Two-byte floats are added up in float32: off by less than 2e-6 of the sum of magnitudes.
    sums = 2e-6 if a.dtype.itemsize == 2 else 1e-12
    if np.linalg.norm(u):
        rel_l2 = np.linalg.norm(v - u) / np.linalg.norm(u)
        assert pair.total.rel_l2 == pytest.approx(rel_l2, rel=sums)
        assert pair.total.gain == pytest.approx((u * (v - u)).sum() / (u * u).sum(), abs=sums * max(1, rel_l2))
    if np.linalg.norm(u) and np.linalg.norm(v):
        unit_u, unit_v = (torch.tensor(side / np.linalg.norm(side)).flatten() for side in (u, v))
        assert pair.total.one_minus_cosine == pytest.approx(1 - float(unit_u @ unit_v), abs=2 * sums)
    for name, left, right in (("d2", v - u, v - u), ("a2", u, u), ("ad", u, v - u), ("a4", u * u, u * u)):
        product = left * right
        assert np.allclose(getattr(pair.rows, name), product.sum(axis=1), rtol=0, atol=sums * np.abs(product).sum())
        if name in ("d2", "a2"):
            assert np.allclose(getattr(pair.columns, name), product.sum(axis=0), rtol=0, atol=sums * product.sum())
    assert np.allclose(pair.rows.max, np.abs(v - u).max(axis=1), rtol=1e-7)


@given(pairs())
def test_the_element_named_holds_the_values_named(case: tuple[np.ndarray, np.ndarray, int]):
    a, b, rows = case
    pair = measured(a, b, rows)
    for named in (pair.greatest, pair.first, pair.nonfinite):
        if named is not None:
            assert np.array_equal([float(a[named.at]), float(b[named.at])], [named.a, named.b], equal_nan=True)
    assert (pair.first is None) == (pair.mismatched == 0)


@given(st.integers(0, 1000))
def test_logprob_figures_are_those_of_their_formulas(seed: int):
    rng = np.random.default_rng(seed)
    a = -rng.exponential(size=(4, 6))
    b = a + rng.normal(size=a.shape) * 0.3
    pair = measured(a, b, logprobs=True)
    d = b - a
    assert pair.total.mean_exp_abs == pytest.approx(np.exp(np.abs(d)).mean())
    assert pair.total.k1 == pytest.approx(-d.mean())
    assert pair.total.k3 == pytest.approx((np.exp(d) - 1 - d).mean())
    assert np.allclose(pair.rows.exp_abs, np.exp(np.abs(d)).sum(axis=1))


def test_a_small_angle_between_large_vectors_is_not_lost():
    """1 - cosine by the ratio of norms is 0 here (docs/evidence.md#relative-l2)."""
    rng = np.random.default_rng(0)
    a = rng.normal(size=(64, 4096))
    d = rng.normal(size=a.shape) * 1e-9
    assert measured(a, a + d).total.one_minus_cosine == pytest.approx(0.5e-18, rel=0.1)


@pytest.mark.parametrize(("a", "b", "unequal"), [(2**53, 2**53 + 1, 1), (-1, 2**64 - 1, 1), (2**63, 2**63, 0)])
def test_integers_are_equal_only_in_their_own_type(a: int, b: int, unequal: int):
    left = np.array([[a]], dtype=np.uint64 if a > 2**62 else np.int64)
    right = np.array([[b]], dtype=np.uint64 if b > 2**62 else np.int64)
    assert measured(left, right, exact=True).mismatched == unequal


def test_complex_elements_are_counted_once_and_named_by_their_own_index():
    a = np.arange(12).reshape(3, 4) * (1 + 2j)
    b = a.copy()
    b[2, 3] += 1j
    a[0, 0] = b[0, 0] = complex(np.nan, 1)
    pair = measured(a, b)
    assert (pair.compared, pair.mismatched) == (12, 1)
    assert pair.greatest is not None
    assert pair.first is not None
    assert pair.greatest.at == pair.first.at == (2, 3)


def test_bitwise_tells_0_from_minus_0_and_one_nan_from_another():
    nans = np.array([[0x7FC00000, 0x7FC00001]], dtype=np.uint32).view(np.float32)
    assert measured(nans[:, :1], nans[:, 1:]).mismatched == 0
    assert measured(nans[:, :1], nans[:, 1:], bitwise=True).mismatched == 1
    zeros = np.zeros((1, 3), dtype=np.float32)
    assert measured(zeros, -zeros).mismatched == 0
    assert measured(zeros, -zeros, bitwise=True).mismatched == 3
    assert measured(zeros, zeros.astype(np.float64), bitwise=True).mismatched == 3


def test_big_endian_numbers_are_the_same_numbers():
    a = np.random.default_rng(0).normal(size=(3, 4))
    for bitwise in (False, True):
        assert measured(a, a.astype(">f8"), bitwise=bitwise).mismatched == 0


def test_nothing_compared_is_nothing_found():
    pair = figures(iter(()))
    assert (pair.compared, pair.total.rel_l2, pair.total.gain, pair.rows.worst) == (0, 0.0, 0.0, None)


def test_one_element_that_outweighs_all_others_counts_as_one():
    a = np.ones((4, 256))
    assert measured(a, a).total.weighty == pytest.approx(1024)
    a[0, 0] = 1e6
    assert measured(a, a).total.weighty == pytest.approx(1, rel=1e-3)


@given(st.integers(0, 10_000), st.floats(0, 3), st.booleans())
def test_no_element_exceeds_what_the_rows_allow_also_when_they_are_gone(seed: int, rtol: float, forgotten: bool):
    rng = np.random.default_rng(seed)
    a = rng.normal(size=(30, 20)) * rng.choice([1e-3, 1, 50], size=(30, 1))
    b = a + rng.normal(size=a.shape) * rng.choice([0, 1e-4, 1, 7], size=(30, 1))
    a[3, 3] = 0
    pair = measured(a, b)
    allowed = np.array(
        [m * (1 - rtol / r) for m, r in zip(pair.rows.max, pair.rows.max_rel, strict=True) if m > 0] + [0.0]
    ).max()
    if forgotten:
        pair.forget_rows()
        assert pair.rows.max.size == 0
    assert (np.abs(b - a) - rtol * np.abs(a)).max() <= pair.most_past(rtol) * (1 + 1e-12) + 1e-300
    assert pair.most_past(rtol) == pytest.approx(allowed)
    assert pair.most_past(0) == pytest.approx(pair.max_abs)
