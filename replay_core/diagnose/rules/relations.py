"""Relations that figures of a log keep in every step, whatever their size: what falls back to its beginning, what is
never negative, what is another figure divided by a third.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from replay_core.diagnose import trends
from replay_core.diagnose.algorithm import OF_GROUPS, severity_of_raw
from replay_core.diagnose.finding import Finding, error, finding, share, shown, warning
from replay_core.diagnose.rule import Skip, given, rule, skip_if
from replay_core.diagnose.rules.critic import moves_too_far
from replay_core.diagnose.rules.figures import agree, together
from replay_core.diagnose.signals import RunLog, Series
from replay_core.regexes import regex

if TYPE_CHECKING:
    from replay_core.documents.diagnosis import Severity

#: Steps on each side of a fall-back, and of its beginning.
SIDE = 4
#: How near its beginning a figure falls back to, as a share of the way it had come; and that way, in steps' own noise.
NEAR, FAR = 0.35, 3.0
#: Of the way that a figure had come, what is left of it where first weights did not come back.
STAYS = 0.9
#: A KL that has come to something, and what is nothing beside it.
LEVEL, NOTHING = 1e-3, 0.02
#: And how many times its beginning it has come to before it can fall back to that.
AWAY = 2.0
#: What of them is the policy's own in every step; results and single rewards are of some prompts, or of some steps.
_BY_WEIGHTS = ("reward", "entropy", "response_length")
_COMES_BACK = ("kl", "reward", "entropy", "response_length", "reward_function", "held_out")


def _stays(series: Series, step: int) -> bool:
    """Whether a series that had come far from its beginning by a step is there still after it, or farther."""
    at = next((place for place, point in enumerate(series.points) if point.step == step), 0)
    values = series.values
    if at < 2 * SIDE or at > len(values) - SIDE or not all(map(math.isfinite, values)):
        return False
    begun, before, after = (median(values[start : start + SIDE]) for start in (0, at - SIDE, at))
    noise = median(abs(b - a) for a, b in pairwise(values))
    return abs(before - begun) > FAR * noise and (after - begun) / (before - begun) >= STAYS


#: What part of the way is left at most in the first step of a run that has its first weights again.
AT_ONCE = 0.2


def _back_at(series: Series) -> int | None:
    """The place at which a series falls back to where it began, and stays; None where it does not."""
    values = series.values
    if len(values) < 4 * SIDE or not all(map(math.isfinite, values)):
        return None
    if series.signal == "kl":
        # However it wavers: of one and the same weights it is 0.
        for at in range(2 * SIDE, len(values) - 2):
            level = median(values[at - SIDE : at])
            # Peaks that had come down before are none that first weights took back.
            falls = min(values[at - SIDE : at]) > 0 and max(values[0], values[at]) < NOTHING * level
            falls = falls and values[at - 1] > 0.2 * level
            # One that never came far from its beginning wavers through 0 as its noise does.
            falls = falls and (values[at] == 0 or level > AWAY * median(values[:SIDE]))
            # Of exactly 0 there is one reason, and the first update may already take it far.
            soon = values[at + 1 : at + (2 if values[at] == 0 else 3)]
            if falls and level > LEVEL and max(soon) < 0.5 * level:
                return at
    begun = median(values[:SIDE])
    noise = median(abs(b - a) for a, b in pairwise(values))
    best: tuple[float, int] | None = None
    for at in range(2 * SIDE, len(values) - SIDE + 1):
        before, after = median(values[at - SIDE : at]), median(values[at : at + SIDE])
        way, left = before - begun, after - begun
        # Nearer its beginning, or past it: the way that it came is gone.
        if abs(way) <= max(FAR * noise, 1e-9) or not -1 <= left / way <= NEAR:
            continue
        step = (values[at - 1] - values[at]) * math.copysign(1, way)
        # A KL of peaks that had come down before is none that first weights took back.
        if series.signal == "kl" and abs(values[at - 1] - begun) < 0.5 * abs(way):
            continue
        # First weights have next to none of it: what is left of it at once is how far it wavers.
        if series.signal == "kl" and abs(values[at] - begun) > AT_ONCE * abs(way):
            continue
        if step > 0 and (best is None or step > best[0]):
            best = step, at
    return None if best is None else best[1]


def _is_reference_again(log: RunLog) -> Finding | None:
    """A KL of exactly 0 in the middle of a short run, where it had come to something and starts to grow anew."""
    far = log.get("kl")
    values = [] if far is None else far.values
    if far is None or len(values) >= 4 * SIDE:
        return None
    at = next((at for at in range(2, len(values) - 1)
               if values[at] == 0 and min(values[at - 2 : at]) > LEVEL
               and 0 < values[at + 1] < 0.5 * values[at - 1]), None)  # fmt: skip
    if at is None:
        return None
    told = []
    for series in (one for name in _BY_WEIGHTS if (one := log.get(name)) is not None):
        begun, before, after = series.finite[:1], series.finite[max(at - 3, 1) : at], series.finite[at : at + 3]
        if before and after:
            told.append(abs(median(after) - begun[0]) < abs(median(after) - median(before)))
    if 2 * sum(told) <= len(told):
        return None
    return warning(
        f"the policy is its reference again at step {far.points[at].step}: {far.name} falls from {values[at - 1]:.3g} "
        "to exactly 0, and starts anew",
        far.of(far.points[at:]),
        far.shown_at(far.points[at], f"about {values[at - 1]:.3g}"),
        shown("figures nearer to their beginning than to before", share(sum(told), len(told))),
        cause="what was trained is lost: the run resumed from the first weights (a checkpoint without weights, an old "
        "one, the base model's path); or the reference was overwritten with the policy (a sync of all models)",
        next_step="compare the weights of the checkpoint it resumed from with the base model's: rldbg compare "
        "CHECKPOINT BASE_MODEL",
    )


#: Of the loss of demonstrations: noise that its way was, and what of the way a held-out loss that was told keeps where
#: the weights are what they were.
_WAY, _KEEPS = 5.0, 0.5
#: What is logged of a policy that is trained on rewards.
_OF_RL = ("reward", "pg_loss", "kl", "advantage_mean", "policy_kl", "clip_fraction", "pair_reward", "pair_score")


def _taught_anew(log: RunLog) -> Finding | None:
    """The loss of demonstrations back where it began from one step to the next, and falling anew."""
    loss, held = log.get("loss"), log.get("held_out_loss")
    if loss is None or any(map(log.has, _OF_RL)) or (at := _back_at(loss)) is None:
        return None
    values = loss.values
    begun, before, after = (median(values[start : start + SIDE]) for start in (0, at - SIDE, at))
    noise, step = median(abs(b - a) for a, b in pairwise(values)), loss.points[at].step
    falls = trends.drift(values[at:]) < -trends.DRIFT_Z and trends.drift(values[:at]) < -trends.DRIFT_Z
    if not falls or begun - before < _WAY * noise or values[at] - values[at - 1] < 0.5 * (begun - before):
        return None
    if held is not None:
        earlier = [p.value for p in held.points if (p.step or 0) < (step or 0) and math.isfinite(p.value)]
        later = [p.value for p in held.points if (p.step or 0) >= (step or 0) and math.isfinite(p.value)]
        way = earlier[0] - earlier[-1] if len(earlier) > 1 else begun - before
        if earlier and later and later[0] - earlier[-1] < _KEEPS * max(way, 0.0) + noise:
            return None  # the weights know what they did: these demonstrations are others
    elif step is None or not _goes_the_same_way(loss, step, NEAR):
        return None
    return warning(
        f"the run starts again at step {step}: {loss.name} goes from {before:.3g} to {after:.3g} within one step, "
        f"where it began ({begun:.3g})"
        + ("" if held is None else f", {held.name} with it") + ", and falls anew: its weights are the first ones again",
        loss.of(loss.points[at:]),
        loss.shown_at(loss.points[at], f"about {before:.3g}"),
        cause="what was learnt is lost: the run resumed without its checkpoint's weights (another path, names that do "
        "not match and are skipped, an adapter that is made anew), or the model was built again",
        next_step="compare the weights of the checkpoint it resumed from with the first ones: rldbg compare "
        "CHECKPOINT BASE_MODEL; what the loading says of missing and unexpected names",
    )  # fmt: skip


#: How near the steps behind a fall-back lie to the first ones, as a share of the way that was gone.
SAME_WAY = 0.25


def _goes_the_same_way(series: Series, step: int, near: float = SAME_WAY) -> bool:
    """Whether what follows a step goes the way of the first steps once more, from where they began, for as long as both
    last: from other prompts nothing goes the same way.
    """
    at = next((place for place, point in enumerate(series.points) if point.step == step), 0)
    values = series.values
    count = min(at, len(values) - at)
    if at < 2 * SIDE or count < SIDE or not all(map(math.isfinite, values)):
        return False
    way = abs(median(values[at - SIDE : at]) - median(values[:SIDE]))
    off = sum(abs(values[at + k] - values[k]) for k in range(count)) / count
    leap, noise = abs(values[at] - values[at - 1]), median(abs(b - a) for a, b in pairwise(values))
    return way > 0 and off < near * way and leap > 0.5 * way and leap > FAR * noise


@rule("L24", "the run falls back to its beginning", link="optimizer", scope="signals",
      needs=("reward|kl|entropy|response_length|loss",), explains=("L08", "L09", "L10", "D25", "L20", "D46"),
      lasts=True,
      source="a checkpoint that is resumed from the first weights; a save that holds no weights")  # fmt: skip
def falls_back(log: RunLog) -> Finding | None:
    """From one step to the next the KL to the reference, and one of reward, entropy, length and results more, are back
    where they were in the first steps (within .35 of the way they had come, or as far past it at the most), and stay
    there for 4 (a KL to a fifth of the way at once): a warning. Without a logged KL three others have to, or two that
    go the whole way of the run's first steps once more (to a quarter of it on average, the other to .35). A KL may also
    fall to a fiftieth of itself, as it began. Each has to have come further than three times what a step changes, and
    none of reward, entropy and length may stay where it had come to (nine tenths of the way and more): first weights
    take all of them back. New prompts take the reward back, and not the KL; a new reference the KL, and not the reward.
    In fewer than 16 steps, a KL that had come to .001 and more in the two before, is exactly 0 and starts anew, while
    most of reward, entropy and length are nearer to their beginning than to what they were before.
    The loss of demonstrations, where nothing of a policy is logged, tells it alone: back at its beginning within a
    step, and falling anew, with the held-out loss (half of its own way at least), or the way of the first steps where
    none is logged.
    """
    if (again := _is_reference_again(log)) is not None:
        return again
    if (taught := _taught_anew(log)) is not None:
        return taught
    found = [(series, at) for name in _COMES_BACK for series in log.all(name)[:3] if (at := _back_at(series))]
    far = log.get("kl")
    for series, at in found:
        step = series.points[at].step
        with_it: dict[str, Series] = {}
        for one, place in found:
            other = one.points[place].step
            # The reward and its only function are one figure under two names.
            told_twice = any(one.values == each.values for each in with_it.values())
            if step is not None and other is not None and abs(other - step) <= 1 and not told_twice:
                with_it.setdefault(one.signal, one)
        once_more = [one for one in with_it.values() if step is not None and _goes_the_same_way(one, step, NEAR)]
        # Of two that go it again one goes it closely: how few prompts a step has is all that the other is off by.
        closely = any(step is not None and _goes_the_same_way(one, step) for one in once_more)
        fewest = 2 if far is not None or (len(once_more) >= 2 and closely) else 3
        if len(with_it) < fewest or (far is not None and "kl" not in with_it):
            continue
        # First weights take all figures back: one that goes on says that a new stage has a new reference, and prompts.
        if step is not None and any(
            _stays(one, step) for name in _BY_WEIGHTS for one in log.all(name)[:1] if name not in with_it
        ):
            continue
        names = [one.name for one in with_it.values()]
        return warning(
            f"the run starts again at step {step}: {', '.join(names)} fall back to where they began: its "
            "weights are the first ones again",
            series.of(series.points[at :]),
            *[
                shown(f"{one.name}: before, after", f"{median(one.values[at - SIDE:at]):.4g}, "
                      f"{median(one.values[at:at + SIDE]):.4g}", f"began at {median(one.values[:SIDE]):.4g}")
                for one in with_it.values()
            ],
            cause="the policy has its first weights again: the run resumed without its checkpoint, from an old one, or "
            "one whose weights were not written or not loaded",
            next_step="compare the weights of the checkpoint it resumed from with the base model's: rldbg compare "
            "CHECKPOINT BASE_MODEL",
        )  # fmt: skip
    if not any(len(series.values) >= 4 * SIDE for name in _COMES_BACK for series in log.all(name)):
        raise Skip(f"needs {4 * SIDE} steps")
    return None


#: Normalised within a group of n, an advantage is at most the root of n: groups of 900 nobody has.
BEYOND = 30.0
#: Steps before a bound that every step keeps is no chance.
FEWEST = 5


def _are_rewards(log: RunLog) -> bool:
    """Whether each sample's advantage is its reward, in all steps that record both; False where none does."""
    same = [
        bool(np.allclose(advantage_B, rewards_B, rtol=1e-4, atol=1e-6))
        for batch in log.samples()
        if (rewards_B := batch.reward_B) is not None and (advantage_B := batch.advantage_B) is not None
    ]
    return bool(same) and all(same)


