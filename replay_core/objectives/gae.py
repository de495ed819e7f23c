"""Generalised advantage estimation: what a critic's values make of a response's rewards."""

from __future__ import annotations

from replay_core.objectives.arrays import Array, library


def gae(
    rewards_BT: Array, values_BT: Array, mask_BT: Array | None = None, *, gamma: float = 1.0, lam: float = 0.95
) -> tuple[Array, Array]:
    """(advantages, returns), both [B, T]; index t is about the action whose value is `values_BT[:, t]`.

    delta_t = r_t + gamma V_{t+1} - V_t;  A_t = delta_t + gamma lam A_{t+1};  returns = A + V. The value after the
    last action is 0: the response is over.

    Source: arXiv 1506.02438 equation 16. Without a mask every column is an action (ROLL masks the rewards and
    nothing else, so values in the padding reach the last token). With one, columns outside it are passed over:
    V_{t+1} and A_{t+1} are those of the next action (verl's `compute_gae_advantage_return`), and are 0 there.
    """
    arrays = library(values_BT)
    width = values_BT.shape[-1]
    next_value_B = next_advantage_B = arrays.zeros_like(values_BT[:, 0])
    columns = []
    for t in range(width - 1, -1, -1):
        value_B = values_BT[:, t]
        delta_B = rewards_BT[:, t] + gamma * next_value_B - value_B
        advantage_B = delta_B + gamma * lam * next_advantage_B
        if mask_BT is None:
            next_value_B, next_advantage_B = value_B, advantage_B
            columns.append(advantage_B)
            continue
        counts_B = mask_BT[:, t] != 0
        next_value_B = arrays.where(counts_B, value_B, next_value_B)
        next_advantage_B = arrays.where(counts_B, advantage_B, next_advantage_B)
        columns.append(arrays.where(counts_B, advantage_B, 0))
    advantages_BT = arrays.stack(columns[::-1], -1)
    returns_BT = advantages_BT + values_BT
    if mask_BT is not None:
        returns_BT = arrays.where(mask_BT != 0, returns_BT, 0)
    return advantages_BT, returns_BT
