"""The kernel says what numpy says: every dtype, shape and massive column, to what sums of that width leave."""

from __future__ import annotations

import ctypes.util
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hatch_build import compiled
from replay_core.measure import native, sums
from replay_core.measure.pair import figures

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32, "float64": np.float64}


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("kernel") / native.PLACE.name
    if not compiled(Path(native.__file__).with_name("native.c"), made):
        pytest.skip("a C compiler and Linux are needed")
    return made


@pytest.fixture
def _built(kernel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "PLACE", kernel)
    native.loaded.cache_clear()


def _pair(dtype: str, rows: int, columns: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    chance = np.random.default_rng(seed)
    a = chance.standard_normal((rows, columns)) * 10.0 ** chance.integers(-3, 3)
    b = np.where(chance.random(a.shape) < 0.3, a, a * (1 + 0.1 * chance.standard_normal(a.shape)))
    a[chance.random(a.shape) < 0.05] = -0.0
    return a.astype(DTYPES[dtype]), b.astype(DTYPES[dtype])


@pytest.mark.long
@pytest.mark.usefixtures("_built")
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=25)
@given(rows=st.integers(1, 9), columns=st.integers(1, 1100), seed=st.integers(0, 99), heavy=st.integers(0, 3))
def test_the_kernel_says_what_numpy_says(dtype: str, rows: int, columns: int, seed: int, heavy: int):
    a, b = _pair(dtype, rows, columns, seed)
    massive = np.unique(np.random.default_rng(seed).integers(0, columns, min(heavy, columns - 1)))
    with np.errstate(all="ignore"):
        natively, by_numpy = sums._natively(a, b, massive), sums._by_numpy(a, b, massive)
    assert natively is not None
    rough = 4e-6 if a.dtype.itemsize == 2 else 1e-12
    for found, expected in zip(natively, by_numpy, strict=True):
        if expected is None or found is None:
            assert found is expected
            continue
        a2, a4, d2 = expected.lines[2:5]
        # Of what may cancel, the sum of magnitudes can be as large as this.
        scale = np.stack([np.sqrt(columns * d2), np.sqrt(a2 * d2), a2, a4, d2]) + 1e-300
        np.testing.assert_array_equal(found.lines[5:], expected.lines[5:])
        np.testing.assert_allclose(found.lines[:5] / scale, expected.lines[:5] / scale, rtol=0, atol=rough)
        np.testing.assert_allclose(found.col_d2, expected.col_d2, rtol=rough)
        np.testing.assert_allclose(found.col_a2, expected.col_a2, rtol=rough)
    assert natively[0].mismatched == by_numpy[0].mismatched


@pytest.mark.long
@pytest.mark.usefixtures("_built")
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_of_two_bytes_is_read_right_and_what_is_not_finite_is_left_to_numpy(dtype: str):
    if np.dtype(DTYPES[dtype]).itemsize == 2:
        every = np.arange(1 << 16, dtype=np.uint16).view(DTYPES[dtype])
        with np.errstate(invalid="ignore"):
            finite = every[np.isfinite(every.astype(np.float64))]
        for at in range(0, len(finite), 997):
            one = finite[at : at + 1][None]
            found = native.pair_lines(np.zeros_like(one), one, np.array([[0, 1]], np.int64))
            assert found is not None
            assert found[0][0, 0] == float(one[0, 0])
    for odd in (np.nan, np.inf, -np.inf):
        a = np.ones((2, 3), DTYPES[dtype])
        b = a.copy()
        b[1, 1] = odd
        assert sums.smooth_sums(a, b, np.zeros(0, np.intp)) is None
        assert figures([(a, b)]).nonfinite_mismatched == 1


@pytest.mark.long
@pytest.mark.usefixtures("_built")
def test_what_does_not_lie_row_by_row_is_left_to_numpy():
    a, b = _pair("float32", 6, 8, 0)
    spans = np.array([[0, 8]], np.int64)
    assert native.pair_lines(a, b, spans) is not None
    for one, other in ((a[::2], b[::2]), (a, b.astype(np.float64)), (a.astype(">f4"), b.astype(">f4"))):
        assert native.pair_lines(one, other, np.array([[0, one.shape[1]]], np.int64)) is None


def test_without_a_kernel_numpy_compares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for place in (tmp_path / "none.so", tmp_path / "broken.so"):
        (tmp_path / "broken.so").write_bytes(b"\x7fELF, or so it says")
        monkeypatch.setattr(native, "PLACE", place)
        native.loaded.cache_clear()
        a, b = _pair("bfloat16", 4, 64, 1)
        assert native.loaded() is None
        assert figures([(a, b)]).mismatched > 0
    native.loaded.cache_clear()


def test_a_library_of_another_kind_is_no_kernel(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(native, "PLACE", Path(ctypes.util.find_library("c") or "libc.so.6"))
    native.loaded.cache_clear()
    assert native.loaded() is None
    native.loaded.cache_clear()
