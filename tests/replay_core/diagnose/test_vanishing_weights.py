"""Weights of responses that are products over their tokens; a first token without a number is no leaking pack."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.replay_core.diagnose.batches import look
from tests.replay_core.diagnose.runs import GRPO, Fields, recorded, told


def _weighed(step: int, fields: Fields, how: str) -> None:
    """Engine and trainer part by little on every token, and in one direction; responses are short here, so that the
    sum is what a long one's would be only where `how` says `many`.
    """
    draw = torch.Generator().manual_seed(step)
    mask = fields["response_mask"]
    drift = 0.0 if how == "balanced" else -0.029
    apart = drift + 0.0005 * torch.randn(mask.shape, generator=draw)
    fields["old_log_probs"] = fields["rollout_log_probs"] + apart * mask
    total = (apart * mask).sum(1, keepdim=True)
    if how == "mean":
        total = total / mask.sum(1, keepdim=True)
    weights = total.exp().clamp(max=2.0)
    fields["rollout_is_weights"] = (apart.exp() if how == "token" else weights) * mask


def _long(step: int, fields: Fields, how: str) -> None:
    """Rows of some hundred tokens: what is repeated along a row stands for a long answer."""
    wide = 12
    for name, value in list(fields.items()):
        if isinstance(value, torch.Tensor) and value.dim() == 2 and value.shape[1] == 9:
            fields[name] = value.repeat(1, wide)
    for name in ("token_level_scores", "token_level_rewards"):
        fields[name][:, 9:] = 0
    length = fields["response_mask"].sum(1)
    fields["response_mask"] = (torch.arange(9 * wide) < length[:, None]).long()
    draw = torch.Generator().manual_seed(step)
    fields["responses"] = torch.randint(5, 60, fields["response_mask"].shape, generator=draw) * fields["response_mask"]
    fields["rollout_log_probs"] = -torch.rand(fields["response_mask"].shape, generator=draw) * fields["response_mask"]
    fields["advantages"] = fields["advantages"][:, :1] * fields["response_mask"]
    fields["input_ids"] = torch.cat([fields["prompts"], fields["responses"]], 1)
    fields["attention_mask"] = torch.cat([fields["attention_mask"][:, :5], fields["response_mask"]], 1)
    fields["position_ids"] = (fields["attention_mask"].cumsum(1) - 1).clamp(min=0)
    _weighed(step, fields, how)


def test_products_that_vanish(tmp_path: Path) -> None:
    flags = {**GRPO, "rollout_correction.rollout_is": "sequence", "data.max_response_length": 108}
    (finding,) = told(recorded(tmp_path, lambda step, fields: _long(step, fields, "many"), flags=flags), "D156")
    assert "importance weights are products over a response's tokens and vanish" in finding.claim
    assert finding.severity == "warning"


@pytest.mark.parametrize("how", ["balanced", "mean", "token"])
def test_weights_near_1(how: str, tmp_path: Path) -> None:
    flags = {**GRPO, "rollout_correction.rollout_is": "sequence", "data.max_response_length": 108}
    assert not told(recorded(tmp_path, lambda step, fields: _long(step, fields, how), flags=flags), "D156")


def test_a_missing_first_number_is_no_leak(tmp_path: Path) -> None:
    def change(step: int, fields: Fields) -> None:
        for row in range(30):
            if row % 3:
                fields["rollout_log_probs"][row, 0] = 0.0
                fields["old_log_probs"][row, 0] = -0.9 - 0.01 * row

    findings = look(recorded(tmp_path, change)).findings
    assert findings[0].id == "D41"
    assert not [one for one in findings if one.id == "D16"]


def test_packs_that_leak_are_told_all_the_same(tmp_path: Path) -> None:
    def change(step: int, fields: Fields) -> None:
        draw = torch.Generator().manual_seed(step)
        for row in range(30):
            if row % 3:
                noise = 0.5 * torch.randn(9, generator=draw)
                fields["old_log_probs"][row] += noise * fields["response_mask"][row]

    assert [one for one in told(recorded(tmp_path, change), "D16") if "attention crosses samples" in one.claim]
