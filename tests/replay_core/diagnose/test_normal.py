"""What looks odd and is normal: no warning, no error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.replay_core.diagnose.batches import (
    GROUPS,
    Fields,
    causes,
    grpo,
    healthy,
    masks,
    noise,
    rewards,
    seen,
    set_advantages,
    set_rewards,
)

Change = Callable[[Fields], None]


def group_std_over_n(batch: Fields) -> None:
    set_advantages(batch, grpo(rewards(batch), GROUPS, epsilon=1e-4, ddof=0))


def dr_grpo(batch: Fields) -> None:
    scores = rewards(batch).reshape(4, 4)
    set_advantages(batch, (scores - scores.mean(1, keepdims=True)).reshape(-1))


def rloo(batch: Fields) -> None:
    scores = rewards(batch).reshape(4, 4)
    set_advantages(batch, ((scores - scores.mean(1, keepdims=True)) * 4 / 3).reshape(-1))


def reinforce_plus_plus(batch: Fields) -> None:
    scores = rewards(batch)
    set_advantages(batch, (scores - scores.mean()) / (scores.std(ddof=1) + 1e-8))


def gae(batch: Fields) -> None:
    batch["values"] = noise(batch, 0.1)
    batch["advantages"] = batch["advantages"] + noise(batch, 0.4, 3)


def a_tiny_spread_of_rewards(batch: Fields) -> None:
    set_rewards(batch, 0.5 + 1e-4 * np.random.default_rng(0).random(16))
    set_advantages(batch, grpo(rewards(batch).astype(np.float64), GROUPS))


def k1_which_may_be_negative(batch: Fields) -> None:
    batch["kl"] = (batch["old_log_probs"] - batch["ref_log_prob"]) * masks(batch)


def k3(batch: Fields) -> None:
    moved = batch["ref_log_prob"] - batch["old_log_probs"]
    batch["kl"] = (np.expm1(moved) - moved) * masks(batch)


def a_first_step(batch: Fields) -> None:
    batch["log_probs"] = batch["old_log_probs"].copy()
    batch["ref_log_prob"] = batch["old_log_probs"].copy()
    batch["kl"] = np.zeros_like(batch["old_log_probs"])


def routing_of_every_layer(batch: Fields) -> None:
    batch["routed_experts"] = np.random.default_rng(0).integers(0, 8, (16, 44, 3, 2))


def versions_of_one_update(batch: Fields) -> None:
    batch["weight_version"] = np.array([4] * 8 + [5] * 8)


def truncated_samples_left_out(batch: Fields) -> None:
    cut = masks(batch).sum(1) == 20
    batch["response_mask"][cut] = 0


def nothing_changed(batch: Fields) -> None:
    pass


NORMAL = (
    nothing_changed, group_std_over_n, dr_grpo, rloo, reinforce_plus_plus, gae, a_tiny_spread_of_rewards,
    k1_which_may_be_negative, k3, a_first_step, routing_of_every_layer, versions_of_one_update,
    truncated_samples_left_out,
)  # fmt: skip


@pytest.mark.parametrize("change", NORMAL, ids=lambda change: change.__name__)
def test_what_is_normal_is_no_warning(change: Change, tmp_path: Path) -> None:
    batch = healthy()
    change(batch)
    assert causes(seen(tmp_path, batch)) == []