def _least_is_0(log: RunLog) -> bool:
    """Whether the least reward of every step is 0: the least of advantages without a baseline is 0, too."""
    least = log.get("reward_min")
    return least is None or not any(least.finite)


def _some_left_out(log: RunLog) -> bool:
    """Whether the samples beside the log have some of which no token counts, and others whose tokens do."""
    for batch in log.samples():
        if batch.trained_N is not None:
            counts_B = batch.flat.count(batch.trained_N)
            if (counts_B == 0).any() and counts_B.any():
                return True
    return False


@rule("D73", "advantages keep to one side, or to a bound", link="advantages", scope="signals",
      needs=("advantage_max|advantage_std",), explains=("L08",),
      source="an advantage is centred: r less the mean of others")  # fmt: skip
def one_sided(log: RunLog) -> Finding | None:
    """Over 5 steps and more: no advantage below 0 while some are above (nothing is subtracted, or what is negative is
    cut off: which of the two a least reward tells that is not 0; silent where whole samples are left out of the loss),
    none above 0 while some are below (the baseline is the best of the group), or largest and smallest the
    same number in every step (a clamp; not where it is stated, or groups of a size give just that number, as two
    responses give .7071), or a mean that lies off 0 by .15 of their range to one side, in all of 10 steps and more (a
    constant is added; where no critic's values are logged, and they are not the rewards): a warning (one side is worth
    knowing where no estimator with a baseline is stated: REINFORCE and RAFT; where ReMax is, either: its greedy answer
    may be better than all). So is a mean off 0 by .1 and more, to one side in all of 8 steps and more, beside a std
    that is 1 (to 1e-3) in each: what is divided by the std of the very tokens was not centred on them. An advantage
    past 30 times the rewards' range (or mean, where no range is logged; or 1, where that is smaller) is an error: a std
    of 0 was divided by (not where a critic is logged or GAE stated: rare tokens far off its values have such ones).
    Means of 0 are no bound: all advantages are 0 there.
    """
    if (off := _whitened_off_centre(log)) is not None:
        return _bounded(
            given(log.get("advantage_mean")),
            f"advantages have a std of 1 and a mean of {off:.3g} in every step: they are divided by their std, and "
            "their mean is not subtracted",
            "what is normalised is not centred (whitening with shift_mean off, a baseline that is taken of other "
            f"samples): every answer is pushed {'up' if off > 0 else 'down'}, and the policy loss stays at {-off:.3g}",
            off,
            "about 0",
        )
    skip_if(log.get("advantage_max") is None, "needs the largest advantage, or mean and std of 8 steps")
    if log.get("advantage_min") is None:
        return _never_above(log)
    rows = [row for _, row in together(log.get("advantage_max"), log.get("advantage_min")) if row[0] > row[1] + 1e-6]
    skip_if(len(rows) < FEWEST, f"needs the largest and the smallest advantage of {FEWEST} steps with any")
    top, bottom = given(log.get("advantage_max")), given(log.get("advantage_min"))
    mean, reward = log.get("advantage_mean"), log.get("reward")
    same = [agree(*row) for _, row in together(mean, reward)]
    # The mean over tokens is another than that over samples: the range tells raw rewards, too.
    range_ = [*together(top, log.get("reward_max")), *together(bottom, log.get("reward_min"))]
    ranged = [agree(*row) for _, row in range_]
    is_raw = (len(same) >= FEWEST and all(same)) or (len(ranged) >= 2 * FEWEST and all(ranged))
    highest, lowest = max(high for high, _ in rows), min(low for _, low in rows)
    largest = max(highest, -lowest)
    # Whitened over all tokens, what a good critic misses at a few of them is many standard deviations.
    critic = log.algorithm.estimator == "gae" or any(log.get(name) is not None for name in _OF_A_CRITIC)
    paid = 0.0 if critic else _paid(log)
    if paid and largest > BEYOND * max(1.0, paid) and largest > BEYOND * _recorded(log):
        return error(
            f"advantages come to {max(highest, lowest, key=abs):.3g}: more than a spread of rewards can make of them",
            top.first(over=math.nextafter(highest, -math.inf)),
            top.shown(highest, f"< {BEYOND:g}"),
            bottom.shown(lowest),
            shown("size of the rewards", paid),
            cause="what rounding leaves of equal rewards is divided by a std of 0 without an epsilon, or another scale "
            "than is meant: a few samples make the whole update",
            next_step="rldbg record -- YOUR COMMAND, then rldbg diagnose rldbg-dump --rule D04",
            steps=top.steps(over=BEYOND),
        )
    if log.algorithm.estimator == "reinforce" and (lowest >= 0 or highest <= 0):
        raise Skip("REINFORCE is stated, which needs no baseline: advantages have the sign of the rewards (D04)")
    if lowest >= 0:
        if _some_left_out(log):
            raise Skip("whole samples are left out of the loss, and the figures are those of the others (D07)")
        tops = [agree(*row) for _, row in together(top, log.get("reward_max"))]
        raw = is_raw or (len(tops) >= FEWEST and all(tops)) or _are_rewards(log)
        cut = all(low == 0 for _, low in rows) and not raw
        never = "no advantage is ever negative: "
        if raw or not cut:
            claim, cause = (
                "nothing is subtracted from the rewards",
                "no baseline is computed: every answer is pushed up",
            )
        elif tops and not _least_is_0(log):
            claim, cause = "negative ones are cut off at 0", "a clamp (relu, max with 0) behind the normalisation"
        else:
            claim = "negative ones are cut off at 0, or nothing is subtracted from the rewards"
            cause = "a clamp (relu, max with 0) behind the normalisation, or no baseline at all"
        # REINFORCE and RAFT push nothing down, and have the rewards themselves, or 0 and 1.
        milder = severity_of_raw(log.algorithm) == "info" and (raw or not cut or highest <= 1 + EPSILON)
        cause += "; bad answers are never pushed down" + (", as in REINFORCE and RAFT" if milder else "")
        return _bounded(bottom, never + claim, cause, lowest, "< 0", "info" if milder else "warning")
    elif highest <= 0 and log.algorithm.estimator != "remax":
        return _never_positive(log, top, highest)
    elif (off := _off_centre(mean, top, bottom)) is not None and not (
        log.has("value_mean") or log.algorithm.estimator == "remax" or is_raw
    ):
        return _bounded(
            given(mean),
            f"advantages are not centred: their mean is {off:.3g} and on one side of 0 in every step",
            "a constant is added to them, or the baseline is not the mean of what it is for: every answer is pushed "
            + ("up" if off > 0 else "down"),
            off,
            "about 0",
        )
    elif (
        len(rows) >= 2 * FEWEST
        and highest < 1
        and all(agree(a, highest) and agree(b, -highest) for a, b in rows)
        and not _is_natural(highest, log)
        and log.algorithm.advantage_clip is None
    ):
        return _bounded(
            top,
            f"advantages are cut off at {lowest:.4g} and {highest:.4g} in every step",
            "a clamp behind the normalisation: how much better an answer is no longer counts",
            highest,
            "another number in every step",
        )
    return None


