"""What the frameworks' own writers wrote opens with nothing lost: counted beside by `benchmarks.counted`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.counted import lost
from replay_core import workbench
from replay_core.dumps import open_run
from replay_core.pages import array
from replay_core.recorder import Recorder
from tests.fixtures import FIXTURES


@pytest.mark.parametrize(("form", "steps"), [("grpo", [1, 2]), ("megatron", [0, 1]), ("ray", [1, 2])])
def test_each_of_ms_swifts_trainers_names_the_step_of_its_rows(form: str, steps: list[int]) -> None:
    run = open_run(FIXTURES / "ms_swift" / form)
    assert (run.dialect, run.steps(), list(run.problems)) == ("ms_swift", steps, [])
    for record in run.records:
        assert record.get("prompt_text") is not None
        assert record.get("response_text") is not None


def test_a_reward_that_one_sample_has_none_of_is_still_one_column() -> None:
    ref = open_run(FIXTURES / "ms_swift/grpo").records[0].get("Format")
    assert ref is not None
    assert np.array_equal(array(ref), [0.5, 0.5, 0.25, np.nan], equal_nan=True)


def test_miles_copies_of_an_evaluation_are_an_evaluations() -> None:
    for folder in ("dashboard_columns", "trajectory"):
        records = open_run(FIXTURES / "miles" / folder).records
        files = len(list((FIXTURES / "miles" / folder).iterdir()))
        assert len(records) == files, folder
    roles = [(record.key.step, record.key.role) for record in open_run(FIXTURES / "miles/dashboard_columns").records]
    assert roles == [(0, "rollout"), (0, "eval"), (1, "rollout")]


def test_what_of_a_miles_dump_lies_in_other_folders_is_said() -> None:
    run = open_run(FIXTURES / "miles")
    assert not run.problems
    assert sum("trajectory/" in note for note in run.notes) == 1


def test_what_verls_own_package_caches_of_a_queue_opens_with_every_column() -> None:
    run = open_run(FIXTURES / "verl_0_9_1/rollout_dump")
    (record,) = run.records
    assert (run.dialect, record.key.step, list(run.problems)) == ("verl", 7, [])
    rows = {ref.canonical: ref.rows for ref in record.tensors() if ref.rows}
    assert rows["prompt_ids"] == (4, 4, 5, 5)
    for name in ("response_ids", "response_mask", "old_logprobs", "rollout_logprobs", "advantages"):
        assert rows[name] == (6, 3, 5, 2), name
    group = record.get("group_id")
    assert group is not None
    assert group.shape == (4,)


@pytest.mark.parametrize("as_recorded", [True, False])
def test_rewards_of_tokens_and_uids_are_read_where_a_trainer_hands_them_over(as_recorded: bool, tmp_path: Path) -> None:
    rewards = torch.nn.functional.pad(torch.tensor([[1.0], [0.0], [1.0], [0.0]]), (5, 0))
    ids, mask = torch.ones(4, 10, dtype=torch.long), torch.ones(4, 6)
    fields = {"sequences": ids, "response_mask": mask, "rewards": rewards, "uids": ["a", "a", "b", "b"]}
    if as_recorded:
        with Recorder(tmp_path) as recorder, recorder.step(0) as record:
            record("batch_inputs", fields)
    else:
        torch.save(fields, tmp_path / "batch.pt")
    names = {ref.name: ref.canonical for ref in open_run(tmp_path).records[0].tensors()}
    assert (names["rewards"], names["uids"]) == ("token_rewards", "group_id")
    skipped = [one["id"] for one in workbench.diagnose(tmp_path, rules=["D01", "D05"])["skipped"]]
    assert not skipped


def test_conversations_of_a_loose_batch_are_a_text_per_sample(tmp_path: Path) -> None:
    turns = [[{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": "a"}][: 1 + i] for i in range(2)]
    torch.save({"input_ids": torch.ones(2, 3, dtype=torch.long), "raw_prompt": turns}, tmp_path / "step_3.pt")
    refs = {ref.name: ref for ref in open_run(tmp_path).records[0].tensors()}
    assert refs.keys() == {"input_ids", "raw_prompt"}
    assert (refs["raw_prompt"].dtype, refs["raw_prompt"].shape) == ("text", (2,))


#: Folder -> what is told elsewhere than in a field of this name: keys, a dump's own labels, texts of a sample as one.
ELSEWHERE = {
    "areal/single_controller_rollout": "", "areal_text": "", "faults/healthy": "", "nemo_rl": "",
    "ms_swift/grpo": "", "ms_swift/megatron": "", "ms_swift/ray": "", "nexrl/self_hosted_fp32": "",
    "nexrl/seedtime/pt": "", "nexrl/seedtime/jsonl": "", "openrlhf/input_dumps": "", "prime_rl": "", "roll": "",
    "slime": "", "miles/rollout_data": "role content weight_versions", "miles/train_data": "weight_versions",
    "miles/policy_loss_debug": "", "miles/dashboard_columns": "", "roll_critic": "",
    "open_instruct": "run_name git_commit model_name timestamp",
    "verl_0_9_1/rollout_data": "",
    "torchtitan": "turn_id role content min_policy_version max_policy_version prompt_token_ids completion_token_ids "
                  "completion_logprobs",
    "sglang_dumper": "step rank dump_index name recompute_status layer_id world_rank world_size",
    "skyrl": "format shape dtype batch_size", "trl/base": "role content", "verl": "role content",
}  # fmt: skip


@pytest.mark.parametrize("folder", ELSEWHERE)
def test_every_number_and_text_of_a_genuine_file_is_listed(folder: str) -> None:
    path: Path = FIXTURES / folder
    assert set(lost(path)) <= set(ELSEWHERE[folder].split())
