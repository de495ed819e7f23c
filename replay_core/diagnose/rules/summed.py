"""A loss that is a sum over tokens where its parts are means: what the gradient is made of is never divided."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

import numpy as np

from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.case import Case
from replay_core.diagnose.finding import Finding, Where, finding, shown
from replay_core.diagnose.rule import Skip, rule
from replay_core.diagnose.stated import stated_number

#: Relative agreement of a factor, losses below which it is not told, tokens that are a sum, and steps that tell.
CLOSE, FLOOR, TOKENS, STEPS = 1e-3, 1e-5, 8, 2
#: How many times the norm that is clipped at a gradient has, when all that is left of it is its direction.
FAR_OVER = 5.0


@rule("D99", "the loss is a sum over tokens", link="reduction", scope="case", lasts=True,
      explains=("L02", "D28", "D49"),
      source="NeMo-RL#84: a loss not divided by its tokens; Megatron divides gradients afterwards")  # fmt: skip
def summed(case: Case) -> Iterator[Finding]:
    """`loss` over `pg_loss` of every micro-batch, where no other term is recorded: one factor within each of 2 steps
    and more that is the number of tokens of its update (or of the micro-batch), and another as that changes. A warning
    where the run states a mean, or gradients are five times over the norm they are clipped at in half of the steps: all
    of them are cut, by as much as a batch has tokens. Else it is worth knowing: the gradient may be divided afterwards.
    """
    factors: list[tuple[int, float, str]] = []
    over: list[float] = []
    where: Where | None = None
    means = False
    for batch in case.batches():
        if batch.trained_N is None or batch.step is None:
            continue
        stated = batch.laid.algorithm.word("loss_agg_mode", "loss_reduction", "loss_aggregation")
        means = means or stated.endswith("mean")
        found = _factor(batch)
        if found is not None:
            factors.append((batch.step, *found))
            where = where or batch.laid.where_record(batch.columns.scalars("loss")[0].record, "loss")
        over += _over(batch)
    counts = {round(factor) for _, factor, _ in factors}
    if len(factors) < STEPS or len(counts) < STEPS:
        raise Skip(f"needs loss and pg_loss of {STEPS} steps, and no other term beside them")
    if len({what for _, _, what in factors}) > 1:
        return
    clipped = median(over) if over else None
    cut = clipped is not None and clipped > FAR_OVER
    yield finding(
        "warning" if means or cut else "info",
        f"the loss is a sum over tokens: it is pg_loss times the tokens of {factors[0][2]}, {min(counts)} to "
        f"{max(counts)} times",
        where,
        evidence=[
            shown("loss / pg_loss", factors[0][1], "1"),
            shown("steps where that is the number of tokens", len(factors)),
            *([] if clipped is None else [shown("gradient norm over the norm it is clipped at, median", clipped,
                                                f"< {FAR_OVER:g}")]),
        ],
        cause="the division by the number of tokens (a mean, an average) is missing in what is trained on, while the "
        "mean is logged: the gradient is as many times too large, its size goes with the lengths of the answers, and "
        "clipping leaves its direction alone"
        if means or cut
        else "right where the gradient is divided by the tokens of all ranks afterwards, as Megatron's schedule does",
        steps=[step for step, _, _ in factors],
    )  # fmt: skip


def _factor(batch: StepBatch) -> tuple[float, str] | None:
    """loss / pg_loss of the step's micro-batches and what it is the number of tokens of; None where it is none."""
    if any(batch.columns.scalars(name) for name in ("kl_loss",)) and _weighs(batch):
        return None
    parts = {(one.record.key.rank, one.record.key.micro): one.value for one in batch.columns.scalars("pg_loss")}
    rows, counts_B = batch.laid.rows_by_micro(), batch.flat.count(batch.trained_N)  # type: ignore[arg-type]
    pairs = [
        (one.value / parts[key], int(counts_B[rows[key]].sum()))
        for one in batch.columns.scalars("loss")
        if (key := (one.record.key.rank, one.record.key.micro)) in parts and key in rows
        and np.isfinite(one.value) and abs(parts[key]) > FLOOR and abs(one.value) > FLOOR
    ]  # fmt: skip
    if not pairs:
        return None
    ratios = np.array([ratio for ratio, _ in pairs])
    own = np.array([count for _, count in pairs], dtype=np.float64)
    total = float(counts_B.sum())
    if total > TOKENS and np.abs(ratios - total).max() <= CLOSE * total:
        return float(ratios.mean()), "the update"
    if len(pairs) > 1 and own.min() > TOKENS and (np.abs(ratios - own) <= CLOSE * own).all():
        return float(ratios.mean()), "the micro-batch"
    return None


def _weighs(batch: StepBatch) -> bool:
    """Whether a KL term is in the loss, as far as the run states it."""
    weight = stated_number(batch.laid.stated, "kl_loss_coef", "kl_coef", "beta")
    return weight is None or weight != 0


def _over(batch: StepBatch) -> list[float]:
    """Gradient norms of the step over the norm that they are clipped at, as it is recorded or stated."""
    limits = [one.value for one in batch.columns.scalars("max_grad_norm")]
    stated = stated_number(batch.laid.stated, "max_grad_norm", "grad_clip", "clip_grad", "clip_grad_norm")
    limit = limits[0] if limits else stated
    if not limit or not limit > 0:
        return []
    return [one.value / limit for one in batch.columns.scalars("grad_norm") if np.isfinite(one.value)]
