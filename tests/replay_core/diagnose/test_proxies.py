"""Rewards that pay for something else than right answers, and reward models that tell nothing apart."""

from __future__ import annotations

import json
import random
from pathlib import Path

from tests.replay_core.diagnose.logs import diagnosed, diagnosed_path, told, worrying, written


def _lines(folder: Path, pairs: list[tuple[float, float]]) -> Path:
    rows = [{"step": n, "reward/mean": paid, "reward/correctness": right} for n, (paid, right) in enumerate(pairs)]
    return written(folder, "".join(json.dumps(row) + "\n" for row in rows), "metrics.jsonl")


def test_a_reward_that_is_earned_without_a_right_answer_is_a_proxy(tmp_path: Path) -> None:
    found = diagnosed_path(_lines(tmp_path, [(0.2 + 0.01 * n, 0.001 + 0.0001 * (n % 3)) for n in range(40)]))
    assert told(found)[0] == ("L45", "warning")


def test_so_is_one_that_is_full_from_the_beginning(tmp_path: Path) -> None:
    found = diagnosed_path(_lines(tmp_path, [(1.0, 0.025)] * 6))
    assert told(found)[0] == ("L45", "warning")


def test_answers_that_get_right_as_they_are_paid_are_well(tmp_path: Path) -> None:
    found = diagnosed_path(_lines(tmp_path, [(0.2 + 0.01 * n, 0.01 + 0.01 * n) for n in range(40)]))
    assert "L45" not in [id for id, _ in told(found)]


def _scored(pairs: list[tuple[float, float, float]], per_epoch: int = 30) -> str:
    return "[2026-02-03 10:00:00,1] [INFO] training\n" + "".join(
        f"Epoch {n // per_epoch}, Loss: {loss}, Positive Score: {a}, Negative Score: {b}\n"
        for n, (loss, a, b) in enumerate(pairs)
    )


def test_a_head_that_gives_one_number_is_said_to(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, _scored([(2.0, 0.0, 0.0)] * 12, per_epoch=6))
    assert told(found)[0] == ("L46", "error")


def test_scores_like_a_coins_are_told_and_those_that_are_learnt_are_not(tmp_path: Path) -> None:
    draw = random.Random(3)
    coin = [(0.69 + 0.02 * draw.random(), draw.gauss(0, 1), draw.gauss(0, 1)) for _ in range(200)]
    assert ("L46", "warning") in told(diagnosed(tmp_path, _scored(coin)))
    learnt = [(0.69 / (1 + n / 40), draw.gauss(n / 40, 1), draw.gauss(-n / 40, 1)) for n in range(200)]
    assert "L46" not in [one.id for one in worrying(diagnosed(tmp_path, _scored(learnt)))]
