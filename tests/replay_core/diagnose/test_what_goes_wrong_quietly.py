"""Logs of runs that go on and go wrong: pairs of one text, the least reward, a fall at the end, a leap within one step,
answers that get random or lose their form, a gradient that fades, a loss scale that sinks; and what only looks so.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from replay_core.diagnose.finding import Finding
from tests.replay_core.diagnose.logs import HEALTHY_VERL, diagnosed, diagnosed_path, trl, verl, worrying, written

N = 60


def waves(level: float, by: float, n: int = N, up: float = 0.0) -> list[float]:
    return [level + up * at / n + by * math.sin(2.3 * at) * math.cos(0.7 * at) for at in range(n)]


def of_columns(folder: Path, columns: Mapping[str, Sequence[float]], name: str = "own.jsonl") -> list[Finding]:
    rows = (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
    return worrying(diagnosed_path(written(folder, "".join(json.dumps(row) + "\n" for row in rows), name)))


def steps(n: int = N) -> list[float]:
    return [float(at + 1) for at in range(n)]


# Pairs.


def pairs(of: Callable[[float], float], margin: float = 8.0) -> dict[str, Sequence[float]]:
    right = [0.1875, 0.5625, 0.625, 0.375, 0.5625, 0.375, 0.5]
    return {
        "step": steps(7),
        "loss": [of(one) for one in right],
        "grad_norm": [0.4, *(10.0 ** -(at + 2) for at in range(6))],
        "rewards/accuracies": right,
        "rewards/margins": [0.9, *([margin] * 6)],
        "rewards/chosen": [0.5 * at for at in range(7)],
        "logps/chosen": [-120.0 - at for at in range(7)],
    }


def test_pairs_of_one_text_lose_ln_2_each(tmp_path: Path) -> None:
    found = of_columns(tmp_path, pairs(lambda right: (1 - right) * math.log(2)))
    assert found[0].id == "L49"
    assert "hold the same answer twice" in found[0].claim


@pytest.mark.parametrize("margin", [8.0, 1.0])
def test_pairs_that_lose_something_else_are_of_two_texts(margin: float, tmp_path: Path) -> None:
    found = of_columns(tmp_path, pairs(lambda right: (1 - right) * (1.4 if margin > 4 else math.log(2)), margin))
    assert not [one for one in found if one.id == "L49"]


# The least reward.


def of_answers(paid: Callable[[int], bool], n: int = 80) -> str:
    word = {True: "right", False: "no_answer_in_required_format"}
    return "".join(
        f"Reward:\n{{'outcome': '{word[paid(at)]}', 'parsed_answer': None, "
        f"'outcome_reward': {1.0 if paid(at) else -1.0}}}\n"
        for at in range(n)
    )


def test_nearly_every_answer_gets_the_least_reward_and_the_lines_say_why(tmp_path: Path) -> None:
    found = worrying(diagnosed(tmp_path, of_answers(lambda at: at % 9 == 4)))
    assert found[0].id == "L50"
    assert "-1 in 71 of 80 lines" in found[0].claim
    assert "'no_answer_in_required_format' in 71" in found[0].claim


@pytest.mark.parametrize(
    "paid", [lambda at: at % 3 == 0, lambda at: at > 55, lambda at: False], ids=["often", "later", "never"]
)
def test_a_reward_that_comes_often_later_or_never_is_not_this(paid: Callable[[int], bool], tmp_path: Path) -> None:
    assert not [one for one in diagnosed(tmp_path, of_answers(paid)).findings if one.id == "L50"]


# A fall, a leap, noise.


def test_a_reward_that_falls_at_the_end_below_where_it_began(tmp_path: Path) -> None:
    n = 120
    up, down = waves(0.3, 0.01, 90, 0.2), [0.5 - 0.012 * at for at in range(30)]
    found = of_columns(tmp_path, {"step": steps(n), "reward": [*up, *down], "grad_norm": waves(0.5, 0.05, n)})
    assert [one.id for one in found] == ["L08"]
    assert "falls at the end" in found[0].claim
    assert "below where it began (0.3" in found[0].claim


def test_a_reward_that_falls_back_to_where_it_began_is_no_such_fall(tmp_path: Path) -> None:
    up, down = waves(0.3, 0.01, 90, 0.2), [0.5 - 0.006 * at for at in range(30)]
    found = of_columns(tmp_path, {"step": steps(120), "reward": [*up, *down], "grad_norm": waves(0.5, 0.05, 120)})
    assert not [one for one in found if "at the end" in one.claim]


def leaping(entropy: Sequence[float]) -> str:
    rewards = [*waves(0.78, 0.09, 12), *waves(0.33, 0.11, 18)]
    norms, lengths = waves(0.3, 0.05, 30), waves(800.0, 20.0, 30)
    return verl([
        {"critic/score/mean": reward, "actor/entropy": each, "actor/grad_norm": norm, "response_length/mean": length}
        for reward, each, norm, length in zip(rewards, entropy, norms, lengths, strict=True)
    ])  # fmt: skip


def test_a_reward_that_leaps_while_the_policy_goes_on_is_the_judges(tmp_path: Path) -> None:
    found = worrying(diagnosed(tmp_path, leaping(waves(0.6, 0.02, 30))))
    assert found[0].id == "L08"
    assert "at step 13, within one step" in found[0].claim
    assert "the judge or the data changed, and not the policy" in found[0].claim


def test_a_reward_that_leaps_with_the_entropy_may_be_the_policys(tmp_path: Path) -> None:
    found = worrying(diagnosed(tmp_path, leaping([*waves(0.6, 0.02, 12), *waves(2.2, 0.02, 18)])))
    assert not [one for one in found if "not the policy" in one.claim]


def test_an_entropy_that_grows_as_the_reward_falls_is_told_with_it(tmp_path: Path) -> None:
    n = 30
    entropy = [0.6] * 6 + [0.6 + 0.03 * at for at in range(24)]
    found = worrying(diagnosed(tmp_path, trl([
        {"reward": 0.8 - 0.02 * max(0, at - 6), "rewards/accuracy/mean": 0.8 - 0.02 * max(0, at - 6), "entropy": each}
        for at, each in zip(range(n), entropy, strict=True)
    ])))  # fmt: skip
    (fall,) = [one for one in found if one.id == "L08"]
    assert "meanwhile entropy grows from 0.6 to 1.3 nats" in fall.claim


def mismatched(values: Sequence[float]) -> list[Finding]:
    return [{**HEALTHY_VERL, "training/rollout_probs_diff_mean": value} for value in values]  # type: ignore[misc]


def test_a_mismatch_that_leaps_is_a_setting_and_no_weights_that_stay_behind(tmp_path: Path) -> None:
    leapt = [*waves(8e-8, 1e-8, 12), *waves(0.09, 0.012, 18)]
    (found,) = [one for one in worrying(diagnosed(tmp_path, verl(mismatched(leapt)))) if one.id == "D09"]  # type: ignore[arg-type]
    assert "within one step, and stays there, as a setting does" in found.claim
    grown = [1e-7, *(0.005 * at for at in range(1, 30))]
    (found,) = [one for one in worrying(diagnosed(tmp_path, verl(mismatched(grown)))) if one.id == "D09"]  # type: ignore[arg-type]
    assert "grows with the updates" in found.claim


# Numbers of the optimizer.


def test_a_loss_scale_that_sinks_names_the_overflow(tmp_path: Path) -> None:
    norms = [0.4 if at < 6 or at % 3 == 0 else math.inf for at in range(30)]
    scales = [65536.0 * 0.5 ** sum(math.isinf(norm) for norm in norms[: at + 1]) for at in range(30)]
    columns = {"step": steps(30), "loss": waves(0.01, 0.01, 30), "reward": waves(0.5, 0.02, 30), "grad_norm": norms}
    found = of_columns(tmp_path, {**columns, "loss_scale": scales})
    assert "fp16 gradients overflow: grad_norm is not finite in 16 of 30 steps" in found[0].claim
    steady = of_columns(tmp_path, {**columns, "loss_scale": [65536.0] * 30}, "steady.jsonl")
    assert "fp16" not in steady[0].claim


def test_a_loss_scale_that_looks_for_its_height_is_no_alarm(tmp_path: Path) -> None:
    norms = [math.inf if at in (7, 18, 29) else 0.4 for at in range(30)]
    scales = [65536.0 * 0.5 ** sum(math.isinf(norm) for norm in norms[: at + 1]) for at in range(30)]
    columns = {"step": steps(30), "loss": waves(0.01, 0.01, 30), "reward": waves(0.5, 0.02, 30), "grad_norm": norms}
    assert not [one for one in of_columns(tmp_path, {**columns, "loss_scale": scales}) if one.id == "D21"]


def scaled(norms: Sequence[float]) -> dict[str, Sequence[float]]:
    """A run whose loss scale is halved wherever the norm is not finite."""
    n = len(norms)
    scales = [2.0**32 * 0.5 ** sum(not math.isfinite(norm) for norm in norms[: at + 1]) for at in range(n)]
    return {
        "step": steps(n), "loss": waves(0.01, 0.01, n), "reward": waves(0.5, 0.02, n), "grad_norm": norms,
        "loss_scale": scales,
    }  # fmt: skip


def test_a_loss_scale_that_has_settled_is_no_alarm(tmp_path: Path) -> None:
    found = of_columns(tmp_path, scaled([math.inf if at < 17 else 0.4 for at in range(100)]))
    assert not [one for one in found if one.id == "D21"]
    late = of_columns(tmp_path, scaled([math.inf if at < 17 or at > 95 else 0.4 for at in range(100)]), "late.jsonl")
    assert "fp16 gradients overflow" in late[0].claim


def test_a_norm_that_is_nan_whatever_the_loss_scale_is_no_overflow(tmp_path: Path) -> None:
    found = of_columns(tmp_path, scaled([0.4 if at < 6 or at % 3 == 0 else math.nan for at in range(30)]))
    assert "not finite whatever the loss scale: it is NaN in 16 of 30 steps" in found[0].claim
    assert "fp16" not in found[0].claim


def fading(reward: float) -> dict[str, Sequence[float]]:
    return {
        "step": steps(), "loss": waves(0.0, 0.01), "reward": waves(reward, 0.02),
        "grad_norm": [0.5 * math.exp(-at / 4) for at in range(N)],
    }  # fmt: skip


def test_a_gradient_that_fades_is_a_warning_where_the_reward_is_low(tmp_path: Path) -> None:
    assert "L51" in [one.id for one in of_columns(tmp_path, fading(0.4))]
    assert "L51" not in [one.id for one in of_columns(tmp_path, fading(0.97))]
    assert "L51" not in [
        one.id
        for one in of_columns(tmp_path, {**fading(0.4), "grad_norm": [0.5 * math.exp(-at / 30) for at in range(N)]})
    ]


@pytest.mark.parametrize("best", [0.5, 2.0])
def test_a_gradient_fades_where_a_reward_has_risen_to_its_best(best: float, tmp_path: Path) -> None:
    risen = [best * one for one in (min(0.04 * at, 0.95) + by for at, by in enumerate(waves(0.0, 0.02)))]
    assert "L51" not in [one.id for one in of_columns(tmp_path, {**fading(0.4), "reward": risen})]
    fallen = [best * math.exp(-at / 6) + 0.1 for at in range(N)]
    assert "L51" in [one.id for one in of_columns(tmp_path, {**fading(0.4), "reward": fallen})]


@pytest.mark.parametrize(("left", "told"), [(0.3, True), (0.9, False)])
def test_answers_that_can_no_longer_be_read(left: float, told: bool, tmp_path: Path) -> None:
    shares = [0.94 - (0.94 - left) * at / 7 for at in range(8)]
    columns = {"step": steps(8), "env/all/parse_success": shares, "env/all/reward/total": waves(0.1, 0.02, 8)}
    assert ("L41" in [one.id for one in of_columns(tmp_path, columns)]) == told


@pytest.mark.parametrize(
    ("name", "told"),
    [("rewards/format_reward", True), ("rewards/format", True),
     *((name, False) for name in (
         "rewards/format_penalty", "rewards/format_std", "rewards/format_error_rate", "rewards/format_violations",
         "rewards/wrong_format/mean", "rewards/missing_format", "train/format_failures", "valid_ratio", "valid_rate",
         "rollout/valid_frac", "tags_ratio"))],
)  # fmt: skip
def test_only_what_counts_answers_of_the_right_form_loses_it(name: str, told: bool, tmp_path: Path) -> None:
    columns = {"step": steps(8), name: [0.94 - 0.08 * at for at in range(8)], "reward": waves(0.1, 0.02, 8)}
    assert ("L41" in [one.id for one in of_columns(tmp_path, columns)]) == told


# Groups that are thrown away.


def drawing_again(thrown: int, up: float = 0.0, n: int = 120) -> str:
    lines = []
    for at, reward in enumerate(waves(0.35, 0.1, n, up), 1):
        if at <= thrown:
            lines.append(f"  [attempt {at}] SKIP (ALL_WRONG, rewards=[0.01, 0.01, 0.01, 0.01]) - resampling")
        lines.append(
            f"[step {at}/{n}] correct=2/4 rewards=['{reward + 0.1:.3f}', '{reward - 0.1:.3f}'] loss=0.00{at % 7 + 1}"
        )
    return "\n".join(lines) + "\n"


def test_groups_thrown_away_tell_why_a_reward_rests(tmp_path: Path) -> None:
    found = worrying(diagnosed(tmp_path, drawing_again(60)))
    assert {one.id for one in found} == {"L29", "L40"}
    assert any("60 groups without a spread" in str(one.evidence) for one in found)


@pytest.mark.parametrize(("thrown", "up"), [(10, 0.3), (60, 0.5)], ids=["few", "and the reward rises"])
def test_groups_thrown_away_beside_a_reward_that_rises_are_no_alarm(thrown: int, up: float, tmp_path: Path) -> None:
    assert not worrying(diagnosed(tmp_path, drawing_again(thrown, up)))


# What only looks wrong.


def test_a_kl_of_rounding_is_no_wrong_estimator(tmp_path: Path) -> None:
    tiny = trl([{"kl": -5e-6 - 1e-7 * at} for at in range(12)])
    assert not worrying(diagnosed(tmp_path, tiny))
    assert [one.id for one in worrying(diagnosed(tmp_path, trl([{"kl": -5e-3 - 1e-4 * at} for at in range(12)])))] == [
        "D29"
    ]


def of_windows(every: int, zeros: int) -> str:
    lines = [
        {"loss": 0.01 * (at % 3), "grad_norm": 0.0 if at < zeros else 0.05, "reward": 0.4 + 0.01 * at,
         "reward_std": 0.2,
         "kl": 0.001, "step": every * (at + 1)} for at in range(8)
    ]  # fmt: skip
    return "".join(f"{line}\n" for line in lines)


def test_a_norm_of_one_update_of_ten_says_little_of_the_other_nine(tmp_path: Path) -> None:
    assert not worrying(diagnosed(tmp_path, of_windows(10, 3)))
    assert [one.id for one in worrying(diagnosed(tmp_path, of_windows(1, 3)))] == ["D23"]
    assert [one.id for one in worrying(diagnosed(tmp_path, of_windows(10, 5)))] == ["D23"]


@pytest.mark.parametrize(("every", "alarms"), [(1, True), (10, False)])
def test_a_checkpoint_of_every_tenth_step_is_what_was_asked_for(every: int, alarms: bool, tmp_path: Path) -> None:
    steps_ = [
        {"timing_s/step": 60.0, "timing_s/save_checkpoint": 40.0 * every if at % every == 0 else None}
        for at in range(1, 121)
    ]
    assert ("D37" in [one.id for one in worrying(diagnosed(tmp_path, verl(steps_)))]) == alarms


@pytest.mark.parametrize(
    ("line", "alarms"),
    [("[n3:18984:0] knem_md.c:130  UCX  ERROR KNEM create region failed: Bad address", False),
     ("ERROR scorer: cannot fetch the reference of sample 3, taking the default", True)],
)  # fmt: skip
def test_a_transports_fallback_is_worth_knowing_and_no_alarm(line: str, alarms: bool, tmp_path: Path) -> None:
    text = "".join(f"{line}\n{row}\n" for row in trl([{}] * 30).splitlines())
    assert ("L29" in [one.id for one in worrying(diagnosed(tmp_path, text))]) == alarms
