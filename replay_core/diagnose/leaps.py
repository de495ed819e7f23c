"""One place at which a series leaps from a level to another and stays there: what an update cannot do to a policy, and
a judge, a data set, a setting or a server does.

    leap = leap_in(series)
    leap.at, leap.before, leap.after
    with_it(log, leap)                     # the other figures that leap there, too
"""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import median

from msgspec import Struct

from replay_core.diagnose import trends
from replay_core.diagnose.signals import Point, RunLog, Series

#: Values on either side, in noise of the sides how far they lie apart, and how near to its level each side's end is.
BEFORE, AFTER, SIGMAS, NEAR = 5, 5, 4.0, 0.4
#: Of other figures how far the three values behind a place lie from the three before, in noise of a step and in shares
#: of what they were.
MOVES, PART = 3.0, 0.2


class Leap(Struct, frozen=True):
    """The first point behind it, and the levels on either side."""

    at: Point
    before: float
    after: float


def leap_in(series: Series) -> Leap | None:
    """The leap; None of a series that moves by and by, or by no more than it wavers, or that drifts on behind it."""
    points = [point for point in series.points if math.isfinite(point.value)]
    values = [point.value for point in points]
    best: tuple[float, int] | None = None
    for at in range(BEFORE, len(values) - AFTER + 1):
        apart = abs(median(values[at:]) - median(values[:at]))
        noise = _noise(values[:at]) + _noise(values[at:])
        if apart > 0 and (best is None or apart / (noise + 1e-12 * apart) > best[0]):
            best = apart / (noise + 1e-12 * apart), at
    if best is None:
        return None
    at = best[1]
    before, after = median(values[:at]), median(values[at:])
    gap = abs(after - before)
    if gap < SIGMAS * max(_noise(values[:at]), _noise(values[at:])):
        return None
    sharp = abs(values[at - 1] - before) < NEAR * gap and abs(values[at] - after) < NEAR * gap
    # Behind it the series rests: one that goes on the same way had only begun to move.
    goes_on = trends.drift(values[at:]) * math.copysign(1, after - before) > trends.DRIFT_Z
    return Leap(points[at], before, after) if sharp and not goes_on else None


def _noise(values: list[float]) -> float:
    """What single values lie off their median by: robust, and no less than the mean of it."""
    middle, sigma = trends.spread(values)
    return max(sigma, sum(abs(value - middle) for value in values) / len(values))


def with_it(log: RunLog, leap: Leap, signals: tuple[str, ...]) -> list[Series]:
    """Those of the signals that move at the leap by more than they do from step to step before it."""
    found = []
    for series in (one for signal in signals for one in log.all(signal)[:1]):
        points = [point for point in series.points if math.isfinite(point.value)]
        at = next((n for n, point in enumerate(points) if point.step == leap.at.step), None)
        if at is None or at < BEFORE or len(points) - at < 3:
            continue
        values = [point.value for point in points]
        changes = [abs(b - a) for a, b in pairwise(values[:at])]
        usual = max(median(changes), sum(changes) / len(changes))
        now, was = median(values[at : at + 3]), median(values[at - 3 : at])
        if abs(now - was) > max(MOVES * usual, PART * abs(was)):
            found.append(series)
    return found
