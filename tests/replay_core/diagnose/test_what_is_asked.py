"""Which prompts a log tells that its run asks: the same in every step, and those of its validation."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from replay_core.diagnose.finding import Diagnosis
from tests.replay_core.diagnose.logs import diagnosed, verl, worrying


def asked(mean: float, longest: float | None = 222.0, *, wavers: float = 0.0, steps: int = 20) -> str:
    draw = random.Random(2)
    return verl(
        [
            {"critic/score/mean": 0.3 + 0.01 * step + draw.random() / 20,
             "response_length/mean": draw.uniform(700, 900),
             "actor/grad_norm": draw.uniform(0.2, 0.3), "prompt_length/mean": mean + wavers * draw.random(),
             "prompt_length/max": longest, "prompt_length/min": 58.0 if longest else None}
            for step in range(steps)
        ]
    )  # fmt: skip


def ids(diagnosis: Diagnosis) -> list[str]:
    return [one.id for one in worrying(diagnosis)]


@pytest.mark.parametrize(("mean", "longest"), [(146.0, 222.0), (146.375, None)])
def test_prompts_of_one_length_in_every_step_are_the_same_ones(
    mean: float, longest: float | None, tmp_path: Path
) -> None:
    found = diagnosed(tmp_path, asked(mean, longest)).findings[0]
    assert (found.id, found.severity, len(found.steps)) == ("L61", "warning", 20)


def test_prompts_that_waver_or_are_padded_to_one_width_are_others(tmp_path: Path) -> None:
    assert ids(diagnosed(tmp_path, asked(146.0, wavers=9.0))) == []
    assert ids(diagnosed(tmp_path, asked(512.0, None))) == []
    assert ids(diagnosed(tmp_path, asked(58.0, 58.0))) == []
    assert ids(diagnosed(tmp_path, asked(146.0, steps=6))) == []


def files(trained: str, held_out: str) -> str:
    said = f"(TaskRunner pid=7)  'data': {{'train_files': {trained},\n(TaskRunner pid=7)  'val_files': {held_out}}}\n"
    return said + asked(146.0, wavers=9.0)


def test_a_validation_on_the_file_that_is_trained_on_is_told(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, files("'/data/math.parquet'", "'/data/math.parquet'")).findings[0]
    assert (found.id, found.severity) == ("D126", "warning")
    assert "/data/math.parquet" in found.claim


@pytest.mark.parametrize(
    ("trained", "held_out"),
    [("'/data/train.parquet'", "'/data/test.parquet'"), ("'openai/gsm8k'", "'openai/gsm8k'"), ("None", "None")],
)
def test_other_files_and_a_data_set_by_its_name_are_nothing(trained: str, held_out: str, tmp_path: Path) -> None:
    assert ids(diagnosed(tmp_path, files(trained, held_out))) == []
