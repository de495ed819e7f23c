"""The arithmetic of one chunk of a pair: sums and maxima per row and per column, in buffers that are reused.

A chunk's buffers stay in the processor's cache, and nothing is allocated per chunk: that is most of the speed.
Sums over a chunk run in the buffers' own type, sums over chunks in float64.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from replay_core.measure.pair import PairFigures

Rows = NDArray[Any]
F64 = NDArray[np.float64]
Columns = NDArray[np.intp]

#: A row is added up in float32 no further than this: about 60 terms per SIMD lane, an error below 2e-6.
_SEGMENT = 512
#: Below these, squares (and fourth powers) of float32 begin to vanish.
_LEAST_A2, _LEAST_D2 = 1e-13, 1e-30

#: A column is massive when its energy is this many times the median column's: 20 times its size. Those of real
#: models are 50 to 1000 times the rest, and few.
MASSIVE_ENERGY = 400.0
MOST_MASSIVE = 0.02
_FEWEST_COLUMNS, _FEWEST_ROWS = 64, 8


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


@dataclass(slots=True)
class Sums:
    """Sums of a chunk, or of all chunks so far."""

    mismatched: int = 0
    max_abs: float = 0.0
    max_at: tuple[int, int] | None = None
    row_d: F64 = field(default_factory=lambda: np.zeros(0))
    row_d2: F64 = field(default_factory=lambda: np.zeros(0))
    row_a2: F64 = field(default_factory=lambda: np.zeros(0))
    row_ad: F64 = field(default_factory=lambda: np.zeros(0))
    row_a4: F64 = field(default_factory=lambda: np.zeros(0))
    row_max: F64 = field(default_factory=lambda: np.zeros(0))
    row_max_rel: F64 = field(default_factory=lambda: np.zeros(0))
    row_exp: F64 = field(default_factory=lambda: np.zeros(0))
    col_d2: F64 | None = None
    col_a2: F64 | None = None
    _chunks: list[Sums] = field(default_factory=list)
    _columns_agree: bool = True

    def add(self, chunk: Sums) -> None:
        self._chunks.append(chunk)
        self.max_abs = max(self.max_abs, chunk.max_abs)
        if chunk.col_d2 is None or chunk.col_a2 is None or not self._columns_agree:
            self._columns_agree = False
        elif self.col_d2 is None or self.col_a2 is None:
            self.col_d2, self.col_a2 = chunk.col_d2, chunk.col_a2
        elif self.col_d2.size != chunk.col_d2.size:
            self._columns_agree = False
        else:
            self.col_d2, self.col_a2 = self.col_d2 + chunk.col_d2, self.col_a2 + chunk.col_a2
        chunk.col_d2 = chunk.col_a2 = None

    def fill(self, pair: PairFigures) -> None:
        """Put what was added up into a pair's figures."""
        if not self._chunks:
            return
        for name in ("row_d", "row_d2", "row_a2", "row_ad", "row_a4", "row_max", "row_max_rel", "row_exp"):
            setattr(pair, name, np.concatenate([getattr(chunk, name) for chunk in self._chunks]))
        if self._columns_agree and self.col_d2 is not None and self.col_a2 is not None:
            pair.col_d2, pair.col_a2 = self.col_d2, self.col_a2
        with np.errstate(over="ignore"):
            pair.sum_d2, pair.sum_a2 = float(pair.row_d2.sum()), float(pair.row_a2.sum())
            pair.sum_ad, pair.sum_a4 = float(pair.row_ad.sum()), float(pair.row_a4.sum())
            pair.sum_exp_abs = float(pair.row_exp.sum())
            pair.sum_d = float(pair.row_d.sum())
        # Of the pair itself these are known, exactly and with their place.
        pair.max_abs = pair.max_abs or self.max_abs
        pair.max_rel = pair.max_rel or float(pair.row_max_rel.max(initial=0.0))


