"""What either run has of a tensor: as a whole, and for every rank whose copy is its own."""

from __future__ import annotations

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from replay_core import pages
from replay_core.compare.pairing.align import MicroBatchPair
from replay_core.compare.pairing.own_copies import other_copies
from replay_core.compare.pairing.ranks import HeldByRanks, Which, in_sections, sections, standing_for
from replay_core.records import TensorRef

#: By rank that holds a copy of its own (None: what stands for all of them), the tensor as either run has it.
Copies = dict[int | None, tuple[TensorRef, TensorRef]]


class FacingTensors(Struct, frozen=True):
    """Two tensors that face each other, and what the ranks of a run (`which`) hold of theirs."""

    a: TensorRef
    b: TensorRef
    which: Which | None
    held: HeldByRanks | None

    @classmethod
    def of(cls, a: TensorRef, b: TensorRef, micro_pair: MicroBatchPair) -> FacingTensors:
        together = micro_pair.together
        if together is None:
            return cls(a, b, None, None)
        return cls(a, b, together.which, together.held.get(id(a if together.which == "a" else b)))

    @classmethod
    def named(cls, name: str, stage: str, micro_pair: MicroBatchPair) -> FacingTensors | None:
        """The tensors that both sides call so in a stage; None where one lacks it."""
        a, b = (side.tensors.get((name, stage)) for side in (micro_pair.a, micro_pair.b))
        return None if a is None or b is None else cls.of(a[1], b[1], micro_pair)

    def in_sections(self, sizes: tuple[int, ...]) -> FacingTensors:
        """The same, of which ranks hold a share of several in one (q, k and v; so long) each."""
        held = in_sections(self.held, sizes) if self.held is not None and self.held.is_cut and sizes else None
        return self if held is None else replace(self, held=held)

    def sections(self) -> tuple[int, ...]:
        """How long the several in one are of which ranks hold a share each, as the values say; nothing where it is one.

        Raises:
            DumpError: the bytes of one cannot be read.
        """
        if self.held is None or not self.held.is_cut or len(self.held.stretches[0]) != 1:
            return ()
        tried = {sizes: self.in_sections(sizes) for sizes in [(), *sections(self.held)]}
        return min(tried, key=lambda sizes: tried[sizes]._apart())

    def _apart(self) -> float:
        a, b = self.copies()[None]
        if not a.is_readable or not b.is_readable or a.shape != b.shape:
            return np.inf
        off = np.asarray(pages.array(b), np.float64) - np.asarray(pages.array(a), np.float64)
        return float(np.square(off).sum())

    def copies(self) -> Copies:
        """What either run has of it, for every rank whose bytes are its own; nothing where that is not known.

        Raises:
            DumpError: the bytes of one cannot be read.
        """
        if self.which is None:
            return {None: (self.a, self.b)}
        if self.held is None:
            return {}
        whole = self.b if self.which == "a" else self.a
        first = standing_for(self.held) if self.held.is_cut else self.held.parts[0]
        every = [(None, first), *other_copies(self.held)]
        return {rank: ((ref, whole) if self.which == "a" else (whole, ref)) for rank, ref in every}


def of_rank(copies: Copies, rank: int | None) -> tuple[TensorRef, TensorRef] | None:
    """A rank that has none of its own has that of all."""
    return copies.get(rank) or copies.get(None)
