"""What a log says of each step on the way from its rewards to its gradient, and what of it is no number first."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from replay_core.diagnose.algorithm import measures_groups
from replay_core.diagnose.finding import Evidence, shown
from replay_core.diagnose.function_weights import NOTHING, function_weights
from replay_core.diagnose.printed import UNITS, decimals_of_zero
from replay_core.diagnose.signal_names import ORDER
from replay_core.diagnose.signals import Point, RunLog, Series, Told
from replay_core.regexes import regex

if TYPE_CHECKING:
    from replay_core.documents.diagnosis import Severity

#: A standard deviation of rewards below this is rounding, not a difference.
NO_STD = 1e-7


class StepTold(Struct, frozen=True):
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
    has_critic: bool = False
    """Advantages are not of the rewards alone."""
    of_groups: bool = True
    """Advantages are measured against the other responses to a prompt; else their spread tells nothing of them."""

    @property
    def is_dead(self) -> bool | None:
        """Whether no advantage differs from 0. None: the log does not tell."""
        if self.advantage:
            return False  # groups of one have no spread, and advantages
        if not self.of_groups:
            return None if self.advantage is None else self.advantage == 0
        if self.frac_zero is not None:
            # Rounding may leave each group a spread that is none.
            return self.frac_zero >= 1 or (self.group_std is not None and self.group_std <= NO_STD)
        if self.advantage is not None:
            return self.advantage == 0
        if self.group_std is None and self.batch_std == 0 and not self.has_critic:
            return True  # the largest reward of the batch is its least
        return None if self.group_std is None else self.group_std <= NO_STD

    @property
    def is_cut(self) -> bool:
        """Whether every response of the step ends at the token limit."""
        return self.truncated is not None and self.truncated >= 1


#: The series that has the most to say of a loss of 0 tells the steps.
_ANCHORS = ("loss", "pg_loss", "grad_norm", "frac_zero_std", "reward_std", "advantage_max", "reward_max")


def _is_below_a_digit(series: Series | None) -> bool:
    """Whether zeros of a figure are rounded ones, as those of `-0.01 0.00 0.02`: it is never ten units of its last
    decimal.
    """
    zero = None if series is None else next((point for point in series.points if point.value == 0), None)
    if series is None or zero is None or not any(series.finite):
        return False
    places = decimals_of_zero(series.name, zero.path, zero.line)
    return places is not None and max(map(abs, series.finite)) < UNITS * 10.0**-places


def steps_told(log: RunLog) -> list[StepTold]:
    """The steps in order."""
    anchor = next((series for name in _ANCHORS if (series := log.get(name)) is not None), None)
    if anchor is None:
        return []

    def at(name: str, step: int | None) -> float | None:
        return values[name].get(step)

    names = (*_ANCHORS[:4], "reward_max", "reward_min", "advantage_max", "advantage_min", "advantage_std",
             "truncated")  # fmt: skip
    values = {name: {p.step: p.value for p in s.points} if (s := log.get(name)) else {} for name in names}
    stds = [series for series in log.all("reward_std") if series.formula == "within-group"]
    groups = {point.step: point.value for series in stds[:1] for point in series.points}
    functions: dict[int | None, float] = {}
    # What is logged beside a reward and not in it says nothing of the reward's spread.
    paid = function_weights(log) or {}
    for series in log.all("reward_function_std"):
        if abs(paid.get(f"{series.name.removesuffix('/std')}/mean", math.inf)) < NOTHING:
            continue
        for point in series.points:
            if math.isfinite(point.value):
                functions[point.step] = max(functions.get(point.step, 0.0), point.value)
    unknown = {name for name in ("loss", "pg_loss") if _is_below_a_digit(log.get(name))}
    found = []
    for point in anchor.points:
        step = point.step
        high, low = at("reward_max", step), at("reward_min", step)
        top, bottom = at("advantage_max", step), at("advantage_min", step)
        loss, policy = at("loss", step), at("pg_loss", step)
        loss = None if loss == 0 and "loss" in unknown else loss
        policy = None if policy == 0 and "pg_loss" in unknown else policy
        # The displayed loss may be one micro-batch's.
        shown = policy if loss is None or (loss == 0 and policy) else loss
        batch_std = functions.get(step, None if high is None or low is None else high - low)
        advantage = at("advantage_std", step) if top is None or bottom is None else max(abs(top), abs(bottom))
        found.append(StepTold(
            step, shown, at("grad_norm", step), at("frac_zero_std", step), groups.get(step), batch_std, advantage,
            at("truncated", step), point, log.has("value_mean") or log.has("value_loss"),
            measures_groups(log.algorithm),
        ))  # fmt: skip
    return found


#: Steps whose mean reward is the middle of its largest and least, and those of them in which the two differ.
OF_TWO, OF_TWO_APART = 12, 3


def is_of_two(log: RunLog) -> bool:
    """Whether every step is of two responses: its mean reward is the middle of the largest and the least, in all of 12
    steps and more, in three of which they differ. Of more responses some step has an odd number that is right.
    """
    known = [log.get(name) for name in ("reward", "reward_max", "reward_min")]
    if any(series is None for series in known):
        return False
    by_step = [{p.step: p.value for p in series.points} for series in known if series is not None]
    rows = [[each[step] for each in by_step] for step in by_step[0] if all(step in each for each in by_step)]
    apart = [most - least for _, most, least in rows if most > least]
    middle = all(abs(2 * mean - most - least) <= 1e-4 * max(abs(most), abs(least), 1e-6) for mean, most, least in rows)
    varies = len({mean for mean, _, _ in rows}) > 1
    return len(rows) >= OF_TWO and len(apart) >= OF_TWO_APART and middle and varies


#: Steps with advantages, and how near their products are to one number.
OF_ONE, PRODUCT = 6, 2e-3


def is_of_one_group(log: RunLog) -> bool:
    """Whether each step is of one group: of two responses in all, or the largest advantage times the least is one
    number in all of 6 steps and more, while the largest takes several. Of one group of n with two rewards, over its
    std, that is (n - 1) / n however many are right; the largest and least of several groups come from two of them.
    """
    if is_of_two(log):
        return True
    top, bottom = log.get("advantage_max"), log.get("advantage_min")
    low = {} if bottom is None else {point.step: point.value for point in bottom.points}
    points = [] if top is None else top.points
    rows = [(p.value, -low[p.step]) for p in points if p.step in low and p.value > NO_STD and low[p.step] < -NO_STD]
    products = [most * least for most, least in rows]
    if len(products) < OF_ONE or len({round(most, 3) for most, _ in rows}) < 2:
        return False
    return max(products) - min(products) <= PRODUCT * max(products)


def severity_of(bad: int, steps: int) -> Severity:
    """Half of the steps (or the only one) is an error, a quarter a warning; fewer are told."""
    return "error" if 2 * bad >= steps else "warning" if 4 * bad >= steps else "info"


def numbers(**values: float | None) -> tuple[Evidence, ...]:
    """Those that the log has, as evidence."""
    return tuple(Evidence(name, value, source="log") for name, value in values.items() if value is not None)


def steps_of(told: Iterable[Point | StepTold]) -> list[int]:
    """The steps they are of, each once, in order."""
    return sorted({one.step for one in told if one.step is not None})


LOSSES = ("loss", "pg_loss", "micro_loss", "value_loss")
#: The spread of rewards, and what is divided by it: NaN for a group of one.
SPREADS = ("reward_std", "reward_function_std", "advantage_max", "advantage_min")
_ORDER = {signal: number for number, signal in enumerate(ORDER)}


class FirstBroken(Struct, frozen=True):
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

    @property
    def is_figure_alone(self) -> bool:
        """Whether only figures that are logged beside the loss are broken (KL, clip fractions), and the loss or the
        gradient of those steps is finite: the KL is no part of it then, or not computed.
        """
        if any(series.signal not in _FIGURES for series, _ in self.every):
            return False
        finite = {p.step for name in ("loss", "grad_norm") if (one := self.log.get(name)) is not None
                  for p in one.points if math.isfinite(p.value)}  # fmt: skip
        return all(point.step in finite for _, point in self.every)

    @property
    def forward(self) -> Series | None:
        """What else of the policy's own forward is broken in that step; None where nothing is."""
        step = self.point.step
        return next((series for series, p in self.every if p.step == step and series.signal in FORWARDS), None)

    def is_broken(self, signal: str, words: str) -> bool:
        """Whether such a series is broken in that step, and was finite in one before."""
        step = self.point.step
        return any(
            series.signal == signal and words in series.name and p.step == step
            and any(math.isfinite(q.value) and (q.step or 0) < (step or 0) for q in series.points)
            for series, p in self.every
        )  # fmt: skip


#: What a forward of the policy gives: not finite, its weights are not.
FORWARDS = ("entropy", "kl", "logprob_diff", "prob_diff", "policy_kl", "ratio_mean", "rollout_k3", "rollout_k1")
_FIGURES = ("kl", "policy_kl", "clip_fraction")


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


_SKIPS = regex(r"OVERFLOW! [^\n]*Attempted loss scale: ([\d.e+]+)(?:[^\n]*reducing to ([\d.e+]+))?")
#: Lines that tell of an overflow, from which on they are no search for the scale.
LEAST_SKIPS = 3


def scale_falls(log: RunLog, steps: Sequence[int]) -> list[tuple[Told, re.Match[str]]]:
    """Lines of a loss scale (DeepSpeed's) that skips steps: none where fewer tell so than half of the steps."""
    texts = [(one, said) for one in log.told if (said := _SKIPS.search(one.text)) is not None]
    return texts if len(texts) >= max(LEAST_SKIPS, len(steps) // 2) else []
