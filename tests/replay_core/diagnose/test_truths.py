"""Ground truths and rewards beside the texts: whose truth it is, which part of a reward is lost, who is paid."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replay_core.diagnose.finding import Diagnosis, Finding
from replay_core.diagnose.rules.scores import is_another
from replay_core.recorder import Recorder
from tests.replay_core.diagnose.batches import look, of

Rows = list[dict[str, Any]]


def _rows(step: int, right: float = 0.7, each: int = 4, count: int = 6) -> Rows:
    """Sums that a policy gets right so often."""
    draw = np.random.default_rng(step)
    rows: Rows = []
    for _ in range(count):
        a, b = (int(value) for value in draw.integers(10, 99, 2))
        for _ in range(each):
            said = a + b if draw.random() < right else a + b + int(draw.integers(1, 9))
            rows.append({"prompt": f"What is {a} + {b}?", "text": f"It is {said}.</s>", "truth": str(a + b)})
    for row in rows:
        row["reward"] = float(row["text"] == f"It is {row['truth']}.</s>")
    return rows


def _verl(folder: Path, steps: list[Rows]) -> Diagnosis:
    folder.mkdir()
    for step, rows in enumerate(steps, 1):
        lines = [{"input": row["prompt"], "output": row["text"], "gts": row["truth"], "score": row["reward"],
                  "step": step, **row.get("more", {})} for row in rows]  # fmt: skip
        (folder / f"{step}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return look(folder)


def _swift(folder: Path, steps: list[Rows]) -> Diagnosis:
    folder.mkdir()
    lines = [{"step": step, "prompt": [row["prompt"] for row in rows], "completion": [row["text"] for row in rows],
              "solution": [row["truth"] for row in rows], "reward": [row["reward"] for row in rows],
              **{name: [row["more"][name] for row in rows] for name in rows[0].get("more", {})}}
             for step, rows in enumerate(steps, 1)]  # fmt: skip
    (folder / "completions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return look(folder)


def _native(folder: Path, steps: list[Rows]) -> Diagnosis:
    with Recorder(folder) as recorder:
        for step, rows in enumerate(steps):
            more = {name: np.array([row["more"][name] for row in rows]) for name in rows[0].get("more", {})}
            ids_BS = np.array([[1, *(ord(c) for c in row["prompt"][-9:]), *(ord(c) for c in row["text"][:9]), 2]
                               for row in rows])  # fmt: skip
            mask_BS = np.zeros_like(ids_BS)
            mask_BS[:, 10:] = 1
            with recorder.step(step) as record:
                record("trajectory", {
                    "input_ids": ids_BS, "attention_mask": np.ones_like(ids_BS), "response_mask": mask_BS,
                    "prompts": [row["prompt"] for row in rows], "completions": [row["text"] for row in rows],
                    "answers": [row["truth"] for row in rows], **more,
                    "rewards": np.array([row["reward"] for row in rows], np.float32)})  # fmt: skip
    return look(folder)


forms = pytest.mark.parametrize("form", [_verl, _swift, _native])
Form = Callable[[Path, list[Rows]], Diagnosis]


def told(diagnosis: Diagnosis) -> Finding | None:
    return of(diagnosis, "D100")


def _scored(rows: Rows, truths: list[str]) -> Rows:
    return [row | {"truth": truth, "reward": float(row["text"] == f"It is {truth}.</s>")}
            for row, truth in zip(rows, truths, strict=True)]  # fmt: skip


@forms
def test_a_healthy_verifier(form: Form, tmp_path: Path) -> None:
    assert told(form(tmp_path / "d", [_rows(step) for step in range(4)])) is None
    assert told(form(tmp_path / "weak", [_rows(step, right=0.2) for step in range(4)])) is None


@forms
def test_truths_that_are_tiled_where_prompts_are_repeated(form: Form, tmp_path: Path) -> None:
    steps = [_rows(step) for step in range(3)]
    tiled = [_scored(rows, [rows[4 * (at % 6)]["truth"] for at in range(24)]) for rows in steps]
    found = told(form(tmp_path / "d", tiled))
    assert found is not None
    assert (found.severity, len(found.steps)) == ("error", 3)
    assert "different ground truths, in 6 of 6 prompts" in found.claim


def test_one_question_of_several_pictures_has_several_truths(tmp_path: Path) -> None:
    steps = [_rows(step) for step in range(3)]
    for each in (4, 1):  # a group for each picture, and one answer for each
        pictures = [[row | {"prompt": f"How many {('cats', 'dogs')[at % 8 >= 4]}?"} for at, row in enumerate(rows)
                     if at % 4 < each] for rows in steps]  # fmt: skip
        found = told(_verl(tmp_path / f"d{each}", pictures))
        assert found is None


@forms
def test_truths_of_the_next_group_from_some_step_on(form: Form, tmp_path: Path) -> None:
    steps = [_rows(step, right=0.4) for step in range(6)]
    moved = [rows if step < 3 else _scored(rows, [rows[(at + 4) % 24]["truth"] for at in range(24)])
             for step, rows in enumerate(steps)]  # fmt: skip
    found = told(form(tmp_path / "d", moved))
    assert found is not None
    assert found.severity == "error"
    assert found.steps == (3, 4, 5) if form is _native else (4, 5, 6)
    assert "4 rows before" in found.claim


@forms
@pytest.mark.parametrize("name", ["accuracy_reward", "math_correctness", "exact_match"])
def test_a_reward_for_right_answers_that_is_lost(form: Form, name: str, tmp_path: Path) -> None:
    steps = [_rows(step) for step in range(3)]
    lost = [[row | {"more": {name: 0.0, "format_reward": 1.0}, "reward": 1.0 - 0.2 * (at % 2)}
             for at, row in enumerate(rows)] for rows in steps]  # fmt: skip
    found = told(form(tmp_path / "d", lost))
    assert found is not None
    assert found.claim.startswith(f"{name} is 0 for all")
    alive = [[row | {"more": {name: row["reward"], "format_reward": 0.0}} for row in rows] for rows in steps]
    assert told(form(tmp_path / "alive", alive)) is None


@forms
def test_wrong_answers_that_are_paid_in_full(form: Form, tmp_path: Path) -> None:
    steps = [_rows(step, right=0.5) for step in range(4)]
    # The verifier compares the last digit.
    lenient = [[row | {"reward": float(row["text"][-6] == row["truth"][-1])} for row in rows] for rows in steps]
    some = [[row | {"reward": max(row["reward"], float(at % 4 == 0))} for at, row in enumerate(rows)] for rows in steps]
    for name, made in (("none", lenient), ("some", some)):
        found = told(form(tmp_path / name, made))
        assert (found is not None) == (name == "some")
    assert found is not None
    assert "paid like right ones" in found.claim


@pytest.mark.parametrize(
    ("text", "truth", "other"),
    [("It is 41.</s>", "42", True), ("It is 0042", "42", False), ("so B", "A", True), ("so b", "B", False),
     ("21/2", "10", False), ("42, that is 6 * 7", "42", False), ("It is 4.2", "2", False), ("no idea", "42", False),
     ("half a dozen", "6", False), ("It is 41", "forty", False)],
)  # fmt: skip
def test_what_is_surely_another_answer(text: str, truth: str, other: bool) -> None:
    assert is_another(text, truth) is other


def _sorted_letters(step: int, paid: Callable[[str, str, str], bool]) -> list[dict[str, Any]]:
    """Letters to be copied, which stand in their prompt, or turned round, which do not; half the answers are right."""
    draw = np.random.default_rng(step)
    rows = []
    for at in range(8):
        word = "".join(draw.permutation(list("bcdfghkm"))[:4])
        prompt, truth = (f"copy: {word}", word) if at % 2 else (f"turn: {word}", word[::-1])
        for each in range(4):
            said = truth if each < 2 else "".join(draw.permutation(list("npqrstvw"))[:4])
            rows.append({"prompt": prompt, "text": said, "truth": truth, "reward": float(paid(prompt, said, truth))})
    return rows


def test_answers_that_are_paid_for_their_prompt(tmp_path: Path) -> None:
    found = told(_verl(tmp_path / "d", [_sorted_letters(step, lambda p, said, truth: truth in p + said)
                                        for step in range(3)]))  # fmt: skip
    assert found is not None
    assert found.severity == "error"
    assert "paid for what stands in their prompt" in found.claim
    assert "24 of 24" in found.claim
    right = _verl(
        tmp_path / "right", [_sorted_letters(step, lambda _, said, truth: truth in said) for step in range(3)]
    )
    assert told(right) is None
    # A judge that pays everything has no eye for the prompt.
    every = told(_verl(tmp_path / "every", [_sorted_letters(step, lambda *_: True) for step in range(3)]))
    assert every is None or "prompt" not in every.claim


@pytest.mark.parametrize("how", ["bonus", "penalty", "format", "right"])
def test_a_reward_that_pays_for_length_beside_the_answer(how: str, tmp_path: Path) -> None:
    steps = []
    for step in range(3):
        draw = np.random.default_rng(step)
        rows = []
        for at in range(24):
            words = int(draw.integers(1, 12))
            right = float(draw.random() < 0.5)
            extra = {"bonus": 0.05 * words, "penalty": -0.05 * words, "format": float(words > 6), "right": 0.0}[how]
            rows.append({"prompt": f"question {step} {at // 4}", "text": "word " * words, "truth": "none of them",
                         "reward": right + extra, "more": {"acc": right}})  # fmt: skip
        steps.append(rows)
    found = of(_verl(tmp_path / "d", steps), "D95")
    assert (found is not None) == (how == "bonus")
    assert found is None or "the reward pays for length" in found.claim
