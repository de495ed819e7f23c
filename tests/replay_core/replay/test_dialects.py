"""Every dialect that holds rollouts is replayed through canonical names: genuine files, a random tiny model."""

import json

import numpy as np
import pytest

from replay_core.demo.train import train_demo
from replay_core.errors import DumpError
from tests.fixtures import FIXTURES

#: path -> (plan, rows, tokens of the batch, recorded values compared, nearest first). Counted by hand in the files.
#: OpenRLHF's own is in test_openrlhf_actor.py.
REPLAYED = {
    "verl/train_batch_step1.dp": ({"step": 1}, 16, 520, ["old_logprobs", "rollout_logprobs", "ref_logprobs"]),
    "verl/rollout_dump": ({"step": 1}, 16, 520, ["rollout_logprobs"]),
    "slime/train_data": ({}, 16, 520, ["old_logprobs", "rollout_logprobs", "ref_logprobs"]),
    "slime/rollout_data": ({}, 16, 520, ["rollout_logprobs"]),
    "skyrl/dumped_data": ({"step": 1}, 16, 520, ["old_logprobs", "rollout_logprobs", "ref_logprobs"]),
    "nemo_rl": ({"step": 1}, 16, 520, ["old_logprobs", "rollout_logprobs"]),
    "prime_rl/rollouts": ({}, 4, 132, ["rollout_logprobs"]),
    "prime_rl/token_exports": ({}, 4, 132, ["policy_logprobs", "rollout_logprobs"]),
    "open_instruct/packed_sequences.pt": ({}, 16, 520, ["rollout_logprobs"]),
    "open_instruct": ({"step": 1}, 16, 520, ["rollout_logprobs"]),
    "areal": ({}, 12, 136, ["rollout_logprobs"]),
    "roll": ({}, 4, None, []),
    "trl/base": ({}, 4, None, []),
    "nexrl/self_hosted_fp32": ({}, 2, None, ["policy_logprobs", "rollout_logprobs"]),
    "nexrl/seedtime": ({"whole_step": True}, 8, 87, ["rollout_logprobs"]),
}


@pytest.mark.long
@pytest.mark.parametrize("name", REPLAYED)
def test_a_rollout_of_every_framework_is_replayed(ask, name):
    plan, rows, tokens, recorded = REPLAYED[name]
    base = {"dump": str(FIXTURES / name), "model": "random:qwen2-tiny", "capture": "none", "temperature": 1.0}
    doc = ask("packing=on", plan={**base, **plan})
    assert [cell["agreement"]["agrees"] for cell in doc["cells"]] == [None, True, True]
    segments = doc["cells"][-1]["segments"]
    assert len(segments) == rows
    if tokens is not None:
        assert sum(row["tokens"] for row in segments) == tokens
    assert [value["name"] for value in (doc["recording"] or {"values": []})["values"]] == recorded
    for value in doc["cells"][-1]["recorded"]:
        assert value["tokens"] > 0
        # A random model gives every one of V tokens about log(1/V): the recorded values stand on tokens, not on fill.
        assert 0.05 < float(value["mean_abs"]) < 50


@pytest.mark.long
def test_the_demos_own_dump_is_replayed(ask, tmp_path):
    train_demo(tmp_path / "demo", steps=1)
    doc = ask("packing=on", plan={"dump": str(tmp_path / "demo"), "model": "checkpoint", "capture": "none"})
    assert [cell["agreement"]["agrees"] for cell in doc["cells"]] == [None, True, True]
    assert doc["cells"][0]["recorded"][0]["verdict"] in ("SAME", "CLOSE")


@pytest.mark.parametrize(
    ("name", "plan", "says"),
    [
        ("verl/rollout_data_dir", {"step": 1}, "texts"),
        ("nexrl/seedtime", {}, "--micro all replays the step's whole batch"),
    ],
)
def test_what_cannot_be_replayed_says_what_is_missing(ask, name, plan, says):
    with pytest.raises(DumpError) as refused:
        ask(plan={"dump": str(FIXTURES / name), "model": "random:qwen2-tiny", **plan})
    assert refused.value.tensor == "input_ids"
    assert says in refused.value.hint


@pytest.mark.long
def test_one_rollout_in_four_frameworks_files_is_one_replay(ask):
    """slime, SkyRL, verl and NeMo-RL hold the same 16 samples: left, right or not padded, sliced or whole."""
    answers = {}
    for name in ("verl/train_batch_step1.dp", "slime/train_data", "skyrl/dumped_data", "nemo_rl"):
        plan, *_ = REPLAYED[name]
        base = {"dump": str(FIXTURES / name), "model": "random:qwen2-tiny", "capture": "none", "temperature": 1.0}
        values = {one["name"]: one for one in ask(plan={**base, **plan})["cells"][0]["recorded"]}
        answers[name] = (values["old_logprobs"]["tokens"], values["old_logprobs"]["mean_abs"])
    assert len({tokens for tokens, _ in answers.values()}) == 1, json.dumps(answers)
    assert np.ptp([mean for _, mean in answers.values()]) < 1e-4, json.dumps(answers)


@pytest.mark.long
def test_rows_are_picked_with_what_was_recorded_of_them(ask):
    base = {"dump": str(FIXTURES / "verl/train_batch_step1.dp"), "step": 1, "model": "random:qwen2-tiny"}
    whole = ask(plan={**base, "capture": "none", "temperature": 1.0})
    part = ask(plan={**base, "capture": "none", "temperature": 1.0, "rows": "3,5"})
    rows = [whole["cells"][-1]["segments"][row]["tokens"] for row in (3, 5)]
    assert [row["tokens"] for row in part["cells"][-1]["segments"]] == rows
    assert part["cells"][-1]["recorded"][0]["tokens"] < whole["cells"][-1]["recorded"][0]["tokens"]
    assert any("2 of 16 rows are replayed: 3, 5" in note for note in part["notes"])
