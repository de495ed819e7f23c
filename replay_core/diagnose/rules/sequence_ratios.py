"""The ratio that stands for a response (GSPO), as it is recorded: e to the mean of its tokens' log ratios."""

from __future__ import annotations

import numpy as np

from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.finding import Finding, error, shown
from replay_core.diagnose.flat import Array
from replay_core.diagnose.rule import given, rule, skip_if

#: Responses whose ratio tells, nats that one has to be off 0 for that, and how near a divisor is to a whole number.
FEWEST, MOVED, WHOLE = 6, 2e-4, 0.02


@rule("D128", "a response's ratio is not the mean of its tokens'", link="ratio", scope="batch", lasts=True,
      needs=("is_ratio", "policy_logprobs", "old_logprobs", "mask"), explains=("D24", "D28", "D50", "L08"),
      source="GSPO (arXiv 2507.18071): (pi / pi_old)^(1 / |y|)")  # fmt: skip
def by_another_length(batch: StepBatch) -> Finding | None:
    """Of a run that states a ratio for each response: what the sum of its tokens' log ratios is divided by in the
    recorded one. An error where that is one number for all responses of a micro-batch, which is not their length: 6
    responses and more of other lengths that say so, and nearly all.
    """
    skip_if(not batch.laid.algorithm.is_by_sequence, "no ratio of responses is stated (GSPO)")
    ratio, policy, old = (given(batch.columns.of(name)) for name in ("is_ratio", "policy_logprobs", "old_logprobs"))
    known_N = batch.pair(policy, old) & given(batch.trained_N) & ratio.said_N & (np.nan_to_num(ratio.values_N) > 0)
    counts_B = batch.flat.count(known_N)
    sums_B = batch.flat.sum(np.where(known_N, np.nan_to_num(policy.values_N - old.values_N), 0.0))
    logs_N = np.where(known_N, np.log(np.where(known_N, ratio.values_N, 1.0)), 0.0)
    logs_B: Array = np.nan_to_num(batch.flat.mean(logs_N, known_N))
    told_B = (counts_B > 1) & (np.abs(logs_B) > MOVED)
    skip_if(int(told_B.sum()) < FEWEST, f"needs {FEWEST} responses whose policy has moved")
    divisor_B = np.where(told_B, sums_B / np.where(told_B, logs_B, 1.0), np.nan)
    own_B = told_B & (np.abs(divisor_B - counts_B) > WHOLE * counts_B)
    whole_B = own_B & (np.abs(divisor_B - np.round(divisor_B)) <= WHOLE * np.maximum(divisor_B, 1))
    keys = batch.laid.keys_of(policy.name)
    divisors = {
        key: {round(float(divisor_B[at])) for at in np.flatnonzero(whole_B) if keys[at] == key} for key in set(keys)
    }
    several = [one for one in divisors.values() if one]
    if own_B.sum() < FEWEST or whole_B.sum() < 0.9 * own_B.sum() or any(len(one) > 1 for one in several):
        return None
    first = int(np.flatnonzero(whole_B)[0])
    number = round(float(divisor_B[first]))
    what = "not divided at all: a sum" if number == 1 else f"divided by {number} in each row of its micro-batch"
    return error(
        f"the ratio of a response is not normalised by its own length: the sum of its tokens' log ratios is {what}",
        batch.laid.where(ratio.name, sample=first),
        shown("what the sum is divided by, there", float(divisor_B[first]), f"{int(counts_B[first])}"),
        shown("responses that say so", int(whole_B.sum()), "0"),
        cause="GSPO takes the geometric mean over a response's tokens"
        + (
            ""
            if number == 1
            else ": a mean over the padded width counts padding, and draws short responses' ratios to 1"
        ),
    )
