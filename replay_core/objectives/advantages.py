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


def group_centred(rewards_B: Array, group_ids_B: Array) -> Array:
    """Dr. GRPO's advantage: r - mean of its group, undivided. Source: arXiv 2503.20783, section 3.2."""
    index_B, groups = group_index(group_ids_B)
    count_G = group_sum(rewards_B * 0 + 1, index_B, groups)
    return rewards_B - (group_sum(rewards_B, index_B, groups) / count_G)[index_B]


def leave_one_out(rewards_B: Array, group_ids_B: Array) -> Array:
    """RLOO's advantage: r - mean of the *other* responses of its group. A group of one keeps its raw reward.

    Source: arXiv 2402.14740, equation 5; verl `compute_rloo_outcome_advantage`, which leaves a group of one alone too.
    """
    index_B, groups = group_index(group_ids_B)
    count_B = group_sum(rewards_B * 0 + 1, index_B, groups)[index_B]
    others_B = (group_sum(rewards_B, index_B, groups)[index_B] - rewards_B) / (count_B - 1).clip(1)
    return rewards_B - others_B


def leave_one_out_normalised(
    rewards_B: Array, group_ids_B: Array, *, unbiased: bool = True, epsilon: float = 1e-6
) -> Array:
    """(r - mean of the *other* responses of its group) / (their std + epsilon). 0 where there are no two others.

    It has no bound: where all others are equal, the odd one is divided by epsilon. Source: NeMo-RL
    `calculate_baseline_and_std_per_prompt` with `leave_one_out_baseline`; NeMo-RL#4158.
    """
    index_B, groups = group_index(group_ids_B)
    count_B = group_sum(rewards_B * 0 + 1, index_B, groups)[index_B]
    centred_B = group_centred(rewards_B, group_ids_B)
    squares_B = group_sum(centred_B * centred_B, index_B, groups)[index_B]
    others_B = (count_B - 1).clip(1)
    # The others of centred rewards sum to minus one's own.
    left_B = (squares_B - centred_B * centred_B * (1 + 1 / others_B)).clip(0)
    std_B = (left_B / (others_B - (1 if unbiased else 0)).clip(1)) ** 0.5
    return (centred_B + centred_B / others_B) / (std_B + epsilon) * (count_B > 2)


def normalised(rewards_B: Array, *, unbiased: bool = True, epsilon: float = 1e-8) -> Array:
    """(r - mean) / (std + epsilon) over the whole batch. REINFORCE++ (arXiv 2501.03262, section 3.2), per response."""
    centred_B = rewards_B - rewards_B.mean()
    divisor = max(len(rewards_B) - (1 if unbiased else 0), 1)
    return centred_B / (((centred_B * centred_B).sum() / divisor) ** 0.5 + epsilon)


def group_centred_batch_scaled(
    rewards_B: Array, group_ids_B: Array, *, unbiased: bool = True, epsilon: float = 1e-8
) -> Array:
    """r - mean of its group, then normalised over the whole batch: REINFORCE++-baseline.

    Source: arXiv 2501.03262, section 3.3.
    """
    return normalised(group_centred(rewards_B, group_ids_B), unbiased=unbiased, epsilon=epsilon)


def group_centred_over_batch_std(
    rewards_B: Array, group_ids_B: Array, *, unbiased: bool = True, epsilon: float = 1e-4
) -> Array:
    """(r - mean of its group) / (std of *all* rewards + epsilon). Source: TRL `scale_rewards="batch"`; arXiv
    2508.08221.
    """
    centred_B = rewards_B - rewards_B.mean()
    divisor = max(len(rewards_B) - (1 if unbiased else 0), 1)
    std = ((centred_B * centred_B).sum() / divisor) ** 0.5
    return group_centred(rewards_B, group_ids_B) / (std + epsilon)


def whitened(scores_B: Array, tokens_B: Array, *, unbiased: bool = True, epsilon: float = 1e-8) -> Array:
    """(s - mean) / sqrt(var + epsilon) where mean and var are over *tokens*: a long response counts as often as it has
    tokens. `tokens_B` is each response's number of tokens that count.

    Source: verl `masked_whiten` (n - 1) and OpenRLHF's normalisation of advantages (n), which REINFORCE++ and
    REINFORCE++-baseline (arXiv 2501.03262) end with there.
    """
    total = tokens_B.sum()
    centred_B = scores_B - (scores_B * tokens_B).sum() / total
    variance = (centred_B * centred_B * tokens_B).sum() / (total - unbiased).clip(1)
    return centred_B / (variance + epsilon) ** 0.5


def length_weighted_centred(rewards_B: Array, group_ids_B: Array, tokens_B: Array) -> Array:
    """OPO's advantage: r - mean of its group weighted by response length.

    Source: arXiv 2505.23585, equation 8; verl `compute_opo_outcome_advantage`.
    """
    index_B, groups = group_index(group_ids_B)
    weight_G = group_sum(tokens_B, index_B, groups).clip(1)
    return rewards_B - (group_sum(rewards_B * tokens_B, index_B, groups) / weight_G)[index_B]


def group_centred_upweighted(rewards_B: Array, group_ids_B: Array) -> Array:
    """GPG's advantage: (r - mean of its group) x responses / responses with a reward that is not 0.

    Source: arXiv 2504.02546, section 3; verl `compute_gpg_outcome_advantage`.
    """
    rewarded = ((rewards_B != 0) * 1).sum().clip(1)
    return group_centred(rewards_B, group_ids_B) * (len(rewards_B) / rewarded)


def best_margin(rewards_B: Array, group_ids_B: Array) -> Array:
    """Pass@k's advantage: the best response of a group has its lead over the second best, every other 0.

    Source: arXiv 2503.19595; verl `compute_grpo_passk_outcome_advantage`, undivided by the std. numpy only.
    """
    index_B, groups = group_index(group_ids_B)
    margin_B = rewards_B * 0.0
    for group in range(groups):
        members = (index_B == group).nonzero()[0]
        order = members[(-rewards_B[members]).argsort(kind="stable")]
        if len(order) > 1:
            margin_B[order[0]] = rewards_B[order[0]] - rewards_B[order[1]]
    return margin_B
