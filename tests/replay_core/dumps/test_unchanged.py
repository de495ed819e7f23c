"""A run that lies there as it did is not listed again; whatever came, went or changed is seen at once."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import force_setattr

from replay_core.dumps import native, open_run
from replay_core.recorder import Recorder


def write(directory: Path, *micros: int) -> Path:
    with Recorder(directory, format="safetensors") as recorder, recorder.step(0) as record:
        for micro in micros:
            record("loss", micro=micro, loss=float(micro), values=np.arange(3.0))
    return directory


def settle(directory: Path) -> None:
    """As if nothing had been written for a while."""
    for place in (directory, *directory.rglob("*")):
        os.utime(place, (1_700_000_000, 1_700_000_000))


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """Each time that a dump's index is read."""
    times: list[Path] = []
    real = native.DIALECT.index

    def index(path: Path) -> object:
        times.append(path)
        return real(path)

    force_setattr(native.DIALECT, "index", index)
    monkeypatch.setattr("replay_core.dumps.unchanged._opened", OrderedDict())
    yield times
    force_setattr(native.DIALECT, "index", real)


def micros(directory: Path) -> list[int | None]:
    return [record.key.micro for record in open_run(directory).records]


def test_a_run_is_listed_twice_to_see_that_it_rests_and_then_no_more(tmp_path: Path, listed: list[Path]) -> None:
    settle(write(tmp_path, 0, 1))
    for _ in range(5):
        run = open_run(tmp_path)
        assert [record.key.micro for record in run.records] == [0, 1]
        assert not run.problems, "nor is what a reader added to it there at the next"
        assert [record.is_read for record in run.records] == [False, False]
        assert [ref.name for ref in run.records[0].tensors()] == ["loss", "values"]
        run.problems.append(run)  # type: ignore[arg-type]
    assert len(listed) == 2


def test_a_run_that_changed_a_moment_ago_is_listed_each_time(tmp_path: Path, listed: list[Path]) -> None:
    write(tmp_path, 0)
    for _ in range(3):
        open_run(tmp_path)
    assert len(listed) == 3


def test_what_comes_goes_or_is_noted_is_seen(tmp_path: Path, listed: list[Path]) -> None:
    settle(write(tmp_path, 0, 1))
    for _ in range(3):
        assert micros(tmp_path) == [0, 1]
    write(tmp_path, 2)
    assert micros(tmp_path) == [0, 1, 2]
    settle(tmp_path)
    for _ in range(3):
        assert micros(tmp_path) == [0, 1, 2]
    next(tmp_path.rglob("*micro1*")).unlink()
    assert micros(tmp_path) == [0, 2]
    settle(tmp_path)
    for _ in range(3):
        assert open_run(tmp_path).models == {}
    Recorder(tmp_path).note_model(0, "weights")
    assert open_run(tmp_path).models == {0: "weights"}


def test_a_record_that_was_written_anew_is_read_as_it_is(tmp_path: Path, listed: list[Path]) -> None:
    settle(write(tmp_path / "a", 0))
    for _ in range(3):
        open_run(tmp_path / "a")
    file = next((tmp_path / "a").rglob("step_*"))
    with Recorder(tmp_path / "b", format="safetensors") as recorder, recorder.step(0) as record:
        record("loss", micro=0, loss=7.0, other=np.arange(3.0))
    with open(file, "r+b") as old:  # in its place: no folder changes
        old.truncate(old.write(next((tmp_path / "b").rglob("step_*")).read_bytes()))
    run = open_run(tmp_path / "a")
    assert "other" in [ref.name for ref in run.records[0].tensors()]


def test_a_folder_that_was_emptied_or_replaced_is_another_run(tmp_path: Path, listed: list[Path]) -> None:
    settle(write(tmp_path / "a", 0))
    for _ in range(3):
        assert micros(tmp_path / "a") == [0]
    (tmp_path / "a").rename(tmp_path / "old")
    settle(write(tmp_path / "a", 5))
    assert micros(tmp_path / "a") == [5]


def test_a_whole_path_opens_where_the_folder_one_stands_in_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dump = write(tmp_path / "dump", 0)
    monkeypatch.setattr(os, "getcwd", lambda: (_ for _ in ()).throw(FileNotFoundError(2, "no such folder")))
    assert micros(dump) == [0]
