"""One advantage that outweighs all, rewards that nobody gave, a loss that is never divided: each beside its healthy
counterpart, computed as a trainer does.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from replay_core.recorder import Recorder
from tests.replay_core.diagnose.batches import causes, look, of
from tests.replay_core.diagnose.bigram import EOS, Bigram

PROMPTS = [[5, 6], [7, 3], [8, 9, 10], [11, 3]]


def _leave_one_out(rewards_B: np.ndarray, groups_B: np.ndarray, epsilon: float) -> np.ndarray:
    out = np.zeros(len(rewards_B))
    for at in range(len(rewards_B)):
        others = rewards_B[(groups_B == groups_B[at]) & (np.arange(len(rewards_B)) != at)]
        out[at] = (rewards_B[at] - others.mean()) / (others.std(ddof=1) + epsilon)
    return out


def _normalised(directory: Path, rewards_B: np.ndarray, *, epsilon: float = 1e-6, whole: bool = False) -> Path:
    recorder, lm = Recorder(directory), Bigram(2)
    for step in range(3):
        rollout = lm.rollout(PROMPTS, each=5)
        mine_B = rewards_B if step == 1 else np.tile([0.3, 0.7, 0.3, 0.7, 0.5], 4)
        a_B = _leave_one_out(mine_B, rollout.group_B, epsilon)
        if whole:
            groups = mine_B.reshape(4, 5)
            a_B = ((groups - groups.mean(1, keepdims=True)) / (groups.std(1, ddof=1, keepdims=True) + epsilon)).ravel()
        with recorder.step(step) as record:
            record("trajectory", **rollout.tensors(
                rewards=mine_B.astype(np.float32), advantages=rollout.on_tokens(a_B)))  # fmt: skip
    return directory


ODD = np.tile([0.3, 0.7, 0.3, 0.7, 0.5], 4)
ODD[5:10] = [0.1, 0.1, 0.9, 0.1, 0.1]


@pytest.mark.parametrize("epsilon", [1e-6, 1e-4])
def test_the_one_odd_reward_of_a_group_explodes_under_leave_one_out(tmp_path: Path, epsilon: float) -> None:
    found = causes(look(_normalised(tmp_path / "d", ODD, epsilon=epsilon), "D04", "D97"))
    assert [one.id for one in found] == ["D97"]
    assert "leave-one-out" in found[0].cause
    assert found[0].steps == (1,)


def test_groups_of_several_rewards_do_not_explode(tmp_path: Path) -> None:
    path = _normalised(tmp_path / "d", np.tile([0.3, 0.7, 0.3, 0.7, 0.5], 4))
    assert causes(look(path, "D04", "D97")) == []


def test_the_std_of_the_whole_group_does_not_explode(tmp_path: Path) -> None:
    assert causes(look(_normalised(tmp_path / "d", ODD, whole=True), "D04", "D97")) == []


def test_an_advantage_of_an_odd_reward_is_as_large_as_it(tmp_path: Path) -> None:
    recorder, lm = Recorder(tmp_path / "d"), Bigram(2)
    rewards_B = np.tile([0.3, 0.7, 0.3, 0.7, 0.5], 4)
    rewards_B[3] = 900.0
    with recorder.step(0) as record:
        rollout = lm.rollout(PROMPTS, each=5)
        centred = rewards_B.reshape(4, 5) - rewards_B.reshape(4, 5).mean(1, keepdims=True)
        record("trajectory", **rollout.tensors(
            rewards=rewards_B.astype(np.float32), advantages=rollout.on_tokens(centred.ravel())))  # fmt: skip
    assert of(look(tmp_path / "d", "D97"), "D97") is None


@pytest.mark.parametrize(
    ("functions", "found"),
    [((0.2, None), True), ((0.2,), False), ((None,), True), ((None, 0.4), True), ((0.1, 0.4), False)],
)
def test_samples_that_no_function_judged(tmp_path: Path, functions: tuple[float | None, ...], found: bool) -> None:
    """Of each function: None gives NaN to the same samples 3 and 9 as others do, a number to all but one of its own."""
    recorder, lm = Recorder(tmp_path / "d"), Bigram(2)
    rollout = lm.rollout(PROMPTS, each=5)
    each = []
    for number, value in enumerate(functions):
        given_B = np.linspace(0, 1, 20) + (value or 0.0)
        given_B[[3, 9] if value is None else [number + 11]] = np.nan
        each.append(given_B)
    if len(functions) == 1 and not found:
        each[0][11] = 0.5
    if found and len(functions) == 2:
        for given_B in each:
            given_B[[3, 9]] = np.nan
    total_B = np.nansum(each, axis=0)
    named = {f"rewards_per_func.f{number}": torch.from_numpy(one.astype(np.float32)) for number, one in enumerate(each)}
    with recorder.step(0) as record:
        record("trajectory", **rollout.tensors(rewards=total_B.astype(np.float32)), **named)
    told = of(look(tmp_path / "d", "D98"), "D98")
    assert (told is not None) == found
    if told is not None:
        assert "2 of 20" in told.claim


def _updated(
    directory: Path, *, summed: bool, clip: float | None = None, stated: str = "", divided: bool = False
) -> Path:
    """REINFORCE in two micro-batches: the loss of a micro-batch is a mean over the update's tokens, or a sum."""
    flags = {"loss_agg_mode": stated} if stated else {}
    recorder, lm = Recorder(directory, flags=flags), Bigram(11)
    for step in range(3):
        rollout = lm.rollout(PROMPTS, each=4)
        scores_B = (rollout.ids_BS == EOS).any(1) + 0.1 * np.arange(16)
        a_BT = rollout.on_tokens(scores_B - scores_B.mean())
        now_BT = rollout.logprobs(lm).astype(np.float32)
        tokens = float(rollout.response_BT.sum())
        with recorder.step(step) as record:
            record("trajectory", **rollout.tensors(
                rewards=scores_B.astype(np.float32), advantages=a_BT, old_log_probs=now_BT))  # fmt: skip
            for micro in range(2):
                rows = np.arange(8 * micro, 8 * micro + 8)
                part, mean = rollout.only(rows), float(-a_BT[rows].sum() / tokens)
                record("forward_data", micro=micro, **part.tensors(
                    advantages=a_BT[rows], old_log_probs=now_BT[rows], log_probs=now_BT[rows]))  # fmt: skip
                record("loss", micro=micro, pg_loss=mean, loss=mean * (tokens if summed else 1.0))
            if clip is not None:
                norm = 0.9 * (tokens if summed and not divided else 1.0)
                record("optimizer", grad_norm=norm, max_grad_norm=clip)
    return directory


def test_a_loss_that_is_never_divided_is_told(tmp_path: Path) -> None:
    found = of(look(_updated(tmp_path / "d", summed=True, clip=1.0), "D99"), "D99")
    assert found is not None
    assert found.severity == "warning"
    stated = of(look(_updated(tmp_path / "e", summed=True, stated="token-mean"), "D99"), "D99")
    assert stated is not None
    assert stated.severity == "warning"


def test_a_sum_whose_gradient_is_divided_afterwards_is_worth_knowing(tmp_path: Path) -> None:
    found = of(look(_updated(tmp_path / "d", summed=True, clip=1.0, divided=True), "D99"), "D99")
    assert found is not None
    assert found.severity == "info"


def test_a_mean_is_fine(tmp_path: Path) -> None:
    assert of(look(_updated(tmp_path / "d", summed=False, clip=1.0, stated="token-mean"), "D99"), "D99") is None
