"""What steps of noise left apart in a weight is in what the weight puts out, and what that is made into."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from replay_core.compare import Comparison, compare_runs
from replay_core.dumps import open_run
from replay_core.recorder import Recorder

RATE = 0.01
AROUND = "layers.0.self_attn"
NAME = f"{AROUND}.k_proj"
INPUTS = torch.randn(2, 32, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
WEIGHT = (0.2 * torch.randn(64, 64, generator=torch.Generator().manual_seed(2))).bfloat16()
GRADIENT = torch.randn(64, 64, generator=torch.Generator().manual_seed(3))


def turned(heads: Tensor) -> Tensor:
    """Heads of 16 channels, turned by their positions (RoPE)."""
    angle = torch.arange(32)[:, None, None] * 10000 ** (-torch.arange(8) / 8)
    one, other = heads.double().chunk(2, -1)
    made = torch.cat([one * angle.cos() - other * angle.sin(), other * angle.cos() + one * angle.sin()], -1)
    return made.bfloat16()


def run(folder: Path, gradient: Tensor, *, beside: float = 0.0, factor: float = 1.0) -> Path:
    """Two steps of an Adam (its first is a rate along the gradient's sign), recorded before their update."""
    weight = WEIGHT
    with Recorder(folder, flags={"dtype": "bfloat16"}) as recorder:
        for number in range(2):
            with recorder.step(number) as record:
                made = (INPUTS.double() @ weight.double().T * factor).bfloat16()
                if number:
                    made[:, :, 5] += beside
                heads = made.unflatten(-1, (4, 16))
                fields: dict[str, Any] = {
                    f"{AROUND}.inputs.0": INPUTS, f"{NAME}.inputs.0": INPUTS, f"{NAME}.output": made,
                    f"{AROUND}.core.inputs.1": turned(heads), f"{AROUND}.core.inputs.2": heads,
                }  # fmt: skip
                record("batch_inputs", {"input_ids": torch.arange(64).reshape(2, 32) + 2}, micro=0)
                record("modules", fields, micro=0)
                record("gradient", {f"grad.{NAME}.weight": gradient})
                record("param", {f"param.{NAME}.weight": weight})
            weight = (weight.double() - RATE * gradient.sign()).bfloat16()
    return folder


def compared(folder: Path, **wrong: float) -> Comparison:
    """b's gradient is next to nothing at six elements of one row, and points the other way there."""
    near = GRADIENT.clone()
    near[7, :6] = 1e-3 * torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0, 1.0])
    other = near.clone()
    other[7, :6] *= -1
    return compare_runs(open_run(run(folder / "a", near)), open_run(run(folder / "b", other, **wrong)))


def test_outputs_are_off_by_what_steps_of_noise_left_apart_in_the_weight(tmp_path: Path) -> None:
    found = compared(tmp_path)
    assert found.agrees, (found.first and found.first.name, found.first and found.first.reason)
    said = {row.name: row.reason for row in found.tensors if "off by what its weights are" in row.reason}
    assert said.keys() == {f"{NAME}.output", f"{AROUND}.core.inputs.1", f"{AROUND}.core.inputs.2"}


@pytest.mark.parametrize("wrong", [{"beside": 0.5}, {"factor": 1.04}])
def test_and_by_nothing_else(wrong: dict[str, float], tmp_path: Path) -> None:
    assert compared(tmp_path, **wrong).agrees is False
