"""The arithmetic of one chunk of a pair: sums and maxima per row and per column.

The kernel of `native.c` does it in one pass, where it was built and knows the dtype. Else numpy does, in two buffers
that are reused: most of the speed is what is left out. Nothing is allocated per chunk, both buffers and the bytes they
were made from stay in the processor's cache, and what a figure needs last is computed over what no figure needs any
more. Sums within a chunk run in the buffers' own type, sums over chunks in float64.

A buffer is [P, R, C]: a row's columns lie in P planes, column c in plane c % P at c // P. bf16 is read two at a time,
so it has two planes; everything else has one.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

from replay_core.measure.native import pair_lines, spans_between
from replay_core.measure.quantile import median

if TYPE_CHECKING:
    from replay_core.measure.figures import PairFigures

Rows = NDArray[Any]
F64 = NDArray[np.float64]
Columns = NDArray[np.intp]

#: What is known of every row, in this order: sums of d, a d, a^2, a^4, d^2; the greatest |d| and |d| / |a|.
LINES = ("d", "ad", "a2", "a4", "d2", "max", "max_rel")
_D, _AD, _A2, _A4, _D2, _MAX, _MAX_REL = range(len(LINES))

#: A row is added up in float32 no further than this: about 60 terms per SIMD lane, an error below 2e-6.
_SEGMENT = 512
#: Below these, squares (and fourth powers) of float32 begin to vanish.
_LEAST_A2, _LEAST_D2 = 1e-13, 1e-30

#: A column is massive when its energy is this many times the median column's: 20 times its size. Those of real
#: models are 50 to 1000 times the rest, and few.
MASSIVE_ENERGY = 400.0
MOST_MASSIVE = 0.02
_FEWEST_COLUMNS, FEWEST_ROWS = 64, 8


class _Buffers(threading.local):
    """Scratch arrays of a thread, by name and type; they grow to the largest chunk seen."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, Any], NDArray[Any]] = {}
        self._shaped: dict[tuple[str, Any, tuple[int, ...]], NDArray[Any]] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        shaped = self._shaped.get((name, dtype, shape))
        if shaped is not None:
            return shaped
        size = math.prod(shape)
        held = self._held.get((name, dtype))
        if held is None or held.size < size:
            held = self._held[name, dtype] = np.empty(size, dtype=dtype)
            self._shaped.clear()
        if len(self._shaped) > 64:
            self._shaped.clear()
        shaped = self._shaped[name, dtype, shape] = held[:size].reshape(shape)
        return shaped


_buffers = _Buffers()


class Sums(Struct):
    """Sums of one chunk: `lines` [len(LINES), R], and per column."""

    lines: F64
    col_d2: F64
    col_a2: F64
    mismatched: int = 0
    row_exp_abs: F64 | None = None

    @property
    def row_max(self) -> F64:
        """The greatest |d| of every row."""
        row_max: F64 = self.lines[_MAX]
        return row_max


class Total(Struct):
    """The sums of all chunks so far."""

    _lines: list[F64] = field(default_factory=list)
    _row_exp_abs: list[F64] = field(default_factory=list)
    _columns: tuple[F64, F64] | None = None
    _columns_agree: bool = True

    def add(self, chunk: Sums) -> None:
        self._lines.append(chunk.lines)
        if chunk.row_exp_abs is not None:
            self._row_exp_abs.append(chunk.row_exp_abs)
        if self._columns is None:
            self._columns = chunk.col_d2, chunk.col_a2
        elif self._columns[0].size != chunk.col_d2.size:
            self._columns_agree = False
        elif self._columns_agree:
            self._columns[0].__iadd__(chunk.col_d2)
            self._columns[1].__iadd__(chunk.col_a2)

    def fill(self, pair: PairFigures) -> None:
        """Put what was added up into a pair's figures."""
        if not self._lines:
            return
        lines = np.concatenate(self._lines, axis=1)
        for name, line in zip(LINES, lines, strict=True):
            setattr(pair.rows, name, line)
        if self._columns is not None and self._columns_agree:
            pair.columns.d2, pair.columns.a2 = self._columns
        with np.errstate(over="ignore"):
            total = pair.total
            total.d, total.ad, total.a2, total.a4, total.d2 = lines[:_MAX].sum(axis=1).tolist()
            if self._row_exp_abs:
                pair.rows.exp_abs = np.concatenate(self._row_exp_abs)
                total.exp_abs = float(pair.rows.exp_abs.sum())
        # Of the pair itself the greatest is known, exactly and with its place.
        pair.max_abs = pair.max_abs or float(lines[_MAX].max())
        pair.max_rel = float(lines[_MAX_REL].max())


