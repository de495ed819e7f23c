"""The learning rate over the steps: what no schedule does, and no policy bears."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from statistics import median

from msgspec.structs import replace

from replay_core.diagnose import trends
from replay_core.diagnose.finding import Finding, error, shown, warning
from replay_core.diagnose.rule import Skip, given, rule
from replay_core.diagnose.signals import Point, RunLog, Series

#: Steps before a leap, none of which rises: a warm-up does. And how many times all of them it is.
BEFORE, LEAPT = 4, 5.0
#: Of a rate that is one number before it, fewer steps and a larger leap tell.
CONSTANT, FAR = 2, 10.0
#: What is left of the rate where a warm-up begins again, and steps over which it then rises.
LEFT, RISES = 1 / 3, 3
#: What is left of it after a fall that no schedule has: those with stairs keep a tenth.
FALLEN = 1 / 50


@rule("L22", "the learning rate leaps or starts again", link="optimizer", scope="signals", needs=("learning_rate",),
      explains=("L02", "L08", "L09", "L10", "L16", "D01", "D03", "D20", "D24", "D25", "D26"), lasts=True,
      source="torch.optim.lr_scheduler.LRScheduler.state_dict is part of a checkpoint")  # fmt: skip
def leaps(log: RunLog) -> Iterator[Finding]:
    """A learning rate over 5 times all before, which did not rise over the last 4 of them: a warning, and so is one
    over 10 times where 2 before it and more are one number; an error where the KL to the reference comes to 5 times all
    before in the 3 steps that follow, or the reward (over 0) falls below .6 of what it was within them, and stays
    there. Or one that comes, after 3 steps and more, to less than a third from one step to the next and rises in each
    of the next 3: a warm-up that begins again, a warning (info where the KL to the reference
    falls to a tenth and less with it, and reward, entropy or length go on: a new stage, with a new reference). Restarts
    of a cosine leap to what the rate was before, and fall bit by bit. Or one that falls to less than a fiftieth from
    one step to the next and stays there for 4 and more, where it was as large for 4 before: a warning. Or one of .01
    and more, with which no policy is trained, where the reward (over 0 at first) is below .6 of its first step's within
    the 3 that follow, and never again over .8 of it in 8 steps and more: an error.
    """
    series = given(log.get("learning_rate"))
    values = series.finite
    if (broken := _broken_at_once(log, series)) is not None:
        yield broken
        return
    if len(values) < 2 * CONSTANT or len(values) < len(series.points):
        raise Skip(f"needs the learning rate of {2 * CONSTANT} steps")
    least, most = trends.so_far(values, min), trends.so_far(values, max)
    for at in range(CONSTANT, len(values)):
        largest = most[at - 1]
        rests = least[at - 1] == largest and values[at] > FAR * largest
        if values[at] > LEAPT * largest > 0 and (rests or (at >= BEFORE and values[at - 1] <= values[at - BEFORE])):
            back = next((later for later in range(at + 1, len(values)) if values[later] <= largest), None)
            told = _told(
                log, series.points[at], f"the learning rate leaps {values[at] / largest:.3g} times at step "
                f"{series.points[at].step}, to {values[at]:.3g}" + (", and comes back" if back else ""),
                "the schedule has a step that is wrong, a checkpoint was resumed with other settings, or a second "
                "parameter group's rate is logged",
            )  # fmt: skip
            yield _worse(told, log, series.points[at].step)
            return
        after = values[at : at + RISES + 1]
        if (
            at >= RISES
            and len(after) > RISES
            and values[at] < LEFT * values[at - 1]
            and all(b > a for a, b in pairwise(after))
        ):
            stage = _is_new_stage(log, series.points[at].step)
            told = _told(
                log, series.points[at], f"the learning rate's warm-up begins again at step {series.points[at].step}: "
                f"{values[at - 1]:.3g}, then {values[at]:.3g} and rising"
                + (", and the KL with it: a new stage, with a new reference" if stage else ""),
                "a stage begins, with a new reference, optimizer and schedule (as in ProRL)" if stage else
                "the run resumed without the state of its scheduler, and most likely of its optimizer: Adam's moments "
                "begin at 0 as well",
            )  # fmt: skip
            if not stage:
                yield told
                return
            # Not the last word: a leap may follow.
            yield replace(told, severity="info")
            continue
        if at < BEFORE or len(values) < 2 * BEFORE:
            continue
        now = values[at : at + BEFORE]
        if len(now) == BEFORE and 0 < max(now) < FALLEN * min(values[at - BEFORE : at]):
            yield _told(
                log, series.points[at], f"the learning rate falls to a {values[at - 1] / values[at]:.3g}th at step "
                f"{series.points[at].step}, from {values[at - 1]:.3g} to {values[at]:.3g}: "
                "next to nothing is learnt after it",
                "the schedule has a step that is wrong (a factor in percent, a power instead of a product), or the run "
                "resumed with other settings",
            )  # fmt: skip
            return


#: A rate that breaks policies: a hundred times that of adapters. What is left of the reward soon, and ever after, of
#: how many steps.
FAR_TOO_LARGE, SOON, EVER, STEPS = 0.01, 0.6, 0.8, 8


def _broken_at_once(log: RunLog, series: Series) -> Finding | None:
    reward = log.get("reward")
    rates, paid = series.finite[:4], [] if reward is None else reward.finite
    if reward is None or len(paid) < STEPS or not rates or max(rates) < FAR_TOO_LARGE or not paid[0] > 0:
        return None
    if min(paid[1:4]) >= SOON * paid[0] or max(paid[2:]) > EVER * paid[0]:
        return None
    return error(
        f"the learning rate is far too large, {max(rates):.3g}: the policy breaks in its first updates, "
        f"{reward.name} falls from {paid[0]:.3g} to {min(paid[1:4]):.3g} and never comes back",
        series,
        series.shown_at(series.points[0], "1e-6 to 1e-4"),
        reward.shown(max(paid[2:]), f"was {paid[0]:.3g}"),
        cause="a rate of another optimizer, or a decimal place: policies are trained with 1e-6 (all weights) to 1e-4 "
        "(adapters). Entropy, lengths and gradients that leap about are what comes of it",
        next_step="set the learning rate to 1e-6, and begin again from the first weights",
    )


def _is_new_stage(log: RunLog, step: int | None) -> bool:
    """Whether the KL to the reference falls to a tenth of what it was, or less, at a step, and reward or entropy stay
    nearer to what they were than to their beginning: the policy goes on, and what it is held against is new.
    """
    kl = log.get("kl")
    if kl is None or step is None or (sides := _sides(kl, step)) is None or not 0 <= sides[2] < 0.1 * sides[1]:
        return False
    others = [one for name in ("reward", "entropy", "response_length") if (one := log.get(name)) is not None]
    told = [each for one in others if (each := _sides(one, step)) is not None]
    return any(abs(after - begun) > abs(after - before) for begun, before, after in told)


def _sides(series: Series, step: int) -> tuple[float, float, float] | None:
    """Medians of the first steps, of those before a step, and of those from it on."""
    points = [point for point in series.points if point.step is not None and math.isfinite(point.value)]
    before = [point.value for point in points if (point.step or 0) < step]
    after = [point.value for point in points if (point.step or 0) >= step]
    if len(before) < 2 * RISES or len(after) < RISES:
        return None
    return median(before[:RISES]), median(before[-RISES:]), median(after[:RISES])


def _worse(told: Finding, log: RunLog, step: int | None) -> Finding:
    """An error where the policy leaves its reference at once, or loses its reward for good."""
    kl, reward = log.get("kl"), log.get("reward")
    if reward is not None and step is not None and (sides := _sides(reward, step)) is not None:
        soon = [one.value for one in reward.points if step < (one.step or 0) <= step + 3 and math.isfinite(one.value)]
        later = [one.value for one in reward.points if (one.step or 0) > step + 3 and math.isfinite(one.value)]
        held = sides[1]
        if held > 0 and soon and len(later) >= RISES and min(soon) < SOON * held and max(later) < SOON * held:
            claim = f"{told.claim}, and {reward.name} falls from {held:.3g} to {min(soon):.3g} and never comes back: "
            return replace(told, severity="error", claim=claim + "it breaks the policy")
    if kl is None or step is None:
        return told
    points = [point for point in kl.points if point.step is not None and math.isfinite(point.value)]
    before = [point.value for point in points if (point.step or 0) < step]
    after = [point.value for point in points if step <= (point.step or 0) <= step + 3]
    if len(before) < BEFORE or not after or max(after) <= LEAPT * max(before):
        return told
    claim = f"{told.claim}, and {kl.name} goes from {before[-1]:.3g} to {max(after):.3g}: it breaks the policy"
    return replace(told, severity="error", claim=claim)


def _told(log: RunLog, point: Point, claim: str, cause: str) -> Finding:
    series = given(log.get("learning_rate"))
    return warning(
        claim,
        point.where(series.name),
        series.shown_at(point),
        shown("largest before", max(each.value for each in series.points if (each.step or 0) < (point.step or 0))),
        cause=cause,
        next_step="print the scheduler's last_epoch before and after that step; save and load its state_dict",
        steps=[] if point.step is None else [point.step],
    )
