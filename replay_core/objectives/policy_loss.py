"""The clipped policy-gradient loss, per token; `reductions.py` makes one number of it."""

from __future__ import annotations

from replay_core.objectives.arrays import Array, library


def ratio(logprobs_BT: Array, old_logprobs_BT: Array) -> Array:
    """pi(token) / pi_old(token): how far the policy has moved since the batch was sampled. PPO section 3."""
    return library(logprobs_BT).exp(logprobs_BT - old_logprobs_BT)


def clipped(ratio_BT: Array, advantages_BT: Array, *, clip_low: float = 0.2, clip_high: float = 0.2) -> Array:
    """max(-A r, -A clip(r, 1 - low, 1 + high)) for each token: a loss, to be minimised.

    Source: Proximal Policy Optimization (arXiv 1707.06347) equation 7, with its sign turned; two clip ranges
    as in DAPO (arXiv 2503.14476) equation 10.
    """
    arrays = library(ratio_BT)
    return arrays.maximum(-advantages_BT * ratio_BT, -advantages_BT * ratio_BT.clip(1 - clip_low, 1 + clip_high))


def is_clipped(ratio_BT: Array, advantages_BT: Array, *, clip_low: float = 0.2, clip_high: float = 0.2) -> Array:
    """Whether clipping decides a token's loss, so that its gradient is zero.

    True only where the ratio left its range in the direction the advantage pushes: verl's `pg_clipfrac` is the
    masked mean of this. Frameworks that count every ratio outside the range report a larger number.
    """
    too_high_BT = (ratio_BT > 1 + clip_high) & (advantages_BT > 0)
    too_low_BT = (ratio_BT < 1 - clip_low) & (advantages_BT < 0)
    return too_high_BT | too_low_BT
