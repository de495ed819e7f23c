"""A loss that each rank makes of its own part of what is to be summed over the ranks first."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional

from tests.builders import row_of, there
from tests.replay_core.compare.ranks.recorded import Step, compared, random

MARGIN, PART = random(6), random(6, seed=1)
PARTS = [PART, MARGIN - PART]
IDS = torch.arange(6 * 8).reshape(6, 8)


def preference(margin: torch.Tensor, beta: float = 1.0) -> torch.Tensor:
    return -functional.logsigmoid(beta * margin).mean()


def step(margin: torch.Tensor, loss: torch.Tensor, tokens: slice = slice(None)) -> Step:
    return {
        "batch_inputs": {"input_ids": IDS[:, tokens].contiguous()},
        "loss": {"reward_margin": margin, "loss": loss},
    }


HALVES = [slice(0, 4), slice(4, 8)]


@pytest.mark.parametrize("beta", [1.0, 0.3])
def test_a_loss_of_each_ranks_own_margin_is_told(beta: float, tmp_path: Path) -> None:
    ranks = [step(part, preference(part, beta), half) for part, half in zip(PARTS, HALVES, strict=True)]
    found = compared(tmp_path, step(MARGIN, preference(MARGIN, beta)), *ranks)
    fault = there(there(row_of(found, "loss").ranks).fault)
    assert (fault.kind, fault.ranks) == ("before its sum", (0, 1))
    assert "own part of reward_margin: the mean of -log sigmoid(x)" in fault.sentence
    assert ("x times 0.3" in fault.sentence) == (beta != 1.0)


def test_a_loss_of_the_whole_margin_is_right(tmp_path: Path) -> None:
    ranks = [step(MARGIN, preference(MARGIN), half) for half in HALVES]
    assert compared(tmp_path, step(MARGIN, preference(MARGIN)), *ranks).agrees


def test_losses_of_something_else_are_not_of_own_margins(tmp_path: Path) -> None:
    ranks = [step(part, preference(part) + 0.1, half) for part, half in zip(PARTS, HALVES, strict=True)]
    row = row_of(compared(tmp_path, step(MARGIN, preference(MARGIN)), *ranks), "loss")
    fault = there(row.ranks).fault
    assert fault is None or fault.kind != "before its sum"