#: Sizes of a group whose largest advantages are known, and how near a bound is to one of them: an epsilon of 1e-3
#: beside a std of .5.
SIZES, EPSILON = range(2, 65), 3e-3


def _is_natural(bound: float, log: RunLog) -> bool:
    """Whether a formula itself gives this bound: what a group's best and worst have of n rewards.

    Over a std: sqrt(1/2) in groups of two, sqrt((n - 1) / n) where half of a group's rewards are one number and half
    another (over n - 1; over n it is 1). Less the mean alone: (n - 1) / n of the range, where one of n stands alone,
    and a half of it in halves; with leave-one-out the whole range. Rewards whose range is not logged are taken as
    0 and 1.
    """
    halved = [math.sqrt((n - 1) / n) for n in SIZES if n % 2 == 0]
    ranges = [high - low for _, (high, low) in together(log.get("reward_max"), log.get("reward_min"))]
    # Rewards of one range in every step come to one bound; of another in each they do not.
    steady = not ranges or all(agree(one, ranges[0]) for one in ranges)
    size = ranges[0] if ranges else 1.0
    of_range = [size * share for share in (0.5, 1.0, *((n - 1) / n for n in SIZES))] if steady else []
    return any(abs(bound - one) <= EPSILON * max(one, 1e-9) for one in (*halved, *of_range))


