"""The entropy of every token beside its log-probability: whether both are of one distribution."""

from __future__ import annotations

import math

import numpy as np
from msgspec import Struct

from replay_core.diagnose.algorithm import entropy_bonus
from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.case import Case
from replay_core.diagnose.finding import Finding, finding, shown
from replay_core.diagnose.flat import Array
from replay_core.diagnose.rule import rule, skip_if
from replay_core.diagnose.softmax import stated_temperature

#: No vocabulary is larger, where none is stated.
VOCABULARY = 1 << 18
#: What rounding (bf16) and an update or two make of an entropy: a share of it, and nats.
SHARE, NATS = 0.1, 0.02
#: Tokens whose entropy is impossible, their share of those that tell, and steps, before they are no chance; and the
#: share that is left where another explanation holds.
TOKENS, OFTEN, STEPS, LEFT = 8, 0.02, 2, 0.1
#: How far the entropy lies, on average, on the side of what is drawn before it is that of a flatter distribution.
FLATTER = 1.05


class _EntropyBeside(Struct, frozen=True):
    """A step's tokens: entropy, log-probability of the token that was drawn, and how many entropies are impossible, as
    they stand and by what lies a token before or after.
    """

    batch: StepBatch
    entropy_N: Array
    logp_N: Array
    both_N: Array
    impossible_N: Array
    shifted: dict[int, int]

    @property
    def flatness(self) -> float:
        """Mean entropy over the mean of -log p, over tokens that count: 1 of tokens drawn from what they are of."""
        return float(self.entropy_N[self.both_N].mean() / max(-self.logp_N[self.both_N].mean(), 1e-12))


def bounds(logp: Array, vocabulary: int) -> tuple[Array, Array]:
    """The least and the largest entropy of a distribution that gives one token this log-probability: all that is left
    lies on one other token, or evenly on all of them.
    """
    p = np.exp(np.minimum(logp, 0.0))
    left = -np.expm1(np.minimum(logp, 0.0))
    least = -p * logp - np.where(left > 0, left * np.log(np.maximum(left, 1e-300)), 0.0)
    return least, least + left * math.log(max(vocabulary - 1, 1))


def _impossible(entropy: Array, logp: Array, vocabulary: int) -> Array:
    least, most = bounds(logp, vocabulary)
    found: Array = (entropy > (1 + SHARE) * most + NATS) | (entropy < (1 - SHARE) * least - NATS)
    return found


def _beside(batch: StepBatch, vocabulary: int) -> _EntropyBeside | None:
    """The tokens of a batch; None where entropies or log-probabilities are not recorded."""
    entropy = batch.columns.of("entropy")
    if entropy is None:
        return None
    best: _EntropyBeside | None = None
    for name in ("old_logprobs", "policy_logprobs"):
        column = batch.columns.of(name)
        if column is None:
            continue
        both_N = batch.pair(entropy, column)
        if both_N.sum() < TOKENS or not entropy.values_N[both_N].any():
            continue
        if np.allclose(entropy.values_N[both_N], -column.values_N[both_N], rtol=1e-3, atol=1e-4):
            return None  # an estimate of one sample, which is the entropy on average alone
        h_N, l_N = np.where(both_N, entropy.values_N, 0.0), np.where(both_N, column.values_N, 0.0)
        impossible_N = both_N & _impossible(h_N, l_N, vocabulary)
        shifted = {}
        for by in (1, -1):
            moved_N, known_N = np.roll(h_N, by), np.roll(both_N, by) & both_N
            known_N &= np.roll(batch.flat.sample_N, by) == batch.flat.sample_N
            shifted[by] = int((known_N & _impossible(moved_N, l_N, vocabulary)).sum())
        one = _EntropyBeside(batch, h_N, l_N, both_N, impossible_N, shifted)
        # Of the two the one that it may be of.
        if best is None or impossible_N.sum() < best.impossible_N.sum():
            best = one
    return best


