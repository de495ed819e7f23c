"""Logs whose loudest line is what a run came to: the cause that precedes it leads."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from replay_core.diagnose.finding import Diagnosis
from tests.replay_core.diagnose.batches import causes
from tests.replay_core.diagnose.logs import diagnosed, diagnosed_path, trl


def _bandit(folder: Path, bonus: float, *, arms: int = 20, steps: int = 60, lr: float = 0.5, seed: int = 0) -> Path:
    """REINFORCE on one choice of `arms`, of which some are paid and one ends the answer; with an entropy bonus."""
    draw = np.random.default_rng(seed)
    logits_A = draw.normal(0, 1.0, arms) + 4.0 * (np.arange(arms) < 3)
    lines = []
    for step in range(steps):
        p_A = np.exp(logits_A - logits_A.max())
        p_A /= p_A.sum()
        entropy = float(-(p_A * np.log(p_A)).sum())
        chosen = draw.choice(arms, size=64, p=p_A)
        rewards = (chosen < 2).astype(float)
        a_B = rewards - rewards.mean()
        grad_A = (
            sum((a * ((np.arange(arms) == c) - p_A) for a, c in zip(a_B, chosen, strict=True)), np.zeros(arms)) / 64
        )
        grad_A += bonus * -p_A * (np.log(p_A) + entropy)
        loss = float(-(a_B * np.log(p_A[chosen])).mean() - bonus * entropy)
        logits_A += lr * grad_A
        lines.append({
            "step": step, "train/reward": float(rewards.mean()), "train/loss": loss, "train/entropy": entropy,
            "train/grad_norm": float(np.linalg.norm(grad_A)), "train/lr": lr,
            # What is paid ends an answer: a policy that is uniform seldom does.
            "train/response_length": float(5 + min(1 / p_A[:2].sum(), 30)),
            "train/truncated": float((1 - p_A[:2].sum()) ** 8),
        })  # fmt: skip
    path = folder / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize(("bonus", "arms"), [(1.0, 20), (1.5, 12)])
def test_a_bonus_that_outweighs_the_reward_leads(tmp_path: Path, bonus: float, arms: int) -> None:
    found = diagnosed_path(_bandit(tmp_path, bonus, arms=arms))
    first = causes(found)[0]
    assert (first.id, first.severity) == ("D25", "error")
    assert "entropy bonus" in first.claim


@pytest.mark.parametrize("bonus", [0.0, 0.005])
def test_a_small_bonus_is_fine(tmp_path: Path, bonus: float) -> None:
    assert causes(diagnosed_path(_bandit(tmp_path, bonus, lr=0.4))) == []


def _mismatch(folder: Path, apart: float, reward: float, cut: float, spread: float = 0.0) -> Diagnosis:
    return diagnosed(folder, trl([
        {"sampling/sampling_logp_difference/mean": apart * (1 + 0.03 * (at % 3)), "reward": reward + spread * (at % 4),
         "completions/clipped_ratio": cut, "loss": 0.0, "grad_norm": 0.0, "frac_reward_zero_std": float(not spread)}
        for at in range(14)
    ]))  # fmt: skip


@pytest.mark.parametrize(("reward", "cut"), [(0.0, 1.0), (-1.0, 0.97), (0.0, 0.0)])
def test_an_engine_of_other_weights_leads_what_it_writes(tmp_path: Path, reward: float, cut: float) -> None:
    first = causes(_mismatch(tmp_path, 2.2, reward, cut))[0]
    assert first.id == "L38"
    assert "other weights" in first.claim


def test_a_large_mismatch_beside_rewards_is_not_told_to_be_of_other_weights(tmp_path: Path) -> None:
    found = causes(_mismatch(tmp_path, 2.2, 0.3, 0.0, spread=0.1))
    assert found[0].id == "D09"
    assert "L38" not in [one.id for one in found]


def test_a_small_mismatch_is_no_cause_of_a_constant_reward(tmp_path: Path) -> None:
    assert "L38" not in [one.id for one in _mismatch(tmp_path, 0.2, 0.0, 1.0).findings]


def test_a_mean_length_is_called_no_limit(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, trl([{"completions/clipped_ratio": 1.0, "completions/mean_length": 21.4,
                                      "completions/max_length": 21.4}] * 6))  # fmt: skip
    (told,) = [one for one in found.findings if one.id == "D20"]
    assert "21.4" not in told.claim
