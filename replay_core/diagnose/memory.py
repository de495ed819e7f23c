"""What logits over a large vocabulary take."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from replay_core.diagnose.batch import Batch
from replay_core.diagnose.finding import Finding
from replay_core.diagnose.rule import rule
from replay_core.diagnose.stating import finding, shown

#: Logits that take this much of memory are worth knowing of.
LARGE_GIB = 4.0
_FP32 = 4


@rule("D36", "logits need much memory", link="memory", scope="batch", needs=("tokens",),
      source="slime#2253 (11.6k x 248k x 4 B = 10.8 GB), maxtext#4409")  # fmt: skip
def logits(batch: Batch) -> Iterator[Finding]:
    """T x V x 4 bytes of the largest micro-batch, T its padded token slots and V at least the largest id seen: one
    fp32 copy of the logits; a forward with softmax and backward holds two to three. 4 GiB and more is worth saying
    (info).
    """
    vocabulary = batch.vocabulary
    if vocabulary is None:
        return
    slots = 0
    for sheet, _ in batch.sheets:
        for part in sheet.parts:
            slots = max(slots, len(part) * part.width if part.width else int(np.sum(part.lengths)))
    gib = slots * vocabulary * _FP32 / 2**30
    if gib < LARGE_GIB:
        return
    place = batch.where("input_ids", sample=int(batch.lengths_B.argmax()))
    yield finding(
        "D36",
        "info",
        f"whole fp32 logits of the largest record take {gib:.1f} GiB, once",
        evidence=[
            shown("token slots", slots),
            shown("vocabulary, at least", vocabulary, None, "largest token id"),
            shown("longest sample", int(batch.lengths_B.max())),
        ],
        cause="logits are materialised over the whole vocabulary; two to three copies live at the loss",
        next_step=batch.replay_command(place, "--logits chunked"),
        where=place,
    )
