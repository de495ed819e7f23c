"""What moved first in a log leads: entropy, length, exceptions, a KL, a validation; healthy twins are quiet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.replay_core.diagnose.logs import diagnosed, diagnosed_path, only, trl, verl, worrying, written


def _wave(start: float, end: float, steps: int, noise: float, seed: int = 0) -> list[float]:
    values = np.linspace(start, end, steps) + np.random.default_rng(seed).normal(0, noise, steps)
    return [max(round(float(value), 4), 0.0) for value in values]


def _dead(entropy: list[float], since: int, seed: int = 0) -> list[dict[str, float]]:
    """TRL steps without a spread within groups from one on, while rewards differ over the batch."""
    reward = _wave(0.6, 0.7, len(entropy), 0.1, seed)
    return [
        {"reward": r, "entropy": e, "loss": 0.0, "kl": 0.01, "rewards/accuracy/std": 0.4}
        | ({"reward_std": 0.0, "frac_reward_zero_std": 1.0, "grad_norm": 0.0} if n >= since else {})
        for n, (r, e) in enumerate(zip(reward, entropy, strict=True))
    ]


@pytest.mark.parametrize("seed", range(3))
def test_entropy_that_fell_is_why_no_group_has_a_spread(tmp_path: Path, seed: int) -> None:
    found = diagnosed(tmp_path, trl(_dead(_wave(0.7, 0.02, 20, 0.02, seed), 12, seed)))
    assert "after the policy's entropy fell" in only(found, "D03").claim
    greedy = diagnosed(tmp_path, trl(_dead(_wave(0.004, 0.004, 20, 0.001, seed), 0, seed)))
    assert "hardly samples" in only(greedy, "D03").claim
    # An entropy that stays is not the reason.
    stays = diagnosed(tmp_path, trl(_dead(_wave(0.7, 0.65, 20, 0.02, seed), 12, seed)))
    assert "entropy" not in only(stays, "D03").claim


@pytest.mark.parametrize("seed", range(3))
def test_lengths_that_grow_into_the_limit_are_no_small_limit(tmp_path: Path, seed: int) -> None:
    cut = [0.0] * 12 + _wave(0.05, 0.6, 12, 0.03, seed)
    length = _wave(300, 1500, 24, 40, seed)
    steps = [{"completions/clipped_ratio": c, "completions/mean_length": n, "frac_reward_zero_std": 0.6, "reward": r}
             for c, n, r in zip(cut, length, _wave(0.5, 0.4, 24, 0.05, seed), strict=True)]  # fmt: skip
    one = only(diagnosed(tmp_path, trl(steps)), "D20")
    assert "responses grow from" in one.claim
    assert "raise" not in one.next_step
    steady = [each | {"completions/mean_length": 900.0 + n % 3, "completions/clipped_ratio": 0.4 + 0.01 * (n % 3)}
              for n, each in enumerate(steps)]  # fmt: skip
    assert "grow" not in only(diagnosed(tmp_path, trl(steady)), "D20").claim


def test_noise_is_cut_whatever_the_limit_is(tmp_path: Path) -> None:
    steps: list[dict[str, Any]] = [
        {"completions/clipped_ratio": 0.35, "entropy": 3.3 + 0.01 * (n % 3), "reward": 0.0, "reward_std": 0.0,
         "frac_reward_zero_std": 1.0, "loss": 0.0, "grad_norm": 0.0} for n in range(14)
    ]  # fmt: skip
    one = only(diagnosed(tmp_path, trl(steps)), "D20")
    assert "samples noise" in one.claim
    assert "temperature" in one.cause
    calm = diagnosed(tmp_path, trl([each | {"entropy": 0.6} for each in steps]))
    assert "noise" not in only(calm, "D20").claim


def test_a_judge_that_fails_in_every_step_is_named_with_its_exception(tmp_path: Path) -> None:
    zero = {"critic/score/mean": 0.0, "critic/score/max": 0.0, "critic/advantages/max": 0.0,
            "critic/advantages/min": 0.0, "actor/grad_norm": 0.0, "actor/pg_loss": 0.0}  # fmt: skip
    lines = verl([zero | {"actor/entropy": 0.5 + 0.01 * (n % 4)} for n in range(12)]).splitlines()
    error = "(RewardManagerWorker pid=61) openai.AuthenticationError: Error code: 401 - {'error': 'Incorrect API key'}"
    text = "".join(f"{error}\n{line}\n" for line in lines)
    one = only(diagnosed(tmp_path, text), "L17")
    assert "AuthenticationError" in one.claim
    assert "the judge fails" in one.cause
    assert "exceptions" not in only(diagnosed(tmp_path, "\n".join(lines) + "\n"), "L17").claim


def _resumed(lost: bool, seed: int) -> str:
    kl = [0.0, *_wave(0.002, 0.08, 9, 0.004, seed), 0.0, *_wave(0.003, 0.06, 9, 0.004, seed + 1)]
    reward, entropy = _wave(0.3, 0.8, 10, 0.02, seed), _wave(0.9, 0.4, 10, 0.02, seed)
    later = (_wave(0.3, 0.7, 10, 0.02, seed), _wave(0.9, 0.5, 10, 0.02, seed)) if lost else (
        _wave(0.8, 0.85, 10, 0.02, seed), _wave(0.4, 0.38, 10, 0.02, seed))  # fmt: skip
    each = enumerate(zip(kl, reward + later[0], entropy + later[1], strict=True))
    return verl([
        {"actor/kl_loss": max(k, 0.001) if n % 10 else k, "critic/score/mean": r, "actor/entropy": e}
        for n, (k, r, e) in each
    ])  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
def test_a_kl_that_is_0_again_tells_of_weights_that_were_lost(tmp_path: Path, seed: int) -> None:
    assert "the run goes on from the initial weights" in only(diagnosed(tmp_path, _resumed(True, seed)), "D46").claim
    other = only(diagnosed(tmp_path, _resumed(False, seed)), "D46")
    assert "initial weights" not in other.claim
    assert other.cause.startswith("the reference was made anew")
    kl = [0.0, *_wave(0.002, 0.08, 19, 0.004, seed)]
    fine = verl([{"actor/kl_loss": max(one, 0.001) if n else 0.0} for n, one in enumerate(kl)])
    assert "D46" not in [one.id for one in diagnosed(tmp_path, fine).findings]


def _validated(values: list[float], end: float) -> str:
    reward = _wave(0.4, end, 30, 0.02)
    return "".join(
        json.dumps({"step": n, "data": {"critic/score/mean": r, "actor/entropy": 0.5}
                    | ({"val-core/math/acc/mean@1": values[n // 5 - 1]} if n % 5 == 0 else {})}) + "\n"
        for n, r in enumerate(reward, 1)
    )  # fmt: skip


def test_a_validation_that_is_lost_while_the_reward_rises(tmp_path: Path) -> None:
    found = diagnosed_path(written(tmp_path, _validated([0.24, 0.4, 0.2, 0.12, 0.0, 0.0], 1.0), "metrics.jsonl"))
    assert "the reward is hacked" in only(found, "L20").claim
    fine = written(tmp_path, _validated([0.24, 0.3, 0.33, 0.4, 0.38, 0.41], 1.0), "metrics.jsonl")
    assert not worrying(diagnosed_path(fine))


@pytest.mark.parametrize("seed", range(3))
def test_a_format_that_is_all_there_is_while_answers_are_lost(tmp_path: Path, seed: int) -> None:
    form = [0.8, 0.55, 0.8, 0.85, *_wave(0.93, 0.99, 22, 0.03, seed)]
    right = [0.38, 0.1, 0.3, 0.25, 0.15, 0.4, *_wave(0.15, 0.03, 20, 0.06, seed)]
    steps = [{"rewards/format_reward/mean": min(f, 1.0), "rewards/accuracy_reward/mean": a, "reward": min(f, 1.0)}
             for f, a in zip(form, right, strict=True)]  # fmt: skip
    assert "the format is learnt, the answers are lost" in only(diagnosed(tmp_path, trl(steps)), "L12").claim
    fine = [each | {"rewards/accuracy_reward/mean": 0.3 + 0.01 * n} for n, each in enumerate(steps)]
    assert "L12" not in [one.id for one in diagnosed(tmp_path, trl(fine)).findings]


def _of_two_functions(outage: range, seed: int) -> str:
    draw = np.random.default_rng(seed)
    steps = []
    for n in range(16):
        a, f = (round(float(one), 4) for one in draw.uniform(0.3, 0.9, 2))
        total = 0.0 if n in outage else round(a + 0.3 * f, 4)
        steps.append({"rewards/accuracy/mean": a, "rewards/format/mean": f, "reward": total})
    return trl(steps)


def test_a_reward_that_is_one_number_while_its_functions_pay(tmp_path: Path) -> None:
    between = only(diagnosed(tmp_path, _of_two_functions(range(6, 9), 0)), "D104")
    assert between.severity == "warning"
    assert "it drops, and comes back" in between.claim
    assert between.steps == (7, 8, 9)
    assert only(diagnosed(tmp_path, _of_two_functions(range(12, 16), 1)), "D104").severity == "error"
    assert "D104" not in [one.id for one in diagnosed(tmp_path, _of_two_functions(range(0), 2)).findings]
