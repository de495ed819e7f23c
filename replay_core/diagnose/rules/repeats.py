"""A log that says the same numbers again and again: what is printed is no longer computed."""

from __future__ import annotations

import math
from collections.abc import Iterator

from replay_core.diagnose.finding import Finding, shown, warning
from replay_core.diagnose.rule import Skip, rule
from replay_core.diagnose.signal_names import MACHINE
from replay_core.diagnose.signals import Point, RunLog, Series

#: Steps in a row whose numbers are all those of the step before; and of one series, while others go on.
AGAIN, ALONE = 3, 8
#: Series that repeat, and steps before: fewer of either happen by chance.
SERIES, BEFORE = 4, 4
#: What is at rest in a healthy run: shares that come to 0 or 1, rates that are set, lengths at their limit.
_AT_REST = frozenset(
    {"learning_rate", "clip_fraction", "frac_zero_std", "truncated", "response_length_max", "reward_max", "reward_min",
     "advantage_max", "advantage_min", "policy_kl", "ratio_mean", "ratio_max"}
)  # fmt: skip
#: Figures of a batch that waver in every step: one of them that stands still alone is told alone.
_WAVERING = ("reward", "kl", "entropy", "response_length", "logprob_diff")


@rule("L18", "the log repeats itself", link="dump", scope="signals", explains=("L08", "L11", "L17", "D25", "D37"),
      source="a dictionary of metrics that is logged again when a step adds nothing to it")  # fmt: skip
def repeats(log: RunLog) -> Iterator[Finding]:
    """From some step on, every one of 4 and more figures of the training is exactly what it was in the step before, 3
    steps and more to the end of the log, while they changed in 4 steps before: a warning. Rates, shares and limits do
    not count: they rest in healthy runs. Or reward, KL, entropy or length alone is one number for 8 steps and more to
    the end, and no round number unless it was more and less before, while two others go on.
    """
    moving = [series for series in log.signals() if _counts(series)]
    if len(moving) < 2:
        raise Skip(f"needs figures of {BEFORE + AGAIN} steps that change")
    resting = {series.name: _rest(series) for series in moving}
    least = min(resting.values())
    if least >= AGAIN and len(moving) >= SERIES:
        since = moving[0].points[-least]
        yield _found(log, since, least, f"all {len(moving)} figures that waver", moving[0])
        return
    alone = [series for series in moving if series.signal in _WAVERING and resting[series.name] >= ALONE]
    going = [series for series in moving if resting[series.name] < 2]
    for series in alone:
        value = series.last.value
        # A bound that a figure comes to rest at is a round number, or the most or least it can be.
        inside = min(series.values) < value < max(series.values) or abs(value - round(value, 3)) > 1e-9
        if len(going) >= 2 and inside:
            yield _found(log, series.points[-resting[series.name]], resting[series.name], series.name, series)
            return


def _counts(series: Series) -> bool:
    """Whether it is a figure of the training that changes from step to step, and is printed finely enough to tell."""
    if series.signal in MACHINE or series.signal in _AT_REST or len(series.points) < BEFORE + AGAIN:
        return False
    if not all(math.isfinite(value) for value in series.values):
        return False
    before = series.values[: len(series.values) - _rest(series)]
    return len(before) >= BEFORE and len(set(before)) > 0.8 * len(before)


def _rest(series: Series) -> int:
    """How many of its last steps say what the step before them said."""
    values = series.values
    return next((n for n in range(len(values) - 1) if values[-1 - n] != values[-2 - n]), len(values) - 1)


def _found(log: RunLog, since: Point, steps: int, what: str, series: Series) -> Finding:
    return warning(
        f"the log repeats itself: {what} {'is' if what == series.name else 'are'} the same in the last {steps} steps",
        since.where(series.name),
        evidence=[
            series.shown_at(since, "another number in every step"), shown("steps that repeat the one before", steps)
        ],
        cause="what is logged is cached: the metrics are not computed anew (a dictionary that is not refreshed, a rank "
        "that no longer reduces), or the steps do not run at all",
        next_step="rldbg record -- YOUR COMMAND, then compare two of these steps",
        steps=[p.step for p in series.points[-steps:]],
    )  # fmt: skip
