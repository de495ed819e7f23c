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
