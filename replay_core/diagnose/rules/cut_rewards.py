"""Rewards that are cut off before advantages are made of them, beside what the judge gave."""

from __future__ import annotations

import numpy as np

from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.case import Case
from replay_core.diagnose.finding import Finding, finding, share, shown
from replay_core.diagnose.flat import Array, groups_of
from replay_core.diagnose.rule import rule, skip_if

#: What the judge gave, in recorders' words.
_RAW = ("raw_rewards", "raw_reward", "reward_raw", "rewards_raw", "raw_scores", "raw_score", "unclipped_rewards")
_STATED = ("reward_clip", "reward_clip_range", "clip_reward", "clip_rewards", "reward_cap", "max_reward",
           "reward_clip_max", "reward_limit")  # fmt: skip
#: Samples that tell; the share at a bound, and of groups that lose their spread by it, before it is no outlier's.
FEWEST, AT_BOUND, LOST = 8, 0.1, 0.1


@rule("D108", "rewards are cut off", link="rewards", scope="case", lasts=True, explains=("D01", "D03", "D74", "L08"),
      source="OpenRLHF reward_clip_range: bounds far out, for outliers of a reward model")  # fmt: skip
def cut_off(case: Case) -> Finding | None:
    """Rewards beside recorded raw ones, which they equal but for one bound above (or below) that is the same in all
    steps and cuts off a tenth of all samples and more, some lie between, or what is cut has several raw ones (a bound
    of 1 aside, which makes an answer right or wrong): a warning where a tenth of the groups lose
    their spread of rewards by it, unless the run states a clip of rewards, else worth knowing.
    """
    each: list[tuple[StepBatch, Array, Array]] = []
    for batch in case.batches():
        raw_B = batch.columns.per_sample(*_RAW)
        # A sum of functions is not what was cut off.
        if raw_B is None or batch.reward_B is None or batch.columns.are_sums_alone:
            continue
        if np.isfinite(raw_B).all() and np.isfinite(batch.reward_B).all():
            each.append((batch, raw_B, batch.reward_B))
    raw, reward = (np.concatenate([one[at] for one in each]) if each else np.zeros(0) for at in (1, 2))
    skip_if(len(raw) < FEWEST, "needs rewards, and raw ones beside them")
    low, high = float(reward.min()), float(reward.max())
    # One outlier of the raw ones is no measure of the others.
    close = 1e-5 * np.maximum(1.0, np.abs(reward))
    above, below = raw > high + close, raw < low - close
    cut = above | below
    if not cut.mean() >= AT_BOUND or (np.abs(np.clip(raw, low, high) - reward) > close).any():
        return None
    # Rewards that are one number, or nowhere the raw ones, are something else, and not these cut off.
    if not ((reward > low + close) & (reward < high - close)).any() and not _is_bound(raw, reward, above, below):
        return None
    lost = total = 0
    for batch, raw_B, reward_B in each:
        for inside in groups_of(batch.group_B) if batch.group_B is not None else ():
            least = 1e-5 * max(1.0, float(np.abs(reward_B[inside]).max()))
            spread = float(np.ptp(raw_B[inside])) > least
            total += spread
            lost += spread and float(np.ptp(reward_B[inside])) <= least
    stated = case.algorithm.value(*_STATED)
    sides = [f"at most {high:.4g}"] * bool(above.any()) + [f"at least {low:.4g}"] * bool(below.any())
    bad = stated is None and total > 0 and lost >= LOST * total
    batch = each[0][0]
    return finding(
        "warning" if bad else "info",
        f"rewards are cut off: they are {' and '.join(sides)}, and the judge gave {float(raw.min()):.4g} to "
        f"{float(raw.max()):.4g}" + (f"; {lost} of {total} groups lose their spread by it" if lost else ""),
        batch.laid.where("reward", sample=int(np.argmax(np.abs(each[0][1] - each[0][2])))),
        shown("samples at a bound that had more", share(int(cut.sum()), len(cut))),
        shown("groups whose raw rewards differ and whose rewards do not", share(lost, total), "0"),
        *([] if stated is None else [shown("clip of rewards that is stated", str(stated))]),
        cause="a clamp (clip, min, max) behind the judge whose bound lies within what is given for common answers: "
        "right and half-right ones earn the same, and nothing tells them apart"
        if bad
        else "a bound that the run states, or that few groups notice",
        steps=[one[0].step for one in each],
    )  # fmt: skip


def _is_bound(raw: Array, reward: Array, above: Array, below: Array) -> bool:
    """Of rewards of two values, whether one is a bound that several raw ones are cut off at, and the other is given."""
    cut = above | below
    at = np.unique(np.round(reward[cut], 6))
    given_ = (np.abs(raw - reward) <= 1e-6)[~cut]
    several = np.unique(np.round(raw[cut], 4)).size >= 2
    return at.size == 1 and several and abs(float(at[0])) != 1 and given_.sum() >= FEWEST // 2
