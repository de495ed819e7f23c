"""Answers of two turns around a tool, decoded and encoded again; what was sampled is recorded row by row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replay_core.diagnose.finding import Diagnosis
from replay_core.recorder import Recorder
from tests.replay_core.diagnose.batches import look, of

PAD, END, TOOL, MERGED = 0, 2, [7, 8, 12, 9], 40
PROMPT = [1, 11, 3]


def _encoded_again(ids: list[int], mask: list[int]) -> tuple[list[int], list[int]]:
    """20 and 21 beside each other come back as one token."""
    out: list[int] = []
    kept: list[int] = []
    at = 0
    while at < len(ids):
        merged = ids[at : at + 2] == [20, 21]
        out.append(MERGED if merged else ids[at])
        kept.append(mask[at])
        at += 1 + merged
    return out, kept


def _padded(rows: list[list[Any]], width: int) -> Any:
    return np.array([[*row, *[0] * (width - len(row))] for row in rows])


def _told(folder: Path, *, again: bool, name: str = "sampled_token_ids", lengths: bool = True, ended: bool = False,
          tool_in_mask: bool = False, begun: bool = False, cut: int = 0) -> Diagnosis:  # fmt: skip
    """cut: what the policy wrote alone is recorded, and what is trained on is cut off behind so many tokens; ended:
    an end token is appended to what is trained on, which the record of the samples lacks; begun: every third answer is
    made to begin with two tokens, which are in that record and do not count.
    """
    draw = np.random.default_rng(1)
    with Recorder(folder) as recorder:
        for step in range(3):
            ids, sampled, masks, rollout, old = (list[list[Any]]() for _ in range(5))
            for _ in range(20):
                first, second = ([int(one) for one in draw.integers(20, 26, int(draw.integers(3, 7)))] for _ in "ab")
                is_begun = begun and len(ids) % 3 == 0
                answer = [*([30, 31] * is_begun), *first, *TOOL, *second, *([] if ended else [END])]
                mask = (
                    [0] * 2 * is_begun
                    + [1] * len(first)
                    + [int(tool_in_mask)] * len(TOOL)
                    + [1] * (len(second) + (not ended))
                )
                logs = [0.0 if token in TOOL else float(-draw.gamma(2.0)) for token in answer]
                sampled.append([*first, *second, END] if cut else answer)
                theirs, kept = _encoded_again(answer, mask) if again else (answer, mask)
                if ended:
                    theirs, kept = [*theirs, END], [*kept, 0]
                theirs, kept = theirs[: cut or None], kept[: cut or None]
                logs = logs[: cut or None]
                answer = answer[: cut or None]
                ids.append([*PROMPT, *theirs])
                masks.append([*[0] * (len(PROMPT) - 1), *kept])
                rollout.append([*[0.0] * (len(PROMPT) - 1), *logs])
                # The trainer's own, of the tokens that it has.
                own = logs if theirs[: len(logs)] == answer else [float(-draw.gamma(2.0)) for _ in theirs]
                own = [value if value else -3.0 for value in own]
                old.append([*[0.0] * (len(PROMPT) - 1), *own])
            width = max(*(len(row) + 1 for row in ids), *(len(PROMPT) + len(row) + 1 for row in sampled))
            ids_BS = _padded(ids, width)
            more = {"sampled_lengths": np.array([len(row) for row in sampled])} if lengths else {}
            with recorder.step(step) as record:
                record("trajectory", {
                    "input_ids": ids_BS, "attention_mask": (ids_BS != PAD).astype(int),
                    "response_mask": _padded(masks, width - 1),
                    name: _padded(sampled, max(map(len, sampled))),
                    "rollout_log_probs": _padded(rollout, width - 1).astype(np.float32),
                    "rewards": draw.random(20).astype(np.float32), **more})  # fmt: skip
                record("old_log_probs", old_log_probs=_padded(old, width - 1).astype(np.float32))
    return look(folder)


@pytest.mark.parametrize(("name", "lengths"), [("sampled_token_ids", True), ("completion_ids", False)])
def test_answers_that_were_encoded_again(name: str, lengths: bool, tmp_path: Path) -> None:
    said = _told(tmp_path / "d", again=True, name=name, lengths=lengths)
    found = of(said, "D27")
    assert found is not None
    assert found.severity == "error"
    assert found.downstream_of is None
    assert "not those that were sampled" in found.claim
    first = next(one for one in said.findings if one.severity != "info")
    assert first.id == "D27"
    beside = of(said, "D41")
    assert beside is None or beside.downstream_of == "D27"


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"lengths": False},
        {"ended": True},
        {"begun": True},
        {"name": "completion_ids", "lengths": False},
        {"cut": 12},
        {"cut": 8},
        {"cut": 6},
        {"cut": 12, "lengths": False},
    ],
)
def test_answers_that_are_trained_on_as_sampled(how: dict[str, Any], tmp_path: Path) -> None:
    assert of(_told(tmp_path / "d", again=False, **how), "D27") is None


def test_tool_output_in_the_loss_is_no_other_token(tmp_path: Path) -> None:
    said = _told(tmp_path / "d", again=False, tool_in_mask=True)
    assert of(said, "D27") is None
    found = of(said, "D41")
    assert found is not None
    assert found.downstream_of is None


@pytest.mark.parametrize("again", [True, False])
def test_what_the_engine_recorded_apart_is_held_against_what_is_trained_on(again: bool, tmp_path: Path) -> None:
    """Two turns around a tool: the rollout's record holds the sampled tokens alone, and their log-probabilities."""
    draw = np.random.default_rng(3)
    with Recorder(tmp_path / "d") as recorder:
        for step in range(3):
            ids, masks, sampled, logs, old = (list[list[Any]]() for _ in range(5))
            for _ in range(20):
                first, second = ([int(one) for one in draw.integers(20, 26, int(draw.integers(3, 7)))] for _ in "ab")
                answer = [*first, *TOOL, *second, END]
                mask = [1] * len(first) + [0] * len(TOOL) + [1] * (len(second) + 1)
                sampled.append([*first, *second, END])
                logs.append([float(-draw.gamma(2.0)) for _ in sampled[-1]])
                theirs, kept = _encoded_again(answer, mask) if again else (answer, mask)
                ids.append([*PROMPT, *theirs])
                masks.append([*[0] * len(PROMPT), *kept])
                said = iter(logs[-1])
                same = theirs == answer
                old.append([*[0.0] * len(PROMPT), *((next(said) if same else -2.0) if each else 0.0 for each in kept)])
            width = max(map(len, ids))
            ids_BS, wide = _padded(ids, width), max(map(len, sampled))
            with recorder.step(step) as record:
                record("rollout", output_ids=_padded(sampled, wide), rewards=draw.random(20).astype(np.float32),
                       output_mask=(_padded(sampled, wide) != PAD).astype(int),
                       output_token_logprobs=_padded(logs, wide).astype(np.float32))  # fmt: skip
                record("trajectory", {
                    "input_ids": ids_BS, "attention_mask": (ids_BS != PAD).astype(int),
                    "response_mask": _padded(masks, width),
                    "old_log_probs": _padded(old, width).astype(np.float32)})  # fmt: skip
    told = look(tmp_path / "d")
    found = of(told, "D27")
    assert (found is not None) == again
    assert of(told, "D41") is None
    assert again or ("D09" in told.checked and of(told, "D09") is None)
