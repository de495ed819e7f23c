"""One place at which a series leaps from a level to another and stays there: what an update cannot do to a policy, and
a judge, a data set, a setting or a server does.

    leap = leap_in(series)
    leap.at, leap.before, leap.after
    moved, rest = with_it(log, leap, signals)     # the other figures that leap there, too, and those that go on
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
#: Places that are tried, and values of a side that are looked at for each: medians of all at all cost their square.
PLACES = 400
#: A fall within a step: in changes of a step, in shares of what was earned and of the whole fall, what the validation
#: holds, and how far the prompts' lengths may part.
AT_ONCE_NOISE, AT_ONCE, OF_IT, HOLDS, AS_LONG = 3.0, 0.3, 0.6, 0.9, 0.1
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
    stride, last = _stride(len(values)), len(values) - AFTER
    best = _sharpest(values, range(BEFORE, last + 1, stride))
    if best is not None and stride > 1:
        best = _parting(values, range(max(BEFORE, best - stride), min(last, best + stride) + 1), best)
    if best is None:
        return None
    at = best
    before, after = median(values[:at]), median(values[at:])
    gap = abs(after - before)
    if gap < SIGMAS * max(_noise(values[:at]), _noise(values[at:])):
        return None
    sharp = abs(values[at - 1] - before) < NEAR * gap and abs(values[at] - after) < NEAR * gap
    # Behind it the series rests: one that goes on the same way had only begun to move.
    goes_on = trends.drift(values[at:]) * math.copysign(1, after - before) > trends.DRIFT_Z
    return Leap(points[at], before, after) if sharp and not goes_on else None


def _stride(size: int) -> int:
    return max(1, -(-size // PLACES))


def _sharpest(values: list[float], places: range) -> int | None:
    """The place whose sides lie farthest apart, in their noise; None where they never do."""
    best: tuple[float, int] | None = None
    for at in places:
        before, after = values[: at : _stride(at)], values[at :: _stride(len(values) - at)]
        apart = abs(median(after) - median(before))
        noise = _noise(before) + _noise(after)
        if apart > 0 and (best is None or apart / (noise + 1e-12 * apart) > best[0]):
            best = apart / (noise + 1e-12 * apart), at
    return None if best is None else best[1]


def _parting(values: list[float], places: range, about: int) -> int:
    """The one of these places at which the values are nearest to the levels that are theirs on either side."""
    before, after = median(values[:about]), median(values[about:])

    def off(at: int) -> float:
        return sum(abs(values[n] - (before if n < at else after)) for n in places)

    return min(places, key=off)


def _noise(values: list[float]) -> float:
    """What single values lie off their median by: robust, and no less than the mean of it."""
    middle, sigma = trends.spread(values)
    return max(sigma, sum(abs(value - middle) for value in values) / len(values))


def with_it(log: RunLog, leap: Leap, signals: tuple[str, ...]) -> tuple[list[Series], list[Series]]:
    """Those of the signals that move at the leap by more than they do from step to step before it, and those that do
    not; a figure that has not the values for it, on both sides of the leap, is of neither. Nor has each a value at the
    very step: figures are logged every few steps.
    """
    moved: list[Series] = []
    rest: list[Series] = []
    step = leap.at.step
    for series in (one for signal in signals for one in log.all(signal)[:1]):
        points = [point for point in series.points if math.isfinite(point.value) and point.step is not None]
        at = next((n for n, p in enumerate(points) if step is not None and p.step is not None and p.step >= step), None)
        if at is None or at < BEFORE or len(points) - at < 3:
            continue
        values = [point.value for point in points]
        changes = [abs(b - a) for a, b in pairwise(values[:at])]
        usual = max(median(changes), sum(changes) / len(changes))
        now, was = median(values[at : at + 3]), median(values[at - 3 : at])
        (moved if abs(now - was) > max(MOVES * usual, PART * abs(was)) else rest).append(series)
    return moved, rest


def falls_in_training_alone(log: RunLog) -> tuple[Leap, Series] | None:
    """A reward that falls within one step and stays down (no later value comes half way back, none rise), and the
    validation that keeps what it had: the policy is what it was, and the data of the training are not.
    """
    reward, held_out = log.get("reward"), log.get("held_out")
    if reward is None or held_out is None:
        return None
    points = [point for point in reward.points if math.isfinite(point.value) and point.step is not None]
    values = [point.value for point in points]
    if len(values) < 4 * AFTER:
        return None
    noise = median(abs(b - a) for a, b in pairwise(values))
    at = max(range(BEFORE, len(values) - 2 * AFTER), key=lambda n: values[n - 1] - values[n] + _gap(values, n))
    before, gap = median(values[at - BEFORE : at]), _gap(values, at)
    if gap < max(AT_ONCE_NOISE * noise, AT_ONCE * before) or values[at - 1] - values[at] < OF_IT * gap:
        return None
    if max(values[at:]) > before - gap / 2 + noise / 2 or trends.rises(values[at:]):
        return None
    step = points[at].step or 0
    had = [p.value for p in held_out.points if p.step is not None and p.step < step][-3:]
    has = [p.value for p in held_out.points if p.step is not None and p.step > step]
    if min(len(had), len(has)) < 2 or median(has) < HOLDS * median(had):
        return None
    if (asked := log.get("prompt_length")) is not None:
        longer = [p.value for p in asked.points if p.step is not None and p.step >= step]
        shorter = [p.value for p in asked.points if p.step is not None and p.step < step]
        if longer and shorter and abs(median(longer) - median(shorter)) > AS_LONG * abs(median(shorter)):
            return None
    return Leap(points[at], before, median(values[at:])), held_out


def _gap(values: list[float], at: int) -> float:
    return median(values[at - BEFORE : at]) - median(values[at : at + AFTER])
