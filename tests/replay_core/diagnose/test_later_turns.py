"""Engine and trainer that see another conversation before later turns, beside such that differ everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replay_core.recorder import Recorder
from tests.replay_core.diagnose.batches import look, of

ROWS, PROMPT, TURN, TOOL = 16, 5, 7, 4
RESPONSE = 2 * TURN + TOOL


def _recorded(path: Path, off: Any) -> Path:
    """Two turns with tool output between them; `off`: what the engine's numbers are off by [B, T]."""
    counted = np.ones((ROWS, RESPONSE), np.int64)
    counted[:, TURN : TURN + TOOL] = 0
    with Recorder(path) as recorder:
        for step in range(4):
            draw = np.random.default_rng(step)
            ids = draw.integers(10, 40, (ROWS, PROMPT + RESPONSE))
            own = (-draw.uniform(0.02, 2, (ROWS, RESPONSE)) * counted).astype(np.float32)
            engine = ((own - off(draw)) * counted).astype(np.float32)
            with recorder.step(step) as write:
                write(
                    "batch_inputs",
                    {"prompts": ids[:, :PROMPT], "responses": ids[:, PROMPT:], "input_ids": ids,
                     "attention_mask": np.ones_like(ids), "response_mask": counted, "rollout_log_probs": engine,
                     "old_log_probs": own},
                    alignment=dict.fromkeys(("response_mask", "rollout_log_probs", "old_log_probs"), "response"),
                )  # fmt: skip
    return path


def _improbable(draw: Any) -> Any:
    """The trainer finds some tokens of half the rows improbable, and few a little more probable."""
    off = np.where(draw.random((ROWS, RESPONSE)) < 0.4, -draw.uniform(0.6, 1.5, (ROWS, RESPONSE)), 0.0)
    off = np.where(draw.random((ROWS, RESPONSE)) < 0.08, 0.3, off)
    off[draw.permutation(ROWS)[::2]] = 0
    return off


def _later(draw: Any) -> Any:
    """The same of second turns alone."""
    off = _improbable(draw)
    off[:, : TURN + TOOL] = 0
    return off


@pytest.mark.parametrize(("off", "is_of_turns"), [(_later, True), (_improbable, False)])
def test_a_gap_behind_the_first_tool_output_is_of_what_stands_before_later_turns(
    off: Any, is_of_turns: bool, tmp_path: Path
) -> None:
    found = of(look(_recorded(tmp_path / "d", off), "D09"), "D09")
    assert found is not None
    assert ("all of it behind the first tool output" in found.claim) == is_of_turns, found.claim
    assert ("re-tokenised" in found.cause) == (not is_of_turns)


def test_a_gap_that_rounding_makes_is_of_no_turn(tmp_path: Path) -> None:
    path = _recorded(tmp_path / "d", lambda draw: draw.normal(0, 0.01, (ROWS, RESPONSE)))
    assert of(look(path, "D09"), "D09") is None
