"""The norm of the weights: one that stands although it would show the updates, and one that is too coarse to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from replay_core.diagnose.finding import Diagnosis
from tests.replay_core.diagnose.batches import of
from tests.replay_core.diagnose.logs import diagnosed_path, written


def _log(steps: int, rate: float | None, norm: float, moves: float = 0.0, gradient: float = 0.4) -> str:
    rows = []
    for at in range(steps):
        row = {
            "step": at,
            "actor/pg_loss": 0.01 * (-1) ** at,
            "actor/grad_norm": gradient,
            "param_norm": norm + moves * at,
        }
        rows.append(row if rate is None else row | {"actor/lr": rate})
    return "\n".join(map(json.dumps, rows))


def _seen(folder: Path, text: str) -> Diagnosis:
    return diagnosed_path(written(folder, text, "metrics.jsonl"))


@pytest.mark.parametrize("rate", [6e-3, 1e-4])
def test_a_norm_that_stands_in_spite_of_updates_is_told(rate: float, tmp_path: Path) -> None:
    found = of(_seen(tmp_path, _log(3, rate, 55.96400146)), "D57")
    assert found is not None
    assert found.severity == "warning"
    assert "no weight changes" in found.claim


@pytest.mark.parametrize(
    ("rate", "norm", "moves", "gradient"),
    [
        (1e-6, 731.2501831, 0.0, 0.4),  # float32 tells 6e-5 there
        (1e-4, 731.25, 0.0, 0.4),  # printed with two decimals
        (1e-3, 55.96400146, 1e-4, 0.4),
        (1e-3, 55.96400146, 0.0, 0.0),  # no gradient: nothing to be moved by
        (0.0, 55.96400146, 0.0, 0.4),
    ],
    ids=["too large for float32", "too few digits", "it moves", "no gradient", "no rate"],
)
def test_a_norm_that_cannot_show_it_says_nothing(
    rate: float, norm: float, moves: float, gradient: float, tmp_path: Path
) -> None:
    assert of(_seen(tmp_path, _log(20, rate, norm, moves, gradient)), "D57") is None


def test_without_a_learning_rate_it_is_worth_knowing(tmp_path: Path) -> None:
    found = of(_seen(tmp_path, _log(12, None, 731.25)), "D57")
    assert found is not None
    assert found.severity == "info"
