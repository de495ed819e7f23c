from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from replay_core.demo.train import train_demo
from replay_core.errors import RequestError, SelectionError
from replay_core.recorder import Recorder
from replay_core.rollouts import MockRolloutWorker, RolloutReplay
from tests.fixtures import FIXTURES, needs_fixtures


def record_steps(directory: Path, steps: list[int], *, ranks: int | None = None) -> Path:
    for rank in range(ranks) if ranks else [None]:
        recorder = Recorder(directory)
        for step in steps:
            with recorder.step(step, rank=rank) as record:
                record(
                    "trajectory",
                    input_ids=torch.tensor([[step, 1], [2, rank or 0]]),
                    rewards=torch.tensor([0.25, 1.0], dtype=torch.bfloat16),
                    advantages=torch.ones(2),
                    prompt_text=["a", "b"],
                )
                record("old_log_probs", old_log_probs=torch.full((2, 1), -0.5))
    return directory


def digests(dump: Path) -> dict[tuple[str, str], Any]:
    lines = [json.loads(line) for line in (dump / "index_rank0.jsonl").read_text().splitlines()]
    return {(line["file"], field["name"]): field for line in lines for field in line["fields"]}


def test_training_driven_by_the_record_is_the_recorded_training_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four GRPO steps recorded; again from step 0 with no rollout: losses, gradients and final weights agree."""
    steps = 4
    train_demo(tmp_path / "first", steps=steps)

    def no_sampling(*_: Any) -> None:
        raise AssertionError("a driven run samples nothing")

    monkeypatch.setattr("replay_core.demo.train.sample", no_sampling)
    train_demo(tmp_path / "again", steps=steps, rollouts=RolloutReplay(tmp_path / "first"))
    first, again = digests(tmp_path / "first"), digests(tmp_path / "again")
    assert again == first
    stages = {file.partition("/")[0] for file, _ in again}
    assert stages >= {"trajectory", "forward_data", "loss", "gradient"}
    assert sum(name.startswith("grad.") for _, name in again) == steps * 27
    # The weights that the last step computes with follow from every update before it.
    last = f"checkpoints/step_{steps - 1:06d}/model.safetensors"
    assert (tmp_path / "again" / last).read_bytes() == (tmp_path / "first" / last).read_bytes()


def test_values_come_back_as_they_were_recorded(tmp_path: Path) -> None:
    batch = RolloutReplay(record_steps(tmp_path / "dump", [0])).batch(0)
    assert batch is not None
    assert torch.equal(batch["input_ids"], torch.tensor([[0, 1], [2, 0]]))
    assert torch.equal(batch["rewards"], torch.tensor([0.25, 1.0], dtype=torch.bfloat16))
    assert torch.equal(batch["reward"], batch["rewards"]), "found by its canonical name too"
    assert batch["prompt_text"] == ["a", "b"]
    batch["input_ids"].add_(1)
    with pytest.raises(SelectionError, match="no field 'nonsense'"):
        batch["nonsense"]


def test_scope_rollout_leaves_out_what_the_trainer_computes_and_full_takes_it(tmp_path: Path) -> None:
    dump = record_steps(tmp_path / "dump", [0])
    rollout, full = RolloutReplay(dump).batch(0), RolloutReplay(dump, scope="full").batch(0)
    assert rollout is not None
    assert full is not None
    assert "advantages" not in rollout
    with pytest.raises(SelectionError, match='scope="full"'):
        rollout["advantages"]
    assert torch.equal(full["old_logprobs"], torch.full((2, 1), -0.5))
    assert torch.equal(full["advantages"], torch.ones(2))


def test_a_record_without_what_full_needs_is_told_at_once(tmp_path: Path) -> None:
    with Recorder(tmp_path / "dump").step(0, rank=None) as record:
        record("trajectory", input_ids=torch.ones(1, 2, dtype=torch.int64))
    with pytest.raises(SelectionError, match="without what the trainer computed"):
        RolloutReplay(tmp_path / "dump", scope="full").batch(0)


def test_past_the_end_is_an_error_an_end_or_a_new_start(tmp_path: Path) -> None:
    dump = record_steps(tmp_path / "dump", [0, 1, 2])
    with pytest.raises(SelectionError, match="step 3 is past") as refusal:
        RolloutReplay(dump).batch(3)
    assert refusal.value.expected == "0..2"
    assert RolloutReplay(dump, end="stop").batch(3) is None
    around = RolloutReplay(dump, end="wrap")
    with pytest.warns(RuntimeWarning, match="starts again from step 0") as said:
        found = [around.batch(step) for step in (3, 4, 5, 6)]
    assert [batch.step for batch in found if batch] == [0, 1, 2, 0]
    assert len(said) == 1


@pytest.mark.parametrize("end", ["error", "stop", "wrap"])
def test_a_gap_is_an_error_whatever_the_end(end: str, tmp_path: Path) -> None:
    replay = RolloutReplay(record_steps(tmp_path / "dump", [0, 2, 4, 5]), end=end)
    with pytest.raises(SelectionError, match="step 3 is not among") as refusal:
        replay.batch(3)
    assert refusal.value.expected == "0, 2, 4..5"


def test_iterating_gives_each_recorded_step_once_and_for_ever_when_it_wraps(tmp_path: Path) -> None:
    dump = record_steps(tmp_path / "dump", [0, 2])
    assert [batch.step for batch in RolloutReplay(dump)] == [0, 2]
    endless = iter(RolloutReplay(dump, end="wrap"))
    assert [next(endless).step for _ in range(5)] == [0, 2, 0, 2, 0]


def test_ranks_get_their_own_part_and_another_size_is_refused(tmp_path: Path) -> None:
    dump = record_steps(tmp_path / "dump", [0], ranks=2)
    batch = RolloutReplay(dump, rank=1, world_size=2).batch(0)
    assert batch is not None
    assert batch["input_ids"][1, 1] == 1
    with pytest.raises(RequestError, match="another data-parallel size"):
        RolloutReplay(dump, rank=0, world_size=4)
    with pytest.raises(RequestError, match="rank 2 recorded no rollouts"):
        RolloutReplay(dump, rank=2)
    with pytest.raises(SelectionError, match="2 rollouts here"):
        RolloutReplay(dump).batch(0)


def test_a_dump_without_rollouts_and_wrong_words_are_refused(tmp_path: Path) -> None:
    with Recorder(tmp_path / "dump").step(0) as record:
        record("loss", loss=1.0)
    with pytest.raises(RequestError, match="holds no rollouts"):
        RolloutReplay(tmp_path / "dump")
    with pytest.raises(RequestError, match="wrong end"):
        RolloutReplay(tmp_path / "dump", end="loop")


@needs_fixtures
def test_nexrls_own_dump_drives_another_loop() -> None:
    replay = RolloutReplay(FIXTURES / "nexrl" / "seedtime" / "pt")
    assert replay.steps == [0, 2]
    batch = replay.batch(2)
    assert batch is not None
    samples = batch.samples()
    assert len(samples) == batch["num_trajectories"] == len(batch["input_ids"])
    assert all(len(sample["tokens"]) == len(sample["loss_mask"]) for sample in samples)
    worker = MockRolloutWorker(FIXTURES / "nexrl" / "seedtime" / "pt", step=2)
    for sample in reversed(samples):
        task = {"task_id": sample["task_id"], "run_id": sample["run_id"]}
        assert torch.equal(worker.rollout(task)["tokens"], sample["tokens"])