_OF_A_CRITIC = ("value_loss", "value_mean", "value_max", "explained_variance")


def _paid(log: RunLog) -> float:
    """The largest range of a step's rewards, or where that is not logged the largest mean; 0 where neither is."""
    ranges = [high - low for _, (high, low) in together(log.get("reward_max"), log.get("reward_min"))]
    reward = log.get("reward")
    return max(ranges or [abs(value) for value in (reward.finite if reward is not None else [])], default=0.0)


def _recorded(log: RunLog) -> float:
    """The largest range of the rewards of a step's samples, 0 where none are recorded: one reward may outweigh all
    others, which their mean does not show (D86).
    """
    return max((float(np.ptp(each)) for batch in log.samples() if (each := batch.reward_B) is not None and each.size),
               default=0.0)  # fmt: skip


#: Of the range of a step's advantages: how far off 0 their mean is where it is not the length of the answers.
OFF = 0.15


def _off_centre(mean: Series | None, top: Series, bottom: Series) -> float | None:
    """The mean advantage, where it lies as far to one side of 0 in every one of 10 steps and more."""
    rows = [row for _, row in together(mean, top, bottom) if row[1] > row[2]]
    if len(rows) < 2 * FEWEST or mean is None:
        return None
    shares = [each / (high - low) for each, high, low in rows]
    return median(mean.finite) if min(shares) > OFF or max(shares) < -OFF else None


