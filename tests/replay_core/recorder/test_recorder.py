from __future__ import annotations

import enum
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from replay_core.dumps import open_run
from replay_core.errors import DumpError, RecordExistsError, RequestError
from replay_core.recorder import Recorder


def files(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("step_*"))


def test_a_second_write_of_a_key_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    with Recorder(tmp_path).step(0) as record:
        first = record("loss", loss=1.0, micro=0)
        with pytest.raises(RecordExistsError, match="nothing recorded is ever overwritten"):
            record("loss", loss=2.0, micro=0)
    assert torch.load(first)["loss"] == 1.0


@pytest.mark.parametrize("options", [{}, {"level": "hash"}, {"asynchronous": True}])
def test_a_later_run_on_the_same_directory_does_not_overwrite_either(options: dict[str, Any], tmp_path: Path) -> None:
    with Recorder(tmp_path, **options) as recorder, recorder.step(0) as record:
        record("loss", loss=torch.ones(1))
    with Recorder(tmp_path, **options) as again, again.step(0) as record, pytest.raises(RecordExistsError):
        record("loss", loss=torch.zeros(1))


def test_micro_runs_on_across_epochs_and_mini_batches(tmp_path: Path) -> None:
    with Recorder(tmp_path).step(0) as record:
        for epoch in range(2):
            for minibatch in range(2):
                for micro in range(2):
                    for stage in ("forward_data", "loss"):
                        number = record.running(epoch, minibatch, micro)
                        record(stage, micro=number, epoch=epoch, minibatch=minibatch, value=torch.ones(1))
        with pytest.raises(RecordExistsError, match=r"record\.running"):
            record("loss", micro=0, epoch=1, minibatch=1, value=1)
    keys = [r.key for r in open_run(tmp_path).records if r.key.stage == "loss"]
    assert [(k.micro, k.epoch, k.minibatch) for k in keys] == [
        (0, 0, 0), (1, 0, 0), (2, 0, 1), (3, 0, 1), (4, 1, 0), (5, 1, 0), (6, 1, 1), (7, 1, 1),
    ]  # fmt: skip


def test_steps_and_stages_that_are_left_out_cost_no_file(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, dump_every_n_steps=2, stages={"loss"})
    for step in range(4):
        with recorder.step(step) as record:
            assert (record("loss", loss=1.0) is not None) == (step % 2 == 0)
            assert record("trajectory", tokens=object()) is None
    assert files(tmp_path) == ["loss/step_000000_rank0.pt", "loss/step_000002_rank0.pt"]


def test_a_recorder_that_is_off_touches_no_disk(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "none", enabled=False)
    with recorder.step(0) as record:
        assert record("loss", loss=1.0) is None
    recorder.note(seed=1)
    recorder.close()
    assert not (tmp_path / "none").exists()


def test_hash_level_keeps_digests_and_stats_level_keeps_figures(tmp_path: Path) -> None:
    values = torch.tensor([1.0, -3.0, 0.0, float("nan"), float("inf")])
    for level in ("hash", "stats", "full"):
        with Recorder(tmp_path / level, level=level).step(0) as record:
            record("forward_data", log_probs=values, temperature=0.7)
    assert files(tmp_path / "hash") == []
    assert files(tmp_path / "stats") == []
    lines = {n: json.loads((tmp_path / n / "index_rank0.jsonl").read_text()) for n in ("hash", "stats", "full")}
    digests = {line["fields"][0]["digest"] for line in lines.values()}
    assert len(digests) == 1
    assert lines["stats"]["fields"][0]["stats"] == {
        "count": 5, "nan": 1, "posinf": 1, "neginf": 0, "zero": 1,
        "min": -3.0, "max": 1.0, "mean": pytest.approx(-2 / 3), "std": pytest.approx(1.6997, abs=1e-4),
        "l2": pytest.approx(10**0.5),
    }  # fmt: skip
    (record_,) = open_run(tmp_path / "stats").records
    logprobs, temperature = record_.tensors()
    assert (logprobs.dtype, logprobs.shape, logprobs.is_readable) == ("float32", (5,), False)
    assert logprobs.digest in digests
    assert temperature.is_readable


def test_a_view_is_stored_as_its_own_bytes_and_a_shared_tensor_once(tmp_path: Path) -> None:
    large = torch.zeros(1_000_000)
    with Recorder(tmp_path).step(0) as record:
        view = record("loss", part=large[:10].view(2, 5).t())
        shared = record("modules", a=large, b=large)
    assert view is not None
    assert view.stat().st_size < 4_000
    assert shared is not None
    assert shared.stat().st_size < 4_100_000
    assert torch.load(view)["part"].shape == (5, 2)


