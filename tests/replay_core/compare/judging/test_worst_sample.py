"""The mean over the tokens of the worst sample is of samples that have a mean; where none has, nobody asks for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from replay_core.compare.judging import limits
from replay_core.compare.judging.measuring import _worst_sample


def worst(tokens: list[int], exp_abs: list[float]) -> tuple[int, float] | None:
    """Of samples of so many tokens, each off by so much."""
    samples = np.repeat(np.arange(len(tokens)), tokens)
    counted = SimpleNamespace(rows=SimpleNamespace(width=1, exp_abs=np.repeat(np.array(exp_abs), tokens)))
    return _worst_sample(cast(Any, SimpleNamespace(samples=lambda: samples)), cast(Any, counted))


def test_samples_too_short_for_a_mean_have_none() -> None:
    assert worst([3, 5], [1.5, 1.2]) is None


def test_a_short_sample_is_never_the_worst() -> None:
    assert worst([3, limits.SAMPLE_TOKENS], [9.0, 1.0]) == (1, 1.0)
