"""What a critic's logged means say of its targets and advantages, step by step: sums that hold whatever is learnt."""

from __future__ import annotations

import math
from statistics import median

import numpy as np

from replay_core.diagnose.finding import Finding, finding, shown, warning
from replay_core.diagnose.rule import given, rule, skip_if
from replay_core.diagnose.rules.figures import together
from replay_core.diagnose.signals import RunLog

#: Steps before a sum that fails in them is a habit; the share of them that shows one that is to hold in each (a mean
#: may be about 0 by chance), and a share that is nearly all.
FEWEST, MOSTLY, NEARLY_ALL = 8, 0.75, 0.9
#: A mean of what was whitened is 0 to this, as numbers are printed.
CENTRED = 1e-2


@rule("L52", "advantages are centred on other tokens than are trained", link="advantages", scope="signals",
      needs=("advantage_mean", "return_mean", "value_mean"), lasts=True,
      explains=("L08", "L10", "L16", "D01", "D25"),
      source="GAE: A = returns - values; verl and OpenRLHF whiten A over the tokens that count")  # fmt: skip
def centred_elsewhere(log: RunLog) -> Finding | None:
    """A critic's advantages are the returns less the values, or those whitened: their mean over the tokens that count
    is the mean return less the mean value, or 0. Neither (by .01 and half a hundredth of their range and more), in
    three of four of 8 steps and more: a warning. Nothing else than a mean that was taken over other tokens makes that
    of GAE's sums; which tokens those are the log does not tell. Skipped where the mean value is 0 throughout (no
    critic), or a range is not logged.
    """
    every = [given(log.get(name)) for name in ("advantage_mean", "return_mean", "value_mean")]
    top, bottom = log.get("advantage_max"), log.get("advantage_min")
    skip_if(top is None or bottom is None, "needs the largest and the least advantage of a step")
    rows = [row for _, row in together(*every, top, bottom) if row[3] > row[4]]
    skip_if(len(rows) < FEWEST, f"needs advantages, returns and values of {FEWEST} steps")
    skip_if(not any(row[2] for row in rows), "the values are 0 throughout: no critic")
    off = [
        min(abs(mean), abs(mean - (returned - value))) > max(CENTRED, CENTRED * (high - low) / 2)
        for mean, returned, value, high, low in rows
    ]
    if sum(off) < MOSTLY * len(rows):
        return None
    mean, returned, value = (median(abs(row[at]) for row in rows) for at in range(3))
    return warning(
        f"advantages are neither returns less values nor centred: their mean is {mean:.3g} off 0 (median), to one side "
        "or the other from step to step",
        every[0],
        shown(f"median |{every[0].name}|", mean, "0 of whitened advantages", every[0].source),
        shown("steps that show it", sum(off), None, f"of {len(rows)}"),
        shown(f"median {every[1].name}, {every[2].name}", f"{returned:.3g}, {value:.3g}"),
        cause="they are whitened with a mean of other tokens than those that count: padding (whose advantages are 0) "
        "or prompts are in it, or a mask is not the loss's. Every answer of a step is pushed up, or every one down",
        next_step="rldbg record -- YOUR COMMAND, then rldbg diagnose rldbg-dump --rule D04; give the whitening the "
        "mask of the loss",
    )


#: Of mean returns solved for by the mean reward and the mean value: how far below 0 the value's part has to lie, in its
#: own standard errors and as it is (GAE's lies between 0 and 1); the share of the returns that may be left.
SURELY, AGAINST, LEFT = 5.0, -0.5, 0.2
#: Steps that tell two numbers, and what the reward's part has to be between.
SOLVED, PAID = 12, (0.5, 1.5)


@rule("L53", "returns go against the values", link="advantages", scope="signals",
      needs=("return_mean", "value_mean", "reward"), lasts=True, explains=("D45", "D63"),
      source="GAE: returns = advantages + values, between the values and the rewards to come")  # fmt: skip
