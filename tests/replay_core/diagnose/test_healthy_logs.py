"""Logs of runs that are well, whatever they do on purpose, have neither errors nor warnings."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.replay_core.diagnose.logs import diagnosed, trl, verl, worrying

Step = dict[str, float | None]
#: What a figure wavers by from batch to batch, as a share of itself.
NOISE = 0.12


def run(steps: int, seed: int = 0) -> list[Step]:
    """verl's metrics of a PPO run that learns: reward up, entropy down by a third, KL up, a critic that follows."""
    rng = random.Random(seed)

    def about(value: float) -> float:
        return value * (1 + NOISE * rng.gauss(0, 1))

    found: list[Step] = []
    for at in range(steps):
        share = at / max(steps - 1, 1)
        reward = min(0.95, max(0.02, 0.35 + 0.3 * share + 0.06 * rng.gauss(0, 1)))
        found.append(
            {
                "critic/score/mean": reward,
                "actor/entropy": about(0.6 - 0.2 * share),
                "actor/pg_loss": 0.01 * rng.gauss(0, 1),
                "actor/grad_norm": about(0.4),
                "actor/ppo_kl": 2e-4 * rng.gauss(0, 1),
                "actor/kl_loss": about(2e-4 + 0.02 * share),
                "actor/pg_clipfrac": abs(0.004 * rng.gauss(0, 1)),
                "critic/advantages/mean": 0.01 * rng.gauss(0, 1),
                "critic/advantages/max": 2.4,
                "critic/advantages/min": -2.1 - 0.3 * rng.random(),
                "response_length/mean": about(420),
                "response_length/max": 1024.0,
                "response_length/clip_ratio": about(0.04),
                "timing_s/step": about(60),
                "timing_s/gen": about(35),
                "timing_s/update_actor": about(20),
                "timing_s/update_weights": about(3),
                "training/rollout_probs_diff_mean": about(0.004),
                "rollout_corr/k3_kl": abs(about(2e-4)),
                "rollout_corr/rollout_is_mean": 1 + 0.01 * rng.gauss(0, 1),
                "rollout_corr/rollout_is_max": 1.6 + 0.3 * rng.random(),
                "perf/max_memory_allocated_gb": about(51),
            }
        )
    return found


def with_metrics(steps: list[Step], **made: Callable[[int], float]) -> list[Step]:
    return [step | {name.replace("__", "/"): of(at) for name, of in made.items()} for at, step in enumerate(steps)]


N = 40
VARIANTS: dict[str, list[Step]] = {
    "plain": run(N),
    "a cosine that ends at 0": with_metrics(run(N), actor__lr=lambda at: 5e-7 * (1 + math.cos(math.pi * at / (N - 1)))),
    "a warm-up and a decay": with_metrics(run(N), actor__lr=lambda at: 1e-6 * min((at + 1) / 10, 1 - at / N)),
    "a warm-up that a short log ends in": with_metrics(run(6), actor__lr=lambda at: 1e-7 * (at + 1)),
    "harder prompts in stairs": with_metrics(
        run(N, 1), critic__score__mean=lambda at: (0.6, 0.55, 0.52, 0.5)[4 * at // N] + 0.04 * math.sin(at)
    ),
    "a critic that is warmed up": [
        step
        | {
            "actor/pg_loss": None,
            "actor/grad_norm": None,
            "actor/entropy": None,
            "critic/vf_explained_var": 0.1 * at,
            "critic/lr": 1e-5,
            "critic/grad_norm": 3.0 / (1 + at),
        }
        for at, step in enumerate(run(8))
    ],
    "truncated importance weights of an asynchronous run": with_metrics(
        run(N, 2), rollout_corr__rollout_is_max=lambda at: 2.0, staleness=lambda at: min(at, 3)
    ),
    "no KL term": with_metrics(run(N, 3), actor__kl_loss=lambda at: 0.3 * at / N, actor__kl_coef=lambda at: 0.0),
    "no reference": [step | {"actor/kl_loss": None} for step in run(N, 4)],
    "a policy that gets sure of right answers": with_metrics(
        run(N, 5), actor__entropy=lambda at: 0.6 - 0.45 * at / N, critic__score__mean=lambda at: 0.3 + 0.6 * at / N
    ),
    "answers that get longer as they get right": with_metrics(
        run(N, 6),
        response_length__mean=lambda at: 300 + 5 * at + 30 * math.sin(7 * at),
        critic__score__mean=lambda at: 0.3 + 0.01 * at + 0.05 * math.cos(3 * at),
    ),
    "two steps": run(2),
    "three steps": run(3),
    "a critic's own rate and gradient": with_metrics(
        run(N, 7),
        critic__lr=lambda at: 1e-5,
        critic__grad_norm=lambda at: 3 + math.sin(at),
        critic__vf_loss=lambda at: 0.2,
        critic__vf_explained_var=lambda at: 0.6,
        critic__vf_clipfrac=lambda at: 0.05,
    ),
    "an engine that preempts nothing": with_metrics(
        run(N, 8), num_preemptions=lambda at: 0.0, kv_cache_usage=lambda at: 0.6
    ),
    "a version of the weights for each step": with_metrics(run(N, 9), weight_version=lambda at: float(at)),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_run_that_is_well_has_no_warning(name: str, tmp_path: Path) -> None:
    assert worrying(diagnosed(tmp_path, verl(VARIANTS[name]))) == []


def test_a_run_that_was_resumed_has_none(tmp_path: Path) -> None:
    steps = run(N, 10)
    text = verl(steps[:20]) + "INFO loading checkpoint global_step_15\n" + verl(steps[15:], first=16)
    assert worrying(diagnosed(tmp_path, text)) == []


def test_every_tenth_step_is_a_log_too(tmp_path: Path) -> None:
    lines = verl(run(200, 11)).splitlines(keepends=True)
    assert worrying(diagnosed(tmp_path, "".join(lines[::10]))) == []


def test_evaluations_between_the_steps_are_none_of_them(tmp_path: Path) -> None:
    lines = trl([{}] * 12).splitlines(keepends=True)
    told = "{'eval_loss': 0.02, 'eval_reward': 0.55, 'eval_rewards/accuracy/mean': 0.5, 'eval_runtime': 31.0}\n"
    assert worrying(diagnosed(tmp_path, "".join([*lines[:6], told, *lines[6:], told]))) == []
