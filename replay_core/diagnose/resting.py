"""A reward that is meant to rise and does not, over as many steps as make it no chance; and what goes with that.

What a run of hundreds of steps has not learnt it will hardly learn of more of them: prompts that teach nothing, answers
that are cut, a rate too small, too few samples in each step.
"""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import fmean, median, pvariance

from msgspec import Struct

from replay_core.diagnose import trends
from replay_core.diagnose.late_falls import late_fall
from replay_core.diagnose.log_steps import steps_told
from replay_core.diagnose.signals import RunLog, Series
from replay_core.dumps.log_events import THROWN_AWAY
from replay_core.regexes import regex

#: Steps of a reward before that it rests is no chance, and standard errors by which its thirds may differ.
LONG, APART = 100, 2.576
#: Standard errors from which it may rise after all.
PERHAPS = 1.96
#: Fewer steps are enough where one in six and more has a loss of 0 and no spread is logged, so that nobody else tells.
TOLD = 48
#: Fewer lines, each of several steps, and the steps that they span.
LINES, SPANS = 30, 250
#: Steps at the least that are the first ones.
EARLY = 5
#: A share of right answers over that is solved.
SOLVED = 0.8


class Rest(Struct, frozen=True):
    """The reward's mean in the first and last third of the run, and of how many steps."""

    reward: Series
    begun: float
    now: float
    wanted: float
    """What the last third's mean would have to be above to be a rise."""
    steps: int
    is_little: bool = False
    """It rises by little, which may be no chance: by the rank test or the means of its thirds, at one in twenty."""


def rests(log: RunLog) -> Rest | None:
    """The reward of 100 steps and more (48 where many of them teach nothing, 30 lines that span 250) that rests:
    neither by the rank test nor in the mean of its last or middle third over that of its first, or of all over that of
    its first few. None where it does, or is near a best of 1, or is one number in all of them.
    """
    series = log.get("reward")
    values = [] if series is None else series.finite
    if series is None or len(set(values)) == 1:
        return None
    spans = _spans(series)
    if spans < SPANS and (len(values) < TOLD or (len(values) < LONG and not _losses_tell(log))):
        return None
    if late_fall(series) is not None:
        return None  # it had risen, and fell: L08 tells of it
    third = len(values) // 3
    first, last = values[:third], values[-third:]
    begun, now = fmean(first), fmean(last)
    error = math.sqrt((pvariance(first) + pvariance(last)) / third)
    is_share = min(values) >= 0 and max(values) <= 1
    drift = trends.drift(values)
    if (is_share and now >= SOLVED) or now - begun > APART * error or drift > trends.DRIFT_Z:
        return None
    if rose(values):
        return None
    # What was learnt in the first steps is learnt: the rest is above them.
    few = max(EARLY, len(values) // 20)
    rest = values[few:]
    if fmean(rest) - fmean(values[:few]) > APART * math.sqrt(pvariance(rest) / few):
        return None
    # A reward that is centred, as one that is normalised, has nowhere to go.
    sigma = math.sqrt(pvariance(values))
    if abs(fmean(values)) < CENTRED * sigma and min(values) < 0 < max(values):
        return None
    is_little = now - begun > PERHAPS * error or drift > PERHAPS
    return Rest(series, begun, now, begun + APART * error, max(len(values), spans), is_little)


def rose(values: list[float]) -> bool:
    """Whether the middle third's mean is over the first's by more than chance: it rose, wherever it went from there."""
    third = len(values) // 3
    first, middle = values[:third], values[third : len(values) - third]
    error = math.sqrt(pvariance(first) / len(first) + pvariance(middle) / len(middle)) if third else math.inf
    return third > 0 and fmean(middle) - fmean(first) > APART * error


def _spans(series: Series) -> int:
    """The steps that 30 lines and more of every so many steps tell of; 0 of fewer, and of steps that are not known."""
    first, last = series.points[0].step, series.points[-1].step
    if len(series.finite) < LINES or first is None or last is None:
        return 0
    # One line may leap, by a slip of who wrote it or where another run begins.
    told = [one.step for one in series.points if one.step is not None]
    span = int(min(last - first, median(after - before for before, after in pairwise(told)) * (len(told) - 1)))
    return span if span >= 2 * len(series.points) else 0


_THROWN = regex(THROWN_AWAY)
#: Of the spread from line to line, a mean that is none.
CENTRED = 0.1
#: Shares of steps that teach nothing, of responses that are cut, and a KL per token, that tell why.
DEAD, CUT, HARDLY = 0.15, 0.2, 0.003


def signs(log: RunLog) -> list[str]:
    """What of the log tells why nothing is learnt, in words; the most telling first."""
    found = _dead(log)
    reward = log.get("reward")
    steps = 0 if reward is None else len(reward.finite)
    thrown = sum(_THROWN.search(one.text) is not None for one in log.events("notice"))
    if thrown and thrown >= DEAD * steps:
        found.append(f"{thrown} groups without a spread of rewards are thrown away beside the {steps} steps")
    cut = next((fmean(series.finite) for series in log.all("truncated")[:1] if series.finite), 0.0)
    if cut >= CUT:
        found.append(f"{cut:.0%} of the responses are cut at the token limit")
    never = [one.name for one in log.all("reward_function") if one.finite and not any(one.finite)]
    never = [name for name in never if not name.endswith("std")]
    if never:
        found.append(f"{', '.join(never[:2])} is 0 in every line")
    far = next((one.finite for one in log.all("kl")[:1] if len(one.finite) >= LONG), None)
    if far is not None and (moved := median(map(abs, far))) < HARDLY:
        found.append(f"the KL to the reference stays at {moved:.2g}: the policy hardly moves")
    return found


def _losses_tell(log: RunLog) -> bool:
    """Whether losses of 0 alone tell that steps teach nothing: of a logged spread D01 says it from few steps on."""
    return all(step.is_dead is None for step in steps_told(log)) and bool(_dead(log))


def _dead(log: RunLog) -> list[str]:
    """That many steps have nothing to learn from, in words; empty where they have, or the log does not tell."""
    told, found = steps_told(log), []
    known = [step for step in told if step.is_dead is not None]
    dead = sum(1 for step in known if step.is_dead)
    if known and dead >= DEAD * len(known):
        found.append(f"in {dead} of {len(known)} steps no group has a spread of rewards, and no gradient")
    losses = [step for step in told if step.loss is not None]
    still = sum(1 for step in losses if step.loss == 0)
    if not known and losses and still >= DEAD * len(losses) and not any(step.grad for step in losses):
        found.append(
            f"in {still} of {len(losses)} steps the loss is 0, as it is where all rewards of a group are equal"
        )
    return found