#: Off 0 by how much a mean is beside a std of 1; in how many steps; and how near 1 that is.
OFF_OF_ONE, WHITENED, UNIT = 0.1, 8, 1e-3


def _whitened_off_centre(log: RunLog) -> float | None:
    """The mean of advantages whose std is 1 in every step, where it lies to one side of 0 in all of them."""
    rows = [row for _, row in together(log.get("advantage_mean"), log.get("advantage_std"))]
    if len(rows) < WHITENED or any(abs(std - 1) > UNIT for _, std in rows):
        return None
    means = [mean for mean, _ in rows]
    return median(means) if min(means) > OFF_OF_ONE or max(means) < -OFF_OF_ONE else None


def _never_above(log: RunLog) -> Finding | None:
    """The same of a log without the smallest: none above 0 while the mean is below it."""
    rows = [row for _, row in together(log.get("advantage_max"), log.get("advantage_mean")) if row[0] > row[1] + 1e-6]
    skip_if(len(rows) < FEWEST, f"needs the largest advantage, and the smallest or the mean, of {FEWEST} steps")
    if max(high for high, _ in rows) <= 0 and log.algorithm.estimator != "remax":
        return _never_positive(log, given(log.get("advantage_max")), max(high for high, _ in rows))
    return None


def _never_positive(log: RunLog, top: Series, highest: float) -> Finding:
    # ReMax's greedy answer may be better than all: only a baseline of groups that is stated is contradicted.
    return _bounded(
        top,
        "no advantage is ever positive: the baseline is the best response's reward, not the mean",
        "a max stands for the mean: the best answer is not pushed up, all others are pushed down",
        highest,
        "> 0",
        "warning" if log.algorithm.estimator in OF_GROUPS else "info",
    )


