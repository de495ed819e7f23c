"""Which token a value is about, read from the data: the lag at which two log-probability rows agree best.

Frameworks put the value of token t at index t, or at t - 1; one changes it between two dumps of one key. Where a
name does not settle it, another tensor of the same samples does: the right lag correlates near 1, the others
near 0 (measured: 0.03 against 1.000).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

LAGS = (-1, 0, 1)
#: The best lag has to stand out: by its own height, and above the next.
CLEAR = 0.9
MARGIN = 0.3
#: Pairs of values below which a correlation says nothing.
FEWEST = 8

Row = NDArray[np.floating[Any]]


class Lag(Struct, frozen=True):
    """`b[t + lag]` faces `a[t]`. `settled` is False where no lag stands out; `correlations` are by lag."""

    lag: int
    settled: bool
    correlations: dict[int, float]

    @property
    def sentence(self) -> str:
        figures = ", ".join(f"{lag:+d}: {value:.3f}" for lag, value in self.correlations.items())
        if not self.settled:
            return f"alignment not settled by the data (correlation by lag {figures})"
        return f"alignment detected: lag {self.lag:+d} (correlation by lag {figures})"


def detect_lag(rows_a: Sequence[Row], rows_b: Sequence[Row], lags: Sequence[int] = LAGS) -> Lag:
    """The lag between two tensors' rows, sample by sample; what is not finite is left out.

    Args:
        rows_a: a row of values per sample.
        rows_b: the same samples' rows, which may be shifted against them.
    """
    figures = {lag: _correlation(rows_a, rows_b, lag) for lag in lags}
    known = {lag: value for lag, value in figures.items() if np.isfinite(value)}
    if not known:
        return Lag(0, False, figures)
    best = max(known, key=lambda lag: known[lag])
    others = [value for lag, value in known.items() if lag != best]
    settled = known[best] > CLEAR and (not others or known[best] > max(others) + MARGIN)
    return Lag(best if settled else 0, settled, figures)


def _correlation(rows_a: Sequence[Row], rows_b: Sequence[Row], lag: int) -> float:
    left, right = [], []
    for a, b in zip(rows_a, rows_b, strict=False):
        start, end = max(0, -lag), min(a.size, b.size - lag)
        if end > start:
            left.append(np.asarray(a[start:end], dtype=np.float64))
            right.append(np.asarray(b[start + lag : end + lag], dtype=np.float64))
    if not left:
        return float("nan")
    x, y = np.concatenate(left), np.concatenate(right)
    finite = np.isfinite(x) & np.isfinite(y)
    x, y = x[finite], y[finite]
    if x.size < FEWEST or x.std() == 0 or y.std() == 0:
        return float("nan")
    return float(np.corrcoef(x, y)[0, 1])
