"""Evaluations whose answers are word for word the same while the policy moves, and policies that are sure of theirs.
The policy is a table of logits; answers are its likeliest words, or drawn from it.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from replay_core.recorder import Recorder
from tests.replay_core.diagnose.batches import look, of
from tests.replay_core.diagnose.logs import diagnosed_path

WORDS, PROMPTS, STEPS = 20, 12, 10


def _entropy(logits: np.ndarray) -> float:
    logps = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return float(-(np.exp(logps) * logps).sum(-1).mean())


def _answers(logits: np.ndarray, size: int) -> list[list[int]]:
    """The likeliest words behind each prompt, which is one number."""
    every = []
    for prompt in range(PROMPTS):
        words = [prompt]
        for _ in range(size):
            words.append(int(logits[words[-1]].argmax()))
        every.append(words[1:])
    return every


def _logits(step: int, kept: str) -> np.ndarray:
    """A policy that moves from step to step: at random, or, where its answers stay, by its temperature alone."""
    draw = np.random.default_rng(3)
    begun: np.ndarray = draw.normal(0, 1, (WORDS, WORDS))
    towards = draw.normal(0, 1.5, (WORDS, WORDS))
    if kept == "sure":
        return begun + (4 + step) * 5 * np.eye(WORDS)[(np.arange(WORDS) * 7) % WORDS]
    if kept == "surer":
        return 0.3 * begun + (5.2 + 0.25 * step) * np.eye(WORDS)[(np.arange(WORDS) * 7) % WORDS]
    if kept == "rests":
        return begun
    return begun + 0.3 * step * towards


def _verl(path: Path, kept: str, stale: bool, size: int, wrong: int = 3, every: int = 2) -> None:
    """verl's own files: a log of metrics, and the answers of validations."""
    (path / "validation_data").mkdir(parents=True)
    (path / "rollout_data").mkdir()
    lines = []
    for step in range(1, STEPS + 1):
        logits = _logits(step, kept)
        lines.append(json.dumps({"step": step, "data": {
            "actor/entropy": _entropy(logits), "actor/grad_norm": 0.5 + 0.01 * (step % 3), "actor/lr": 1e-3,
            "actor/pg_loss": 0.01 * (step % 4), "critic/score/mean": 0.4 + 0.01 * (step * 7 % 5),
            "training/global_step": step}}))  # fmt: skip
        drawn = np.random.default_rng(step).integers(0, WORDS, (8, size))
        for folder, rows in (("rollout_data", drawn.tolist()), ("validation_data", _answers(
            _logits(0 if stale else step, kept), size))):  # fmt: skip
            if folder == "validation_data" and step % every:
                continue
            (path / folder / f"{step}.jsonl").write_text("".join(
                json.dumps({"input": f"ask {at}", "output": " ".join(f"w{word}" for word in words), "gts": "w1",
                            "score": float(at >= wrong), "step": step}) + "\n"
                for at, words in enumerate(rows)))  # fmt: skip
    (path / "metrics.jsonl").write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize("size", [2, 12])
def test_answers_that_are_those_of_the_first_evaluation_are_told(size: int, tmp_path: Path) -> None:
    _verl(tmp_path / "d", "moves", True, size)
    found = of(diagnosed_path(tmp_path / "d"), "D164")
    assert found is not None
    assert (found.severity, list(found.steps)) == ("warning", [4, 6, 8, 10])
    assert "all 12 are word for word" in found.claim


@pytest.mark.parametrize(
    ("kept", "stale", "size", "wrong", "every"),
    [
        ("moves", False, 2, 3, 2),
        ("moves", False, 12, 3, 2),
        # Sure of its answers: they stay, and the policy moves.
        ("sure", False, 1, 3, 2),
        # Begins at .6 nats, and gets surer of the answers that are its likeliest ones already.
        ("surer", False, 10, 3, 2),
        # All right and short.
        ("moves", True, 2, 0, 2),
        # Nothing moves.
        ("rests", True, 12, 3, 2),
        # Three evaluations.
        ("moves", True, 12, 3, 3),
    ],
)
def test_answers_that_change_or_have_a_reason_to_stay_are_nothing(
    kept: str, stale: bool, size: int, wrong: int, every: int, tmp_path: Path
) -> None:
    _verl(tmp_path / "d", kept, stale, size, wrong, every)
    assert of(diagnosed_path(tmp_path / "d"), "D164") is None


@pytest.mark.parametrize(("stale", "stage"), [(True, "trajectory"), (False, "trajectory"), (True, "forward_data")])
def test_answers_of_token_ids_tell_it_too(stale: bool, stage: str, tmp_path: Path) -> None:
    """What a loss of held-out demonstrations is made of (`forward_data`) are no answers of the policy's."""
    size = 10
    with Recorder(tmp_path / "d") as recorder:
        for step in range(9):
            logits = _logits(step, "moves")
            drawn = np.random.default_rng(step)
            logps = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
            rows, said = drawn.integers(0, WORDS, (32, 1)), []
            for _ in range(size):
                near = logps[rows[:, -1]]
                word = np.array([drawn.choice(WORDS, p=np.exp(each)) for each in near])
                said.append(near[np.arange(len(near)), word])
                rows = np.concatenate([rows, word[:, None]], 1)
            greedy = np.array(_answers(_logits(0 if stale else step, "moves"), size))
            asked = np.concatenate([np.arange(PROMPTS)[:, None], greedy], 1)
            with recorder.step(step) as record:
                for role, ids in (("rollout", rows), ("eval", asked)):
                    if role == "eval" and step % 2:
                        continue
                    fields = {"input_ids": torch.from_numpy(ids), "attention_mask": np.ones_like(ids),
                              "response_mask": np.ones((len(ids), size), np.int64)}  # fmt: skip
                    if role == "rollout":
                        fields["rollout_log_probs"] = np.stack(said, 1).astype(np.float32)
                    record(stage if role == "eval" else "trajectory", fields, role=role)
    found = of(look(tmp_path / "d", "D164"), "D164")
    assert (found is not None) is (stale and stage == "trajectory")
