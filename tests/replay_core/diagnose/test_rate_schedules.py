"""Learning rates beside the schedule that a run states: warm-ups, least rates, and rates that are to stay."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.replay_core.diagnose.logs import diagnosed, trl

Rate = Callable[[int], float]
HEAD = "learning_rate: 1e-6\nmax_steps: 60\n"
COSINE = f"{HEAD}lr_scheduler_type: cosine\nwarmup_steps: 20\n"
CONSTANT = f"{HEAD}lr_scheduler_type: constant_with_warmup\nwarmup_steps: 20\n"


def _cosine(warm: float, least: float = 0.0, late: int = 1) -> Rate:
    def rate(step: int) -> float:
        if step + late < warm:
            return 1e-6 * (step + late) / warm
        return 1e-6 * (least + (1 - least) * 0.5 * (1 + math.cos(math.pi * (step + late - warm) / max(60 - warm, 1))))

    return rate


def _told(folder: Path, rate: Rate, head: str, *, steps: int = 60, every: int = 1) -> list[str]:
    lines = [{"learning_rate": rate(step), "reward": 0.4 + 0.001 * step} for step in range(0, steps, every)]
    found = diagnosed(folder, head + trl(lines)).findings
    return [one.claim for one in found if one.id == "D144" and one.severity == "warning"]


@pytest.mark.parametrize(
    ("rate", "head", "words"),
    [
        (_cosine(1), COSINE, "at its largest from the first step on"),
        (_cosine(640), COSINE, "rises as if it took 640: 32 times as many"),
        (_cosine(640, late=0), COSINE, "rises as if it took 640"),
        (_cosine(20), COSINE + "min_lr_ratio: 0.1\n", "not to fall below 1e-07"),
        (_cosine(20), CONSTANT, "a constant with warmup learning rate is stated, and it falls"),
    ],
)
def test_a_rate_that_leaves_its_schedule_is_told(rate: Rate, head: str, words: str, tmp_path: Path) -> None:
    (claim,) = _told(tmp_path, rate, head)
    assert words in claim


@pytest.mark.parametrize(
    ("rate", "head"),
    [
        (_cosine(20), COSINE),
        (_cosine(20, late=0), COSINE),
        (_cosine(5), COSINE),
        (_cosine(20, least=0.1), COSINE + "min_lr_ratio: 0.1\n"),
        (_cosine(20, least=0.1), COSINE + "min_lr: 1e-7\n"),
        (lambda step: min(1e-6, 1e-6 * (step + 1) / 20), CONSTANT),
        (lambda step: 1e-6, HEAD),
        (_cosine(1), HEAD),
        (_cosine(40), COSINE.replace("20", "-1") + "lr_warmup_steps_ratio: 0.5\n"),
        (_cosine(40), COSINE.replace("20", "-1")),
        (_cosine(40), COSINE.replace("20", "10") + "warmup_ratio: 0.5\n"),
        (lambda step: 1e-6 if step < 40 else 5e-7, CONSTANT.replace("20", "2")),
        (lambda step: min(1.0, (step + 1) / 20) * 5e-7, COSINE),
    ],
)
def test_a_rate_as_it_is_stated_is_nothing(rate: Rate, head: str, tmp_path: Path) -> None:
    assert _told(tmp_path, rate, head) == []


CRITIC = "max_steps: 60\nactor.optim.lr: 1e-6\ncritic.optim.lr: 1e-5\n"
OF_TABLES = (
    "(TaskRunner pid=8) {'actor_rollout_ref': {'actor': {'optim': {'lr': 1e-06}}},\n"
    "(TaskRunner pid=8)  'critic': {'optim': {'lr': 1e-05,\n(TaskRunner pid=8)                       "
    "'lr_warmup_steps': 20}},\n(TaskRunner pid=8)  'trainer': {'total_training_steps': 60}}\n"
)


@pytest.mark.parametrize(
    ("rate", "head"),
    [
        (lambda step: 1e-6, CRITIC + "critic.optim.lr_warmup_steps: 20\n"),
        (lambda step: 1e-6, OF_TABLES),
        (_cosine(1), CRITIC + "critic.optim.lr_scheduler_type: constant\n"),
        (_cosine(1), CRITIC + "critic.optim.min_lr: 5e-7\n"),
        (lambda step: 1e-6 * (step + 1) / 100, CRITIC + "lr_warmup_steps: 100\n"),
    ],
)
def test_a_critics_schedule_is_none_of_the_policys(rate: Rate, head: str, tmp_path: Path) -> None:
    assert _told(tmp_path, rate, head) == []


def test_a_warm_up_of_another_parts_rate_is_as_stated(tmp_path: Path) -> None:
    head = "lr: 1e-5\nvision_lr: 1e-6\nwarmup_steps: 100\nmax_steps: 500\n"
    assert _told(tmp_path, lambda step: 1e-6 * (step + 1) / 100, head) == []


def test_lines_of_micro_batches_are_no_steps_of_the_schedule(tmp_path: Path) -> None:
    head = "learning_rate: 1e-6\nwarmup_steps: 100\nmax_steps: 500\n"
    assert _told(tmp_path, lambda step: 1e-6 * (step // 4 + 1) / 100, head, steps=300) == []


def test_lines_of_every_tenth_step_are_no_beginning(tmp_path: Path) -> None:
    assert _told(tmp_path, _cosine(10), COSINE.replace("60", "600"), steps=600, every=10) == []
    assert _told(tmp_path, lambda step: 1e-6, CONSTANT.replace("60", "600"), steps=600, every=20) == []
