"""Weights that no gradient reaches, and an optimizer that was made anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from replay_core.diagnose.rules.single_weights import _SELDOM
from replay_core.recorder import Recorder
from tests.replay_core.diagnose.batches import look
from tests.replay_core.diagnose.runs import GRPO, batch, told


def _trained(path: Path, *, anew: int | None = None, still: str = "", kind: str = "AdamW", **flags: object) -> Path:
    """A small mixture that an optimizer moves by gradients of noise."""
    torch.manual_seed(3)
    net = torch.nn.ModuleDict(
        {
            "layer": torch.nn.Linear(8, 8), "router": torch.nn.Linear(8, 4, bias=False),
            "experts": torch.nn.Linear(8, 8), "visual": torch.nn.Linear(4, 4),
        }
    )  # fmt: skip

    def made() -> torch.optim.Optimizer:
        if kind == "SGD":
            return torch.optim.SGD(net.parameters(), lr=1e-2)
        return torch.optim.AdamW(net.parameters(), lr=1e-3)

    optimizer = made()
    with Recorder(path, flags={**GRPO, **flags}, target_param_pattern=".*") as recorder:
        for step in range(8):
            draw = torch.Generator().manual_seed(step)
            if step == anew:
                optimizer = made()
            for name, weight in net.named_parameters():
                noise = 0.1 * torch.randn(weight.shape, generator=draw)
                weight.grad = torch.zeros_like(weight) if still and still in name else noise
                if kind == "signs":
                    weight.grad = noise.sign()
            with recorder.step(step) as record:
                record("batch_inputs", {"input_ids": batch(step)["input_ids"]})
                record.gradients(net)
                record.params(net)
            if kind == "signs":
                with torch.no_grad():
                    for weight in net.parameters():
                        weight -= 1e-3 * weight.grad  # type: ignore[operator]
            else:
                optimizer.step()
    return path


def test_moments_that_were_not_loaded(tmp_path: Path) -> None:
    (finding,) = told(_trained(tmp_path, anew=4), "D150")
    assert "begin anew at step 4" in finding.claim
    assert finding.steps == (4,)


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "signs"])
def test_an_optimizer_that_goes_on(kind: str, tmp_path: Path) -> None:
    assert not told(_trained(tmp_path, kind=kind), "D150", "D151")


def test_a_router_without_a_gradient(tmp_path: Path) -> None:
    (finding,) = told(_trained(tmp_path, still="router"), "D151")
    assert "router" in finding.claim
    assert "experts" in finding.claim


def test_a_layer_without_a_gradient(tmp_path: Path) -> None:
    (finding,) = told(_trained(tmp_path, still="layer"), "D151")
    assert "2 of 7 weights have no gradient" in finding.claim


def test_what_a_batch_has_nothing_of_is_worth_knowing(tmp_path: Path) -> None:
    path = _trained(tmp_path, still="visual")
    assert not told(path, "D151")
    assert [one.severity for one in look(path, "D151").findings] == ["info"]


def test_a_router_that_is_frozen_on_purpose(tmp_path: Path) -> None:
    assert not told(_trained(tmp_path, still="router", freeze_router=True), "D151")


@pytest.mark.parametrize("flags", [{"actor.freeze_modules": ["layer"]}, {"frozen_params": "layer"}])
def test_a_layer_that_is_frozen_in_other_words(flags: dict[str, Any], tmp_path: Path) -> None:
    assert not told(_trained(tmp_path, still="layer", **flags), "D151")


def test_a_switch_that_is_off_freezes_nothing(tmp_path: Path) -> None:
    assert told(_trained(tmp_path, still="layer", freeze_modules=False, frozen_params=None), "D151")


@pytest.mark.parametrize(
    "name", ["model.layers.3.mlp.gate.e_score_correction_bias", "model.mtp.layers.0.weight", "router.expert_bias"]
)
def test_what_has_no_gradient_by_its_nature_is_worth_knowing(name: str) -> None:
    assert _SELDOM.search(name)
    assert not _SELDOM.search("model.layers.3.mlp.gate.weight")


def test_an_optimizer_that_is_reset_on_purpose(tmp_path: Path) -> None:
    path = _trained(tmp_path, anew=4, reset_optimizer_states=True)
    assert not told(path, "D150")
    assert [one.severity for one in look(path, "D150").findings] == ["info"]
