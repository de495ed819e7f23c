"""Rows that are held in little are the rows of the document, and its text is the same text."""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from replay_core import workbench
from replay_core.export import entries
from replay_core.export.entries import Entries
from replay_core.export.written import pieces
from replay_core.recorder import Recorder


def _ranks(path: Path, side: str) -> Path:
    """Three ranks: equal tensors, an odd one, noise, NaN, another shape and dtype, a text, one that b lacks."""
    for rank in range(3):
        generator = torch.Generator().manual_seed(rank)
        made: dict[str, Any] = {f"layers.{n}.output": torch.randn(4, 8, generator=generator) for n in range(6)}
        made["layers.6.output"] = torch.zeros(3, 2)
        if side == "b":
            made["layers.2.output"] = made["layers.2.output"] * (2.0 if rank == 1 else 1 + 1e-7)
            made["layers.3.output"][1, 1] = float("nan")
            made["layers.4.output"] = made["layers.4.output"].double()
            made["layers.5.output"] = made["layers.5.output"][:2]
            del made["layers.6.output"]
        with Recorder(path / side).step(0, rank=rank) as record:
            record("modules", made, micro=0)
            record("loss", {"loss": torch.tensor(1.0 + (side == "b" and rank == 2)), "said": "in words"}, micro=0)
    return path / side


@pytest.fixture(name="dumps", scope="module")
def _dumps(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    path = tmp_path_factory.mktemp("ranks")
    return _ranks(path, "a"), _ranks(path, "b")


def _without_time(text: str) -> list[str]:
    return [line for line in text.splitlines() if '"created"' not in line]


def test_the_document_of_rows_held_in_little_is_the_same_to_the_letter(dumps: tuple[Path, Path]) -> None:
    listed = workbench.compare_dumps(*dumps)
    little = workbench.compare_dumps(*dumps, is_rejudged=False)
    assert isinstance(little["tensors"], Entries)
    words = {row["verdict"] for row in listed["tensors"]}
    assert words >= {"SAME", "CLOSE", "DIFF", "NAN", "SHAPE", "MISSING"}, "every kind of row is here"
    said = json.dumps(listed, indent=1, allow_nan=False)
    assert _without_time("".join(pieces(little))) == _without_time(said)
    assert _without_time("".join(pieces(listed))) == _without_time(said)


def test_rows_are_found_by_number_as_in_a_list(dumps: tuple[Path, Path]) -> None:
    listed = list(workbench.compare_dumps(*dumps)["tensors"])
    little = workbench.compare_dumps(*dumps, is_rejudged=False)["tensors"]
    assert len(little) == len(listed)
    assert [little[number] for number in range(-len(listed), len(listed))] == [*listed, *listed]
    assert little[2:-1:3] == listed[2:-1:3]
    with pytest.raises(IndexError, match="row 99 of"):
        little[99]


def test_a_row_that_is_changed_changes_no_other(dumps: tuple[Path, Path]) -> None:
    little = workbench.compare_dumps(*dumps, is_rejudged=False)["tensors"]
    before = list(little)
    for row in little:
        row["name"], row["reason"] = "changed", "by whoever looks"
    assert list(little) == before


@pytest.mark.parametrize("has_room", [True, False])
def test_many_rows_go_to_a_file_and_stay_in_memory_where_none_can_be_written(
    has_room: bool, dumps: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Any] = []
    known = tempfile.TemporaryFile

    def file(**options: Any) -> Any:
        if not has_room:
            raise OSError(28, "No space left on device")
        opened.append(known(**options))
        return opened[-1]

    monkeypatch.setattr(entries, "_HELD_BYTES", 2000)
    monkeypatch.setattr(tempfile, "TemporaryFile", file)
    little = workbench.compare_dumps(*dumps, is_rejudged=False)["tensors"]
    assert list(little) == list(workbench.compare_dumps(*dumps)["tensors"])
    assert bool(opened) is has_room
    if has_room:
        assert opened[0].seek(0, 2) > 2000, "rows that differ lie in the file"


@pytest.mark.parametrize("value", [{}, {"a": []}, {"a": {}, "b": [1, "x\ny", None]}, {"a": [{"kind": "x", "b": [[]]}]},
                                   {"a": "é\ud800", "b": [{"c": {"d": [1.5, {}]}}]}])  # fmt: skip
def test_the_text_in_pieces_is_json_s_own(value: Any) -> None:
    assert "".join(pieces(value)) == json.dumps(value, indent=1, allow_nan=False)
    assert json.loads("".join(pieces(value))) == value
