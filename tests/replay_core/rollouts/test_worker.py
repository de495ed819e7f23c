from __future__ import annotations

from pathlib import Path

import pytest

from replay_core.errors import SelectionError
from replay_core.rollouts import MockRolloutWorker, RolloutReplay
from tests.builders import save_file
from tests.fixtures import FIXTURES


def nexrl_run(directory: Path) -> Path:
    """Two prompts, two runs of each, as NexRL's dumper writes them; the last without a task id."""
    trajectories = [
        {
            "tokens": list(range(length)),
            "loss_mask": [0] * 2 + [1] * (length - 2),
            "reward": float(length),
            "is_val": False,
            "extra_fields": {"group_id": f"g{task}", "run_id": run, "task_id": task},
        }
        for length, (task, run) in enumerate([(0, 0), (0, 1), (1, 1), (1, 0)], start=4)
    ]
    save_file(
        directory / "trajectory" / "step_000000.pt",
        {"step": 0, "num_trajectories": len(trajectories), "trajectories": trajectories},
    )
    return directory


def test_tasks_are_matched_by_task_id_whatever_the_order(tmp_path: Path) -> None:
    worker = MockRolloutWorker(nexrl_run(tmp_path))
    assert worker.rollout({"task_id": 1})["tokens"].tolist() == list(range(6))
    assert worker.rollout({"task_id": "0", "run_id": 1})["tokens"].tolist() == list(range(5))
    assert float(worker.rollout({"task_id": 1})["reward"]) == 7
    with pytest.raises(SelectionError, match="no recorded trajectory belongs") as refusal:
        worker.rollout({"task_id": 1})
    assert "task_id 0" in str(refusal.value.expected)
    assert "task_id 1" in str(refusal.value.found)
    assert worker.unmatched == [{"task_id": "1"}]
    assert "3 of 4 recorded trajectories" in worker.report()


def test_without_task_ids_the_group_and_run_must_both_fit(tmp_path: Path) -> None:
    worker = MockRolloutWorker(nexrl_run(tmp_path), step=0)
    assert len(worker.rollout({"group_id": "g1", "run_id": 0})["tokens"]) == 7
    for task in ({"group_id": "g1", "run_id": 0}, {"group_id": "g1"}, {"group_id": "a fresh uuid", "run_id": 1}, {}):
        with pytest.raises(SelectionError):
            worker.rollout(task)
    assert len(worker.unmatched) == 4


def test_a_worker_without_trajectories_is_no_worker(tmp_path: Path) -> None:
    with pytest.raises(SelectionError, match="no recorded trajectories"):
        MockRolloutWorker(nexrl_run(tmp_path), step=7)


def test_other_frameworks_names_of_groups_and_samples_are_matched(tmp_path: Path) -> None:
    """slime numbers groups and samples; verl names the group alone."""
    samples = [
        {"group_index": at // 2, "index": at, "tokens": [at, 1, 2], "response_length": 2, "reward": 0.0, "prompt": "p"}
        for at in range(4)
    ]
    save_file(tmp_path / "rollout_data" / "0.pt", {"rollout_id": 0, "samples": samples})
    worker = MockRolloutWorker(tmp_path / "rollout_data")
    assert worker.rollout({"group_id": 1, "run_id": 2})["input_ids"].tolist() == [2, 1, 2]
    with pytest.raises(SelectionError) as refusal:
        worker.rollout({"group_id": 0, "run_id": 3})
    assert "group_id 0, run_id 0" in str(refusal.value.expected)


def test_a_recording_that_numbers_no_samples_gives_a_groups_in_recorded_order() -> None:
    worker = MockRolloutWorker(FIXTURES / "verl" / "rollout_dump")
    (batch,) = RolloutReplay(FIXTURES / "verl" / "rollout_dump")
    for row, uid in enumerate(batch["uid"]):
        answer = worker.rollout({"group_id": uid, "run_id": row % 4})
        assert answer["input_ids"].tolist() == batch["input_ids"][row].tolist()
