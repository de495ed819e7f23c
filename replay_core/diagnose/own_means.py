"""Terms of a loss (a KL, an entropy, a teacher's) that are means over each micro-batch's own tokens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
from msgspec import Struct

from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.columns import Scalar
from replay_core.diagnose.flat import Array
from replay_core.objectives import kl

#: Relative agreement of what is recomputed, terms below which it is not told, and micro-batches before it is no chance.
CLOSE, LEAST, FEWEST = 1e-3, 1e-5, 4
#: Terms by the names trainers log them under.
TERMS = {
    "kl_loss": "KL", "entropy_loss": "entropy", "distillation_loss": "distillation", "distill_loss": "distillation",
    "opd_loss": "distillation", "teacher_kl_loss": "distillation", "distillation_kl_loss": "distillation",
}  # fmt: skip


class OwnMean(Struct, frozen=True):
    """One micro-batch's logged term, its tokens, and what it is made of by each way: its own mean, its update's."""

    logged: Scalar
    tokens: int
    own: dict[str, float]
    of_update: dict[str, float]
    """Its tokens' share of the update's mean, times the update's micro-batches: of alike ones the same."""


def _agree(made: float, value: float) -> bool:
    return abs(made - value) <= CLOSE * abs(value)


def _ways(batch: StepBatch, what: str) -> dict[str, Array]:
    """The term of every token that counts [N], by each way to make it."""
    trained_N = batch.trained_N
    if trained_N is None:
        return {}
    if what == "entropy":
        column = batch.columns.of("entropy")
        if column is None:
            return {}
        return {"entropy": np.where(column.said_N & trained_N, np.nan_to_num(column.values_N), 0.0)}
    other = batch.columns.of("ref_logprobs" if what == "KL" else "teacher_logprobs")
    made: dict[str, Array] = {}
    for name in ("policy_logprobs", "old_logprobs"):
        policy = batch.columns.of(name)
        if policy is None or other is None:
            continue
        both_N = batch.pair(policy, other)
        p_N, q_N = (np.where(both_N, one.values_N, 0.0) for one in (policy, other))
        for way, each in kl.ESTIMATORS.items():
            made[f"{way} of {name}"] = np.where(both_N, each(p_N, q_N), 0.0)
    return made


def own_means(batch: StepBatch, name: str) -> list[list[OwnMean]]:
    """A step's micro-batches by update, for those of several; empty where the term is not logged or cannot be made."""
    logged = [one for one in batch.columns.scalars(name) if one.record.key.micro is not None]
    ways = _ways(batch, TERMS[name]) if logged else {}
    if not ways or batch.trained_N is None:
        return []
    rows, counts_B = batch.laid.rows_by_micro(), batch.flat.count(batch.trained_N)
    sums = {way: batch.flat.sum(values_N) for way, values_N in ways.items()}
    updates: dict[Any, list[Scalar]] = defaultdict(list)
    for one in logged:
        if one.place in rows and int(counts_B[rows[one.place]].sum()):
            updates[one.update].append(one)
    return [list(_made(each, rows, counts_B, sums)) for each in updates.values() if len(each) > 1]


def _made(each: list[Scalar], rows: Any, counts_B: Array, sums: dict[str, Array]) -> Iterator[OwnMean]:
    total = sum(int(counts_B[rows[one.place]].sum()) for one in each)
    for one in each:
        samples = rows[one.place]
        tokens = int(counts_B[samples].sum())
        own = {way: float(sums_B[samples].sum()) / tokens for way, sums_B in sums.items()}
        yield OwnMean(one, tokens, own, {way: mean * tokens * len(each) / total for way, mean in own.items()})


def is_own(updates: list[list[OwnMean]]) -> bool:
    """Whether one way makes every term (4 and more) as the mean over its own tokens, or that over the number of
    micro-batches, and none as a share of its update's mean.
    """
    every = [(one, len(each)) for each in updates for one in each if abs(one.logged.value) > LEAST]
    if len(every) < FEWEST:
        return False
    for way in every[0][0].own:
        for parts in (False, True):
            if all(_agree(one.own[way] / (many if parts else 1), one.logged.value) for one, many in every):
                shares = (_agree(one.of_update[way] / (many if parts else 1), one.logged.value) for one, many in every)
                return not all(shares)
    return False
