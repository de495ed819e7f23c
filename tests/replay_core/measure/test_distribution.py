"""How differences are spread, against whole-tensor numpy, torch and math."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replay_core.measure.distribution import MOST_CELLS, QUANTILES, spread, ulp_distance
from tests.builders import there


def case(seed: int, rows: int = 40, columns: int = 33) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    a = rng.normal(size=(rows, columns)).astype(np.float32)
    b = (a + rng.normal(size=a.shape) * rng.choice([0, 1e-6, 1e-2, 3], size=a.shape)).astype(np.float32)
    return a, b


def chunks(a: np.ndarray, b: np.ndarray, rows: int = 7):
    return ((a[start : start + rows], b[start : start + rows]) for start in range(0, len(a), rows))


@pytest.mark.parametrize("which", ["ab", "a", "b"])
def test_a_complex_side_beside_a_real_one_has_its_imaginary_parts_looked_at(which: str):
    a = np.ones((4, 6), dtype=np.complex64 if "a" in which else np.float32)
    b = np.ones((4, 6), dtype=np.complex64 if "b" in which else np.float32)
    imaginary = a if which == "a" else b
    imaginary[1, 2] += 3j
    found, strip = spread(chunks(a, b), 4, 4)
    assert found.max_abs == 3
    assert [cell.max_abs for cell in strip] == [0, 3, 0, 0]


@given(st.integers(0, 500))
@settings(max_examples=30, deadline=None)
def test_figures_are_those_of_the_whole(seed: int):
    a, b = case(seed)
    found, _ = spread(chunks(a, b), len(a), 8)
    d = np.abs(b.astype(np.float64) - a)
    mapping = found.to_mapping()
    assert (mapping["compared"], mapping["mismatched"]) == (a.size, int((a != b).sum()))
    assert mapping["max_abs"] == d.max()
    assert mapping["pearson"] == pytest.approx(
        float(torch.corrcoef(torch.tensor(np.stack([a.ravel(), b.ravel()])))[0, 1]), abs=1e-5
    )
    assert mapping["log2_abs"]["zeros"] == int((d == 0).sum())
    expected = {int(e): int(n) for e, n in zip(*np.unique(np.frexp(d[d > 0])[1] - 1, return_counts=True), strict=True)}
    assert {entry["exponent"]: entry["count"] for entry in mapping["log2_abs"]["bins"]} == expected
    counts: list[int] = [int(entry["count"]) for entry in there(mapping["ulp"])["bins"]]
    assert sum(counts) == a.size
    for entry, share in zip(mapping["quantiles"], QUANTILES, strict=True):
        exact = float(np.quantile(d, share, method="inverted_cdf"))
        assert exact <= float(entry["abs"]) <= exact * 1.126


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ml_dtypes.bfloat16])
def test_neighbours_are_one_ulp_apart_also_across_zero(dtype: Any):
    values = np.array([[1.0, -1.0, 0.0, 3.5]], dtype=dtype)
    up = np.nextafter(values, np.array(np.inf, dtype=dtype)).astype(dtype)
    assert ulp_distance(values, up).tolist() == [[1, 1, 1, 1]]
    assert ulp_distance(values, values).max() == 0
    zero, minus = np.zeros((1, 1), dtype=dtype), -np.zeros((1, 1), dtype=dtype)
    assert ulp_distance(zero, minus).item() == 0
    below = np.nextafter(zero, np.array(-np.inf, dtype=dtype)).astype(dtype)
    above = np.nextafter(zero, np.array(np.inf, dtype=dtype)).astype(dtype)
    assert ulp_distance(below, above).item() == 2


def test_the_farthest_doubles_have_a_distance():
    largest = np.array([[np.finfo(np.float64).max]])
    assert ulp_distance(largest, -largest).item() == 2 * int(largest.view(np.int64).item())


@given(st.integers(0, 100), st.integers(1, 60), st.booleans())
@settings(max_examples=40, deadline=None)
def test_a_strip_has_the_cells_asked_for_and_loses_nothing(seed: int, cells: int, by_column: bool):
    a, b = case(seed)
    d = np.abs(b.astype(np.float64) - a)
    length = a.shape[1] if by_column else a.shape[0]
    _, strip = spread(chunks(a, b), length, cells, by_column=by_column)
    assert len(strip) == min(cells, length)
    assert (strip[0].start, strip[-1].end) == (0, length)
    for cell in strip:
        part = np.s_[:, cell.start : cell.end] if by_column else np.s_[cell.start : cell.end]
        assert cell.max_abs == d[part].max()
        assert cell.rel_l2 == pytest.approx(np.linalg.norm(d[part]) / np.linalg.norm(a[part].astype(np.float64)))


def test_what_is_not_finite_is_counted_apart():
    a = np.array([[1.0, np.nan, np.inf, 2.0]])
    b = np.array([[1.5, np.nan, -np.inf, np.nan]])
    found, strip = spread([(a, b)], 1, 4)
    mapping = found.to_mapping()
    assert (mapping["mismatched"], mapping["log2_abs"]["nonfinite"], mapping["max_abs"]) == (3, 3, 0.5)
    assert strip[0].max_abs == 0.5


def test_a_strip_is_never_longer_than_a_screen_can_hold():
    a = np.zeros((MOST_CELLS * 3, 1))
    _, strip = spread([(a, a)], len(a), 10**9)
    assert len(strip) == MOST_CELLS
    assert all(cell.rel_l2 == 0 for cell in strip)


def test_integers_and_mixed_dtypes_have_no_ulp():
    a = np.arange(12).reshape(3, 4)
    assert spread([(a, a + 1)], 3, 3)[0].to_mapping()["ulp"] is None
    mixed = spread([(a.astype(np.float32), a.astype(np.float64))], 3, 3)[0].to_mapping()
    assert (mixed["ulp"], mixed["pearson"]) == (None, pytest.approx(1.0))
    assert math.isclose(mixed["max_abs"], 0.0)
