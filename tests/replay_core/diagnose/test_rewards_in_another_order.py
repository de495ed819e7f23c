"""Rewards that were put to other samples of their step, as texts and ground truths tell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replay_core.diagnose.finding import Finding
from tests.replay_core.diagnose.batches import causes, look

FORMS = ("{}#{}<eos>", "{} #### {}<|im_end|>", "{} so \\boxed{{{}}}", "{}<answer>{}</answer></s>")


def _step(form: str, step: int, how: str) -> list[dict[str, Any]]:
    """Six sums of a digit, four answers each, right in a third of all."""
    draw = np.random.default_rng(step)
    rows: list[dict[str, Any]] = []
    for prompt in range(6):
        truth = int(draw.integers(0, 10))
        for _ in range(4):
            right = draw.random() < 0.35
            said = truth if right else (truth + int(draw.integers(1, 10))) % 10
            thought = "".join(draw.choice(list("abcdef"), int(draw.integers(1, 9))))
            rows.append({"input": f"q {step} {prompt}", "output": form.format(thought, said), "gts": str(truth),
                         "score": float(said == truth), "step": step + 1})  # fmt: skip
    if how == "done":
        # Short answers are done first: their rewards come first.
        order = sorted(range(24), key=lambda at: len(rows[at]["output"]))
        scores = [rows[at]["score"] for at in order]
        for row, score in zip(rows, scores, strict=True):
            row["score"] = score
    for row in rows:
        if how == "format":
            row["score"] += 0.2 * (len(row["output"]) % 2)
        elif how == "partial":
            row["score"] = max(row["score"], round(float(draw.random()) * 0.4, 2))
        elif how == "judge" and draw.random() < 0.2:
            row["score"] = 1 - row["score"]
        elif how == "strict" and draw.random() < 0.4:
            row["score"] = 0.0
    return rows


def _found(folder: Path, form: str, how: str) -> list[Finding]:
    folder.mkdir()
    for step in range(8):
        lines = (json.dumps(row) + "\n" for row in _step(form, step, how))
        (folder / f"{step + 1}.jsonl").write_text("".join(lines))
    return causes(look(folder, "D100", "D123"))


@pytest.mark.parametrize("form", FORMS)
def test_rewards_in_the_order_in_which_they_were_done(form: str, tmp_path: Path) -> None:
    (found,) = _found(tmp_path / "d", form, "done")
    assert (found.id, found.severity) == ("D123", "error")
    assert found.claim.startswith("scores lie on other rows of their step")


@pytest.mark.parametrize("prompts", [8, 64])
def test_another_prompt_s_truth_is_often_that_of_a_wrong_answer(prompts: int, tmp_path: Path) -> None:
    """Truths are yes or no, and most answers wrong, in steps of few rows and of many."""
    folder = tmp_path / "d"
    folder.mkdir()
    for step in range(5):
        draw, rows = np.random.default_rng(step), list[dict[str, Any]]()
        for prompt in range(prompts):
            truth = str(draw.choice(["yes", "no"]))
            for _ in range(4):
                right = bool(draw.random() < 0.22)
                said = truth if right else {"yes": "no", "no": "yes"}[truth]
                rows.append({"input": f"q {step} {prompt}", "output": f"so {said}", "gts": truth,
                             "score": float(right), "step": step + 1})  # fmt: skip
        (folder / f"{step + 1}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert causes(look(folder, "D100", "D123")) == []


@pytest.mark.parametrize("how", ["right", "format", "partial", "judge", "strict"])
@pytest.mark.parametrize("form", FORMS)
def test_rewards_that_are_their_samples_own(form: str, how: str, tmp_path: Path) -> None:
    assert _found(tmp_path / "d", form, how) == []
