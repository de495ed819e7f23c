"""Gradients that one run recorded behind a clipping of its trainer's own."""

from __future__ import annotations

from typing import Any

from replay_core.compare.judging import algebra
from replay_core.compare.judging.ranks.row import RowOfRanks
from replay_core.compare.judging.ranks.stand_ins import judge_multiple
from replay_core.compare.pairing.own_clip import clipped_alone


class OwnClips:
    """Of the micro-batches of a step, which run clipped alone, and by how much."""

    def __init__(self) -> None:
        self._known: dict[Any, tuple[str, float] | None] = {}

    def forget(self) -> None:
        self._known.clear()

    def judged_without(self, of: RowOfRanks) -> bool:
        """Whether a gradient of a step agrees once the clipping is taken off; judged so, wherever there was one."""
        is_of_gradients = of.is_gradient or of.name == "grad_norm"
        clip = self._of(of) if is_of_gradients and of.row.key.micro is None else None
        if clip is None:
            return False
        which, clipped_by = clip
        scaled = 1 / clipped_by if which == of.together.which else clipped_by
        said = f"times {scaled:.4g}, for {which}'s gradients are recorded behind a clipping of its trainer's own"
        judge_multiple(of, scaled, said)
        if not of.row.verdict.diverges:
            return True
        of.row.ranks = algebra.explain(of.name, of.whole, of.together, of.held)
        return False

    def _of(self, of: RowOfRanks) -> tuple[str, float] | None:
        if of.micro_batch not in self._known:
            self._known[of.micro_batch] = clipped_alone(of.micro_pair)
        return self._known[of.micro_batch]
