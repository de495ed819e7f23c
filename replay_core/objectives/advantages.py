"""Advantages: how much better a response was than what it is measured against."""

from __future__ import annotations

from replay_core.objectives.arrays import Array, group_index, group_sum


def group_normalised(rewards_B: Array, group_ids_B: Array, *, unbiased: bool = True, epsilon: float = 1e-6) -> Array:
    """GRPO's advantage: (r - mean of its group) / (std of its group + epsilon), one number per response.

    Source: DeepSeekMath (arXiv 2402.03300) section 4.1.2, outcome supervision. The paper names neither the
    divisor of the std nor an epsilon: TRL and verl take torch.std's n - 1 (`unbiased`) and add 1e-4 and 1e-6.

    A group of one response, or of equal rewards, has advantage 0. (verl leaves the raw reward to a group of one.)
    """
    index_B, groups = group_index(group_ids_B)
    count_G = group_sum(rewards_B * 0 + 1, index_B, groups)
    centred_B = rewards_B - (group_sum(rewards_B, index_B, groups) / count_G)[index_B]
    divisor_G = (count_G - (1 if unbiased else 0)).clip(1)
    std_G = (group_sum(centred_B * centred_B, index_B, groups) / divisor_G) ** 0.5
    return centred_B / (std_G[index_B] + epsilon)
