"""JSON lines, msgpack and parquet: what they hold comes out; what is damaged costs as little as it can."""

from __future__ import annotations

import builtins
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from replay_core import pages
from replay_core.dumps.containers import Content, read_container
from replay_core.errors import DumpError, TruncatedError
from replay_core.records import TensorRef

Write = Callable[[bytes], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def written(data: bytes) -> Path:
        path = tmp_path / "rows.jsonl"
        path.write_bytes(data)
        return path

    return written


def values(ref: TensorRef) -> list[Any]:
    listed: list[Any] = pages.array(ref).tolist()
    return listed


def columns(content: Content) -> dict[str, TensorRef]:
    assert all(isinstance(ref, TensorRef) for ref in content.tree.values())
    tree: dict[str, TensorRef] = content.tree
    return tree


def test_several_lines_become_columns_of_their_own_types(write: Write) -> None:
    rows = [
        {"id": 1, "ok": True, "x": 0.5, "text": "a", "ids": [1, 2], "grid": [[1, 2], [3, 4]], "meta": {"k": 1}},
        {"id": 2, "ok": False, "x": 1, "text": "b", "ids": [3], "grid": [[5, 6], [7, 8]], "meta": {"k": 2}},
    ]
    tree = columns(read_container(write(b"\n".join(json.dumps(row).encode() for row in rows) + b"\n")))
    assert {name: (ref.dtype, ref.shape, ref.rows) for name, ref in tree.items()} == {
        "id": ("int64", (2,), None),
        "ok": ("bool", (2,), None),
        "x": ("float64", (2,), None),
        "text": ("text", (2,), None),
        "ids": ("int64", (3,), (2, 1)),
        "grid": ("int64", (2, 2, 2), None),
        "meta.k": ("int64", (2,), None),
    }
    assert values(tree["ids"]) == [1, 2, 3]
    assert values(tree["grid"]) == [[[1, 2], [3, 4]], [[5, 6], [7, 8]]]


def test_null_among_numbers_is_nan_and_said_so(write: Write) -> None:
    tree = columns(read_container(write(b'{"x": [1, null], "y": null}\n{"x": [], "y": 2.5, "z": 1}\n')))
    assert np.isnan(values(tree["x"])[1])
    assert tree["x"].rows == (2, 0)
    assert tree["x"].sentinel == tree["y"].sentinel == tree["z"].sentinel == "null is stored as NaN"


def test_a_column_of_nothing_is_no_field(write: Write) -> None:
    assert set(columns(read_container(write(b'{"x": 1, "none": null}\n{"x": 2, "none": null}\n')))) == {"x"}


def test_bare_nan_and_infinity_are_read_and_noted(write: Write) -> None:
    content = read_container(write(b'{"x": NaN}\n{"x": -Infinity}\n'))
    assert np.isnan(values(content.tree["x"])[0])
    assert values(content.tree["x"])[1] == -np.inf
    assert "bare NaN" in content.notes[0]


def test_one_line_is_its_own_tree(write: Write) -> None:
    assert read_container(write(b'{"a": {"b": [1, 2]}}\n')).tree == {"a": {"b": [1, 2]}}


def test_a_document_over_several_lines_is_one_value(write: Write) -> None:
    assert read_container(write(json.dumps({"a": [1, {"b": 2}]}, indent=2).encode())).tree == {"a": [1, {"b": 2}]}


def test_a_line_cut_short_is_a_problem_and_not_the_end(write: Write) -> None:
    content = read_container(write(b'{"x": 1}\n{"x": 2}\n{"x": 3, "lo'))
    assert values(content.tree["x"]) == [1, 2]
    assert "cut short" in content.problems[0]


def test_a_damaged_line_in_the_middle_costs_that_line(write: Write) -> None:
    content = read_container(write(b'{"x": 1}\n{"x": \xff}\n{"x": 3}\n'))
    assert values(content.tree["x"]) == [1, 3]
    assert "line 2" in content.problems[0]


def test_a_file_without_one_readable_line_is_damaged(write: Write) -> None:
    with pytest.raises(DumpError, match="no line"):
        read_container(write(b'{"x": \n{"y":\n'))


@pytest.mark.parametrize("data", [b"[" * 200_000, b'{"a":' * 200_000])
def test_depth_is_bounded(write: Write, data: bytes) -> None:
    with pytest.raises(DumpError):
        read_container(write(data))


def test_one_huge_line_is_read(write: Write) -> None:
    numbers = list(range(400_000))
    content = read_container(write(json.dumps({"ids": numbers}).encode() + b'\n{"ids": [1]}\n'))
    assert content.tree["ids"].rows == (400_000, 1)
    assert pages.array(content.tree["ids"])[399_999] == 399_999


def test_a_column_for_every_row_is_refused(write: Write) -> None:
    rows = b"".join(b'{"k%d": 1}\n' % i for i in range(20_500))
    with pytest.raises(DumpError, match="more than what is stored"):
        read_container(write(rows))


def test_integers_past_64_bits_become_reals(write: Write) -> None:
    tree = read_container(write(b'{"x": 1, "y": [99999999999999999999]}\n{"x": 99999999999999999999, "y": [1]}\n')).tree
    assert tree["x"].dtype == tree["y"].dtype == "float64"


def test_texts_of_lone_surrogates_can_be_read(write: Write) -> None:
    assert read_container(write(b'{"t": "\\ud800"}\n{"t": "x"}\n')).tree["t"].shape == (2,)


def test_msgpack_is_one_value(tmp_path: Path) -> None:
    path = tmp_path / "rank_0.bin"
    path.write_bytes(msgspec.msgpack.encode([[[1, 2], [True]], [[3], [False]]]))
    assert read_container(path).tree == [[[1, 2], [True]], [[3], [False]]]
    path.write_bytes(msgspec.msgpack.encode({"a": [1.5]}))
    assert read_container(path).tree == {"a": [1.5]}


@pytest.mark.parametrize("data", [b"\xdd\xff\xff\xff\xff", b"\x91" * 100_000, b"\xdd\x00\xff\xff\xff" * 5000])
def test_msgpack_that_declares_more_than_it_holds_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "rank_0.bin"
    path.write_bytes(data)
    with pytest.raises(DumpError):
        read_container(path)


def test_parquet_columns_keep_their_types(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    table = pa.table(
        {
            "step": pa.array([1, 1], pa.int64()),
            "score": pa.array([0.5, None], pa.float32()),
            "tokens": pa.array([[1, 2, 3], [4]], pa.list_(pa.int32())),
            "prompt": pa.array([[{"role": "user", "content": "hi"}], [{"role": "user", "content": "ho"}]]),
        }
    )
    path = tmp_path / "completions_00001.parquet"
    pq.write_table(table, path)
    tree = columns(read_container(path))
    assert {name: (ref.dtype, ref.shape, ref.rows) for name, ref in tree.items()} == {
        "step": ("int64", (2,), None),
        "score": ("float32", (2,), None),
        "tokens": ("int32", (4,), (3, 1)),
        "prompt": ("text", (2,), None),
    }


def test_without_pyarrow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] == "pyarrow":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    path = tmp_path / "x.parquet"
    path.write_bytes(b"PAR1....PAR1")
    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(DumpError) as caught:
        read_container(path)
    assert "rldbg[parquet]" in str(caught.value)


def test_an_empty_file_is_truncated(write: Write) -> None:
    with pytest.raises(TruncatedError):
        read_container(write(b""))


def test_ids_of_64_bits_without_a_sign_stay_apart_and_what_is_rounded_says_so(write: Write) -> None:
    """A hash is such an id: as a float two neighbours are one."""
    rows = [{"uid": 2**64 - 1, "n": 2**70}, {"uid": 2**64 - 2, "n": 1}]
    tree = columns(read_container(write(b"\n".join(json.dumps(row).encode() for row in rows) + b"\n")))
    assert tree["uid"].dtype == "uint64"
    assert values(tree["uid"]) == [2**64 - 1, 2**64 - 2]
    assert (tree["n"].dtype, tree["n"].sentinel) == ("float64", "integers of more than 64 bits are rounded")
