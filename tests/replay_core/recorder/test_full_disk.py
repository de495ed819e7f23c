"""A disk with no room at all: a trainer that asked to go on goes on, whatever it asks of the recorder next."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from replay_core.dumps import open_run
from replay_core.errors import DumpError
from replay_core.recorder import BlackBox, Recorder
from replay_core.recorder.writer import append_line

resource = pytest.importorskip("resource")


@contextmanager
def room_for(nbytes: int) -> Iterator[None]:
    """No file may grow past so many bytes: a write is refused as a full disk refuses it, half way through."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


class Weights(torch.nn.Linear):
    def save_pretrained(self, path: Path, **_: Any) -> None:
        path.mkdir(parents=True)
        torch.save(self.state_dict(), path / "weights.pt")


def record_a_step(recorder: Recorder) -> None:
    with recorder.step(0) as record:
        record("loss", loss=torch.tensor(float("nan")))


@pytest.mark.parametrize("options", [{}, {"asynchronous": True}, {"level": "stats"}, {"max_keep": 1}, {"boxed": True}])
@pytest.mark.parametrize(
    "ask",
    [
        record_a_step,
        lambda recorder: recorder.note(seed=3),
        lambda recorder: recorder.note_model(0, "model"),
        lambda recorder: recorder.checkpoint(0, Weights(9, 9)),
    ],
    ids=["a record", "a fact", "a model's name", "a checkpoint"],
)
def test_with_warn_nothing_the_recorder_is_asked_stops_the_trainer(ask: Any, options: Any, tmp_path: Path) -> None:
    boxed = BlackBox(steps=2) if options.get("boxed") else None
    options = {name: value for name, value in options.items() if name != "boxed"}
    recorder = Recorder(tmp_path, on_error="warn", black_box=boxed, **options)
    with room_for(0), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        ask(recorder)
        recorder.close()
    assert recorder.lost
    assert len([one for one in said if "training goes on" in str(one.message)]) == 1
    assert not [path for path in tmp_path.rglob("*") if ".tmp" in path.name]
    assert json.loads((tmp_path / "manifest.json").read_text())["models"] == {}


def test_with_raise_a_note_that_cannot_be_kept_is_told_in_words(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    with room_for(0), pytest.raises(DumpError, match="cannot be written"):
        recorder.note(seed=3)


def test_half_a_line_is_taken_back_so_that_the_next_one_stands_alone(tmp_path: Path) -> None:
    index = tmp_path / "index_rank0.jsonl"
    append_line(index, b'{"first": 1}')
    with room_for(20), pytest.raises(OSError, match="large"):
        append_line(index, b'{"second": 22222222222222222222}')
    append_line(index, b'{"third": 3}')
    assert index.read_bytes().splitlines() == [b'{"first": 1}', b'{"third": 3}']


def test_a_record_whose_file_is_whole_is_not_lost_for_want_of_its_index_line(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, on_error="warn")
    index = tmp_path / "index_rank0.jsonl"
    for step in range(40):
        with recorder.step(step) as record:
            record("loss", loss=1.0)
    with room_for(index.stat().st_size), recorder.step(40) as record:
        record("loss", loss=2.0)
    assert recorder.lost == []
    assert [one.key.step for one in open_run(tmp_path).records] == list(range(41))
    recorder.close()
    with Recorder(tmp_path).step(41) as record:
        record("loss", loss=3.0)
    listed = [json.loads(line)["key"]["step"] for line in index.read_bytes().splitlines()]
    assert sorted(listed) == list(range(42))
