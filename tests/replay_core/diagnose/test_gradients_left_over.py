"""Gradients of mini-batches by autograd, zeroed before each or not; tokens that do not occur tell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from replay_core.diagnose.finding import Finding
from replay_core.recorder import Recorder
from tests.replay_core.diagnose.batches import look, of

VOCABULARY, WIDTH = 40, 8


class _Model(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed_tokens, self.mix = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.lm_head(torch.tanh(self.mix(self.embed_tokens(ids))))
        return out


def _run(
    folder: Path,
    zeroed: str,
    *,
    tied: bool = False,
    max_norm: float = 0.0,
    steps: int = 5,
    dtype: Any = torch.float32,
    frozen: bool = False,
) -> Finding | None:
    """zeroed: each (before every mini-batch), step (once a step), never, or micro: one update of several backwards."""
    torch.manual_seed(3)
    model = _Model(tied).to(dtype)
    trained = model.mix.parameters() if frozen else model.parameters()
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    recorder = Recorder(folder)
    for step in range(steps):
        with recorder.step(step) as record:
            if frozen:
                record("param", {name: one.detach().clone() for name, one in model.named_parameters()})
            if zeroed in ("step", "micro"):
                optimizer.zero_grad()
            for micro in range(4):
                mini = 0 if zeroed == "micro" else micro // 2
                if zeroed == "each" and micro % 2 == 0:
                    optimizer.zero_grad()
                ids = torch.randint(1, VOCABULARY, (3, 6))
                record("forward_data", micro=micro, epoch=0, minibatch=mini, input_ids=ids,
                       attention_mask=torch.ones_like(ids))  # fmt: skip
                scores = model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None])
                (-scores.mean() * (micro - 1.5)).backward()
                if micro % 2 == 0:
                    continue
                if max_norm:
                    nn.utils.clip_grad_norm_(model.parameters(), max_norm)
                grads = {f"grad.{name}": one.grad.clone() for name, one in model.named_parameters()
                         if one.grad is not None}  # fmt: skip
                if tied:
                    grads["grad.lm_head.weight"] = grads["grad.embed_tokens.weight"].clone()
                record("gradient", micro=micro, epoch=0, minibatch=mini, **grads)
                if zeroed != "micro" or micro == 3:
                    optimizer.step()
    return of(look(folder, "D68"), "D68")


@pytest.mark.parametrize("zeroed", ["step", "never"])
@pytest.mark.parametrize("max_norm", [0.0, 0.05])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mini_batch_that_begins_with_the_gradient_before_it(
    zeroed: str, max_norm: float, dtype: Any, tmp_path: Path
) -> None:
    found = _run(tmp_path / "d", zeroed, max_norm=max_norm, dtype=dtype)
    assert found is not None
    assert found.severity == "error"
    assert "hold those of the update before" in found.claim
    assert len(found.steps) >= 4


@pytest.mark.parametrize("zeroed", ["each", "micro"])
@pytest.mark.parametrize("tied", [False, True])
def test_gradients_that_are_each_update_s_own(zeroed: str, tied: bool, tmp_path: Path) -> None:
    assert _run(tmp_path / "d", zeroed, tied=tied) is None


def test_an_embedding_that_no_optimizer_holds_keeps_its_gradient(tmp_path: Path) -> None:
    assert _run(tmp_path / "d", "each", frozen=True) is None


def test_tied_weights_tell_nothing(tmp_path: Path) -> None:
    assert _run(tmp_path / "d", "step", tied=True) is None


@pytest.mark.parametrize("anew", [4, 100])
def test_recorded_steps_that_are_parts_of_one_update(anew: int, tmp_path: Path) -> None:
    """Every backward is recorded as a step of its own; each fourth begins an update."""
    torch.manual_seed(4)
    model = _Model(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    recorder = Recorder(tmp_path / "d")
    for step in range(16):
        if step % anew == 0:
            optimizer.zero_grad()
        ids = torch.randint(1, VOCABULARY, (3, 6))
        scores = model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None])
        (-scores.mean() * (step % 3 - 0.7)).backward()
        with recorder.step(step) as record:
            record("forward_data", input_ids=ids, attention_mask=torch.ones_like(ids))
            record("gradient", {f"grad.{name}": one.grad.clone() for name, one in model.named_parameters()
                                if one.grad is not None})  # fmt: skip
        if step % 4 == 3:
            optimizer.step()
    found = of(look(tmp_path / "d", "D68"), "D68")
    assert (found is None) == (anew == 4)