def massive_columns(a_RC: Rows) -> Columns:
    """Columns of a that outweigh all others many times over, in its first chunk."""
    rows, columns = a_RC.shape
    nothing: Columns = np.zeros(0, dtype=np.intp)
    if columns < _FEWEST_COLUMNS or rows < _FEWEST_ROWS:
        return nothing
    few = a_RC[:: max(1, rows // _FEWEST_ROWS)][:_FEWEST_ROWS].astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        # The third smallest of eight: one huge element does not make its column massive, nor does half a pad.
        energy = np.square(np.sort(np.abs(few), axis=0)[2])
    if not np.isfinite(energy).all():
        return nothing
    typical = float(np.median(energy))
    found = np.flatnonzero(energy > MASSIVE_ENERGY * typical) if typical else nothing
    return found if found.size <= max(1, MOST_MASSIVE * columns) else nothing


def smooth_sums(a_RC: Rows, b_RC: Rows, massive: Columns) -> tuple[Sums, Sums | None] | None:
    """Sums of two chunks of floats; None when something in them is not finite or too small or large to be squared."""
    halves = a_RC.dtype.itemsize == 2 and b_RC.dtype.itemsize == 2
    dtype = np.float32 if halves else np.float64
    x, y = _converted("x", a_RC, dtype), _converted("y", b_RC, dtype)
    with np.errstate(all="ignore"):
        d = np.subtract(y, x, out=y)
        total, rest = _measured(x, d, massive)
        whole = float(total.row_d2.sum() + total.row_a4.sum())
        if not np.isfinite(whole):
            return None
        if _vanishes(total if rest is None else rest, x, d, dtype):
            return None
    differs = np.not_equal(d, 0, out=_buffers.take("differs", d.shape, np.bool_))
    total.mismatched = int(np.count_nonzero(differs))
    if rest is not None:
        # The massive columns of d were emptied; they are counted from the chunks themselves.
        total.mismatched += int(np.count_nonzero(a_RC[:, massive] != b_RC[:, massive]))
    return total, rest


def sums(x: F64, y: F64, massive: Columns) -> tuple[Sums, Sums | None, F64]:
    """Sums of two chunks of finite doubles, and their difference."""
    with np.errstate(all="ignore"):
        d = y - x
        if not np.isfinite(d).all():
            # A difference of finite doubles may pass the largest one.
            d = np.nan_to_num(d)
        if massive.size:
            x, kept = x.copy(), d.copy()
            total, rest = _measured(x, kept, massive)
        else:
            total, rest = _measured(x, d, massive)
    return total, rest, d


def _converted(name: str, values: Rows, dtype: Any) -> Rows:
    out = _buffers.take(name, values.shape, dtype)
    if values.dtype.name == "bfloat16" and dtype is np.float32:
        # bf16 is the upper half of an fp32: several times faster than ml_dtypes' own cast.
        bits = out.view(np.uint32)
        np.copyto(bits, values.view(np.uint16))
        np.left_shift(bits, 16, out=bits)
    else:
        np.copyto(out, values)
    return out


def _vanishes(found: Sums, x: Rows, d: Rows, dtype: Any) -> bool:
    """Whether squares of some row were lost below what the type can hold."""
    if dtype is not np.float32:
        return False
    for values, squares, least in ((x, found.row_a2, _LEAST_A2), (d, found.row_d2, _LEAST_D2)):
        small = squares < least
        if small.any() and values[small].any():
            return True
    return False


def _measured(x: Rows, d: Rows, massive: Columns) -> tuple[Sums, Sums | None]:
    """Sums over x and d = y - x. Where there are massive columns they are emptied in both, and added up apart."""
    if not massive.size:
        return _plain(x, d), None
    heavy = _plain(x[:, massive].astype(np.float64), d[:, massive].astype(np.float64))
    x[:, massive] = 0
    d[:, massive] = 0
    rest = _plain(x, d)
    total = Sums(max_abs=rest.max_abs, max_at=rest.max_at)
    if heavy.max_abs > rest.max_abs and heavy.max_at is not None:
        row, column = heavy.max_at
        total.max_abs, total.max_at = heavy.max_abs, (row, int(massive[column]))
    for name in ("row_d", "row_d2", "row_a2", "row_ad", "row_a4"):
        setattr(total, name, getattr(rest, name) + getattr(heavy, name))
    total.row_max = np.maximum(rest.row_max, heavy.row_max)
    total.row_max_rel = np.maximum(rest.row_max_rel, heavy.row_max_rel)
    assert rest.col_d2 is not None
    assert rest.col_a2 is not None
    assert heavy.col_d2 is not None
    assert heavy.col_a2 is not None
    total.col_d2, total.col_a2 = rest.col_d2.copy(), rest.col_a2.copy()
    total.col_d2[massive], total.col_a2[massive] = heavy.col_d2, heavy.col_a2
    return total, rest


def _plain(x: Rows, d: Rows) -> Sums:
    squares = _buffers.take("t", x.shape, x.dtype.type)
    found = Sums(row_d=_rows(d))
    found.row_ad = _rows(x, d)
    np.multiply(x, x, out=squares)
    found.row_a2, found.row_a4 = _rows(squares), _rows(squares, squares)
    found.col_a2 = np.add.reduce(squares, axis=0).astype(np.float64)
    np.multiply(d, d, out=squares)
    found.row_d2, found.col_d2 = _rows(squares), np.add.reduce(squares, axis=0).astype(np.float64)
    gap = np.abs(d, out=squares)
    found.row_max = np.maximum.reduce(gap, axis=1).astype(np.float64)
    row = int(found.row_max.argmax())
    found.max_abs = float(found.row_max[row])
    if found.max_abs > 0:
        found.max_at = (row, int(gap[row].argmax()))
        # 0 / 0 is no difference; d / 0 is infinitely much.
        np.divide(d, x, out=squares)
        greatest, least = np.fmax.reduce(squares, axis=1), np.fmin.reduce(squares, axis=1)
        found.row_max_rel = np.fmax(np.fmax(greatest, -least), 0.0).astype(np.float64)
    else:
        found.row_max_rel = np.zeros(x.shape[0])
    return found


def _rows(values: Rows, others: Rows | None = None) -> F64:
    """Row sums of values, or of their products with others; long rows segment by segment.

    einsum, not @: a BLAS dot wakes its threads, and beside a busy trainer that is 100 x slower.
    """
    rows, columns = values.shape
    whole = columns - columns % _SEGMENT
    summed = None
    for start, end in ((0, whole), (whole, columns)):
        if end == start:
            continue
        parts = [side if end - start == columns else side[:, start:end]
                 for side in ((values,) if others is None else (values, others))]  # fmt: skip
        if end - start > _SEGMENT:
            parts = [part.reshape(-1, _SEGMENT) for part in parts]
        part = np.einsum("rc->r", *parts) if others is None else np.einsum("rc,rc->r", *parts)
        part = part.reshape(rows, -1).sum(axis=1, dtype=np.float64)
        summed = part if summed is None else summed + part
    return np.zeros(rows) if summed is None else summed
