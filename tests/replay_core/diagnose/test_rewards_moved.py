"""Rewards that stay where they are while the rows of a batch are put in another order, and what looks like it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from replay_core.recorder import Recorder
from tests.replay_core.diagnose.batches import look, of

ROWS, PROMPT, ANSWER = 16, 3, 5


def _pay(answers: np.ndarray) -> np.ndarray:
    """How many tokens of an answer are even, and a little for its first one."""
    paid: np.ndarray = (answers % 2 == 0).mean(1) + 0.01 * answers[:, 0]
    return paid.astype(np.float32)


def _spread(paid: np.ndarray) -> np.ndarray:
    spread = np.zeros((len(paid), ANSWER), np.float32)
    spread[:, -1] = paid
    return spread


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("stayed", "row by row"),
        ("gathered", "the same numbers"),
        ("binary", "row by row"),
        ("moved", None),
        ("in place", None),
        ("with a KL", None),
        ("scaled", None),
        ("equal answers", None),
    ],
)
def test_rewards_that_are_not_moved_with_their_rows_are_told(how: str, told: str | None, tmp_path: Path) -> None:
    draw = np.random.default_rng(5)
    with Recorder(tmp_path / "d") as recorder:
        for step in range(3):
            prompts = np.repeat(draw.integers(3, 40, (ROWS // 4, PROMPT)), 4, axis=0)
            answers = draw.integers(3, 40, (ROWS, ANSWER))
            if how == "equal answers":
                answers[:] = answers[0]
                prompts[:] = prompts[0]
            ids, said = np.concatenate([prompts, answers], 1), draw.normal(-2, 1, (ROWS, ANSWER)).astype(np.float32)
            paid = draw.normal(0, 1, ROWS).astype(np.float32) if how == "equal answers" else _pay(answers)
            if how == "equal answers":
                said[:] = said[0]
            if how == "binary":
                paid = (paid > np.median(paid)).astype(np.float32)
            order = np.arange(ROWS) if how in ("in place", "gathered") else draw.permutation(ROWS)
            after = paid if how in ("stayed", "binary") else np.roll(paid, 3) if how == "gathered" else paid[order]
            whole, counted = np.ones_like(ids), np.ones((ROWS, ANSWER), np.int64)
            with recorder.step(step) as record:
                record(
                    "trajectory",
                    {"input_ids": ids, "attention_mask": whole, "response_mask": counted, "rollout_log_probs": said,
                     "rewards": paid},
                )  # fmt: skip
                less = 0.05 * draw.random(ROWS).astype(np.float32) if how == "with a KL" else 0.0
                times = 2.0 if how == "scaled" else 1.0
                record(
                    "prepared_trajectories",
                    {"input_ids": ids[order], "attention_mask": whole, "response_mask": counted,
                     "rollout_log_probs": said[order], "token_level_rewards": _spread(times * after - less)},
                )  # fmt: skip
    found = of(look(tmp_path / "d", "D162"), "D162")
    if told is None:
        assert found is None
    else:
        assert found is not None
        assert (found.severity, list(found.steps)) == ("error", [0, 1, 2])
        assert told in found.claim


def test_advantages_of_pairs_that_another_record_turns_around_are_their_samples_own(tmp_path: Path) -> None:
    """Of two answers to a prompt one has what the other lacks: turned around, they are the same numbers."""
    draw = np.random.default_rng(6)
    ids = draw.integers(3, 40, (ROWS, PROMPT + ANSWER))
    half = draw.random(ROWS // 2).astype(np.float32)
    gained, order = np.stack([half, -half], 1).ravel(), draw.permutation(ROWS)
    rows = {"attention_mask": np.ones_like(ids), "response_mask": np.ones((ROWS, ANSWER), np.int64)}
    with Recorder(tmp_path / "d") as recorder, recorder.step(0) as record:
        record("trajectory", {"input_ids": ids, **rows, "advantages": gained})
        record("prepared_trajectories", {"input_ids": ids[order], **rows, "advantages": -gained[order]})
    assert of(look(tmp_path / "d", "D162"), "D162") is None


def test_advantages_that_another_record_has_in_another_order_are_told(tmp_path: Path) -> None:
    draw = np.random.default_rng(6)
    ids = draw.integers(3, 40, (ROWS, PROMPT + ANSWER))
    gained, order = draw.normal(0, 1, ROWS).astype(np.float32), draw.permutation(ROWS)
    rows = {"attention_mask": np.ones_like(ids), "response_mask": np.ones((ROWS, ANSWER), np.int64)}
    with Recorder(tmp_path / "d") as recorder, recorder.step(0) as record:
        record("trajectory", {"input_ids": ids, **rows, "advantages": gained})
        record("prepared_trajectories", {"input_ids": ids[order], **rows, "advantages": gained})
    found = of(look(tmp_path / "d", "D162"), "D162")
    assert found is not None
    assert "advantages" in found.claim
