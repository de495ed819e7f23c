"""The rows of a comparison as a document has them, held in little: two dumps of many ranks have a hundred thousand.

Rows of equal tensors say the same but for their records, and are two numbers each; every other row is a line of JSON in
a temporary file.
"""

from __future__ import annotations

import json
import os
import tempfile
import weakref
from array import array
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO, cast, overload

from replay_core.compare.judging.verdict import Verdict
from replay_core.export.documents import RowsAlike, tensor_row

if TYPE_CHECKING:
    from replay_core.compare import TensorVerdict
    from replay_core.documents.comparison import PairEntry
    from replay_core.documents.parts import KeyEntry
    from replay_core.records import Record

#: Lines of JSON that are held before they go to a file.
_HELD_BYTES = 1 << 18
#: In the place of a kind: the row is a line of its own.
_LINE = -1


class Entries(Sequence["PairEntry"]):
    """The rows of one document, skipped ones last. What is asked for is made anew each time: keep it no longer than
    it is looked at. It is no list: `written.pieces` writes it row by row.
    """

    def __init__(self) -> None:
        self._alike = RowsAlike()
        self._kinds: dict[tuple[object, ...], int] = {}
        self._templates: list[PairEntry] = []
        self._records: dict[tuple[int, int], int] = {}
        #: With the records, that no other comes to have their ids.
        self._keys: list[tuple[KeyEntry, KeyEntry, Record, Record]] = []
        self._lines = _Lines()
        self._compared, self._skipped = _RowsInLittle(), _RowsInLittle()

    def take(self, row: TensorVerdict) -> None:
        """Take the next row, in order of computation but for what its `order` says."""
        rows = self._compared if row.skipped is None else self._skipped
        if (kind := self._kind(row)) is not None:
            rows.add(kind, self._of_records(row), row.order)
        else:
            rows.add(_LINE, self._lines.add(json.dumps(tensor_row(row), allow_nan=False)), row.order)

    def _kind(self, row: TensorVerdict) -> int | None:
        """The number of the rows that say the same but for their records; None where a row says more than equal."""
        if row.a is None or row.b is None or not _is_plain(row):
            return None
        a, b, figures = row.a[1], row.b[1], row.figures
        said = None if figures is None else (figures.compared, figures.nan_a, figures.nan_b)
        key = (row.name, row.reason, a.name, b.name, a.dtype, b.dtype, a.shape, b.shape, said)
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = len(self._templates)
            self._templates.append(tensor_row(row, self._alike))
        return kind

    def _of_records(self, row: TensorVerdict) -> int:
        assert row.a is not None
        assert row.b is not None
        of = id(row.a[0]), id(row.b[0])
        number = self._records.get(of)
        if number is None:
            number = self._records[of] = len(self._keys)
            self._keys.append((row.a[0].key.to_mapping(), row.b[0].key.to_mapping(), row.a[0], row.b[0]))
        return number

    def __len__(self) -> int:
        return len(self._compared) + len(self._skipped)

    def __iter__(self) -> Iterator[PairEntry]:
        for rows in (self._compared, self._skipped):
            for number in range(len(rows)):
                yield self._entry(*rows[number])

    def _entry(self, kind: int, place: int) -> PairEntry:
        if kind == _LINE:
            return cast("PairEntry", json.loads(self._lines[place]))
        entry = self._templates[kind].copy()
        entry["a_key"], entry["b_key"] = self._keys[place][:2]
        return entry

    @overload
    def __getitem__(self, index: int) -> PairEntry: ...
    @overload
    def __getitem__(self, index: slice) -> list[PairEntry]: ...
    def __getitem__(self, index: int | slice) -> PairEntry | list[PairEntry]:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        number = index + len(self) if index < 0 else index
        if not 0 <= number < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        before = len(self._compared)
        return self._entry(*(self._compared[number] if number < before else self._skipped[number - before]))


class _RowsInLittle:
    """Of every row its kind and its records, else _LINE and its line. Rows of a step that come out of order are sorted
    when the first row is asked for.
    """

    def __init__(self) -> None:
        self._kinds, self._places = array("i"), array("q")
        #: Of the step whose rows come out of order: its number, where they begin, and of each what sorts it: all but
        #: the rank by a number, for every rank has the same, and the rank.
        self._step: int | None = None
        self._start = 0
        self._numbers: dict[Any, int] = {}
        self._orders, self._ranks = array("i"), array("q")

    def add(self, kind: int, place: int, order: tuple[int, Any] | None) -> None:
        step = None if order is None else order[0]
        if step != self._step:
            self._sort()
            self._step, self._start = step, len(self._kinds)
        self._kinds.append(kind)
        self._places.append(place)
        if order is not None:
            *within, rank = order[1]
            self._orders.append(self._numbers.setdefault(tuple(within), len(self._numbers)))
            self._ranks.append(rank)

    def __len__(self) -> int:
        return len(self._kinds)

    def __getitem__(self, number: int) -> tuple[int, int]:
        self._sort()
        return self._kinds[number], self._places[number]

    def _sort(self) -> None:
        if self._step is None:
            return
        turn = array("i", bytes(array("i").itemsize * len(self._numbers)))
        for place, within in enumerate(sorted(self._numbers)):
            turn[self._numbers[within]] = place
        orders, ranks, start = self._orders, self._ranks, self._start
        sorted_ = array("q", sorted(range(len(orders)), key=lambda one: (turn[orders[one]], ranks[one])))
        self._kinds[start:] = array("i", (self._kinds[start + one] for one in sorted_))
        self._places[start:] = array("q", (self._places[start + one] for one in sorted_))
        self._step, self._numbers, self._orders, self._ranks = None, {}, array("i"), array("q")


_NOTHING_BESIDE = (None,) * 12


def _is_plain(row: TensorVerdict) -> bool:
    """Whether a row says no more than that its tensors are equal."""
    beside = (row.rule, row.note, row.ranks, row.unmasked, row.worst_token, row.skipped)
    shown = (row.raw_a, row.raw_b, row.token, row.sample_b, row.value_a, row.value_b)
    if row.verdict is not Verdict.SAME or row.suspect or (*beside, *shown) != _NOTHING_BESIDE:
        return False
    return row.figures is None or not (row.figures.mismatched or row.figures.total.count)


class _Lines:
    """Texts by number, in a file without a name; in memory the last ones, and all where no file can be written."""

    def __init__(self) -> None:
        self._ends = array("q", [0])
        self._held = bytearray()
        self._file: BinaryIO | None = None
        self._put_away = 0
        self._has_room = True

    def add(self, text: str) -> int:
        self._held += text.encode()
        self._ends.append(self._put_away + len(self._held))
        if len(self._held) > _HELD_BYTES and self._has_room:
            self._to_disk()
        return len(self._ends) - 2

    def _to_disk(self) -> None:
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="rldbg-rows-")  # noqa: SIM115  # as long as the rows
                weakref.finalize(self, self._file.close)
            self._file.seek(self._put_away)
            self._file.write(self._held)
            self._file.flush()
        except OSError:  # no room, or nowhere to write: then memory has to do
            self._has_room = False
            return
        self._put_away += len(self._held)
        self._held.clear()

    def __getitem__(self, number: int) -> bytes:
        start, end = self._ends[number], self._ends[number + 1]
        if start >= self._put_away:
            return bytes(self._held[start - self._put_away : end - self._put_away])
        assert self._file is not None
        return os.pread(self._file.fileno(), end - start, start)
