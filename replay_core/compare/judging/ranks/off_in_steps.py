"""What is off in a step before its weights are: what is said of these rests on it."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from replay_core.compare.judging.tensors import TensorVerdict


class OffInSteps:
    """Of every step, the gradients that are off, and whether its forward pass is."""

    def __init__(self) -> None:
        #: Weights whose gradient is off.
        self._gradients: dict[int | None, set[str]] = defaultdict(set)
        #: Steps in which something is off that is no gradient and no weight.
        self._forward: set[int | None] = set()

    def note_gradient(self, row: TensorVerdict) -> None:
        self._gradients[row.key.step].add(row.name.removeprefix("grad."))

    def note(self, row: TensorVerdict) -> None:
        if row.verdict.diverges and not row.name.startswith(("grad.", "param.")) and row.key.stage != "optimizer":
            self._forward.add(row.key.step)

    def in_forward(self, step: int | None) -> bool:
        return step in self._forward

    def gradients(self, step: int | None) -> set[str]:
        return self._gradients[step]
