"""What the frameworks' own code writes beside the usual: other widths, telling folders, empty steps."""

from __future__ import annotations

import argparse
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
