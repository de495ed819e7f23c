"""What a step was given that belongs to another step."""

from __future__ import annotations

import numpy as np

from replay_core.diagnose.advantage_variants import variants
from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.case import Case
from replay_core.diagnose.finding import Finding, Where, error, shown
from replay_core.diagnose.flat import Array
from replay_core.diagnose.rule import rule, skip_if

#: How close, and of how many steps, before it is no chance.
CLOSE, STEPS = 1e-3, 2
#: Values of a single step that no other step has by chance.
ONE = 8


@rule("D76", "advantages are those of the step before", link="advantages", scope="case",
      explains=("D04", "D28", "L08"), lasts=True,
      source="a buffer that is read before it is filled anew")  # fmt: skip
def of_the_step_before(case: Case) -> Finding | None:
    """Advantages that are a known variant of the rewards and groups of the step recorded before, sample by sample, and
    none of their own step's, in 2 steps and more and in most of those that tell the two apart: an error. One step will
    do where it is the only one recorded right after another, and its advantages have 8 values and more.
    """
    before: list[Array] = []
    late: list[int] = []
    looked: list[int] = []
    last, many = -1, False
    where = None
    for batch in case.batches():
        advantage_B, reward_B, group_B = batch.advantage_B, batch.reward_B, batch.group_B
        if advantage_B is None or reward_B is None or group_B is None or batch.step is None:
            continue
        if not (np.isfinite(advantage_B).all() and np.isfinite(reward_B).all()) or np.bincount(group_B).max() < 2:
            before = []
            continue
        own = [values_B for _, values_B in variants(reward_B, group_B) if np.isfinite(values_B).all()]
        if before and len(before[0]) == len(advantage_B) and np.unique(np.round(advantage_B, 4)).size > 3:
            if batch.step == last + 1:
                looked.append(batch.step)
            if not _any_is(own, advantage_B) and _any_is(before, advantage_B):
                late.append(batch.step)
                many = np.unique(np.round(advantage_B, 4)).size >= ONE
                where = where or _place(batch)
        before, last = own, batch.step
    skip_if(not (late or looked), "needs rewards, groups and advantages of two steps in a row, of as many samples")
    # Of steps that do not follow each other, only those that have the last recorded one's advantages tell anything.
    at_once = [step for step in late if step in looked]
    if 2 * len(at_once) < len(looked) or not (len(late) >= STEPS or (len(at_once) == 1 == len(looked) and many)):
        return None
    return error(
        f"advantages are those of the step before, in {len(late)} of {len({*late, *looked})} steps that tell",
        where,
        shown("steps whose advantages the rewards of the step before give", len(late), "0"),
        cause="the batch that is trained on holds the last step's advantages: a buffer is read before it is filled, or "
        "they are computed after the update they are meant for",
        steps=late,
    )


def _any_is(known: list[Array], advantage_B: Array) -> bool:
    return any(bool((np.abs(each_B - advantage_B) <= CLOSE * np.maximum(1, np.abs(each_B))).all()) for each_B in known)


def _place(batch: StepBatch) -> Where:
    return batch.laid.where("advantages", sample=0)


#: Tokens of a step that tell, how near they are to the step before's, and of how many of them.
TOKENS, NEAR, MOST = 16, 3e-3, 0.9


@rule("D89", "old log-probabilities are those of the step before", link="logprobs", scope="case",
      explains=("D09", "D12", "D14", "D24", "D28", "D50", "D60", "L08", "L10", "L16"), lasts=True,
      source="a buffer that is written after it is read")  # fmt: skip
def old_of_the_step_before(case: Case) -> Finding | None:
    """Old log-probabilities, row by row and place by place of the response, beside the policy's and the rollout's of
    their own step and of the one recorded before: an error where nine tenths (of 16 tokens and more, of those that
    tell the two apart) are the step before's to .003 and at most half their own's, in 2 steps and most.
    """
    before: list[Array] = []
    late: list[int] = []
    looked, last = 0, -1
    where: Where | None = None
    for batch in case.batches():
        if batch.step is None or batch.response_N is None or batch.columns.of("old_logprobs") is None:
            continue
        old_BT = _by_place(batch, "old_logprobs")
        own = [_by_place(batch, name) for name in ("policy_logprobs", "rollout_logprobs")]
        if before and batch.step == last + 1 and old_BT is not None:
            here, there = (max((_shares(old_BT, each) for each in some if each is not None), default=None)
                           for some in (own, before))  # fmt: skip
            if here is not None and there is not None:
                looked += 1
                if there >= MOST and here <= 0.5:
                    late.append(batch.step)
                    where = where or batch.laid.where("old_logprobs", sample=0)
        before, last = [each for each in own if each is not None], batch.step
    skip_if(not looked, "needs old log-probabilities beside the policy's or the rollout's, of two steps in a row")
    if len(late) < STEPS or 2 * len(late) < looked:
        return None
    return error(
        "old log-probabilities are those of the step before: row by row they are what its samples had, not this "
        "batch's own",
        where,
        shown("steps whose old log-probabilities are the step before's", len(late), "0"),
        shown("steps compared", looked),
        cause="a buffer is read before it is filled anew, or written under the next step's key: ratios are of two "
        "different texts",
        steps=late,
    )


def _by_place(batch: StepBatch, name: str) -> Array | None:
    """A column by row and place of the response [B, T], NaN where it says nothing."""
    column, response_N = batch.columns.of(name), batch.response_N
    if column is None or response_N is None or not len(batch):
        return None
    said_N = column.said_N & response_N & np.isfinite(column.values_N)
    place_N = batch.flat.position_N - np.repeat(batch.flat.first(response_N), batch.flat.lengths_B)
    rows_BT = np.full((len(batch), int(place_N.max(initial=0)) + 1), np.nan)
    rows_BT[batch.flat.sample_N[said_N], place_N[said_N]] = column.values_N[said_N]
    return rows_BT


def _shares(old_BT: Array, other_BT: Array) -> float:
    """Of the places that both have, and that are no probability of 1, the share that is equal; 0 of too few."""
    rows, width = min(len(old_BT), len(other_BT)), min(old_BT.shape[1], other_BT.shape[1])
    if len(old_BT) != len(other_BT):
        return 0.0
    a, b = old_BT[:rows, :width], other_BT[:rows, :width]
    both = np.isfinite(a) & np.isfinite(b) & ((np.abs(a) > NEAR) | (np.abs(b) > NEAR))
    return float((np.abs(a - b)[both] <= NEAR).mean()) if both.sum() >= TOKENS else 0.0
