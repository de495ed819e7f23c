"""What a log's figures are cited as, and what of them is no fault: rounded, switched off, right, at rest."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from replay_core.diagnose.signals import Point, Series
from tests.replay_core.diagnose.logs import Metrics, diagnosed, diagnosed_path, only, trl, verl, worrying, written


def _series(*values: float) -> Series:
    points = (Point(step, value, line=10 * step) for step, value in enumerate(values, 1))
    return Series("reward", "reward", None, "", tuple(points))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (7.0, "reward, line 60"),
        (22 / 6, "reward, mean of steps 1-6"),
        (5.0, "reward, median of steps 4-6"),
        (2.0, "reward, median of steps 1-3"),
        (0.123, "reward, of steps 1-6"),
    ],
)
def test_a_figure_of_several_steps_is_no_line_of_the_log(value: float, said: str) -> None:
    shown = _series(1.0, 2.0, 4.0, 3.0, 5.0, 7.0).shown(value)
    assert (shown.value, shown.source) == (value, said)


def test_a_figure_that_stands_in_another_line_is_cited_there() -> None:
    assert _series(1.0, 9.5, 4.0, 3.0, 4.25, 7.0).shown(9.5).source == "reward, line 20"


def _json(folder: Path, steps: list[Metrics]) -> Path:
    return written(
        folder, "".join(json.dumps({"step": n, **each}) + "\n" for n, each in enumerate(steps, 1)), "m.jsonl"
    )


@pytest.mark.parametrize("learns", [True, False])
def test_answers_that_get_shorter_as_they_get_right_are_no_length_hacking(learns: bool, tmp_path: Path) -> None:
    draw = random.Random(1)
    steps: list[Metrics] = []
    for n in range(80):
        length = 500 - 2.5 * n + draw.gauss(0, 60)
        right = 0.5 + (0.005 * n if learns else 0.0) + draw.gauss(0, 0.04)
        steps.append({"reward": 1.5 - length / 500, "accuracy": right, "avg_gen_tokens": length, "loss": draw.random()})
    found = [one.id for one in worrying(diagnosed_path(_json(tmp_path, steps)))]
    assert ("L32" in found) is not learns


@pytest.mark.parametrize(("printed", "speaks"), [("0.000", False), ("0.0", True)])
def test_a_learning_rate_that_is_rounded_is_no_0_beside_a_progress_bar(
    printed: str, speaks: bool, tmp_path: Path
) -> None:
    draw = random.Random(2)
    text = "Loading: 0%\rLoading: 50%\rLoading: 100%\n" + "".join(
        f"step:{n} - actor/lr:{printed} - actor/grad_norm:{0.4 + draw.random():.6f} - critic/score/mean:"
        f"{0.1 + 0.02 * n + draw.random() / 50:.6f}\n" for n in range(1, 20)
    )  # fmt: skip
    assert ("L07" in [one.id for one in worrying(diagnosed(tmp_path, text))]) is speaks


_OFF = "{'actor': {'use_kl_loss': False, 'kl_loss_coef': 0.001}}\n"


@pytest.mark.parametrize(("head", "coefficient", "said"), [(_OFF, None, []), ("", 0.0, []), ("", 0.1, ["D113", "D46"])])
def test_a_kl_that_is_off_is_0(head: str, coefficient: float | None, said: list[str], tmp_path: Path) -> None:
    draw = random.Random(3)
    steps = [
        {
            "critic/score/mean": 0.2 + 0.02 * n + draw.gauss(0, 0.02), "actor/kl_loss": 0.0,
            "response_length/mean": 90 + draw.gauss(0, 3), "actor/grad_norm": 0.4 + draw.gauss(0, 0.03),
            "actor/kl_coef": coefficient,
        } for n in range(30)
    ]  # fmt: skip
    found = {one.id for one in diagnosed(tmp_path, head + verl(steps)).findings if one.severity != "info"}
    assert sorted(found & {"D46", "D113"}) == sorted(said)


@pytest.mark.parametrize(("gain", "severity"), [(0.008, "info"), (0.0, "warning")])
def test_entropy_that_falls_while_the_reward_gains_is_worth_knowing(gain: float, severity: str, tmp_path: Path) -> None:
    draw = random.Random(5)
    steps = [
        {"actor/entropy": 0.55 * math.exp(-0.06 * n) * (1 + draw.gauss(0, 0.1)),
         "critic/score/mean": 0.5 + gain * n + draw.gauss(0, 0.13)} for n in range(32)
    ]  # fmt: skip
    found = [one for one in diagnosed(tmp_path, verl(steps)).findings if "entropy has fallen" in one.claim]
    assert [one.severity for one in found] == [severity]


@pytest.mark.parametrize(("end", "severity"), [(0.22, "info"), (0.12, "warning")])
def test_a_critic_that_came_to_the_mean_of_its_returns_is_updated(end: float, severity: str, tmp_path: Path) -> None:
    draw = random.Random(4)
    steps = [
        {
            "critic/values/mean": end * (1 - math.exp(-n / 3)), "critic/returns/mean": 0.22 + draw.gauss(0, 0.05),
            "critic/vf_explained_var": draw.gauss(-0.02, 0.03), "critic/vf_loss": 0.035 + draw.gauss(0, 0.004),
            "critic/score/mean": 0.22 + draw.gauss(0, 0.05),
        } for n in range(32)
    ]  # fmt: skip
    assert only(diagnosed(tmp_path, verl(steps)), "D45").severity == severity


@pytest.mark.parametrize(("slower", "severity"), [(0.0, "info"), (1.5, "warning")])
def test_an_allocator_that_flushes_is_a_warning_where_steps_get_slower(
    slower: float, severity: str, tmp_path: Path
) -> None:
    line = "[WARNING] [stage3.py:2069:step] 2 pytorch allocator cache flushes since last step. this happens when\n"
    draw = random.Random(6)
    text = "".join(trl([{"step_time": 20 + slower * n + draw.random()}], n) + line for n in range(1, 16))
    assert only(diagnosed(tmp_path, text), "L29").severity == severity


def test_an_expectation_is_one_that_is_not_met(tmp_path: Path) -> None:
    draw = random.Random(8)
    steps: list[Metrics] = [
        {"reward": -0.25 + 0.00006 * n + draw.gauss(0, 0.25), "kl": 0.002 + draw.random() / 1e4, "loss": draw.random()}
        for n in range(400)
    ]
    (found,) = (one for one in worrying(diagnosed_path(_json(tmp_path, steps))) if "does not rise" in one.claim)
    shown = found.evidence[0]
    assert isinstance(shown.value, float)
    assert shown.value <= float((shown.expected or "").removeprefix("> "))


def test_an_age_that_climbs_is_told_from_where_it_begins(tmp_path: Path) -> None:
    draw = random.Random(9)
    steps: list[Metrics] = [
        {"staleness": max(0.0, n - 12.0), "reward": draw.random(), "loss": draw.gauss(0, 0.1)} for n in range(1, 33)
    ]
    found = only(diagnosed_path(_json(tmp_path, steps)), "D31")
    assert found.where.step == found.steps[0] == 13


@pytest.mark.parametrize(("times", "said"), [(3.5, True), (1.6, False)])
def test_a_spread_of_rewards_that_leaps_is_told(times: float, said: bool, tmp_path: Path) -> None:
    draw = random.Random(10)
    steps: list[Metrics] = [
        {"reward": 0.5 + 0.008 * n + draw.gauss(0, 0.06), "loss": draw.gauss(0, 0.01),
         "grad_norm": 0.3 + draw.random() / 9,
         "reward_std": (0.27 + draw.gauss(0, 0.015)) * (times if n >= 20 else 1)} for n in range(32)
    ]  # fmt: skip
    found = [one for one in worrying(diagnosed_path(_json(tmp_path, steps))) if one.id == "L19"]
    assert [one.where.step for one in found] == ([21] if said else [])


def test_weights_that_shrink_leave_a_uniform_policy_not_a_turned_sign(tmp_path: Path) -> None:
    draw = random.Random(11)
    steps = [
        {
            "critic/score/mean": 0.49 * 0.4**n + 0.02 * draw.random(), "actor/grad_norm": 0.8 * 0.8**n,
            "actor/entropy": 3.2581 - 2.1 * 0.4**n, "response_length/mean": 8 + draw.random(),
            "actor/pg_loss": draw.gauss(0, 0.04), "critic/score/max": None, "critic/score/min": None,
        } for n in range(32)
    ]  # fmt: skip
    first, *rest = worrying(diagnosed(tmp_path, verl(steps)))
    assert first.id == "L36"
    assert "becomes uniform" in first.claim
    assert "weight decay" in first.cause
    assert "L18" not in [one.id for one in rest]


@pytest.mark.parametrize("shuffled", [False, True])
def test_a_sentinel_of_a_judge_that_failed_is_no_other_order(shuffled: bool, tmp_path: Path) -> None:
    draw = random.Random(12)
    for step in range(1, 7):
        rows: list[dict[str, object]] = []
        for prompt in range(4):
            answers = draw.choices(("a", "b", "c"), k=6)
            rows += [
                {
                    "input": f"prompt {prompt}",
                    "output": each,
                    "score": {"a": 1.0, "b": 0.5, "c": 0.0}[each],
                    "step": step,
                }
                for each in answers
            ]
        scores = [-1.0 if draw.random() < 0.33 else row["score"] for row in rows]
        if shuffled:
            draw.shuffle(scores)
        lines = [json.dumps(row | {"score": score}) for row, score in zip(rows, scores, strict=True)]
        written(tmp_path, "\n".join(lines) + "\n", f"{step}.jsonl")
    assert ("-1" in only(diagnosed_path(tmp_path), "D56").claim) is not shuffled
