"""Sums that a log's columns keep in every step, and what it tells that one does not."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from replay_core.diagnose.finding import Finding
from replay_core.diagnose.log_steps import is_of_one_group, is_of_two
from tests.replay_core.diagnose.batches import of
from tests.replay_core.diagnose.logs import Metrics, diagnosed, part_of, trl, verl

STEPS = 24


def _found(folder: Path, text: str, id: str) -> Finding | None:
    return of(diagnosed(folder, text), id)


def _critic(returns: Callable[[float, float], float], off: float = 0.0) -> str:
    """Steps of PPO: a critic that comes to what is paid, and targets made of both."""
    draw, steps = np.random.default_rng(1), []
    for n in range(STEPS):
        paid, value = 0.5 + draw.normal(0, 0.1), 0.5 * (1 - math.exp(-n / 6)) + draw.normal(0, 0.03)
        mean = off * draw.choice([-1.0, 1.0]) * draw.uniform(0.3, 1)
        steps.append({
            "critic/score/mean": paid, "critic/rewards/mean": paid, "critic/values/mean": value,
            "critic/returns/mean": returns(paid, value), "critic/advantages/mean": mean,
            "critic/advantages/max": 2.0 + mean, "critic/advantages/min": mean - 2.0, "critic/vf_loss": 0.1,
        })  # fmt: skip
    return verl(steps)


def test_returns_that_fall_as_values_rise_are_advantages(tmp_path: Path) -> None:
    found = _found(tmp_path, _critic(lambda paid, value: 0.95 * paid - 0.9 * value), "L53")
    assert found is not None
    assert found.severity == "warning"
    assert "critic/returns/mean is 0.95 x critic/score/mean -0.9 x critic/values/mean" in found.claim


@pytest.mark.parametrize("part", [0.0, 0.1, 0.7], ids=["monte carlo", "gae", "one step"])
def test_returns_between_rewards_and_values_are_right(part: float, tmp_path: Path) -> None:
    assert _found(tmp_path, _critic(lambda paid, value: (1 - part) * paid + part * value), "L53") is None


def test_whitened_advantages_whose_mean_is_not_0_count_other_tokens(tmp_path: Path) -> None:
    found = _found(tmp_path, _critic(lambda paid, value: paid, off=0.6), "L52")
    assert found is not None
    assert "padding" in found.cause


@pytest.mark.parametrize("raw", [True, False])
def test_advantages_of_a_critic_that_are_whitened_or_plain_are_right(raw: bool, tmp_path: Path) -> None:
    text = _critic(lambda paid, value: 0.9 * paid + 0.1 * value)
    if raw:
        text = "".join(
            line.replace("critic/advantages/mean:0.0", f"critic/advantages/mean:{_part(line, 'returns')}")
            if "values/mean:0.0 " in line else line
            for line in text.splitlines(keepends=True)
        )  # fmt: skip
    assert _found(tmp_path, text, "L52") is None


def _part(line: str, name: str) -> str:
    return line.partition(f"critic/{name}/mean:")[2].partition(" ")[0]


@pytest.mark.parametrize(("sign", "told"), [(1.0, True), (-1.0, False)])
def test_a_kl_in_the_rewards_that_pays_for_distance(sign: float, told: bool, tmp_path: Path) -> None:
    steps: list[Metrics] = [
        {"critic/score/mean": 0.5, "critic/rewards/mean": 0.5 + sign * 0.01 * n} for n in range(1, STEPS)
    ]
    found = _found(tmp_path, verl(steps), "L58")
    assert (found is not None) == told
    assert found is None or found.severity == "error"


def _of_groups(loss: Callable[[float], float], **more: float) -> str:
    draw = np.random.default_rng(4)
    return trl([
        {
            "loss": loss(draw.normal()), "completions/mean_length": 100.0, "completions/max_length": 160.0,
            "kl": None, "clip_ratio/region_mean": 0.0, **more,
        }
        for _ in range(STEPS)
    ])  # fmt: skip


def test_a_loss_that_no_centred_advantages_make(tmp_path: Path) -> None:
    found = _found(tmp_path, _of_groups(lambda drawn: -1.4 + 0.05 * drawn), "L54")
    assert found is not None
    assert "no baseline" in found.cause


@pytest.mark.parametrize("most", [0.02, -0.4], ids=["about 0", "within what lengths allow"])
def test_a_loss_that_centred_advantages_may_make_is_none(most: float, tmp_path: Path) -> None:
    assert _found(tmp_path, _of_groups(lambda drawn: most + 0.02 * drawn), "L54") is None


def test_many_clipped_tokens_leave_the_loss_unjudged(tmp_path: Path) -> None:
    text = _of_groups(lambda drawn: -1.4 + 0.05 * drawn, **{"clip_ratio/region_mean": 0.2})
    assert _found(tmp_path, text, "L54") is None


def _advantages(of: Callable[[float, float], tuple[float, float]]) -> str:
    """One right answer or more of four in each step, their advantages over a std, and what is made of them."""
    draw, steps = np.random.default_rng(6), []
    for _ in range(STEPS):
        right = int(draw.integers(1, 4))
        std = math.sqrt(right * (4 - right) / 12)
        top, bottom = of((1 - right / 4) / std, -right / 4 / std)
        steps.append({
            "critic/score/mean": right / 4, "critic/score/max": 1.0, "critic/score/min": 0.0,
            "critic/advantages/max": top, "critic/advantages/min": bottom,
        })  # fmt: skip
    return verl(steps)


def test_advantages_that_are_divided_once_more_span_less_than_rewards(tmp_path: Path) -> None:
    draw = np.random.default_rng(8)
    text = _advantages(lambda top, bottom: (top / draw.integers(3, 8), bottom / draw.integers(3, 8)))
    found = _found(tmp_path, text, "L55")
    assert found is not None
    assert "length" in found.cause


@pytest.mark.parametrize("scale", ["over a std", "less a mean", "shared out"])
def test_advantages_of_known_formulas_span_what_they_should(scale: str, tmp_path: Path) -> None:
    share = {0.75: 0.75, 0.25: 0.25, 0.5: 0.5}
    of_mean: Callable[[float, float], tuple[float, float]] = lambda top, bottom: (  # noqa: E731
        top / (top - bottom) * (0.25 if scale == "shared out" else 1), bottom / (top - bottom)
    )  # fmt: skip
    text = _advantages((lambda top, bottom: (top, bottom)) if scale == "over a std" else of_mean)
    assert share
    assert _found(tmp_path, text, "L55") is None


def _lengths(limit_from: int | None, longest: float = 4.0) -> str:
    draw = np.random.default_rng(9)
    return trl([
        {
            "completions/mean_length": 3.5, "completions/max_length": longest if cut else float(draw.integers(6, 9)),
            "completions/clipped_ratio": 0.3 if cut else 0.0,
        }
        for n in range(STEPS)
        for cut in [limit_from is not None and n >= limit_from]
    ])  # fmt: skip


def test_a_limit_that_falls_within_the_run(tmp_path: Path) -> None:
    found = _found(tmp_path, _lengths(6), "L56")
    assert found is not None
    assert "from step 7 on no response is longer than 4 tokens, and 30% are cut" in found.claim


@pytest.mark.parametrize(("since", "longest"), [(None, 4.0), (0, 4.0), (6, 9.0)], ids=["none", "always", "grown into"])
def test_a_limit_that_was_there_before_is_another_matter(since: int | None, longest: float, tmp_path: Path) -> None:
    assert _found(tmp_path, _lengths(since, longest), "L56") is None


def _paid(token: float, *, spread: float, shrinks: bool = True, form: float = 0.0) -> str:
    draw, steps = np.random.default_rng(11), []
    for n in range(STEPS):
        length = (60.0 - 2 * n if shrinks else 40.0) + draw.normal(0, 2)
        right, ends = 0.3 + draw.normal(0, 0.05), min(1.0, 0.4 + 0.03 * n + draw.normal(0, 0.05))
        style = token * length + form * ends
        steps.append({
            "completions/mean_length": length, "rewards/accuracy/mean": right, "rewards/accuracy/std": 0.45,
            "rewards/ends/mean": ends, "rewards/ends/std": 0.3,
            "rewards/style/mean": style, "rewards/style/std": spread, "reward": right + style,
        })  # fmt: skip
    return trl(steps)


@pytest.mark.parametrize(("spread", "severity"), [(2.0, "warning"), (0.1, "info")])
def test_a_reward_function_that_is_the_length(spread: float, severity: str, tmp_path: Path) -> None:
    found = _found(tmp_path, _paid(-0.05, spread=spread), "L57")
    assert found is not None
    assert (found.severity, "-0.05 for each token" in found.claim) == (severity, True)


def test_a_length_that_stands_in_a_function_with_another(tmp_path: Path) -> None:
    found = _found(tmp_path, _paid(-0.05, spread=2.0, form=0.4), "L57")
    assert found is not None


def test_a_length_that_is_not_gone_along_with_is_worth_knowing(tmp_path: Path) -> None:
    found = _found(tmp_path, _paid(-0.05, spread=2.0, shrinks=False), "L57")
    assert found is None or found.severity == "info"


def _terms(bonus: float) -> str:
    draw = np.random.default_rng(13)
    entropies = [1.5 - 0.04 * n + draw.normal(0, 0.06) for n in range(STEPS)]
    kls = [0.03 * n + abs(draw.normal(0, 0.1)) for n in range(STEPS)]
    return trl([
        {"entropy": entropy, "kl": kl, "loss": bonus * entropy + 0.02 * kl + draw.normal(0, 3e-4)}
        for entropy, kl in zip(entropies, kls, strict=True)
    ])  # fmt: skip


@pytest.mark.parametrize(("bonus", "told"), [(0.05, True), (-0.01, False), (0.0, False)])
def test_an_entropy_term_beside_a_kl_has_a_sign(bonus: float, told: bool, tmp_path: Path) -> None:
    found = _found(tmp_path, _terms(bonus), "D49")
    assert (found is not None and "entropy term has the wrong sign" in found.claim) == told


def _batches(reference: Callable[[int, float], float]) -> str:
    draw = np.random.default_rng(15)
    moved = [0.01 * math.exp(draw.normal(0, 0.7)) for _ in range(2 * STEPS)]
    return verl([
        {"actor/ppo_kl": own, "actor/kl_loss": reference(n, own) * math.exp(draw.normal(0, 0.4)), "actor/lr": 1e-4}
        for n, own in enumerate(moved)
    ])  # fmt: skip


def test_a_kl_that_is_the_batchs_own_is_of_a_reference_that_follows(tmp_path: Path) -> None:
    found = _found(tmp_path, _batches(lambda n, own: own), "D113")
    assert found is not None
    assert "below the KL of that batch's own updates" in found.claim


def test_a_kl_that_grows_beyond_the_batchs_own_is_of_one_that_stands(tmp_path: Path) -> None:
    assert _found(tmp_path, _batches(lambda n, own: 0.005 * n + own), "D113") is None


def _again(reset: bool) -> str:
    """Entropy and length fall, leap back half-way, and fall the same way once more; or lie elsewhere after it."""
    draw = np.random.default_rng(17)
    steps = []
    for n in range(2 * STEPS):
        k = n % STEPS
        late = n >= STEPS and not reset
        steps.append({
            "kl": None, "entropy": 1.5 - 0.04 * (k if not late else 5) + draw.normal(0, 0.02),
            "completions/mean_length": 300 - 5 * (k if not late else 0) + draw.normal(0, 3), "reward": draw.normal(),
        })  # fmt: skip
    return trl(steps)


@pytest.mark.parametrize("reset", [True, False])
def test_two_figures_that_go_their_way_once_more_are_first_weights(reset: bool, tmp_path: Path) -> None:
    found = _found(tmp_path, _again(reset), "L24")
    assert (found is not None) == reset
    assert found is None or "starts again at step 25" in found.claim


def _parted(gap: Callable[[int], float]) -> str:
    return trl([{"sampling/sampling_logp_difference/mean": gap(n)} for n in range(STEPS)])


@pytest.mark.parametrize(
    ("gap", "severity"),
    [(lambda n: 0.001 + 0.02 * n, "error"), (lambda n: 1e-5 * 1.5**n, "info")],
    ids=["by every update", "most of it at the end"],
)
def test_only_what_grows_by_every_update_is_of_old_weights(
    gap: Callable[[int], float], severity: str, tmp_path: Path
) -> None:
    found = _found(tmp_path, _parted(gap), "D12")
    assert found is not None
    assert (found.severity, "does not hold the trainer's weights" in found.claim) == (severity, severity == "error")


def test_a_gap_of_the_first_steps_that_a_sure_policy_hides(tmp_path: Path) -> None:
    found = _found(tmp_path, _parted(lambda n: 0.09 if n < 9 else 0.015), "D09")
    assert found is not None
    assert "before anything is learnt" in found.claim


def _one_group(products: bool) -> list[Metrics]:
    draw = np.random.default_rng(19)
    steps: list[Metrics] = []
    for n in range(2 * STEPS):
        right = 0 if n % 2 else int(draw.integers(1, 4))
        top = math.sqrt(3 * (4 - right) / (4 * right)) if right else 0.0
        bottom = -0.75 / top if right and products else -1.5 if right else 0.0
        steps.append({
            "critic/score/mean": right / 4, "critic/score/max": float(right > 0), "critic/score/min": 0.0,
            "critic/advantages/max": top, "critic/advantages/min": bottom,
        })  # fmt: skip
    return steps


def test_one_group_for_each_step_is_seen_in_its_advantages(tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    one, several = part_of(tmp_path, verl(_one_group(True))), part_of(tmp_path / "more", verl(_one_group(False)))
    assert (is_of_one_group(one), is_of_one_group(several)) == (True, False)
    assert not is_of_two(one)


def test_a_step_of_two_responses_is_seen_in_its_rewards(tmp_path: Path) -> None:
    steps: list[Metrics] = [
        {"critic/score/mean": n % 3 / 2, "critic/score/max": float(n % 3 > 0), "critic/score/min": float(n % 3 == 2)}
        for n in range(STEPS)
    ]
    assert is_of_two(part_of(tmp_path, verl(steps)))


@pytest.mark.parametrize(("far", "severity"), [(1, "info"), (4, "error")])
def test_one_batch_that_moves_the_policy_far_is_a_spike(far: int, severity: str, tmp_path: Path) -> None:
    text = verl([{"actor/ppo_kl": 1.5 if 20 <= n < 20 + far else 0.002} for n in range(2 * STEPS)])
    found = _found(tmp_path, text, "L16")
    assert found is not None
    assert found.severity == severity
    assert "does not tell which" in found.cause


def test_an_epsilon_that_outweighs_the_gradient_leaves_the_policy_where_it_was(tmp_path: Path) -> None:
    steps: list[Metrics] = [
        {"actor/ppo_kl": 2e-5, "actor/kl_loss": 2e-7 * n * n, "actor/lr": 1e-3} for n in range(1, 2 * STEPS)
    ]
    found = _found(tmp_path, verl(steps), "L14")
    assert found is not None
    assert "epsilon" in found.cause
