"""An archive is torch's own form, with the right checksums, whoever takes them."""

from __future__ import annotations

import io
import sys
import zipfile
from collections.abc import Iterator

import pytest
import torch

from replay_core.recorder import archive


@pytest.fixture(params=["isal", "zlib"])
def summed_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    archive._fast_crc32.cache_clear()
    if request.param == "zlib":
        monkeypatch.setitem(sys.modules, "isal", None)
    else:
        pytest.importorskip("isal")
    yield request.param
    archive._fast_crc32.cache_clear()


def archived(content: object) -> io.BytesIO:
    file = io.BytesIO()
    archive.write(content, file)
    return file


@pytest.mark.parametrize("count", [0, 1, 1000, 300_000, (1 << 18) * 5 + 3])
def test_every_entry_has_its_checksum_and_torch_reads_it(summed_by: str, count: int) -> None:
    tensor = torch.randn(count)
    file = archived({"a": tensor, "b": tensor[: count // 2], "n": 3})
    with zipfile.ZipFile(file) as written:
        assert written.testzip() is None
    file.seek(0)
    read = torch.load(file, weights_only=True)
    assert torch.equal(read["a"], tensor)
    assert torch.equal(read["b"], tensor[: count // 2])
    assert read["n"] == 3


def test_both_ways_write_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("isal")
    tensor = torch.arange(1 << 20, dtype=torch.float32)
    archive._fast_crc32.cache_clear()
    fast = archived({"a": tensor}).getvalue()
    assert archive._fast_crc32() is not None
    archive._fast_crc32.cache_clear()
    monkeypatch.setitem(sys.modules, "isal", None)
    try:
        assert archived({"a": tensor}).getvalue() == fast
    finally:
        archive._fast_crc32.cache_clear()