def against_values(log: RunLog) -> Finding | None:
    """A return lies between what the critic expects and what is paid: solved for over 12 steps and more, the mean
    return is a times the mean reward and b times the mean value, neither below 0. A warning where b is below -.5 and
    five of its standard errors below 0, a between .5 and 1.5, and both leave less than a fifth (rms): the critic is
    taught its advantages, which fall as its values rise, and comes to half of what is paid.
    """
    returns, values, reward = (given(log.get(name)) for name in ("return_mean", "value_mean", "reward"))
    rows = [row for _, row in together(returns, reward, values)]
    skip_if(len(rows) < SOLVED, f"needs mean return, value and reward of {SOLVED} steps")
    table_S3 = np.array(rows, dtype=np.float64)
    y_S, x_S2 = table_S3[:, 0], table_S3[:, 1:]
    size = float(np.sqrt((y_S @ y_S) / len(y_S)))
    gram_22 = x_S2.T @ x_S2
    skip_if(size == 0 or np.linalg.matrix_rank(gram_22) < 2, "reward and value are one figure")
    part_2 = np.linalg.solve(gram_22, x_S2.T @ y_S)
    left_S = y_S - x_S2 @ part_2
    rms = float(np.sqrt((left_S @ left_S) / (len(y_S) - 2)))
    error = rms * math.sqrt(float(np.linalg.inv(gram_22)[1, 1]))
    of_reward, of_value = float(part_2[0]), float(part_2[1])
    if not (of_value < AGAINST and of_value < -SURELY * error and PAID[0] < of_reward < PAID[1] and rms < LEFT * size):
        return None
    return warning(
        f"returns fall as values rise: {returns.name} is {of_reward:.2g} x {reward.name} {of_value:+.2g} x "
        f"{values.name} in {len(rows)} steps",
        returns,
        shown("the value's part", of_value, "0 to 1", f"least squares over {len(rows)} steps"),
        shown("its standard error", error),
        shown("the reward's part", of_reward, "about 1"),
        cause="the critic's targets are its advantages, to which the values are not added: it comes to half of what is "
        "paid, and its advantages keep the other half",
        next_step="returns = advantages + values, before advantages are whitened; rldbg record -- YOUR COMMAND, then "
        "rldbg diagnose rldbg-dump --rule D44",
    )


#: A figure of a step that lies above another in so many steps; by how much of the other's size at least.
PAYS, MUCH = 12, 1e-3


@rule("L58", "the KL in the rewards pays for leaving the reference", link="rewards", scope="signals",
      needs=("reward",), lasts=True, explains=("L08", "L09", "L10", "D20", "D25"),
      source="verl: critic/rewards = critic/score - kl_coef x KL, summed over a response")  # fmt: skip
def pays_for_distance(log: RunLog) -> Finding | None:
    """verl logs what the judge gave (critic/score/mean) and what is left of it once the KL is subtracted
    (critic/rewards/mean). A KL is not below 0 on average, so that rewards lie below scores; above them in nine of ten
    of 12 steps and more, and all together by .001 of the score's size and more, is a penalty of the wrong sign: an
    error where the distance grows fourfold from the first third to the last, else a warning.
    """
    known = {series.name.removeprefix("metrics."): series for series in log.all("reward")}
    score, rewards = known.get("critic/score/mean"), known.get("critic/rewards/mean")
    rows = [] if score is None or rewards is None else [row for _, row in together(score, rewards)]
    if score is None or rewards is None or len(rows) < PAYS:
        skip_if(True, f"needs critic/score/mean and critic/rewards/mean of {PAYS} steps")
        return None
    added = [paid - judged for judged, paid in rows]
    size = max(abs(judged) for judged, _ in rows)
    above = sum(each > 0 for each in added)
    if above < NEARLY_ALL * len(added) or sum(added) <= MUCH * max(size, 1e-6) * len(added):
        return None
    third = len(added) // 3
    begun, now = median(added[:third]), median(added[-third:])
    return finding(
        "error" if now > 4 * begun else "warning",
        f"rewards lie above the scores they are made of in {above} of {len(added)} steps, by {begun:.2g} at first and "
        f"{now:.2g} in the end",
        rewards,
        shown(f"{rewards.name} - {score.name}, last third", now, "<= 0: the KL is subtracted", rewards.source),
        shown("the same, first third", begun),
        cause="the KL is added to the rewards instead of subtracted (its sign, or the order of policy and reference in "
        "it): what is paid for is to leave the reference",
        next_step="rewards = scores - kl_coef * (logprobs - ref_logprobs); look at the sign where they are put "
        "together",
    )
