"""Damaged and malicious files: an error of ours, at once, and nothing run."""

from __future__ import annotations

import io
import os
import pickle
import random
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from replay_core.dumps.containers import read_container
from replay_core.errors import DumpError, RldbgError, TruncatedError, UnsafeFileError
from replay_core.records import TensorRef
from tests.replay_core.dumps.containers.oracle import assert_same, values


class Calls:
    """Pickles as a call of `function`."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.function, self.args = function, args

    def __reduce__(self) -> Any:
        return self.function, self.args


def _legacy(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, _use_new_zipfile_serialization=False)
    return buffer.getvalue()


def _zip(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _nested(value: Any) -> bytes:
    return pickle.dumps(Calls(torch.storage._load_from_bytes, _legacy(value)))


@pytest.mark.parametrize("wrap", [pickle.dumps, _legacy, _zip, _nested])
@pytest.mark.parametrize("kind", ["system", "eval", "getattr"])
def test_a_file_that_asks_to_run_code_is_refused_by_name_and_runs_nothing(tmp_path: Path, wrap: Any, kind: str) -> None:
    witness, path = tmp_path / "witness", tmp_path / "evil.pt"
    call = {
        "system": Calls(os.system, f"touch {witness}"),
        "eval": Calls(eval, f"open({str(witness)!r}, 'w')"),
        "getattr": Calls(getattr, witness, "touch"),
    }[kind]
    path.write_bytes(wrap({"tensor": torch.ones(2), "x": call}))
    with pytest.raises(UnsafeFileError, match="system" if kind == "system" else f"builtins.{kind}") as caught:
        read_container(path)
    assert caught.value.file == str(path)
    assert caught.value.hint
    assert not witness.exists()


def test_a_global_that_is_only_mentioned_is_refused_too(tmp_path: Path) -> None:
    path = tmp_path / "f.pkl"
    path.write_bytes(b"\x80\x02cos\nsystem\n0N.")
    with pytest.raises(UnsafeFileError, match=r"os\.system"):
        read_container(path)


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x04B\x00\x00\x00\x60.",
        b"\x80\x04\x8e\x00\x00\x00\x60\x00\x00\x00\x00.",
        b"\x80\x02X\x00\x00\x00\x60.",
        b"\x80\x05\x96\x00\x00\x00\x60\x00\x00\x00\x00.",
        b"\x80\x02\x8b\x00\x00\x00\x60.",
        b"\x80\x04\x95\x00\x00\x00\x60\x00\x00\x00\x00N.",
    ],
)
def test_a_few_bytes_that_declare_gigabytes_are_truncated_at_once(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "nine.pkl"
    path.write_bytes(data)
    start = time.perf_counter()
    with pytest.raises(TruncatedError) as caught:
        read_container(path)
    assert time.perf_counter() - start < 0.1
    assert caught.value.file == str(path)
    assert caught.value.expected
    assert caught.value.found


def test_a_giant_memo_index_costs_nothing(tmp_path: Path) -> None:
    path = tmp_path / "memo.pkl"
    path.write_bytes(b"\x80\x02]r\xff\xff\xff\xfb.")
    assert read_container(path).tree == []


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"\x80\x02}]Ns.", "key"),
        (b"\x80\x02]q\x00h\x00a.", "contains itself"),
        (b"\x80\x02" + b"]" * 300 + b"a" * 299 + b".", "deep"),
        (b"\x80\x02]" + b"".join(b"q\x00](h\x00" + b"h\x00" * 9 + b"e" for _ in range(40)) + b".", "stops|unfolds"),
        (b"\x80\x02a.", "empty stack|truncated|ends before"),
        (b"\x80\x02h\x05.", "memo 5"),
        (b"\x80\x02NNR.", "not a function"),
        (b"\x80\x02N}b.", "state of a NoneType"),
        (b"\x80\x02\xff.", "opcode"),
        (b"\x80\x02NQ.", "persistent"),
        (b"\x80\x05\x97.", "second stream"),
        (b"\x80\x02(((.", "unfinished"),
    ],
)
def test_what_no_pickler_writes_is_a_dump_error(tmp_path: Path, data: bytes, what: str) -> None:
    path = tmp_path / "odd.pkl"
    path.write_bytes(data)
    with pytest.raises(DumpError, match=what):
        read_container(path)


def test_a_structure_that_unfolds_without_end_is_refused(tmp_path: Path) -> None:
    value: list[Any] = [1, 2]
    for _ in range(60):
        value = [value, value]
    path = tmp_path / "laughs.pkl"
    path.write_bytes(pickle.dumps(value))
    with pytest.raises(DumpError, match="unfolds"):
        read_container(path)


def test_a_dictionary_of_colliding_keys_is_refused_quickly(tmp_path: Path) -> None:
    path = tmp_path / "flood.pkl"
    path.write_bytes(pickle.dumps({i * (2**61 - 1): 0 for i in range(1, 200)} | {}))
    assert len(read_container(path).tree) == 199
    items = b"".join(b"\x8a\x0a" + (i * (2**61 - 1)).to_bytes(10, "little") + b"N" for i in range(1, 60_000))
    path.write_bytes(b"\x80\x02}(" + items + b"u.")
    start = time.perf_counter()
    with pytest.raises(DumpError, match="keys"):
        read_container(path)
    assert time.perf_counter() - start < 2


@pytest.mark.parametrize("size", [b"K\x05", b"J\xff\xff\xff\xff", b"\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f"])
def test_a_view_that_reaches_past_its_storage_is_refused(tmp_path: Path, size: bytes) -> None:
    data = _legacy(torch.arange(4, dtype=torch.int64))
    assert data.count(b"K\x04\x85") == 1
    path = tmp_path / "view.pt"
    path.write_bytes(data.replace(b"K\x04\x85", size + b"\x85"))
    with pytest.raises(DumpError, match=r"reaches past|geometry"):
        read_container(path)


SAMPLES = {
    "zip": lambda: _zip({"a": torch.randn(3, 4).t(), "b": [torch.arange(5), 1.5, "text"], "c": np.arange(4.0)}),
    "legacy": lambda: _legacy({"a": torch.randn(3, 4), "b": (torch.arange(5, dtype=torch.int16), None)}),
    "pickle": lambda: pickle.dumps({"a": torch.randn(3), "n": np.ones((2, 3)), "l": list(range(40)), "s": {1, 2}}),
    "pickle0": lambda: b"\x80\x02" + pickle.dumps({"a": [1, 2.5, 10**30, "tê", b"x"], "c": 1j}, 0),
}


@pytest.mark.parametrize("kind", SAMPLES)
def test_a_file_cut_anywhere_is_an_error_of_ours(tmp_path: Path, kind: str) -> None:
    data, path = SAMPLES[kind](), tmp_path / "cut"
    lengths = range(len(data)) if len(data) < 800 else sorted(random.Random(3).sample(range(len(data)), 400))
    for length in lengths:
        path.write_bytes(data[:length])
        with pytest.raises(RldbgError):
            read_container(path)


@pytest.mark.parametrize("kind", SAMPLES)
def test_a_file_with_flipped_bytes_stays_inside_the_file_or_is_an_error_of_ours(tmp_path: Path, kind: str) -> None:
    data, path, rng = SAMPLES[kind](), tmp_path / "flipped", random.Random(5)
    for _ in range(400):
        damaged = bytearray(data)
        for _ in range(rng.choice([1, 1, 1, 3])):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        path.write_bytes(damaged)
        try:
            tree = read_container(path).tree
        except RldbgError:
            continue
        _touch(tree)


def _touch(tree: Any) -> None:
    """Whatever was declared readable must lie inside the file and be as long as it says."""
    if isinstance(tree, TensorRef) and tree.is_readable:
        values(tree)
    elif isinstance(tree, dict):
        for value in tree.values():
            _touch(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            _touch(value)


@pytest.mark.long
def test_flipped_opcodes_never_read_as_something_else_than_pickle_reads(tmp_path: Path) -> None:
    data = pickle.dumps({"a": [1, 2.5, 10**30, "tê", b"x"], "c": (None, True), "l": list(range(300, 330))}, 4)
    path, rng, equal = tmp_path / "flipped.pkl", random.Random(7), 0
    for _ in range(1500):
        damaged = bytearray(data)
        damaged[rng.randrange(2, len(damaged))] = rng.randrange(256)
        path.write_bytes(damaged)
        try:
            tree = read_container(path).tree
        except RldbgError:
            continue
        try:
            theirs = pickle.loads(bytes(damaged))
        except UnicodeDecodeError:  # Python 2 texts: pickle takes ASCII, torch and we UTF-8
            continue
        assert_same(tree, theirs)
        equal += 1
    assert equal > 100


@pytest.mark.long
def test_a_state_dict_with_flipped_opcodes_never_reads_as_something_else_than_torch_reads(tmp_path: Path) -> None:
    data = _zip({f"layer.{i}": torch.full((2, 3), float(i)) for i in range(6)})
    start = data.index(b"\x80\x02}")
    end = data.index(b"u.", start)
    path, rng, equal = tmp_path / "flipped.pt", random.Random(11), 0
    for _ in range(600):
        damaged = bytearray(data)
        damaged[rng.randrange(start, end)] = rng.randrange(256)
        path.write_bytes(damaged)
        try:
            content = read_container(path)
        except RldbgError:
            continue
        assert content.problems or damaged == data
        try:
            theirs = torch.load(path, weights_only=True)
        except Exception:
            continue
        assert_same(content.tree, theirs)
        equal += 1
    assert equal > 20


def test_reading_a_large_hostile_pickle_stays_small(tmp_path: Path) -> None:
    path = tmp_path / "big.pkl"
    path.write_bytes(b"\x80\x04\x8e" + struct.pack("<Q", 64 << 20) + b"\0" * (64 << 20) + b".")
    code = (
        "import resource, sys; from replay_core.dumps.containers import read_container\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "ref = read_container(sys.argv[1]).tree\n"
        "print(ref.shape[0], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    size, grown_kib = map(int, done.stdout.split())
    assert size == 64 << 20
    assert grown_kib < 16 << 10


def test_a_global_cut_before_its_newline_is_truncated(tmp_path: Path) -> None:
    path = tmp_path / "cut.pkl"
    path.write_bytes(b"\x80\x02ctorch\nFloatStorageX")
    with pytest.raises(TruncatedError):
        read_container(path)
