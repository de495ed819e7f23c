"""A row of a comparison together with what its ranks hold, as every question is asked of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from replay_core import naming
from replay_core.compare.judging.algebra import Ranked
from replay_core.compare.judging.faults import Fault
from replay_core.compare.pairing.align import MicroBatchPair, Side, TensorPair
from replay_core.compare.pairing.ranks import HeldByRanks, Together, standing_for
from replay_core.records import Record, TensorRef

if TYPE_CHECKING:
    from replay_core.compare.judging.tensors import TensorVerdict

JudgeCopy = Callable[[TensorPair, MicroBatchPair], "TensorVerdict"]

#: Elements that are added up in memory.
MOST = 1 << 26


class RowOfRanks(Struct, frozen=True):
    """A row that was judged, its pair, and what each rank holds of one side of it.

    row: what was said so far; whoever is asked changes it. judge: judges a pair as the row's was.
    """

    row: TensorVerdict
    pair: TensorPair
    micro_pair: MicroBatchPair
    held: HeldByRanks
    judge: JudgeCopy

    @property
    def name(self) -> str:
        return self.row.name

    @property
    def what(self) -> str:
        """What a sentence calls it: `up.weight's gradient`; anything else by its name."""
        return f"{self.name.removeprefix('grad.')}'s gradient" if self.is_gradient else self.name

    @property
    def kind(self) -> str:
        return naming.meaning(self.name).kind

    @property
    def is_gradient(self) -> bool:
        return self.name.startswith("grad.")

    @property
    def is_weight(self) -> bool:
        return self.name.startswith("param.")

    @property
    def step(self) -> int | None:
        return self.row.key.step

    @property
    def micro_batch(self) -> tuple[int | None, int | None]:
        return self.row.place[:2]

    @property
    def together(self) -> Together:
        assert self.micro_pair.together is not None
        return self.micro_pair.together

    @property
    def found(self) -> Ranked:
        """What is said of its ranks so far."""
        assert self.row.ranks is not None
        return self.row.ranks

    @property
    def ours(self) -> tuple[Record, TensorRef]:
        """The ranks' side of the pair."""
        held = self.pair.a if self.together.which == "a" else self.pair.b
        assert held is not None
        return held

    @property
    def theirs(self) -> tuple[Record, TensorRef]:
        """The other run's side of the pair."""
        held = self.pair.b if self.together.which == "a" else self.pair.a
        assert held is not None
        return held

    @property
    def laid(self) -> TensorRef:
        """What stands for all ranks."""
        return self.ours[1]

    @property
    def whole(self) -> TensorRef:
        """What the other run has."""
        return self.theirs[1]

    @property
    def side(self) -> Side:
        """All that the ranks have of the micro-batch."""
        return self.micro_pair.a if self.together.which == "a" else self.micro_pair.b

    @property
    def other(self) -> Side:
        """All that the other run has of it."""
        return self.micro_pair.b if self.together.which == "a" else self.micro_pair.a

    def facing(self, mine: tuple[Record, TensorRef], theirs: tuple[Record, TensorRef] | None = None) -> TensorPair:
        """The pair with something else in the ranks' place, and in the other run's."""
        sides = mine, theirs or self.theirs
        return TensorPair(self.pair.name, *(sides if self.together.which == "a" else sides[::-1]))

    def holding(self, held: HeldByRanks, whole: TensorRef) -> RowOfRanks:
        """The row of ranks that hold this, which faces another tensor of the other run."""
        pair = self.facing((self.ours[0], standing_for(held)), (self.theirs[0], whole))
        return replace(self, pair=pair, held=held)


def say_first(row: TensorVerdict, fault: Fault) -> None:
    """Let a row say of its ranks what went wrong, before all that it said already."""
    assert row.ranks is not None
    row.ranks.fault = fault
    row.reason = f"{fault.sentence}; {row.reason}"
