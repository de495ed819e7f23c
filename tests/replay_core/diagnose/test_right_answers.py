"""Right answers beside what they are paid, and what sets those apart that are paid as wrong ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replay_core.diagnose.finding import Diagnosis
from replay_core.recorder import Recorder
from tests.replay_core.diagnose.batches import causes, look, of

PROMPTS, SIZE = 6, 5


def _rollout(folder: Path, paid: Any, *, acc: bool = True, steps: int = 5) -> Diagnosis:
    """Answers of two digits, with up to three words before them; a wrong one may have a part of the score."""
    folder.mkdir()
    for step in range(1, steps + 1):
        draw = np.random.default_rng(step)
        rows: list[dict[str, Any]] = []
        for prompt in range(PROMPTS):
            truth = str(draw.integers(10, 99))
            for _ in range(SIZE):
                right = bool(draw.random() < 0.5)
                words = " ".join(["so"] * int(draw.integers(0, 4)))
                said = truth if right else str(int(truth) + 1)
                rows.append({"input": f"question {step} {prompt}", "output": f"{words}<answer>{said}</answer>",
                             "gts": truth, "step": step, **({"acc": right} if acc else {})})  # fmt: skip
        rights = np.array([row["gts"] in row["output"] for row in rows])
        scores = paid(rights, rows, draw)
        lines = [json.dumps({**row, "score": float(score)}) for row, score in zip(rows, scores, strict=True)]
        (folder / f"{step}.jsonl").write_text("\n".join(lines) + "\n")
    return look(folder)


def _by_pairs(rights: Any, *_: Any) -> Any:
    return np.where(rights, 1.0, 0.3)[np.arange(len(rights)) ^ 1]


def _within_groups(rights: Any, _rows: Any, draw: Any) -> Any:
    scores = np.where(rights, 1.0, 0.3).reshape(PROMPTS, SIZE)
    return np.concatenate([draw.permutation(each) for each in scores])


def _of_the_prompt(rights: Any, _rows: Any, draw: Any) -> Any:
    return np.repeat(draw.random(len(rights) // SIZE).round(1), SIZE)


def _without_words(rights: Any, rows: Any, _draw: Any) -> Any:
    return rights & np.array([row["output"].startswith("<answer>") for row in rows])


def _short_ones(rights: Any, rows: Any, _draw: Any) -> Any:
    return rights & np.array([row["output"].count("so") < 2 for row in rows])


def _overlong(rights: Any, rows: Any, _draw: Any) -> Any:
    return np.where(rights, 1.0, 0.75) - 0.35 * np.array([row["output"].count("so") for row in rows])


def _by_label(rights: Any, rows: Any, _draw: Any) -> Any:
    """Every third prompt has no label."""
    for row in rows:
        if int(row["input"].split()[-1]) % 3 == 0:
            row["gts"] = ""
    return rights & np.array([bool(row["gts"]) for row in rows])


def _by_source(rights: Any, rows: Any, _draw: Any) -> Any:
    """Every third prompt has a label that no answer has."""
    return rights & np.array([int(row["input"].split()[-1]) % 3 > 0 for row in rows])


@pytest.mark.parametrize(
    ("paid", "acc", "severity", "words"),
    [
        (_by_pairs, True, "error", "each two neighbouring rows have each other's"),
        (_within_groups, True, "error", "scores lie on other rows of their group"),
        (_of_the_prompt, True, "warning", "all answers of a prompt have one score, right and wrong ones"),
        (_without_words, True, "warning", "whose first word is 'so'"),
        (_without_words, False, "warning", "whose first word is 'so'"),
        (_short_ones, True, "warning", "whose response is over"),
        (_by_label, True, "warning", "those whose ground truth is empty"),
        (_by_source, True, "warning", "all right ones to some prompts, and none to the others"),
    ],
)
def test_right_answers_that_are_paid_as_wrong_ones(
    paid: Any, acc: bool, severity: str, words: str, tmp_path: Path
) -> None:
    found = causes(_rollout(tmp_path / "d", paid, acc=acc))[0]
    assert (found.id, found.severity) == ("D123", severity)
    assert words in found.claim
    assert ("parser" in found.cause) == (paid in (_without_words, _short_ones, _of_the_prompt))


@pytest.mark.parametrize(
    ("paid", "acc"),
    [
        (lambda rights, *_: rights, True),
        (lambda rights, *_: np.where(rights, 1.0, 0.4), False),
        # What a judge takes off by chance has no trait, and texts alone do not say that it is wrong.
        (lambda rights, _rows, draw: rights & (draw.random(len(rights)) < 0.7), False),
        # A penalty that grows with the length takes from right and wrong ones alike.
        (_overlong, True),
        (lambda rights, _rows, draw: rights & (draw.random(len(rights)) < 0.4), False),
        # What another term outweighs.
        (lambda rights, _rows, draw: rights + draw.normal(0, 1, len(rights)), True),
        # Paid in part is paid.
        (lambda rights, rows, _: rights * (1 - 0.2 * np.array([row["output"].count("so") for row in rows])), True),
    ],
)  # fmt: skip
def test_right_answers_that_are_paid_are_quiet(paid: Any, acc: bool, tmp_path: Path) -> None:
    assert of(_rollout(tmp_path / "d", paid, acc=acc), "D123") is None


def test_answers_without_the_marks_of_those_that_are_paid_are_none(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    folder.mkdir()
    for step in range(4):
        draw = np.random.default_rng(step)
        rows = []
        for row in range(24):
            right, form = draw.random(2) < 0.6
            said = "7" if right else "8"
            text = f"<answer>{said}</answer>" if form else f"it is {said}"
            rows.append({"input": f"q {step} {row // 4}", "output": text, "gts": "7", "step": step + 1,
                         "score": float(right and form)})  # fmt: skip
        (folder / f"{step + 1}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert of(look(folder), "D123") is None


def test_token_ids_tell_where_no_texts_are_recorded(tmp_path: Path) -> None:
    with Recorder(tmp_path / "d") as recorder:
        for step in range(4):
            draw = np.random.default_rng(step)
            answers = draw.integers(10, 40, (24, 6))
            answers[:, 0] = np.where(np.arange(24) % 3 == 0, 5, 6)
            acc = (draw.random(24) < 0.6).astype(np.float32)
            prompts = np.repeat(draw.integers(50, 90, (6, 3)), 4, axis=0)
            ids = np.concatenate([prompts, answers], axis=1)
            with recorder.step(step) as record:
                record("trajectory", {"input_ids": ids, "attention_mask": np.ones_like(ids), "acc": acc,
                                      "response_mask": (np.arange(9) >= 3) * np.ones((24, 1), np.int64),
                                      "group_ids": np.repeat(np.arange(6), 4),
                                      "rewards": acc * (answers[:, 0] == 6).astype(np.float32)})  # fmt: skip
    found = of(look(tmp_path / "d"), "D123")
    assert found is not None
    assert "those whose first token is 5" in found.claim
