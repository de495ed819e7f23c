"""Adam's moments of a real optimizer beside the gradients they are made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from replay_core.diagnose.finding import Finding
from replay_core.recorder import Recorder
from tests.replay_core.diagnose.batches import look, of


def _run(
    folder: Path, betas: tuple[float, float], flags: dict[str, Any], *, dtype: torch.dtype = torch.float32,
    max_norm: float = 0.0, skipped: bool = False, minis: int = 1,
) -> Finding | None:  # fmt: skip
    """skipped: a second update of each step is not recorded."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=betas)
    with Recorder(folder, flags=flags) as recorder:
        for step in range(5):
            with recorder.step(step) as record:
                for mini in range(2 * minis if skipped else minis):
                    optimizer.zero_grad()
                    (model(torch.randn(8, 6)) ** 2).mean().backward()
                    grads = {f"grad.{name}": one.grad.to(dtype) for name, one in model.named_parameters()
                             if one.grad is not None}  # fmt: skip
                    if max_norm:
                        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
                    optimizer.step()
                    if skipped and mini % 2:
                        continue
                    key: dict[str, Any] = {"minibatch": mini, "epoch": 0, "micro": mini}
                    record("gradient", **grads, **key)
                    names = {id(one): name for name, one in model.named_parameters()}
                    state = {f"state.{names[id(one)]}.{part}": value.clone() for one, held in optimizer.state.items()
                             for part, value in held.items()}  # fmt: skip
                    record("optimizer", **state, **key)
    return of(look(folder, "D141"), "D141")


@pytest.mark.parametrize(
    ("betas", "flags", "words"),
    [
        ((0.9, 0.999), {"adam_betas": [0.9, 0.95]}, "a beta2 of 0.999, and the run states 0.95"),
        ((0.8, 0.95), {"adam_beta1": 0.9, "adam_beta2": 0.95}, "a beta1 of 0.8, and the run states 0.9"),
        ((0.999, 0.9), {"optim": {"betas": [0.9, 0.999]}}, "a beta1 of 0.999 and a beta2 of 0.9"),
        ((0.999, 0.9), {}, "betas are swapped"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_betas_that_are_others_are_told(
    betas: tuple[float, float], flags: dict[str, Any], words: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    found = _run(tmp_path / "d", betas, flags, dtype=dtype)
    assert found is not None
    assert found.severity == "warning"
    assert words in found.claim


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("minis", [1, 2])
@pytest.mark.parametrize("max_norm", [0.0, 0.05])
@pytest.mark.parametrize(
    ("betas", "flags"), [((0.9, 0.95), {"adam_betas": [0.9, 0.95]}), ((0.9, 0.999), {}), ((0.95, 0.95), {})]
)
def test_betas_as_they_are_stated_are_nothing(
    betas: tuple[float, float], flags: dict[str, Any], max_norm: float, minis: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    assert _run(tmp_path / "d", betas, flags, dtype=dtype, max_norm=max_norm, minis=minis) is None


def test_moments_of_updates_in_between_tell_nothing(tmp_path: Path) -> None:
    assert _run(tmp_path / "d", (0.9, 0.999), {"adam_betas": [0.9, 0.95]}, skipped=True) is None
