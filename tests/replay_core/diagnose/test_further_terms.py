"""Losses that are the sum of several terms, each with a weight of its own, as it is stated or otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from replay_core.diagnose.finding import Finding
from replay_core.recorder import Recorder
from tests.replay_core.diagnose.batches import look, of

STATED = {"router_aux_loss_coef": 0.01, "sft_loss_weight": 0.2, "kl_loss_coef": 0.1, "gradient_accumulation_steps": 2}


def _run(
    folder: Path, weights: dict[str, float], *, kl: float = 0.1, divided: bool = True, noise: float = 0.0,
    flags: dict[str, Any] | None = None, dtype: torch.dtype = torch.float32, gain: bool = False, whole: bool = True,
    size: float = 1.1,
) -> Finding | None:  # fmt: skip
    """Four steps of two micro-batches: what is recorded of each is these terms, and a loss that they add up to."""
    draw = torch.Generator().manual_seed(1)
    with Recorder(folder, flags=STATED if flags is None else flags) as recorder:
        for step in range(4):
            with recorder.step(step) as record:
                for micro in range(2):
                    pg, k3, *terms = (torch.randn(4, generator=draw) / 10).tolist()
                    each = {name: size + abs(one) for name, one in zip(weights, terms, strict=False)}
                    total = pg + kl * abs(k3) + sum(weights[name] * one for name, one in each.items())
                    loss = total / (2 if divided else 1) + noise * float(torch.randn(1, generator=draw))
                    held = {"pg_loss": pg, "kl_loss": abs(k3), "loss": loss, **(each if whole else {})}
                    if gain:
                        held["entropy_bonus_loss"] = held.pop("aux_loss")
                    record("loss", micro=micro, **{name: torch.tensor(one, dtype=dtype) for name, one in held.items()})
    return of(look(folder, "D140"), "D140")


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ({"aux_loss": 0.02}, "not divided by the accumulation"),
        ({"aux_loss": 1.0}, "switches the term on and does not weigh it"),
        ({"aux_loss": 0.001}, "does not reach the loss"),
        ({"aux_loss": -0.01}, "wrong sign"),
        ({"sft_loss": -0.2}, "wrong sign"),
        ({"sft_loss": 0.02, "aux_loss": 0.01}, "sft_loss weighs 0.02"),
    ],
)
def test_a_term_of_another_weight_is_an_error(weights: dict[str, float], words: str, tmp_path: Path) -> None:
    found = _run(tmp_path / "d", weights)
    assert found is not None
    assert found.severity == "error"
    assert words in found.claim + found.cause


def test_a_term_that_is_left_out_is_a_warning_unless_a_router_adds_it(tmp_path: Path) -> None:
    found = _run(tmp_path / "sft", {"sft_loss": 0.0})
    assert found is not None
    assert found.severity == "warning"
    assert _run(tmp_path / "aux", {"aux_loss": 0.0}) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("divided", [True, False])
@pytest.mark.parametrize(
    "weights", [{"aux_loss": 0.01}, {"sft_loss": 0.2}, {"sft_loss": 0.2, "aux_loss": 0.01}, {"sft_loss": 1.0}, {}]
)
def test_terms_as_they_are_stated_or_weighed_already_are_nothing(
    weights: dict[str, float], divided: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    assert _run(tmp_path / "d", weights, divided=divided, dtype=dtype) is None


def test_an_auxiliary_loss_that_holds_its_coefficient_is_nothing(tmp_path: Path) -> None:
    assert _run(tmp_path / "d", {"aux_loss": 1.0}, size=0.01) is None


def test_what_cannot_be_told_is_not(tmp_path: Path) -> None:
    assert _run(tmp_path / "gain", {"aux_loss": -0.01}, gain=True) is None
    assert _run(tmp_path / "noise", {"aux_loss": 1.0}, noise=0.2) is None
    assert _run(tmp_path / "apart", {"aux_loss": 1.0}, whole=False) is None
    assert _run(tmp_path / "unstated", {"aux_loss": 1.0}, flags={}) is None
