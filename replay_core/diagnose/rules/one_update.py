"""A log in which one update broke the policy, or the first ones unlearn: what comes after is their doing."""

from __future__ import annotations

import math
from itertools import accumulate
from statistics import median

from replay_core.diagnose import trends
from replay_core.diagnose.entropy_term import fitted_bonus
from replay_core.diagnose.finding import Evidence, Finding, error, shown
from replay_core.diagnose.rule import Skip, given, rule, skip_if
from replay_core.diagnose.rules.entropy import ENTROPY_MIN
from replay_core.diagnose.signals import Point, RunLog, Series

#: How many times the largest norm of all steps before makes an update that no batch explains; steps before and after
#: it, and how long after it the fall may begin.
LEAPS, BEFORE, AFTER, SOON = 20.0, 4, 3, 2
#: What may be left of the reward's median before it.
LEFT = 0.5


@rule("L39", "one update broke the policy", link="trend", scope="signals", needs=("grad_norm",), lasts=True,
      explains=("D01", "D02", "D03", "D09", "D20", "D23", "D24", "D25", "L01", "L02", "L08", "L09", "L10", "L16", "L17",
                "L18", "L20"),
      source="DanceGRPO#55: an outlier batch, a gradient norm a thousand times the rest")  # fmt: skip
def broken_by_one(log: RunLog) -> Finding | None:
    """A gradient norm (before clipping) of 20 times the largest of all steps before it (4 and more), after which,
    within 2 steps and to the end (3 steps and more), every reward is below half of the median before and below the
    least of it, or every entropy below .05 and below a quarter of the least before: an error. A judge that dies
    leaves no such norm, and a spike that clipping took care of leaves the reward.
    """
    norms = given(log.get("grad_norm"))
    points = [point for point in norms.points if point.step is not None and not math.isnan(point.value)]
    skip_if(len(points) < BEFORE + AFTER + 1, f"needs grad_norm of {BEFORE + AFTER + 1} steps")
    largest = list(accumulate((point.value for point in points), max))
    for at in range(BEFORE, len(points) - 1):
        before = largest[at - 1]
        if not points[at].value > LEAPS * before > 0:
            continue
        told = _falls(log, given(points[at].step))
        if told is not None:
            begun, evidence = told
            return error(
                f"one update broke the policy: a gradient spike at step {points[at].step}, {norms.name} jumps to "
                f"{points[at].value:.3g} from at most {before:.3g}, and what follows never recovers",
                points[at].where(norms.name),
                norms.shown_at(points[at], f"< {LEAPS:g} x {before:.3g}"),
                *evidence,
                cause="an outlier in that batch (a huge advantage or reward, a group whose spread is rounding, a ratio "
                "that overflowed) made a gradient that is not clipped, or is clipped far too high: the weights leapt "
                "away in one step",
                next_step=f"clip the gradient at 1; look at rewards and advantages of step {points[at].step}: rldbg "
                "record -- YOUR COMMAND",
                steps=[points[at].step, *begun],
            )
    return None


def _falls(log: RunLog, step: int) -> tuple[list[int], list[Evidence]] | None:
    """Steps after this one in which the reward or the entropy is gone, and figures; None where neither is."""
    for name in ("reward", "entropy"):
        series = log.get(name)
        every = [] if series is None else [p for p in series.points if p.step is not None and math.isfinite(p.value)]
        before = [point.value for point in every if given(point.step) <= step]
        after = [point for point in every if given(point.step) > step]
        if series is None or len(before) < BEFORE:
            continue
        limit = min(LEFT * median(before), min(before)) if name == "reward" else min(ENTROPY_MIN, min(before) / 4)
        for late in range(SOON):
            gone: list[Point] = after[late:]
            if len(gone) >= AFTER and max(point.value for point in gone) < limit:
                return [given(point.step) for point in gone], [
                    shown(f"{series.name} before, median", median(before)),
                    shown(f"{series.name} after, at most", max(point.value for point in gone), f">= {limit:.3g}"),
                ]
    return None


#: Steps in which it is lost, and what is left of the first reward in every step after them.
WITHIN, LEFT_OF_FIRST = 6, 0.1
#: Less than this a few answers that were right by chance make.
AT_FIRST = 0.1


#: How near its last values an entropy lies that rests, how many times its first it is, and what of the first
#: gradients is left then.
RESTS, TIMES, NO_GRADIENT = 1e-3, 1.5, 0.05


