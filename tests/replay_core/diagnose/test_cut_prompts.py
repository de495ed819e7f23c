"""Prompts that lost their beginning or their end: cut to a limit, before an engine answers them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replay_core.diagnose.finding import Finding
from replay_core.recorder import Recorder
from tests.replay_core.diagnose.batches import look, of
from tests.replay_core.diagnose.bigram import Bigram

BOS = 1
ASKED = [[4, 5], [6, 7], [8], [9, 3], [10, 11, 12], [13, 4, 5, 6], [7, 8, 9, 10], [11, 12, 13], [5, 3, 4, 9, 8]]


def _told(folder: Path, cut: Any, *, begins: list[int] | None = None, **stated: Any) -> Finding | None:
    lm = Bigram(2)
    with Recorder(folder, flags=stated) as recorder:
        for step in range(3):
            prompts = [cut([*([BOS] if begins is None else begins), *one]) for one in ASKED[3 * step : 3 * step + 3]]
            with recorder.step(step) as record:
                record("trajectory", **lm.rollout(prompts, each=3).tensors())
    return of(look(folder, "L28"), "L28")


@pytest.mark.parametrize(("stated", "severity"), [({"max_prompt_length": 3}, "error"), ({}, "warning"),
                                                  ({"max_prompt_length": 9}, "warning")], ids=str)  # fmt: skip
def test_prompts_without_their_beginning_are_all_of_the_largest_length(
    stated: dict[str, Any], severity: str, tmp_path: Path
) -> None:
    # Four lie below the limit: [BOS, 8] and three that the limit leaves as they are.
    short = lambda one: one[-4:] if len(one) > 4 else one  # noqa: E731
    found = _told(tmp_path / "d", short, **(stated and {"max_prompt_length": stated["max_prompt_length"] + 1}))
    assert found is not None
    assert found.severity == severity
    assert "cut from the left to 4 tokens" in found.claim


def test_whole_prompts_and_those_cut_from_the_right_begin_alike(tmp_path: Path) -> None:
    assert _told(tmp_path / "whole", lambda one: one) is None
    assert _told(tmp_path / "right", lambda one: one[:4]) is None


def test_prompts_that_have_no_common_beginning_tell_nothing(tmp_path: Path) -> None:
    assert _told(tmp_path / "d", lambda one: one[-3:], begins=[]) is None


END = [20, 21]


@pytest.mark.parametrize("since", [0, 2])
def test_prompts_cut_on_the_right_lack_the_end_of_the_template(since: int, tmp_path: Path) -> None:
    found = _asked(tmp_path / "d", lambda step, one: one[:6] if step >= since else one)
    assert found is not None
    assert "cut on the right" in found.claim
    assert found.steps == tuple(range(since, 4))
    assert _asked(tmp_path / "whole", lambda _, one: one) is None


def test_prompts_of_two_templates_are_not_cut(tmp_path: Path) -> None:
    assert _asked(tmp_path / "two", lambda _, one: [*one[:-2], 22, 23] if len(one) > 6 else one) is None
    # Without a template, each ends as it likes, and all are of one length.
    assert _asked(tmp_path / "none", lambda _, one: one[1:-2][:2]) is None


def _asked(folder: Path, cut: Callable[[int, list[int]], list[int]]) -> Finding | None:
    """Four steps of eight prompts of one to six tokens between BOS and the template's end."""
    lm, draw = Bigram(2), np.random.default_rng(3)
    with Recorder(folder) as recorder:
        for step in range(4):
            asked = [[BOS, *draw.integers(3, 14, draw.integers(1, 7)).tolist(), *END] for _ in range(8)]
            with recorder.step(step) as record:
                record("trajectory", **_rolled(lm, [cut(step, one) for one in asked]))
    return of(look(folder, "L28"), "L28")


def _rolled(lm: Bigram, prompts: list[list[int]]) -> dict[str, Any]:
    """Three responses [4] to each prompt, right-aligned with it."""
    width = max(map(len, prompts))
    rows = [[*[0] * (width - len(one)), *one, *(3 + (at + n) % 9 for n in range(4))]
            for at, one in enumerate(prompts) for _ in range(3)]  # fmt: skip
    ids_BS = np.array(rows)
    kept_B = np.repeat([len(one) + 4 for one in prompts], 3)
    mask_BS = (np.arange(width + 4) >= width + 4 - kept_B[:, None]).astype(np.int64)
    response_BS = np.zeros_like(ids_BS)
    response_BS[:, width:] = 1
    return {"input_ids": ids_BS, "attention_mask": mask_BS, "response_mask": response_BS}


@pytest.mark.parametrize("end", ["<|im_end|>\n<|im_start|>assistant\n", "\nAnswer:", " = "])
def test_texts_cut_on_the_right(end: str, tmp_path: Path) -> None:
    draw = np.random.default_rng(1)
    for name, since in (("cut", 2), ("always", 0), ("whole", 9)):
        folder = tmp_path / name
        folder.mkdir()
        for step in range(5):
            asked = ["".join(draw.choice(list("abcdefgh ijk"), draw.integers(5, 60))) + end for _ in range(8)]
            limit = 36 + len(end)
            kept = [one[:limit] if step >= since else one for one in asked]
            rows = [{"input": one, "output": "so it is 7", "gts": "7", "score": 1.0, "step": step} for one in kept]
            (folder / f"{step}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        found = of(look(folder, "L28"), "L28")
        assert (found is not None) == (name != "whole")


def test_questions_without_a_template_are_no_cut_ones(tmp_path: Path) -> None:
    draw = np.random.default_rng(1)
    for step in range(5):
        rows = [{"input": f"What is {draw.integers(9)} x {draw.integers(999)}{draw.choice(['?', '', '.'])}",
                 "output": "7", "gts": "7", "score": 1.0, "step": step} for _ in range(8)]  # fmt: skip
        (tmp_path / f"{step}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert of(look(tmp_path, "L28"), "L28") is None
