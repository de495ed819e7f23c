"""Masks of sequences that part them, advantages over padding, thinking outside of its block, numbers near a limit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from replay_core.recorder import Recorder
from tests.replay_core.diagnose.runs import GRPO, RESPONSE, Fields, batch, recorded, told


def _masked(step: int, fields: Fields, how: str) -> None:
    draw = torch.Generator().manual_seed(step)
    mask = fields["response_mask"]
    noise = 0.5 * torch.randn(mask.shape, generator=draw)
    fields["advantages"] = (fields["advantages"] + noise) * mask
    fields["returns"] = fields["advantages"].clone()
    rejected = torch.rand(len(mask), generator=draw) < 0.4
    by_sign = fields["advantages"] < 0
    if how == "whole":
        by_sign = torch.ones_like(by_sign)
    if how == "at random":
        by_sign = torch.rand(mask.shape, generator=draw) < 0.5
    name = "token_keep" if how == "another name" else "opsm_mask"
    fields[name] = torch.where(rejected[:, None] & by_sign, 0.0, 1.0) * mask


def test_a_mask_of_sequences_that_goes_by_tokens(tmp_path: Path) -> None:
    findings = told(recorded(tmp_path, lambda step, fields: _masked(step, fields, "")), "D157")
    assert "a mask of sequences keeps a part" in findings[0].claim


@pytest.mark.parametrize("how", ["whole", "at random", "another name"])
def test_masks_that_are_none_or_whole(how: str, tmp_path: Path) -> None:
    assert not told(recorded(tmp_path, lambda step, fields: _masked(step, fields, how)), "D157")


def _losses(path: Path, how: str) -> Path:
    def aligned(fields: Fields) -> dict[str, str]:
        return {
            name: "response" for name, value in fields.items()
            if isinstance(value, torch.Tensor) and value.shape[-1:] == (RESPONSE,)
        }  # fmt: skip

    flags = {**GRPO, "policy_loss.loss_mode": "gspo", "clip_ratio": 0.2}
    with Recorder(path, flags=flags) as recorder:
        for step in range(4):
            fields = batch(step)
            fields["log_probs"] = fields["old_log_probs"].clone()
            width = fields["response_mask"].sum(1, keepdim=True) if how == "counted" else RESPONSE
            whole = fields["advantages"].sum(1, keepdim=True) / width
            if how == "constant":
                whole = fields["advantages"][:, :1] * 0.7
            fields["token_loss"] = -whole * fields["response_mask"]
            with recorder.step(step) as record:
                record("forward_data", fields, micro=0, alignment=aligned(fields))
    return path


def test_an_advantage_that_is_averaged_over_padding(tmp_path: Path) -> None:
    assert "averaged over all 9 slots" in told(_losses(tmp_path, "padded"), "D50")[0].claim


@pytest.mark.parametrize("how", ["counted", "constant"])
def test_an_advantage_of_what_counts(how: str, tmp_path: Path) -> None:
    assert not any("slots" in one.claim for one in told(_losses(tmp_path, how), "D50"))


def _near(step: int, fields: Fields, how: str) -> None:
    draw = torch.Generator().manual_seed(step)
    mask = fields["response_mask"]
    place = torch.arange(RESPONSE).expand(len(mask), RESPONSE)
    length = mask.sum(1, keepdim=True)
    late = {"limit": place >= RESPONSE - 3, "ends": place >= length - 2, "all": place >= 0}[how]
    off = 0.001 * torch.randn(mask.shape, generator=draw) - late * (0.5 + torch.rand(mask.shape, generator=draw))
    fields["rollout_log_probs"] = (fields["old_log_probs"] + off) * mask


def test_numbers_near_the_limit(tmp_path: Path) -> None:
    (finding,) = told(recorded(tmp_path, lambda step, fields: _near(step, fields, "limit")), "D09")
    assert "all of it in the last 3 of the 9 tokens that a response may have" in finding.claim


@pytest.mark.parametrize("how", ["ends", "all"])
def test_what_is_not_near_the_limit(how: str, tmp_path: Path) -> None:
    found = told(recorded(tmp_path, lambda step, fields: _near(step, fields, how)), "D09")
    assert not any("that a response may have" in one.claim for one in found)


def _thought(step: int, fields: Fields, how: str) -> None:
    rows = len(fields["uid"])
    fields["prompt_text"] = ["what is 2 + 2?\nassistant\n" + ("<think>" if how == "opened" else "")] * rows
    texts = {
        "outside": "<think>\n\n</think>\n\nIt is {} ... so 4\n</think>\n\n4",
        "opened": "It is {} ... so 4\n</think>\n\n4",
        "off": "<think>\n\n</think>\n\nIt is 4, as {} says",
        "twice": "<think></think> {} <think> once more </think> 4",
    }
    fields["response_text"] = [texts[how].format(row) for row in range(rows)]


def test_thinking_behind_an_empty_block(tmp_path: Path) -> None:
    findings = told(recorded(tmp_path, lambda step, fields: _thought(step, fields, "outside")), "D158")
    assert "thinking stands outside of its block in 30 of 30" in findings[0].claim


@pytest.mark.parametrize("how", ["opened", "off", "twice"])
def test_thinking_in_its_block(how: str, tmp_path: Path) -> None:
    assert not told(recorded(tmp_path, lambda step, fields: _thought(step, fields, how)), "D158")
