"""Groups that lost rows, or have one alone: baselines cut by a fixed stride, and responses that are their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.replay_core.diagnose.runs import GRPO, Fields, recorded, scores_of, told

REINFORCE = {"algorithm.adv_estimator": "reinforce_plus_plus_baseline", "data.max_response_length": 9}


def _without(fields: Fields, rows: list[int]) -> None:
    """The batch as it is when these rows failed, or were filtered out."""
    kept = [row for row in range(len(fields["uid"])) if row not in rows]
    for name, value in fields.items():
        fields[name] = [value[row] for row in kept] if isinstance(value, list) else value[kept]


def _advantages(fields: Fields, groups: list[str], how: str = "grpo") -> None:
    scores, made = scores_of(fields), torch.zeros(len(groups))
    for group in set(groups):
        rows = [row for row, each in enumerate(groups) if each == group]
        own = scores[rows]
        if how == "rloo":
            made[rows] = own - (own.sum() - own) / max(len(rows) - 1, 1) if len(rows) > 1 else 0.0
        elif len(rows) > 1:
            made[rows] = (own - own.mean()) / (own.std() + 1e-6)
    fields["advantages"] = made[:, None] * fields["response_mask"]
    fields["returns"] = fields["advantages"].clone()


def _by_stride(step: int, fields: Fields) -> None:
    _without(fields, [1 + step, 12, 13])
    _advantages(fields, [str(row // 5) for row in range(len(fields["uid"]))])


def _by_stated_stride(step: int, fields: Fields) -> None:
    """No group is whole: its size is the run's own word."""
    _without(fields, [step, 6, 12, 18, 24, 29])
    _advantages(fields, [str(row // 5) for row in range(len(fields["uid"]))])


@pytest.mark.parametrize("change", [_by_stride, _by_stated_stride])
def test_blocks_of_the_stated_size_are_not_the_groups(tmp_path: Path, change: Callable[[int, Fields], None]) -> None:
    path = recorded(tmp_path / "run", change, flags={**GRPO, "actor_rollout_ref.rollout.n": 5, "rollout_n": 5})
    (found,) = told(path, "D04")
    assert found.severity == "error"
    assert found.claim.startswith("advantages are made in blocks of 5 rows, which are not the groups")


def _by_id(step: int, fields: Fields) -> None:
    _without(fields, [1 + step, 12, 13])
    _advantages(fields, fields["uid"])


def _by_id_of_others(step: int, fields: Fields) -> None:
    _without(fields, [1 + step, 12, 13])
    _advantages(fields, fields["uid"], "rloo")


def _whole_groups_are_gone(step: int, fields: Fields) -> None:
    """Dynamic sampling drops groups, not rows: blocks are groups."""
    _without(fields, list(range(5 * step, 5 * step + 5)))
    _advantages(fields, [str(row // 5) for row in range(len(fields["uid"]))])


@pytest.mark.parametrize("change", [_by_id, _by_id_of_others, _whole_groups_are_gone])
def test_incomplete_groups_by_their_id_are_right(tmp_path: Path, change: Callable[[int, Fields], None]) -> None:
    flags = {"rollout_n": 5, "data.max_response_length": 9}
    assert told(recorded(tmp_path / "run", change, flags=flags), "D04") == []


def _alone(step: int, fields: Fields) -> None:
    """One response each (of prompts that differ), less its own reward."""
    fields["uid"] = [f"{step}-{row}" for row in range(len(fields["uid"]))]
    fields["advantages"] = torch.zeros_like(fields["advantages"])
    fields["returns"] = fields["advantages"].clone()


@pytest.mark.parametrize("flags", [REINFORCE, GRPO])
def test_a_response_alone_is_its_own_baseline(tmp_path: Path, flags: dict[str, object]) -> None:
    (found,) = told(recorded(tmp_path / "run", _alone, flags=flags), "D05")
    assert found.severity == "error"
    assert found.claim.startswith("every advantage is 0 though rewards differ: each of 30 responses is alone")


def test_some_alone_have_no_advantage(tmp_path: Path) -> None:
    def change(step: int, fields: Fields) -> None:
        _without(fields, [0, 1, 2, 3, 5, 6, 7, 8])
        _advantages(fields, fields["uid"], "rloo")

    (found,) = told(recorded(tmp_path / "run", change, flags={"algorithm.adv_estimator": "rloo"}), "D05")
    assert found.severity == "warning"
    assert "whose advantage is 0 whatever its reward" in found.claim


def _whitened(step: int, fields: Fields) -> None:
    """REINFORCE++: one response to a prompt, measured against the batch."""
    mask, scores = fields["response_mask"], scores_of(fields)
    fields["uid"] = [f"{step}-{row}" for row in range(len(scores))]
    each = (scores - scores.mean()) / (scores.std() + 1e-6)
    fields["advantages"] = each[:, None] * mask
    fields["returns"] = fields["advantages"].clone()


def _all_alike(step: int, fields: Fields) -> None:
    """One response each, and all of them earn nothing: 0 is right."""
    _alone(step, fields)
    for name in ("token_level_scores", "token_level_rewards"):
        fields[name] = torch.zeros_like(fields[name])


@pytest.mark.parametrize("change", [_whitened, _all_alike])
def test_responses_alone_beside_another_baseline_are_no_error(
    tmp_path: Path, change: Callable[[int, Fields], None]
) -> None:
    found = told(recorded(tmp_path / "run", change, flags={"algorithm.adv_estimator": "reinforce++"}), "D05")
    assert found == []