def massive_columns(a_RC: Rows) -> Columns:
    """Columns of a that outweigh all others many times over, in its first chunk."""
    rows, columns = a_RC.shape
    nothing: Columns = np.zeros(0, dtype=np.intp)
    if columns < _FEWEST_COLUMNS or rows < FEWEST_ROWS:
        return nothing
    few = a_RC[:: max(1, rows // FEWEST_ROWS)][:FEWEST_ROWS].astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        # The third smallest of eight: one huge element does not make its column massive, nor does half a pad.
        energy = np.square(_third_smallest(np.abs(few)))
    if not np.isfinite(energy).all():
        return nothing
    typical = median(energy)
    found = np.flatnonzero(energy > MASSIVE_ENERGY * typical) if typical else nothing
    return found if found.size <= max(1, MOST_MASSIVE * columns) else nothing


def _third_smallest(few_RC: Rows) -> Rows:
    """Of each column; NaN counts as larger than all.

    By exchanges of whole rows: numpy sorts so short columns ten times as slowly.
    """
    rows = list(few_RC)
    for turn in range(3):
        for row in range(len(rows) - 1, turn, -1):
            rows[row - 1], rows[row] = np.minimum(rows[row - 1], rows[row]), np.maximum(rows[row - 1], rows[row])
    third = rows[2]
    return third if np.isfinite(third).all() else np.asarray(np.sort(few_RC, axis=0)[2])


def smooth_sums(a_RC: Rows, b_RC: Rows, massive: Columns) -> tuple[Sums, Sums | None] | None:
    """Sums of two chunks of floats; None when something in them is not finite or too small or large to be squared."""
    in_single = a_RC.dtype.itemsize == b_RC.dtype.itemsize == 2
    with np.errstate(all="ignore"):
        total, rest = _natively(a_RC, b_RC, massive) or _by_numpy(a_RC, b_RC, massive)
        are_right = are_held(total, rest, massive, a_RC.__getitem__ if in_single else None)
    return (total, rest) if are_right else None


def are_held(
    total: Sums,
    rest: Sums | None,
    massive: Columns,
    rows: Callable[[NDArray[np.intp]], Rows] | None,
    step: int = 1 << 20,
) -> bool:
    """Whether everything was finite, and nothing was lost to what float32 cannot hold.

    rows: rows of a by their numbers, where sums ran in float32; `step` are looked at together.
    """
    if not math.isfinite(total.lines[_A4 : _D2 + 1].sum()):
        return False
    return rows is None or not _vanishes((total if rest is None else rest).lines, rows, massive, step)


def _by_numpy(a_RC: Rows, b_RC: Rows, massive: Columns) -> tuple[Sums, Sums | None]:
    x, y = _converted(a_RC, b_RC)
    d = np.subtract(y, x, out=y)
    mismatched = int(np.count_nonzero(np.not_equal(d, 0, out=_buffers.take("differs", d.shape, np.bool_))))
    total, rest = _measured(x, d, massive)
    total.mismatched = mismatched
    return total, rest


def _natively(a_RC: Rows, b_RC: Rows, massive: Columns) -> tuple[Sums, Sums | None] | None:
    """The same by the kernel, four times as fast; None where there is none for these."""
    found = pair_lines(a_RC, b_RC, spans_between(massive, a_RC.shape[1]))
    if found is None:
        return None
    if not massive.size:
        return Sums(*found), None
    x_RM, y_RM = (side[:, massive].astype(np.float64) for side in (a_RC, b_RC))
    return with_massive(Sums(*found), x_RM, y_RM, massive)


def with_massive(rest: Sums, x_RM: F64, y_RM: F64, massive: Columns) -> tuple[Sums, Sums | None]:
    """Sums of all columns, from those of the others and both sides of the massive ones, and those of the others."""
    if not massive.size:
        return rest, None
    x, d = x_RM[None].copy(), (y_RM - x_RM)[None]
    differ = int(np.count_nonzero(d))
    total = _joined(rest, _plain(x, d), massive)
    total.mismatched = rest.mismatched + differ
    return total, rest


def sums(x_RC: F64, d_RC: F64, massive: Columns) -> tuple[Sums, Sums | None]:
    """Sums of a chunk of finite doubles and its differences; neither is changed."""
    with np.errstate(all="ignore"):
        return _measured(x_RC[None].copy(), d_RC[None].copy(), massive)


def _converted(a_RC: Rows, b_RC: Rows) -> tuple[Rows, Rows]:
    """Both as [P, R, C] in buffers of one type: float32 where both have two bytes, else float64."""
    rows, columns = a_RC.shape
    dtype: Any = np.float32 if a_RC.dtype.itemsize == b_RC.dtype.itemsize == 2 else np.float64
    paired = columns % 2 == 0 and sys.byteorder == "little" and all(_is_bfloat16(side.dtype) for side in (a_RC, b_RC))
    shape = (2, rows, columns // 2) if paired else (1, rows, columns)
    x, y = _buffers.take("x", shape, dtype), _buffers.take("y", shape, dtype)
    for side, out in ((a_RC, x), (b_RC, y)):
        # bf16 is the upper half of an fp32; ml_dtypes' own cast takes several times as long.
        bits = out.view(np.uint32)
        if paired:
            pairs = np.ascontiguousarray(side).view(np.uint32)
            np.left_shift(pairs, 16, out=bits[0])
            np.bitwise_and(pairs, _UPPER, out=bits[1])
        elif dtype is np.float32 and _is_bfloat16(side.dtype):
            np.copyto(bits[0], side.view(np.uint16))
            np.left_shift(bits, 16, out=bits)
        else:
            np.copyto(out[0], side)
    return x, y


_UPPER = np.uint32(0xFFFF0000)


@cache
def _is_bfloat16(dtype: np.dtype[Any]) -> bool:
    return str(dtype) == "bfloat16"


def _vanishes(lines: F64, rows: Callable[[NDArray[np.intp]], Rows], massive: Columns, step: int) -> bool:
    """Whether squares of some row were lost below what float32 can hold."""
    least = lines[_A2 : _D2 + 1].min(axis=1, initial=math.inf)
    if least[0] >= _LEAST_A2 and least[-1] >= _LEAST_D2:
        return False
    if bool(((lines[_D2] < _LEAST_D2) & (lines[_MAX] > 0)).any()):
        return True
    small = np.flatnonzero(lines[_A2] < _LEAST_A2)
    for start in range(0, small.size, step):
        few = rows(small[start : start + step]).astype(np.float32)
        few[:, massive] = 0
        if few.any():
            return True
    return False


def _measured(x: Rows, d: Rows, massive: Columns) -> tuple[Sums, Sums | None]:
    """Sums over x and d = y - x, both used up. Massive columns are emptied in both, and added up apart."""
    if not massive.size:
        return _plain(x, d), None
    plane, place = massive % x.shape[0], massive // x.shape[0]
    heavy = _plain(*(side[plane, :, place].T[None].astype(np.float64) for side in (x, d)))
    for side in (x, d):
        side[plane, :, place] = 0
    rest = _plain(x, d)
    return _joined(rest, heavy, massive), rest


def _joined(rest: Sums, heavy: Sums, massive: Columns) -> Sums:
    """Sums of all columns, of those of the massive ones and of the others."""
    lines = np.concatenate((rest.lines[:_MAX] + heavy.lines[:_MAX], np.maximum(rest.lines, heavy.lines)[_MAX:]))
    total = Sums(lines, rest.col_d2.copy(), rest.col_a2.copy())
    total.col_d2[massive], total.col_a2[massive] = heavy.col_d2, heavy.col_a2
    return total


def _plain(x: Rows, d: Rows) -> Sums:
    """Everything of one chunk [P, R, C]; x and d are used up, each step leaves what the next ones need."""
    planes, rows, columns = x.shape
    x_segments, d_segments = _segments(x), _segments(d)
    parts = _buffers.take("parts", (_MAX, planes, rows, -(-columns // _SEGMENT)), x.dtype.type)
    _add_up(parts[_D], d_segments)
    _add_up(parts[_AD], x_segments, d_segments)
    _add_up(parts[_D2], d_segments, d_segments)
    col_d2 = np.einsum("prc,prc->pc", d, d)
    lines = np.empty((len(LINES), rows))
    lines[_MAX] = _greatest(np.abs(d, out=d))
    # 0 / 0 is no difference (fmax passes over NaN), d / 0 is infinitely much.
    np.divide(d, x, out=d)
    lines[_MAX_REL] = np.fmax(_greatest(np.abs(d, out=d)), 0)
    np.multiply(x, x, out=x)
    _add_up(parts[_A2], x_segments)
    _add_up(parts[_A4], x_segments, x_segments)
    col_a2 = np.add.reduce(x, axis=1)
    np.add.reduce(parts, axis=(1, 3), dtype=np.float64, out=lines[:_MAX])
    return Sums(lines, col_d2.T.astype(np.float64).reshape(-1), col_a2.T.astype(np.float64).reshape(-1))


def _greatest(values: Rows) -> Rows:
    """The greatest of every row, NaN passed over."""
    folded = values[0]
    if len(values) == 2:
        # A reduction costs by the row: half the values are dealt with before.
        folded = np.fmax(values[0], values[1], out=_buffers.take("folded", folded.shape, values.dtype.type))
    return np.asarray(np.fmax.reduce(folded, axis=1))


def _dots(left: Rows, right: Rows, out: Rows) -> None:
    """Dot products along the last axis."""
    if _HAS_VECDOT:
        # Row by row, so a BLAS does not wake its threads, as it would for @: beside a busy trainer 100 x slower.
        np.vecdot(left, right, out=out)
    else:
        np.einsum("prsc,prsc->prs", left, right, out=out)


_HAS_VECDOT = hasattr(np, "vecdot")  # numpy 2; a third faster than einsum


def _segments(values: Rows) -> list[Rows]:
    """Every row of [P, R, C] cut in segments [P, R, S, ...], what is left over behind them; nothing is copied."""
    planes, rows, columns = values.shape
    whole = columns - columns % _SEGMENT
    cut = []
    if whole:
        cut.append(values[:, :, :whole].reshape(planes, rows, -1, _SEGMENT))
    if whole < columns:
        cut.append(values[:, :, None, whole:])
    return cut


def _add_up(out: Rows, left: list[Rows], right: list[Rows] | None = None) -> None:
    """Sums of segments, or of their products with another's, into [P, R, S]."""
    start = 0
    for number, segments in enumerate(left):
        into = out[:, :, start : start + segments.shape[2]]
        start += segments.shape[2]
        if right is None:
            np.einsum("prsc->prs", segments, out=into)
        else:
            _dots(segments, right[number], out=into)
