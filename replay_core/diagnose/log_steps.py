"""What a log says of each step on the way from its rewards to its gradient: rules of a loss of 0 look at it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from replay_core.diagnose.finding import Evidence
from replay_core.diagnose.signals import Part, Point
from replay_core.documents.diagnosis import Severity

#: A standard deviation of rewards below this is rounding, not a difference.
NO_STD = 1e-7


@dataclass(frozen=True, slots=True)
class StepTold:
    """What the log says of one step; None where it says nothing."""

    step: int | None
    loss: float | None
    grad: float | None
    frac_zero: float | None
    group_std: float | None
    batch_std: float | None
    """The largest standard deviation of any reward over the whole batch, whatever its group."""
    advantage: float | None
    truncated: float | None
    point: Point

    @property
    def is_dead(self) -> bool | None:
        """Whether no advantage differs from 0. None: the log does not tell."""
        if self.frac_zero is not None:
            return self.frac_zero >= 1
        if self.advantage is not None:
            return self.advantage == 0
        if self.group_std is not None:
            return self.group_std <= NO_STD
        return None


def steps_told(part: Part) -> list[StepTold]:
    """The steps in order, by the series that has the most to say of a loss of 0."""
    anchor = next(
        (
            s
            for name in ("loss", "pg_loss", "grad_norm", "frac_zero_std", "reward_std", "advantage_max")
            if (s := part.get(name)) is not None
        ),
        None,
    )
    if anchor is None:
        return []
    names = (
        "loss",
        "pg_loss",
        "grad_norm",
        "frac_zero_std",
        "reward_max",
        "reward_min",
        "advantage_max",
        "advantage_min",
        "truncated",
    )
    at = {name: {p.step: p.value for p in s.points} if (s := part.get(name)) else {} for name in names}
    stds = [s for s in part.all("reward_std") if s.formula == "within-group"]
    groups = {p.step: p.value for s in stds[:1] for p in s.points}
    functions: dict[int | None, float] = {}
    for series in part.all("reward_function_std"):
        for p in series.points:
            if math.isfinite(p.value):
                functions[p.step] = max(functions.get(p.step, 0.0), p.value)
    found = []
    for point in anchor.points:
        step = point.step
        high, low = at["reward_max"].get(step), at["reward_min"].get(step)
        whole = functions.get(step, None if high is None or low is None else high - low)
        top, bottom = at["advantage_max"].get(step), at["advantage_min"].get(step)
        advantage = None if top is None or bottom is None else max(abs(top), abs(bottom))
        loss = at["loss"].get(step, at["pg_loss"].get(step))
        if at["loss"].get(step) == 0 and at["pg_loss"].get(step):
            loss = at["pg_loss"][step]  # the displayed loss may be one micro-batch's
        found.append(
            StepTold(
                step,
                loss,
                at["grad_norm"].get(step),
                at["frac_zero_std"].get(step),
                groups.get(step),
                whole,
                advantage,
                at["truncated"].get(step),
                point,
            )
        )
    return found


def is_cut(step: StepTold) -> bool:
    """Whether every response of the step ends at the token limit."""
    return step.truncated is not None and step.truncated >= 1


def severity_of(bad: int, steps: int) -> Severity:
    """Half of the steps (or the only one) is an error, a quarter a warning; fewer are told."""
    return "error" if 2 * bad >= steps else "warning" if 4 * bad >= steps else "info"


def numbers(**values: float | None) -> tuple[Evidence, ...]:
    """Those that the log has, as evidence."""
    return tuple(Evidence(name, value, source="log") for name, value in values.items() if value is not None)


def steps_of(points: Iterable[Point]) -> tuple[int, ...]:
    """The steps the points are of, each once."""
    return tuple(sorted({point.step for point in points if point.step is not None}))


def step_numbers(steps: list[StepTold]) -> list[int]:
    """The numbers of the steps that have one."""
    return [step.step for step in steps if step.step is not None]