def test_plain_kinds_of_values_are_recorded_as_what_they_hold(tmp_path: Path) -> None:
    class Kind(str, enum.Enum):
        A = "a"

    with Recorder(tmp_path).step(0) as record:
        path = record(
            "loss",
            array=np.arange(3, dtype=np.float32)[::-1],
            number=np.float32(0.5),
            objects=np.array(["x", None], dtype=object),
            kind=Kind.A,
            dtype=torch.bfloat16,
            nothing=None,
            parameter=torch.nn.Parameter(torch.ones(2)),
        )
    content = torch.load(path, weights_only=True)
    assert content["array"].tolist() == [2, 1, 0]
    assert (content["number"], content["objects"], content["kind"]) == (0.5, ["x", None], "a")
    assert (content["dtype"], content["nothing"]) == ("bfloat16", None)
    assert not content["parameter"].requires_grad


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (object(), "builtins.object"),
        (torch.ones(2, 2).to_sparse(), "sparse_coo"),
        (torch.ones(2, device="meta"), "meta"),
        (torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged), "nested"),
        ({1, 2}, "builtins.set"),
    ],
)
def test_a_value_no_record_can_hold_is_refused_by_name(value: object, found: str, tmp_path: Path) -> None:
    with Recorder(tmp_path).step(0) as record, pytest.raises(RequestError) as refusal:
        record("loss", fine=1.0, deep={"rows": [value]})
    assert refusal.value.tensor == "deep.rows.0"
    assert found in str(refusal.value.found)
    assert files(tmp_path) == []


def test_with_warn_the_trainer_goes_on_and_is_told_once(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, on_error="warn")
    with recorder.step(0) as record, pytest.warns(RuntimeWarning, match="is lost") as warned:  # noqa: PT031 - told once
        record("loss", value=object())
        record("loss", loss=1.0)
        record("loss", loss=2.0)
    assert len(warned) == 1
    assert ["tensors, numbers" in lost.why or "already on disk" in lost.why for lost in recorder.lost] == [True, True]
    recorder.close()
    assert len(json.loads((tmp_path / "manifest.json").read_text())["facts"]["lost"]) == 2
    run = open_run(tmp_path)
    assert len(run.records) == 1
    assert ["a record was lost" in problem.what for problem in run.problems] == [True, True]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_is_told_in_words_and_harms_nothing_committed(asynchronous: bool, tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, asynchronous=asynchronous)
    with recorder.step(0) as record:
        record("loss", loss=1.0)
    recorder.flush()
    # A limit on file sizes refuses the write as a full disk does: half way through.
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(DumpError, match="be written"), recorder.step(1) as record:  # noqa: PT012 - by then
            record("loss", loss=torch.zeros(100_000))
            recorder.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [record.key.step for record in open_run(tmp_path).records] == [0]
    assert not list(tmp_path.rglob("*.tmp"))
    with recorder.step(2) as record:
        record("loss", loss=3.0)
    recorder.close()
    assert [record.key.step for record in open_run(tmp_path).records] == [0, 2]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_nobody_may_write_is_refused_at_the_start(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(RequestError, match="cannot be recorded into"):
        Recorder(tmp_path / "dump")


def test_a_file_where_the_directory_should_be_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "dump").write_text("")
    with pytest.raises(RequestError, match="cannot be recorded into"):
        Recorder(tmp_path / "dump")


def test_two_recorders_of_one_rank_on_one_directory_are_refused_two_ranks_are_not(tmp_path: Path) -> None:
    first, second = Recorder(tmp_path), Recorder(tmp_path)
    with first.step(0, rank=0) as record:
        record("loss", loss=1.0)
    with second.step(0, rank=1) as record:
        record("loss", loss=1.0)
    with second.step(1, rank=0) as record, pytest.raises(RequestError, match="another recorder is writing rank 0"):
        record("loss", loss=1.0)
    first.close()
    with second.step(1, rank=0) as record:
        record("loss", loss=1.0)


@pytest.mark.parametrize("name", ["../escape", "a/b", ""])
def test_a_stage_or_role_cannot_leave_the_directory(name: str, tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "dump")
    with recorder.step(0) as record, pytest.raises(RequestError):
        record(name, loss=1.0)
    with pytest.raises(RequestError), recorder.step(0, role=name):
        pass
    assert files(tmp_path) == []


@pytest.mark.parametrize("as_number", [np.int64, torch.tensor], ids=["NumPy", "torch"])
def test_a_librarys_integers_are_numbers_of_a_key(as_number: Any, tmp_path: Path) -> None:
    with Recorder(tmp_path).step(as_number(2), rank=as_number(1)) as record:
        file = record("loss", loss=1.0, micro=as_number(3), epoch=as_number(0), minibatch=as_number(1))
    assert file == tmp_path / "loss" / "step_000002_rank1_micro3.pt"
    run = open_run(tmp_path)
    assert run.problems == []
    (key,) = [record.key for record in run.records]
    assert (key.step, key.rank, key.micro, key.epoch, key.minibatch) == (2, 1, 3, 0, 1)


@pytest.mark.parametrize("wrong", [-1, 1.5, "1", "a"])
@pytest.mark.parametrize("part", ["step", "rank", "micro", "epoch", "minibatch"])
def test_a_key_no_reader_could_read_back_is_refused(part: str, wrong: Any, tmp_path: Path) -> None:
    key = {"step": 0, "rank": 0, "micro": 0, part: wrong}
    with pytest.raises(RequestError, match=f"{part} is a whole number"):  # noqa: PT012 - either refuses
        opened = Recorder(tmp_path).open_step(key.pop("step"), rank=key.pop("rank"))
        opened("loss", loss=1.0, **key)
    assert files(tmp_path) == []


