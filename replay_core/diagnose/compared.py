"""Rollout beside trainer as findings say it: what they need, their figures, and the token that is worst."""

from __future__ import annotations

import numpy as np

from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.finding import Evidence, shown
from replay_core.diagnose.gap import DISAGREE, FEWEST, Gap, gap
from replay_core.diagnose.passes import before_any_update_N
from replay_core.diagnose.rule import Skip

BOTH = ("rollout_logprobs", "trainer_logprobs", "mask|response")
TOLD_APART = "rldbg record -- YOUR COMMAND, then rldbg diagnose rldbg-dump tells them apart (D08, D10, D11, D12, D16)"


def figures_of(between: Gap) -> list[Evidence]:
    source = f"{between.trainer.source} - {between.rollout.source}"
    return [
        shown("mean |trainer - rollout|", between.mean, "< 0.03 nats", source),
        shown("tokens compared", int(between.both_N.sum())),
    ]


def worst_of(between: Gap) -> int:
    """The flat token with the largest difference."""
    tokens = np.flatnonzero(between.both_N)
    return int(tokens[np.abs(between.d).argmax()])


def compared(batch: StepBatch) -> Gap:
    """The gap of a batch.

    Raises:
        Skip: rollout or trainer is not recorded, or they cannot be compared.
    """
    missing = [need for need in BOTH if not any(batch.has(name) for name in need.split("|"))]
    if missing:
        raise Skip("needs " + ", ".join(missing).replace("|", " or "))
    return gap(batch)


def gap_of(batch: StepBatch) -> Gap | None:
    """The gap of a batch; None where rollout and trainer cannot be compared."""
    try:
        return gap(batch) if all(batch.has(name) for name in BOTH[:2]) else None
    except Skip:
        return None


def distance(batch: StepBatch) -> float | None:
    """mean |trainer - rollout| over the tokens that count, nats; None where the two cannot be compared."""
    between = gap_of(batch)
    return None if between is None else between.mean


def disagrees(batch: StepBatch) -> bool:
    """Whether engine and trainer are known to disagree by more than precision comes to."""
    return (distance(batch) or 0.0) > DISAGREE


#: Share of the old log-probabilities' distance from the engine that the first forward's comes to where these are odd.
ODD = 0.2


def old_is_odd(batch: StepBatch) -> tuple[float, float] | None:
    """mean |old - rollout| and |policy - rollout|, nats, where the policy's first forward over its samples agrees with
    the engine and the old log-probabilities agree with neither; else None.
    """
    old, rollout, policy = (batch.columns.of(f"{name}_logprobs") for name in ("old", "rollout", "policy"))
    if old is None or rollout is None or policy is None:
        return None
    three_N = batch.pair(old, rollout) & batch.pair(policy, rollout) & before_any_update_N(batch)
    if three_N.sum() < FEWEST:
        return None
    of_old, of_policy = (float(np.abs(one.values_N - rollout.values_N)[three_N].mean()) for one in (old, policy))
    beside = float(np.abs(old.values_N - policy.values_N)[three_N].mean())
    return (of_old, of_policy) if min(of_old, beside) > DISAGREE and of_policy < ODD * of_old else None
