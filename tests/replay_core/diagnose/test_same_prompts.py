"""Prompts that come again: in every step of a table of texts, on every rank in other groups; and one text a group."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from replay_core.diagnose.finding import Diagnosis
from replay_core.recorder import Recorder
from tests.replay_core.diagnose.batches import look, of
from tests.replay_core.diagnose.logs import diagnosed_path


def _texts(folder: Path, asked: list[list[str]], *, copies: bool = False) -> Diagnosis:
    """verl's rollout texts, four answers a prompt, beside its file logger."""
    (folder / "rollout_data").mkdir(parents=True)
    draw = np.random.default_rng(0)
    logged = []
    for step, prompts in enumerate(asked, 1):
        rows = []
        for prompt in prompts:
            one = int(draw.integers(0, 2))
            for _ in range(4):
                score = one if copies else int(draw.integers(0, 2))
                rows.append({"input": prompt, "output": f"say {prompt} {score}", "gts": "1", "score": float(score),
                             "step": step})  # fmt: skip
        (folder / "rollout_data" / f"{step}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        scores = np.array([row["score"] for row in rows])
        high = 0.0 if copies else 0.9
        logged.append({"step": step, "data": {
            "critic/score/mean": scores.mean(), "critic/score/max": scores.max(), "critic/score/min": scores.min(),
            "critic/advantages/max": high, "critic/advantages/min": -high, "actor/pg_loss": 0.1 * high,
            "actor/lr": 3e-4, "actor/entropy": 0.5, "actor/grad_norm": 0.3 * high}})  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in logged))
    return diagnosed_path(folder)


def _questions(seed: int, count: int = 6) -> list[str]:
    return [f"{value} + 1 = " for value in np.random.default_rng(seed).choice(999, count, replace=False)]


def test_texts_tell_that_every_step_has_the_same_prompts(tmp_path: Path) -> None:
    found = of(_texts(tmp_path / "same", [_questions(0)] * 6), "D43")
    assert found is not None
    assert (found.severity, len(found.steps)) == ("warning", 6)
    assert of(_texts(tmp_path / "others", [_questions(step) for step in range(6)]), "D43") is None
    draw = np.random.default_rng(1)
    shuffled = of(_texts(tmp_path / "small", [list(draw.permutation(_questions(0))) for _ in range(6)]), "D43")
    assert shuffled is not None
    assert shuffled.severity == "info"
    # Two halves of a small data set take turns.
    assert of(_texts(tmp_path / "turns", [_questions(step % 2) for step in range(6)]), "D43") is None


@pytest.mark.parametrize("how", ["right", "time-outs", "shuffled"])
def test_equal_answers_that_are_not_all_paid(how: str, tmp_path: Path) -> None:
    folder = tmp_path / "rollout_data"
    folder.mkdir()
    for step in range(1, 5):
        draw = np.random.default_rng(step)
        said = np.where(draw.random(48) < 0.5, "yes", "no")
        said[draw.random(48) < 0.2] = "perhaps"
        score = (said == "yes").astype(float)
        if how == "time-outs":
            score[3::8] = 0.0
        if how == "shuffled":
            score = draw.permutation(score)
        rows = [{"input": f"question {step} {at // 8}", "output": str(said[at]), "gts": "a", "score": score[at],
                 "step": step} for at in range(48)]  # fmt: skip
        (folder / f"{step}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = of(diagnosed_path(tmp_path), "D56")
    if how == "right":
        assert found is None
    elif found is not None:  # of few time-outs it is silent
        assert ("some are not paid" in found.claim) == (how == "time-outs"), found.claim
    assert how != "shuffled" or found is not None


def test_texts_tell_that_a_group_is_one_answer(tmp_path: Path) -> None:
    steps = [_questions(step) for step in range(6)]
    copied = _texts(tmp_path / "copies", steps, copies=True)
    claims = [found.claim for found in copied.findings if found.id in ("D01", "D03")]
    assert claims
    assert all("same text (36 of 36 groups)" in claim for claim in claims)
    healthy = _texts(tmp_path / "healthy", steps)
    assert not any("same text" in found.claim for found in healthy.findings)


@pytest.mark.parametrize("how", ["same", "sharded", "one batch", "split groups"])
def test_ranks_that_are_given_the_same_prompts_sample_their_own_answers(how: str, tmp_path: Path) -> None:
    with Recorder(tmp_path / "d") as recorder:
        for step in range(4):
            draw = np.random.default_rng(step)
            # Three prompts of four tokens for each of two ranks, four answers each.
            prompts = np.random.default_rng(9 if how == "one batch" else step).integers(10, 40, (6, 4))
            if how != "sharded":
                prompts[3:] = prompts[:3]
            groups = np.repeat(np.arange(6) % (3 if how == "split groups" else 6), 4)
            answers = draw.integers(10, 40, (24, 5))
            ids_BS = np.concatenate([np.repeat(prompts, 4, axis=0), answers], axis=1)
            response_BS = (np.arange(9) >= 4) * np.ones((24, 1), np.int64)
            with recorder.step(step) as record:
                record("trajectory", {"input_ids": ids_BS, "attention_mask": np.ones_like(ids_BS),
                                      "response_mask": response_BS, "group_ids": groups,
                                      "rewards": draw.uniform(0, 1, 24).astype(np.float32)})  # fmt: skip
    found = of(look(tmp_path / "d"), "D65")
    assert (found is not None) == (how == "same")
    if found is not None:
        assert "each prompt stands in 2 groups of the batch, in all 4 steps" in found.claim
