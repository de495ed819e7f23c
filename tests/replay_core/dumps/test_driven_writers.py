"""What the frameworks' own writers wrote opens with nothing lost: counted beside by `benchmarks.counted`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.counted import lost
from replay_core.dumps import open_run
from replay_core.pages import array
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


#: Folder -> what is told elsewhere than in a field of this name: keys, a dump's own labels, texts of a sample as one.
ELSEWHERE = {
    "areal/single_controller_rollout": "", "areal_text": "", "faults/healthy": "", "nemo_rl": "",
    "ms_swift/grpo": "", "ms_swift/megatron": "", "ms_swift/ray": "", "nexrl/self_hosted_fp32": "",
    "nexrl/seedtime/pt": "", "nexrl/seedtime/jsonl": "", "openrlhf/input_dumps": "", "prime_rl": "", "roll": "",
    "slime": "", "miles/rollout_data": "role content weight_versions", "miles/train_data": "weight_versions",
    "miles/policy_loss_debug": "", "miles/dashboard_columns": "", "roll_critic": "",
    "open_instruct": "run_name git_commit model_name timestamp",
    "verl_0_9_1/rollout_data": "",
    "sglang_dumper": "step rank dump_index name recompute_status layer_id world_rank world_size",
    "skyrl": "format shape dtype batch_size", "trl/base": "role content", "verl": "role content",
}  # fmt: skip


@pytest.mark.parametrize("folder", ELSEWHERE)
def test_every_number_and_text_of_a_genuine_file_is_listed(folder: str) -> None:
    path: Path = FIXTURES / folder
    assert set(lost(path)) <= set(ELSEWHERE[folder].split())
