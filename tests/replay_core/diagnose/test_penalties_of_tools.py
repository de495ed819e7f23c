"""REINFORCE++'s returns of scores less a KL, with tool output in the responses: masked, and left in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from replay_core.diagnose.finding import Finding
from tests.replay_core.diagnose.runs import RESPONSE, Fields, recorded, told

FLAGS = {
    "algorithm.adv_estimator": "reinforce_plus_plus", "algorithm.use_kl_in_reward": True,
    "algorithm.kl_ctrl.kl_coef": 0.1, "algorithm.kl_penalty": "kl", "data.max_response_length": RESPONSE,
}  # fmt: skip


def _told(folder: Path, how: str, **more: Any) -> list[Finding]:
    def change(step: int, fields: Fields) -> None:
        draw = torch.Generator().manual_seed(step)
        whole = fields["response_mask"].clone()
        mask = whole.clone()
        mask[whole.sum(1) > 4, 1:3] = 0
        fields["response_mask"] = mask
        fields["ref_log_prob"] = fields["old_log_probs"] + 0.3 * torch.randn(30, RESPONSE, generator=draw) * whole
        kl = fields["old_log_probs"] - fields["ref_log_prob"]
        rewards = fields["token_level_scores"] - 0.1 * kl * (mask if how == "masked" else whole)
        if how == "paid by the environment":
            paid = 0.3 * (whole[:, 2] - mask[:, 2])
            fields["token_level_scores"][:, 2] += paid
            rewards = fields["token_level_scores"] - 0.1 * kl * mask
        fields["token_level_rewards"] = rewards
        added = rewards * (mask if how == "masked where it is added" else 1)
        returns = added.flip(1).cumsum(1).flip(1) * mask
        counted = mask > 0
        fields["returns"] = returns
        fields["advantages"] = (returns - returns[counted].mean()) / (returns[counted].std() + 1e-8) * mask
        if more.get("scores") is False:
            del fields["token_level_scores"]
        if more.get("returns") is False:
            del fields["returns"]

    return told(recorded(folder, change, flags=FLAGS), "D53")


@pytest.mark.parametrize("more", [{}, {"scores": False}, {"returns": False}], ids=str)
def test_a_penalty_of_tool_output_in_the_returns_is_told(more: dict[str, bool], tmp_path: Path) -> None:
    (found,) = _told(tmp_path / "d", "left in", **more)
    assert found.severity == "error"
    assert "returns hold rewards of tokens that do not count" in found.claim


@pytest.mark.parametrize("how", ["masked", "masked where it is added", "paid by the environment"])
@pytest.mark.parametrize("more", [{}, {"scores": False}], ids=str)
def test_what_is_masked_or_meant_is_nothing(how: str, more: dict[str, bool], tmp_path: Path) -> None:
    assert [one for one in _told(tmp_path / "d", how, **more) if "returns hold" in one.claim] == []
