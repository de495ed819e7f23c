from __future__ import annotations

import math
import os
import tempfile
from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from replay_core import kernel, pages
from replay_core.dumps import open_run
from replay_core.dumps.fields import flatten
from replay_core.errors import DumpError, TruncatedError
from replay_core.records import FileBytes, Inline, TensorRef, Unreadable
from tests.builders import save_file

FLOATS = np.arange(3000, dtype="<f8")


@pytest.fixture
def stored(tmp_path: Path) -> TensorRef:
    """3000 doubles behind a header of 100 bytes."""
    file = tmp_path / "floats.bin"
    file.write_bytes(b"h" * 100 + FLOATS.tobytes())
    return TensorRef("x", "float64", (3000,), FileBytes(file, 100, FLOATS.nbytes))


def test_an_array_is_read_only(stored: TensorRef):
    array = pages.array(stored)
    assert (array == FLOATS).all()
    assert not array.flags.writeable


@pytest.mark.parametrize("size", [1, 7, 1024, 5000])
def test_chunks_are_the_tensor_in_order(stored: TensorRef, size: int):
    starts, chunks = zip(*((start, chunk.copy()) for start, chunk in pages.flat_chunks(stored, size)), strict=True)
    assert list(starts) == list(range(0, 3000, size))
    assert (np.concatenate(chunks) == FLOATS).all()


def test_strided_tensors_read_as_torch_sees_them(tmp_path: Path):
    values = torch.arange(24.0).reshape(4, 6)
    path = save_file(tmp_path / "x.pt", {"t": values.T, "s": values[1:3, ::2], "e": values[:0]})
    for ref in open_run(path).records[0].tensors():
        expected = {"t": values.T, "s": values[1:3, ::2], "e": values[:0]}[ref.name]
        assert np.array_equal(pages.array(ref), expected.numpy())
        chunks = [chunk for _, chunk in pages.flat_chunks(ref, 5)]
        assert np.array_equal(np.concatenate(chunks) if chunks else [], expected.flatten().numpy())


def test_big_endian_bytes_read_as_numbers(tmp_path: Path):
    file = tmp_path / "big.bin"
    file.write_bytes(FLOATS.astype(">f8").tobytes())
    ref = TensorRef("x", "float64", (3000,), FileBytes(file, 0, FLOATS.nbytes, big_endian=True))
    assert (pages.array(ref) == FLOATS).all()
    assert all((chunk == FLOATS[start : start + 100]).all() for start, chunk in pages.flat_chunks(ref, 100))


def test_a_file_truncated_underneath_is_an_error_and_no_signal(stored: TensorRef):
    pages.array(stored)
    assert isinstance(stored.source, FileBytes)
    os.truncate(stored.source.path, 200)
    with pytest.raises(TruncatedError, match="ends inside a tensor"):
        pages.array(stored)


def test_a_file_that_ends_too_early_says_what_was_expected(stored: TensorRef):
    longer = stored.with_(shape=(4000,))
    with pytest.raises(TruncatedError) as caught:
        pages.array(longer)
    assert "32,000 bytes at offset 100" in str(caught.value)


def test_a_file_that_is_gone_is_an_error(stored: TensorRef):
    assert isinstance(stored.source, FileBytes)
    stored.source.path.unlink()
    with pytest.raises(DumpError, match="cannot open the file"):
        pages.array(stored)


def test_an_unreadable_field_says_why():
    with pytest.raises(DumpError, match="sparse"):
        pages.array(TensorRef("x", "float32", (2,), Unreadable("a sparse tensor")))


@pytest.mark.parametrize("flipped", [0, 1500, 2999])
def test_same_bytes_sees_a_single_flipped_byte(stored: TensorRef, tmp_path: Path, flipped: int):
    assert isinstance(stored.source, FileBytes)
    content = bytearray(stored.source.path.read_bytes())
    twin = tmp_path / "twin.bin"
    twin.write_bytes(content)
    other = stored.with_(source=FileBytes(twin, 100, FLOATS.nbytes))
    assert pages.same_bytes(stored, other, block=4096) is True
    content[100 + flipped * 8] ^= 1
    twin.write_bytes(content)
    os.utime(twin, ns=(1, flipped + 2))
    assert pages.same_bytes(stored, other, block=4096) is False


def test_same_bytes_does_not_answer_for_other_types_or_shapes(stored: TensorRef):
    assert pages.same_bytes(stored, stored.with_(dtype="int64")) is None
    assert pages.same_bytes(stored, stored.with_(shape=(30, 100))) is None


_NANS_OF = ["bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz"]


