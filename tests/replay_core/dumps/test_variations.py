"""What the frameworks' own code writes beside the usual: other widths, telling folders, empty steps."""

from __future__ import annotations

import argparse
import json
import pickle
from pathlib import Path

import pytest
import torch

from tests.builders import save_file
from tests.replay_core.dumps.test_dialects import fake_class
from tests.replay_core.dumps.test_genuine_like import opened


def test_folders_say_the_step_and_the_rank_of_files_that_do_not(tmp_path: Path) -> None:
    """Megatron: iter_N/mp_rank_R/model_optim_rng.pt, whose arguments are a namespace."""
    content = {"args": argparse.Namespace(lr=0.5), "iteration": 10, "model": {"w": torch.ones(2)}}
    for folder in ("iter_0000010/mp_rank_00", "iter_0000010/mp_rank_01_000", "iter_0000020/mp_rank_00"):
        save_file(tmp_path / folder / "model_optim_rng.pt", content)
    run = opened(tmp_path)
    assert [(record.key.step, record.key.rank) for record in run.records] == [(10, 0), (10, 1), (20, 0)]
    assert [ref.name for ref in run.records[0].tensors()] == ["args.lr", "iteration", "model.w"]
    assert [problem.what for problem in run.problems] == ["step 20 tensors: nothing of rank 1"]


def test_a_step_without_a_trajectory_is_areals_and_says_so(tmp_path: Path) -> None:
    save_file(tmp_path / "step_000001.pt", [])
    save_file(tmp_path / "step_000002.pt", [{"input_ids": torch.ones(2, 3), "loss_mask": torch.ones(2, 3)}])
    run = opened(tmp_path)
    assert (run.dialect, run.steps()) == ("areal", [1, 2])
    assert run.records[0].tensors() == ()
    assert [problem.what for problem in run.records[0].problems] == ["the step holds no prompt group"]


@pytest.mark.parametrize("module", ["verl.protocol", "roll.distributed.scheduler.protocol"])
def test_a_mask_as_wide_as_the_ids_is_said_of_all_tokens_and_one_as_wide_as_the_responses_of_those(
    module: str, tmp_path: Path
) -> None:
    """verl's rollouts of several turns write loss_mask [B, T]; ROLL's parity batches response_mask [B, R]."""
    wide, narrow = torch.ones(2, 7, dtype=torch.int64), torch.ones(2, 4, dtype=torch.int64)
    batch = {"prompts": wide[:, :3], "responses": narrow, "input_ids": wide, "attention_mask": wide,
             "loss_mask": wide, "response_mask": narrow, "old_log_probs": torch.zeros(2, 4)}  # fmt: skip
    tensors = {name: (str(t.dtype), tuple(t.shape), t.contiguous().numpy().tobytes()) for name, t in batch.items()}
    proto = fake_class(module, "DataProto")
    proto.__getstate__ = lambda self: (((2,), None, tensors), {}, {})
    (tmp_path / "step_000003.pkl").write_bytes(pickle.dumps(proto()))
    (record,) = opened(tmp_path).records
    found = {ref.name: (ref.alignment, ref.pad) for ref in record.tensors()}
    assert found["response_mask"] == found["old_log_probs"] == ("response", "right")
    assert found["attention_mask"] == ("full", "left+right")
    if module.startswith("verl"):
        assert found["loss_mask"] == ("full", "left+right")


def test_a_step_that_files_hold_numbers_them_where_no_name_does(tmp_path: Path) -> None:
    for number, step in ((0, 10), (1, 20), (2, 30)):
        save_file(tmp_path / f"batch_{number}.pt", {"step": step, "advantages": torch.ones(2, 3)})
    run = opened(tmp_path)
    assert [record.key.step for record in run.records] == [10, 20, 30]
    assert "the step is what they hold" in run.notes[0]


def test_rows_of_several_steps_in_one_file_are_a_record_each(tmp_path: Path) -> None:
    lines = [f'{{"step": {step}, "tokens": [{row}, 2], "reward": {row}}}' for step in (3, 4) for row in range(2)]
    (tmp_path / "rollouts.jsonl").write_text("\n".join(lines) + "\n")
    run = opened(tmp_path)
    assert [record.key.step for record in run.records] == [3, 4]
    assert run.records[1].tensors()[1].shape == (2, 2)


def test_responses_that_are_equally_long_by_chance_are_rows_beside_prompts_that_are_not(tmp_path: Path) -> None:
    lines = ['{"prompt_ids": [1, 5], "completion_ids": [7, 2], "logp_gen": [-0.5, -0.1]}',
             '{"prompt_ids": [1, 5, 6], "completion_ids": [8, 2], "logp_gen": [-0.2, -0.3]}']  # fmt: skip
    (tmp_path / "rollouts.jsonl").write_text("\n".join(lines) + "\n")
    (record,) = opened(tmp_path).records
    assert {ref.name: ref.rows for ref in record.tensors()} == {
        "prompt_ids": (2, 3), "completion_ids": (2, 2), "logp_gen": (2, 2),
    }  # fmt: skip


def test_what_is_there_once_an_update_is_no_hole_of_its_micro_batches(tmp_path: Path) -> None:
    for step in range(3):
        for micro in (1, 3, 5):
            save_file(tmp_path / "norms" / f"step_{step}_rank0_micro{micro}.pt", {"grad_norm": torch.ones(())})
    assert opened(tmp_path).problems == []
    (tmp_path / "norms" / "step_1_rank0_micro3.pt").rename(tmp_path / "norms" / "step_1_rank0_micro4.pt")
    assert [problem.what for problem in opened(tmp_path).problems][-1:] == [
        "step 2 tensors: micro 2, 4 of rank 0 is missing"
    ]


def test_folders_called_as_stages_are_no_nexrl_tree_where_no_file_is_called_as_its(tmp_path: Path) -> None:
    for micro in range(2):
        save_file(tmp_path / "forward_data" / f"step_1_rank0_micro{micro}.pt", {"log_probs": torch.ones(2, 3)})
        save_file(tmp_path / "loss" / f"step_1_rank0_micro{micro}.pt", {"loss": torch.ones(())})
    run = opened(tmp_path)
    assert run.dialect == "file"
    assert [(one.key.step, one.key.rank, one.key.micro, one.key.stage) for one in run.records] == [
        (1, 0, 0, "forward_data"), (1, 0, 0, "loss"), (1, 0, 1, "forward_data"), (1, 0, 1, "loss"),
    ]  # fmt: skip


def test_a_step_of_the_environment_is_no_step_of_the_training(tmp_path: Path) -> None:
    for folder, more in (("both", True), ("alone", False)):
        rows = [
            {"step": turn, **({"global_step": 7 + at} if more else {}), "input_ids": [1, 2, turn]}
            for at in range(2) for _ in range(2) for turn in range(3)
        ]  # fmt: skip
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [record.key.step for record in opened(tmp_path / "both").records] == [7, 8]
    (whole,) = opened(tmp_path / "alone").records
    assert whole.key.step is None
    assert len(whole.tensors()[-1].shape) == 2


def test_rollouts_of_one_sample_each_are_rows_of_one_record(tmp_path: Path) -> None:
    rows = [{"rollout_id": at, "input_ids": [1, 2, at], "reward": 0.5} for at in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [record.key.step for record in opened(tmp_path).records] == [None]
    batches = [{"rollout_id": at, "input_ids": [[1, 2, at], [1, 3, at]], "rewards": [0.5, 1.0]} for at in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in batches))
    assert [record.key.step for record in opened(tmp_path).records] == [*range(6)]
