"""Logs of healthy runs whose figures leap, grow and take turns: stages, curricula, mixtures of tasks, answers that get
longer; each beside the fault that it looks like.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.replay_core.diagnose.logs import Metrics, diagnosed, verl, worrying

#: Of a step, its number from 0, and noise: the metrics.
Step = Callable[[int, np.random.Generator], dict[str, float]]


def loud(folder: Path, step: Step, count: int = 80) -> set[str]:
    draw = np.random.default_rng(0)
    steps: list[Metrics] = [step(number, draw) for number in range(count)]
    return {one.id for one in worrying(diagnosed(folder, verl(steps)))}


def scored(value: float) -> dict[str, float]:
    return {"critic/score/mean": value}


def learnt(t: int, draw: np.random.Generator) -> float:
    return float(0.3 + 0.004 * t + draw.normal(0, 0.02))


def longer(times: float, pays: bool) -> Step:
    def step(t: int, draw: np.random.Generator) -> dict[str, float]:
        length = 500 * times ** (t / 79) + draw.normal(0, 15)
        return {**scored(learnt(t if pays else 0, draw)), "response_length/mean": float(length)}

    return step


@pytest.mark.parametrize("times", [6.0, 0.2])
def test_lengths_that_go_far_while_the_reward_rises_are_no_alarm(times: float, tmp_path: Path) -> None:
    assert "L09" not in loud(tmp_path, longer(times, pays=True))


@pytest.mark.parametrize("times", [6.0, 0.2])
def test_and_are_one_where_nothing_is_earned_by_it(times: float, tmp_path: Path) -> None:
    assert "L09" in loud(tmp_path, longer(times, pays=False))


@pytest.mark.parametrize("turns", [True, False])
def test_tasks_that_take_turns_pay_for_no_length(turns: bool, tmp_path: Path) -> None:
    def step(t: int, draw: np.random.Generator) -> dict[str, float]:
        place = t % 2 if turns else t / 79
        length = 1500 - 1200 * place + draw.normal(0, 30)
        return {**scored(float(0.4 + (1500 - length) / 400)), "response_length/mean": float(length)}

    assert ("L32" in loud(tmp_path, step)) != turns


@pytest.mark.parametrize("learns", [True, False])
def test_a_curriculum_that_is_learnt_between_its_leaps_is_no_fall(learns: bool, tmp_path: Path) -> None:
    def step(t: int, draw: np.random.Generator) -> dict[str, float]:
        way = 0.007 if learns else -0.0005
        return {
            **scored(float(0.75 - 0.15 * (t // 20) + way * (t % 20) + draw.normal(0, 0.01))),
            "response_length/mean": float(500 + 420 * (t // 20) + draw.normal(0, 20)),
        }

    assert ({"L08", "L09"} & loud(tmp_path, step) == set()) == learns


@pytest.mark.parametrize("stage", [True, False])
def test_a_stage_with_a_new_reference_and_prompts_is_no_restart(stage: bool, tmp_path: Path) -> None:
    """Of first weights that come back the length does, too."""

    def step(t: int, draw: np.random.Generator) -> dict[str, float]:
        since = t % 40
        length = 900 + 8 * since + (900 if stage and t >= 40 else 0)
        return {
            **scored(float(0.35 + 0.009 * since + draw.normal(0, 0.01))),
            "actor/kl_loss": float(0.002 * since + abs(draw.normal(0, 0.0003))),
            "actor/entropy": float(0.6 - 0.006 * since + draw.normal(0, 0.008)),
            "response_length/mean": float(length + draw.normal(0, 20)),
        }

    assert ("L24" in loud(tmp_path, step)) != stage


@pytest.mark.parametrize("stage", [True, False])
def test_a_warm_up_of_a_new_stage_is_no_lost_schedule(stage: bool, tmp_path: Path) -> None:
    def step(t: int, draw: np.random.Generator) -> dict[str, float]:
        far = t % 40 if stage else t
        return {
            **scored(learnt(t, draw)),
            "actor/kl_loss": float(0.001 * far + abs(draw.normal(0, 0.0001))),
            "actor/lr": 2e-6 * min(1.0, (t % 40 + 1) / 5),
        }

    assert ("L22" in loud(tmp_path, step)) != stage


@pytest.mark.parametrize(("length", "claims"), [(900.0, None), (0.0, "a leak"), (None, "goes on")])
def test_memory_grows_with_the_lengths_or_it_leaks(length: float | None, claims: str | None, tmp_path: Path) -> None:
    """Of a log without lengths it only grows: what for it does not tell."""
    draw = np.random.default_rng(0)
    steps: list[Metrics] = [
        {
            **scored(learnt(t, draw)),
            "perf/max_memory_allocated_gb": float(40 + 0.4 * t + draw.normal(0, 0.2)),
            "response_length/mean": None if length is None else float(800 + length * t / 79 + draw.normal(0, 9)),
            "response_length/max": None,
        }
        for t in range(80)
    ]
    found = [one.claim for one in worrying(diagnosed(tmp_path, verl(steps))) if one.id == "L04"]
    assert [claims in one for one in found if claims is not None] == ([] if claims is None else [True])
    assert claims != "goes on" or "leak" not in found[0]


def test_a_cache_that_fills_up_is_no_leak(tmp_path: Path) -> None:
    def step(t: int, draw: np.random.Generator) -> dict[str, float]:
        return {"perf/cpu_memory_used_gb": float(150 + 60 * (1 - math.exp(-t / 25)) + draw.normal(0, 0.3))}

    assert "L04" not in loud(tmp_path, step)


@pytest.mark.parametrize("batches", [True, False])
def test_steps_that_generate_more_batches_take_longer(batches: bool, tmp_path: Path) -> None:
    def step(t: int, draw: np.random.Generator) -> dict[str, float]:
        made = 1 + t // 20 + int(draw.random() < 0.3)
        gen = 60.0 * made + draw.normal(0, 2)
        told = {"train/num_gen_batches": float(made)} if batches else {}
        return {**told, "timing_s/gen": float(gen), "timing_s/step": float(gen + 25)}

    assert ("D37" in loud(tmp_path, step)) != batches


@pytest.mark.parametrize(("share", "found"), [(0.0025, False), (0.02, True)])
def test_a_few_tokens_per_thousand_are_clipped_by_two_forwards_in_bf16(
    share: float, found: bool, tmp_path: Path
) -> None:
    def step(t: int, draw: np.random.Generator) -> dict[str, float]:
        return {"actor/lr": 1e-6 * min(1.0, t / 10), "actor/pg_clipfrac": share}

    assert ("D14" in loud(tmp_path, step)) == found


@pytest.mark.parametrize("earns", [True, False])
def test_entropy_that_grows_with_the_reward_is_exploration(earns: bool, tmp_path: Path) -> None:
    def step(t: int, draw: np.random.Generator) -> dict[str, float]:
        entropy = 0.3 + 0.006 * t + draw.normal(0, 0.01)
        return {**scored(learnt(t if earns else 0, draw)), "actor/entropy": float(entropy)}

    assert ("D25" in loud(tmp_path, step)) != earns
