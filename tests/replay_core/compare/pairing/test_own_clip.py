"""Gradients behind a clipping that no recorder saw are those before it, times what the other run's norms say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.replay_core.compare.ranks.recorded import compared, random

GRADIENTS = {f"grad.layers.{layer}.up_proj.weight": random(8, 8, seed=layer) for layer in range(4)}
NORM = float(torch.cat([one.flatten() for one in GRADIENTS.values()]).norm())
IDS = torch.randint(2, 40, (2, 9), generator=torch.Generator().manual_seed(3))


def step(times: float = 1.0, clipped: float | None = None) -> dict[str, Any]:
    gradients: dict[str, Any] = {name: times * one for name, one in GRADIENTS.items()}
    more = {} if clipped is None else {"optimizer": {"clipped_grad_norm": clipped}}
    return {"batch_inputs": {"input_ids": IDS}, "gradient": {**gradients, "grad_norm": times * NORM}, **more}


@pytest.mark.parametrize(("times", "agrees"), [(1 / NORM, True), (1.02 / NORM, False), (0.5, False)])
def test_gradients_of_ranks_that_clip_by_themselves(times: float, agrees: bool, tmp_path: Path) -> None:
    found = compared(tmp_path, step(clipped=1.0), step(times), step(times))
    assert found.agrees is agrees
    assert any("clipped as they are recorded" in note for note in found.notes) is agrees


def test_one_gradient_that_is_off_besides_is_still_off(tmp_path: Path) -> None:
    wrong = step(1 / NORM)
    name = "grad.layers.3.up_proj.weight"
    wrong["gradient"][name] = wrong["gradient"][name] + 0.1 * random(8, 8, seed=9) / NORM
    found = compared(tmp_path, step(clipped=1.0), wrong, wrong)
    assert [row.name for row in found.tensors if row.verdict.value == "DIFF"] == [name]
