from __future__ import annotations

import errno
import json
import multiprocessing
from pathlib import Path

import numpy as np
import pytest
import torch

from replay_core import pages
from replay_core.dumps import open_run
from replay_core.errors import RecordExistsError, RequestError
from replay_core.recorder import Recorder
from replay_core.recorder.writer import commit
from tests.builders import row_of, write_dump


def stored(dump: Path) -> dict[str, np.ndarray]:
    return {ref.name: pages.array(ref) for record in open_run(dump).records for ref in record.tensors()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_what_is_recorded_is_what_was_there(dtype: torch.dtype, tmp_path: Path):
    value = (torch.arange(24).reshape(2, 3, 4) % 5).to(dtype)
    views = {"whole": value, "view": value[:, 1:, ::2], "turned": value.transpose(0, 2), "scalar": value[0, 0, 0]}
    found = stored(write_dump(tmp_path / "dump", {"modules": views}))
    for name, view in views.items():
        expected = view.float().numpy() if dtype is torch.bfloat16 else view.numpy()
        assert np.array_equal(found[name].astype(expected.dtype), expected)


def test_a_view_is_stored_without_the_storage_it_shares(tmp_path: Path):
    big = torch.zeros(1_000_000)
    dump = write_dump(tmp_path / "dump", {"modules": {"x": big[:10], "y": big[500_000:500_010]}})
    assert next((dump / "modules").glob("*.pt")).stat().st_size < 10_000


def test_recording_changes_nothing_of_the_trainers(tmp_path: Path):
    value = torch.randn(3, requires_grad=True)
    with Recorder(tmp_path / "dump").step(0) as record:
        record("loss", micro=0, loss=(value * 2).sum())
        loss = (value * 2).sum()
    loss.backward()
    assert value.grad is not None


def test_nothing_is_ever_overwritten(tmp_path: Path):
    recorder = Recorder(tmp_path / "dump")
    with recorder.step(0) as record:
        record("loss", micro=0, loss=1.0)
        with pytest.raises(RecordExistsError):
            record("loss", micro=0, loss=2.0)
        record("loss", micro=1, loss=2.0)
    assert len(open_run(tmp_path / "dump").records) == 2
    assert not list((tmp_path / "dump").rglob("*.tmp"))


def test_a_write_that_fails_leaves_nothing(tmp_path: Path):
    def fail(file: object) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        commit(tmp_path / "loss" / "x.pt", fail)
    assert list((tmp_path / "loss").iterdir()) == []


def test_a_full_disk_names_the_file_and_leaves_nothing(tmp_path: Path):
    def fail(file: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match=r"No space left on device: .*x\.pt"):
        commit(tmp_path / "loss" / "x.pt", fail)
    assert list((tmp_path / "loss").iterdir()) == []


def _record_rank(directory: str, rank: int) -> None:
    recorder = Recorder(directory)
    for step in range(3):
        with recorder.step(step, rank=rank) as record:
            record("loss", micro=0, loss=float(rank))


def test_ranks_record_side_by_side(tmp_path: Path):
    Recorder(tmp_path / "dump")
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_record_rank, args=(str(tmp_path / "dump"), rank)) for rank in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    opened = open_run(tmp_path / "dump")
    assert len(opened.records) == 9
    assert opened.problems == []


def test_the_index_tells_digest_dtype_and_shape_in_order(tmp_path: Path):
    fields = {"b": torch.ones(2, 3), "a": torch.ones(2, 3), "c": torch.zeros(2, 3), "n": 3}
    dump = write_dump(tmp_path / "dump", {"loss": fields})
    line = json.loads((dump / "index_rank0.jsonl").read_text())
    told = {field["name"]: field for field in line["fields"]}
    assert list(told) == ["b", "a", "c", "n"]
    assert told["a"]["digest"] == told["b"]["digest"] != told["c"]["digest"]
    assert (told["a"]["dtype"], told["a"]["shape"], told["n"]["dtype"]) == ("float32", [2, 3], "int")


@pytest.mark.parametrize(
    ("stage", "fields", "says"),
    [
        ("../out", {"x": 1}, "one plain word"),
        ("", {"x": 1}, "one plain word"),
        ("loss", {"step": 1}, "already names"),
        ("loss", {"x": torch.eye(2).to_sparse()}, "dense"),
        ("loss", {"x": torch.ones(2, device="meta")}, "dense"),
    ],
)
def test_what_cannot_be_recorded_is_refused_before_anything_is_written(
    stage: str, fields: dict[str, object], says: str, tmp_path: Path
):
    with Recorder(tmp_path / "dump").step(0) as record, pytest.raises(RequestError, match=says):
        record(stage, fields)
    assert open_run(tmp_path / "dump").records == []


def test_a_directory_of_somebody_elses_files_is_left_alone(tmp_path: Path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(RequestError, match="no native dump"):
        Recorder(tmp_path)


def test_nested_values_and_flags_come_back(tmp_path: Path):
    fields = {"deep": {"list": [torch.ones(2), torch.zeros(1)], "text": "x"}, "rows": [[1, 2], [3]]}
    dump = write_dump(tmp_path / "dump", {"loss": fields}, flags={"attention": "sdpa"}, model="some/model")
    opened = open_run(dump)
    assert opened.flags == {"attention": "sdpa"}
    assert opened.models == {None: "some/model"}
    assert [ref.name for ref in opened.records[0].tensors()] == ["deep.list.0", "deep.list.1", "deep.text", "rows"]


def test_the_same_recorded_twice_is_the_same(tmp_path: Path):
    from tests.builders import compare_paths

    fields = {"loss": {"loss": 1.0, "x": torch.randn(4)}}
    compared = compare_paths(write_dump(tmp_path / "a", fields), write_dump(tmp_path / "b", fields))
    assert row_of(compared, "x").reason == "bitwise equal"
