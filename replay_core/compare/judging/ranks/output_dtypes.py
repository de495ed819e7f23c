"""Modules whose outputs some ranks have in another dtype."""

from __future__ import annotations

from replay_core import naming
from replay_core.compare.judging.faults import Fault, whose
from replay_core.compare.judging.ranks.row import RowOfRanks


class OutputDtypes:
    """Of a step: what is said of ranks whose modules put out another dtype."""

    def __init__(self) -> None:
        self._of_steps: dict[int | None, Fault] = {}

    def note(self, of: RowOfRanks) -> None:
        """Keep the first module of a step whose output ranks have in several dtypes."""
        held, whole = of.held, of.whole
        others = tuple(rank for rank, ref in zip(held.ranks, held.parts, strict=True) if ref.dtype != whole.dtype)
        if naming.is_module_tensor(of.name) and 0 < len(others) < len(held.ranks):
            dtype = next(ref.dtype for ref in held.parts if ref.dtype != whole.dtype)
            said = f"{of.name} is {dtype} on {whose(others)} and {whole.dtype} on all others, as in the other run"
            fault = Fault("precision", others, f"{said}: what these computed is off by that (autocast, or a cast)")
            self._of_steps.setdefault(of.step, fault)

    def of_step(self, step: int | None) -> Fault | None:
        return self._of_steps.get(step)
