"""A candidate: what may part engine and trainer, and what it leaves of the gap."""

from __future__ import annotations

from typing import Literal

import numpy as np
from msgspec import Struct, field

from replay_core.mismatch.figures import Array, GapSize, share_explained, tokens_explained
from replay_core.mismatch.setting import Setting

Side = Literal["engine", "trainer", "both"]
READINGS: tuple[Side, ...] = ("engine", "trainer")
#: A cause that takes less than this share of the gap is no cause; one that takes this much needs no second.
PART, WHOLE = 0.5, 0.9
#: Causes that are rounding themselves: within the floor they are nothing to name.
ROUNDING = ("precision", "attention")


class Candidate(Struct):
    """A setting that one side may have run under.

    left_M: the gap that is left of every compared token (NaN: it says nothing of it), or None where the candidate is
        told by a sign and predicts nothing, or could not be tried (`why_not`).
    floor: what rounding leaves where this is the cause, nats.
    """

    name: str
    family: str
    side: Side = "engine"
    told_by: Literal["dump", "replay"] = "dump"
    left_M: Array | None = None
    floor: float = 0.0
    named: bool = False
    why_not: str | None = None
    share: float | None = None
    tokens: float | None = None
    #: What the two sides were replayed under; None where nothing was.
    engine: Setting | None = None
    trainer: Setting | None = None
    #: Of each sample, which weights explain which of its response's tokens (name, begin, end).
    spans: dict[int, list[tuple[str, int, int]]] = field(default_factory=dict)

    @property
    def left(self) -> GapSize | None:
        return None if self.left_M is None else GapSize.of(self.left_M)

    def weigh(self, d_M: Array, floor_before: float) -> Candidate:
        """Fill in what it explains of the gap d."""
        if self.left_M is None:
            return self
        known_M = np.isfinite(self.left_M)
        if not known_M.any():
            self.left_M, self.share = None, None
            return self
        before, left = float(np.abs(d_M[known_M]).mean()), float(np.abs(self.left_M[known_M]).mean())
        self.share = share_explained(before, left, floor_before, self.floor)
        self.tokens = tokens_explained(d_M[known_M], self.left_M[known_M], max(self.floor, floor_before))
        return self
