"""A reward that is to rise and does not: told of, with what goes with it; what is learnt, or noise of few steps, is
not.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.replay_core.diagnose.logs import Metrics, diagnosed, only, told, trl, verl, worrying

Steps = Callable[[random.Random, int], Metrics]


def run(step: Steps, count: int, seed: int = 3) -> str:
    rng = random.Random(seed)
    return trl([step(rng, n) for n in range(count)])


def around(rng: random.Random, level: float, by: float = 0.1) -> float:
    return round(rng.gauss(level, by), 4)


def no_spread(rng: random.Random, n: int) -> Metrics:
    dead = n % 4 == 0
    spread = {"reward_std": 0.0, "frac_reward_zero_std": 1.0, "grad_norm": 0.0, "loss": 0.0} if dead else {}
    return {"reward": around(rng, -2.6), "rewards/accuracy/mean": None, "rewards/accuracy/std": None, **spread}


def are_cut(rng: random.Random, n: int) -> Metrics:
    return {"reward": around(rng, -2.6), "completions/clipped_ratio": max(0.0, around(rng, 0.4, 0.05)),
            "rewards/accuracy/mean": None}  # fmt: skip


def stands(rng: random.Random, n: int) -> Metrics:
    return {"reward": around(rng, 1.05), "kl": abs(around(rng, 0.001, 0.0002)), "rewards/accuracy/mean": None}


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (no_spread, "no group has a spread of rewards"),
        (are_cut, "of the responses are cut at the token limit"),
        (stands, "the policy hardly moves"),
    ],
)
def test_a_reward_that_does_not_rise_is_told_of_with_what_tells_why(step: Steps, words: str, tmp_path: Path) -> None:
    found = only(diagnosed(tmp_path, run(step, 200)), "L40")
    assert found.severity == "warning"
    assert "the reward does not rise in 200 steps" in found.claim
    assert words in found.claim


def test_where_a_quarter_is_cut_all_along_the_limit_leads(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, run(are_cut, 200)).findings[0]
    assert (found.id, found.severity) == ("D20", "warning")
    assert "the reward does not rise in 200 lines" in found.claim


def rises(rng: random.Random, n: int) -> Metrics:
    return {**no_spread(rng, n), "reward": around(rng, -2.6 + n / 200)}


def rose_at_first(rng: random.Random, n: int) -> Metrics:
    return {**no_spread(rng, n), "reward": around(rng, min(-2.6 + n / 8, -1.0))}


def solved(rng: random.Random, n: int) -> Metrics:
    return {**no_spread(rng, n), "reward": min(1.0, around(rng, 0.93, 0.05))}


@pytest.mark.parametrize("step", [rises, rose_at_first, solved])
def test_what_is_learnt_is_not(step: Steps, tmp_path: Path) -> None:
    assert "L40" not in {one.id for one in worrying(diagnosed(tmp_path, run(step, 200)))}


def test_nor_are_few_steps(tmp_path: Path) -> None:
    assert "L40" not in {one.id for one in worrying(diagnosed(tmp_path, run(no_spread, 60)))}


def lines_of(losses_and_rewards: list[tuple[float, float]]) -> str:
    return "".join(f"[run] {n:3d}/100 | loss={loss:.4f} | reward={reward:.3f}\n"
                   for n, (loss, reward) in enumerate(losses_and_rewards, 1))  # fmt: skip


def test_a_loss_of_0_where_every_answer_is_right_is_no_warning(tmp_path: Path) -> None:
    rng = random.Random(1)
    steps = [(0.0, 1.0) if n % 2 else (-rng.random(), round(0.8 + 0.15 * rng.random(), 3)) for n in range(30)]
    found = diagnosed(tmp_path, lines_of(steps))
    assert worrying(found) == []
    assert "in steps whose answers are all right" in only(found, "L01").claim


def test_a_loss_of_0_where_answers_are_wrong_is_one(tmp_path: Path) -> None:
    rng = random.Random(1)
    steps = [(0.0, 0.0) if n % 2 else (-rng.random(), round(0.2 * rng.random(), 3)) for n in range(30)]
    assert ("L01", "warning") in told(diagnosed(tmp_path, lines_of(steps)))


def test_a_run_that_took_no_step_says_so(tmp_path: Path) -> None:
    text = (
        "Step\tTraining Loss\treward\treward_std\tcompletion_length\tkl\n"
        "TrainOutput(global_step=7473, training_loss=0.0, metrics={'train_runtime': 0.0068, "
        "'train_samples_per_second': 1102304.688, 'total_flos': 0.0, 'train_loss': 0.0})\n"
    )
    found = diagnosed(tmp_path, text).findings[0]
    assert (found.id, found.severity) == ("L01", "warning")
    assert "no step was taken" in found.claim


def grown(rng: random.Random, n: int, reward: float = 0.0) -> Metrics:
    return {"response_length/mean": around(rng, 1000 + 40 * n, 30), "response_length/max": 8192.0,
            "response_length/clip_ratio": round(max(0.0, 0.002 * n + rng.gauss(0, 0.002)), 4),
            "critic/score/mean": around(rng, -0.5 + reward * n), "timing_s/step": None}  # fmt: skip


def test_responses_that_grow_for_nothing_are_told_of_before_they_are_three_times_as_long(tmp_path: Path) -> None:
    rng = random.Random(5)
    found = only(diagnosed(tmp_path, verl([grown(rng, n) for n in range(32)])), "L09")
    assert found.severity == "warning"
    assert "the reward does not rise" in found.claim


def test_those_that_are_paid_for_are_not(tmp_path: Path) -> None:
    rng = random.Random(5)
    found = diagnosed(tmp_path, verl([grown(rng, n, 0.02) for n in range(32)]))
    assert "L09" not in {one.id for one in worrying(found)}


def test_a_collapse_of_length_goes_before_a_kl_of_the_first_step(tmp_path: Path) -> None:
    rng = random.Random(2)
    steps: list[Metrics] = [
        {"response_length/mean": around(rng, 1000, 20) if n < 30 else around(rng, 9, 0.5),
         "response_length/max": 2000.0,
         "critic/score/mean": around(rng, -0.5 if n < 30 else -0.9, 0.02), "actor/kl_loss": 0.55 if n < 30 else 1.9}
        for n in range(60)
    ]  # fmt: skip
    found = diagnosed(tmp_path, verl(steps)).findings[0]
    assert (found.id, found.severity) == ("L09", "error")


def test_a_policy_that_falls_apart_is_told_with_the_gradient_that_it_follows(tmp_path: Path) -> None:
    rng = random.Random(4)
    steps: list[Metrics] = [
        {"reward": around(rng, 0.9, 0.02) if n < 8 else abs(around(rng, 0.01, 0.005)),
         "entropy": around(rng, 0.16, 0.01) if n < 8 else 0.9, "completions/clipped_ratio": 0.01,
         "grad_norm": {7: 3.6, 22: 46.8}.get(n, around(rng, 0.2, 0.02))}
        for n in range(40)
    ]  # fmt: skip
    found = diagnosed(tmp_path, trl(steps, 0)).findings[0]
    assert (found.id, found.severity) == ("L08", "error")
    assert "behind a gradient norm of 3.6 at step 7 (0.2 before, and up to 46.8 at step 22)" in found.claim
