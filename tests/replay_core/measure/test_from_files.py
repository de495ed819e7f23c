"""What the kernel adds up of two files is what is added up of their arrays, chunk by chunk."""

from __future__ import annotations

import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import asdict

from replay_core import kernel
from replay_core.file_spans import Stream
from replay_core.measure import from_files
from replay_core.measure.figures import PairFigures
from replay_core.measure.pair import figures
from replay_core.records import FileBytes, TensorRef

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32, "float64": np.float64}
#: Rows of a first chunk, as a comparison asks.
FIRST = 64

pytestmark = pytest.mark.skipif(kernel.loaded() is None, reason="no kernel was built")


def stored(values: np.ndarray, path: Path, *, before: int = 24) -> TensorRef:
    path.write_bytes(b"\x01" * before + values.tobytes())
    return TensorRef("x", str(values.dtype), values.shape, FileBytes(path, before, values.nbytes))


def pair_of(dtype: str, rows: int, columns: int, seed: int, massive: int = 0) -> tuple[np.ndarray, np.ndarray]:
    chance = np.random.default_rng(seed)
    a = chance.standard_normal((rows, columns))
    a[:, chance.permutation(columns)[:massive]] *= 200
    a[chance.random(rows) < 0.1] = 0
    b = np.where(chance.random(a.shape) < 0.5, a, a * (1 + 0.1 * chance.standard_normal(a.shape)))
    return a.astype(DTYPES[dtype]), b.astype(DTYPES[dtype])


def alike(found: PairFigures, expected: PairFigures, dtype: str) -> None:
    rough = 4e-6 if dtype in ("bfloat16", "float16") else 1e-11
    for name in ("compared", "mismatched", "first", "greatest", "massive", "max_abs"):
        assert getattr(found, name) == getattr(expected, name), name
    assert found.max_rel == pytest.approx(expected.max_rel, rel=rough)
    scale = np.sqrt(expected.total.a2 * expected.total.count) + 1e-30
    for name, of_one in asdict(expected.total).items():
        assert getattr(found.total, name) == pytest.approx(of_one, rel=rough, abs=rough * scale), name
    for part in ("rows", "columns"):
        for name, y in asdict(getattr(expected, part)).items():
            x = getattr(getattr(found, part), name)
            if isinstance(y, np.ndarray):
                near = rough * (float(np.abs(y).max(initial=0)) + scale if name in ("d", "ad") else 1)
                np.testing.assert_allclose(x, y, rtol=rough, atol=near, err_msg=name)
            else:
                assert x == y, name
    assert (found.rest is None) == (expected.rest is None)
    if found.rest is not None and expected.rest is not None:
        alike(found.rest, expected.rest, dtype)


