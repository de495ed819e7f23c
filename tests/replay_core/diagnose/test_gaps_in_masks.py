"""Responses with tool output inside: advantages at other places, GAE over it, rewards on tokens taken out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.replay_core.diagnose.batches import look, of
from tests.replay_core.diagnose.runs import GRPO, RESPONSE, Fields, recorded, scores_of, told


def _one_of(fields: Fields) -> torch.Tensor:
    """Each response's one advantage."""
    made: torch.Tensor = fields["advantages"].sum(1) / (fields["advantages"] != 0).sum(1).clamp(min=1)
    return made


def _set_advantages(fields: Fields, advantages: torch.Tensor) -> None:
    fields["advantages"], fields["returns"] = advantages, advantages.clone()


def _tools(step: int, fields: Fields, share: float = 0.7) -> torch.Tensor:
    """Two tokens of longer responses are a tool's; the mask before that."""
    draw = torch.Generator().manual_seed(step)
    mask, whole = fields["response_mask"], fields["response_mask"].clone()
    called = (mask.sum(1) >= 6) & (torch.rand(len(mask), generator=draw) < share)
    mask[called, 2:4] = 0
    fields["rollout_log_probs"] = fields["rollout_log_probs"] * mask
    return whole


def _turns(step: int, fields: Fields, masks: torch.Tensor) -> None:
    """Rows of three turns, whose responses begin with an observation of their own length."""
    one = _one_of(fields)
    ends = torch.stack([row.nonzero()[-1, 0] for row in masks])
    attended = torch.arange(RESPONSE) <= ends[:, None]
    draw = torch.Generator().manual_seed(step)
    fields["responses"] = torch.randint(5, 60, masks.shape, generator=draw) * attended
    fields["responses"][torch.arange(len(ends)), ends] = 2
    scores = torch.zeros(masks.shape)
    scores[torch.arange(len(ends)), ends] = scores_of(fields)
    fields["token_level_scores"], fields["token_level_rewards"] = scores, scores.clone()
    width = fields["prompts"].shape[1]
    fields["attention_mask"] = torch.cat([fields["attention_mask"][:, :width], attended.long()], 1)
    fields["input_ids"] = torch.cat([fields["prompts"], fields["responses"]], 1)
    fields["position_ids"] = (fields["attention_mask"].cumsum(1) - 1).clamp(min=0)
    fields["response_mask"] = masks
    logps = -torch.rand(masks.shape, generator=draw)
    fields["rollout_log_probs"], fields["old_log_probs"] = logps * masks, logps * attended
    fields["traj_uid"] = [f"{step}-{row // 3}" for row in range(30)]
    fields["uid"] = [f"{step}-{row // 6}" for row in range(30)]
    _set_advantages(fields, one[:, None] * masks)


