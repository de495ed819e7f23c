"""What a log shows beside a fall: prompts that get harder, one update that broke the policy, a clip range that left an
update nothing; and responses that are all cut, before what that comes to.
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replay_core.diagnose.finding import Finding
from replay_core.recorder import Recorder
from tests.replay_core.diagnose.batches import causes, look, of
from tests.replay_core.diagnose.bigram import Bigram
from tests.replay_core.diagnose.logs import Metrics, diagnosed, verl


def _first(folder: Path, steps: list[Metrics]) -> Finding:
    return diagnosed(folder, verl(steps)).findings[0]


def _waver(seed: int, size: int, by: float = 0.04) -> Any:
    return np.random.default_rng(seed).normal(0, by, size)


@pytest.mark.parametrize(
    "name", ["curriculum/level", "curriculum/difficulty", "data/mean_difficulty", "prompt_length/mean"]
)
@pytest.mark.parametrize("levels", [2, 3])
def test_a_reward_that_falls_with_harder_prompts_is_worth_knowing(tmp_path: Path, name: str, levels: int) -> None:
    each, noise = 12, _waver(1, 12 * levels)
    asked = [n // each for n in range(each * levels)]
    rewards = [0.8 - 0.35 * level + noise[n] + 0.002 * n for n, level in enumerate(asked)]
    scale = 300 if "length" in name else 1
    steps = [
        {"critic/score/mean": reward, name: scale * (1 + level)} for reward, level in zip(rewards, asked, strict=True)
    ]
    found = of(diagnosed(tmp_path, verl(steps)), "L08")
    assert found is None or found.severity == "info"
    (tmp_path / "without").mkdir()
    alone = [{"critic/score/mean": reward} for reward in rewards]
    told = of(diagnosed(tmp_path / "without", verl(alone)), "L08")
    assert told is not None
    assert told.severity == "warning"


def test_a_policy_that_falls_on_harder_prompts_is_still_told(tmp_path: Path) -> None:
    steps: list[Metrics] = [
        {"critic/score/mean": 0.8 - 0.02 * n + each, "curriculum/level": 1 + n // 20}
        for n, each in enumerate(_waver(2, 36, 0.01))
    ]
    found = of(diagnosed(tmp_path, verl(steps)), "L08")
    assert found is not None
    assert found.severity == "warning"


def _trained(outlier: float, steps: int = 30, at: int = 14, lr: float = 2.0) -> list[Metrics]:
    """A bigram that is paid for one token, one of whose batches has an advantage that many times the rest."""
    lm = Bigram(4, 12, 0.5)
    told: list[Metrics] = []
    for step in range(steps):
        rollout = lm.rollout([[5, 6], [7], [9]], each=8, limit=6)
        rewards_B = ((rollout.ids_BS[:, 1:] == 5) * rollout.response_BT).sum(1) > 0
        advantages_B = rewards_B - rewards_B.mean()
        if step == at:
            advantages_B = advantages_B.copy()
            advantages_B[~rewards_B] += outlier
        before = lm.table_VV.copy()
        lm.learn(rollout, rollout.on_tokens(advantages_B), lr)
        norm = float(np.sqrt(((lm.table_VV - before) ** 2).sum())) / lr
        probabilities_VV = np.exp(lm.log_table())
        entropy = -(probabilities_VV * lm.log_table()).sum(1).mean()
        told.append(
            {"critic/score/mean": float(rewards_B.mean()), "actor/grad_norm": norm, "actor/entropy": float(entropy)}
        )
    return told


@pytest.mark.parametrize("outlier", [1e3, 2e3, 4e3])
def test_one_update_that_broke_the_policy_leads(tmp_path: Path, outlier: float) -> None:
    found = _first(tmp_path, _trained(outlier))
    assert (found.id, found.severity) == ("L39", "error")
    assert "spike at step 15" in found.claim


def test_a_spike_that_is_clipped_breaks_nothing(tmp_path: Path) -> None:
    steps = deepcopy(_trained(0.0))
    steps[14] = {**steps[14], "actor/grad_norm": 400.0}
    assert of(diagnosed(tmp_path, verl(steps)), "L39") is None


def test_a_judge_that_dies_is_no_broken_policy(tmp_path: Path) -> None:
    steps = [{**step, "critic/score/mean": 0.0} if n > 14 else step for n, step in enumerate(_trained(0.0))]
    found = diagnosed(tmp_path, verl(steps))
    assert of(found, "L39") is None
    assert of(found, "L17") is not None


def test_an_update_that_tears_the_policy_away_leads_what_lasts(tmp_path: Path) -> None:
    steps: list[Metrics] = [
        {
            "actor/ppo_kl": 2.4 if n == 0 else 0.001, "response_length/mean": 8.0 + min(n, 9),
            "response_length/clip_ratio": 1.0 if n > 2 else 0.2,
        }
        for n in range(24)
    ]  # fmt: skip
    found = _first(tmp_path, steps)
    assert (found.id, found.severity) == ("L16", "error")


@pytest.mark.parametrize(("clipped", "severity"), [(0.4, "info"), (0.0, "warning")])
def test_a_gradient_of_0_is_possible_where_all_is_clipped(tmp_path: Path, clipped: float, severity: str) -> None:
    steps: list[Metrics] = [
        {
            "actor/grad_norm": 0.0 if n % 4 == 1 else 0.3 + 0.01 * n,
            "actor/pg_clipfrac": clipped,
            "frac_reward_zero_std": 0.1,
        }
        for n in range(12)
    ]
    found = of(diagnosed(tmp_path, verl(steps)), "D23")
    assert found is not None
    assert found.severity == severity


def _cut(directory: Path, limit: int, paid: int = 5, steps: int = 4) -> Path:
    """Responses to four prompts under a limit; one is paid that ends and holds a token."""
    lm = Bigram(11, 24, 0.4)
    recorder = Recorder(directory)
    for step in range(steps):
        rollout = lm.rollout([[5, 6], [7], [8, 9], [11, 3]], each=6, limit=limit)
        held = ((rollout.ids_BS[:, 1:] == paid) * rollout.response_BT).sum(1) > 0
        ended = ((rollout.ids_BS[:, 1:] == 2) * rollout.response_BT).sum(1) > 0
        rewards_B = (held & ended).astype(np.float32)
        groups_B = rollout.group_B
        means_B = np.array([rewards_B[groups_B == group].mean() for group in groups_B])
        with recorder.step(step) as record:
            record("trajectory", **rollout.tensors(
                rewards=rewards_B, advantages=rollout.on_tokens(rewards_B - means_B), truncated=~ended))  # fmt: skip
    return directory


@pytest.mark.parametrize("steps", [4, 6])
def test_responses_that_are_cut_lead_the_rewards_that_are_none(tmp_path: Path, steps: int) -> None:
    found = look(_cut(tmp_path / "d", 2, steps=steps)).findings[0]
    assert (found.id, found.severity) == ("D20", "error")
    assert "D01" not in {one.id for one in causes(look(tmp_path / "d"))}


def test_responses_that_end_are_no_cause_of_equal_rewards(tmp_path: Path) -> None:
    said = look(_cut(tmp_path / "d", 60, paid=99)).findings
    assert said[0].id == "D01"
