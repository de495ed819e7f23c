"""Whether samples were drawn from the policy that trains on them: a bigram, sampled and trained for four steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replay_core.diagnose.finding import Finding
from replay_core.recorder import Recorder
from tests.replay_core.diagnose.batches import look, of, why_skipped
from tests.replay_core.diagnose.bigram import Bigram

PROMPTS = [[5, 6], [7], [8, 9, 10], [11, 3]]


def _trained(folder: Path, *, stated: dict[str, Any] | None = None, at: float = 1.0, **drawn: Any) -> Path:
    """Four steps of REINFORCE on answers that hold token 4; `at`: the temperature of what is recorded."""
    lm = Bigram(3, 20, 1.0)
    with Recorder(folder, flags=stated or {}) as recorder:
        for step in range(4):
            rollout = lm.rollout(PROMPTS, each=10, limit=12, **drawn)
            logs_VV = lm.log_table(at)
            entropy_V = -(np.exp(logs_VV) * logs_VV).sum(1)
            reward_B = (rollout.ids_BS == 4).any(1).astype(np.float32)
            with recorder.step(step) as record:
                record("forward_data", rollout.tensors(
                    log_probs=rollout.logprobs(lm, at).astype(np.float32),
                    entropy=(entropy_V[rollout.ids_BS[:, :-1]] * rollout.response_BT).astype(np.float32)))  # fmt: skip
            lm.learn(rollout, rollout.on_tokens(reward_B - reward_B.mean()), lr=4.0)
    return folder


def told(path: Path) -> Finding | None:
    return of(look(path, "L33"), "L33")


@pytest.mark.parametrize(
    ("how", "word"),
    [({"temperature": 0.6}, "sharper"), ({"top_p": 0.7}, "sharper"), ({"top_k": 3}, "sharper"),
     ({"temperature": 1.5}, "flatter")],
    ids=str,
)  # fmt: skip
def test_settings_of_the_engine_that_nobody_states_are_told(tmp_path: Path, how: dict[str, Any], word: str) -> None:
    found = told(_trained(tmp_path / "d", **how))
    assert found is not None
    assert (found.severity, found.steps) == ("warning", (0, 1, 2, 3))
    assert word in found.claim


def test_samples_of_the_policy_itself_are_fine(tmp_path: Path) -> None:
    assert told(_trained(tmp_path / "one")) is None
    assert told(_trained(tmp_path / "half", temperature=0.5, at=0.5)) is None


@pytest.mark.parametrize("stated", [{"top_p": 0.7}, {"temperature": 0.6}], ids=str)
def test_what_is_stated_is_not_hidden(tmp_path: Path, stated: dict[str, Any]) -> None:
    diagnosis = look(_trained(tmp_path / "d", stated=stated, **stated), "L33")
    assert of(diagnosis, "L33") is None
    assert "stated" in why_skipped(diagnosis, "L33")


def test_the_sure_samples_of_a_moved_mini_batch_are_no_fair_draw(tmp_path: Path) -> None:
    """Answers of one token, p = .9 or .1: an update has moved the second mini-batch, its sure tokens hardly."""
    rare_B = np.arange(1000) % 10 == 0
    p_B = np.where(rare_B, 0.1, 0.9)
    ids_BS = np.stack([np.full(1000, 5), np.full(1000, 6), np.where(rare_B, 8, 7)], axis=1)
    response_BS = np.array([[0, 0, 1]]).repeat(1000, axis=0)
    entropy = -(0.9 * np.log(0.9) + 0.1 * np.log(0.1))
    with Recorder(tmp_path / "d") as recorder:
        for step in range(4):
            with recorder.step(step) as record:
                for minibatch in range(2):
                    old_BT = np.stack([np.zeros(1000), np.log(p_B)], axis=1).astype(np.float32)
                    moved_B = np.where(rare_B, 0.2, -0.005) * minibatch
                    record("forward_data", {
                        "input_ids": ids_BS, "attention_mask": np.ones_like(ids_BS), "response_mask": response_BS,
                        "old_log_probs": old_BT, "log_probs": old_BT + moved_B[:, None].astype(np.float32),
                        "entropy": np.full((1000, 2), entropy, np.float32),
                    }, micro=minibatch, epoch=0, minibatch=minibatch)  # fmt: skip
    assert told(tmp_path / "d") is None
