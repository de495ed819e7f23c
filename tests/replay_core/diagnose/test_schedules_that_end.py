"""Learning rates that end before the run, or do not fall as is stated."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.replay_core.diagnose.logs import diagnosed, trl

STATED = "max_steps: 100\nlr_scheduler_type: cosine\n"


def _cosine(step: int, over: int, warm: int = 0) -> float:
    if step < warm:
        return 1e-6 * step / warm
    return 0.5e-6 * (1 + math.cos(math.pi * min(1.0, (step - warm) / (over - warm))))


def _claims(folder: Path, rates: list[float], head: str = STATED) -> list[str]:
    text = head + trl([{"learning_rate": rate, "reward": 0.4 + 0.001 * at} for at, rate in enumerate(rates)])
    return [one.claim for one in diagnosed(folder, text).findings if one.id == "L07" and one.severity != "info"]


def test_a_schedule_that_ends_before_the_run(tmp_path: Path) -> None:
    (claim,) = _claims(tmp_path, [_cosine(step, 90, 10) if step < 90 else 0.0 for step in range(100)])
    assert "ends before the run: it is 0 from step" in claim
    assert "the last 10 of the 100 steps" in claim


def test_a_schedule_of_another_length(tmp_path: Path) -> None:
    (claim,) = _claims(tmp_path, [_cosine(step, 1000) for step in range(100)])
    assert "a cosine schedule over 100 steps is stated" in claim


@pytest.mark.parametrize(
    ("rates", "head"),
    [
        ([_cosine(step, 100, 10) for step in range(101)], STATED),
        ([_cosine(step, 1000) for step in range(100)], "max_steps: 1000\nlr_scheduler_type: cosine\n"),
        ([1e-6] * 100, "max_steps: 100\nlr_scheduler_type: constant\n"),
        ([_cosine(step, 1000) for step in range(100)], STATED + "min_lr_ratio: 0.9\n"),
        ([_cosine(step, 100) for step in range(40)], STATED),
        ([_cosine(step, 1000) for step in range(100)], STATED + "lr_decay_iters: 1000\n"),
        ([_cosine(2 * (step % 50), 100) for step in range(99)] + [1e-6], STATED + "num_cycles: 2\n"),
        ([min(1.0, step / 10) * 1e-6 for step in range(100)], "max_steps: 100\nwarmup_style: linear\n"),
    ],
)
def test_schedules_that_are_as_stated(rates: list[float], head: str, tmp_path: Path) -> None:
    assert not _claims(tmp_path, rates, head)


@pytest.mark.parametrize("head", ["max_steps: 100\nwarmup_style: cosine\n", STATED + "num_cycles: 0.5\n"])
def test_a_schedule_of_another_length_in_other_words(head: str, tmp_path: Path) -> None:
    (claim,) = _claims(tmp_path, [_cosine(step, 1000) for step in range(100)], head)
    assert "a cosine schedule over 100 steps is stated" in claim
