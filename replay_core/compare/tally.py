"""What a comparison comes to, taken down row by row: who asks for it later needs no row."""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

from msgspec import Struct, field

from replay_core import naming
from replay_core.compare import called_again
from replay_core.compare.divergence import ModuleStanding, Origin, may_be_first, origin_of, standing
from replay_core.compare.hints import Clues
from replay_core.compare.judging import digests
from replay_core.compare.judging.tensors import TensorVerdict
from replay_core.compare.judging.verdict import Verdict
from replay_core.compare.shared_gain import SharedGains

if TYPE_CHECKING:
    from replay_core.compare.judging.tensors import Place

#: Outputs of modules that are called once more, of which the outermost of the first step is asked for.
_MOST_AGAIN = 512


class Tally(Struct):
    """Rows are taken in order of computation, or those of a step with the `order` in which they stand."""

    verdicts: Counter[Verdict] = field(default_factory=Counter)
    skipped: int = 0
    #: Elements compared, over the tokens that count.
    elements: int = 0
    #: Pairs of which there are figures, and those known by their digests alone.
    compared: int = 0
    by_digest: int = 0
    #: The first row that was skipped, and why.
    first_skipped: str | None = None
    #: Whether a value of any pair was looked at.
    is_looked_at: bool = False
    first: TensorVerdict | None = None
    #: Names of tensors that diverge anywhere.
    diverging: set[str] = field(default_factory=set)
    #: The first pair that is not the same, noise included: where two runs stop being bitwise equal.
    first_difference: TensorVerdict | None = None
    #: Pairs with NaN on both sides alike, and the first of them.
    with_nans: int = 0
    first_with_nans: TensorVerdict | None = None
    gains: SharedGains = field(default_factory=SharedGains)
    clues: Clues = field(default_factory=Clues)
    #: Rows of tensors that several ranks hold: what is said of the ranks is said of all of these.
    of_ranks: list[TensorVerdict] = field(default_factory=list)
    _again: int = 0
    _modules: _Modules = field(default_factory=lambda: _Modules())

    def take(self, row: TensorVerdict) -> None:
        """Take the next row."""
        self.clues.take(row)
        if naming.is_module_tensor(row.name):
            self._modules.take(row)
        if row.skipped is not None:
            self.skipped += 1
            self.first_skipped = self.first_skipped or f"{row.name}: {row.skipped}"
            return
        self.verdicts[row.verdict] += 1
        self.by_digest += row.by_digest
        if row.verdict.diverges:
            self.diverging.add(row.name)
        if row.figures is not None:
            self.compared += 1
            self.elements += row.figures.compared
            self.gains.take(row)
        if _holds_nans(row):
            self.with_nans += 1
            if _precedes(row, self.first_with_nans):
                self.first_with_nans = row
        self.is_looked_at = self.is_looked_at or _looked_at(row)
        if _precedes(row, self.first) and may_be_first(row):
            self.first = row
        if _precedes(row, self.first_difference) and _differs(row):
            self.first_difference = row
        if row.ranks is not None:
            self.of_ranks.append(row)
        elif called_again.is_again(row) and self._again < _MOST_AGAIN:
            self._again += 1
            self.of_ranks.append(row)

    @property
    def diverges(self) -> bool:
        """Whether any pair diverges, also one that is never first."""
        return any(verdict.diverges for verdict, number in self.verdicts.items() if number)

    @property
    def nans(self) -> str | None:
        """What is said of pairs that hold NaN on both sides alike, which no verdict shows; None where none does."""
        first = self.first_with_nans
        if first is None:
            return None
        count = self.compared + self.by_digest
        some = f"{self.with_nans:,} of {count:,} tensors hold" if count > 1 else "the tensor holds"
        return f"{some} NaN at the same places of both, which is no difference: first {first.name} ({first.key})"

    @property
    def origin(self) -> Origin | None:
        """What produced the first divergence, within its micro-batch; None where that is no tensor of a module."""
        if self.first is None or not naming.is_module_tensor(self.first.name):
            return None
        return origin_of(self._modules.of(self.first.place))


class _Modules:
    """How every tensor of a module stands, by micro-batch: four bytes each."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._names: list[str] = []
        self._of: dict[Place, array[int]] = defaultdict(lambda: array("I"))

    def take(self, row: TensorVerdict) -> None:
        number = self._numbers.get(row.name)
        if number is None:
            number = self._numbers[row.name] = len(self._names)
            self._names.append(row.name)
        stands = standing(row)
        self._of[row.place].append(number << 2 | stands.agrees << 1 | stands.parts)

    def of(self, place: Place) -> Iterator[ModuleStanding]:
        for said in self._of.get(place, ()):
            yield ModuleStanding(self._names[said >> 2], bool(said & 2), bool(said & 1))


def _holds_nans(row: TensorVerdict) -> bool:
    """Whether both sides hold NaN at the same places."""
    if row.figures is not None:
        return row.figures.nans_of_both > 0
    if not row.by_digest or row.verdict is not Verdict.SAME or row.a is None or row.b is None:
        return False
    return digests.nans_of(row.a[1], row.b[1]) > 0


def _precedes(row: TensorVerdict, known: TensorVerdict | None) -> bool:
    return known is None or (row.order is not None and known.order is not None and row.order < known.order)


def _differs(row: TensorVerdict) -> bool:
    if row.by_digest:
        return row.verdict in (Verdict.DIFF, Verdict.NAN)
    return row.figures is not None and row.figures.mismatched > 0


def _looked_at(row: TensorVerdict) -> bool:
    """Whether a value of the pair was looked at: two empty tensors, or two of padding alone, prove nothing."""
    if row.by_digest and row.a is not None and row.a[1].numel:
        return True
    elements = sum(figures.compared for figures in (row.figures, row.unmasked) if figures is not None)
    return elements > 0 or row.verdict is Verdict.SHAPE
