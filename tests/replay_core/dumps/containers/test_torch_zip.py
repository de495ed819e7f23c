"""The zip's own traps: other writers, compression, prefixes, zip64, byte order."""

from __future__ import annotations

import io
import struct
import zipfile
from pathlib import Path

import pytest
import torch

from replay_core.dumps.containers import read_container
from replay_core.errors import DumpError, NotADumpError, TruncatedError
from replay_core.recorder import Recorder
from tests.replay_core.dumps.containers.oracle import values


def _rezip(path: Path, out: Path, **changes: bytes | None) -> Path:
    """The same records written by Python's zipfile, some replaced or left out."""
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(out, "w") as target:
        for name in source.namelist():
            key = name.rpartition("/")[2].replace(".", "_")
            data = changes.get(key, source.read(name))
            if data is not None:
                target.writestr("other/" + name.partition("/")[2], data)
    return out


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    torch.save({"x": torch.arange(6.0).reshape(2, 3), "n": 5}, tmp_path / "a.pt")
    return tmp_path / "a.pt"


def test_another_writer_and_prefix_read_the_same(saved: Path, tmp_path: Path) -> None:
    tree = read_container(_rezip(saved, tmp_path / "b.pt")).tree
    assert values(tree["x"]).tolist() == [[0, 1, 2], [3, 4, 5]]


def test_a_big_endian_record_is_said_to_be_one(saved: Path, tmp_path: Path) -> None:
    swapped = struct.pack(">6f", *range(6))
    tree = read_container(_rezip(saved, tmp_path / "b.pt", byteorder=b"big", **{"0": swapped})).tree
    assert tree["x"].source.big_endian
    assert values(tree["x"]).tolist() == [[0, 1, 2], [3, 4, 5]]


def test_a_compressed_storage_is_refused(saved: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(saved) as source, zipfile.ZipFile(tmp_path / "c.pt", "w", zipfile.ZIP_DEFLATED) as target:
        for name in source.namelist():
            target.writestr(name, source.read(name))
    with pytest.raises(DumpError, match="compressed"):
        read_container(tmp_path / "c.pt")


def test_a_missing_or_short_storage_is_refused(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(DumpError, match="no record data/0"):
        read_container(_rezip(saved, tmp_path / "b.pt", **{"0": None}))
    with pytest.raises(DumpError, match="not the size"):
        read_container(_rezip(saved, tmp_path / "b.pt", **{"0": b"\0" * 8}))


def test_a_zip_of_something_else_is_not_a_dump(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "z.pt", "w") as target:
        target.writestr("readme.txt", "hello")
    with pytest.raises(NotADumpError, match=r"data\.pkl") as caught:
        read_container(tmp_path / "z.pt")
    assert "readme.txt" in str(caught.value.found)


def test_a_capsule_says_what_opens_it(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "bug.capsule", "w") as target:
        target.writestr("capsule.json", "{}")
    with pytest.raises(NotADumpError) as refused:
        read_container(tmp_path / "bug.capsule")
    assert refused.value.hint == f"rldbg {tmp_path / 'bug.capsule'} runs a capsule again"


def test_a_zip_without_its_end_is_truncated(saved: Path) -> None:
    saved.write_bytes(saved.read_bytes()[:-30])
    with pytest.raises(TruncatedError, match="directory"):
        read_container(saved)


def test_zip64_sizes_and_offsets_are_followed(saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "wide.pt"
    with zipfile.ZipFile(saved) as source, zipfile.ZipFile(out, "w") as target:
        for name in source.namelist():
            with target.open(zipfile.ZipInfo(name), "w", force_zip64=True) as record:
                record.write(source.read(name))
    data = bytearray(out.read_bytes())
    end = data.rindex(b"PK\x05\x06")
    _, _, _, count, _, _, start, _ = struct.unpack("<4s4H2IH", data[end:])
    directory, at = b"", start
    for _ in range(count):
        entry = bytearray(data[at : at + 46])
        name_length, extra_length = struct.unpack_from("<HH", entry, 28)
        assert extra_length == 0
        packed, unpacked, local = *struct.unpack_from("<II", entry, 20), struct.unpack_from("<I", entry, 42)[0]
        struct.pack_into("<II", entry, 20, 0xFFFFFFFF, 0xFFFFFFFF)
        struct.pack_into("<H", entry, 30, 28)
        struct.pack_into("<I", entry, 42, 0xFFFFFFFF)
        directory += bytes(entry) + data[at + 46 : at + 46 + name_length]
        directory += struct.pack("<HHQQQ", 1, 24, unpacked, packed, local)
        at += 46 + name_length
    wide_end = struct.pack("<4sQ2H2I4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, len(directory), start)
    locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, start + len(directory), 1)
    tail = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    out.write_bytes(bytes(data[:start]) + directory + wide_end + locator + tail)
    with zipfile.ZipFile(out) as check:
        assert len(check.namelist()) == count
    assert values(read_container(out).tree["x"]).tolist() == [[0, 1, 2], [3, 4, 5]]


def test_zips_one_after_the_other_are_not_read_as_one(tmp_path: Path) -> None:
    """A rank's file of a torch.distributed.checkpoint: each zip counts its places from its own beginning."""
    content = b""
    for number in range(3):
        buffer = io.BytesIO()
        torch.save(torch.full((3,), float(number)), buffer)
        content += buffer.getvalue()
    path = tmp_path / "__0_0.distcp"
    path.write_bytes(content)
    with pytest.raises(DumpError, match="something before it"):
        read_container(path)


@pytest.mark.parametrize("writer", ["torch", "recorder", "zipfile"])
def test_large_storages_lie_where_the_directory_tells_and_where_only_headers_do(tmp_path: Path, writer: str) -> None:
    tensors = {f"layer{n}": torch.randn(3000 + n, generator=torch.Generator().manual_seed(n)) for n in range(12)}
    file = tmp_path / "a.pt"
    if writer == "recorder":
        with Recorder(tmp_path / "run").step(0) as record:
            made = record("modules", tensors, micro=0)
        assert made is not None
        file = made
    else:
        torch.save(tensors, file)
    if writer == "zipfile":
        file = _rezip(file, tmp_path / "b.pt")
    tree = read_container(file).tree
    with zipfile.ZipFile(file) as opened:
        by_zipfile = sorted(opened.read(name) for name in opened.namelist() if "/data/" in name)
    assert sorted(values(tree[name]).tobytes() for name in tensors) == by_zipfile
    assert all(torch.equal(torch.from_numpy(values(tree[name]).copy()), tensors[name]) for name in tensors)


def test_a_header_that_says_otherwise_than_the_directory_is_believed(tmp_path: Path) -> None:
    torch.save({f"layer{n}": torch.full((3000,), float(n)) for n in range(6)}, tmp_path / "a.pt")
    data = bytearray((tmp_path / "a.pt").read_bytes())
    with zipfile.ZipFile(tmp_path / "a.pt") as opened:
        first = next(entry for entry in opened.infolist() if entry.filename.endswith("data/0"))
    # Its extra field 64 bytes longer than the gap: the storage starts, and ends, 64 bytes later.
    length = struct.unpack_from("<H", data, first.header_offset + 28)[0]
    struct.pack_into("<H", data, first.header_offset + 28, length + 64)
    (tmp_path / "b.pt").write_bytes(data)
    tree = read_container(tmp_path / "b.pt").tree
    assert values(tree["layer0"]).tolist()[:2984] == [0.0] * 2984
    assert values(tree["layer0"]).tolist()[2984:] != [0.0] * 16