def _bounded(
    series: Series, claim: str, cause: str, value: float, expected: str, severity: Severity = "warning"
) -> Finding:
    return finding(
        severity, claim, series, series.shown(value, expected), cause=cause,
        next_step="rldbg record -- YOUR COMMAND, then rldbg diagnose rldbg-dump --rule D04",
    )  # fmt: skip


@rule("D44", "returns are not added up over the response", link="advantages", scope="signals",
      needs=("return_mean", "reward", "response_length"), explains=("D45", "D63"),
      source="a return is the sum of the rewards that are still to come")  # fmt: skip
def returns_are_rewards(log: RunLog) -> Finding | None:
    """The mean return is the mean reward over the mean response length in 8 steps and more, and in all of them (to
    1e-3 of it), while the length is over 1.5: an error. That is what the mean over tokens is where each token keeps its
    own reward and all but the last have none.
    """
    rows = [
        (back, paid / length)
        for _, (back, paid, length) in together(log.get("return_mean"), log.get("reward"), log.get("response_length"))
        if length > 1.5 and abs(paid) > 1e-3
    ]
    skip_if(len(rows) < 8, "needs mean return, reward and response length of 8 steps")
    if not all(abs(back - each) <= 2e-3 * abs(each) for back, each in rows):
        return None
    series = given(log.get("return_mean"))
    return error(
        "value targets are wrong: returns are the rewards of single tokens, nothing is added up over the response",
        series,
        series.shown(rows[-1][0], "about the mean reward"), shown("mean reward / mean length", rows[-1][1]),
        shown("steps that agree", len(rows)),
        cause="the sum over the tokens that follow is missing: only the last token's return holds the reward",
        next_step="rldbg record -- YOUR COMMAND, then rldbg diagnose rldbg-dump --rule D44",
    )  # fmt: skip


