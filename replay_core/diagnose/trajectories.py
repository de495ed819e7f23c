"""Trajectories of several turns with a row for each: which rows are of one, and what each of them earned."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from replay_core.diagnose.batch import StepBatch, worked_out_once
from replay_core.diagnose.flat import Array

#: What says which trajectory a row is of.
NAMES = ("trajectory_ids", "trajectory_id", "traj_uid", "traj_id", "rollout_ids", "rollout_id", "episode_ids",
         "episode_id")  # fmt: skip
#: What says that a row is the last of its trajectory, whose rows follow each other.
LAST = ("is_last_step", "is_last_turn", "last_step")


@worked_out_once
def trajectory_B(batch: StepBatch) -> Array | None:
    """The number of each row's trajectory; by its id, by which rows are last ones, or by prompts that go on where
    another row ends. None where nothing tells, all rows are of one each, or one has rows of several groups (slime's
    `rollout_id` is a step's).
    """
    group_B = batch.group_B
    if group_B is None or not batch.group_is_named:
        return None
    for name in NAMES:
        found = batch.columns.texts(name)
        named = batch.columns.per_sample(name) if found is None else np.asarray(found)
        if named is None or not len(named):
            continue
        # Ids of several ranks or prompts may be counted from the same beginning.
        each_B = np.unique(np.stack([group_B, np.unique(named, return_inverse=True)[1].reshape(-1)]), axis=1,
                           return_inverse=True)[1].reshape(-1)  # fmt: skip
        if _are_several(each_B, group_B):
            return np.asarray(each_B)
    last_B = batch.columns.per_sample(*LAST)
    if last_B is not None and len(last_B) and last_B[-1]:
        ended_B = np.cumsum(last_B != 0)
        each_B = ended_B - (last_B != 0)
        if _are_several(each_B, group_B):
            return np.asarray(each_B)
    grown_B = _grown_B(batch, group_B)
    return grown_B if grown_B is not None and _are_several(grown_B, group_B) else None


def _grown_B(batch: StepBatch, group_B: Array) -> Array | None:
    """Rows whose prompt begins with all of another row of their group are of one trajectory, as contexts grow; None
    where two rows go on from one, or rows are equal: then it cannot be told whose they are.
    """
    prompt_B, tokens_N, response_N = batch.prompt_B, batch.tokens_N, batch.response_N
    if prompt_B is None or tokens_N is None or response_N is None:
        return None
    if np.unique(np.stack([prompt_B, group_B]), axis=1).shape[1] <= int(group_B.max()) + 1:
        return None
    keys_N, heads_B = beginnings_N(batch), batch.flat.first(response_N)
    whole: dict[tuple[int, int], int] = {}
    for row, span in enumerate(batch.flat.spans):
        if span.stop == span.start or whole.setdefault((int(group_B[row]), int(keys_N[span.stop - 1])), row) != row:
            return None
    sizes = np.unique(batch.flat.lengths_B)
    each_B, goes_on = np.arange(len(group_B)), set[int]()
    for row in np.argsort(batch.flat.lengths_B, kind="stable"):
        start, group = int(batch.flat.starts_B[row]), int(group_B[row])
        # A row that ends within this prompt has one of these lengths; the longest is the turn before.
        ends = sizes[: np.searchsorted(sizes, heads_B[row], side="right")][::-1]
        before = (whole.get((group, int(keys_N[start + size - 1]))) for size in ends)
        parent = next((at for at in before if at is not None), None)
        if parent is None or parent == row:
            continue
        if parent in goes_on:
            return None
        goes_on.add(parent)
        each_B[row] = each_B[parent]
    return np.unique(each_B, return_inverse=True)[1].reshape(-1) if goes_on else None


def _are_several(each_B: Array, group_B: Array) -> bool:
    """Whether rows are fewer trajectories than rows, and more than groups, each in one group."""
    count = int(each_B.max()) + 1
    pairs = np.unique(np.stack([each_B, group_B]), axis=1).shape[1]
    return bool(int(group_B.max()) + 1 < count == pairs < len(each_B))


def earned_T(reward_B: Array, each_B: Array) -> Iterator[tuple[str, Array]]:
    """What each trajectory earned [T]: the one reward of all its rows, else that of its last row, or their sum."""
    count = int(each_B.max()) + 1
    first_T = np.array([reward_B[int(np.argmax(each_B == one))] for one in range(count)])
    if np.allclose(first_T[each_B], reward_B, rtol=0, atol=1e-6 * max(float(np.abs(reward_B).max()), 1e-12)):
        yield "", first_T
        return
    last_T = np.zeros(count)
    last_T[each_B] = reward_B  # of equal places the last is kept
    yield " of their last rows", last_T
    yield " summed over their rows", np.bincount(each_B, weights=reward_B)


def beginnings_N(batch: StepBatch) -> Array:
    """A number for every token [N] that stands for the tokens of its sample up to it: alike where these are."""
    tokens_N = batch.tokens_N
    if tokens_N is None:
        return np.arange(int(batch.flat.lengths_B.sum()))
    powers = np.cumprod(np.full(int(batch.flat.lengths_B.max(initial=0)) + 1, 0x9E3779B97F4A7C15, dtype=np.uint64))
    weighed_N = (tokens_N.astype(np.uint64) + np.uint64(1)) * powers[batch.flat.position_N]
    sums_N = np.cumsum(weighed_N)  # wraps around, as the differences do
    before_B = (sums_N - weighed_N)[np.minimum(batch.flat.starts_B, max(len(sums_N) - 1, 0))]
    found_N: Array = sums_N - np.repeat(before_B, batch.flat.lengths_B)
    return found_N
