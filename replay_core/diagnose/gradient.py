"""A gradient that should not be zero."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from replay_core.diagnose.batch import Batch
from replay_core.diagnose.finding import Finding
from replay_core.diagnose.rule import Skip, rule
from replay_core.diagnose.stating import finding, look_at, shown


@rule("D23", "the gradient is 0 although advantages are not", link="gradient", scope="batch",
      needs=("advantages", "mask"), source="ms-swift#5890")  # fmt: skip
def no_gradient(batch: Batch) -> Iterator[Finding]:
    """grad_norm exactly 0 while max |A| over counted tokens is above 0: an error. Equal and opposite advantages do not
    cancel to an exact 0 on different tokens.
    """
    norms = batch.scalars("grad_norm")
    if not norms:
        raise Skip("no gradient norm is recorded; rldbg record keeps one")
    advantages, trained_N = batch.column("advantages"), batch.trained_N
    assert advantages is not None
    assert trained_N is not None
    heard = np.abs(advantages.values_N[trained_N & advantages.said_N])
    heard = heard[np.isfinite(heard)]
    if not heard.size or not heard.max() > 1e-6 or any(norm.value != 0 for norm in norms):
        return
    place = batch.where_record(norms[0].record, norms[0].name)
    yield finding(
        "D23",
        "error",
        "the gradient is exactly 0 although advantages are not",
        evidence=[
            shown("gradient norm", 0.0, "> 0", norms[0].record.path.name),
            shown("largest |advantage| on counted tokens", float(heard.max()), None, advantages.source),
        ],
        cause="logits are detached, parameters are frozen, the loss scale overflowed, or the mask cuts the graph",
        next_step=look_at(place),
        where=place,
    )
