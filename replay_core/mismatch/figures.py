"""Figures of what is between two sides' log-probabilities of the same tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

Array = NDArray[Any]


class GapSize(Struct, frozen=True):
    """Figures of d, nats: mean, 99th percentile and largest |d|, k3 = mean(e^d - d - 1), mean e^|d| (NeMo-RL's
    token_mult_prob_error). Of no tokens all are NaN."""

    tokens: int
    mean: float
    p99: float
    largest: float
    k3: float
    multiplier: float

    @classmethod
    def of(cls, d_M: Array) -> GapSize:
        """Of the finite values."""
        d_M = d_M[np.isfinite(d_M)]
        if not d_M.size:
            return cls(0, *[float("nan")] * 5)
        size_M, bounded_M = np.abs(d_M), np.clip(d_M, -50, 50)
        return cls(
            int(d_M.size), float(size_M.mean()), float(np.quantile(size_M, 0.99)), float(size_M.max()),
            float((np.expm1(bounded_M) - bounded_M).mean()), float(np.exp(np.abs(bounded_M)).mean()),
        )  # fmt: skip


def share_explained(before: float, left: float, floor_before: float, floor_left: float) -> float:
    """What goes of a gap above the floor: 1 - (left - floor)+ / (before - floor)+, each with the floor of the settings
    that it was made under. Below 0 where the gap grows; 0 where nothing was above the floor.
    """
    above = max(0.0, before - floor_before)
    return 1.0 - max(0.0, left - floor_left) / above if above > 0 else 0.0


def tokens_explained(d_M: Array, left_M: Array, floor: float) -> float:
    """Of the tokens off by more than the floor, the share that is off by less than half of it afterwards."""
    off_M = np.abs(d_M) > max(floor, 1e-6)
    if not off_M.any():
        return 0.0
    return float((np.abs(left_M[off_M]) < np.maximum(np.abs(d_M[off_M]) / 2, floor)).mean())
