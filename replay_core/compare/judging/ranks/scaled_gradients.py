"""Gradients that each rank scaled by a factor of its own: they are explained as they were before."""

from __future__ import annotations

from collections import defaultdict

from msgspec.structs import replace

from replay_core.compare.judging import algebra
from replay_core.compare.judging.faults import Fault, is_open
from replay_core.compare.judging.ranks.row import MOST, RowOfRanks, say_first
from replay_core.compare.judging.ranks.stand_ins import multiple


class ScaledGradients:
    """Of a step: by what factor of its own each rank's gradients are scaled, and those that no factor explains."""

    def __init__(self) -> None:
        self._factors: dict[int | None, dict[int, float]] = {}
        self._waiting: dict[int | None, list[RowOfRanks]] = defaultdict(list)

    def note(self, of: RowOfRanks, fault: Fault | None) -> None:
        """Explain a gradient as it was before each rank scaled its own: one that is not summed gives each rank a norm
        of its own, and clipping by it scales all the others.
        """
        if not of.is_gradient or not is_open(fault):
            return
        step, factors = of.step, of.found.factors
        if len(factors) == len(of.held.ranks) and min(factors.values()) > 0:
            apart = max(factors.values()) - min(factors.values())
            if factors.keys() == set(of.together.ranks) and apart > 1e-4 * max(factors.values()):
                self._factors.setdefault(step, factors)
        else:
            self._waiting[step].append(of)
        if step not in self._factors:
            return
        scaled = self._factors[step]
        for other in self._waiting.pop(step, []):
            own = other.held
            if own.ranks != tuple(scaled) or not all(ref.is_readable and ref.numel <= MOST for ref in own.parts):
                continue
            parts = tuple(
                multiple((ref,), 1 / scaled[rank]) for rank, ref in zip(own.ranks, own.parts, strict=True)
            )  # fmt: skip
            found = algebra.explain(other.name, other.whole, other.together, replace(own, parts=parts))
            if found.fault is None or other.row.ranks is None:
                continue
            said = ", ".join(f"{factor:.4g} on rank {rank}" for rank, factor in scaled.items())
            before = replace(
                found.fault, sentence=f"{found.fault.sentence}, once the factor is taken off by which each rank's "
                f"gradients are scaled besides ({said}): the norm it clips by is of its own"
            )  # fmt: skip
            say_first(other.row, before)
