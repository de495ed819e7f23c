"""Weights in half precision under a real Adam: what is lost without a float32 copy, and what moves with one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from replay_core.diagnose.finding import Finding
from replay_core.recorder import Recorder
from tests.replay_core.diagnose.batches import look, of


def _trained(
    directory: Path, dtype: torch.dtype, *, lr: float, master: bool = False, steps: int = 6, stored: bool = True,
    frozen: bool = False, gradients: bool = False, kept: bool = False,
) -> Path:  # fmt: skip
    """A layer fitted by Adam. `master`: it steps in float32, and what is recorded is rounded from it. `kept`: as
    checkpoints.
    """
    torch.manual_seed(0)
    layer = torch.nn.Linear(96, 64, bias=False)
    target = torch.randn(64, 96) * 0.1
    held = layer.weight.data.to(dtype).float().requires_grad_(not frozen)
    adapter = torch.zeros(64, 96, requires_grad=True)
    optimizer = torch.optim.Adam([adapter if frozen else held], lr=lr)
    recorder = Recorder(directory, flags={"learning_rate": lr})
    for step in range(steps):
        x = torch.randn(32, 96)
        weight = held.to(torch.float32) + adapter
        loss = ((x @ (weight - target).T) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if not master:
            held.data = held.data.to(dtype).float()
        with recorder.step(step) as record:
            rounded = held.detach().to(dtype)
            if kept:
                recorder.checkpoint(step, _Kept(rounded))
                record("gradient", grad_norm=1.0)
                continue
            record("param", **{"param.layers.0.weight": rounded if stored else rounded.float()})
            if gradients and held.grad is not None:
                record("gradient", **{"grad.layers.0.weight": held.grad.float()})
    return directory


class _Kept(torch.nn.Module):
    """What a checkpoint is saved of."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)

    def save_pretrained(self, folder: Path, safe_serialization: bool) -> None:
        folder.mkdir(parents=True)
        save_file({"layers.0.weight": self.weight.data.contiguous()}, folder / "model.safetensors")


def _found(path: Path) -> Finding | None:
    return of(look(path, "D67"), "D67")


@pytest.mark.parametrize("stored", [True, False], ids=["as it is", "as float32"])
@pytest.mark.parametrize(
    ("dtype", "lr"), [(torch.bfloat16, 2e-5), (torch.bfloat16, 1e-6), (torch.float16, 1e-6)], ids=str
)
def test_steps_that_are_rounded_away_are_told(tmp_path: Path, dtype: torch.dtype, lr: float, stored: bool) -> None:
    found = _found(_trained(tmp_path / "d", dtype, lr=lr, stored=stored, steps=12, gradients=True))
    assert found is not None
    assert str(dtype).removeprefix("torch.") in found.claim


@pytest.mark.parametrize(
    ("dtype", "lr"), [(torch.bfloat16, 2e-5), (torch.bfloat16, 1e-6), (torch.float16, 1e-6)], ids=str
)
def test_a_float32_copy_moves_as_many_as_it_should(tmp_path: Path, dtype: torch.dtype, lr: float) -> None:
    assert _found(_trained(tmp_path / "d", dtype, lr=lr, master=True, steps=12, gradients=True)) is None


def test_a_large_rate_moves_half_precision(tmp_path: Path) -> None:
    assert _found(_trained(tmp_path / "d", torch.bfloat16, lr=3e-3)) is None


def test_weights_that_an_adapter_leaves_alone_are_not_lost(tmp_path: Path) -> None:
    assert _found(_trained(tmp_path / "d", torch.bfloat16, lr=1e-5, frozen=True)) is None


@pytest.mark.parametrize(("lr", "master"), [(2e-5, False), (1e-6, False), (2e-5, True), (1e-6, True)])
def test_checkpoints_tell_as_much_as_recorded_weights(tmp_path: Path, lr: float, master: bool) -> None:
    found = _found(_trained(tmp_path / "d", torch.bfloat16, lr=lr, master=master, steps=12, kept=True))
    assert (found is None) == master
