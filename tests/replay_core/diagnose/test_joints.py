"""Turns that are joined otherwise than the template joins them, and its own tokens in the loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from replay_core.recorder import Recorder
from tests.replay_core.diagnose.batches import look

START, END, NEWLINE, USER, ASSISTANT = 50, 51, 52, 53, 54
ROWS, WIDTH, HEAD = 20, 30, 12


def _row(draw: torch.Generator, prompt: list[int], how: str) -> tuple[list[int], list[int]]:
    """Two turns of the policy with a tool's between them: ids and mask of the response."""

    def words(count: int) -> list[int]:
        return torch.randint(5, 40, (count,), generator=draw).tolist()

    first = [*words(int(torch.randint(2, 6, (1,), generator=draw))), END]
    second = [*words(int(torch.randint(2, 6, (1,), generator=draw))), END]
    separator = [] if how in ("dropped", "raw") else [NEWLINE]
    tool = [*separator, START, USER, *words(3), END, NEWLINE, START, ASSISTANT, NEWLINE]
    if how == "raw":
        tool = words(6)  # a tool's output that no template wraps
    if how == "mixed" and torch.rand(1, generator=draw) < 0.5:
        tool = tool[1:]
    mask = [1] * len(first) + [0] * len(tool) + [1] * len(second)
    if how == "early":
        mask[len(first) + len(tool) - 1] = 1
    if how == "early" and torch.rand(1, generator=draw) < 0.3:
        second = [NEWLINE, *second]
        mask.append(1)
    return [*first, *tool, *second], mask


def _run(path: Path, how: str = "") -> Path:
    flags = {"algorithm.adv_estimator": "grpo", "data.max_response_length": WIDTH}
    with Recorder(path, flags=flags) as recorder:
        for step in range(3):
            draw = torch.Generator().manual_seed(step)
            fields: dict[str, Any] = {
                "prompts": torch.zeros(ROWS, HEAD, dtype=torch.long),
                "responses": torch.zeros(ROWS, WIDTH, dtype=torch.long),
                "response_mask": torch.zeros(ROWS, WIDTH, dtype=torch.long),
            }
            attention = torch.zeros(ROWS, WIDTH, dtype=torch.long)
            for row in range(ROWS):
                asked = torch.randint(5, 40, (2,), generator=draw).tolist()
                prompt = [START, USER, 7, END, NEWLINE, START, USER, *asked, END, NEWLINE]
                prompt = [*prompt[1:], START, ASSISTANT, NEWLINE][-HEAD:]
                ids, mask = _row(draw, prompt, how)
                fields["prompts"][row] = torch.tensor(prompt)
                fields["responses"][row, : len(ids)] = torch.tensor(ids)
                fields["response_mask"][row, : len(mask)] = torch.tensor(mask)
                attention[row, : len(ids)] = 1
            fields["input_ids"] = torch.cat([fields["prompts"], fields["responses"]], 1)
            fields["attention_mask"] = torch.cat([torch.ones(ROWS, HEAD, dtype=torch.long), attention], 1)
            fields["old_log_probs"] = -torch.rand(ROWS, WIDTH, generator=draw) * attention
            with recorder.step(step) as record:
                aligned = {"responses": "response", "response_mask": "response", "old_log_probs": "response"}
                record("batch_inputs", fields, alignment=aligned)
    return path


def test_a_separator_that_is_dropped(tmp_path: Path) -> None:
    (finding,) = look(_run(tmp_path, "dropped"), "D155").findings
    assert finding.severity == "warning"
    assert f"token {NEWLINE} follows the end token {END} in prompts" in finding.claim
    assert finding.steps == (0, 1, 2)


def test_the_templates_own_token_is_trained(tmp_path: Path) -> None:
    (finding,) = look(_run(tmp_path, "early"), "D138").findings
    assert f"the first token that counts in each later turn is the template's: token {NEWLINE}" in finding.claim
    assert finding.where.tensor == "response_mask"


@pytest.mark.parametrize("how", ["", "raw", "mixed"])
def test_turns_that_are_joined_as_they_should(how: str, tmp_path: Path) -> None:
    assert not look(_run(tmp_path, how), "D155").findings