@rule("D148", "the entropy is that of other logits than the log-probabilities", link="logprobs", scope="case",
      lasts=True,
      explains=("D25", "L10"),
      source="OpenRLHF#1319; of a distribution that gives a token p the entropy lies within two bounds")  # fmt: skip
def of_other_logits(case: Case) -> Finding | None:
    """Recorded entropies of tokens that no distribution has which gives the drawn token its recorded probability p:
    over -p log p - (1 - p) log(1 - p) + (1 - p) log(V - 1), or under it without the last term, by a tenth and .02 nats
    and more (V: the stated vocabulary, else 262144), in 2 % of a step's tokens and more, 8 tokens and 2 steps and more,
    and all steps that have entropies. (Not where they are -log p: estimates of one sample.)
    Of old and of current log-probabilities the nearer ones count.

    Where the entropy of the token before or after leaves a tenth of them, it is shifted by one. Where they are too
    large and the run states a temperature below 1 (too small: above 1), the logits of the entropy were not divided by
    it. A warning where the run states a coefficient for the entropy, else worth knowing: it is a metric alone.
    """
    algorithm = case.algorithm
    vocabulary = int(algorithm.number("vocab_size", "padded_vocab_size", "vocabulary_size") or VOCABULARY)
    every = [one for batch in case.batches() if (one := _beside(batch, vocabulary)) is not None]
    skip_if(not every, "needs the entropy of tokens beside their log-probabilities")
    told = [one for one in every if one.impossible_N.sum() >= OFTEN * one.both_N.sum()]
    count, tokens = (sum(int(each.sum()) for each in (getattr(one, name) for one in told))
                     for name in ("impossible_N", "both_N"))  # fmt: skip
    if len(told) < STEPS or len(told) < len(every) or count < TOKENS:
        return None
    one = told[0]
    at = int(np.flatnonzero(one.impossible_N)[0])
    least, most = (float(bound[0]) for bound in bounds(one.logp_N[[at]], vocabulary))
    value = float(one.entropy_N[at])
    flatness = float(np.median([each.flatness for each in told]))
    what, cause = _why(told, count, flatness, stated_temperature(one.batch))
    weight = entropy_bonus(algorithm)
    return finding(
        "warning" if weight else "info",
        f"the entropy is not that of the distribution that the log-probabilities are of: {what}",
        one.batch.laid.where("entropy", at=at),
        shown("entropies that no such distribution has", count, "0", f"of {tokens} tokens"),
        shown(f"entropy of a token with log-probability {one.logp_N[at]:.4g}", value, f"{least:.4g} to {most:.4g}"),
        shown("mean entropy over the mean of -log p of what was drawn", flatness, "1"),
        *([] if weight is None else [shown("coefficient of the entropy", weight)]),
        shown("steps that agree", len(told)),
        cause=cause,
        next_step="take the entropy of the logits that the log-probabilities are taken of, after they are divided by "
        "the temperature, at the same places",
        steps=[each.batch.step for each in told],
    )


def _why(told: list[_EntropyBeside], count: int, flatness: float, stated: float | None) -> tuple[str, str]:
    """What it is the entropy of, for the claim, and the cause."""
    for by, side in ((1, "before"), (-1, "after")):
        if sum(one.shifted[by] for one in told) <= LEFT * count:
            return (
                f"each token has that of the token {side}",
                "logits and entropies are cut at different places (logits[:-1] for one, all of them for the other): "
                "masks then count the entropy of another token",
            )
    cold = flatness > FLATTER
    if stated is not None and (stated < 1 if cold else stated > 1 and flatness * FLATTER < 1):
        return (
            f"it is {'larger' if cold else 'smaller'}, as that of logits which are not divided by the temperature of "
            f"{stated:g} that is stated",
            "the entropy is computed before the logits are divided by the sampling temperature: bonus and metric are "
            "of another distribution than samples and loss",
        )
    return (
        f"it is {'larger' if cold else 'smaller' if flatness * FLATTER < 1 else 'another'} than that can be",
        "the entropy is of logits at another temperature, of another forward, of other places, or over a part of the "
        "vocabulary",
    )
