"""Rewards within their groups: without a spread there, no advantage and no gradient but the KL's."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from replay_core.diagnose.batch import Batch
from replay_core.diagnose.finding import Finding
from replay_core.diagnose.flat import Array
from replay_core.diagnose.rule import Skip, rule
from replay_core.diagnose.stating import finding, look_at, share, shown

#: A spread this small beside the rewards themselves is rounding: rewards are stored as float32.
EQUAL = 1e-6
#: Share of groups without a spread from which the batch is mostly wasted (miles advisory).
MOSTLY = 0.5


def spreads(batch: Batch) -> tuple[Array, Array]:
    """Each group's reward spread (largest - smallest) and size, for groups of finite rewards."""
    rewards_B, group_B = batch.reward_B, batch.group_B
    assert rewards_B is not None
    assert group_B is not None
    groups = int(group_B.max(initial=-1)) + 1
    low_G, high_G = np.full(groups, np.inf), np.full(groups, -np.inf)
    finite_B = np.isfinite(rewards_B)
    np.minimum.at(low_G, group_B[finite_B], rewards_B[finite_B])
    np.maximum.at(high_G, group_B[finite_B], rewards_B[finite_B])
    sizes_G = np.bincount(group_B[finite_B], minlength=groups)
    return np.where(sizes_G > 0, high_G - low_G, np.nan), sizes_G


def _equal(batch: Batch) -> tuple[Array, Array]:
    """Which groups of two and more have equal rewards, and which groups those are at all."""
    spread_G, sizes_G = spreads(batch)
    rewards_B = batch.reward_B
    assert rewards_B is not None
    finite_B = rewards_B[np.isfinite(rewards_B)]
    scale = max(float(np.abs(finite_B).max(initial=0.0)), EQUAL)
    compared_G = sizes_G >= 2
    return compared_G & (spread_G <= EQUAL * scale), compared_G


def _has_other_baseline(batch: Batch, equal_G: Array) -> bool:
    """Whether responses of equal rewards have advantages all the same: then a critic or the batch is the baseline."""
    column, group_B = batch.column("advantages"), batch.group_B
    if group_B is None:
        return False
    if column is None:
        return batch.ref("values") is not None
    inside_N = column.said_N & np.repeat(equal_G[group_B], batch.lengths_B)
    values = np.abs(column.values_N[inside_N & np.isfinite(column.values_N)])
    return bool(values.size and values.max() > 1e-3)


@rule("D01", "no group has a spread of rewards", link="rewards", scope="batch",
      needs=("rewards|advantage", "group|advantage"),
      source="GRPO notes (text 002), trl#3857; half of the groups: miles advisory")  # fmt: skip
def zero_spread(batch: Batch) -> Iterator[Finding]:
    """Share of groups (of two and more) whose rewards are all equal. 1 is an error, 0.5 and more a warning.

    Equal means a spread within 1e-6 of the largest reward: a small spread is none the worse, normalising makes O(1)
    advantages of it. Silent where equal rewards still have advantages (a critic, or the batch, is the baseline).
    When every group's rewards are equal but the groups differ from each other, D03 says so instead. Where no rewards
    are recorded, advantages that are all 0 are an error.
    """
    if not (batch.has("rewards") and batch.has("group")):
        yield from _all_zero(batch)
        return
    equal_G, compared_G = _equal(batch)
    total, count = int(compared_G.sum()), int(equal_G.sum())
    if not total or count / total < MOSTLY or _has_other_baseline(batch, equal_G):
        return
    rewards_B = batch.reward_B
    assert rewards_B is not None
    everywhere = count == total
    between = float(np.nanmax(rewards_B) - np.nanmin(rewards_B))
    if everywhere and between > EQUAL * max(1.0, float(np.nanmax(np.abs(rewards_B)))) and total > 1:
        return
    claim = (
        f"every response got the same reward within its group ({share(count, total)} groups): all advantages are 0"
        if everywhere
        else f"{share(count, total)} groups have equal rewards and teach nothing"
    )
    place = batch.where("reward" if batch.ref("reward") else "token_scores", sample=0)
    yield finding(
        "D01",
        "error" if everywhere else "warning",
        claim,
        evidence=[
            shown("share of groups without a spread", count / total, "< 0.5", f"rewards and groups of {batch.name}"),
            shown("smallest reward", float(np.nanmin(rewards_B))),
            shown("largest reward", float(np.nanmax(rewards_B))),
        ],
        cause="the judge or reward function returns a constant, or the prompts are all solved or all failed"
        if everywhere
        else "prompts are too easy or too hard for this policy; they cost rollouts and give no gradient",
        next_step=look_at(place) + "   # then score two different responses by hand",
        where=place,
    )


def _all_zero(batch: Batch) -> Iterator[Finding]:
    column, trained_N = batch.column("advantages"), batch.trained_N
    assert column is not None
    heard_N = column.said_N if trained_N is None else column.said_N & trained_N
    if not heard_N.any() or np.any(column.values_N[heard_N] != 0) or len(batch) < 2:
        raise Skip("needs rewards and groups; the advantages alone are not all 0")
    place = batch.where("advantages", sample=0)
    yield finding(
        "D01",
        "error",
        f"every advantage is 0 ({len(batch)} samples): the policy loss has no gradient",
        evidence=[
            shown("largest |advantage|", 0.0, "> 0", column.source),
            shown("rewards in the dump", batch.has("rewards")),
        ],
        cause="no group has a spread of rewards, or advantages are cleared before the loss; the dump holds no "
        "rewards and groups to tell which",
        next_step="rldbg record -- YOUR COMMAND, then rldbg diagnose rldbg-dump",
        where=place,
    )


@rule("D03", "rewards differ between groups, never within one", link="rewards", scope="batch",
      needs=("rewards", "group"), source="trl#3857")  # fmt: skip
def spread_only_between_groups(batch: Batch) -> Iterator[Finding]:
    """Rewards vary over the batch and in no group of two and more: `reward_std` looks healthy, every advantage is 0.

    Also where single reward functions vary within groups and their sum does not.
    """
    equal_G, compared_G = _equal(batch)
    rewards_B = batch.reward_B
    assert rewards_B is not None
    if not compared_G.any() or not (equal_G == compared_G).all() or compared_G.sum() < 2:
        return
    spread = float(np.nanmax(rewards_B) - np.nanmin(rewards_B))
    scale = max(float(np.nanmax(np.abs(rewards_B))), EQUAL)
    if spread <= EQUAL * scale or _has_other_baseline(batch, equal_G):
        return
    place = batch.where("reward" if batch.ref("reward") else "token_scores", sample=0)
    yield finding(
        "D03",
        "error",
        "rewards differ from prompt to prompt and never between the responses to one prompt: all advantages are 0",
        evidence=[
            shown("reward std over the batch", float(np.nanstd(rewards_B)), None, f"rewards of {batch.name}"),
            shown("groups with a spread", 0, "> 0"),
            shown("groups", int(compared_G.sum())),
        ],
        cause="the reward depends on the prompt alone (or its parts cancel in the sum); a std over the batch hides it",
        next_step=look_at(place) + "   # and watch frac_reward_zero_std, not reward_std",
        where=place,
    )
