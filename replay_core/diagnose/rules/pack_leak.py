"""Packs of the trainer whose samples see each other."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.compared import BOTH, figures_of
from replay_core.diagnose.finding import Finding
from replay_core.diagnose.gap import gap
from replay_core.diagnose.rule import rule
from replay_core.diagnose.stating import finding, listed, shown


@rule("D16", "the trainer's packs leak", link="logprobs", scope="batch", needs=BOTH,
      explains=("L10", "D09", "D12", "D13", "D14", "D15", "D24"), lasts=True,
      source="transformers masking_utils: packed position ids only count without mask and cache; "
      "functionary#132")  # fmt: skip
def leaking(batch: StepBatch) -> Iterator[Finding]:
    """mean |d| per sample: the first sample of every pack agrees (below a fifth of the others, at least 5 times
    apart), every later one does not. Packs are as recorded, else every k-th sample, else what filling rows up to
    one length gives. An error. Only the first sample of a pack sees no other's tokens: no other cause spares just
    those.
    """
    between = gap(batch)
    found = between.leak
    if found is None:
        return
    clean_B, how = found
    values_B = between.by_sample_B
    place = batch.laid.where(between.trainer.name, sample=int(np.flatnonzero(~clean_B & ~np.isnan(values_B))[0]))
    yield finding(
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
        cause="samples are packed without a block-diagonal mask: use_cache was on, a mask of ones "
        "was passed, or no position ids",
        next_step=batch.laid.replay_command(place, "--packing"),
    )