@pytest.mark.parametrize("dtype", _NANS_OF)
@pytest.mark.parametrize("by", ["the kernel", "numpy"])
def test_nans_of_the_same_bytes_are_those_torch_sees(
    dtype: str, by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    if by == "numpy":
        monkeypatch.setattr(kernel, "loaded", lambda: None)
    values = torch.linspace(-3, 3, 600_001)
    values[1:] *= -1
    values[[0, 7, 300_000, 600_000]] = torch.nan
    if dtype in ("bfloat16", "float16", "float32", "float64", "float8_e5m2"):
        values[3], values[4] = torch.inf, -torch.inf
    stored = values.to(getattr(torch, dtype))
    stored.view(torch.uint8)[-stored.element_size() :] |= 0x80  # its last is a negative NaN, wherever there is one
    refs = [
        open_run(save_file(tmp_path / name, {"x": stored, "ids": torch.arange(9)})).records[0].tensors()
        for name in ("a.pt", "b.pt")
    ]
    by_name = [{ref.name: ref for ref in one} for one in refs]
    seen = int(stored.float().isnan().sum())
    assert seen == 4
    assert pages.same_bytes_and_nans(by_name[0]["x"], by_name[1]["x"]) == (True, seen)
    assert pages.count_nans(by_name[0]["x"]) == seen
    assert pages.same_bytes_and_nans(by_name[0]["ids"], by_name[1]["ids"]) == (True, 0)


@pytest.mark.parametrize("numbers", [[0], [3, 4, 5], [5, 3, 3], [0, 299], [299, 0, 150], list(range(300)), []])
def test_rows_are_read_by_their_numbers(stored: TensorRef, numbers: list[int]):
    read = pages.row_reader(stored, 10)
    chosen = np.array(numbers, dtype=np.int64)
    assert np.array_equal(read(chosen), FLOATS.reshape(300, 10)[chosen])


def test_rows_of_a_file_that_became_shorter_are_an_error(stored: TensorRef):
    read = pages.row_reader(stored, 10)
    assert isinstance(stored.source, FileBytes)
    os.truncate(stored.source.path, 2000)
    assert read(np.array([0])).shape == (1, 10)
    with pytest.raises(TruncatedError, match="ends inside a tensor"):
        read(np.array([290]))
    with pytest.raises(TruncatedError):
        list(pages.flat_chunks(stored, 1000))
    with pytest.raises(TruncatedError):
        pages.same_bytes(stored, stored)


@pytest.mark.long
@given(st.data())
def test_a_part_is_numpys_slice(data: st.DataObject):
    with tempfile.TemporaryDirectory() as folder:
        shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
        whole = torch.arange(prod(shape), dtype=torch.float32).reshape(shape)
        if data.draw(st.booleans()):
            whole = whole.transpose(0, -1)
        path = Path(folder) / "x.pt"
        torch.save({"x": whole}, path)
        ref = open_run(path).records[0].tensors()[0]
        spans = []
        for length in whole.shape:
            start, end = sorted((data.draw(st.integers(0, length)), data.draw(st.integers(0, length))))
            spans.append((start, end))
        expected = whole.numpy()[tuple(slice(*span) for span in spans)]
        np.testing.assert_array_equal(pages.part(ref, spans), expected)


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="bytes that were read are counted under /proc")
def test_a_part_of_a_large_tensor_touches_only_its_pages(tmp_path: Path):
    count = 1 << 30
    header = b'{"x":{"dtype":"F32","shape":[%d,1024],"data_offsets":[0,%d]}}' % (count // 4096, count)
    path = tmp_path / "giant.safetensors"
    with open(path, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + count)
    ref = open_run(path).records[0].tensors()[0]

    def read() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    before = read()
    assert pages.part(ref, [(200_000, 200_004), (0, 8)]).shape == (4, 8)
    assert read() - before < 1 << 20
    # A column is far from contiguous: its rows are read one by one, and never all between the first and the last.
    assert pages.part(ref, [(0, 262_144), (3, 5)])[::40_000].shape == (7, 2)


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [(0.5, 0.5, True), (0.0, -0.0, False), (math.nan, math.nan, False), (1, 1, True), (1, True, False), (1, 1.0, False),
     (2**53, 2**53 + 1, False), (math.inf, math.inf, True)],
)  # fmt: skip
def test_two_numbers_of_a_text_are_the_same_to_the_last_bit(a: float, b: float, same: bool) -> None:
    one, other = (flatten({"x": value})[0] for value in (a, b))
    assert pages.is_same_number(one, other) is same
    assert bool(one.dtype == other.dtype and pages.same_bytes(one, other)) is same


def test_a_number_of_another_type_than_its_text_s_is_compared_as_what_it_is_declared(tmp_path: Path) -> None:
    one, other = (TensorRef("x", "float32", (), Inline(value)) for value in (0.1, 0.1 + 1e-12))
    assert not pages.is_same_number(one, other)
    assert pages.same_bytes(one, other)


def test_a_chunk_that_somebody_holds_is_not_read_over(stored: TensorRef):
    first = next(iter(pages.flat_chunks(stored, 8)))[1]
    was = first.copy()
    for _ in range(5):
        list(pages.flat_chunks(stored, 7))
    assert np.array_equal(first, was)


def test_memory_of_chunks_is_used_again_by_the_next_tensor(tmp_path: Path):
    file = save_file(tmp_path / "x.pt", {"a": torch.arange(5000.0), "b": torch.arange(5000.0)})
    places = set()
    for ref in open_run(file).records[0].tensors():
        for _, chunk in pages.flat_chunks(ref, 2048):
            places.add(chunk.ctypes.data >> 13)
        del chunk
    assert len(places) <= 2


@pytest.mark.parametrize("offset", [0, 8, 64, 4096 + 40, 5 * 4096 - 1])
def test_large_reads_land_aligned_and_never_just_behind_where_they_lie_in_their_page(tmp_path: Path, offset: int):
    file = tmp_path / "raw"
    file.write_bytes(bytes(offset) + np.arange(4096, dtype=np.float32).tobytes())
    ref = TensorRef("x", "float32", (4096,), FileBytes(file, offset, 4 * 4096))
    values = pages.array(ref)
    assert values.ctypes.data % 64 == 0
    assert (values.ctypes.data - offset) % 4096 in (0, *range(4096 - 63, 4096))
    assert values.tolist() == list(range(4096))
