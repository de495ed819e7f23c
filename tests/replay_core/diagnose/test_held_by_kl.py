"""A KL that is in the loss and in no gradient: steps without an advantage tell."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.replay_core.diagnose.logs import diagnosed, trl
from tests.replay_core.diagnose.runs import GRPO, Fields, recorded, told

IN_LOSS = {**GRPO, "actor.use_kl_loss": True, "actor.kl_loss_coef": 0.01}


def _stepped(step: int, fields: Fields, *, held: bool, apart: float = 0.1) -> None:
    """Every other step has no advantage; its gradient is what the KL makes."""
    draw = torch.Generator().manual_seed(step)
    mask = fields["response_mask"]
    dead = step % 2 == 1
    fields["ref_log_prob"] = fields["old_log_probs"] + apart * torch.randn(mask.shape, generator=draw) * mask
    if dead:
        for name in ("advantages", "returns", "token_level_scores", "token_level_rewards"):
            fields[name] = torch.zeros_like(fields[name])
    fields["grad_norm"] = torch.tensor(0.003 if dead and held else 0.0 if dead else 0.4)


def test_steps_without_an_advantage_have_no_gradient(tmp_path: Path) -> None:
    path = recorded(tmp_path, lambda step, fields: _stepped(step, fields, held=False), flags=IN_LOSS)
    (finding,) = told(path, "D159")
    assert "the KL is in the loss and holds nothing" in finding.claim
    assert finding.steps == (1, 3)


@pytest.mark.parametrize(
    ("held", "apart", "flags"),
    [(True, 0.1, IN_LOSS), (False, 0.0, IN_LOSS), (False, 0.1, {**IN_LOSS, "actor.use_kl_loss": False}),
     (False, 0.1, GRPO)],
)  # fmt: skip
def test_a_kl_that_holds_or_is_none(held: bool, apart: float, flags: dict[str, object], tmp_path: Path) -> None:
    path = recorded(tmp_path, lambda step, fields: _stepped(step, fields, held=held, apart=apart), flags=flags)
    assert not told(path, "D159")


def _logged(folder: Path, grad: float, kl: float, head: str = "beta: 0.04\n") -> list[str]:
    dead = {"reward_std": 0.0, "frac_reward_zero_std": 1.0, "grad_norm": grad, "kl": kl, "loss": 0.04 * kl}
    alive = {"kl": kl, "loss": 0.02}
    text = head + trl([dead if step % 3 == 2 else alive for step in range(15)])
    return [one.claim for one in diagnosed(folder, text).findings if one.id == "D159"]


def test_a_log_of_one(tmp_path: Path) -> None:
    (claim,) = _logged(tmp_path, 0.0, 0.3)
    assert "in 5 steps whose rewards do not differ" in claim


@pytest.mark.parametrize(
    ("grad", "kl", "head"), [(0.002, 0.3, "beta: 0.04\n"), (0.0, 1e-5, "beta: 0.04\n"), (0.0, 0.3, "beta: 0.0\n")]
)
def test_logs_of_none(grad: float, kl: float, head: str, tmp_path: Path) -> None:
    assert not _logged(tmp_path, grad, kl, head)
