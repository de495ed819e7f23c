"""Recipes' advantages that rewards and groups alone do not name: MaxRL, a second whitening, functions one by one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.replay_core.diagnose.batches import look, of
from tests.replay_core.diagnose.runs import GRPO, RESPONSE, Change, Fields, recorded, scores_of, told

Group = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
LIMIT = {"data.max_response_length": RESPONSE}


def _groups(fields: Fields) -> Group:
    """Rewards of the groups, and their means and stds."""
    scores = scores_of(fields).view(6, 5)
    return scores, scores.mean(1, keepdim=True), scores.std(1, keepdim=True)


def _given(fields: Fields, advantages: torch.Tensor) -> None:
    spread = advantages.reshape(30, -1) * fields["response_mask"]
    fields["advantages"], fields["returns"] = spread, spread.clone()


def _made(of_groups: Callable[[Group], torch.Tensor]) -> Change:
    return lambda step, fields: _given(fields, of_groups(_groups(fields)))


def _whitened_again(step: int, fields: Fields) -> None:
    scores, mean, std = _groups(fields)
    counted = fields["response_mask"] > 0
    own = ((scores - mean) / (std + 1e-6)).view(-1, 1) * fields["response_mask"]
    _given(fields, (own - own[counted].mean()) / (own[counted].std() + 1e-5))


def _by_function(weights: tuple[float, float], *, weighed: bool = True, over_batch: bool = True) -> Change:
    def change(step: int, fields: Fields) -> None:
        draw = torch.Generator().manual_seed(step)
        right, form = scores_of(fields), torch.randint(0, 2, (30,), generator=draw).float()
        form[::5], form[1::5] = 1, 0

        def own(values: torch.Tensor) -> torch.Tensor:
            each = values.view(6, 5)
            return ((each - each.mean(1, keepdim=True)) / (each.std(1, keepdim=True) + 1e-4)).view(-1)

        last = fields["response_mask"].sum(1) - 1
        for name in ("token_level_scores", "token_level_rewards"):
            fields[name] = torch.zeros(30, RESPONSE)
            fields[name][torch.arange(30), last] = weights[0] * right + weights[1] * form
        fields["rewards_per_func.right"], fields["rewards_per_func.form"] = right, form
        by = weights if weighed else (1.0, 1.0)
        summed = by[0] * own(right) + by[1] * own(form)
        _given(fields, (summed - summed.mean()) / (summed.std() + 1e-4) if over_batch else summed)

    return change


AREAL = {"adv_norm": {"mean_level": "batch", "std_level": "batch"}, "reward_norm": {"std_level": "group"}, **LIMIT}


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("change", "flags", "words"),
    [
        (_made(lambda g: (g[0] - g[1]) / (g[1] + 1e-6)), {"adv_estimator": "maxrl", **LIMIT}, "MaxRL"),
        (_whitened_again, AREAL, "whitened"),
        (_by_function((1.0, 0.5)), {"reward_weights": [1.0, 0.5], "scale_rewards": "gdpo"}, "GDPO"),
        (_by_function((1.0, 1.0), over_batch=False), {}, "GDPO"),
    ],
)  # fmt: skip
def test_recipes_are_named_and_nothing_is_wrong(
    change: Change, flags: dict[str, Any], words: str, stored: torch.dtype, tmp_path: Path
) -> None:
    path = recorded(tmp_path / "d", change, flags=flags, stored=stored)
    found = of(look(path, "D04"), "D04")
    assert found is not None
    assert found.severity == "info"
    if stored == torch.float32:
        assert words in found.claim


def test_a_second_whitening_that_no_setting_names_is_told_as_what_it_is(tmp_path: Path) -> None:
    (found,) = told(recorded(tmp_path / "d", _whitened_again), "D04")
    assert found.severity == "warning"
    assert "whitened once more over the tokens" in found.claim


@pytest.mark.parametrize(
    ("flags", "change", "words"),
    [
        ({"advantage.std_norm": "global"}, _made(lambda g: (g[0] - g[1]) / (g[2] + 1e-8)), "the whole batch's"),
        ({"advantage.std_norm": "local"}, _made(lambda g: (g[0] - g[1]) / (g[0].std() + 1e-8)), "the group's"),
        ({"reward_weights": [1.0, 0.2]}, _by_function((1.0, 0.2), weighed=False), "weights of 1 each"),
        (GRPO, _made(lambda g: (g[0] - g[1]) / (g[1] + 1e-6)), "the group's mean reward"),
    ],
)  # fmt: skip
def test_another_than_the_stated_one_is_an_error(
    flags: dict[str, Any], change: Change, words: str, tmp_path: Path
) -> None:
    (found,) = told(recorded(tmp_path / "d", change, flags=flags), "D04")
    assert found.severity == "error"
    assert words in found.claim


@pytest.mark.parametrize("level", ["group", "batch"])
def test_a_stated_level_of_the_std_that_is_kept_is_right(level: str, tmp_path: Path) -> None:
    change = _made(lambda g: (g[0] - g[1]) / ((g[2] if level == "group" else g[0].std()) + 1e-6))
    assert not told(recorded(tmp_path / "d", change, flags={"reward_norm": {"std_level": level}}), "D04")


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_groups_that_keep_their_raw_rewards_are_told(stored: torch.dtype, tmp_path: Path) -> None:
    def some(groups: Group) -> torch.Tensor:
        scores, mean, std = groups
        advantages = scores.clone()
        advantages[::5] = ((scores - mean) / (std + 1e-6))[::5]
        return advantages

    (found,) = told(recorded(tmp_path / "d", _made(some), stored=stored), "D04")
    assert found.severity == "error"
    assert "the raw rewards in 4 of 6 groups" in found.claim


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_advantages_that_are_overwritten_in_some_rows_are_told_by_their_rows(
    stored: torch.dtype, tmp_path: Path
) -> None:
    def change(step: int, fields: Fields) -> None:
        for row in (2, 9, 17):
            fields["advantages"][row] = -1.25 * fields["response_mask"][row]
        fields["returns"] = fields["advantages"].clone()

    (found,) = told(recorded(tmp_path / "d", change, stored=stored), "D04")
    assert found.severity == "warning"
    assert "advantages of 3 of 30 samples are others" in found.claim
    assert "rows 2, 9, 17 they are -1.25" in found.claim