@pytest.mark.long
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=40)
@given(
    rows=st.integers(1, 300),
    columns=st.sampled_from([1, 3, 64, 129, 1100, 70_000]),
    seed=st.integers(0, 99),
    massive=st.integers(0, 2),
    chosen=st.booleans(),
)
def test_the_figures_are_those_of_the_arrays(
    dtype: str, rows: int, columns: int, seed: int, massive: int, chosen: bool, tmp_path_factory: pytest.TempPathFactory
):
    rows = rows if columns < 70_000 else min(rows, 9)
    a, b = pair_of(dtype, rows, columns, seed, massive if columns > 64 else 0)
    folder = tmp_path_factory.mktemp("pair")
    numbers: list[np.ndarray | None] = [None, None]
    if chosen:
        chance = np.random.default_rng(seed)
        numbers = [
            np.sort(chance.permutation(rows)[: rows // 2 + 1]),
            np.sort(chance.permutation(rows)[: rows // 2 + 1]),
        ]
    facing = from_files.Facing(stored(a, folder / "a"), stored(b, folder / "b", before=4096 + 8), columns, *numbers)
    found = from_files.figures(facing, FIRST)
    if found is None:
        # Nothing but zeros where it looked: the trailing bits may say what the rest was computed in.
        assert dtype == "float32"
        assert not all(facing_rows(side, of)[0].any() for side, of in zip((a, b), numbers, strict=True))
        return
    of_a, of_b = facing_rows(a, numbers[0]), facing_rows(b, numbers[1])
    expected = figures((of_a[at : at + FIRST], of_b[at : at + FIRST]) for at in range(0, len(of_a), FIRST))
    alike(found, expected, dtype)


def facing_rows(values: np.ndarray, numbers: np.ndarray | None) -> np.ndarray:
    return values if numbers is None else values[numbers]


def of_arrays(a: np.ndarray, b: np.ndarray, folder: Path) -> PairFigures | None:
    return from_files.figures(from_files.Facing(stored(a, folder / "a"), stored(b, folder / "b"), a.shape[1]), FIRST)


@pytest.mark.parametrize("odd", [np.nan, np.inf, 3e38, 1e-30])
def test_what_a_sum_cannot_hold_is_left_to_numpy(odd: float, tmp_path: Path):
    a, b = pair_of("bfloat16", 40, 64, 0)
    assert of_arrays(a, b, tmp_path) is not None
    a[33], b[33] = odd, odd
    assert of_arrays(a, b, tmp_path) is None


def test_rows_of_zeros_are_no_underflow(tmp_path: Path):
    a, b = pair_of("bfloat16", 40, 64, 0)
    a[30:], b[30:] = 0, 0
    found = of_arrays(a, b, tmp_path)
    assert found is not None
    assert found.rows.a2[30:].max() == 0


def test_float32_that_holds_bfloat16_is_left_to_who_looks_at_every_bit(tmp_path: Path):
    a, b = (side.astype(np.float32) for side in pair_of("bfloat16", 40, 64, 1))
    assert of_arrays(a, b, tmp_path) is None


def test_other_dtypes_and_strides_are_left_to_numpy(tmp_path: Path):
    a = stored(np.ones((4, 8), np.int32), tmp_path / "a")
    assert from_files.figures(from_files.Facing(a, a, 8), FIRST) is None
    b = stored(np.ones((4, 8), np.float32), tmp_path / "b")
    assert isinstance(b.source, FileBytes)
    across = b.with_(source=FileBytes(b.source.path, 24, 128, (1, 4)))
    assert from_files.figures(from_files.Facing(b, across, 8), FIRST) is None


def test_a_file_that_became_shorter_is_left_to_who_says_so(tmp_path: Path):
    a, b = pair_of("float64", 400, 64, 0)
    facing = from_files.Facing(stored(a, tmp_path / "a"), stored(b, tmp_path / "b"), 64)
    os.truncate(tmp_path / "b", b.nbytes // 2)
    assert from_files.figures(facing, FIRST) is None


@pytest.mark.parametrize("numbers", [[0], [3, 1, 2], [0, 399], list(range(0, 400, 7))])
def test_rows_are_read_in_one_call(numbers: list[int], tmp_path: Path):
    values = np.arange(400 * 64, dtype=np.float64).reshape(400, 64)
    stored(values, tmp_path / "a")
    by, into = np.array(numbers), np.empty((len(numbers), 64))
    with Stream(tmp_path / "a") as file:
        assert file.descriptor is not None
        assert kernel.read_rows((file.descriptor, 24), 512, by.ctypes.data, by.size, into.ctypes.data)
        assert (into == values[by]).all()
        by[0] = 400
        assert not kernel.read_rows((file.descriptor, 24), 512, by.ctypes.data, by.size, into.ctypes.data)


@pytest.mark.parametrize("place", [None, 0, 20_000, 3_199_999])
def test_same_bytes_are_told_by_the_kernel(place: int | None, tmp_path: Path):
    content = np.random.default_rng(0).integers(0, 255, 3_200_000, np.uint8)
    (tmp_path / "a").write_bytes(b"12" + content.tobytes())
    if place is not None:
        content[place] ^= 1
    (tmp_path / "b").write_bytes(content.tobytes())
    rooms = np.empty(4096, np.uint8), np.empty(4096, np.uint8)
    at = rooms[0].ctypes.data, rooms[1].ctypes.data
    with Stream(tmp_path / "a") as a, Stream(tmp_path / "b") as b:
        assert a.descriptor is not None
        assert b.descriptor is not None
        spans = (a.descriptor, 2), (b.descriptor, 0)
        assert kernel.same_bytes(*spans, content.size, at, 100, 4096, kernel.Reach()) is (place is None)
        if place is None:
            assert kernel.same_bytes(*spans, content.size + 1, at, 100, 4096, kernel.Reach()) is None
