"""What stands just before a row in its micro-batch, and what of it the row was made of."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, TypeVar

from replay_core import naming
from replay_core.compare.judging import algebra, attention_made, contributions, parts_otherwise
from replay_core.compare.judging.faults import Fault, is_open
from replay_core.compare.judging.ranks.row import RowOfRanks
from replay_core.compare.pairing.ranks import HeldByRanks
from replay_core.records import TensorRef

#: Tensors of a micro-batch that an explanation may lean on: those just before.
_KEPT = 6

T = TypeVar("T")


def and_then(before: list[T], one: T) -> list[T]:
    """The tensors just before the next one. A list of its own: whoever holds the one before keeps what it was."""
    return [*before[1 - _KEPT :], one]


class TensorsBefore:
    """Of every micro-batch, the last tensors of each kind that causes lean on."""

    def __init__(self) -> None:
        #: Tensors that all ranks hold alike and right, and those they hold parts of.
        self._whole: dict[Any, list[tuple[str, TensorRef]]] = defaultdict(list)
        self._parts: dict[Any, list[tuple[str, HeldByRanks]]] = defaultdict(list)
        #: Slices that ranks hold alike with the other run.
        self._slices: dict[Any, list[HeldByRanks]] = defaultdict(list)
        #: What went into attention and is the other run's.
        self._into_attention: dict[Any, list[HeldByRanks]] = defaultdict(list)

    def begin_step(self) -> None:
        self._into_attention.clear()

    def keep(self, of: RowOfRanks) -> None:
        row, held, place = of.row, of.held, of.micro_batch
        if attention_made.goes_into(of.name) and not row.verdict.diverges and not of.is_gradient:
            self._into_attention[place] = and_then(self._into_attention[place], held)
        if held.is_cut and naming.is_module_tensor(of.name) and not row.verdict.diverges:
            self._slices[place] = and_then(self._slices[place], held)
        if held.is_cut or row.ranks is None or not naming.is_module_tensor(of.name) or not of.whole.shape:
            return
        if row.ranks.relation == "parts":
            self._parts[place] = and_then(self._parts[place], (of.name, held))
        elif not row.verdict.diverges:
            self._whole[place] = and_then(self._whole[place], (of.name, of.whole))

    def slices(self, of: RowOfRanks) -> list[HeldByRanks]:
        return self._slices[of.micro_batch]

    def whole(self, of: RowOfRanks) -> list[HeldByRanks]:
        """What every rank has of what stands before it and agrees, the last first."""
        return [HeldByRanks(of.together.ranks, (ref,)) for _, ref in reversed(self._whole[of.micro_batch])]

    def into_attention(self, of: RowOfRanks) -> list[HeldByRanks]:
        return self._into_attention[of.micro_batch]

    def of_sums(self, of: RowOfRanks, fault: Fault | None) -> Fault | None:
        """Whether a row is off by what was not summed before it, or by what was made of it otherwise."""
        return (self._from_before(of) or fault) if is_open(fault) else fault

    def _from_before(self, of: RowOfRanks) -> Fault | None:
        name, whole, held, parted = of.name, of.whole, of.held, of.found.parted
        known, summands = self._whole[of.micro_batch], self._parts[of.micro_batch]
        if of.is_gradient or of.is_weight or whole.numel < 8:
            return None
        if not held.is_cut and naming.is_module_tensor(name):
            fault = contributions.parts_and_bias(name, whole, held)
            if fault is not None:
                return fault
        for called, before in reversed(known):
            if (
                not held.is_cut
                and (fault := contributions.not_summed_into(name, whole, held, before, called)) is not None
            ):
                return fault
        if not held.is_cut and "norm" in naming.module_of(name).rpartition(".")[2]:
            for called, parts in reversed(summands):
                for _, before in reversed(known):
                    if (fault := contributions.norm_of_parts(name, whole, held, before, parts, called)) is not None:
                        return fault
        for called, parts in reversed(summands):
            if (fault := contributions.missing_from(name, whole, of.laid, held, parts, called)) is not None:
                return fault
            if not held.is_cut and (
                fault := parts_otherwise.of_parts(name, whole, held, parts, called, parted)
            ) is not None:  # fmt: skip
                return fault
        if not held.is_cut and naming.is_module_tensor(name) and parted:
            each = [ref for rank, ref in zip(held.ranks, held.parts, strict=True) if rank in parted]
            if algebra.are_alike(each):
                return parts_otherwise.of_outputs(name, whole, each[0], known, tuple(parted))
        return None
