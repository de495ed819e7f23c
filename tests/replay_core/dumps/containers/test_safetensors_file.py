"""safetensors: read as its own library reads it, refused where the format says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from replay_core.dumps.containers import read_container
from replay_core.errors import DumpError, TruncatedError
from replay_core.records import Unreadable
from tests.fixtures import FIXTURES
from tests.replay_core.dumps.containers.oracle import assert_same
from tests.replay_core.dumps.containers.strategies import DTYPES


def _write(path: Path, header: Any, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def _entry(dtype: str, shape: list[Any], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_every_dtype_reads_as_the_library_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "all.safetensors"
    tensors = {}
    for dtype in set(DTYPES) - {torch.complex128, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz}:
        size = torch.empty((), dtype=dtype).element_size()
        raw = torch.randint(0, 2 if dtype is torch.bool else 256, (2, 3, size), dtype=torch.uint8)
        tensors[str(dtype)] = raw.view(dtype).reshape(2, 3)
    tensors["empty"], tensors["scalar"] = torch.ones(0, 4), torch.tensor(3.0)
    save_file(tensors, path, metadata={"format": "pt"})
    content = read_container(path)
    assert content.container == "safetensors"
    assert content.metadata == {"format": "pt"}
    loaded = load_file(path)
    assert_same({name: content.tree[name] for name in loaded}, loaded)


def test_a_genuine_checkpoint_reads_equal() -> None:
    for path in FIXTURES.glob("trl/tiny_qwen2/*.safetensors"):
        loaded = load_file(path)
        tree = read_container(path).tree
        assert_same({name: tree[name] for name in loaded}, loaded)


@pytest.mark.parametrize(
    ("header", "nbytes", "what"),
    [
        ({"a": _entry("F32", [2], 0, 8), "b": _entry("F32", [2], 4, 12)}, 12, "overlap"),
        ({"a": _entry("F32", [2], 0, 8), "b": _entry("F32", [2], 12, 20)}, 20, "hole"),
        ({"a": _entry("F32", [3], 0, 8)}, 8, "as long as its shape"),
        ({"a": _entry("F32", [-1], 0, 8)}, 8, "impossible shape"),
        ({"a": _entry("F32", [2**40, 2**40], 0, 8)}, 8, "impossible shape"),
        ({"a": _entry("F32", [True, 2], 0, 8)}, 8, "impossible shape"),
        ({"a": _entry("F32", [2], 8, 0)}, 8, "ends before"),
        ({"a": _entry("F32", [2], 0, 8)}, 9, "no tensor"),
        ({"a": 3}, 0, "dtype"),
        (b"{" + b'"a":{' * 100_000, 0, "JSON"),
        (b'{"a":1,"a":2}', 0, "twice"),
        (b'{"__metadata__":{"a":1}}', 0, "metadata"),
        (b"{nonsense", 0, "JSON"),
    ],
)
def test_a_header_the_format_forbids_is_refused(tmp_path: Path, header: Any, nbytes: int, what: str) -> None:
    with pytest.raises(DumpError, match=what):
        read_container(_write(tmp_path / "x.safetensors", header, b"\0" * nbytes))


def test_a_header_longer_than_the_file_is_truncated(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes((90_000_000).to_bytes(8, "little") + b'{"a"')
    with pytest.raises(TruncatedError):
        read_container(path)


def test_missing_data_is_truncated(tmp_path: Path) -> None:
    with pytest.raises(TruncatedError):
        read_container(_write(tmp_path / "x.safetensors", {"a": _entry("F32", [2], 0, 8)}, b"\0" * 7))


def test_a_dtype_numpy_lacks_is_unreadable(tmp_path: Path) -> None:
    tree = read_container(_write(tmp_path / "x", {"a": _entry("F4", [2], 0, 1)}, b"\0")).tree
    assert isinstance(tree["a"].source, Unreadable)


def test_a_header_whose_length_looks_like_a_pickle_is_still_safetensors(tmp_path: Path) -> None:
    text = b"{}".ljust(0x0280)
    assert read_container(_write(tmp_path / "x", text)).container == "safetensors"
