"""The step's first activation that is off may be the other run's of another micro-batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replay_core import naming
from replay_core.compare.judging import algebra
from replay_core.compare.judging.faults import Fault, is_open, whose
from replay_core.compare.judging.ranks.first_activation import FirstActivation
from replay_core.compare.judging.ranks.row import MOST, RowOfRanks, say_first
from replay_core.records import TensorRef

if TYPE_CHECKING:
    from replay_core.compare.judging.tensors import TensorVerdict


class OtherMicroBatches:
    """Of this step, by role and name, what its micro-batches put out."""

    def __init__(self, first: FirstActivation) -> None:
        self._first = first
        #: The first row there was, and what the ranks hold of it.
        self._begun: dict[tuple[str | None, str], tuple[TensorVerdict, TensorRef]] = {}
        #: What the micro-batch before held of it, of the other run.
        self._before: dict[tuple[str | None, str], tuple[int | None, TensorRef]] = {}

    def begin_step(self) -> None:
        self._begun.clear()
        self._before.clear()

    def note(self, of: RowOfRanks, laid: TensorRef) -> None:
        """Whether what ranks put out in the step's first micro-batch that is off is the other run's of another one."""
        row, whole = of.row, of.whole
        if not naming.is_module_tensor(row.name) or of.is_gradient or row.ranks is None:
            return
        self._note_before(row, whole, laid)
        first, own = self._begun.setdefault((row.key.role, row.name), (row, laid))
        if first is row or first.ranks is None or not first.verdict.diverges or first.key.micro == row.key.micro:
            return
        is_first_off = self._first.row(row.key.step) is first
        if not is_first_off or first.ranks.fault is not None or not _is_readable_as(own, whole):
            return
        if not algebra.is_near(whole, own):
            return
        those = first.ranks.parted or first.ranks.ranks
        fault = Fault(
            "other micro-batch", those,
            f"{row.name} of {whose(those)} in micro-batch {first.key.micro} is the "
            f"other run's of micro-batch {row.key.micro}",
        )  # fmt: skip
        say_first(first, fault)

    def _note_before(self, row: TensorVerdict, whole: TensorRef, laid: TensorRef) -> None:
        """Whether the step's first activation that is off is what the other run has in the micro-batch before."""
        place = row.key.role, row.name
        micro, before = self._before.get(place, (None, None))
        self._before[place] = row.key.micro, whole
        is_first_off = self._first.row(row.key.step) is row
        if before is None or row.ranks is None or not is_first_off or not row.verdict.diverges:
            return
        if not is_open(row.ranks.fault):
            return
        if not _is_readable_as(laid, before) or algebra.is_near(whole, before) or not algebra.is_near(before, laid):
            return
        those = row.ranks.parted or row.ranks.ranks
        fault = Fault(
            "other micro-batch", those,
            f"{row.name} of {whose(those)} in micro-batch {row.key.micro} is the other run's of micro-batch {micro}, "
            "the one before: what went into it was another micro-batch's",
        )  # fmt: skip
        say_first(row, fault)


def _is_readable_as(one: TensorRef, other: TensorRef) -> bool:
    return one.shape == other.shape and one.is_readable and other.is_readable and 8 <= one.numel <= MOST
