"""D92: log-probabilities that are another quantity than their name says, of the genuine healthy batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.replay_core.diagnose.batches import causes, healthy, masks, noise, of, seen

ROLLOUT, OLD, REF = "rollout_log_probs", "old_log_probs", "ref_log_prob"


def _inside(values: Any, mask: Any, made: Callable[[Any], Any]) -> Any:
    """What is made of each response's own values [T], zeros elsewhere."""
    out = np.zeros_like(values)
    for row in range(len(values)):
        out[row, mask[row]] = made(values[row, mask[row]])
    return out


def _moved(by: int) -> Callable[[Any], Any]:
    def made(values: Any) -> Any:
        out = np.zeros_like(values)
        if by > 0:
            out[by:] = values[:-by]
        else:
            out[:by] = values[-by:]
        return out

    return made


MADE: dict[str, Callable[[Any], Any]] = {
    "probabilities": np.exp,
    "negated": np.negative,
    "base 10": lambda values: values / np.log(10),
    "base 2": lambda values: values / np.log(2),
    "sum of all before": np.cumsum,
    "sum of all behind": lambda values: np.cumsum(values[::-1])[::-1],
    "mean over its tokens": lambda values: np.full_like(values, values.mean()),
    "sum over its tokens": lambda values: np.full_like(values, values.sum()),
    r"shifted by \+2": _moved(2),
    "shifted by -3": _moved(-3),
    "one number on all": lambda values: np.full_like(values, -1.5),
    "exactly 0 on all": np.zeros_like,
    "cut off below at -1": lambda values: np.maximum(values, -1.0),
}


@pytest.mark.parametrize("words", MADE)
def test_rollout_log_probabilities_are_named(words: str, tmp_path: Path) -> None:
    fields = healthy()
    fields[ROLLOUT] = _inside(fields[ROLLOUT], masks(fields), MADE[words]).astype(np.float32)
    (first, *rest) = causes(seen(tmp_path, fields))
    assert first.id == "D92"
    assert first.link == "rollout_logprobs"
    assert np.char.find(first.claim, words.replace("\\", "")) >= 0, first.claim
    assert not [one for one in rest if one.id in ("D08", "D09", "D10", "D11", "D12", "D16")]


@pytest.mark.parametrize("words", ["probabilities", "negated", "sum of all before", "shifted by -3"])
def test_the_odd_one_of_three_is_told(words: str, tmp_path: Path) -> None:
    fields = healthy()
    assert REF in fields
    fields[OLD] = _inside(fields[OLD], masks(fields), MADE[words]).astype(np.float32)
    found = of(seen(tmp_path, fields), "D92")
    assert found is not None
    assert found.claim.startswith("old log-probabilities are"), found.claim


def test_a_reference_in_other_rows(tmp_path: Path) -> None:
    fields = healthy()
    mask = masks(fields)
    moved = np.roll(fields[OLD] + noise(fields, 0.003), 1, 0)
    # Behind the end of a shorter row stands what it is filled up with.
    fields[REF] = (np.where(moved == 0, -0.7, moved) * mask).astype(np.float32)
    found = of(seen(tmp_path, fields), "D92")
    assert found is not None
    assert "reference log-probabilities are in the wrong rows" in found.claim
    assert found.link == "ref"


def test_a_reference_that_is_the_rollout(tmp_path: Path) -> None:
    fields = healthy()
    fields[REF] = fields[ROLLOUT].copy()
    found = of(seen(tmp_path, fields), "D92")
    assert found is not None
    assert "the engine's, to the last bit" in found.claim


@pytest.mark.parametrize("scale", [0.0, 0.01, 0.2])
def test_noise_is_no_transform(scale: float, tmp_path: Path) -> None:
    fields = healthy()
    fields[ROLLOUT] = (fields[ROLLOUT] + noise(fields, scale)).astype(np.float32)
    assert of(seen(tmp_path, fields), "D92") is None


@pytest.mark.parametrize("gain", [0.6, 1.5])
def test_a_temperature_is_no_factor(gain: float, tmp_path: Path) -> None:
    """Of two tokens: p^(1/T) is normalised again."""
    fields = healthy()
    mask = masks(fields)
    p = np.exp(np.minimum(fields[OLD].astype(np.float64), -1e-6))
    a, b = p ** (1 / gain), (1 - p) ** (1 / gain)
    fields[ROLLOUT] = (np.log(a / (a + b)) * mask).astype(np.float32)
    diagnosis = seen(tmp_path, fields)
    assert of(diagnosis, "D92") is None
    assert of(diagnosis, "D10") is not None
