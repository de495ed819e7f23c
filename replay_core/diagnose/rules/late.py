"""What a step was given that belongs to another step."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.case import Case
from replay_core.diagnose.finding import Finding, Where
from replay_core.diagnose.flat import Array
from replay_core.diagnose.rule import Skip, rule
from replay_core.diagnose.rules.advantages import variants
from replay_core.diagnose.stating import finding, shown

#: How close, and of how many steps, before it is no chance.
CLOSE, STEPS = 1e-3, 2
#: Values of a single step that no other step has by chance.
ONE = 8


@rule("D76", "advantages are those of the step before", link="advantages", scope="case",
      explains=("D04", "D28", "L08"), lasts=True,
      source="a buffer that is read before it is filled anew")  # fmt: skip
def of_the_step_before(case: Case) -> Iterator[Finding]:
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
            before = []
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
    if not (late or looked):
        raise Skip("needs rewards, groups and advantages of two steps in a row, of as many samples")
    # Of steps that do not follow each other, only those that have the last recorded one's advantages tell anything.
    at_once = [step for step in late if step in looked]
    if 2 * len(at_once) < len(looked) or not (len(late) >= STEPS or (len(at_once) == 1 == len(looked) and many)):
        return
    yield finding(
        "error",
        f"advantages are those of the step before, in {len(late)} of {len({*late, *looked})} steps that tell",
        where,
        evidence=[shown("steps whose advantages the rewards of the step before give", len(late), "0")],
        cause="the batch that is trained on holds the last step's advantages: a buffer is read before it is filled, or "
        "they are computed after the update they are meant for",
        steps=late,
    )


def _any_is(known: list[Array], advantage_B: Array) -> bool:
    return any(bool((np.abs(each_B - advantage_B) <= CLOSE * np.maximum(1, np.abs(each_B))).all()) for each_B in known)


def _place(batch: StepBatch) -> Where:
    return batch.laid.where("advantages", sample=0)