#: Share of values that a clip range may hold still before the critic learns next to nothing.
HELD = 0.35


@rule("D71", "the critic is clipped to where it is", link="loss", scope="signals", needs=("value_clip_fraction",),
      explains=("D45",), source="arXiv 1707.06347's code; verl cliprange_value, TRL cliprange_value")  # fmt: skip
def values_clipped(log: RunLog) -> Iterator[Finding]:
    """The share of values whose loss is clipped is over .35 (median of the last 10 steps, 5 and more): a warning. Not
    where the critic overshoots what is returned and its values lie far outside: it moves too much, and is clipped for
    it (D63).
    """
    if moves_too_far(log):
        return
    for series, now in log.level("value_clip_fraction"):
        if now > HELD and len(series.finite) >= FEWEST:
            yield warning(
                f"the critic's loss is clipped for {now:.0%} of its values: the critic can hardly move",
                series.between(over=HELD),
                series.shown(now, f"< {HELD:g}"),
                cause="the value clip range is far too small for the scale of the returns (it is in their units)",
                next_step="widen or switch off value clipping; look at the critic's explained variance",
            )


@rule("L25", "the evaluation never changes", link="trend", scope="signals", needs=("held_out",),
      source="an evaluation that runs on weights nobody updates, or is cached")  # fmt: skip
def evaluation_stands(log: RunLog) -> Finding | None:
    """A held-out result exactly the same, and neither 0 nor 1, in 5 evaluations and more, and no other that moves,
    while the reward of training rises or falls by more than chance explains: a warning. Or every held-out result 0 in
    each of 4 evaluations and more, while the reward of training, between 0 and 1, is over .3 in half of the steps: a
    warning, and worth knowing where another set is held out than is trained on, as far as its name tells (a contest's
    problems).
    """
    reward = log.get("reward")
    if (never := _never_right(log, reward)) is not None:
        return never
    if reward is None or abs(trends.drift(reward.finite)) <= trends.DRIFT_Z:
        raise Skip("needs a reward of training that rises or falls")
    held = log.all("held_out")
    if any(len(set(series.finite)) > 1 for series in held):
        return None  # one set of weights gives all results: where one moves, they are no first ones
    for series in held:
        values = series.finite
        if len(values) >= FEWEST and len(set(values)) == 1 and values[0] not in (0.0, 1.0):
            return warning(
                f"the evaluation never changes: {series.name} is {values[0]:.4g} in all {len(values)} evaluations, "
                f"while {reward.name} does",
                series,
                series.shown(values[0], "another number as the policy changes"),
                cause="it runs on the first weights (an engine that is never synchronised, a copy of the model), or "
                "its result is cached",
                next_step="evaluate two checkpoints by hand; compare the engine's weights with the trainer's",
            )
    return None


