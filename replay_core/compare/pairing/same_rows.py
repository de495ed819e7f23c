"""Rows that are the other run's in another order."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

#: How far rows may be from those they are paired with: of their norm, and of how far those in their place are.
_NEAR, _OF_PLACE = 0.05, 0.1


def same_rows(there_ND: NDArray[np.float64], here_ND: NDArray[np.float64]) -> NDArray[np.intp] | None:
    """Which row of `here` each row of `there` is; None where each is in its place, or they are other rows."""
    if there_ND.shape != here_ND.shape or not np.isfinite(there_ND).all() or not np.isfinite(here_ND).all():
        return None
    size, apart = float(np.linalg.norm(there_ND)), float(np.linalg.norm(here_ND - there_ND))
    if not size or apart <= _NEAR * size:
        return None
    square_N, square_M = (np.square(one).sum(1) for one in (there_ND, here_ND))
    cost_NM = square_N[:, None] - 2 * there_ND @ here_ND.T + square_M[None]
    order_N = cost_NM.argmin(1)
    if len(np.unique(order_N)) < len(order_N):  # rows that are alike
        from scipy.optimize import linear_sum_assignment

        order_N = linear_sum_assignment(cost_NM)[1]
    off = float(np.linalg.norm(here_ND[order_N] - there_ND))
    return np.asarray(order_N) if off <= min(_NEAR * size, _OF_PLACE * apart) else None
