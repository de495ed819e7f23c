"""A loss that is recorded as one number, taken apart: its terms are made of the tokens, their weights solved for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import numpy as np
from msgspec import Struct

from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.case import Case
from replay_core.diagnose.flat import Array
from replay_core.diagnose.rule import Skip
from replay_core.diagnose.rules.ratio import ratios
from replay_core.diagnose.surrogates import Logged, by_sequence, dual_clip, logged_of, weighing
from replay_core.objectives import kl, policy_loss

#: What a loss may be off the sum of its terms, of itself and at least: they are logged in single precision.
CLOSE, FLOOR = 3e-4, 3e-7
#: Micro-batches that a term of the stated weight has to show in, by so many times what a loss may be off.
SHOWS, TIMES = 6, 20.0
#: Micro-batches beyond the weights that are solved for.
BEYOND = 6
#: What the policy loss's weight, which all others are shares of, may be off, as a share of itself.
KNOWN = 0.05


class Weights(Struct, frozen=True):
    """What makes every recorded loss: the KL's and the entropy's weights beside a policy loss of weight 1."""

    kl: float | None
    entropy: float | None
    estimator: str
    """Of the KL: k1, k2, k3 or |log r|; empty where it is none."""
    micros: int
    steps: list[int]
    batch: StepBatch


class _StepLosses(Struct, frozen=True):
    """One step's losses, and the terms that may be in them, each by its name and reduction [M]."""

    batch: StepBatch
    losses_M: Array
    terms: dict[tuple[str, int], Array]


def solve(case: Case, beta: float | None, bonus: float | None) -> Weights | None:
    """The weights of the terms in the losses of all steps; None where no known ones make them, or where terms of the
    stated weights (`beta`, `bonus`) would not show.
    """
    every = [made for batch in case.batches() if (made := _made(batch)) is not None]
    losses = np.concatenate([made.losses_M for made in every]) if every else np.zeros(0)
    if losses.size < BEYOND + 2 or len({made.batch.laid.algorithm.kind for made in every}) > 1:
        return None
    names = set.intersection(*(set(made.terms) for made in every))
    limits = CLOSE * np.abs(losses) + FLOOR

    def of(name: str, how: int) -> Array | None:
        return np.concatenate([made.terms[name, how] for made in every]) if (name, how) in names else None

    for how in _HOW:
        policy_M = of("policy", how)
        if policy_M is None or not np.abs(policy_M).max() > 0:
            continue
        for estimator, with_entropy in product(("", *kl.ESTIMATORS), (False, True)):
            chosen = [name for name in (estimator, "entropy" if with_entropy else "") if name]
            others = [of(name, how) for name in chosen]
            if any(one is None for one in others) or losses.size < BEYOND + 1 + len(others):
                continue
            terms = np.stack([policy_M, *(one for one in others if one is not None)], axis=1)
            weights, _, rank, _ = np.linalg.lstsq(terms, losses, rcond=None)
            if rank < terms.shape[1] or not weights[0] > 0 or (np.abs(terms @ weights - losses) > limits).any():
                continue
            # Advantages that a group's mean was taken from, at a ratio of 1, sum up to rounding: no weight is theirs.
            if not np.abs(np.linalg.pinv(terms)[0]) @ limits <= KNOWN * weights[0]:
                return None
            if not _all_show(weights[0], ((estimator, beta), ("entropy", bonus)), how, of, limits):
                return None
            found = dict(zip(chosen, weights[1:] / weights[0], strict=True))
            steps = [made.batch.step for made in every if made.batch.step is not None]
            return Weights(
                found.get(estimator) if estimator else None, found.get("entropy"), estimator, losses.size, steps,
                every[0].batch,
            )  # fmt: skip
    return None


def _all_show(
    scale: float, stated: tuple[tuple[str, float | None], ...], how: int, of: Callable[[str, int], Array | None],
    limits: Array,
) -> bool:  # fmt: skip
    """Whether each stated term would change enough of the losses by far more than they may be off."""
    for name, weight in stated:
        if not weight:
            continue
        sizes = [term_M for one in ([name] if name else kl.ESTIMATORS) if (term_M := of(one, how)) is not None]
        if not sizes:
            return False
        least_M = np.min([np.abs(term_M) for term_M in sizes], axis=0)
        if (scale * weight * least_M > TIMES * limits).sum() < SHOWS:
            return False
    return True


#: Reductions: over a micro-batch's tokens, a mean of its samples' means, over its samples, over the update's tokens.
_HOW = range(4)


def _made(batch: StepBatch) -> _StepLosses | None:
    logged = logged_of(batch, "loss", fewest=2)
    if logged is None:
        return None
    made = {
        (name, how): term_M for name, values_N in _terms(batch) for how, term_M in enumerate(_reduced(logged, values_N))
    }
    return _StepLosses(batch, logged.values_M, made) if made else None


def _reduced(logged: Logged, values_N: Array) -> Iterator[Array]:
    counts, tokens, samples = logged.sizes
    sums = np.bincount(logged.sample_of, weights=values_N[logged.token_of], minlength=len(counts))
    total = logged.per_micro(sums)
    yield total / np.maximum(tokens, 1)
    yield logged.per_micro(sums / np.maximum(counts, 1)) / np.maximum(samples, 1)
    yield total / np.maximum(samples, 1)
    yield total / np.maximum(logged.update_tokens_M, 1)


def _terms(batch: StepBatch) -> Iterator[tuple[str, Array]]:
    """Each token's policy loss as the run states it, its KL by every estimator, and its entropy."""
    column, policy = batch.columns.of("advantages"), batch.columns.of("policy_logprobs")
    if column is None or policy is None:
        return
    try:
        found_N, known_N, _ = ratios(batch)
    except Skip:
        return
    algorithm = batch.laid.algorithm
    a_N = np.where(column.said_N, np.nan_to_num(column.values_N), 0.0)
    ratio_N = np.where(known_N, found_N, 1.0)
    if algorithm.is_by_sequence:
        ratio_N = by_sequence(batch, ratio_N, known_N)
    low, high = algorithm.clip_range or (0.2, 0.2)
    plain_N = policy_loss.clipped(ratio_N, a_N, clip_low=low, clip_high=high)
    if (most := dual_clip(algorithm)) is not None:
        plain_N = np.where(a_N < 0, np.minimum(plain_N, -most * a_N), plain_N)
    if algorithm.is_of_weights:
        logp_N = np.where(policy.said_N, np.nan_to_num(policy.values_N), 0.0)
        plain_N = -ratio_N.clip(1 - low, 1 + high) * a_N * logp_N
    weighed = weighing(batch)
    yield "policy", plain_N * (1.0 if weighed is None else weighed.right[0])
    ref, entropy = batch.columns.of("ref_logprobs"), batch.columns.of("entropy")
    if ref is not None:
        both_N = batch.pair(policy, ref)
        p_N, r_N = (np.where(both_N, one.values_N, 0.0) for one in (policy, ref))
        yield from ((name, estimate(p_N, r_N)) for name, estimate in kl.ESTIMATORS.items())
    if entropy is not None:
        yield "entropy", np.where(entropy.said_N, np.nan_to_num(entropy.values_N), 0.0)
