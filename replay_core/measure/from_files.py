"""The figures of a pair whose rows lie in two files: read and added up in one call of the kernel.

What `pair.figures` does between two chunks holds the interpreter, and two threads that do so wait for each other more
than they work.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from replay_core import kernel, pages
from replay_core.dtypes import ITEMSIZE
from replay_core.file_spans import Stream
from replay_core.measure import native
from replay_core.measure.figures import PairFigures
from replay_core.measure.pair import Pass, Rows
from replay_core.measure.sums import FEWEST_ROWS, Columns, Sums, are_held, massive_columns, with_massive
from replay_core.records import FileBytes, TensorRef

Ints = NDArray[np.int64]

#: Bytes of a side that are read at once: with the other side's they stay in the processor's second cache.
_BLOCK = 1 << 18


class Facing(Struct, frozen=True):
    """Rows of one width of two tensors, by their numbers: those of b face those of a. Without numbers, every row."""

    a: TensorRef
    b: TensorRef
    width: int
    rows_a: Ints | None = None
    rows_b: Ints | None = None

    @property
    def count(self) -> int:
        return self.a.numel // self.width if self.rows_a is None else self.rows_a.size

    def runs(self) -> Ints:
        """[N, 3]: the first row of a stretch in a, the one that faces it in b, how many follow each other in both."""
        if self.rows_a is None or self.rows_b is None:
            return np.array([[0, 0, self.count]], np.int64)
        breaks = np.flatnonzero((np.diff(self.rows_a) != 1) | (np.diff(self.rows_b) != 1)) + 1
        starts = np.concatenate(([0], breaks))
        counts = np.diff(np.concatenate((starts, [self.count])))
        return np.stack((self.rows_a[starts], self.rows_b[starts], counts), axis=1).astype(np.int64)


def figures(facing: Facing, first_rows: int) -> PairFigures | None:
    """As `pair.figures` of plain floats, where all of them are finite and can be squared.

    first_rows: of so many massive columns are told, as of a first chunk.

    None where the kernel cannot: no library, not files of this machine, a dtype it does not know, numbers that a sum
    cannot hold, float32 whose bits may show that bf16 is stored in it, a file that ends before. `pair.figures` can, or
    says why not.
    """
    a, b = facing.a, facing.b
    if (
        a.dtype != b.dtype
        or a.dtype not in kernel.PAIRS
        or not facing.width
        or not facing.count
        or kernel.loaded() is None
    ):
        return None
    if not (_is_in_one_piece(a) and _is_in_one_piece(b)):
        return None
    assert isinstance(a.source, FileBytes)
    assert isinstance(b.source, FileBytes)
    with Stream(a.source.path) as file_a, Stream(b.source.path) as file_b:
        if file_a.descriptor is None or file_b.descriptor is None:
            return None
        return _Files(facing, file_a, file_b).figures(first_rows)


def _is_in_one_piece(ref: TensorRef) -> bool:
    where = ref.source
    is_native = sys.byteorder == "little"
    return is_native and isinstance(where, FileBytes) and where.strides is None and not where.big_endian


class _Files:
    """Both files, open, and what is read of them."""

    def __init__(self, facing: Facing, file_a: Stream, file_b: Stream) -> None:
        self.facing, self.file_a, self.file_b = facing, file_a, file_b
        self._read_a = pages.row_reader(facing.a, facing.width, file_a)
        self._read_b = pages.row_reader(facing.b, facing.width, file_b)

    def _of_a(self, numbers: NDArray[Any]) -> Rows:
        """Rows of a, counted from 0 over those that face each other."""
        rows = self.facing.rows_a
        return self._read_a(numbers if rows is None else rows[numbers])

    def _of_b(self, numbers: NDArray[Any]) -> Rows:
        rows = self.facing.rows_b
        return self._read_b(numbers if rows is None else rows[numbers])

    def _row(self, number: int) -> tuple[Rows, Rows]:
        numbers = np.array([number])
        return self._of_a(numbers)[0], self._of_b(numbers)[0]

    def figures(self, first_rows: int) -> PairFigures | None:
        """What `figures` is asked for."""
        count, width = self.facing.count, self.facing.width
        first = min(count, first_rows)
        few = np.arange(0, first, max(1, first // FEWEST_ROWS))[:FEWEST_ROWS]
        few_of_a = self._of_a(few)
        of_pair = Pass()
        if self.facing.a.dtype == "float32":
            for precision, side in zip(of_pair.pair.precision, (few_of_a, self._of_b(few)), strict=True):
                precision.look(side)
                if not precision.is_settled:
                    return None
        of_pair.massive = massive_columns(few_of_a)
        found = self._sums(of_pair.massive)
        if found is None:
            return None
        of_pair.pair.compared, of_pair.pair.rows.width = count * width, width
        of_pair.smooth(*found, count * width, self._row)
        return of_pair.finished()

    def _sums(self, massive: Columns) -> tuple[Sums, Sums | None] | None:
        facing, dtype = self.facing, self.facing.a.dtype
        at_a, at_b = (ref.source.offset for ref in (facing.a, facing.b) if isinstance(ref.source, FileBytes))
        row = facing.width * ITEMSIZE[dtype]
        step = min(facing.count, max(1, _BLOCK // row))
        assert self.file_a.descriptor is not None
        assert self.file_b.descriptor is not None
        spans = (self.file_a.descriptor, at_a), (self.file_b.descriptor, at_b)
        with pages.room(step * row, at_a) as room_a, pages.room(step * row, at_b) as room_b:
            found = native.lines_of_files(dtype, spans, facing.width, facing.runs(), step, massive, (room_a, room_b))
        if found is None:
            return None
        with np.errstate(all="ignore"):
            total, rest = with_massive(Sums(*found[0]), *found[1:], massive)
            is_right = are_held(total, rest, massive, self._of_a if ITEMSIZE[dtype] == 2 else None, step)
        return (total, rest) if is_right else None
