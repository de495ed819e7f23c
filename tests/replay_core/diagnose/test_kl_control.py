"""A KL that is too small for how far the reward has moved, and a coefficient that is steered the wrong way: logs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from replay_core.diagnose.finding import Finding
from tests.replay_core.diagnose.batches import of
from tests.replay_core.diagnose.logs import Metrics, diagnosed, diagnosed_path, verl, worrying, written

STEPS = 30


def _learning(kl: Callable[[int], float], *, gain: float = 0.45, cut: float = 0.0) -> list[Metrics]:
    """A run that learns: the reward is of 0 or 1, answers have about ten tokens."""
    draw = np.random.default_rng(0)
    return [
        {
            "critic/score/mean": 0.4 + gain * n / STEPS + draw.normal(0, 0.02), "actor/kl_loss": kl(n),
            "response_length/mean": 9 + draw.normal(0, 0.3), "response_length/max": 12.0, "actor/lr": 2e-3,
            "actor/grad_norm": 0.4 + draw.normal(0, 0.03),
            "response_length/clip_ratio": 0.35 + cut * n / STEPS + draw.normal(0, 0.02),
        } for n in range(STEPS)
    ]  # fmt: skip


def _told(folder: Path, steps: list[Metrics], head: str = "") -> list[Finding]:
    return worrying(diagnosed(folder, head + verl(steps)))


def test_a_reference_that_follows_the_policy_has_a_kl_too_small_for_the_reward(tmp_path: Path) -> None:
    draw = np.random.default_rng(1)
    (found,) = _told(tmp_path, _learning(lambda n: 2e-3 / (n + 1) + abs(draw.normal(0, 1e-4)), cut=0.4))
    assert found.id == "D113"
    assert "the reference follows the policy: actor/kl_loss stays at" in found.claim


@pytest.mark.parametrize(
    ("kl", "gain"),
    [
        (lambda n: 0.06 * n / STEPS, 0.45),  # it has moved as far as that takes
        (lambda n: 6e-5 * n / STEPS, 0.45),  # logged with its coefficient: small, and growing
        (lambda n: 1e-4, 0.03),  # hardly anything was learnt
    ],
    ids=["far", "weighed", "near"],
)
def test_a_reference_that_stands_is_nothing(kl: Callable[[int], float], gain: float, tmp_path: Path) -> None:
    assert _told(tmp_path, _learning(kl, gain=gain)) == []


def _controlled(sign: float, target: float = 0.05) -> list[Metrics]:
    """A KL that grows, and the coefficient that verl's controller makes of it."""
    draw, weight = np.random.default_rng(2), 0.02
    steps: list[Metrics] = []
    for n, step in enumerate(_learning(lambda n: 0.0)):
        kl = 0.25 * n / STEPS + draw.normal(0, 0.01)
        steps.append({**step, "actor/kl_loss": None, "actor/reward_kl_penalty": kl,
                      "actor/reward_kl_penalty_coeff": weight})  # fmt: skip
        weight *= 1 + sign * 0.1 * float(np.clip(kl / target - 1, -1, 1))
    return steps


def test_a_coefficient_that_falls_while_the_kl_is_above_its_target_is_the_first_cause(tmp_path: Path) -> None:
    first = _told(tmp_path, _controlled(-1))[0]
    assert first.id == "D114"
    assert "it falls while the KL is above" in first.claim


@pytest.mark.parametrize("target", [0.05, 1.0])
def test_a_coefficient_that_is_steered_the_right_way_is_nothing(target: float, tmp_path: Path) -> None:
    assert of(diagnosed(tmp_path, verl(_controlled(1, target))), "D114") is None


@pytest.mark.parametrize(("gain", "grows", "loud"), [(0.45, 0.4, False), (0.0, 0.0, False), (0.0, 0.45, True)])
def test_answers_that_are_cut_are_a_warning_where_they_grow_and_nothing_is_gained(
    gain: float, grows: float, loud: bool, tmp_path: Path
) -> None:
    found = of(diagnosed(tmp_path, verl(_learning(lambda n: 0.05 * n / STEPS, gain=gain, cut=grows))), "D20")
    assert found is not None
    assert (found.severity == "warning") is loud


def _with_critic(values: Callable[[int], float], due: Callable[[int], float]) -> list[Metrics]:
    draw = np.random.default_rng(3)
    return [
        {**step, "actor/kl_loss": None, "critic/values/mean": values(n) + draw.normal(0, 0.02),
         "critic/returns/mean": due(n) + draw.normal(0, 0.02), "critic/vf_loss": 0.3, "critic/grad_norm": 4.0,
         "critic/vf_explained_var": -0.1}
        for n, step in enumerate(_learning(lambda n: 0.0))
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("values", "due", "words"),
    [
        (lambda n: -0.22, lambda n: 0.4 + 0.3 * n / STEPS, "the critic is never updated"),
        (lambda n: -0.4 - 0.3 * n / STEPS, lambda n: 0.4 + 0.3 * n / STEPS, "the sign of the returns turned"),
        (lambda n: -0.3, lambda n: 0.4, "values and returns lie on two sides of 0"),
    ],
    ids=["stands", "turned", "either"],
)
def test_values_on_the_other_side_of_their_returns_are_told_by_how_they_move(
    values: Callable[[int], float], due: Callable[[int], float], words: str, tmp_path: Path
) -> None:
    found = of(diagnosed(tmp_path, verl(_with_critic(values, due))), "D45")
    assert found is not None
    assert words in found.claim


def _of_a_queue(age: Callable[[int], float]) -> str:
    """A trainer's own lines: how old samples are, and how far engine and trainer are apart for it."""
    draw = np.random.default_rng(4)
    return "".join(
        json.dumps({
            "step": n, "staleness_mean": age(n), "reward_mean": 0.4 + draw.normal(0, 0.02),
            "logprob_diff_mean": 9e-8 if not n else 0.025 * age(n) + abs(draw.normal(0, 0.005)),
            "grad_norm": 0.5 + draw.normal(0, 0.02), "lr": 1e-3,
        }) + "\n" for n in range(STEPS)
    )  # fmt: skip


@pytest.mark.parametrize(
    ("age", "words"),
    [
        (lambda n: 1.0 + n // 2, "samples get ever older: staleness_mean"),
        (lambda n: 1.0 + n, "by one in each step: what is trained on is of weights that stand still"),
    ],
    ids=["a queue", "no update"],
)
def test_an_age_that_is_logged_and_grows_leads_over_what_it_parts(
    age: Callable[[int], float], words: str, tmp_path: Path
) -> None:
    first = worrying(diagnosed_path(written(tmp_path, _of_a_queue(age), "metrics.jsonl")))[0]
    assert first.id == "D31"
    assert words in first.claim
