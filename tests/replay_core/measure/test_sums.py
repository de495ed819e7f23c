"""Sums in float32 against float64, where magnitudes are awkward, and channels that outweigh the rest."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replay_core.measure.pair import figures
from replay_core.measure.sums import _third_smallest, massive_columns

BF16 = ml_dtypes.bfloat16


@given(seed=st.integers(0, 1000), scale=st.integers(-36, 36), columns=st.sampled_from([3, 512, 700, 1500, 2048]))
@settings(max_examples=60, deadline=None)
def test_sums_of_bf16_are_right_at_every_magnitude(seed: int, scale: int, columns: int):
    rng = np.random.default_rng(seed)
    a = (rng.normal(size=(9, columns)) * 10.0**scale).astype(BF16)
    b = (a.astype(np.float64) * (1 + rng.normal(size=a.shape) * rng.choice([0, 0.01, 0.5]))).astype(BF16)
    # Rows of very different size, as gradients of an embedding have.
    a[3], b[3] = 0, (a[3].astype(np.float64) * 1e-3).astype(BF16)
    a[4] = (a[4].astype(np.float64) * 1e-9).astype(BF16)
    pair = figures([(a[:5], b[:5]), (a[5:], b[5:])])
    x, y = a.astype(np.float64), b.astype(np.float64)
    d = y - x
    for name, product in (("d2", d * d), ("a2", x * x), ("ad", x * d)):
        exact, bound = product.sum(axis=1), 4e-6 * np.abs(product).sum(axis=1) + 1e-300
        assert (np.abs(getattr(pair.rows, name) - exact) <= bound).all(), name
    assert pair.mismatched == int((x != y).sum())
    assert pair.max_abs == pytest.approx(np.abs(d).max(), rel=1e-7)
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = np.where(d != 0, np.abs(d) / np.abs(x), 0)
    assert pair.max_rel == pytest.approx(relative.max(), rel=1e-6)


@pytest.mark.parametrize("dtype", [BF16, np.float32, np.float64])
def test_what_a_massive_channel_hides_is_measured_apart(dtype: type):
    rng = np.random.default_rng(0)
    a = rng.normal(size=(64, 128))
    a[:, 40] *= 1000
    a = a.astype(dtype)
    b = a.astype(np.float64) * 1.1
    b[:, 40] = a[:, 40]
    b = b.astype(dtype)
    assert massive_columns(a).tolist() == [40]
    pair = figures([(a[:30], b[:30]), (a[30:], b[30:])])
    x, y = a.astype(np.float64), b.astype(np.float64)
    assert pair.total.rel_l2 == pytest.approx(np.linalg.norm(y - x) / np.linalg.norm(x), rel=1e-5)
    keep = np.arange(128) != 40
    assert pair.massive == (40,)
    assert pair.rest is not None
    assert pair.rest.total.rel_l2 == pytest.approx(
        np.linalg.norm((y - x)[:, keep]) / np.linalg.norm(x[:, keep]), rel=1e-5
    )
    assert np.allclose(pair.rows.a2, (x * x).sum(axis=1), rtol=1e-5)
    assert np.allclose(pair.columns.a2, (x * x).sum(axis=0), rtol=1e-5)
    assert pair.max_abs == np.abs(y - x).max()
    assert pair.mismatched == int((x != y).sum())


@pytest.mark.parametrize("columns", [2, 3, 512, 1030, 1031, 2048])
def test_columns_and_places_of_bf16_are_those_of_the_tensor_however_it_is_read(columns: int):
    """bf16 is read two at a time: what is known of a column must not move to its neighbour."""
    torch.manual_seed(columns)
    a = torch.randn(16, columns).bfloat16()
    b = (a.float() * (1 + 0.01 * torch.randn_like(a.float()))).bfloat16()
    massive = columns - 1
    a[:, massive], b[:, massive] = a[:, massive] * 1024, b[:, massive] * 1024
    b[11, massive // 2] += 4096
    left, right = (side.view(torch.int16).numpy().view(BF16) for side in (a, b))
    pair = figures([(left[:9], right[:9]), (left[9:], right[9:])])
    d, x = b.double() - a.double(), a.double()
    assert pair.massive == ((massive,) if columns >= 64 else ())
    assert pair.greatest is not None
    assert pair.max_abs == d[pair.greatest.at].abs() == d.abs().max()
    for name, exact in (("d2", d.square()), ("a2", x.square())):
        assert np.allclose(getattr(pair.columns, name), exact.sum(0), rtol=2e-6)
        assert np.allclose(getattr(pair.rows, name), exact.sum(1), rtol=2e-6)
    assert np.allclose(pair.rows.max, d.abs().amax(1), rtol=1e-7)
    assert np.allclose(pair.rows.max_rel, torch.where(d == 0, 0, d.abs() / x.abs()).amax(1), rtol=1e-6)
    assert pair.mismatched == int((a != b).sum())


def test_one_huge_element_or_many_large_channels_are_not_massive():
    rng = np.random.default_rng(1)
    a = rng.normal(size=(64, 128))
    a[3, 9] = 1e6
    assert massive_columns(a).size == 0
    a[:, :40] *= 1000
    assert massive_columns(a).size == 0
    a[5, 5] = np.nan
    assert massive_columns(a).size == 0


def test_the_third_smallest_of_each_column_is_what_sorting_says():
    rng = np.random.default_rng(0)
    few = np.abs(rng.normal(size=(8, 500))).astype(np.float32)
    few[:, ::7] = few[0, ::7]
    assert np.array_equal(_third_smallest(few), np.sort(few, axis=0)[2])
    few[2, 3] = few[4, 9] = np.nan
    assert np.array_equal(_third_smallest(few), np.sort(few, axis=0)[2])
