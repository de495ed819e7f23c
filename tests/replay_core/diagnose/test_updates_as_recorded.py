"""Gradients that are recorded with their micro-batch, norms in another record, and weights as checkpoints alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from replay_core.recorder import Recorder
from tests.replay_core.diagnose.batches import look, of

NAMES = ("embed_tokens.weight", "layers.0.q_proj.weight", "layers.0.norm.weight", "lm_head.weight")


def _gradients(path: Path, *, part: str, updates: int, beside: str) -> Path:
    """Updates whose logged norm is that of the weights whose name holds `part`."""
    draw = torch.Generator().manual_seed(0)
    with Recorder(path, flags={"max_grad_norm": 0.05}) as recorder:
        for step in range(4):
            with recorder.step(step, rank=0) as record:
                for update in range(updates):
                    held = {name: torch.randn(6, 6, generator=draw) for name in NAMES}
                    norm = float(torch.stack([each.norm() for name, each in held.items() if part in name]).norm())
                    where: dict[str, Any] = {"micro": 2 * update + 1, "minibatch": update}
                    norms = {"grad_norm": norm}
                    record("gradient", {**held, **(norms if beside == "gradient" else {})}, **where)
                    if beside != "gradient":
                        record(beside, norms, **({} if beside == "training_metrics" and updates == 1 else where))
    return path


@pytest.mark.parametrize("beside", ["gradient", "optimizer", "training_metrics"])
@pytest.mark.parametrize("updates", [1, 2])
@pytest.mark.parametrize(("part", "told"), [("proj", True), ("", False)])
def test_each_update_of_a_step_has_its_own_norm(
    part: str, told: bool, updates: int, beside: str, tmp_path: Path
) -> None:
    diagnosis = look(_gradients(tmp_path / "d", part=part, updates=updates, beside=beside), "D163")
    assert "D163" in diagnosis.checked
    found = of(diagnosis, "D163")
    assert (found is not None) is told
    assert found is None or found.steps == (0, 1, 2, 3)


class _Weights(torch.nn.Linear):
    """What a checkpoint is made of, and Adam by hand: the first step moves every number by the rate."""

    def __init__(self) -> None:
        super().__init__(12, 12)
        self.begin()

    def begin(self) -> None:
        self.moments = [torch.zeros(2, *weight.shape) for weight in self.parameters()]
        self.count = 0

    def step(self, draw: torch.Generator, rate: float = 1e-3) -> None:
        self.count += 1
        for weight, moments in zip(self.parameters(), self.moments, strict=True):
            gradient = 0.1 * torch.randn(weight.shape, generator=draw)
            moments.copy_(torch.stack([0.9 * moments[0] + 0.1 * gradient, 0.99 * moments[1] + 0.01 * gradient**2]))
            first, second = moments[0] / (1 - 0.9**self.count), moments[1] / (1 - 0.99**self.count)
            weight.data -= rate * first / (second.sqrt() + 1e-8)

    def save_pretrained(self, place: str, **_: object) -> None:
        Path(place).mkdir(parents=True, exist_ok=True)
        save_file({name: value.detach().clone() for name, value in self.named_parameters()},
                  Path(place) / "model.safetensors")  # fmt: skip


def _checkpoints(path: Path, *, anew: int | None = None, moves: bool = True, stage: str = "optimizer") -> Path:
    """Weights that Adam moves by gradients of noise, kept as checkpoints alone."""
    torch.manual_seed(3)
    net = _Weights()
    with Recorder(path, flags={"learning_rate": 1e-3}) as recorder:
        for step in range(8):
            if step == anew:
                net.begin()
            recorder.checkpoint(step, net)
            with recorder.step(step) as record:
                record(stage, grad_norm=1.0 + step)
            if moves:
                net.step(torch.Generator().manual_seed(step))
    return path


@pytest.mark.parametrize(("anew", "steps"), [(4, (4,)), (None, None)])
def test_checkpoints_tell_of_an_optimizer_that_begins_anew(
    anew: int | None, steps: tuple[int, ...] | None, tmp_path: Path
) -> None:
    diagnosis = look(_checkpoints(tmp_path / "d", anew=anew), "D150")
    assert "D150" in diagnosis.checked
    found = of(diagnosis, "D150")
    assert (None if found is None else found.steps) == steps


@pytest.mark.parametrize("stage", ["gradient", "optimizer", "training_metrics"])
@pytest.mark.parametrize("moves", [True, False])
def test_checkpoints_that_are_one_beside_norms_wherever_these_are(stage: str, moves: bool, tmp_path: Path) -> None:
    found = of(look(_checkpoints(tmp_path / "d", moves=moves, stage=stage), "D57"), "D57")
    assert (found is None) is moves
