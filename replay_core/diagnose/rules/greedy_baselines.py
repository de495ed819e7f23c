"""The rewards of greedy responses that ReMax measures against: one for each prompt, its own."""

from __future__ import annotations

import numpy as np

from replay_core.diagnose.advantage_variants import greedy_rewards_B
from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.finding import Finding, error, share, shown
from replay_core.diagnose.flat import Array
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


#: Samples, the spread of their baselines, and how near an advantage is one that is made so.
SAMPLES, SPREAD, CLOSE = 8, 1e-2, 1e-3


@rule("D165", "advantages are not rewards less the greedy response's", link="advantages", scope="batch", lasts=True,
      needs=("advantages", "mask", "token_rewards|token_scores|rewards"), explains=("D04", "D05", "D28", "L08"),
      source="ReMax (arXiv 2310.10505): the reward less that of the greedy response; verl's "
      "compute_remax_outcome_advantage")  # fmt: skip
def not_less_the_baseline(batch: StepBatch) -> Finding | None:
    """Recorded rewards of greedy responses, in a run that states ReMax or no estimator: the advantage of each
    response's first token that counts as its reward less its baseline (to 1e-3; 8 samples, whose baselines differ). An
    error where that makes them not, and one mistake makes all of them: the baseline is added, the sign is turned, the
    baseline is left out, or one baseline stands for all.
    """
    baseline_B, algorithm = greedy_rewards_B(batch), batch.laid.algorithm
    skip_if(baseline_B is None, "needs reward_baselines")
    skip_if(algorithm.estimator not in ("", "remax"), "the run states a baseline of another kind")
    column, trained_N = given(batch.columns.of("advantages")), given(batch.trained_N)
    first_B = batch.flat.first(trained_N)
    heard_B = first_B >= 0
    values_B = given(baseline_B)
    if len(values_B) != len(heard_B) or heard_B.sum() < SAMPLES or np.ptp(values_B[heard_B]) < SPREAD:
        raise Skip(f"needs advantages of {SAMPLES} samples, and baselines that differ")
    at_B = (batch.flat.starts_B + first_B)[heard_B]
    advantage_B, values_B = column.values_N[at_B], values_B[heard_B]
    if not np.isfinite(advantage_B).all() or not np.isfinite(values_B).all():
        raise Skip("some advantages or baselines are not finite (D21)")
    made = _whole_rewards(batch, trained_N, heard_B)
    skip_if(not made, "needs one reward for each sample")

    def makes(each_B: Array) -> bool:
        return bool(np.abs(each_B - advantage_B).max() <= CLOSE * max(1.0, float(np.abs(advantage_B).max())))

    if any(makes(reward_B - values_B) for reward_B in made):
        return None
    for reward_B in made:
        ways = (
            ("the baseline is added to the reward, not subtracted", reward_B + values_B),
            ("they have the wrong sign, the baseline less the reward", values_B - reward_B),
            ("the baseline is left out, they are the rewards", reward_B),
            ("one baseline, the mean, stands for all prompts", reward_B - values_B.mean()),
        )
        for what, each_B in ways:
            if makes(each_B):
                return error(
                    f"advantages are not rewards less those of the greedy responses: {what}",
                    batch.laid.where("advantages", sample=heard_B),
                    shown("advantage of the first sample", float(advantage_B[0]), f"{reward_B[0] - values_B[0]:.4g}"),
                    shown("its reward", float(reward_B[0])),
                    shown("its greedy response's", float(values_B[0])),
                    cause="the greedy response's reward is what a prompt gives anyway: without it, or with its sign "
                    "turned, easy prompts are rewarded for being easy",
                )  # fmt: skip
    return None


def _whole_rewards(batch: StepBatch, trained_N: Array, heard_B: Array) -> list[Array]:
    """What each sample's reward may be: the sum of its tokens' rewards, of their scores, the number it has."""
    found = []
    for name in ("token_rewards", "token_scores"):
        column = batch.columns.of(name)
        if column is not None:
            found.append(
                batch.flat.sum(np.where(column.said_N & trained_N, np.nan_to_num(column.values_N), 0.0))[heard_B]
            )
    if batch.reward_B is not None and len(batch.reward_B) == len(heard_B):
        found.append(batch.reward_B[heard_B])
    return [each_B for each_B in found if np.isfinite(each_B).all()]