#: Evaluations, and the reward of training, from which a result of 0 is none of chance.
EVALUATIONS, PAID = 4, 0.3
_HARD = regex(r"(?i)aime|amc|hmmt|olymp|contest|hard|gpqa|frontier|hle|codeforces|swe|usamo|brumo|minerva|livecode")


def _never_right(log: RunLog, reward: Series | None) -> Finding | None:
    """All results of all evaluations 0, while the training is paid."""
    held = [series for series in log.all("held_out") if len(series.finite) >= EVALUATIONS]
    if reward is None or not reward.finite or not held or any(any(series.finite) for series in log.all("held_out")):
        return None
    least, now = min(reward.finite), trends.level(reward.finite)
    if least < 0 or max(reward.finite) > 1 or median(reward.finite) < PAID:
        return None
    series = held[0]
    return finding(
        "info" if all(_HARD.search(one.name) for one in held) else "warning",
        f"the evaluation stays at 0 while training is paid {now:.3g}: {series.name} is 0 in all "
        f"{len(series.finite)} evaluations",
        series,
        series.shown(0.0, "> 0"),
        reward.shown(now),
        cause="the validation asks or judges otherwise than the training: another prompt template, another parser or "
        "answer format, a limit of tokens that cuts its answers, greedy decoding of a broken engine, or problems that "
        "are far harder",
        next_step="read ten responses of the validation beside their prompts, and score one by hand with both judges",
    )


#: Share of groups without a spread that is nearly all of them, and how much less it was at first.
NEARLY_ALL, AT_FIRST = 0.85, 0.5
#: A logged share of right answers.
_RIGHT = regex(r"(?i)accura|correct|exact|solved|success|(?:^|[/_.])acc(?:$|[@/_.])")


@rule("D74", "ever fewer groups have a spread", link="trend", scope="signals", needs=("frac_zero_std",),
      source="arXiv 2503.14476 section 3.2 (dynamic sampling)")  # fmt: skip
def ever_fewer(log: RunLog) -> Finding | None:
    """The share of groups whose rewards are all equal rises by more than chance explains, from at most .5 (median of
    the first 5 steps) to .85 and more in each of the last 5, over 20 steps and more: a warning; worth knowing where the
    reward rises meanwhile and no share of right answers falls, for a run that has learnt what its prompts have to
    teach. Not of steps of one group each, whose share is 0 or 1.
    """
    series = given(log.get("frac_zero_std"))
    values = series.finite
    skip_if(len(values) < 20, "needs the share of groups without a spread of 20 steps")
    skip_if(set(values) == {0.0, 1.0}, "each step is of one group: its share is 0 or 1, as that prompt has it")
    begun, now = median(values[:5]), min(values[-5:])
    if begun > AT_FIRST or now < NEARLY_ALL or not trends.rises(values):
        return None
    reward = log.get("reward")
    # A reward may rise by something else than answers.
    solved = reward is not None and trends.rises(reward.finite) and not any(
        trends.drift(one.finite) < -trends.DRIFT_Z for one in log.all("reward_function") if _RIGHT.search(one.name)
    )  # fmt: skip
    return finding(
        "info" if solved else "warning",
        f"ever fewer groups have a spread of rewards: {series.name} goes from {begun:.3g} to {median(values[-5:]):.3g}",
        series.between(over=NEARLY_ALL - 1e-09),
        series.shown(median(values[-5:]), f"< {NEARLY_ALL:g}"),
        cause="the prompts are too easy by now: all answers of a group are right, and nothing is left to learn"
        if solved
        else "all answers of a group get the same reward: prompts too hard or too easy, or a policy that has become "
        "one answer",
        next_step="filter prompts by solve rate (dynamic sampling), bring harder ones, or stop here",
    )
