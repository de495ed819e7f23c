"""Pearson's correlation: what the field compares critics and log-probabilities by."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.floating[Any]]


def pearson(a: Values, b: Values) -> float | None:
    """Pearson's correlation over the elements finite on both sides; None where one of them does not vary."""
    both = np.isfinite(a) & np.isfinite(b)
    x, y = a[both], b[both]
    if x.size < 2:
        return None
    x, y = x - x.mean(), y - y.mean()
    scale = float(np.sqrt(np.einsum("i,i->", x, x)) * np.sqrt(np.einsum("i,i->", y, y)))
    return float(np.einsum("i,i->", x, y) / scale) if scale else None
