"""Samples of healthy runs: micro-batches of a token budget, judges that waver beside a policy that has converged, an
engine that stops at strings; each beside the fault that it looks like.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from replay_core.diagnose.case import Case
from replay_core.diagnose.engine import diagnose
from replay_core.dumps import open_run
from replay_core.recorder import Recorder

pytestmark = pytest.mark.long  # they train, or record whole runs

P, END, PAD = 4, 1, 0


class Written:
    """The rollouts of a step: [B, P + R] ids, which are there, and which count; responses end by END."""

    def __init__(self, draw: np.random.Generator, width: int, B: int = 64, group: int = 8, pad: int = PAD) -> None:
        self.ids, self.held = np.full((B, P + width), pad), np.zeros((B, P + width), np.int64)
        self.lengths = np.minimum(draw.geometric(1 / 12, B) + 3, width - 1)
        self.ids[:, :P] = np.repeat(draw.integers(10, 99, (B // group, P)), group, 0)
        for row, length in enumerate(self.lengths):
            self.ids[row, P : P + length - 1] = draw.integers(10, 99, length - 1)
            self.ids[row, P + length - 1] = END
            self.held[row, : P + length] = 1
        self.group = np.arange(B) // group

    def same(self, row: int, as_row: int) -> None:
        for each in (self.ids, self.held, self.lengths):
            each[row] = each[as_row]

    @property
    def mask(self) -> np.ndarray:
        mask = self.held.copy()
        mask[:, :P] = 0
        return mask


def grpo(rewards_B: np.ndarray, size: int = 8) -> np.ndarray:
    each = rewards_B.reshape(-1, size)
    return ((each - each.mean(1, keepdims=True)) / (each.std(1, ddof=1, keepdims=True) + 1e-6)).reshape(-1)


def tensors(**fields: Any) -> dict[str, Any]:
    return {
        name: torch.from_numpy(np.ascontiguousarray(value.astype(np.float32) if value.dtype == np.float64 else value))
        for name, value in fields.items()
    }


def found(path: Path) -> set[str]:
    return {one.id for one in diagnose(Case(open_run(path))).findings if one.severity != "info"}


@pytest.mark.parametrize("how", ["rows", "tokens", "padding"])
def test_a_budget_of_tokens_shares_the_critics_loss_out(how: str, tmp_path: Path) -> None:
    """Micro-batches of 5, 9, 7 and 11 rows: a token mean each, times its part of the rows; or all over all tokens."""
    draw = np.random.default_rng(0)
    recorder = Recorder(tmp_path / "run", flags={"advantage_estimator": "gae"})
    for step in range(4):
        made = Written(draw, 256, B=32)
        m = made.mask[:, 1:].astype(np.float64)
        rewards = (draw.random(32) < 0.5).astype(np.float64)
        values, returns = draw.normal(0.5, 0.3, m.shape) * m, rewards[:, None] * m
        logp = -draw.exponential(1.0, m.shape) * m
        with recorder.step(step, rank=0) as record:
            record("trajectory", **tensors(
                input_ids=made.ids, attention_mask=made.held, response_mask=made.mask, rewards=rewards,
                rollout_log_probs=logp, old_log_probs=logp, advantages=returns - values, values=values, returns=returns,
            ))  # fmt: skip
        for micro, (a, b) in enumerate([(0, 5), (5, 14), (14, 21), (21, 32)]):
            now = values[a:b] + draw.normal(0, 0.01, m[a:b].shape) * m[a:b]
            error = 0.5 * float(((now - returns[a:b]) ** 2 * m[a:b]).sum())
            by = {"rows": m[a:b].sum() * 32 / (b - a), "tokens": m.sum(), "padding": (b - a) * m.shape[1]}[how]
            with recorder.step(step, rank=0, role="critic") as record:
                record("loss", micro=micro, minibatch=0, epoch=0, loss=torch.tensor(error / float(by)), **tensors(
                    input_ids=made.ids[a:b], attention_mask=made.held[a:b], response_mask=made.mask[a:b], values=now,
                    returns=returns[a:b],
                ))  # fmt: skip
            with recorder.step(step, rank=0) as record:
                record("forward_data", micro=micro, minibatch=0, epoch=0, **tensors(
                    input_ids=made.ids[a:b], attention_mask=made.held[a:b], response_mask=made.mask[a:b],
                    log_probs=logp[a:b], old_log_probs=logp[a:b], advantages=(returns - values)[a:b],
                ))  # fmt: skip
    recorder.close()
    assert ("D62" in found(tmp_path / "run")) == (how == "padding")


@pytest.mark.parametrize(("judge", "told"), [("times out", False), ("wavers", False), ("in another order", True)])
def test_a_judge_that_wavers_beside_one_answer_is_no_order(judge: str, told: bool, tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    recorder = Recorder(tmp_path / "run", flags={})
    for step in range(6):
        made = Written(draw, 16)
        # Converged: of 64 answers 58 are those of their groups.
        other = set(draw.choice(64, 6, replace=False).tolist())
        for row in set(range(64)) - other:
            made.same(row, next(one for one in range(row // 8 * 8, 64) if one not in other))
        right = np.array([0.0 if row in other else 1.0 for row in range(64)])
        rewards = right.copy()
        if judge == "times out" and step == 5:
            rewards = np.ones(64)
            rewards[[next(iter(set(range(64)) - other)), 63 - 63 % 2, 31]] = 0.0
            rewards[sorted(other)] = draw.random(6) / 100
        if judge == "wavers":
            rewards = draw.normal(0.9, 0.05, 64)
        if judge == "in another order" and step > 1:
            rewards = draw.permutation(right)
        m = made.mask[:, 1:]
        logp = -0.2 * m * np.ones(m.shape)
        with recorder.step(step, rank=0) as record:
            record("trajectory", **tensors(
                input_ids=made.ids, attention_mask=made.held, response_mask=made.mask, rewards=rewards,
                group_id=made.group, rollout_log_probs=logp, old_log_probs=logp, advantages=grpo(rewards)[:, None] * m,
            ))  # fmt: skip
    recorder.close()
    assert ("D56" in found(tmp_path / "run")) == told


@pytest.mark.parametrize(("ends", "sampled", "told"), [(3, False, False), (3, True, True), (80, False, True)])
def test_an_engine_that_stops_at_strings_leaves_no_end_out(
    ends: int, sampled: bool, told: bool, tmp_path: Path
) -> None:
    """Pad is the end token, which the policy would write after the string; where the engine did, the mask drops it."""
    draw = np.random.default_rng(0)
    recorder = Recorder(tmp_path / "run", flags={"eos_token_id": END, "pad_token_id": END})
    for step in range(3):
        made = Written(draw, 40, pad=END)
        rows = np.arange(64)
        last = P + made.lengths - 1
        made.ids[rows, last] = 10 + draw.integers(0, ends, 64)
        mask = made.mask
        logp = -draw.exponential(0.6, mask[:, 1:].shape)
        logp[rows, last] = -0.03
        engine = logp * mask[:, 1:]
        if sampled:
            engine[rows, last] = -0.03
        rewards = (draw.random(64) < 0.5).astype(np.float64)
        with recorder.step(step, rank=0) as record:
            record("trajectory", **tensors(
                input_ids=made.ids, attention_mask=made.held, response_mask=mask, rewards=rewards,
                group_id=made.group, rollout_log_probs=engine, old_log_probs=logp,
                advantages=grpo(rewards)[:, None] * mask[:, 1:],
            ))  # fmt: skip
    recorder.close()
    assert ("D19" in found(tmp_path / "run")) == told
