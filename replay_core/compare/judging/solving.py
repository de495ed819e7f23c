"""Where on a line least is left: what an explanation with one unknown is solved by."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from replay_core.compare.judging.products import Array

_STEPS = 24


def solved(left: Callable[[float], float], grid: Array) -> tuple[float, float]:
    """Where least is left, and how much: the best of a grid, and what is beside it by golden sections."""
    lefts = [left(float(one)) for one in grid]
    best = int(np.argmin(lefts))
    low, high = float(grid[max(best - 1, 0)]), float(grid[min(best + 1, len(grid) - 1)])
    golden = (math.sqrt(5) - 1) / 2
    one, other = high - golden * (high - low), low + golden * (high - low)
    of_one, of_other = left(one), left(other)
    for _ in range(_STEPS):
        if of_one < of_other:
            high, other, of_other = other, one, of_one
            one = high - golden * (high - low)
            of_one = left(one)
        else:
            low, one, of_one = one, other, of_other
            other = low + golden * (high - low)
            of_other = left(other)
    return (one, of_one) if of_one < of_other else (other, of_other)
