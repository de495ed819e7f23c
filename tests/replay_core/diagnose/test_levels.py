"""A loss that leaps and stays (L66), a mean ratio that is not 1 (L67), pass@k that falls alone (L68), what a falling
reward falls with (L08), and a reward model that learns nothing (L47).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from replay_core.diagnose.finding import Finding
from tests.replay_core.diagnose.logs import diagnosed, only, verl, worrying


def _supervised(loss: Callable[[int], float], steps: int = 40) -> str:
    noise = random.Random(3)
    return "".join(
        f"{{'loss': {loss(n) + noise.gauss(0, 0.01):.4f}, 'grad_norm': {0.7 + noise.gauss(0, 0.03):.3f}, "
        f"'learning_rate': 2e-05, 'epoch': {n / 50:.2f}}}\n"
        for n in range(steps)
    )


def test_a_loss_that_leaps_and_stays_is_an_error(tmp_path: Path) -> None:
    found = only(diagnosed(tmp_path, _supervised(lambda n: 2.3 - 0.01 * n if n < 20 else 6.9)), "L66")
    assert found.severity == "error"
    assert "to 6.9" in found.claim
    assert found.next_step


@pytest.mark.parametrize(
    "loss",
    [
        lambda n: 2.3 - 0.01 * n,
        lambda n: 8.0 if n == 20 else 2.3 - 0.01 * n,
        lambda n: 1.2 if n < 20 else 1.5,
        lambda n: 6.0 if n < 3 else 2.3,
    ],
    ids=["falls", "one spike", "harder data", "first steps"],
)
def test_a_loss_that_comes_back_or_hardly_leaps_is_none(tmp_path: Path, loss: Callable[[int], float]) -> None:
    assert not [one for one in diagnosed(tmp_path, _supervised(loss)).findings if one.id == "L66"]


def test_another_stage_of_data_is_worth_knowing(tmp_path: Path) -> None:
    assert only(diagnosed(tmp_path, _supervised(lambda n: 1.1 if n < 20 else 1.9)), "L66").severity == "info"


def _ratios(ratio: Callable[[int], float]) -> str:
    noise = random.Random(4)
    return "".join(
        f"2026-03-04 12:{n:02d}:10 - INFO - grpo_fast.py:1100 - {{'training_step': {n + 1}, 'scores': "
        f"{3 + 0.1 * n + noise.gauss(0, 0.05):.4f}, 'objective/kl_avg': {0.0001 * n:.5f}, 'loss/policy_avg': "
        f"{noise.gauss(0, 0.01):.4f}, 'policy/clipfrac_avg': 0.002, "
        f"'val/ratio': {ratio(n) + noise.gauss(0, 0.002):.4f}, "
        f"'optim/grad_norm': {0.4 + noise.gauss(0, 0.02):.4f}}}\n"
        for n in range(20)
    )


def test_a_mean_ratio_that_is_not_1_is_a_warning(tmp_path: Path) -> None:
    for value in (1.4, 0.7):
        assert only(diagnosed(tmp_path, _ratios(lambda _: value)), "L67").severity == "warning"  # noqa: B023


@pytest.mark.parametrize("ratio", [lambda _: 1.0, lambda _: 1.04, lambda n: 1.6 if n % 5 == 0 else 1.0])
def test_a_mean_ratio_near_1_and_single_steps_are_none(tmp_path: Path, ratio: Callable[[int], float]) -> None:
    assert not [one for one in diagnosed(tmp_path, _ratios(ratio)).findings if one.id == "L67"]


def _skyrl(passed: Callable[[int], float], reward: Callable[[int], float]) -> str:
    noise = random.Random(5)
    return "".join(
        f"(skyrl_entrypoint pid=8123) 2026-04-02 11:{n:02d}:20.112 | INFO     | skyrl_train.utils.tracking:log:80 - "
        f"{{'reward/avg_raw_reward': {reward(n) + noise.gauss(0, 0.01):.4f}, 'reward/avg_pass_at_8': "
        f"{passed(n) + noise.gauss(0, 0.01):.4f}, 'policy/final_loss': {noise.gauss(0, 0.01):.4f}, "
        f"'policy/raw_grad_norm': {0.2 + noise.gauss(0, 0.01):.4f}, 'trainer/global_step': {n + 1}}}\n"
        for n in range(30)
    )


def test_pass_at_k_that_falls_alone_is_a_warning(tmp_path: Path) -> None:
    found = only(diagnosed(tmp_path, _skyrl(lambda n: 0.8 - 0.013 * n, lambda n: 0.3 + 0.006 * n)), "L68")
    assert found.severity == "warning"
    assert "avg_pass_at_8 falls from" in found.claim


@pytest.mark.parametrize(
    ("passed", "reward"),
    [
        (lambda n: 0.8 - 0.003 * n, lambda n: 0.3 + 0.006 * n),
        (lambda n: 0.7 + 0.005 * n, lambda n: 0.3 + 0.006 * n),
        (lambda n: 0.8 - 0.013 * n, lambda n: 0.5 - 0.012 * n),
    ],
    ids=["hardly", "rises", "with the reward"],
)
def test_pass_at_k_that_rests_rises_or_falls_with_the_reward_is_none(
    tmp_path: Path, passed: Callable[[int], float], reward: Callable[[int], float]
) -> None:
    assert not [one for one in diagnosed(tmp_path, _skyrl(passed, reward)).findings if one.id == "L68"]


def _falls(tmp_path: Path, name: str, first: float, last: float) -> Finding:
    noise = random.Random(6)
    steps = [
        {"critic/score/mean": 0.5 - 0.008 * n + noise.gauss(0, 0.01), name: first + (last - first) * n / 39,
         "actor/entropy": 0.4 + noise.gauss(0, 0.004)}
        for n in range(40)
    ]  # fmt: skip
    return only(diagnosed(tmp_path, verl(steps)), "L08")


def test_a_reward_that_falls_as_answers_are_cut_says_so(tmp_path: Path) -> None:
    found = _falls(tmp_path, "response_length/clip_ratio", 0.02, 0.7)
    assert "ever more responses are cut at the token limit with it" in found.claim
    assert "wrong sign" not in str(found.cause)


def test_a_reward_that_falls_as_tools_are_called_less_says_so(tmp_path: Path) -> None:
    assert "calls its tools ever less with it" in _falls(tmp_path, "num_turns/mean", 6.0, 2.0).claim


@pytest.mark.parametrize(
    ("name", "first", "last"), [("response_length/clip_ratio", 0.02, 0.1), ("num_turns/mean", 2.0, 2.0)]
)
def test_a_reward_that_falls_by_itself_is_not_explained(tmp_path: Path, name: str, first: float, last: float) -> None:
    claim = _falls(tmp_path, name, first, last).claim
    assert "with it" not in claim


def test_a_reward_model_that_stays_at_chance_is_a_warning_and_one_that_learns_is_none(tmp_path: Path) -> None:
    noise = random.Random(7)

    def scores(loss: Callable[[int], float], right: Callable[[int], float]) -> str:
        return "".join(
            f"{{'loss': {loss(n) + noise.gauss(0, 0.003):.4f}, 'grad_norm': 0.9, 'learning_rate': 1e-05, 'accuracy': "
            f"{right(n) + noise.gauss(0, 0.01):.3f}, 'margin': {noise.gauss(0, 0.004):.4f}, 'mean_reward': 0.01, "
            f"'min_reward': -0.3, 'max_reward': 0.3, 'epoch': {n / 50:.2f}}}\n"
            for n in range(40)
        )

    assert only(diagnosed(tmp_path, scores(lambda _: 0.6931, lambda _: 0.5)), "L47").severity == "warning"
    assert not [
        one for one in worrying(diagnosed(tmp_path, scores(lambda n: 0.69 - 0.01 * n, lambda n: 0.5 + 0.01 * n)))
        if one.id == "L47"
    ]  # fmt: skip