def _masks(step: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(100 + step)
    masks = torch.zeros(30, RESPONSE, dtype=torch.long)
    for row in range(30):
        begin = int(torch.randint(0, 4, (1,), generator=draw))
        masks[row, begin : begin + int(torch.randint(2, 5, (1,), generator=draw))] = 1
    return masks


def _of_the_last_turn(step: int, fields: Fields) -> None:
    masks = _masks(step)
    _turns(step, fields, masks)
    last = torch.tensor([row // 3 * 3 + 2 for row in range(30)])
    one = torch.linspace(-1, 1, 30)
    _set_advantages(fields, one[:, None] * masks[last])


def test_the_last_turns_masked_advantage_in_earlier_rows(tmp_path: Path) -> None:
    (found,) = told(recorded(tmp_path / "run", _of_the_last_turn), "D78")
    assert found.severity == "error"
    assert found.claim.startswith("advantages stand at the places of the last turn")
    assert "tokens that do not count" in found.claim


def test_another_rows_mask_without_ids(tmp_path: Path) -> None:
    def change(step: int, fields: Fields) -> None:
        _of_the_last_turn(step, fields)
        del fields["traj_uid"]

    (found,) = told(recorded(tmp_path / "run", change), "D78")
    assert found.claim.startswith("advantages stand at other places than the mask")


def _own_masks(step: int, fields: Fields) -> None:
    _turns(step, fields, _masks(step))


def _everywhere(step: int, fields: Fields) -> None:
    """The one number stands on every token of the response, tool output too: the loss masks it."""
    _turns(step, fields, _masks(step))
    attended = fields["attention_mask"][:, -RESPONSE:]
    _set_advantages(fields, torch.linspace(-1, 1, 30)[:, None] * attended)


def _rejected_after(step: int, fields: Fields) -> None:
    """Tokens that rejection takes out after advantages were made keep theirs; all that count have one."""
    mask = fields["response_mask"]
    one = _one_of(fields)
    _set_advantages(fields, one[:, None] * mask)
    mask[::3, 1] = 0


@pytest.mark.parametrize("change", [_own_masks, _everywhere, _rejected_after])
def test_advantages_on_all_that_counts_are_quiet(tmp_path: Path, change: Callable[[int, Fields], None]) -> None:
    assert told(recorded(tmp_path / "run", change), "D78") == []


GAE = {"algorithm.adv_estimator": "gae", "algorithm.gamma": 0.95, "algorithm.lam": 0.9, "data.max_response_length": 9}


def _gae(step: int, fields: Fields, *, over_all: bool, masked: bool = True) -> None:
    whole = _tools(step, fields)
    mask, rewards = fields["response_mask"], fields["token_level_rewards"]
    values = torch.randn(mask.shape, generator=torch.Generator().manual_seed(50 + step)) * 0.3 * whole
    made = torch.zeros(mask.shape)
    for row, steps in enumerate(whole if over_all else mask):
        after, value = 0.0, 0.0
        for at in reversed(steps.nonzero().flatten().tolist()):
            after = float(rewards[row, at] + 0.95 * value - values[row, at]) + 0.95 * 0.9 * after
            value = float(values[row, at])
            made[row, at] = after
    fields["values"], fields["returns"] = values, (made + values) * (mask if masked else whole)
    inside = made[mask > 0]
    fields["advantages"] = (made - inside.mean()) / inside.std() * mask


@pytest.mark.parametrize("masked", [True, False])
def test_gae_over_tool_output_is_told_where_returns_are_masked_too(tmp_path: Path, masked: bool) -> None:
    path = recorded(tmp_path / "run", lambda step, fields: _gae(step, fields, over_all=True, masked=masked), flags=GAE)
    (found,) = told(path, "D44")
    assert found.severity == "error"
    assert found.claim.startswith("GAE runs over tokens that the policy did not sample")
    assert any("gamma 0.95, lambda 0.9" in str(each.value) for each in found.evidence)


def _gae_over_counted(step: int, fields: Fields) -> None:
    _gae(step, fields, over_all=False)


def _gae_plain(step: int, fields: Fields) -> None:
    mask, rewards = fields["response_mask"], fields["token_level_rewards"]
    values = torch.randn(mask.shape, generator=torch.Generator().manual_seed(50 + step)) * 0.3 * mask
    made, after, value = torch.zeros(mask.shape), torch.zeros(len(mask)), torch.zeros(len(mask))
    for at in reversed(range(RESPONSE)):
        inside = mask[:, at] > 0
        delta = rewards[:, at] + 0.95 * value - values[:, at]
        after = torch.where(inside, delta + 0.95 * 0.9 * after, after)
        value = torch.where(inside, values[:, at], value)
        made[:, at] = after * inside
    fields["values"], fields["returns"], fields["advantages"] = values, made + values, made


@pytest.mark.parametrize("change", [_gae_over_counted, _gae_plain])
def test_gae_over_the_tokens_that_count_is_right(tmp_path: Path, change: Callable[[int, Fields], None]) -> None:
    assert told(recorded(tmp_path / "run", change, flags=GAE), "D44") == []


def _last_token_out(step: int, fields: Fields) -> None:
    mask, one = fields["response_mask"], _one_of(fields)
    for row in (1, 7, 14, 20):
        mask[row, int(mask[row].sum()) - 1] = 0
    _set_advantages(fields, one[:, None] * mask)


def test_the_reward_of_a_rejected_token_is_paid(tmp_path: Path) -> None:
    flags = {**GRPO, "algorithm.rollout_correction.rollout_rs": "token_k1"}
    (found,) = told(recorded(tmp_path / "run", _last_token_out, flags=flags), "D53")
    assert found.severity == "warning"
    assert "lies on a sampled token that was taken out of the loss" in found.claim


def test_it_is_worth_knowing_where_no_rejection_is_stated(tmp_path: Path) -> None:
    found = of(look(recorded(tmp_path / "run", _last_token_out), "D53"), "D53")
    assert found is not None
    assert found.severity == "info"


def _whole_responses_out(step: int, fields: Fields) -> None:
    mask, one = fields["response_mask"], _one_of(fields)
    mask[[1, 7, 14, 20]] = 0
    _set_advantages(fields, one[:, None] * mask)


def _ends_never_count(step: int, fields: Fields) -> None:
    """The last token of every response is left out: how masks end (D19), and no rejection."""
    mask, one = fields["response_mask"], _one_of(fields)
    mask[torch.arange(30), mask.sum(1) - 1] = 0
    _set_advantages(fields, one[:, None] * mask)


def _inner_token_out(step: int, fields: Fields) -> None:
    mask, one = fields["response_mask"], _one_of(fields)
    mask[[1, 7, 14, 20], 1] = 0
    _set_advantages(fields, one[:, None] * mask)


@pytest.mark.parametrize("change", [_whole_responses_out, _ends_never_count, _inner_token_out])
def test_other_tokens_out_say_nothing_of_rewards(tmp_path: Path, change: Callable[[int, Fields], None]) -> None:
    flags = {**GRPO, "algorithm.rollout_correction.rollout_rs": "token_k1"}
    assert told(recorded(tmp_path / "run", change, flags=flags), "D53") == []


def _signed(step: int, fields: Fields, *, by_token: bool) -> None:
    """Off-policy masking of sequences, over advantages that differ from token to token."""
    draw = torch.Generator().manual_seed(step)
    mask = fields["response_mask"]
    advantages = (fields["advantages"] + 0.5 * torch.randn(mask.shape, generator=draw)) * mask
    _set_advantages(fields, advantages)
    rejected = torch.rand(30, generator=draw) < 0.4
    bad = advantages < 0 if by_token else (advantages.sum(1, keepdim=True) < 0).expand(mask.shape)
    fields["opsm_mask"] = torch.where(rejected[:, None] & bad, 0.0, 1.0) * mask


def test_a_mask_of_sequences_by_the_sign_of_tokens(tmp_path: Path) -> None:
    path = recorded(tmp_path / "run", lambda step, fields: _signed(step, fields, by_token=True))
    (found, *_) = told(path, "D157")
    assert "a mask of sequences keeps a part of" in found.claim


def _whole_sequences(step: int, fields: Fields) -> None:
    _signed(step, fields, by_token=False)


def _by_ratio(step: int, fields: Fields) -> None:
    """A mask of tokens by how far each is off, whatever its advantage."""
    _signed(step, fields, by_token=False)
    draw = torch.Generator().manual_seed(70 + step)
    kept = torch.rand(fields["response_mask"].shape, generator=draw) < 0.8
    fields["opsm_mask"] = kept.float() * fields["response_mask"]


@pytest.mark.parametrize("change", [_whole_sequences, _by_ratio])
def test_other_masks_of_sequences_are_quiet(tmp_path: Path, change: Callable[[int, Fields], None]) -> None:
    assert told(recorded(tmp_path / "run", change), "D157") == []
