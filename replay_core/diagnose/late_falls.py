"""A reward that was well for most of the run and falls at its end below all that it ever was: medians of the run's
first and last third hide it, as what rose before stands in the same third.

    fall = late_fall(series)
    fall.begun, fall.now, fall.peak       # levels, and the place where it was best
"""

from __future__ import annotations

import math
from statistics import median

from msgspec import Struct

from replay_core.diagnose import trends
from replay_core.diagnose.signals import Point, Series

#: Values before it is judged; a level is the median of so many, the run's twentieth at the least.
FEWEST, LEVEL, PARTS = 40, 8, 20
#: How far below the beginning it ends: of the beginning's noise, and what part of it is left at most.
SIGMAS, LEFT = 4.0, 0.75
#: The rank test's normal quantile from the best on.
SURELY = 4.0


class LateFall(Struct, frozen=True):
    """The level at first, at its best and now, and the last point at the best."""

    begun: float
    best: float
    now: float
    since: Point


def late_fall(series: Series) -> LateFall | None:
    """The fall, or None: where the run ends no lower than it began, by more than it wavers and a quarter of it, or not
    steadily from its best on.
    """
    points = [point for point in series.points if math.isfinite(point.value)]
    values = [point.value for point in points]
    if len(values) < FEWEST:
        return None
    width = max(LEVEL, len(values) // PARTS)
    begun, sigma = trends.spread(values[: len(values) // 3])
    now = median(values[-width:])
    levels = [median(values[at : at + width]) for at in range(len(values) - width + 1)]
    best = max(range(len(levels)), key=levels.__getitem__)
    at = best + width - 1
    if best < len(values) // 3 or begun - now <= SIGMAS * sigma or (begun > 0 and now > LEFT * begun):
        return None
    if now > min(levels[: best + 1]) or trends.drift(values[at:]) > -SURELY:
        return None
    return LateFall(begun, levels[best], now, points[at])
