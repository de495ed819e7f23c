"""What is off in some rows of every step alone: an engine's replica, a score that stands for none, a missing mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replay_core.diagnose.finding import Diagnosis
from replay_core.recorder import Recorder
from tests.replay_core.diagnose.batches import look, of
from tests.replay_core.diagnose.bigram import Bigram

PROMPTS = [[1, 5], [1, 6, 7], [1, 8], [1, 9, 10, 3], [1, 11], [1, 12, 4]]


def _sampled(folder: Path, replica: Any) -> Diagnosis:
    """Five steps of 24 answers; `replica`: which rows [B] an engine samples whose weights are the first ones."""
    lm, first = Bigram(4), Bigram(4)
    with Recorder(folder) as recorder:
        for step in range(5):
            rollout = lm.rollout(PROMPTS, each=4)
            of_lm, of_first = rollout.logprobs(lm), rollout.logprobs(first)
            old_B = replica(np.arange(24))[:, None]
            with recorder.step(step) as record:
                record("trajectory", rollout.tensors(
                    rollout_log_probs=np.where(old_B, of_first, of_lm).astype(np.float32)))  # fmt: skip
                record("forward_data", rollout.tensors(log_probs=of_lm.astype(np.float32)))
            lm.learn(rollout, rollout.on_tokens((rollout.ids_BS == 4).any(1) - 0.3), lr=40.0)
    return look(folder)


def test_a_replica_of_the_engine_with_other_weights(tmp_path: Path) -> None:
    found = of(_sampled(tmp_path / "half", lambda row_B: row_B >= 12), "D09")
    assert found is not None
    assert found.severity == "error"
    assert "rows 12 to 23" in found.claim
    assert "replica" in found.claim
    # Every other row is no block, nor are all of them.
    for name, rows in (("mixed", lambda row_B: row_B % 2 == 0), ("all", lambda row_B: row_B >= 0)):
        other = of(_sampled(tmp_path / name, rows), "D09")
        assert other is None or "replica of the engine" not in other.claim


def _nemo(folder: Path, rewards: Any, advantages: Any, left: int = 0) -> Diagnosis:
    """NeMo-RL's rows: six groups of four answers of two to five tokens, `left` pads before every other prompt."""
    (folder / "exp_001").mkdir(parents=True)
    for step in range(1, 6):
        draw = np.random.default_rng(step)
        reward_B = rewards(step, draw.choice([0.0, 0.25, 0.5, 1.0], 24))
        a_B = advantages(reward_B.reshape(6, 4)).reshape(-1)
        rows = []
        for at in range(24):
            pads, answer = left * (at // 4 % 2), draw.integers(10, 60, draw.integers(2, 6)).tolist()
            prompt = [1, 70 + 10 * step + at // 4, *[5] * (3 - pads)]
            ids = [*[0] * pads, *prompt, *answer, 2]
            mask = [0.0] * (pads + len(prompt)) + [1.0] * (len(answer) + 1)
            wide = 12 - len(ids)
            logps = [-float(draw.uniform(0.1, 2)) * one for one in mask]
            rows.append({
                "content": ["x"], "rewards": float(reward_B[at]), "input_lengths": len(ids) - pads,
                "token_ids": ids + [0] * wide, "sample_loss_mask": 1.0, "token_loss_mask": mask + [0.0] * wide,
                "advantages": [float(a_B[at]) * one for one in mask] + [0.0] * wide,
                "generation_logprobs": logps + [0.0] * wide, "prev_logprobs": logps + [0.0] * wide, "idx": at,
            })  # fmt: skip
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / "exp_001" / f"train_data_step{step}.jsonl").write_text(text)
    return look(folder)


def _grpo(reward_GK: Any) -> Any:
    return (reward_GK - reward_GK.mean(1, keepdims=True)) / (reward_GK.std(1, keepdims=True, ddof=1) + 1e-6)


def _uncentred(reward_GK: Any) -> Any:
    return reward_GK / (reward_GK.std(1, keepdims=True, ddof=1) + 1e-6) * (np.ptp(reward_GK, axis=1, keepdims=True) > 0)


@pytest.mark.parametrize("left", [0, 2])
def test_rows_that_begin_behind_pads_are_healthy(left: int, tmp_path: Path) -> None:
    diagnosis = _nemo(tmp_path / "d", lambda _, reward_B: reward_B, _grpo, left)
    assert [found.id for found in diagnosis.findings if found.severity != "info"] == []


@pytest.mark.parametrize("left", [0, 2])
def test_a_mean_that_is_not_subtracted_where_groups_are_told_by_prompts(left: int, tmp_path: Path) -> None:
    found = of(_nemo(tmp_path / "d", lambda _, reward_B: reward_B, _uncentred, left), "D04")
    assert found is not None
    assert "there is no baseline" in found.claim


def test_a_score_that_stands_for_none(tmp_path: Path) -> None:
    def failed(step: int, reward_B: Any) -> Any:
        return np.where((np.arange(24) < 8) & (step > 1), -1.0, reward_B)

    def penalised(step: int, reward_B: Any) -> Any:  # some answers of each group
        return np.where(np.arange(24) % 3 == step % 3, -1.0, reward_B)

    found = of(_nemo(tmp_path / "failed", failed, _grpo), "D98")
    assert found is not None
    assert "a score of -1 stands for whole groups: all responses of 8 groups" in found.claim
    assert "rows 0 to 7" in found.claim
    assert found.steps == (2, 3, 4, 5)
    assert of(_nemo(tmp_path / "penalised", penalised, _grpo), "D98") is None
    assert of(_nemo(tmp_path / "right", lambda _, reward_B: reward_B, _grpo), "D98") is None
    hard = _nemo(tmp_path / "hard", lambda _, reward_B: (reward_B > 0.6) * 1.0, _grpo)
    assert of(hard, "D98") is None
