"""Packs of the trainer whose samples see each other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.case import Case
from replay_core.diagnose.compared import BOTH, compared, figures_of
from replay_core.diagnose.finding import Finding
from replay_core.diagnose.flat import Array
from replay_core.diagnose.gap import Gap, gap, packed_signature
from replay_core.diagnose.rule import Skip, rule
from replay_core.diagnose.stating import finding, listed, shown

_LEAKS_INTO = ("L10", "D09", "D12", "D13", "D14", "D15", "D24")
_SOURCE = "transformers masking_utils: packed position ids only count without mask and cache; functionary#132"


@rule("D16", "the trainer's packs leak", link="logprobs", scope="batch", needs=BOTH, explains=_LEAKS_INTO, lasts=True,
      source=_SOURCE)  # fmt: skip
def leaking(batch: StepBatch) -> Iterator[Finding]:
    """mean |d| per sample: the first sample of every pack agrees (below a fifth of the others, at least 5 times
    apart), every later one does not. Packs are as recorded, else every k-th sample, else what filling rows up to
    one length gives. An error. Only the first sample of a pack sees no other's tokens: no other cause spares just
    those.
    """
    between = gap(batch)
    if between.leak is not None:
        yield _leak(batch, between, *between.leak)


#: Steps in which first samples of a handful of tokens each are spared by no luck, and their share of the steps.
STEPS, MOST = 3, 0.8


@rule("D16", "the trainer's packs leak", link="logprobs", scope="case", explains=_LEAKS_INTO, lasts=True,
      source=_SOURCE)  # fmt: skip
def leaking_in_every_step(case: Case) -> Iterator[Finding]:
    """The same where first samples are too few, or hold too few tokens, to be sure of in one step: in four of five
    steps, 3 and more, packs of one way (all samples in one, every k-th) spare their first samples and no others. An
    error.
    """
    found: dict[str, list[tuple[StepBatch, Gap, Array]]] = defaultdict(list)
    looked = 0
    for batch in case.batches():
        try:
            between = compared(batch)
        except Skip:
            continue
        looked += 1
        if between.is_shifted or between.is_tempered:
            continue
        if (told := packed_signature(batch, between.by_sample_B, few=True)) is not None:
            found[told[1]].append((batch, between, told[0]))
    if looked < STEPS:
        raise Skip(f"needs log-probabilities of engine and trainer in {STEPS} steps")
    for how, every in found.items():
        if len(every) >= max(STEPS, MOST * looked):
            yield _leak(*every[0], how, steps=[one.step for one, _, _ in every if one.step is not None])
            return


def _leak(batch: StepBatch, between: Gap, clean_B: Array, how: str, steps: list[int] | None = None) -> Finding:
    values_B = between.by_sample_B
    place = batch.laid.where(between.trainer.name, sample=int(np.flatnonzero(~clean_B & ~np.isnan(values_B))[0]))
    return finding(
        "error",
        "the first sample of every pack agrees with the rollout, the ones after it do not: attention crosses samples",
        place,
        evidence=[
            shown("mean |d| of the first samples", float(np.nanmean(values_B[clean_B])), None, between.trainer.source),
            shown("mean |d| of the later samples", float(np.nanmean(values_B[~clean_B])), "the same"),
            shown("samples that agree", listed(np.flatnonzero(clean_B))),
            shown("packs", how),
            *figures_of(between),
        ],
        cause="samples are packed without a block-diagonal mask (use_cache was on, a mask of ones was passed, or no "
        "position ids), or position ids do not begin again with each of them",
        next_step=batch.laid.replay_command(place, "--packing"),
        steps=steps or (),
    )
