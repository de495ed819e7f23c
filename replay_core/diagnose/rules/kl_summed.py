"""The KL term's own reduction: summed over a response's tokens beside a policy loss that is a mean of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from replay_core.diagnose.algorithm import of_loss
from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.case import Case
from replay_core.diagnose.finding import Finding, finding, shown
from replay_core.diagnose.flat import Array
from replay_core.diagnose.rule import given
from replay_core.objectives import kl

#: Relative agreement of a recomputed term, terms that are told from rounding, and micro-batches that are no chance.
CLOSE, LEAST, FEWEST = 1e-3, 1e-6, 4
_ESTIMATORS = {"k1": kl.k1, "k2": kl.k2, "k3": kl.k3, "|log r|": kl.absolute}


def summed_kl(case: Case) -> Finding | None:
    """The logged KL loss of 4 micro-batches and more, each made by one estimator as the mean over samples of their sums
    over tokens (or as one sum), and as no mean over tokens, where the run states a mean for its loss.
    """
    sums: dict[str, list[tuple[StepBatch, float, float, str]]] = {}
    parts: Counter[tuple[str, int, int]] = Counter()
    told = 0
    stated, is_of_term = "", False
    for batch in case.batches():
        own = str(of_loss(batch.laid.flags, "reduction"))
        is_of_term = is_of_term or own in ("token_mean", "sequence_mean")
        stated = batch.laid.algorithm.word("loss_agg_mode", "loss_reduction", "loss_aggregation") or own
        if not stated.endswith(("-mean", "_mean")):
            return None
        for value, terms_N, samples in _terms(batch):
            told += 1
            for name, made_N in terms_N.items():
                sums_B, counts_B = _of_samples(batch, made_N, samples)
                means = (float(sums_B.sum() / max(counts_B.sum(), 1)), float((sums_B / np.maximum(counts_B, 1)).mean()))
                for which, mean in enumerate(means):
                    parts[name, which, _part(value, mean)] += 1
                for how, total in (("each response's tokens", float(sums_B.mean())), ("all tokens", sums_B.sum())):
                    if abs(value - total) <= CLOSE * abs(total):
                        sums.setdefault(how + "|" + name, []).append((batch, value, means[1], name))
    # A mean that is shared among micro-batches, by any whole number, is one.
    if any(part and count == told for (_, _, part), count in parts.items()):
        return None
    whole = [each for each in sums.values() if len(each) == told]
    if told < FEWEST or not whole:
        return None
    how = next(key for key, each in sums.items() if each is whole[0]).split("|")[0]
    batch, value, mean, name = whole[0][0]
    return finding(
        "error" if is_of_term else "warning",
        f"the KL loss is a sum over {how}, and the run states a loss of {stated.replace('_', ' ')}: the KL is weighted "
        "by length",
        batch.laid.where_record(batch.columns.scalars("kl_loss")[0].record, "kl_loss"),
        link="ref",
        evidence=[
            shown("kl_loss", value, f"{mean:.6g}, the mean over tokens"), shown("estimator that makes it", name),
            shown("micro-batches that agree", told),
        ],
        cause="the KL term is not reduced as the policy's loss is: its division by the tokens is missing, and it "
        f"weighs {value / mean:.3g} times what its coefficient says, more the longer the responses are",
        steps=sorted({each.step for each, *_ in whole[0] if each.step is not None}),
    )  # fmt: skip


def _terms(batch: StepBatch) -> Iterator[tuple[float, dict[str, Array], list[int]]]:
    """The logged KL loss of each micro-batch, its tokens' KL by every estimator [N], and its samples."""
    policy, ref = batch.columns.of("policy_logprobs"), batch.columns.of("ref_logprobs")
    if policy is None or ref is None or batch.trained_N is None:
        return
    both_N = batch.pair(policy, ref)
    p_N, r_N = (np.where(both_N, one.values_N, 0.0) for one in (policy, ref))
    made = {name: np.where(both_N & batch.trained_N, each(p_N, r_N), 0.0) for name, each in _ESTIMATORS.items()}
    rows = batch.laid.rows_by_micro()
    for scalar in batch.columns.scalars("kl_loss"):
        samples = rows.get((scalar.record.key.rank, scalar.record.key.micro))
        if samples and scalar.record.key.micro is not None and abs(scalar.value) > LEAST:
            yield scalar.value, made, samples


def _of_samples(batch: StepBatch, values_N: Array, samples: list[int]) -> tuple[Array, Array]:
    return batch.flat.sum(values_N)[samples], batch.flat.count(given(batch.trained_N))[samples]


def _part(value: float, mean: float) -> int:
    """The whole number that a mean is divided by; 0 for none."""
    parts = mean / value
    return round(parts) if abs(parts - round(parts)) <= CLOSE * abs(parts) else 0
