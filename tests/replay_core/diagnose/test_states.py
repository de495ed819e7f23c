"""Single figures of a log that cannot be so, or say by themselves what is wrong; and what figures make of each
other."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.replay_core.diagnose.batches import of
from tests.replay_core.diagnose.logs import diagnosed, trl, verl
from tests.replay_core.diagnose.test_healthy_logs import N, run, with_metrics

Of = Callable[[int], float]


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("actor/pg_clipfrac", lambda at: 3.0 + at, "no share"),
        ("response_length/clip_ratio", lambda at: 12.0, "no share"),
        ("actor/lr", lambda at: 1e-6 - 1e-7 * at, "gradient ascent"),
        ("critic/vf_explained_var", lambda at: 1.7, "no more than all"),
        ("ratio_mean", lambda at: -0.01 - 0.001 * at, "exponentiated"),
        ("response_length/mean", lambda at: -5.0 - at, "wrong way round"),
    ],
)
def test_a_figure_that_it_cannot_be_is_told(name: str, value: Of, words: str, tmp_path: Path) -> None:
    found = of(diagnosed(tmp_path, verl(with_metrics(run(N), **{name.replace("/", "__"): value}))), "L30")
    assert found is not None
    assert words in found.claim


STATES: dict[str, tuple[str, Of, str]] = {
    "version": ("weight_version", lambda at: 3.0, "one version of the weights"),
    "update": ("update_norm", lambda at: 0.0, "no weight changes"),
    "critic's rate": ("critic/lr", lambda at: 0.0, "the critic learns nothing"),
    "critic's gradient": ("critic/grad_norm", lambda at: 0.0, "the critic gets no gradient"),
    "advantages": ("advantages_std", lambda at: 0.0, "no advantage differs"),
    "cut weights": ("tis_clipfrac", lambda at: 0.6, "cut off"),
    "mean weight": ("rollout_corr/rollout_is_mean", lambda at: 2.2, "their mean is 1"),
    "largest weight": ("rollout_corr/rollout_is_max", lambda at: 3.0 + 4 * at, "not truncated"),
    "unsolved": ("batch/solve_none", lambda at: 0.97, "no prompt is ever solved"),
    "solved": ("batch/solve_all", lambda at: 0.97, "always solved"),
    "preempted": ("num_preemptions", lambda at: 12.0 + at, "preempts"),
    "repeated": ("rollout/repetition_frac", lambda at: 0.5, "repeat themselves"),
    "greedy": ("rollout_temperature", lambda at: 0.0, "greedy"),
}


@pytest.mark.parametrize("state", STATES)
def test_a_figure_tells_by_itself(state: str, tmp_path: Path) -> None:
    name, value, words = STATES[state]
    found = of(diagnosed(tmp_path, verl(with_metrics(run(N), **{name.replace("/", "__"): value}))), "L31")
    assert found is not None
    assert words in found.claim


def test_a_version_that_never_changes_is_right_where_nothing_is_learnt(tmp_path: Path) -> None:
    steps = with_metrics(run(N), weight_version=lambda at: 3.0, actor__lr=lambda at: 0.0)
    assert of(diagnosed(tmp_path, verl(steps)), "L31") is None


def noise(seed: int) -> Of:
    rng = random.Random(seed)
    values = [rng.gauss(0, 1) for _ in range(200)]
    return lambda at: values[at]


def test_a_reward_that_is_made_of_the_length_is_length_hacking(tmp_path: Path) -> None:
    wavers = noise(1)
    long: Of = lambda at: 200 + 10 * at + 20 * wavers(at)  # noqa: E731
    steps = with_metrics(run(N), response_length__mean=long, critic__score__mean=lambda at: long(at) / 1000)
    found = of(diagnosed(tmp_path, verl(steps)), "L32")
    assert found is not None
    assert "length hacking" in found.claim
    # The same growth, with a reward of its own.
    other = noise(2)
    steps = with_metrics(
        run(N), response_length__mean=long, critic__score__mean=lambda at: 0.2 + 0.01 * at + 0.03 * other(at)
    )
    assert of(diagnosed(tmp_path, verl(steps)), "L32") is None


def test_a_reward_that_falls_as_answers_get_right_has_its_sign_turned(tmp_path: Path) -> None:
    wavers = noise(3)
    right: Of = lambda at: 0.5 - 0.01 * at + 0.05 * wavers(at)  # noqa: E731
    steps = [{"reward": -right(at), "rewards/accuracy/mean": right(at)} for at in range(N)]
    found = of(diagnosed(tmp_path, trl(steps)), "L32")
    assert found is not None
    assert "sign is turned" in found.claim


@pytest.mark.parametrize(("factor", "words"), [(0.7, "sharper"), (1.5, "flatter"), (1.0, None)])
def test_samples_that_are_not_drawn_from_the_policy_surprise_it_otherwise(
    factor: float, words: str | None, tmp_path: Path
) -> None:
    wavers = noise(4)
    steps = with_metrics(
        run(N), rollout__entropy=lambda at: 0.6, rollout__log_probs=lambda at: -0.6 * factor * (1 + 0.08 * wavers(at))
    )
    found = of(diagnosed(tmp_path, verl([step | {"actor/entropy": None} for step in steps])), "L33")
    assert (found is None) == (words is None)
    assert words is None or (found is not None and words in found.claim)


@pytest.mark.parametrize(("weight", "words"), [(-1.5, "outweighs"), (0.8, "wrong sign"), (-0.01, None)])
def test_an_entropy_that_makes_the_loss_is_told_with_its_coefficient(
    weight: float, words: str | None, tmp_path: Path
) -> None:
    wavers, other = noise(5), noise(6)
    entropy: Of = lambda at: 0.7 + 0.05 * at + 0.05 * wavers(at)  # noqa: E731
    steps = [
        {
            "entropy": entropy(at),
            "loss": weight * entropy(at) + 0.002 * other(at),
            "reward": 0.5 + 0.05 * wavers(at + 50),
        }
        for at in range(N)
    ]
    found = of(diagnosed(tmp_path, trl(steps)), "D49")
    assert (found is None) == (words is None)
    assert words is None or (found is not None and words in found.claim)


def test_an_entropy_of_0_with_loss_and_gradient_is_a_mask_of_nothing(tmp_path: Path) -> None:
    steps = [{"loss": 0.0, "grad_norm": 0.0, "entropy": 0.0, "kl": 0.0}] * 12
    found = diagnosed(tmp_path, trl(steps)).findings[0]
    assert (found.id, found.severity) == ("D07", "error")
    assert "no token counts" in found.claim
    detached = diagnosed(tmp_path, trl([{"loss": 0.0, "grad_norm": 0.0}] * 12)).findings[0]
    assert detached.id == "D23"


def test_a_kl_of_the_loss_that_is_negative_is_k1(tmp_path: Path) -> None:
    wavers = noise(7)
    steps = with_metrics(run(N), actor__kl_loss=lambda at: 0.01 * at / N + 0.004 * wavers(at))
    found = of(diagnosed(tmp_path, verl(steps)), "D29")
    assert found is not None
    assert "k1" in found.claim


@pytest.mark.parametrize(
    ("phase", "words"),
    [("timing_s/update_weights", "synchronisation of weights"), ("timing_s/reward", "scoring"), ("timing_s/gen", None)],
)
def test_a_phase_that_takes_most_of_a_step_is_told_where_it_should_not(
    phase: str, words: str | None, tmp_path: Path
) -> None:
    wavers = noise(8)
    steps = with_metrics(
        run(N), **{phase.replace("/", "__"): lambda at: 48 + wavers(at), "timing_s__step": lambda at: 60.0}
    )
    found = of(diagnosed(tmp_path, verl(steps)), "D37")
    assert (found is None) == (words is None)
    assert words is None or (found is not None and words in found.claim)


def test_the_phase_that_grows_is_named(tmp_path: Path) -> None:
    wavers = noise(9)
    steps = with_metrics(
        run(N),
        timing_s__gen=lambda at: 0.03 + 0.01 * at,
        timing_s__step=lambda at: 0.1 + 0.01 * at + 0.004 * wavers(at),
    )
    found = of(diagnosed(tmp_path, verl(steps)), "D37")
    assert found is not None
    assert "timing_s/gen grows" in found.claim


def test_what_ends_is_the_other_side_of_what_is_cut(tmp_path: Path) -> None:
    steps = [
        step | {"response_length/clip_ratio": None, "val/stop_rate": 0.02, "critic/score/mean": 0.0} for step in run(N)
    ]
    found = of(diagnosed(tmp_path, verl(steps)), "D20")
    assert found is not None
    assert "98% of the responses are cut" in found.claim


def test_a_warm_up_in_which_nothing_moves_is_too_long(tmp_path: Path) -> None:
    steps = [
        {
            "learning_rate": 1e-7 * at, "kl": None, "entropy": 0.6 + 1e-3 * (at % 3), "reward": 0.5 + 1e-3 * (at % 2),
            "completions/mean_length": 300.0 + at % 2,
        }
        for at in range(16)
    ]  # fmt: skip
    assert of(diagnosed(tmp_path, trl(steps)), "L07") is not None
    moving = [
        {"learning_rate": 1e-7 * at, "kl": 0.001 * math.exp(at / 4), "entropy": 0.6 - 0.01 * at} for at in range(12)
    ]
    assert of(diagnosed(tmp_path, trl(moving)), "L07") is None
