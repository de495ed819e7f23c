"""What a container says of its file stands at the record: nothing is left out or damaged without a word."""

from __future__ import annotations

import collections
import datetime
import decimal
import fractions
import io
import pickle
import types
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from replay_core import pages
from replay_core.dumps import open_run
from replay_core.errors import DumpError
from replay_core.records import Inline, Record
from tests.builders import Bomb, save_file


def only(path: Path) -> Record:
    return open_run(path).records[0]


def said(record: Record) -> list[str]:
    record.tensors()
    return [problem.what for problem in record.problems]


def values(record: Record) -> dict[str, Any]:
    return {ref.name: ref.source.value if isinstance(ref.source, Inline) else pages.array(ref).tolist()
            for ref in record.tensors()}  # fmt: skip


def test_several_pickles_in_one_file_are_not_the_first_alone(tmp_path: Path) -> None:
    path = tmp_path / "step_3.pkl"
    path.write_bytes(pickle.dumps({"loss": 0.5}) + pickle.dumps({"loss": 0.25}))
    assert said(only(path)) == [
        f"only the file's first pickle is read: {len(pickle.dumps({'loss': 0.25}))} bytes follow it"
    ]
    path.write_bytes(pickle.dumps({"loss": 0.5}))
    assert said(only(path)) == []


def test_several_arrays_and_streams_in_one_file_are_not_the_first_alone(tmp_path: Path) -> None:
    path = tmp_path / "values.npy"
    with open(path, "wb") as file:
        np.save(file, np.arange(3))
        np.save(file, np.arange(5))
    assert said(only(path)) == ["only the file's first array is read: 168 bytes follow it"]
    buffer = io.BytesIO()
    torch.save({"x": torch.ones(2)}, buffer, _use_new_zipfile_serialization=False)
    (tmp_path / "x.pt").write_bytes(buffer.getvalue() * 2)
    assert said(only(tmp_path / "x.pt")) == [
        f"only the file's first stream is read: {len(buffer.getvalue()):,} bytes follow it"
    ]


@pytest.mark.parametrize("folder", ["loss", "dump"])
def test_a_flipped_byte_among_the_numbers_is_said_in_every_dialect(tmp_path: Path, folder: str) -> None:
    path = save_file(tmp_path / folder / "step_000001_rank0_micro0.pt", {"step": 1, "loss": 0.5, "rank": 0})
    with zipfile.ZipFile(path) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("data.pkl")]
        at = path.read_bytes().index(archive.read(name))
    data = bytearray(path.read_bytes())
    data[data.index(b"G", at) + 4] ^= 0x10
    path.write_bytes(data)
    record = only(tmp_path)
    assert any("does not match its checksum" in what for what in said(record))
    assert said(record).count(said(record)[0]) == 1


def test_arrays_of_objects_are_read(tmp_path: Path) -> None:
    objects = np.array([{"tokens": np.arange(3), "text": "a"}, {"tokens": np.arange(2), "text": None}], dtype=object)
    np.save(tmp_path / "x.npy", objects)
    assert values(only(tmp_path / "x.npy"))["text.0"] == "a"
    np.savez_compressed(tmp_path / "x.npz", batch=np.array(["ä", None], dtype=object), ids=np.arange(2))
    record = only(tmp_path / "x.npz")
    assert list(values(record)) == ["batch.0", "ids"]
    assert values(record)["batch.0"] == "ä"
    assert said(record) == []


def test_an_array_of_objects_runs_nothing(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", bad=np.array([Bomb(f"touch {tmp_path}/ran")], dtype=object), ids=np.arange(2))
    record = only(tmp_path / "x.npz")
    assert pages.array(next(ref for ref in record.tensors() if ref.name == "ids")).tolist() == [0, 1]
    assert "system" in said(record)[0]
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("code", [">c8", ">c16", ">f2", ">i8"])
def test_big_endian_numbers_that_are_kept_in_memory_keep_their_values(tmp_path: Path, code: str) -> None:
    array = (np.arange(6) + (1j * np.arange(6, 12) if "c" in code else 0)).reshape(2, 3).astype(code)
    np.savez_compressed(tmp_path / "x.npz", c=array, f=np.asfortranarray(array))
    for ref in only(tmp_path / "x.npz").tensors():
        np.testing.assert_array_equal(pages.array(ref), array)


def test_dates_and_exact_numbers_do_not_cost_the_tensors_beside_them(tmp_path: Path) -> None:
    zone = datetime.timezone(datetime.timedelta(hours=2))
    held = {
        "at": datetime.datetime(2026, 3, 4, 5, 6, tzinfo=zone), "day": datetime.date(2026, 3, 4),
        "took": datetime.timedelta(seconds=90), "hour": datetime.time(7), "price": decimal.Decimal("1.50"),
        "part": fractions.Fraction(2, 6), "ids": range(3), "x": torch.ones(2),
    }  # fmt: skip
    texts = {"at": "2026-03-04T05:06:00 UTC offset 2:00:00", "day": "2026-03-04", "took": "0:01:30", "hour": "07:00:00",
             "price": "1.50", "part": "1/3", "ids": "range(0, 3)", "x": [1.0, 1.0]}  # fmt: skip
    torch.save(held, tmp_path / "x.pt")
    (tmp_path / "x.pkl").write_bytes(pickle.dumps(held))
    for name in ("x.pt", "x.pkl"):
        assert values(only(tmp_path / name)) == texts
    torch.save(types.SimpleNamespace(x=torch.ones(2), when=datetime.date(2026, 1, 1)), tmp_path / "n.pt")
    assert values(only(tmp_path / "n.pt"))["when"] == "2026-01-01"


def test_equal_sets_are_one_text_whatever_their_order(tmp_path: Path) -> None:
    one, two = set("abcdefgh"), set("hgfedcba")
    texts = []
    for name, items in (("a", one), ("b", frozenset(two)), ("c", collections.OrderedDict.fromkeys("hgfedcba"))):
        torch.save({"s": set(items) if name == "c" else items}, tmp_path / f"{name}.pt")
        texts.append(values(only(tmp_path / f"{name}.pt"))["s"])
    assert set(texts) == {"{'a', 'b', 'c', 'd', 'e', 'f', 'g', 'h'}"}


def test_a_hostile_number_is_an_error_and_no_flood(tmp_path: Path) -> None:
    long = "decimal\nDecimal", b"V1" + b"0" * 1_000 + b"\n"
    (tmp_path / "x.pkl").write_bytes(b"\x80\x02c" + long[0].encode() + b"\n" + long[1] + b"\x85R.")
    with pytest.raises(DumpError, match="wrong arguments"):
        only(tmp_path / "x.pkl").tensors()
