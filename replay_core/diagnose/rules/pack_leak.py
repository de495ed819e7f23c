"""Packs of the trainer whose samples see each other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import numpy as np

from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.case import Case
from replay_core.diagnose.compared import BOTH, compared, figures_of
from replay_core.diagnose.finding import Finding, error, listed, shown
from replay_core.diagnose.flat import Array
from replay_core.diagnose.gap import DISAGREE, Gap, gap, packed_signature
from replay_core.diagnose.rule import Skip, rule, skip_if
from replay_core.diagnose.rules.staleness import versions

_LEAKS_INTO = ("L10", "D09", "D12", "D13", "D14", "D15", "D24")
_SOURCE = "transformers masking_utils: packed position ids only count without mask and cache; functionary#132"


@rule("D16", "the trainer's packs leak", link="logprobs", scope="batch", needs=BOTH, explains=_LEAKS_INTO, lasts=True,
      source=_SOURCE)  # fmt: skip
def leaking(batch: StepBatch) -> Finding | None:
    """mean |d| per sample: the first sample of every pack agrees (below a fifth of the others, at least 5 times
    apart), every later one does not. Packs are as recorded, else every k-th sample, else what filling rows up to
    one length gives. An error. Only the first sample of a pack sees no other's tokens: no other cause spares just
    those. But weights of another age may, where packs are inferred: silent where the later samples name older weights,
    or, after step 0, where a run that is off-policy on purpose records no versions.
    """
    between = gap(batch)
    later = batch.step not in (None, 0) and between.leak is not None and "inferred" in between.leak[1]
    if between.leak is not None and not later and not _of_other_ages(batch, *between.leak):
        return _leak(batch, between, *between.leak)
    return None


def _of_other_ages(batch: StepBatch, clean_B: Array, how: str) -> bool:
    """Whether what spares every k-th sample may be its age: engines that take samples in turns have weights of several
    ages where a run is off-policy on purpose, or says so of its samples. Recorded packs are no guess.
    """
    if "inferred" not in how:
        return False
    known = versions(batch)
    if known is None or np.isnan(known[0]).all():
        return batch.step != 0 and batch.laid.algorithm.is_off_policy
    return bool(np.nanmax(known[0][~clean_B]) < np.nanmin(known[0][clean_B]))


#: Steps in which first samples of a handful of tokens each are spared by no luck, and their share of the steps.
STEPS, MOST = 3, 0.8
#: Samples of a first step that tell whether one is spared there.
SEVERAL = 4


@rule("D16", "the trainer's packs leak", link="logprobs", scope="case", explains=_LEAKS_INTO, lasts=True,
      source=_SOURCE)  # fmt: skip
def leaking_in_every_step(case: Case) -> Finding | None:
    """The same of later steps; and where first samples are too few, or hold too few tokens, to be sure of in one step:
    in four of five steps, 3 and more, packs of one way (all samples in one, every k-th) spare their first samples and
    no others. An error. Not of inferred packs where the run's first step (0 or 1) has nothing of it: before any update
    weights have one age, and samples that others take in turns are older later; a leak is there from the first.
    """
    found: dict[str, list[tuple[StepBatch, Gap, Array]]] = defaultdict(list)
    sure: list[tuple[StepBatch, Gap, Array, str]] = []
    looked, begins_clean = 0, False
    for batch in case.batches():
        try:
            between = compared(batch)
        except Skip:
            continue
        looked += 1
        if looked == 1 and batch.step in (0, 1):
            heard_B = between.by_sample_B[np.isfinite(between.by_sample_B)]
            begins_clean = heard_B.size >= SEVERAL and float(heard_B.max()) < DISAGREE
        if between.is_shifted or between.is_tempered:
            continue
        told = packed_signature(batch, between.by_sample_B, few=True)
        if told is not None and not _of_other_ages(batch, *told):
            found[told[1]].append((batch, between, told[0]))
            if batch.step not in (None, 0) and between.leak is not None and "inferred" in between.leak[1]:
                sure.append((batch, between, *between.leak))
    if begins_clean:
        return None
    if sure:
        return _leak(*sure[0], steps=[batch.step for batch, *_ in sure])
    skip_if(looked < STEPS, f"needs log-probabilities of engine and trainer in {STEPS} steps")
    for how, every in found.items():
        if len(every) >= max(STEPS, MOST * looked):
            return _leak(*every[0], how, steps=[one.step for one, _, _ in every])
    return None


def _leak(batch: StepBatch, between: Gap, clean_B: Array, how: str, steps: Iterable[int | None] = ()) -> Finding:
    values_B = between.by_sample_B
    place = batch.laid.where(between.trainer.name, sample=int(np.flatnonzero(~clean_B & ~np.isnan(values_B))[0]))
    return error(
        "the first sample of every pack agrees with the rollout, the ones after it do not: attention crosses samples",
        place,
        shown("mean |d| of the first samples", float(np.nanmean(values_B[clean_B])), None, between.trainer.source),
        shown("mean |d| of the later samples", float(np.nanmean(values_B[~clean_B])), "the same"),
        shown("samples that agree", listed(np.flatnonzero(clean_B))),
        shown("packs", how),
        *figures_of(between),
        cause="samples are packed without a block-diagonal mask (use_cache was on, a mask of ones was passed, or no "
        "position ids), or position ids do not begin again with each of them",
        next_step=batch.laid.replay_command(place, "--packing"),
        steps=steps,
    )
