"""The rewards of greedy responses that ReMax measures against: one for each prompt, its own."""

from __future__ import annotations

import numpy as np

from replay_core.diagnose.advantage_variants import greedy_rewards_B
from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.finding import Finding, error, share, shown
from replay_core.diagnose.rule import Skip, given, rule, skip_if

#: Groups with several baselines, before it is no single odd row.
FEWEST = 2


@rule("D127", "greedy baselines are other prompts'", link="advantages", scope="batch", lasts=True,
      needs=("group|tokens",), explains=("D04", "D28", "D130"),
      source="ReMax (arXiv 2310.10505): b(x) is the reward of the greedy response to the same prompt")  # fmt: skip
def of_other_prompts(batch: StepBatch) -> Finding | None:
    """Recorded rewards of greedy responses, sample by sample: an error where samples of one prompt have several, in 2
    groups and more and in half of those of several samples, with what order they would be right in.
    """
    baseline_B = greedy_rewards_B(batch)
    group_B = batch.group_B if batch.group_is_named else batch.prompt_B
    skip_if(baseline_B is None or group_B is None, "needs reward_baselines, and groups or prompts")
    skip_if(batch.laid.algorithm.estimator not in ("", "remax"), "the run states a baseline of another kind")
    values_B, groups_B = given(baseline_B), given(group_B)
    if len(values_B) != len(groups_B) or not np.isfinite(values_B).all():
        raise Skip("greedy rewards are not finite, or not one for each sample")
    sizes = np.bincount(groups_B)
    several = [group for group in np.unique(groups_B) if sizes[group] > 1]
    low_G, high_G = np.full(sizes.size, np.inf), np.full(sizes.size, -np.inf)
    np.minimum.at(low_G, groups_B, values_B)
    np.maximum.at(high_G, groups_B, values_B)
    apart_B = (high_G - low_G)[groups_B] > 1e-6
    apart = [group for group in several if high_G[group] - low_G[group] > 1e-6]
    if len(apart) < FEWEST or 2 * len(apart) < len(several):
        return None
    size, count = int(sizes[several[0]]), len(several)
    # Rows lie prompt by prompt, and baselines were tiled (b1 b2 .. b1 b2 ..), or the other way round.
    even = count > 1 and len(values_B) == size * count and bool((sizes[several] == size).all())
    tiled = even and bool((np.ptp(values_B.reshape(size, count), axis=0) <= 1e-6).all())
    return error(
        f"samples of one prompt are measured against different greedy rewards, in {share(len(apart), len(several))} "
        "groups: reward_baselines are in another order than the rows"
        + (", tiled (b1 b2 ... b1 b2 ...) where rows are repeated prompt by prompt" if tiled else ""),
        batch.laid.where("reward_baselines", sample=apart_B),
        shown("different greedy rewards in the first such group",
              int(np.unique(np.round(values_B[groups_B == apart[0]], 6)).size), "1"),
        shown("groups of several samples", len(several)),
        cause="repeat stands for repeat_interleave (or the other way round), or greedy responses come back in another "
        "order: a row is held against another prompt's baseline, and advantages reward easy prompts",
    )  # fmt: skip
