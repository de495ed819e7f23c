"""Runs of a trainer that keeps values, weights and logprobs beside its samples, and gives its metrics names of its
own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from replay_core.diagnose.finding import Finding
from tests.replay_core.diagnose.batches import causes
from tests.replay_core.diagnose.copying import run
from tests.replay_core.diagnose.logs import diagnosed_path

#: What the trainer calls what it logs.
LOG = {
    "reward": "rollout/Reward_Mean", "reward_max": "rollout/Reward_Max", "pg": "loss/policy", "advantage": "adv_mean",
    "kl": "kl_to_ref", "lr": "opt/lr",
}  # fmt: skip
LONG = pytest.mark.long


def found(folder: Path, fault: str = "", **settings: Any) -> list[Finding]:
    return causes(diagnosed_path(run(folder / "run", fault, log=LOG, **settings)))


@pytest.mark.long
@pytest.mark.parametrize(
    ("settings", "first"),
    [
        ({"fault": "rewards-of-others"}, ("D56", "rewards belong to other samples")),
        ({"fault": "reference-follows"}, ("D55", "it is the policy itself")),
        ({"fault": "gamma-lambda", "critic": True}, ("D44", "gamma and lambda are swapped")),
        ({"fault": "reward-at-pad", "critic": True, "steps": 2}, ("D53", "lies on a token that does not count")),
        ({"fault": "prompts-trained", "steps": 2}, ("D58", "prompt tokens are in the loss")),
        ({"fault": "sign", "steps": 2}, ("D28", "the sign is wrong")),
        pytest.param({"fault": "bootstrapped", "critic": True}, ("D44", "bootstraps from the value"), marks=LONG),
        pytest.param({"fault": "targets-late", "critic": True}, ("D44", "off by one token"), marks=LONG),
        pytest.param({"fault": "critic-zero", "critic": True}, ("D45", "one number in all"), marks=LONG),
        pytest.param({"fault": "critic-stands", "critic": True, "steps": 8}, ("D45", "comes no nearer"), marks=LONG),
        pytest.param({"fault": "raw"}, ("D04", "nothing is subtracted"), marks=LONG),
        pytest.param({"fault": "slots"}, ("D28", "every token slot of prompt and response"), marks=LONG),
        pytest.param({"fault": "ranks"}, ("D28", "8 times"), marks=LONG),
        pytest.param({"fault": "policy-stands"}, ("D57", "2 of 2 weights"), marks=LONG),
        pytest.param({"fault": "reward-summed"}, ("D54", "8 times the mean"), marks=LONG),
        pytest.param({"fault": "same-prompts"}, ("D43", "every step has the same prompts"), marks=LONG),
    ],
    ids=lambda each: each["fault"] if isinstance(each, dict) else "",
)
def test_what_is_recorded_beside_the_samples_is_recomputed(
    settings: dict[str, Any], first: tuple[str, str], tmp_path: Path
) -> None:
    said = found(tmp_path, **settings)
    assert [one.id for one in said][:1] == [first[0]], [one.claim for one in said]
    assert first[1] in said[0].claim


@pytest.mark.parametrize(
    "settings",
    [
        {"baseline": "moving", "steps": 3},
        {"critic": True, "kind": "ppo", "steps": 3},
        pytest.param({}, marks=LONG),
        pytest.param({"critic": True, "kind": "ppo", "steps": 8}, marks=LONG),
        pytest.param({"baseline": "none", "kind": "reinforce"}, marks=LONG),
    ],
    ids=str,
)
def test_the_same_trainer_without_a_fault_has_nothing_to_say(settings: dict[str, Any], tmp_path: Path) -> None:
    assert [one.claim for one in found(tmp_path, **settings)] == []


def test_a_warm_up_that_is_stated_longer_than_the_run_is_named(tmp_path: Path) -> None:
    said = found(tmp_path, steps=2, stated={"warmup_steps": 1000, "total_steps": 12})
    assert [one.id for one in said] == ["L07"]
    assert "longer than the run of 12" in said[0].claim
