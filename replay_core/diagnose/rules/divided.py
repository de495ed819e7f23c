"""The loss of a micro-batch made as the run states it, its KL and its divisor with it: a division that is missing."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from replay_core.diagnose.algorithm import of_loss
from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.case import Case
from replay_core.diagnose.columns import Scalar
from replay_core.diagnose.finding import Finding, shown, warning
from replay_core.diagnose.flat import Array
from replay_core.diagnose.rule import Skip
from replay_core.diagnose.rules.ratio import ratios
from replay_core.objectives import kl, policy_loss

#: Relative agreement of a recomputed loss, losses that are told from rounding, and micro-batches that are no chance.
CLOSE, LEAST, FEWEST = 1e-3, 1e-4, 4
_ESTIMATORS = {"k1": kl.k1, "k2": kl.k2, "k3": kl.k3}


def undivided(case: Case) -> Finding | None:
    """Each recorded loss is the stated mean of its micro-batch's tokens (clipped, with the stated KL), and is not
    divided by what the run states that it divides by: in 4 micro-batches and more, and all of them.
    """
    flags = case.run.flags or {}
    divisor, mean = of_loss(flags, "divisor"), str(of_loss(flags, "reduction"))
    if not isinstance(divisor, (int, float)) or not divisor > 1 or mean not in ("token_mean", "sequence_mean"):
        return None
    first: tuple[StepBatch, Scalar] | None = None
    told = 0
    steps: dict[int, None] = {}
    for batch in case.batches():
        for scalar, made in _made(batch, mean):
            if abs(made) < LEAST:
                continue
            if abs(scalar.value - made) > CLOSE * abs(made):
                return None
            told, first = told + 1, first or (batch, scalar)
            steps |= {} if batch.step is None else {batch.step: None}
    if first is None or told < FEWEST:
        return None
    batch, scalar = first
    return warning(
        f"micro-batches are accumulated and not divided by their number: each loss is {divisor:g} times what the run "
        f"states, a {mean.replace('_', ' ')} over {divisor:g}",
        batch.laid.where_record(scalar.record, scalar.name),
        evidence=[
            shown(scalar.name, scalar.value, f"{scalar.value / divisor:.6g}", scalar.record.path.name),
            shown("micro-batches that agree", told),
            shown("divisor that is stated", divisor),
        ],
        cause=f"the division by the accumulated micro-batches is missing: the gradient is {divisor:g} times too large "
        "(clipping and Adam hide it). Where the loss is recorded before it is divided, the gradient is right",
        steps=list(steps),
    )  # fmt: skip


def _made(batch: StepBatch, mean: str) -> Iterator[tuple[Scalar, float]]:
    """The recorded loss of each micro-batch, and the stated mean of its tokens; nothing where it cannot be made."""
    advantages, trained_N = batch.columns.of("advantages"), batch.trained_N
    if advantages is None or trained_N is None:
        return
    token_N = _token_loss(batch, np.where(advantages.said_N, np.nan_to_num(advantages.values_N), 0.0))
    if token_N is None:
        return
    sums_B, counts_B = batch.flat.sum(np.where(trained_N, token_N, 0.0)), batch.flat.count(trained_N)
    rows = batch.laid.rows_by_micro()
    for scalar in batch.columns.scalars("loss"):
        samples = rows.get((scalar.record.key.rank, scalar.record.key.micro))
        if not samples or scalar.record.key.micro is None or not np.isfinite(scalar.value):
            continue
        sums, counts = sums_B[samples], counts_B[samples]
        by_token = float(sums.sum() / max(counts.sum(), 1))
        yield scalar, by_token if mean == "token_mean" else float((sums / np.maximum(counts, 1)).mean())


def _token_loss(batch: StepBatch, a_N: Array) -> Array | None:
    """The clipped loss of every token with the stated weight of the KL; None where its terms are not recorded."""
    algorithm = batch.laid.algorithm
    if algorithm.is_by_sequence or algorithm.is_of_weights or batch.has("is_weights"):
        return None
    try:
        ratio_N, known_N, _ = ratios(batch)
    except Skip:
        # Where nothing is kept of an older policy a batch has one update: its ratio is 1 (TRL records none then).
        if batch.has("old_logprobs") or batch.has("is_ratio"):
            return None
        ratio_N, known_N = np.ones(len(a_N)), np.ones(len(a_N), dtype=bool)
    low, high = algorithm.clip_range or (0.2, 0.2)
    made_N = policy_loss.clipped(np.where(known_N, ratio_N, 1.0), a_N, clip_low=low, clip_high=high)
    if weight := of_loss(batch.laid.flags, "kl"):
        policy, ref = batch.columns.of("policy_logprobs"), batch.columns.of("ref_logprobs")
        estimator = _ESTIMATORS.get(str(of_loss(batch.laid.flags, "kl_estimator")))
        if policy is None or ref is None or estimator is None:
            return None
        both_N = batch.pair(policy, ref)
        made_N = made_N + np.where(both_N, float(weight) * estimator(policy.values_N, ref.values_N), 0.0)
    if of_loss(batch.laid.flags, "entropy") or algorithm.number("entropy_coef", "entropy_coeff"):
        return None
    found_N: Array = made_N
    return found_N
