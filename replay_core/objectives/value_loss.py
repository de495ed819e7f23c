"""The critic's loss, per token, and how three frameworks make one number of it.

They agree on max(clipped, unclipped) and on one half; they part in the mean. ROLL gives every response the same
weight, AReaL and OpenRLHF every token: the numbers are equal only when all responses have equal length.
"""

from __future__ import annotations

from collections.abc import Callable

from replay_core.objectives import reductions
from replay_core.objectives.arrays import Array, library


def squared_error(values_BT: Array, returns_BT: Array, old_values_BT: Array, clip: float | None = None) -> Array:
    """(V - R)^2, or with a clip range max((V - R)^2, (V_old + clip(V - V_old, -clip, clip) - R)^2), each token.

    Source: the value clipping of PPO's baselines implementation, as in ROLL's CriticWorker, AReaL's
    ppo_critic_loss_fn and OpenRLHF's ValueLoss. In the values' own unit, squared; without the one half.
    """
    plain_BT = (values_BT - returns_BT) ** 2
    if clip is None:
        return plain_BT
    near_BT = old_values_BT + (values_BT - old_values_BT).clip(-clip, clip)
    return library(values_BT).maximum(plain_BT, (near_BT - returns_BT) ** 2)


def is_clipped(values_BT: Array, returns_BT: Array, old_values_BT: Array, clip: float) -> Array:
    """Whether clipping decides a token's loss, so that its gradient is zero."""
    near_BT = old_values_BT + (values_BT - old_values_BT).clip(-clip, clip)
    return (near_BT - returns_BT) ** 2 > (values_BT - returns_BT) ** 2


def roll(error_BT: Array, mask_BT: Array) -> Array:
    """ROLL: half the mean over responses of each one's sum / (tokens + 1e-8). A response without tokens counts as 0."""
    kept_BT = library(error_BT).where(mask_BT != 0, error_BT, 0)
    return 0.5 * (kept_BT.sum(-1) / ((mask_BT != 0).sum(-1) + 1e-8)).mean()


def areal(error_BT: Array, mask_BT: Array) -> Array:
    """AReaL: the mean over all tokens of half the error."""
    return reductions.token_mean(0.5 * error_BT, mask_BT)


def openrlhf(error_BT: Array, mask_BT: Array) -> Array:
    """OpenRLHF's default: half the mean over all tokens. (Its own is NaN where no token counts; here 0.)"""
    return 0.5 * reductions.token_mean(error_BT, mask_BT)


#: Framework -> its reduction of `squared_error`.
REDUCTIONS: dict[str, Callable[[Array, Array], Array]] = {"roll": roll, "areal": areal, "openrlhf": openrlhf}
