"""A batch that is trained on for several epochs holds each sample several times; equal rewards leave their rounding."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from replay_core.objectives import advantages
from replay_core.recorder import Recorder
from tests.replay_core.diagnose.batches import look, of, why_skipped

GROUPS = np.arange(8) // 4
REWARDS = np.array([1.0, 0.0, 0.0, 1.0, 0.25, 0.5, 1.0, 0.0])


def trained(
    directory: Path,
    advantages_B: np.ndarray,
    *,
    epochs: int = 1,
    minis: int = 2,
    rewards: np.ndarray = REWARDS,
    refreshed: bool = False,
) -> Path:
    """A trainer that passes `minis` mini-batches of one batch `epochs` times; micro-batches are numbered throughout."""
    draw = torch.Generator().manual_seed(0)
    total = len(rewards)
    groups_B = torch.arange(total) // (total // 2)
    ids_BS = torch.randint(10, 30, (total, 7), generator=draw)
    response_BS = torch.ones(total, 7, dtype=torch.int64)
    response_BS[:, :2] = 0
    ids_BS[:, :2] = groups_B[:, None] + 3
    old_BT = -torch.rand(total, 6, generator=draw)
    recorder = Recorder(directory)
    with recorder.step(0) as record:
        micro = 0
        for epoch in range(epochs):
            for rows in torch.randperm(total, generator=draw).chunk(minis):
                now_BT = old_BT[rows] - 0.01 * epoch * torch.rand(len(rows), 6, generator=draw)
                record(
                    "forward_data",
                    micro=micro,
                    input_ids=ids_BS[rows],
                    attention_mask=torch.ones(len(rows), 7, dtype=torch.int64),
                    response_mask=response_BS[rows],
                    group_ids=groups_B[rows],
                    rewards=torch.from_numpy(rewards)[rows].float(),
                    advantages=torch.from_numpy(advantages_B)[rows, None].float() * response_BS[rows, 1:],
                    old_log_probs=now_BT if refreshed else old_BT[rows],
                    log_probs=now_BT,
                )
                micro += 1
    return directory


@pytest.mark.parametrize("epochs", [1, 2, 4])
@pytest.mark.parametrize(
    "made",
    [
        lambda: advantages.group_normalised(REWARDS, GROUPS, unbiased=True, epsilon=1e-6),
        lambda: advantages.leave_one_out(REWARDS, GROUPS),
    ],
    ids=["GRPO", "RLOO"],
)
def test_advantages_of_several_epochs_are_those_of_one(made, epochs: int, tmp_path: Path) -> None:
    finding = of(look(trained(tmp_path / "run", made(), epochs=epochs), "D04"), "D04")
    assert finding is not None
    assert finding.severity == "info", finding.claim


def test_a_mistake_is_a_mistake_in_every_epoch(tmp_path: Path) -> None:
    wrong = -advantages.group_normalised(REWARDS, GROUPS, unbiased=True, epsilon=1e-6)
    finding = of(look(trained(tmp_path / "run", wrong, epochs=2), "D04"), "D04")
    assert finding is not None
    assert finding.severity == "error"
    assert "wrong sign" in finding.claim


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rewards", "rule"), [((0.7, 0.7), "D01"), ((0.7, 0.3), "D03")])
def test_what_rounding_leaves_of_equal_rewards_is_no_baseline(
    rewards: tuple[float, float], rule: str, stored: torch.dtype, tmp_path: Path
) -> None:
    """As verl computes them: the float32 mean of eight equal rewards is off by a bit, and its 1e-6 makes .056 of it."""
    groups = [torch.full((8,), reward) for reward in rewards]
    left_B = torch.cat([(group - group.mean()) / (group.std() + 1e-6) for group in groups]).to(stored)
    assert left_B.abs().max() > 0.02
    found = look(trained(tmp_path / "run", left_B.float().numpy(), rewards=torch.cat(groups).numpy()), rule, "D04")
    finding = of(found, rule)
    assert finding is not None
    assert finding.severity == "error"
    assert "D01" in why_skipped(found, "D04")


def test_a_baseline_that_is_no_groups_is_still_one(tmp_path: Path) -> None:
    """Equal rewards with advantages that differ from response to response: a critic's; or as large as a batch's."""
    rewards = np.repeat([0.7, 0.3], 4)
    critic = rewards - np.linspace(0.6, 0.75, 8)
    over_the_batch = advantages.normalised(rewards, unbiased=True, epsilon=1e-8)
    for name, made in (("critic", critic), ("batch", over_the_batch)):
        assert not look(trained(tmp_path / name, made, rewards=rewards), "D01", "D03").findings


@pytest.mark.parametrize("refreshed", [True, False])
def test_old_log_probabilities_that_every_epoch_takes_anew_are_named(refreshed: bool, tmp_path: Path) -> None:
    made = advantages.group_normalised(REWARDS, GROUPS, unbiased=True, epsilon=1e-6)
    finding = of(look(trained(tmp_path / "run", made, epochs=3, refreshed=refreshed), "D60"), "D60")
    assert (finding is not None) == refreshed
    if finding is not None:
        assert "refreshed in every epoch" in finding.claim
