"""A run that unlearns, an evaluation that is lost or at 0, a gradient that is a sum, a mismatch that grows: each at its
limit, and beside what a healthy run shows.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from replay_core.diagnose.finding import Finding
from tests.replay_core.diagnose.logs import Metrics, diagnosed, told, verl, worrying

N = 20
#: What wavers in a run that learns.
REWARDS = [0.42 + 0.02 * at + 0.05 * math.sin(7 * at) for at in range(N)]


def first(folder: Path, steps: list[Metrics]) -> Finding:
    return worrying(diagnosed(folder, verl(steps)))[0]


def severities(folder: Path, steps: list[Metrics]) -> dict[str, str]:
    return dict(told(diagnosed(folder, verl(steps))))


def paid(rewards: list[float], **more: list[float | None]) -> list[Metrics]:
    return [
        {"critic/score/mean": reward, "actor/grad_norm": 0.3 + 0.05 * math.sin(2 * at),
         "actor/entropy": 0.5 + 0.02 * math.sin(3 * at),
         "response_length/mean": 700.0 + 9 * math.sin(5 * at), **{name: each[at] for name, each in more.items()}}
        for at, reward in enumerate(rewards)
    ]  # fmt: skip


# ---- the reward is lost from the first update on


def test_a_reward_that_is_gone_within_the_first_updates_leads_before_what_follows(tmp_path: Path) -> None:
    lost = [0.47, 0.16, 0.02, *[0.0, 0.01] * 8]
    cut: list[float | None] = [0.0, 0.05, 0.2, *[0.93] * 16]
    found = first(tmp_path, paid(lost, **{"response_length/clip_ratio": cut}))
    assert (found.id, found.severity) == ("L36", "error")
    assert "0.47 to 0.02" in found.claim


@pytest.mark.parametrize(
    "rewards",
    [
        [0.47, 0.16, 0.02, 0.3, *[0.4] * 15],  # comes back
        [0.47, 0.40, 0.38, *[0.3, 0.33] * 8],  # falls, and is not lost
        [0.03, 0.02, 0.0, *[0.0, 0.001] * 8],  # a first answer that was right by chance
        [0.2, 0.25, 0.02, *[0.0, 0.01] * 8],  # does not fall from the first update on
        [0.5, 0.2, 0.01, 0.0, 0.01],  # too short
        REWARDS,
    ],
)  # fmt: skip
def test_a_reward_that_is_not_lost_at_once_is_none(rewards: list[float], tmp_path: Path) -> None:
    found = severities(tmp_path, paid(rewards))
    assert "L36" not in found


# ---- an evaluation at 0, or lost


def evaluated(
    values: list[float], name: str = "val-core/digits/acc/mean@1", rewards: list[float] = REWARDS
) -> list[Metrics]:
    every: list[float | None] = [values[at // 5] if at % 5 == 0 else None for at in range(len(rewards))]
    return paid(rewards, **{name: every})


def test_an_evaluation_at_0_beside_a_paid_training_is_a_warning(tmp_path: Path) -> None:
    found = first(tmp_path, evaluated([0.0] * 4))
    assert (found.id, found.severity) == ("L25", "warning")


def test_of_a_contest_it_is_worth_knowing_and_of_one_result_above_0_nothing(tmp_path: Path) -> None:
    assert severities(tmp_path, evaluated([0.0] * 4, "val-core/aime_2024/acc/mean@1")).get("L25") == "info"
    assert "L25" not in severities(tmp_path, evaluated([0.0, 0.0, 0.01, 0.0]))
    assert "L25" not in severities(tmp_path, evaluated([0.0] * 4, rewards=[each / 4 for each in REWARDS]))


def test_a_result_that_is_lost_while_the_reward_rises_is_an_error(tmp_path: Path) -> None:
    rising = [min(1.0, 0.46 + 0.04 * at) for at in range(N)]
    found = first(tmp_path, evaluated([0.8, 0.1, 0.0, 0.0], rewards=rising))
    assert (found.id, found.severity) == ("L20", "error")
    for well in ([0.8, 0.7, 0.66, 0.6], [0.1, 0.05, 0.0, 0.0], [0.8, 0.1, 0.5, 0.6], [0.4, 0.5, 0.6, 0.7]):
        assert severities(tmp_path, evaluated(well, rewards=rising)).get("L20") != "error"
    # A reward that falls with it is no reward that pays the opposite.
    falling = [1.0 - each for each in rising]
    assert "L20" not in severities(tmp_path, evaluated([0.8, 0.1, 0.0, 0.0], rewards=falling))


# ---- a gradient that is a sum over the batch


def normed(norm: float, length: float, **more: float) -> list[Metrics]:
    return [
        {**step, "actor/grad_norm": norm * (1 + 0.2 * (-1) ** at), "response_length/mean": length + at % 3,
         "response_length/max": 2 * length, **more}
        for at, step in enumerate(paid(REWARDS))
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("norm", "length", "more", "found"),
    [
        (245.0, 5.0, {}, True),
        (9000.0, 700.0, {}, True),
        (3000.0, 700.0, {}, False),  # summed over each response
        (30.0, 2.0, {}, False),  # large, and may be a rate's
        (0.4, 700.0, {}, False),
        (245.0, 5.0, {"critic/score/max": 40.0, "critic/rewards/max": 40.0}, False),  # rewards of that size
        (9000.0, 700.0, {"critic/vf_loss": 0.2}, False),
    ],
)
def test_a_norm_far_beyond_the_length_is_a_sum(
    norm: float, length: float, more: dict[str, float], found: bool, tmp_path: Path
) -> None:
    assert ("L37" in severities(tmp_path, normed(norm, length, **more))) is found


# ---- a mismatch that grows


def apart(values: list[float]) -> list[Metrics]:
    step = "rollout_corr/log_ppl_abs_diff"
    return [{**one, step: value} for one, value in zip(paid(REWARDS), values, strict=True)]


def test_engine_and_trainer_that_agree_at_first_and_part_are_told_to(tmp_path: Path) -> None:
    grows = [
        0.0027,
        0.045,
        0.15,
        0.13,
        0.14,
        0.19,
        0.17,
        0.15,
        0.26,
        0.26,
        0.26,
        0.24,
        0.37,
        0.23,
        0.38,
        0.29,
        0.24,
        0.22,
        0.21,
        0.19,
    ]
    assert "grows with the updates" in first(tmp_path, apart(grows)).claim
    steady = [0.2 + 0.02 * (-1) ** at for at in range(N)]
    assert "grows" not in first(tmp_path, apart(steady)).claim
