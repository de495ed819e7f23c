"""The critic: what it explains of its returns, whether it learns to, and the unit and the place of its values."""

from __future__ import annotations

import math
from collections import defaultdict
from statistics import fmean, median

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from replay_core.diagnose import trends
from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.case import Case
from replay_core.diagnose.finding import Finding, Where, error, finding, share, shown, warning
from replay_core.diagnose.flat import Array
from replay_core.diagnose.log_steps import is_of_two
from replay_core.diagnose.places import places_of
from replay_core.diagnose.rule import Skip, given, rule, skip_if
from replay_core.diagnose.rules.figures import together
from replay_core.diagnose.rules.value_loss import value_rows
from replay_core.diagnose.rules.value_targets import FEWEST, LEARNT, is_of_gae
from replay_core.diagnose.signals import RunLog, Series

#: Of what a critic was off at first, the share it is still off by when it has learnt nothing.
NO_NEARER = 0.8
#: How many times its beginning a value loss comes to when the critic diverges.
EXPLODED = 10.0
_NOTHING = (
    "the critic is not updated (its optimizer, its learning rate, its parameters), or it is taught wrong targets; in "
    "the first steps of a new critic this is normal"
)


class _StepLearnt(Struct, frozen=True):
    """What one step tells of a critic: explained variance, mean squared error, the spread of its values."""

    step: int
    explained: float
    error: float
    spread: float
    off: float
    """Mean value - mean return, in standard deviations of the returns."""
    value: float
    deviation: float
    """Mean of the values, and their standard deviation, in the same unit."""
    mean: float
    range: float
    """Mean of the values, and largest - smallest, as they are."""


def _no_nearer(explained: list[float], errors: list[float]) -> bool:
    """Whether a critic explains nothing in its later half and comes no nearer: its error stays what it was; or, where
    no error is known, what it says is worse than nothing by half the variance, and stays so.
    """
    half, few = len(explained) // 2, max(len(explained) // 4, 2)
    now = median(explained[half:])
    # Of a short run the end tells more than the later half: a large error of its first steps takes its time.
    least = NO_NEARER * median(errors[:few]) if errors else 0.0
    still = len(errors) > half and min(median(errors[half:]), median(errors[-few:])) >= least
    begun = median(explained[:few])
    return (now <= 0.02 and still) or (not errors and now < -0.5 and now < 0.7 * begun)


