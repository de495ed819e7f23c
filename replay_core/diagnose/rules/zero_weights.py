"""Importance weights that leave nothing: a mask that rejects what it should keep."""

from __future__ import annotations

import numpy as np

from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.finding import Finding, error, shown
from replay_core.diagnose.rule import Skip, given, rule, skip_if

#: Tokens before they tell; and a trainer over rollout that no bound of a mask rejects.
FEWEST, NEAR_ONE = 16, 0.1


@rule("D115", "importance weights reject the tokens that agree", link="ratio", scope="batch", lasts=True,
      needs=("is_weights", "rollout_logprobs", "trainer_logprobs", "mask|response"),
      explains=("D01", "D02", "D23", "D28", "D46", "D50", "D55", "L01"),
      source="verl rollout_rs, slime MIS, IcePop: a token is kept while the ratio lies within bounds")  # fmt: skip
def rejects(batch: StepBatch) -> Finding | None:
    """Recorded weights of 0 on every token of the loss (16 and more) whose probabilities in trainer and engine agree to
    a tenth, as those of its response do together: an error. A mask (MIS, rejection) rejects what lies outside of its
    bounds, and they lie around 1; truncated weights are never 0.
    """
    weights = given(batch.columns.of("is_weights"))
    trainer, rollout = given(batch.trainer), given(batch.columns.of("rollout_logprobs"))
    both_N = batch.pair(trainer, rollout) & weights.said_N
    skip_if(both_N.sum() < FEWEST, "too few tokens have a weight and log-probabilities of engine and trainer")
    w_N = weights.values_N[both_N]
    logs_N = np.where(both_N, np.clip(np.nan_to_num(trainer.values_N - rollout.values_N), -20, 20), 0.0)
    # A mask of whole responses looks at what their tokens come to together.
    sums_N = np.repeat(np.abs(batch.flat.sum(logs_N)), batch.flat.lengths_B)
    far_N = np.abs(np.expm1(logs_N))[both_N]
    near_N = (far_N < NEAR_ONE) & (sums_N[both_N] < NEAR_ONE)
    if near_N.sum() < FEWEST:
        raise Skip("engine and trainer agree on few tokens: a mask may well reject the others")
    if (w_N[near_N] != 0).any():
        return None
    kept = int((w_N != 0).sum())
    return error(
        "the importance mask is turned around: it rejects every token on which trainer and engine agree"
        + (f", and keeps {kept} on which they do not" if kept else ", so that none is left in the loss"),
        batch.laid.where("is_weights", at=both_N),
        shown("tokens with weight 0 whose ratio is within 0.9 to 1.1", int(near_N.sum()), "0", weights.source),
        shown("tokens with another weight", kept, f"{both_N.sum()}"),
        shown("largest |trainer over rollout - 1| of those rejected", float(far_N[w_N == 0].max())),
        cause="the condition of the mask (rejection, MIS, IcePop) is negated: what is to be kept has weight 0; or the "
        "weights are never filled and 0 throughout",
    )
