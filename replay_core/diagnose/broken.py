"""What of a log is the first that is not a finite number: by step, within the step by order of computation."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from replay_core.diagnose.finding import Evidence, shown
from replay_core.diagnose.log_steps import steps_of
from replay_core.diagnose.signal_names import ORDER
from replay_core.diagnose.signals import Point, RunLog, Series

LOSSES = ("loss", "pg_loss", "micro_loss", "value_loss")
#: The spread of rewards, and what is divided by it: NaN for a group of one.
SPREADS = ("reward_std", "reward_function_std", "advantage_max", "advantage_min")
_ORDER = {signal: number for number, signal in enumerate(ORDER)}


@dataclass(frozen=True, slots=True)
class FirstBroken:
    """The first value that is not finite. Rewards come before advantages, log-probabilities, ratio, loss, gradient:
    what is broken first is the cause, the rest is downstream of it.
    """

    log: RunLog
    series: Series
    point: Point
    every: list[tuple[Series, Point]]

    @property
    def steps(self) -> list[int]:
        return steps_of(point for _, point in self.every)

    @property
    def evidence(self) -> list[Evidence]:
        step = self.point.step
        with_it = sorted({series.name for series, p in self.every if p.step == step and series is not self.series})
        beside = [shown("not finite in the same step", ", ".join(with_it[:6]), None, "log")] if with_it else []
        count = shown("steps that are not finite", len(self.steps) or 1, None, "log")
        return [self.series.shown_at(self.point, "a finite number"), *beside, count]

    @property
    def is_spread(self) -> bool:
        """Whether it is the spread of rewards, and NaN: a group of one sample."""
        return self.series.signal in SPREADS and math.isnan(self.point.value)

    @property
    def is_gradient_alone(self) -> bool:
        """Whether it is grad_norm, never finite in several steps, while there is a loss and it always is."""
        if self.series.signal != "grad_norm" or self.series.finite or len(self.series.points) < 2:
            return False
        losses = [point for each in self.log.signals() if each.signal in LOSSES for point in _points(self.log, each)]
        return bool(losses) and all(math.isfinite(point.value) for point in losses)


def first_broken(log: RunLog) -> FirstBroken | None:
    """The first value of a log that is not finite, or None."""
    every = [
        (series, point) for series in log.signals() if series.signal in _ORDER for point in _points(log, series)
        if not math.isfinite(point.value)
    ]  # fmt: skip
    return FirstBroken(log, *min(every, key=_at), every) if every else None


def _at(broken: tuple[Series, Point]) -> tuple[int, int, int]:
    """When it was computed. A step's own value is logged after its micro-batches."""
    series, point = broken
    step, micro = -1 if point.step is None else point.step, 1 << 30 if point.micro is None else point.micro
    return step, micro, _ORDER[series.signal]


def _points(log: RunLog, series: Series) -> Iterator[Point]:
    yield from series.points
    yield from (point for point in log.micros(series.signal) if not math.isfinite(point.value))
