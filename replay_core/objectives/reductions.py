"""One number from a value per token. Values outside the mask never count, not even when they are NaN."""

from __future__ import annotations

from replay_core.objectives.arrays import Array, library


def masked_sum(values_BT: Array, mask_BT: Array) -> Array:
    """The sum over tokens of the mask."""
    return _kept(values_BT, mask_BT).sum()


def token_mean(values_BT: Array, mask_BT: Array) -> Array:
    """The mean over all tokens of the mask: a long response weighs more. verl `token-mean`, DAPO (2503.14476) eq. 8.

    0 where the mask is empty.
    """
    return masked_sum(values_BT, mask_BT) / (mask_BT != 0).sum().clip(1)


def sequence_mean(values_BT: Array, mask_BT: Array) -> Array:
    """The mean over responses of each one's token mean: every response weighs the same.

    Source: DeepSeekMath (2402.03300) equation 3. A response without tokens counts as 0.
    """
    return (_kept(values_BT, mask_BT).sum(-1) / (mask_BT != 0).sum(-1).clip(1)).mean()


def sequence_sum_mean(values_BT: Array, mask_BT: Array) -> Array:
    """The mean over responses of each one's token *sum*: verl `seq-mean-token-sum`, slime without per-token loss.

    Source: verl core_algos.agg_loss. A response without tokens counts as 0.
    """
    return _kept(values_BT, mask_BT).sum(-1).mean()


def token_sum_over(values_BT: Array, mask_BT: Array, constant: float) -> Array:
    """The sum over tokens of the mask, divided by a constant: Dr. GRPO (arXiv 2503.20783), TRL `dr_grpo` with B x T."""
    return masked_sum(values_BT, mask_BT) / constant


def _kept(values_BT: Array, mask_BT: Array) -> Array:
    # A product would keep NaN * 0 = NaN.
    return library(values_BT).where(mask_BT != 0, values_BT, 0)
