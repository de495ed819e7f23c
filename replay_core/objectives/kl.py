"""Per-token estimators of KL(policy || reference) from the log-probabilities of sampled tokens.

Source: J. Schulman, "Approximating KL Divergence" (2020), http://joschu.net/blog/kl-approx.html. Tokens are
sampled from the policy q; r = p / q with p the reference; each function is one estimator's value per token.
"""

from __future__ import annotations

from replay_core.objectives.arrays import Array, library


def k1(logprobs_BT: Array, ref_logprobs_BT: Array) -> Array:
    """-log r: unbiased, high variance, negative for about half the tokens."""
    return logprobs_BT - ref_logprobs_BT


def k2(logprobs_BT: Array, ref_logprobs_BT: Array) -> Array:
    """(log r)^2 / 2: biased, low variance, never negative."""
    log_ratio_BT = ref_logprobs_BT - logprobs_BT
    return log_ratio_BT * log_ratio_BT / 2


def k3(logprobs_BT: Array, ref_logprobs_BT: Array) -> Array:
    """(r - 1) - log r: unbiased, low variance, never negative. GRPO's KL term (DeepSeekMath, equation 4)."""
    log_ratio_BT = ref_logprobs_BT - logprobs_BT
    return library(log_ratio_BT).expm1(log_ratio_BT) - log_ratio_BT


def k3_clamped(logprobs_BT: Array, ref_logprobs_BT: Array, *, inside: float = 20.0, outside: float = 10.0) -> Array:
    """k3 with the log ratio held within +-inside and the estimate within +-outside.

    Source: verl core_algos.kl_penalty `low_var_kl` (+-20, then +-10); OpenRLHF clamps the estimate to +-10.
    """
    log_ratio_BT = (ref_logprobs_BT - logprobs_BT).clip(-inside, inside)
    return (library(log_ratio_BT).expm1(log_ratio_BT) - log_ratio_BT).clip(-outside, outside)


def absolute(logprobs_BT: Array, ref_logprobs_BT: Array) -> Array:
    """|log r|: verl's `abs` penalty. Not an estimator of the KL, an upper measure of how far two policies are."""
    return abs(logprobs_BT - ref_logprobs_BT)


#: The estimators by the word that a run states them by; what clamps or weighs one is another form of it.
ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3, "|log r|": absolute}