def _becomes_uniform(log: RunLog) -> tuple[Series, Series] | None:
    """Entropy and gradient norm, where the one comes to rest at its largest and the other vanishes."""
    entropy, norms = log.get("entropy"), log.get("grad_norm")
    if entropy is None or norms is None or min(len(entropy.finite), len(norms.finite)) < trends.MIN_STEPS:
        return None
    top, last = max(entropy.finite), entropy.finite[-trends.MIN_STEPS :]
    rests = top < math.inf and min(last) >= (1 - RESTS) * top and top > TIMES * entropy.finite[0] > 0
    return (entropy, norms) if rests and norms.finite[-1] < NO_GRADIENT * norms.finite[0] else None


@rule("L36", "the reward is lost from the first update on", link="loss", scope="signals", needs=("reward",),
      lasts=True, explains=("D01", "D03", "D20", "D25", "L08", "L09", "L10", "L17", "L20"),
      source="a sign that is turned in loss or advantage")  # fmt: skip
def lost(log: RunLog) -> Finding | None:
    """The reward, .1 and more in the first step, falls in each of the next 2, to a tenth of the first within 6 steps,
    and stays below that in 8 steps and more: an error. What else breaks (length, answers cut off, entropy) comes after
    it; where the entropy comes to rest at its largest and the gradient vanishes, the policy became uniform, as one does
    whose weights shrink. Not where a held-out result rises, nor where the loss is the entropy bonus alone (D25).
    """
    series = given(log.get("reward"))
    values = series.values
    if len(values) < trends.MIN_STEPS + 3 or len(series.finite) < len(values):
        raise Skip(f"needs the reward of {trends.MIN_STEPS + 3} steps")
    first = values[0]
    gone = next((at for at, value in enumerate(values) if value <= LEFT_OF_FIRST * first), len(values))
    falls = first >= AT_FIRST and values[1] < first and values[2] < values[1]
    if (
        not falls
        or not 2 <= gone < WITHIN
        or len(values) - gone < trends.MIN_STEPS
        or max(values[gone:]) > LEFT_OF_FIRST * first
    ):
        return None
    if log.has("held_out") and trends.rises(given(log.get("held_out")).finite):
        return None
    skip_if(fitted_bonus(log) is not None, "the loss is the entropy bonus, which outweighs the reward (D25)")
    cut = log.get("truncated")
    before = cut is not None and cut.finite and max(cut.values[:gone]) < 0.25
    if (uniform := _becomes_uniform(log)) is not None:
        entropy, norms = uniform
        return error(
            f"the policy becomes uniform from the first updates on: {entropy.name} goes from {entropy.values[0]:.3g} "
            f"to {entropy.last.value:.4g} and rests there (ln {math.exp(entropy.last.value):.4g}), and {series.name} "
            f"falls from {first:.3g} to {values[gone]:.3g}",
            entropy,
            entropy.shown(entropy.last.value, "another number in every step"),
            series.shown_at(series.points[gone], f"> {LEFT_OF_FIRST * first:.3g}"),
            norms.shown(norms.last.value, f"was {norms.values[0]:.3g}"),
            cause="the weights shrink to nothing: a weight decay that is far too large (or applied without the "
            "learning rate), weights that are scaled in each update; no gradient is left where all logits "
            "are alike",
            next_step="print the norm of the weights before and after a step, and optimizer.param_groups[0]"
            "['weight_decay']",
        )
    return error(
        f"the reward falls from the first update on: {series.name} goes from {first:.3g} to {values[gone]:.3g} within "
        f"{gone + 1} steps and never comes back: the policy is trained to be worse",
        series.of(series.points[gone:]),
        series.shown_at(series.points[gone], f"> {LEFT_OF_FIRST * first:.3g}"),
        shown("the largest reward after it", max(values[gone:]), f"was {first:.3g}"),
        *([shown("largest share cut off until then", max(cut.values[:gone]))] if cut is not None and before else []),
        cause="the sign of the loss or of the advantages is turned, or the judge pays the opposite while the logged "
        "reward is another; else one update destroys the policy: a learning rate that is far too high, a loss that is "
        "summed and not divided. Lengths, cut answers and groups without a spread follow from it",
        next_step="rldbg record -- YOUR COMMAND, then rldbg diagnose rldbg-dump; a turned sign shows in the first "
        "step's advantages and losses",
    )
