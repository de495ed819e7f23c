"""What the size of a loss and of its advantages says of how those were made, of a log alone."""

from __future__ import annotations

import math
from statistics import median

from replay_core.diagnose.finding import Finding, shown, warning
from replay_core.diagnose.rule import given, rule, skip_if
from replay_core.diagnose.rules.figures import together
from replay_core.diagnose.signals import RunLog

#: Steps, and the share of them that is a habit.
FEWEST, MOST = 8, 0.75
#: What a loss may have beside its policy's: an entropy bonus of the largest coefficient that recipes have, the rest.
BONUS, BESIDE = 0.05, 0.1
#: A share of clipped tokens over which ratios are far from 1 and the loss is no mean of advantages.
CLIPPED = 0.05


@rule("L54", "the loss is larger than centred advantages can make it", link="advantages", scope="signals",
      needs=("loss", "frac_zero_std", "response_length", "response_length_max"), lasts=True,
      explains=("L08", "L10", "D25"),
      source="-mean(A) of sum(A) = 0; the variance of what lies within bounds: Bhatia and Davis, 2000")  # fmt: skip
def uncentred(log: RunLog) -> Finding | None:
    """Advantages of groups have a mean of 0 over responses. At ratios near 1 the loss is -sum(A L) / sum(L) over the
    lengths L, at most std(A) std(L) / mean(L): std(A) is at most the root of the share of groups with a spread, or
    the logged spread of rewards where that is larger, and std(L) at most sqrt((longest - mean) (mean - 1)). A loss
    that is below minus that, by .1 and .05 times the entropy and more (what an entropy bonus may add), in three of four
    steps with a spread (8 and more), with hardly a token clipped (.05): a warning. A KL term makes a loss larger, not
    smaller.
    """
    loss, dead, length, longest = (
        given(log.get(name)) for name in ("loss", "frac_zero_std", "response_length", "response_length_max")
    )
    skip_if(log.has("pg_loss") or log.has("value_loss"), "the loss has other parts, or a critic's")
    clipped = log.get("clip_fraction")
    skip_if(clipped is not None and clipped.finite and median(clipped.finite) > CLIPPED, "ratios are far from 1")
    spread = {p.step: p.value for s in [log.get("reward_std")] if s is not None for p in s.points}
    entropy = {p.step: p.value for s in [log.get("entropy")] if s is not None for p in s.points}
    rows = [(step, row) for step, row in together(loss, dead, length, longest) if row[1] < 1 and row[2] >= 1]
    skip_if(len(rows) < FEWEST, f"needs the loss, lengths and groups with a spread of {FEWEST} steps")
    told = []
    for step, (each, share, mean, most) in rows:
        of_rewards = spread.get(step, 0.0)
        of_advantages = max(math.sqrt(max(1 - share, 0.0)), of_rewards if math.isfinite(of_rewards) else 0.0)
        bound = of_advantages * math.sqrt(max((most - mean) * (mean - 1), 0.0)) / mean
        bonus = entropy.get(step, 0.0)
        told.append((each, bound, -each > bound + BESIDE + BONUS * max(bonus if math.isfinite(bonus) else 0.0, 0.0)))
    bad = [one for one in told if one[2]]
    if len(bad) < MOST * len(told):
        return None
    return warning(
        f"the loss is {median(one[0] for one in told):.3g} in the middle: advantages that are centred in their groups "
        f"give {-median(one[1] for one in told):.2g} at the lowest with these lengths",
        loss,
        shown(f"median {loss.name}", median(one[0] for one in told), "about 0 at a ratio of 1", loss.source),
        shown("what lengths allow", median(one[1] for one in told)),
        shown("steps beyond it", len(bad), None, f"of {len(told)}"),
        cause="the mean of the advantages is far above 0: no baseline is subtracted from the rewards, it is that of "
        "other samples, or negative advantages are left out; most answers are pushed up, whatever they earn",
        next_step="log the mean advantage, which is 0 in each group; rldbg record -- YOUR COMMAND, then rldbg diagnose "
        "rldbg-dump --rule D04",
    )


#: Values that the largest and least reward of a step take where rewards are of few kinds; steps with a spread.
KINDS, SPREADS = 4, 12
#: The least range of advantages over their group's std: 2 sqrt((n - 1) / n) of n = 2; what part of the rewards' own
#: range the middle of steps has to lie below; a denominator that means of discrete rewards have, and how near it.
OF_A_STD, PART, DENOMINATOR, NEAR = math.sqrt(2), 0.95, 400, 2e-4


def _are_fractions(values: list[float], unit: float) -> bool:
    """Whether all are whole multiples of one unit / n: what rewards of a few kinds less a mean of theirs come to."""
    return any(
        all(abs(value / unit * n - round(value / unit * n)) <= NEAR * n for value in values)
        for n in range(1, DENOMINATOR + 1)
        if NEAR * n < 0.1
    )


@rule("L55", "advantages span less than their rewards", link="advantages", scope="signals",
      needs=("advantage_max", "advantage_min", "reward_max", "reward_min"), lasts=True, explains=("L14",),
      source="(r - mean) / std of a group spans sqrt(2) and more, r - b as much as the group's rewards")  # fmt: skip
def spans_less(log: RunLog) -> Finding | None:
    """Of rewards of few kinds (largest and least take 4 values and less over 12 steps and more with a spread). Over a
    group's std advantages span 2 sqrt((n - 1) / n) and more of n = 2, over a batch's 2 and more; less a baseline, what
    the group's rewards span. Below 1.41 in every step, below .95 of the rewards' range in the middle, and no
    fractions of it with one denominator (as a mean of such rewards leaves): a warning, they are divided by something
    else. Not where a critic is trained.
    """
    skip_if(log.has("value_mean") or log.has("value_loss"), "advantages are a critic's")
    top, bottom, high, low = (
        given(log.get(name)) for name in ("advantage_max", "advantage_min", "reward_max", "reward_min")
    )
    rows = [row for _, row in together(top, bottom, high, low) if row[0] > row[1] + 1e-6 and row[2] > row[3]]
    skip_if(len(rows) < SPREADS, f"needs the range of advantages and rewards of {SPREADS} steps with a spread")
    kinds = {round(value, 6) for row in rows for value in row[2:]}
    skip_if(len(kinds) > KINDS, "rewards are of many kinds")
    spans, paid = [row[0] - row[1] for row in rows], [row[2] - row[3] for row in rows]
    if max(spans) >= OF_A_STD or median(spans) >= PART * median(paid):
        return None
    if _are_fractions(sorted({abs(value) for row in rows for value in row[:2]}), 1.0):
        return None
    return warning(
        f"advantages span {median(spans):.2g} where rewards span {median(paid):.3g}: they are neither rewards less a "
        "mean nor divided by a std",
        top,
        shown("range of advantages, median and largest", f"{median(spans):.3g}, {max(spans):.3g}",
              f">= {OF_A_STD:.3g} over a std, about {median(paid):.3g} without"),
        shown("steps compared", len(rows)),
        cause="they are divided once more, by something that varies from answer to answer: their length (before a mean "
        "over tokens divides by it again), a number of tokens, a temperature; or the baseline weighs its responses",
        next_step="rldbg record -- YOUR COMMAND, then rldbg diagnose rldbg-dump --rule D04",
    )  # fmt: skip
