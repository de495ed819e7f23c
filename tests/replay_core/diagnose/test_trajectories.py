"""Rows for each turn of a trajectory: whose baseline they are measured against, and which rows are of one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.replay_core.diagnose.batches import look, of
from tests.replay_core.diagnose.runs import GRPO, Fields, recorded, told

ROWS: dict[str, Any] = {"groups": 15, "size": 2}
#: Turns of each trajectory of a group, three groups of ten rows each.
TURNS = (1, 4, 2, 3)
PER_ROW = "long trajectories weigh as they have turns in their group's baseline"


def _normalised(values: list[float], whole: list[float]) -> torch.Tensor:
    every = torch.tensor(whole)
    return (torch.tensor(values) - every.mean()) / (every.std() + 1e-6)


def _turns(step: int, fields: Fields, *, once: bool, turns: tuple[int, ...] = TURNS) -> list[int]:
    """Three prompts of several trajectories, each with a row for every turn; all its rows have its reward."""
    draw = torch.Generator().manual_seed(step)
    rows_of, uid, mask = [], [], fields["response_mask"]
    scores, advantages = torch.zeros(30), torch.zeros(30)
    for prompt in range(3):
        rewards = torch.rand(len(turns), generator=draw).tolist()
        own = [at for at, count in enumerate(turns) for _ in range(count)]
        each = [rewards[at] for at in own]
        here = slice(10 * prompt, 10 * prompt + 10)
        scores[here] = torch.tensor(each)
        advantages[here] = _normalised(each, rewards if once else each)
        rows_of += [len(turns) * prompt + at for at in own]
        uid += [f"{step}-{prompt}"] * 10
    last = mask.sum(1) - 1
    token_scores = torch.zeros_like(fields["token_level_scores"])
    token_scores[torch.arange(30), last] = scores
    fields["uid"] = uid
    fields["token_level_scores"], fields["token_level_rewards"] = token_scores, token_scores.clone()
    fields["advantages"] = advantages[:, None] * mask
    fields["returns"] = fields["advantages"].clone()
    return rows_of


def _named(step: int, fields: Fields, *, once: bool, name: str = "traj_uid") -> None:
    fields[name] = [f"{step}-{each}" for each in _turns(step, fields, once=once)]


def _by_last_rows(step: int, fields: Fields, *, once: bool) -> None:
    rows_of = [*_turns(step, fields, once=once), -1]
    fields["is_last_step"] = torch.tensor([rows_of[row] != rows_of[row + 1] for row in range(30)])


def test_a_baseline_over_rows_is_told_where_trajectories_are_named(tmp_path: Path) -> None:
    (found,) = told(recorded(tmp_path / "run", lambda step, fields: _named(step, fields, once=False), **ROWS), "D04")
    assert found.severity == "warning"
    assert found.claim.startswith(PER_ROW)
    assert "over rows (30), not over trajectories (12)" in found.claim
    assert len(found.steps) >= 3


def test_last_rows_name_trajectories_too(tmp_path: Path) -> None:
    (found,) = told(
        recorded(tmp_path / "run", lambda step, fields: _by_last_rows(step, fields, once=False), **ROWS), "D04"
    )
    assert found.claim.startswith(PER_ROW)


@pytest.mark.parametrize("name", ["traj_uid", "trajectory_ids", "rollout_id", "is_last_step"])
def test_a_baseline_over_trajectories_is_right(tmp_path: Path, name: str) -> None:
    def change(step: int, fields: Fields) -> None:
        if name == "is_last_step":
            _by_last_rows(step, fields, once=True)
        else:
            _named(step, fields, once=True, name=name)

    found = of(look(recorded(tmp_path / "run", change, **ROWS), "D04"), "D04")
    assert found is not None
    assert found.severity == "info"
    assert "each counted once" in found.claim


def _even(step: int, fields: Fields) -> None:
    """Each trajectory has two turns: rows and trajectories have one mean."""
    rows_of = _turns(step, fields, once=False, turns=(2, 2, 2, 2, 2))
    fields["traj_uid"] = [f"{step}-{each}" for each in rows_of]


def _of_steps(step: int, fields: Fields) -> None:
    """Ids of the whole step (slime's rollout) are no trajectories."""
    _turns(step, fields, once=False)
    fields["rollout_id"] = torch.full((30,), step)


def _paid_by_turn(step: int, fields: Fields) -> None:
    """Every turn has a reward of its own, and is measured against all turns of its prompt."""
    _named(step, fields, once=False)
    mask, draw = fields["response_mask"], torch.Generator().manual_seed(step)
    each = torch.rand(30, generator=draw)
    fields["token_level_scores"][torch.arange(30), mask.sum(1) - 1] = each
    fields["token_level_rewards"] = fields["token_level_scores"].clone()
    parts = [_normalised(part.tolist(), part.tolist()) for part in each.split(10)]
    fields["advantages"] = torch.cat(parts)[:, None] * mask
    fields["returns"] = fields["advantages"].clone()


@pytest.mark.parametrize("change", [_even, _of_steps, _paid_by_turn])
def test_rows_that_count_alike_are_quiet(tmp_path: Path, change: Callable[[int, Fields], None]) -> None:
    assert told(recorded(tmp_path / "run", change, **ROWS), "D04") == []


def test_a_baseline_across_steps_that_is_stated_is_meant(tmp_path: Path) -> None:
    flags = {**GRPO, "algorithm.gigpo.compute_mean_std_cross_steps": True}
    path = recorded(tmp_path / "run", lambda step, fields: _named(step, fields, once=False), flags=flags, **ROWS)
    assert told(path, "D04") == []


def _growing(step: int, fields: Fields, *, once: bool) -> None:
    """No ids: the prompt of each turn is all of the turn before, and one token of the environment."""
    rows_of = _turns(step, fields, once=once)
    draw = torch.Generator().manual_seed(step)
    prompts: list[list[int]] = []
    responses: list[list[int]] = []
    for row, trajectory in enumerate(rows_of):
        if row and rows_of[row - 1] == trajectory:
            prompts.append([*prompts[-1], *responses[-1], 61])
        else:
            prompts.append([7, 8, 9, 10 + trajectory // len(TURNS)])
        responses.append([*torch.randint(5, 60, (2,), generator=draw).tolist(), 2])
    width = max(map(len, prompts))
    fields["prompts"] = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    fields["responses"] = torch.zeros_like(fields["responses"])
    fields["responses"][:, :3] = torch.tensor(responses)
    mask = torch.zeros_like(fields["response_mask"])
    mask[:, :3] = 1
    one = fields["advantages"].sum(1) / fields["response_mask"].sum(1)
    scores = fields["token_level_scores"].sum(1)
    fields["response_mask"] = mask
    fields["token_level_scores"] = torch.zeros_like(fields["token_level_scores"])
    fields["token_level_scores"][:, 2] = scores
    fields["token_level_rewards"] = fields["token_level_scores"].clone()
    fields["advantages"] = one[:, None] * mask
    fields["returns"] = fields["advantages"].clone()
    logps = -torch.rand(mask.shape, generator=draw) * mask
    fields["rollout_log_probs"], fields["old_log_probs"] = logps, logps.clone()
    fields["input_ids"] = torch.cat([fields["prompts"], fields["responses"]], 1)
    fields["attention_mask"] = torch.cat([(fields["prompts"] != 0).long(), mask], 1)
    fields["position_ids"] = (fields["attention_mask"].cumsum(1) - 1).clamp(min=0)


def test_prompts_that_go_on_tell_trajectories_without_ids(tmp_path: Path) -> None:
    (found,) = told(recorded(tmp_path / "run", lambda step, fields: _growing(step, fields, once=False), **ROWS), "D04")
    assert found.claim.startswith(PER_ROW)
    assert "trajectories (12)" in found.claim


def test_prompts_that_go_on_and_count_once_are_right(tmp_path: Path) -> None:
    path = recorded(tmp_path / "run", lambda step, fields: _growing(step, fields, once=True), **ROWS)
    assert told(path, "D04", "D42") == []
