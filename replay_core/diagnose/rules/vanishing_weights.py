"""Importance weights of whole responses, as products over their tokens: what is left of them."""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from replay_core.diagnose.case import Case
from replay_core.diagnose.compared import gap_of
from replay_core.diagnose.finding import Finding, Where, shown, warning
from replay_core.diagnose.flat import Array
from replay_core.diagnose.gap import DISAGREE
from replay_core.diagnose.rule import rule, skip_if

#: Responses that tell, the share of them that has to be a product, and how near one has to be, of its logarithm.
RESPONSES, SHARE, NEAR = 8, 0.9, 0.02
#: A mean weight that is far from the 1 that it is to be, steps that have it, and a mean token ratio that is near 1.
FAR, STEPS, TOKENS = 0.3, 2, 0.05


class _Weighed(Struct, frozen=True):
    step: int | None
    where: Where
    source: str
    weights: Array
    lengths: Array
    by_token: float
    apart: float


@rule("D156", "importance weights of responses vanish", link="ratio", scope="case", lasts=True,
      explains=("L08",),
      source="NeMo-RL#2269: e to the sum of 10,000 small differences; verl rollout_is=sequence, GSPO's "
      "mean")  # fmt: skip
def vanish(case: Case) -> Finding | None:
    """Recorded importance weights that are one number for a response, e to the sum of its tokens' log trainer - log
    rollout (or a bound of it), in nine of ten of 8 responses and more: a warning where their mean is under .3 in all
    steps (2 and more), while the mean ratio of tokens is within .05 of 1 and engine and trainer agree (.03 nats): the
    product over a long response is far from 1 although nothing is wrong with its tokens. Weights have the mean 1.
    """
    found: list[_Weighed] = []
    for batch in case.batches():
        weights, between = batch.columns.of("is_weights"), gap_of(batch)
        if weights is None or between is None:
            continue
        d_N = np.where(between.both_N, np.nan_to_num(between.trainer.values_N - between.rollout.values_N), 0.0)
        sums_B, counts_B = batch.flat.sum(d_N), batch.flat.count(between.both_N)
        low_B, high_B = batch.flat.extremes(weights.values_N, between.both_N & weights.said_N)
        one_B = (counts_B > 1) & np.isfinite(high_B) & (high_B > 0) & (high_B - low_B <= 1e-4 * np.abs(high_B))
        if one_B.sum() < RESPONSES:
            continue
        logs_B = np.log(np.where(one_B, high_B, 1.0))
        bound = high_B[one_B].max()
        product_B = one_B & (
            (np.abs(logs_B - sums_B) <= NEAR * np.maximum(np.abs(sums_B), 1.0))
            | ((high_B >= bound * (1 - 1e-4)) & (sums_B >= logs_B - NEAR))
        )
        if product_B.sum() < SHARE * one_B.sum() or one_B.sum() < SHARE * (counts_B > 1).sum():
            continue
        by_token = float(np.exp(between.d).mean())
        place = batch.laid.where("is_weights", sample=one_B)
        found.append(
            _Weighed(batch.step, place, weights.source, high_B[one_B], counts_B[one_B], by_token, between.mean)
        )
    skip_if(not found, "needs importance weights that are one number for a response, and what they are made of")
    told = [one for one in found if float(one.weights.mean()) < FAR]
    if len(told) < max(STEPS, len(found)):
        return None
    if any(abs(one.by_token - 1) > TOKENS or one.apart > DISAGREE for one in told):
        return None
    mean = float(np.mean([one.weights.mean() for one in told]))
    one = told[0]
    lengths, weights_of = (
        np.concatenate([each.lengths for each in told]),
        np.concatenate([each.weights for each in told]),
    )
    long = lengths > np.median(lengths)
    return warning(
        f"importance weights are products over a response's tokens and vanish: {mean:.2g} on average, although a "
        f"token's ratio is {one.by_token:.3g}: the batch weighs a {1 / mean:.0f}th",
        one.where,
        shown("mean weight", mean, "1", one.source),
        shown("mean ratio of a token", one.by_token),
        *([shown("mean weight of the longer half", float(weights_of[long].mean())),
           shown("of the shorter half", float(weights_of[~long].mean()))] if long.any() else []),
        shown("steps that agree", len(told)),
        cause="differences of rounding size have one sign, or add up, over thousands of tokens: the product of their "
        "ratios is no weight of a response any more, and the gradient is as many times smaller, most of all that of "
        "long ones",
        next_step="weigh tokens (rollout_is=token, TIS), or take the mean of the log ratios (geometric) for a response",
        steps=[each.step for each in told],
    )  # fmt: skip
