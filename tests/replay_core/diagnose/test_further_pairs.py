"""Losses of IPO, KTO, a reward model, and of DPO with a supervised term: as they are stated, and one thing wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from replay_core.diagnose.finding import Finding
from replay_core.recorder import Recorder
from tests.replay_core.diagnose.batches import look, of

HALF, BETA = 8, 0.1
DPO = {"beta": BETA, "loss_type": "sigmoid", "trainer": "DPOTrainer", "rpo_alpha": 0.2}
IPO = {"beta": BETA, "loss_type": "ipo", "trainer": "DPOTrainer"}
KTO = {"beta": BETA, "loss_type": "kto", "desirable_weight": 1.0, "undesirable_weight": 1.5}


def _pair_loss(how: str, logps: list[Tensor], length: Tensor, kl: Tensor, nll: Tensor) -> Tensor:
    chosen, rejected, ref_chosen, ref_rejected = logps
    better, worse = chosen - ref_chosen, rejected - ref_rejected
    margin = better - worse
    if how.startswith("ipo"):
        if how == "ipo by token":
            margin = better / length[:HALF] - worse / length[HALF:]
        if how == "ipo turned":
            margin = -margin
        if how == "ipo without reference":
            margin = chosen - rejected
        return ((margin - {"ipo of 1 / beta": 1 / BETA, "ipo of beta": BETA}.get(how, 1 / (2 * BETA))) ** 2).mean()
    if how.startswith("kto"):
        sign = -1 if how == "kto turned" else 1
        weights = {"kto swapped": (1.5, 1.0), "kto of 1": (1.0, 1.0)}.get(how, (1.0, 1.5))
        values = weights[0] * (1 - torch.sigmoid(sign * BETA * (better - kl)))
        return torch.cat([values, weights[1] * (1 - torch.sigmoid(sign * BETA * (kl - worse)))]).mean()
    weight = {"sft": 0.2, "sft turned": -0.2, "sft of 1": 1.0, "sft left out": 0.0}[how]
    return -logsigmoid(BETA * margin).mean() + weight * nll


def _pairs(folder: Path, how: str, flags: dict[str, Any], *, dtype: torch.dtype = torch.float32) -> Finding | None:
    with Recorder(folder, flags=flags) as recorder:
        for step in range(5):
            draw = torch.Generator().manual_seed(step)
            length = torch.randint(4, 12, (2 * HALF,), generator=draw)
            policy = (-length * (0.5 + torch.rand(2 * HALF, generator=draw))).to(dtype)
            ref = (policy + 0.7 * torch.randn(2 * HALF, generator=draw)).to(dtype)
            logps = [policy[:HALF], policy[HALF:], ref[:HALF], ref[HALF:]]
            kl, nll = 0.5 * torch.rand(1, generator=draw), -(policy[:HALF] / length[:HALF]).mean()
            held = {
                "policy_chosen_logps": logps[0], "policy_rejected_logps": logps[1], "reference_chosen_logps": logps[2],
                "reference_rejected_logps": logps[3], "loss": _pair_loss(how, logps, length, kl, nll),
                "response_mask": (torch.arange(12) < length[:, None]).long(),
            }  # fmt: skip
            held |= {"kl": kl} if how.startswith("kto") else {"nll_loss": nll} if how.startswith("sft") else {}
            with recorder.step(step) as record:
                record("loss", micro=0, **held)
    return of(look(folder, "D143"), "D143")


@pytest.mark.parametrize(
    ("how", "flags", "severity", "words"),
    [
        ("ipo of 1 / beta", IPO, "error", "a target of 1 / beta"),
        ("ipo of beta", IPO, "error", "a target of beta"),
        ("ipo turned", IPO, "error", "turned around"),
        ("ipo without reference", IPO, "error", "without the reference"),
        ("kto swapped", KTO, "error", "its two weights swapped"),
        ("kto of 1", KTO, "error", "without its weights"),
        ("kto turned", KTO, "error", "the sign of its values turned"),
        ("sft turned", DPO, "error", "wrong sign"),
        ("sft of 1", DPO, "error", "weighs 1 in the loss"),
        ("sft left out", DPO, "warning", "is not in the loss"),
    ],
)
def test_a_mistake_in_the_loss_of_pairs_is_named(
    how: str, flags: dict[str, Any], severity: str, words: str, tmp_path: Path
) -> None:
    found = _pairs(tmp_path / "d", how, flags)
    assert found is not None
    assert found.severity == severity
    assert words in found.claim


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("how", "flags"),
    [("ipo", IPO), ("ipo by token", IPO), ("kto", KTO), ("sft", DPO), ("sft of 1", {**DPO, "rpo_alpha": None}),
     ("sft left out", {**DPO, "rpo_alpha": 0.0}), ("ipo", {**IPO, "loss_type": "robust"}),
     ("kto of 1", {**KTO, "undesirable_weight": 1.0})],
)  # fmt: skip
def test_losses_as_they_are_stated_are_nothing(
    how: str, flags: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    assert _pairs(tmp_path / "d", how, flags, dtype=dtype) is None


def _scored(folder: Path, how: str, *, margin: bool = False, flags: dict[str, Any] | None = None) -> Finding | None:
    with Recorder(folder, flags=flags or {}) as recorder:
        for step in range(5):
            draw = torch.Generator().manual_seed(step)
            chosen, rejected = 0.3 + torch.randn(HALF, generator=draw), torch.randn(HALF, generator=draw)
            apart, wanted = chosen - rejected, torch.rand(HALF, generator=draw)
            loss = {
                "turned": -logsigmoid(-apart).mean(), "of the mean": -logsigmoid(apart.mean()),
                "no logarithm": -torch.sigmoid(apart).mean(), "by margin": -logsigmoid(apart - wanted).mean(),
                "centred": -logsigmoid(apart).mean() + 0.1 * ((chosen + rejected) ** 2).mean(),
            }.get(how, -logsigmoid(apart).mean())  # fmt: skip
            with recorder.step(step) as record:
                held = {"chosen_rewards": chosen, "rejected_rewards": rejected, "loss": loss}
                record("loss", micro=0, **held, **({"margin": wanted} if margin else {}))
    return of(look(folder, "D143"), "D143")


@pytest.mark.parametrize(
    ("how", "words"),
    [("turned", "turned around"), ("of the mean", "the mean margin"), ("no logarithm", "without the logarithm")],
)
def test_a_mistake_in_a_reward_models_loss_is_named(how: str, words: str, tmp_path: Path) -> None:
    found = _scored(tmp_path / "d", how)
    assert found is not None
    assert words in found.claim


def test_a_reward_models_loss_that_is_right_or_unknown_is_nothing(tmp_path: Path) -> None:
    assert _scored(tmp_path / "right", "") is None
    assert _scored(tmp_path / "margin", "by margin", margin=True) is None
    assert _scored(tmp_path / "unknown", "by margin") is None
    assert _scored(tmp_path / "centred", "centred", flags={"center_rewards_coefficient": 0.1}) is None