def _had_a_way(found: list[_StepLearnt]) -> bool:
    """Whether the critic began off the mean of its returns, by half of their standard deviation: what it then comes no
    nearer to is there to be learnt. Or else its values stand: rewards by chance leave nothing to learn, and it moves.
    """
    begun = median(abs(one.off) for one in found[: max(len(found) // 4, 2)])
    means, deviations = [one.value for one in found], [one.deviation for one in found]
    stands = max(means) - min(means) < 0.25 and max(deviations) < 2 * min(deviations)
    return begun > 0.5 or stands


@rule("D45", "the critic explains nothing", link="advantages", scope="case",
      source="PPO's explained variance: 1 - Var(returns - values) / Var(returns)")  # fmt: skip
def explains_nothing(case: Case) -> Finding | None:
    """Values that are one number for every token of 3 steps and more: a warning. Else explained variance and mean
    squared error of the returns by the values, over tokens that count, in 6 steps and more: a warning where the
    variance it explains stays within .02 of 0 while the error does not fall below .8 of what it was in the first
    steps, or is below -.5 and does not rise. A critic that knows nothing but the mean is at 0 and has come nearer.
    Silent where it began within half a standard deviation of its returns' mean, and its values move.

    And where a critic's micro-batches are recorded: what it says in later epochs or mini-batches of 2 steps and more is
    the recorded values to the last bit, at every token, while returns differ from them: a warning. (Values that are
    rounded to 16 bits may be moved by too little to tell.)
    """
    found: list[_StepLearnt] = []
    where, known = None, False
    for batch in case.batches():
        values, returns = batch.columns.of("values"), batch.columns.of("returns")
        # What lies beside a step's samples (a critic's own records) is a batch of its own, and need not hold both.
        if values is None or returns is None or batch.step is None or batch.trained_N is None:
            continue
        known = True
        both_N = batch.trained_N & values.said_N & returns.said_N
        v, r = values.values_N[both_N], returns.values_N[both_N]
        if both_N.sum() > FEWEST and float(r.var()) > 1e-9:
            explained = 1 - float((r - v).var()) / float(r.var())
            unit = float(r.std())
            found.append(_StepLearnt(
                batch.step, explained, float(((r - v) ** 2).mean()), float(np.ptp(v)), float(v.mean() - r.mean()) /
                unit, float(v.mean()) / unit, float(v.std()) / unit, float(v.mean()), float(np.ptp(v)),
            ))  # fmt: skip
            where = batch.laid.where("values", sample=0)
    skip_if(not known, "no values and returns are recorded")
    if (still := _stands_still(case)) is not None:
        return still
    # (Half of the last digit of a float32 is no spread.)
    constant = [one for one in found if not one.spread > 1e-6 * max(1.0, abs(one.mean))]
    if len(found) >= 3 and len(constant) == len(found):
        means = [one.mean for one in found]
        moves = max(means) - min(means) > 1e-6 * max(1.0, max(map(abs, means)))
        return warning(
            f"the critic gives every token of a step one number in all {len(found)} steps: "
            + ("only its bias learns" if moves else "it is never updated"),
            where,
            shown("largest - smallest value of a step", max(one.range for one in found), "> 0"),
            shown("that number, first and last step", f"{found[0].mean:.4g}, {found[-1].mean:.4g}"),
            shown("steps", len(found)),
            cause="what it is given has no part in what it says: no gradient reaches its trunk or the weight of its "
            "head (frozen, detached, at zero behind a dead layer, not in the optimizer), and the bias alone moves"
            if moves
            else _NOTHING,
            steps=[one.step for one in constant],
        )
    skip_if(len(found) < LEARNT, f"needs values and returns of {LEARNT} steps")
    if _no_nearer([one.explained for one in found], [one.error for one in found]) and _had_a_way(found):
        later = found[len(found) // 2 :]
        return warning(
            f"the critic explains nothing of its returns after {len(found)} steps, and comes no nearer to them",
            where,
            shown("explained variance, later half", median(one.explained for one in later), "> 0"),
            shown("mean squared error, later half", median(one.error for one in later)),
            shown("mean squared error, first step", found[0].error),
            cause=_NOTHING,
            steps=[one.step for one in later],
        )
    return None


def _stands_still(case: Case) -> Finding | None:
    """The critic's own updates move none of its values."""
    tokens, due, steps, where = 0, 0.0, set[int](), None
    for batch in case.batches():
        for part in value_rows(batch):
            if not (part.epoch or part.minibatch):
                continue
            coarse = not (part.new.astype(np.float32).view(np.uint32) & 0xFFFF).any()
            if coarse or (part.new != part.old).any():
                return None
            tokens, due = tokens + part.new.size, max(due, float(np.abs(part.due - part.old).max()))
            where = where or batch.laid.where("values", sample=0)
            steps |= set() if batch.step is None else {batch.step}
    if len(steps) < 2 or not due > 0:
        return None
    return warning(
        "the critic is never updated: after updates it gives every token the very value that it gave before",
        where,
        shown("tokens of later epochs and mini-batches, all the same", tokens),
        shown("largest |return - value|", due, "what it would learn"),
        cause="its optimizer does not step or holds other parameters, its learning rate is 0, its value head is "
        "frozen, or its loss reaches no gradient",
        next_step="print the critic's learning rate and the norm of its gradient after a step",
        steps=sorted(steps),
    )


#: Steps after which a critic that moves has had its time; what its mean has moved by, in shares of its error.
SETTLED, MOVED = 24, 0.25


def _moves(means: list[float], loss: Series | None) -> bool:
    """Whether the mean of the values goes a way that is large beside the error that is left: the critic is updated.

    The value loss is a half of the squared error, or all of it: the larger root is taken.
    """
    if len(means) < 2:
        return False
    left = math.sqrt(2 * max(median(loss.finite), 0.0)) if loss is not None and loss.finite else 0.0
    return left > 0 and max(means) - min(means) > MOVED * left


@rule("D45", "the critic explains nothing", link="trend", scope="signals",
      needs=("explained_variance|value_mean|value_loss",), source="PPO's explained variance")  # fmt: skip
def never_learns(log: RunLog) -> Finding | None:
    """The mean value the same number in every one of 5 steps and more, while returns change or a value loss is logged:
    a warning. So is a value loss that had fallen to half of its first steps' and less, leaps to 10 times the most of
    the 5 before and past where it began, and falls to half of that again, with an explained variance under -1 at the
    leap: a critic that starts anew. Else explained variance and value loss of 10 steps, judged as of a dump: a warning
    of 24 steps and more, or where the mean value stands; info where the critic's values move, as a new one's do, or
    where their mean began off that of the returns and has come to it (a quarter of the way is left) and the explained
    variance is about 0: returns that hardly differ; or where each step is of two responses (the mean reward is the
    middle of the largest and least in all of 12 and more), which differ by one number. A warning, too, where over 24
    steps and more the mean value stays where it began (a quarter of what lies between it and the mean return), as far
    from the returns as at first (.8), while the value loss does not fall (.9, from third to third), is mostly that
    distance, and the critic's learning rate is none of 0.
    """
    values = log.get("value_mean")
    # A trainer without a critic may log a 0 for its values.
    returns, loss = log.get("return_mean"), log.get("value_loss")
    moving = (returns is not None and len(set(returns.finite)) > 2) or (loss is not None and any(loss.finite))
    if values is not None and len(values.finite) >= 5 and len(set(values.finite)) == 1 and moving:
        return warning(
            f"{values.name} is {values.finite[0]:.4g} in all {len(values.finite)} steps: the critic is never updated",
            values,
            values.shown(values.finite[0], "another number in every step"),
            cause=_NOTHING,
            next_step="print the critic's learning rate and the norm of its gradient after a step",
        )
    if loss is not None and (anew := _starts_anew(log, loss)) is not None:
        return anew
    if loss is not None and len(loss.finite) >= 8 and trends.rises(loss.finite):
        begun, now = median(loss.finite[:3]), median(loss.finite[-3:])
        if begun > 0 and now > EXPLODED * begun:
            return warning(
                f"the value loss explodes: {loss.name} goes from {begun:.3g} to {now:.3g}",
                loss.between(over=EXPLODED * begun),
                loss.shown(now, f"< {EXPLODED:g} x {begun:.3g}"),
                cause="the critic diverges: its learning rate is too high, its targets grow with its own values, or "
                "returns are not clipped or scaled",
                next_step="lower the critic's learning rate; look at values and returns of the same steps",
            )
    if (turned := _of_other_sign(log)) is not None:
        return turned
    if (behind := _stays_behind(log)) is not None:
        return behind
    series = log.get("explained_variance")
    if series is None or len(series.finite) < 10:
        raise Skip("needs the explained variance of 10 steps")
    if _no_nearer(series.finite, loss.finite if loss is not None else []):
        now = trends.level(series.finite)
        early = len(series.finite) < SETTLED and values is not None and _moves(values.finite, loss)
        mean = now > WORSE and _has_come_to(values, returns)
        return finding(
            # Of two responses a share of a variance is one of a single difference.
            "info" if early or mean or is_of_two(log) else "warning",
            f"the critic knows the mean of its returns, and nothing of what they differ by: {series.name} is {now:.2g}"
            if mean
            else f"the critic explains nothing of its returns and comes no nearer to them: {series.name} is {now:.2g}",
            series.ended,
            series.shown(now, "> 0"),
            *([loss.shown(trends.level(loss.finite), f"was {loss.finite[0]:.3g}")] if loss and loss.finite else []),
            cause="it is updated: its mean value came to that of the returns; what is left of them may be chance, or "
            "what a prompt does not tell"
            if mean
            else _NOTHING,
            next_step="rldbg record -- YOUR COMMAND, then rldbg diagnose rldbg-dump --rule D44",
        )
    return None


#: Steps on either side of a leap of the value loss; what it had come to of its beginning, and how many times the most
#: of the steps before it leaps to; where the explained variance then is, at the most, in the first of them.
AROUND, LEARNT_BY, LEAPS, LOST = 5, 0.5, 10.0, -1.0


def _starts_anew(log: RunLog, loss: Series) -> Finding | None:
    """A value loss that had fallen, leaps at one step past where it began, and falls again from there, while the
    explained variance leaves its range: what the critic had learnt is gone at once.
    """
    points = [point for point in loss.points if math.isfinite(point.value)]
    values = [point.value for point in points]
    explained = log.get("explained_variance")
    for at in range(2 * AROUND, len(values) - AROUND + 1):
        before = values[at - AROUND : at]
        begun = median(values[:3])
        if not 0 < median(before) < LEARNT_BY * begun or values[at] < max(LEAPS * max(before), begun):
            continue
        # What leaps in one step alone, or stays, is no critic that begins to learn.
        after = values[at : at + AROUND]
        if min(after) < LEAPS / 2 * median(before) or median(values[-3:]) > LEARNT_BY * values[at]:
            continue
        later = [point.value for point in explained.points if point.step == points[at].step] if explained else []
        if not later or later[0] > LOST:
            continue
        step = points[at].step
        return warning(
            f"the critic starts anew at step {step}: {loss.name} leaps from {median(before):.3g} to {values[at]:.3g}, "
            "past where it began, and has to be learnt again",
            points[at].where(loss.name),
            loss.shown_at(points[at], f"about {median(before):.3g}"),
            shown(f"{loss.name} in the first steps", begun),
            shown("explained variance at that step", later[0], "> 0"),
            cause="what the critic had learnt is lost: its weights (or its value head) were not loaded at a resume, or "
            "were initialised again; or its targets are on another scale from that step on. Advantages are noise until "
            "it has learnt again",
            next_step="compare the critic's checkpoint with what is loaded at that step; look at the mean return there",
            steps=[point.step for point in points[at:]],
        )
    return None


#: Steps of a critic that stays behind; how far values may go of what lies between them and the returns; what is left of
#: that distance, and of the loss, at the least; and of the loss, how much the distance alone makes.
BEHIND_STEPS, WENT_OF, STAYS_OFF, STILL_LOST, MADE_OF = 24, 0.25, 0.8, 0.9, 0.5


def _stays_behind(log: RunLog) -> Finding | None:
    """Values that stand off the returns from the first step to the last, and a loss that does not fall."""
    values, loss = log.get("value_mean"), log.get("value_loss")
    returns = log.get("return_mean") or log.get("reward")
    rates = log.get("critic_learning_rate") or log.get("learning_rate")
    if values is None or loss is None or returns is None or (rates is not None and not any(rates.finite)):
        return None
    rows = [row for _, row in together(values, returns, loss)]
    third = len(rows) // 3
    if len(rows) < BEHIND_STEPS:
        return None
    first, last = ([fmean(each) for each in zip(*part, strict=True)] for part in (rows[:third], rows[-third:]))
    off_first, off_last = abs(first[0] - first[1]), abs(last[0] - last[1])
    went = max(row[0] for row in rows) - min(row[0] for row in rows)
    # A critic that learns nears its returns in the first steps already.
    begins = fmean(abs(row[0] - row[1]) for row in rows[:3])
    if (
        not off_first > 0
        or abs(last[0] - first[0]) > WENT_OF * off_last
        or off_last < STAYS_OFF * max(off_first, begins)
    ):
        return None
    if not last[2] > 0 or last[2] < STILL_LOST * first[2] or off_last**2 < MADE_OF * last[2] or went > off_last:
        return None
    norms = log.get("critic_grad_norm")
    return warning(
        f"the critic does not learn: {values.name} stays at {last[0]:.3g} ({first[0]:.3g} at first), while "
        f"{returns.name} is {last[1]:.3g} ({first[1]:.3g} at first), and {loss.name} goes from {first[2]:.3g} to "
        f"{last[2]:.3g}",
        values,
        values.shown(values.last.value, f"about {last[1]:.3g}, as {returns.name}"),
        loss.shown(loss.last.value, f"< {first[2]:.3g}"),
        *([norms.shown(trends.level(norms.finite), "falling as it learns")] if norms and norms.finite else []),
        *([rates.shown(rates.last.value)] if rates and rates.finite else []),
        cause="no update reaches the critic: its optimizer holds other parameters than the model that is run (made "
        "before it was wrapped or moved), its step is never taken, its weights are loaded anew or frozen; or its "
        "targets are not the returns. Advantages are then rewards less a constant",
        next_step="compare a weight of the critic before and after its optimizer's step; rldbg record --params . -- "
        "YOUR COMMAND, then compare the critic's weights of two of its steps",
    )


#: What of the distance to the mean return is left of a critic that has come to it; an explained variance under that is
#: worse than no critic.
COME, WORSE = 0.25, -0.2
COME_STEPS = 5


def _has_come_to(values: Series | None, returns: Series | None) -> bool:
    """Whether the mean value began off the mean return and has come to it: the critic is updated, and towards them."""
    if values is None or returns is None:
        return False
    rows = [row for _, row in together(values, returns)]
    if len(rows) < 2 * COME_STEPS:
        return False
    half = len(rows) // 2
    due = median(returned for _, returned in rows)
    late = median(value for value, _ in rows[half:]) - median(returned for _, returned in rows[half:])
    return abs(late) < COME * abs(rows[0][0] - due)


#: Steps of a log in all of which values and returns lie on two sides of 0; the least size of the values beside them.
OTHER_SIDE, AS_LARGE = 9, 0.25


#: What the returns have to move by before it tells, in shares of their size; and what of it values that stand do.
WENT, STOOD = 0.25, 0.25
#: Correlation of mean values and mean returns over the steps of which the sign is turned.
AGAINST = -0.7
#: What is left of the distance of values and returns where they come nearer to each other.
NEARER = 0.9


def _of_other_sign(log: RunLog) -> Finding | None:
    """Mean values on one side of 0 and mean returns on the other in every step, of like size to the end and no nearer:
    a new critic may begin there. Only where the explained variance is logged, and says that they are worse than none.
    """
    values, returns = log.get("value_mean"), log.get("return_mean")
    if values is None or returns is None:
        return None
    rows = [(value, due) for _, (value, due) in together(values, returns)]
    if len(rows) < OTHER_SIDE or any(value * due >= 0 for value, due in rows):
        return None
    late = rows[len(rows) // 2 :]
    times = median(abs(value / due) for value, due in late)
    explained = log.get("explained_variance")
    if explained is None or not explained.finite or not median(explained.finite) < 0:
        return None
    third = len(rows) // 3
    begun, ended = (median(abs(value - due) for value, due in part) for part in (rows[:third], rows[-third:]))
    if not AS_LARGE <= times <= 1 / AS_LARGE or ended < NEARER * begun:
        return None
    value, due = (median(each) for each in zip(*late, strict=True))
    # Targets that move tell a sign that is turned, which follows them the other way, from values that stand.
    moved = [median(part[at] for part in rows[-third:]) - median(part[at] for part in rows[:third]) for at in (0, 1)]
    told = abs(moved[1]) > WENT * abs(due)
    against = trends.line([due for _, due in rows], [value for value, _ in rows])[0]
    stands = told and abs(moved[0]) < STOOD * abs(moved[1])
    turned = against < AGAINST or (told and not stands and moved[0] * moved[1] < 0)
    stands = stands and not turned
    figures = [
        values.shown(value, f"about {due:.3g}"), returns.shown(due), explained.shown(median(explained.finite), "> 0"),
        shown("what the values moved by, first third to last", moved[0], f"towards {moved[1]:.3g}"),
        shown("what the returns moved by", moved[1]), shown("correlation of the two over the steps", against),
    ]  # fmt: skip
    medians = f"{values.name} is {value:.3g} and {returns.name} {due:.3g} (medians)"
    norms = log.get("critic_grad_norm")
    taught = norms is not None and bool(norms.finite) and min(norms.finite) > 0
    if stands:
        return warning(
            f"the critic is never updated: {values.name} stays where it began, at {value:.3g}, while {returns.name} "
            f"goes from {median(each for _, each in rows[:third]):.3g} to {due:.3g}",
            values, *figures,
            cause=("its gradient is not 0, and reaches other parameters: its optimizer holds a copy of them, or those "
                   "before they were wrapped; or it is not stepped, or its learning rate is 0" if taught else _NOTHING),
            next_step="print the critic's learning rate, and compare id(p) of its optimizer's parameters with those "
            "of the critic; rldbg record -- YOUR COMMAND, then rldbg diagnose rldbg-dump --rule D45",
        )  # fmt: skip
    return warning(
        (f"values have the sign of the returns turned: {medians}, on two sides of 0 in all {len(rows)} steps"
         if turned else
         f"values and returns lie on two sides of 0 in all {len(rows)} steps, and come no nearer: {medians}"),
        values, *figures,
        cause="values are negated where they are read (a cost for a return, a sign in the head), or the critic is "
        "taught other targets than these returns: advantages count twice what was expected, instead of leaving it out"
        + ("" if turned else "; or the critic is never updated and its values stay where they began. Values of one "
           "sample before and after an update tell which"),
        next_step="rldbg record -- YOUR COMMAND, then rldbg diagnose rldbg-dump --rule D44",
    )  # fmt: skip


#: How far the critic's mean may lie from its returns', in multiples of the largest return, before it has overshot.
OVERSHOT = 2.0


_SOURCE = "a critic's mean lies within the range of its returns"
_PAST = ("D45", "L10", "L08", "L09", "L02", "D20", "D24", "D25")


class _Overshot(Struct, frozen=True):
    """Steps (step, mean value, mean return) that lie past their targets, and the worst of them."""

    bad: list[tuple[int, float, float]]
    steps: int
    size: float
    first: float

    def told(self, where: Where) -> Finding:
        step, value, due = max(self.bad, key=lambda one: abs(one[1] - one[2]))
        return finding(
            "error" if 2 * len(self.bad) >= self.steps else "warning",
            f"the critic's values explode past their targets: their mean is {value:.3g} at step {step}, and the "
            f"return's {due:.3g}",
            where,
            shown("mean value", value, f"within {OVERSHOT * self.size:.3g} of the return"),
            shown("mean value off the return in the first step", self.first),
            shown("steps", share(len(self.bad), self.steps)),
            cause="the critic's learning rate is too high: its values explode past their targets and swing back; or it "
            "is taught other targets than the returns that are logged (another scale or unit)",
            next_step="lower the critic's learning rate ten times; look at its loss and gradient norm",
            steps=[each[0] for each in self.bad],
        )


#: How many times the span of the returns values lie outside of it, in that share of the steps and of the last of them.
OUTSIDE, MOSTLY, LAST = 1.0, 0.5, 5
#: Steps of values and returns that tell whether a critic overshoots.
OVERSHOT_STEPS = 4


def is_far_outside(log: RunLog) -> bool:
    """Whether the largest or least value of a step lies outside of the returns' range by more than all they span, in
    half of the steps and more, and of the last 5: that is no critic that has yet to learn.
    """
    every = [log.get(name) for name in ("value_max", "value_min", "return_max", "return_min")]
    known = [one for one in every if one is not None]
    if len(known) < len(every):
        return False
    rows = [row for _, row in together(*known) if all(map(math.isfinite, row))]
    if len(rows) < LAST:
        return False
    most, least = max(row[2] for row in rows), min(row[3] for row in rows)
    far = [max(row[0] - most, least - row[1]) > OUTSIDE * (most - least) > 0 for row in rows]
    return sum(far) >= MOSTLY * len(far) and sum(far[-LAST:]) >= MOSTLY * LAST


def moves_too_far(log: RunLog) -> bool:
    """Whether the critic overshoots what is returned (D63), and its values lie far outside of that."""
    rows = together(log.get("value_mean"), log.get("return_mean"))
    means = [(step, value, due) for step, (value, due) in rows if step is not None]
    return len(means) >= OVERSHOT_STEPS and _overshot(means) is not None and is_far_outside(log)


def _overshot(means: list[tuple[int, float, float]]) -> _Overshot | None:
    skip_if(len(means) < OVERSHOT_STEPS, f"needs values and returns of {OVERSHOT_STEPS} steps")
    size, first = max(abs(due) for _, _, due in means), abs(means[0][1] - means[0][2])
    bad = [
        one for one in means[1:]
        if abs(one[1] - one[2]) > max(OVERSHOT * size, first) and size > 0 and not _is_on_its_way(means[0][1], *one[1:])
    ]  # fmt: skip
    return _Overshot(bad, len(means), size, first) if len(bad) >= 2 else None


#: What of the way from where values began to their return they may lie before or behind it.
ASIDE = 0.25


def _is_on_its_way(begun: float, value: float, due: float) -> bool:
    """Whether a value lies between where it began and its return: returns that rise leave a slow critic behind."""
    aside = ASIDE * abs(due - begun)
    return min(begun, due) - aside <= value <= max(begun, due) + aside


@rule("D63", "the critic overshoots its returns", link="optimizer", scope="case", explains=_PAST, source=_SOURCE)
def overshoots_rewards(case: Case) -> Finding | None:
    """As of a log, of recorded values of tokens that count, beside what the responses earned in all: GAE's returns
    hold the critic's own values, and go with them.
    """
    means, places = list[tuple[int, float, float]](), {}
    for batch in case.batches():
        values, trained_N = batch.columns.of("values"), batch.trained_N
        told = batch.columns.of("token_rewards") or batch.columns.of("token_scores")
        if values is None or trained_N is None or batch.step is None:
            continue
        inside = values.values_N[trained_N & values.said_N & np.isfinite(values.values_N)]
        heard_B = batch.flat.count(trained_N) > 0
        earned_B = batch.reward_B
        if told is not None:
            earned_N = np.nan_to_num(np.where(trained_N & told.said_N, told.values_N, 0.0))
            earned_B = np.bincount(batch.flat.sample_N, weights=earned_N, minlength=len(batch))
        if earned_B is None or not inside.size or not np.isfinite(earned_B[heard_B]).all():
            continue
        means.append((batch.step, float(inside.mean()), float(earned_B[heard_B].mean())))
        places[batch.step] = batch.laid.where("values", sample=0)
    over = _overshot(means)
    return None if over is None else over.told(places[over.bad[0][0]])


@rule("D63", "the critic overshoots its returns", link="optimizer", scope="signals",
      needs=("value_mean", "return_mean"), explains=_PAST, source=_SOURCE)  # fmt: skip
def overshoots(log: RunLog) -> Finding | None:
    """|mean value - mean return| over twice the largest |mean return| in two steps and more, none of them the first,
    and more than in the first step, past what lies between the first value and the return: a warning, an error in half
    of the steps, or where the largest and least values lie far outside of the returns' range in as many and to the end.
    A critic that is loaded may begin far off, and comes nearer.
    Values and returns that go up together to three times the most that is paid and more, and were no more than it at
    first: an error. Returns hold the critic's own values, so that both run away beside each other.
    """
    values, returns = given(log.get("value_mean")), given(log.get("return_mean"))
    rows = [(step, value, due) for step, (value, due) in together(values, returns) if step is not None]
    over = _overshot(rows)
    if over is None:
        return _beyond_what_is_paid(log, values, returns)
    worst = max(over.bad, key=lambda one: abs(one[1] - one[2]))
    told = over.told(next(point for point in values.points if point.step == worst[0]).where(values.name))
    if not is_far_outside(log):
        return told
    beside = [
        one.shown(edge(one.finite), f"about {edge(due.finite):.3g}")
        for name, of, edge in (("value_max", "return_max", max), ("value_min", "return_min", min))
        if (one := log.get(name)) is not None and (due := log.get(of)) is not None
    ]
    explained = log.get("explained_variance")
    if explained is not None and explained.finite:
        beside.append(explained.shown(median(explained.finite), "> 0"))
    return replace(told, severity="error", evidence=(*told.evidence, *beside))


#: How many times the most that is paid values and returns come to before they hold nothing but each other; steps that
#: tell it, and those at either end.
BEYOND, RUN_AWAY, ENDS = 3.0, 16, 4


def _beyond_what_is_paid(log: RunLog, values: Series, returns: Series) -> Finding | None:
    """A critic that is taught its own values: they and the returns rise without a bound, where rewards have one."""
    paid = log.get("reward")
    if paid is None or len(paid.finite) < RUN_AWAY or min(len(values.finite), len(returns.finite)) < RUN_AWAY:
        return None
    known = [
        abs(value) for name in ("reward", "reward_max", "reward_min") for one in log.all(name) for value in one.finite
    ]
    most = max(known)
    ends = [(median(one.finite[:ENDS]), median(one.finite[-ENDS:])) for one in (values, returns)]
    if not most or not all(abs(begun) <= most and now > BEYOND * most for begun, now in ends):
        return None
    if not all(trends.drift(one.finite) > trends.DRIFT_Z for one in (values, returns)):
        return None
    return error(
        f"the critic runs away: mean values and returns come to {ends[0][1]:.3g} and {ends[1][1]:.3g}, where no reward "
        f"is over {most:.3g}",
        next(point for point in values.points if point.value > BEYOND * most).where(values.name),
        values.shown(ends[0][1], f"about {paid.finite[-1]:.3g}"),
        returns.shown(ends[1][1], f"< {most:.3g} where rewards are not paid twice"),
        shown("the most that is paid", most),
        shown("mean value and return at first", f"{ends[0][0]:.3g}, {ends[1][0]:.3g}"),
        cause="returns are made of the critic's own values, and each update adds to them: the last token's value is "
        "bootstrapped although the response has ended, the value of another place is taken for the next token's, "
        "or the reward is added for every token; the critic follows its targets, and both rise without a bound",
        next_step="print rewards, values and returns of one response: its last return is its last reward; rldbg record "
        "-- YOUR COMMAND, then rldbg diagnose rldbg-dump --rule D44",
        steps=[point.step for point in values.points if point.step is not None and point.value > BEYOND * most],
    )


#: Tokens of a response that are followed for places that samples share.
FOLLOWED = 64


class _Shared(Struct):
    """Over the steps of a run: how far values lie apart at places that samples share, and go apart from (`parted`), and
    where they share the place's token, too (`shared`).
    """

    parted: list[float] = field(default_factory=list)
    shared: list[float] = field(default_factory=list)
    where: Where | None = None
    steps: set[int] = field(default_factory=set)

    def take(self, batch: StepBatch) -> None:
        values = batch.columns.of("values")
        if values is None or not is_of_gae(batch):
            return
        places = defaultdict[int, dict[int, list[float]]](lambda: defaultdict(list))
        for before, here, at in places_of(batch, FOLLOWED):
            if values.said_N[at] and np.isfinite(values.values_N[at]):
                places[before][here].append(float(values.values_N[at]))
        apart = [float(np.ptp([each[0] for each in tokens.values()])) for tokens in places.values() if len(tokens) > 1]
        self.parted += apart
        self.shared += [float(np.ptp(each)) for tokens in places.values() for each in tokens.values() if len(each) > 1]
        if apart:
            self.where = self.where or batch.laid.where("values", sample=0)
            self.steps |= set() if batch.step is None else {batch.step}

    def told(self) -> Finding | None:
        if len(self.parted) < TOKENS or len(self.shared) < TOKENS:
            return None
        apart, same = float(np.mean(self.parted)), float(np.mean(self.shared))
        if apart < APART or same > NEAR * apart:
            return None
        return error(
            "values are read one token late: each depends on the very token whose value it is to be before",
            self.where,
            shown("mean range of values where samples differ in that token alone", apart, "0"),
            shown("where they share it, too", same),
            shown("places", len(self.parted)),
            cause="a slice is one off where the critic is read: the value of a state holds what was done in it, and "
            "advantages no longer tell of the token; the reward's token has the value of what comes after the end",
            steps=sorted(self.steps),
        )


#: Neighbouring tokens that tell; how far values have to be from the critic's own, and how near beside.
TOKENS, APART, NEAR = 12, 1e-3, 0.05


@rule("D101", "values lie beside their tokens", link="advantages", scope="case", lasts=True,
      explains=("D44", "D45", "D52", "D96", "L08"),
      source="V(s_t) is read before token t is: the same places in the rollout and in the critic's update")  # fmt: skip
def beside(case: Case) -> Finding | None:
    """The recorded values beside what the critic gives in the first optimizer step over them, which has the same
    weights: an error where they are those of the token before or after (to a twentieth of their distance to those of
    their own token, and 1e-3 of it and more), over 12 tokens and more.

    And values of samples that share a prompt and all tokens before a place, and there go apart: a value that is read
    before its token is one number at such a place. An error where it is one where the token is shared, too, and
    another where only the token differs (12 such places and more), while GAE makes the returns of it as it is.

    Where these are not the critic's own values (over a quarter of their spread from them, in the mean, a correlation
    below .9): an error where they are those of other samples, in three of ten rows that tell; a warning where one
    factor (1.05 times and more off 1) makes nearly all of them, or nothing known does, in 2 steps and more.
    """
    known = _Shared()
    for batch in case.batches():
        known.take(batch)
    if (told := known.told()) is not None:
        return told
    own, after, before = [], [], []
    where, steps = None, set()
    for batch in case.batches():
        for part in value_rows(batch):
            if part.epoch or part.minibatch or part.may_be_later:
                continue
            same = part.sample[1:] == part.sample[:-1]
            inner = np.flatnonzero(same[1:] & same[:-1]) + 1
            if not len(inner):
                continue
            own.append(np.abs(part.old - part.new)[inner])
            after.append(np.abs(part.old[inner] - part.new[inner + 1]))
            before.append(np.abs(part.old[inner] - part.new[inner - 1]))
            where = where or batch.laid.where("values", sample=0)
            if batch.step is not None:
                steps.add(batch.step)
    if not own or sum(map(len, own)) < TOKENS or where is None:
        raise Skip(f"needs values, and a critic's new ones in its first update, of {TOKENS} tokens")
    apart, late, early = (float(np.concatenate(each).mean()) for each in (own, after, before))
    size = float(np.concatenate(own).size)
    if apart < APART or min(late, early) > NEAR * apart:
        return _not_its_own(case)
    words = "after" if late < early else "before"
    return error(
        f"values are shifted by one token: each is what the critic gives at the token {words} it, before any update",
        where,
        shown("mean distance to the critic's value of the same token", apart, "0"),
        shown(f"to that of the token {words}", min(late, early)), shown("tokens", size),
        cause="a slice is one off where values are read before the updates, or where the critic is updated: a value is "
        "of the state before its token; GAE and returns are then of other places than the critic's predictions",
        steps=sorted(steps),
    )  # fmt: skip


#: Of the values' spread, how far recorded ones lie from the critic's own before they are others; the correlation that
#: rounding, dropout and a scale leave; steps that show it; how far off 1 a factor is no rounding, and what it leaves.
FAR, TOGETHER, SHOWN, FACTOR, LEAVES = 0.25, 0.9, 2, 1.05, 0.02
#: Rows that tell whose values they have, of those the share that has another row's, and tokens of a row that tell.
TELLING, OTHERS, OF_A_ROW = 6, 0.3, 3


def _not_its_own(case: Case) -> Finding | None:
    """Values that are not those the critic gives these samples in its first update, nor its neighbours': another
    sample's, a multiple of them, or nothing known.
    """
    told, foreign, telling, looked = [], 0, 0, 0
    pairs: list[tuple[int, int]] = []
    for batch in case.batches():
        parts = [part for part in value_rows(batch) if not (part.epoch or part.minibatch or part.may_be_later)]
        if not parts or sum(len(part.new) for part in parts) < TOKENS:
            continue
        new, old = (np.concatenate([getattr(part, name) for part in parts]) for name in ("new", "old"))
        rows = np.concatenate([part.sample + 1e6 * at for at, part in enumerate(parts)])
        looked += 1
        spread = float(new.std())
        if not spread > APART or not old.std() > 0:
            continue
        factor = float(new @ old) / float(new @ new)
        is_scaled = float(np.abs(old - factor * new).max()) <= LEAVES * float(np.abs(old).max())
        alike = float(np.corrcoef(new, old)[0, 1])
        if is_scaled and factor > 0 and max(factor, 1 / factor) > FACTOR:
            told.append((batch, factor, alike, float(np.abs(old - new).mean())))
        elif alike < TOGETHER and float(np.abs(old - new).mean()) > FAR * spread:
            told.append((batch, math.nan, alike, float(np.abs(old - new).mean())))
            whose = _whose(new, old, rows)
            telling += len(whose)
            foreign += sum(own != other for own, other in whose)
            pairs += [(own, other) for own, other in whose if own != other]
    if len(told) < SHOWN or 2 * len(told) < looked:
        return None
    batch, factor, alike, apart = told[0]
    place = batch.laid.where("values", sample=0)
    steps = sorted({each.step for each, *_ in told if each.step is not None})
    figures = [
        shown("mean distance to what the critic gives the same tokens", apart, "0"),
        shown("correlation of the two", alike, "1"),
        shown("steps that show it", len(told), None, f"of {looked}"),
    ]
    next_step = "rldbg diagnose --explain D101   # then read the critic twice over one micro-batch"
    if telling >= TELLING and foreign >= OTHERS * telling:
        return error(
            f"values are those of other samples: in {foreign} of {telling} rows they are what the critic gives another "
            "row of the batch, before any update",
            place, *figures,
            shown("first: the row, and whose values it has", ", ".join(f"{own}: {other}" for own, other in pairs[:4])),
            cause="rows are picked twice, or with indices of another loop, where values are read before the updates: "
            "advantages and returns of a sample are made of another sample's values",
            next_step=next_step, steps=steps,
        )  # fmt: skip
    factors = [each for _, each, *_ in told]
    if not any(math.isnan(each) for each in factors) and np.ptp(factors) <= LEAVES * max(factors):
        return warning(
            f"values are {factor:.4g} times what the critic gives the same tokens in its first update",
            place, *figures,
            cause="they are scaled on one side alone: divided by the sampling temperature like logits, by a running "
            "scale that is not undone, or by a setting of the rollout's critic",
            next_step=next_step, steps=steps,
        )  # fmt: skip
    if all(math.isnan(each) for each in factors):
        return warning(
            "values are not what the critic gives the same tokens in its first update, before anything moved",
            place, *figures,
            cause="they are of other weights (a critic that was updated in between, or is loaded anew), of rows in "
            "another order, or dropout is on in one of the two",
            next_step=next_step, steps=steps,
        )  # fmt: skip
    return None


def _whose(new: Array, old: Array, rows: Array) -> list[tuple[int, int]]:
    """(row, the row whose new values its old ones are), of rows whose values are one row's alone."""
    each = [np.flatnonzero(rows == row) for row in np.unique(rows)]
    found = []
    for at, own in enumerate(each):
        if len(own) < OF_A_ROW:
            continue
        near = []
        for other in each:
            size = min(len(own), len(other))
            is_told = size >= OF_A_ROW
            near.append(float(np.abs(old[own[:size]] - new[other[:size]]).mean()) if is_told else math.inf)
        best = int(np.argmin(near))
        if near[best] <= NEAR * max(near[at], APART) or (best == at and near[at] <= APART):
            found.append((at, best))
    return found


#: Steps, and tokens of each, before a scale is one; how many times the largest return values may come to.
STEPS, FEWEST_TOKENS, TIMES = 3, 16, 4.0
#: Of smaller returns than that a new critic's values are as many times as large.
UNIT = 0.5
#: Correlation from which values follow their returns, and how far their slope may be off 1.
FOLLOW, OFF = 0.8, 2.0


@rule("D96", "values are on another scale than returns", link="advantages", scope="case", lasts=True,
      explains=("D45", "D63", "L02", "L08", "L10"),
      source="value normalisation (PopArt, running mean and std) that is not undone; a critic of a reward model's "
      "head")  # fmt: skip
def other_scale(case: Case) -> Finding | None:
    """The root mean square of values over tokens that count beside the largest |return| of the run, in 3 steps and more
    of 16 tokens: a warning where it is 4 times as much (and over 2) in three of four steps, or where values and returns
    rise and fall together (correlation over .8 in every step) and returns are less than half of them, or more than
    twice (least squares, the median over steps). A new critic's values are about as large as returns, and have nothing
    to do with them.
    """
    sizes: list[float] = []
    slopes: list[float] = []
    alike: list[float] = []
    explained: list[float] = []
    steps: list[int] = []
    largest, where = 0.0, None
    for batch in case.batches():
        values, returns = batch.columns.of("values"), batch.columns.of("returns")
        if values is None or returns is None or batch.step is None or batch.trained_N is None:
            continue
        both_N = batch.trained_N & values.said_N & returns.said_N
        both_N &= np.isfinite(values.values_N) & np.isfinite(returns.values_N)
        v, r = values.values_N[both_N], returns.values_N[both_N]
        if v.size < FEWEST_TOKENS or not np.ptp(r) > 0:
            continue
        where = where or batch.laid.where("values", sample=0)
        steps.append(batch.step)
        sizes.append(float(np.sqrt((v * v).mean())))
        largest = max(largest, float(np.abs(r).max()))
        explained.append(1 - float((r - v).var() / r.var()))
        varies = float(v.var()) > 0
        slopes.append(float(np.cov(v, r)[0, 1] / v.var(ddof=1)) if varies else 0.0)
        alike.append(float(np.corrcoef(v, r)[0, 1]) if varies else 0.0)
    skip_if(len(steps) < STEPS, f"needs values and returns of {STEPS} steps")
    slope = float(np.median(slopes))
    if min(alike) > FOLLOW and (slope > OFF or slope < 1 / OFF):
        claim = f"values are {1 / slope:.3g} times their returns: they follow them on another scale"
        told = [shown("returns over values, slope", slope, "1"), shown("least correlation of a step", min(alike))]
    elif (size := float(np.quantile(sizes, 0.25))) > TIMES * max(largest, UNIT):
        claim = f"values are on another scale than returns: {size / largest:.3g} times as large and more"
        told = [
            shown("root mean square of values, in three of four steps more than", size, f"< {TIMES * largest:.3g}"),
            shown("largest |return| of the run", largest),
        ]
    else:
        return None
    return warning(
        claim,
        where,
        *told,
        shown("explained variance, median", float(np.median(explained)), "> 0"),
        cause="the critic's output is in another unit: normalised targets whose mean and std are not put back "
        "(PopArt, value norm), a head that was taken over from a reward model or badly initialised, rewards that are "
        "scaled for the returns alone. Advantages are then what the critic is off by, not what was earned",
        steps=steps,
    )
