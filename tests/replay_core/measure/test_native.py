"""The kernel says what numpy says: every dtype, shape, massive column, odd number, to what sums of that width leave."""

from __future__ import annotations

import ctypes.util
import math
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hatch_build import compiled
from replay_core import kernel
from replay_core.measure import native, sums
from replay_core.measure.pair import figures
from replay_core.measure.statistics import Accumulated, by_numpy

COUNTED = {"int64": np.int64, "int32": np.int32, "uint8": np.uint8, "bool": np.bool_}
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32, "float64": np.float64}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("kernel") / kernel.PLACE.name
    if not compiled(Path(kernel.__file__).with_name("native.c"), made):
        pytest.skip("a C compiler and Linux are needed")
    return made


@pytest.fixture
def _built(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "PLACE", library)
    kernel.loaded.cache_clear()


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


ODD = (0.0, -0.0, 1.0, 1e-40, -3e-45, 5e-324, 6e-8, 6e4, 3e38, -1e300, np.inf, -np.inf, np.nan)


@pytest.mark.long
@pytest.mark.usefixtures("_built")
@pytest.mark.parametrize("dtype", [*DTYPES, *COUNTED])
@settings(max_examples=40)
@given(
    size=st.sampled_from([0, 1, 7, 1023, 1024, 1025, 5000]),
    mean=st.sampled_from([0.0, 3.0, -1e4]),
    odd=st.lists(st.tuples(st.integers(0, 4999), st.sampled_from(ODD)), max_size=40),
    seed=st.integers(0, 99),
)
def test_the_kernel_says_of_one_tensor_what_numpy_says(
    dtype: str, size: int, mean: float, odd: list[tuple[int, float]], seed: int
):
    values = np.random.default_rng(seed).standard_normal(size) * 5 + mean
    for place, number in odd:
        if size:
            values[place % size] = number
    with np.errstate(all="ignore"):
        one = values.astype({**DTYPES, **COUNTED}[dtype])
        found, expected = native.moments(one), by_numpy(one)
    if found is None:
        assert not math.isfinite(expected.squares)
        return
    assert found[:7] == [getattr(expected, name) for name in ORDER[:7]]
    scale = max(abs(expected.low), abs(expected.high)) if expected.finite else 1.0
    assert found[7] == pytest.approx(expected.mean, rel=1e-12, abs=1e-14 * scale)
    assert found[8] == pytest.approx(expected.deviation, rel=1e-9, abs=1e-24 * scale * scale * size)
    assert found[9] == pytest.approx(expected.squares, rel=1e-12)


ORDER = Accumulated.__struct_fields__


@pytest.mark.long
@pytest.mark.usefixtures("_built")
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=40)
@given(
    size=st.sampled_from([1, 7, 31, 32, 33, 4095, 4096, 4097, 9000]),
    odd=st.lists(st.tuples(st.integers(0, 8999), st.sampled_from(ODD)), max_size=4),
    power=st.integers(-22, 20),
    seed=st.integers(0, 99),
)
def test_ends_and_squares_are_numpys_or_left_to_it(
    dtype: str, size: int, odd: list[tuple[int, float]], power: int, seed: int
):
    values = np.random.default_rng(seed).standard_normal(size) * 10.0**power
    for place, number in odd:
        values[place % size] = number
    with np.errstate(all="ignore"):
        one = values.astype(DTYPES[dtype])
        found, expected = kernel.ends_at(one.ctypes.data, one.size, dtype), by_numpy(one)
    if found is None:
        narrow = dtype != "float64" and not 1e-30 < expected.squares < 3e38
        assert expected.finite < size or narrow or not kernel.LEAST_SQUARES < expected.squares < math.inf
        return
    assert expected.finite == size
    assert found[:2] == (expected.low, expected.high)
    # Of addends that float32 loses none is more than a millionth of the others.
    assert found[2] == pytest.approx(expected.squares, rel=1e-5)


@pytest.mark.long
@pytest.mark.usefixtures("_built")
def test_moments_of_what_it_does_not_know_are_left_to_numpy():
    for values in (np.ones(4, ">f4"), np.ones(4, ml_dtypes.float8_e4m3fn), np.ones(4, np.complex64), np.ones(8)[::2]):
        assert native.moments(values) is None
        assert by_numpy(values).low in (0, 1)
    with np.errstate(all="ignore"):
        assert native.moments(np.array([1e300, -1e300])) is None


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
        monkeypatch.setattr(kernel, "PLACE", place)
        kernel.loaded.cache_clear()
        a, b = _pair("bfloat16", 4, 64, 1)
        assert kernel.loaded() is None
        assert figures([(a, b)]).mismatched > 0
    kernel.loaded.cache_clear()


def test_a_library_of_another_kind_is_no_kernel(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kernel, "PLACE", Path(ctypes.util.find_library("c") or "libc.so.6"))
    kernel.loaded.cache_clear()
    assert kernel.loaded() is None
    kernel.loaded.cache_clear()
