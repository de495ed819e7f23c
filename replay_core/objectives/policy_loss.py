"""The clipped policy-gradient loss, per token; `reductions.py` makes one number of it."""

from __future__ import annotations

from replay_core.objectives.arrays import Array, library


def ratio(logprobs_BT: Array, old_logprobs_BT: Array) -> Array:
    """pi(token) / pi_old(token): how far the policy has moved since the batch was sampled. PPO section 3."""
    return library(logprobs_BT).exp(logprobs_BT - old_logprobs_BT)


def sequence_ratio(logprobs_BT: Array, old_logprobs_BT: Array, mask_BT: Array) -> Array:
    """(pi(response) / pi_old(response)) ^ (1 / tokens) at each of its tokens: GSPO's importance ratio.

    Source: Group Sequence Policy Optimization (arXiv 2507.18071) equation 7. A response without tokens has 1.
    """
    arrays = library(logprobs_BT)
    moved_BT = arrays.where(mask_BT != 0, logprobs_BT - old_logprobs_BT, 0)
    mean_B1 = moved_BT.sum(-1)[:, None] / (mask_BT != 0).sum(-1)[:, None].clip(1)
    return arrays.exp(mean_B1) + 0 * moved_BT


def clipped_weight(
    logprobs_BT: Array, ratio_BT: Array, advantages_BT: Array, *, clip_low: float = 0.2, clip_high: float = 0.2
) -> Array:
    """-clip(r, 1 - low, 1 + high) A log pi for each token, the clipped ratio a constant: every token keeps a gradient.

    Source: CISPO, MiniMax-M1 (arXiv 2506.13585) equations 4 and 5; verl `compute_policy_loss_cispo`.
    """
    return -constant(ratio_BT.clip(1 - clip_low, 1 + clip_high)) * advantages_BT * logprobs_BT


def rollout_weight(
    old_logprobs_BT: Array, rollout_logprobs_BT: Array, mask_BT: Array, cap: float, *, of_sequence: bool, masks: bool
) -> Array:
    """What a token's loss is weighed by where the engine sampled from other probabilities than the trainer's: the ratio
    pi_old / pi_rollout of the token, or the product of it over the response, up to `cap`; or 0 past it (`masks`).

    Source: truncated importance sampling, Yao et al. 2025 (fengyao.notion.site/off-policy-rl); verl's
    `rollout_is_level` token or sequence, and its masked form (`rollout_is_mode` mask).
    """
    arrays = library(old_logprobs_BT)
    apart_BT = arrays.where(mask_BT != 0, old_logprobs_BT - rollout_logprobs_BT, 0)
    if of_sequence:
        apart_BT = apart_BT.sum(-1)[:, None] + 0 * apart_BT
    # As verl: past e^20 it is infinite either way.
    weight_BT = constant(arrays.exp(apart_BT.clip(-20, 20)))
    return arrays.where(weight_BT <= cap, weight_BT, 0) if masks else weight_BT.clip(None, cap)


def constant(values: Array) -> Array:
    """The values without a gradient."""
    return values.detach() if hasattr(values, "detach") else values


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