def test_the_index_is_made_whole_from_the_files(tmp_path: Path) -> None:
    with Recorder(tmp_path) as recorder:
        for step in range(3):
            with recorder.step(step) as record:
                record("loss", loss=torch.tensor(step), micro=0, epoch=step, minibatch=7)
    index = tmp_path / "index_rank0.jsonl"
    whole = index.read_bytes()
    lines = whole.splitlines()
    index.write_bytes(lines[0] + b"\n" + lines[1][:30])
    (tmp_path / "loss" / ".step_000009_rank0.pt.123.tmp").write_text("half")
    with Recorder(tmp_path) as again, again.step(5) as record:
        record("loss", loss=1.0)
    run = open_run(tmp_path)
    assert [(r.key.step, r.key.epoch) for r in run.records] == [(0, 0), (1, 1), (2, 2), (5, None)]
    assert index.read_bytes().splitlines()[2:4] == lines[1:]
    assert not list(tmp_path.rglob("*.tmp"))


def test_max_keep_removes_old_steps_and_never_a_pinned_one(tmp_path: Path) -> None:
    with Recorder(tmp_path, max_keep=2, pin_steps=[1]) as recorder:
        for step in range(6):
            with recorder.step(step) as record:
                record("loss", loss=1.0, micro=0)
                record("trajectory", tokens=[1])
    run = open_run(tmp_path)
    assert {record.key.step for record in run.records} == {1, 4, 5}
    assert len(run.records) == 6
    assert not run.problems


def test_the_manifest_pins_what_a_replay_needs(tmp_path: Path) -> None:
    torch.manual_seed(1234)
    recorder = Recorder(tmp_path, flags={"attention": "sdpa"}, config={"lr": 1})
    recorder.note(tokenizer="tok", model=torch.nn.Linear(2, 2))
    recorder.note_model(0, "org/model")
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["determinism"]["seed"] == 1234
    assert manifest["environment"]["torch"] == torch.__version__
    assert manifest["facts"] == {"tokenizer": "tok"}
    assert manifest["model_facts"]["dtype"] == "float32"
    assert manifest["models"] == {"0": "org/model"}
    assert len(manifest["config_hash"]) == 64
    assert "git_commit" in manifest


def test_two_recorders_change_the_manifest_without_losing_each_others_words(tmp_path: Path) -> None:
    first, second = Recorder(tmp_path), Recorder(tmp_path)
    first.note_model(0, "a")
    second.note_model(1, "b")
    first.note(seed=1)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["models"] == {"0": "a", "1": "b"}
    assert second.nearest_checkpoint(7) == "b"


def test_a_sharded_tensor_is_recorded_as_its_own_shard(tmp_path: Path) -> None:
    import torch.distributed as dist
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        whole = torch.arange(6.0).reshape(3, 2)
        sharded = distribute_tensor(whole, init_device_mesh("cpu", (1,)), [Shard(0)])
        with Recorder(tmp_path).step(0) as record:
            path = record("param", {"param.w": sharded})
    finally:
        dist.destroy_process_group()
    assert torch.equal(torch.load(path, weights_only=True)["param.w"], whole)
    field = json.loads((tmp_path / "index_rank0.jsonl").read_text())["fields"][0]
    assert (field["global_shape"], field["placements"]) == ([3, 2], ["S(0)"])


class Weights:
    """As much of a model as a checkpoint needs."""

    config = None

    def save_pretrained(self, directory: Path, safe_serialization: bool) -> None:
        Path(directory).mkdir(parents=True)
        (Path(directory) / "model.safetensors").write_text("weights")

    def parameters(self) -> Any:
        return iter(())


def test_max_keep_takes_checkpoints_that_no_kept_step_of_any_rank_needs(tmp_path: Path) -> None:
    def left() -> list[int]:
        on_disk = sorted(int(path.name.removeprefix("step_")) for path in (tmp_path / "checkpoints").iterdir())
        assert sorted(map(int, json.loads((tmp_path / "manifest.json").read_text())["models"])) == on_disk
        return on_disk

    behind = Recorder(tmp_path)
    with behind.step(1, rank=1) as record:
        record("loss", loss=0.0)
    with Recorder(tmp_path, max_keep=2, pin_steps=[3]) as recorder:
        for step in range(8):
            if step != 6:
                recorder.checkpoint(step, Weights())
            with recorder.step(step, rank=0) as record:
                record("loss", loss=float(step))
        assert left() == [1, 3, 5, 7], "rank 1 is behind, 3 is pinned, 6 has the weights of 5 or none"
        behind.close()
        (tmp_path / "loss" / "step_000001_rank1.pt").unlink()
        recorder.checkpoint(8, Weights())
        with recorder.step(8) as record:
            record("loss", loss=8.0)
        assert left() == [3, 7, 8]
