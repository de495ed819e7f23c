"""Tier 2 figures of a pair, on request: how differences are spread. One chunked pass, memory independent of size.

Formulas: d = b - a in float64. ULP distance is the difference of the numbers' places in the order of all numbers of
their dtype (bits of sign and magnitude mapped to an integer), so neighbours are 1 apart, also across zero.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

from replay_core.measure.equality import is_plain_float, unequal
from replay_core.measure.integers import exact_difference
from replay_core.measure.statistics import as_real, as_reals

if TYPE_CHECKING:
    from replay_core.documents.difference import SpreadEntry, UlpEntry
    from replay_core.documents.parts import ExponentBin

Rows = NDArray[Any]
Counts = NDArray[np.int64]

#: |d| is counted by exponent and the first three bits after it: quantiles are off by less than an eighth octave.
_KEY_BITS = 3
_KEYS = 1 << (11 + _KEY_BITS)
QUANTILES = (0.5, 0.9, 0.99, 0.999)
#: Upper ends of the ULP bins: 0 is equal; beyond the last, everything else.
ULP_ENDS = (0, 1, 2, 4, 8, 16, 64, 256, 1024, 1 << 16)
MOST_CELLS = 4096


class Distribution(Struct):
    """How the differences of a pair are spread over the elements compared."""

    compared: int = 0
    finite: int = 0
    mismatched: int = 0
    zeros: int = 0
    max_abs: float = 0.0
    #: Elements whose |d| has that exponent and first bits.
    keys: Counts = field(default_factory=lambda: np.zeros(_KEYS, dtype=np.int64))
    #: Counts per ULP_ENDS and one beyond; None where the two dtypes differ or have no ULP.
    ulp: Counts | None = None
    ulp_max: int = 0
    ulp_dtype: str | None = None
    _moments: list[float] = field(default_factory=lambda: [0.0] * 6)

    def look(self, a_RC: Rows, b_RC: Rows) -> NDArray[np.float64]:
        """Take a chunk into account. Returns its |d|, 0 where either side is not finite."""
        self.mismatched += int(np.count_nonzero(unequal(a_RC, b_RC)))
        x, y = as_reals(a_RC, b_RC)
        whole = exact_difference(a_RC, b_RC)
        both = np.isfinite(x) & np.isfinite(y)
        self.compared += a_RC.size
        if not both.all():
            x, y = np.where(both, x, 0.0), np.where(both, y, 0.0)
        with np.errstate(over="ignore"):
            d: NDArray[np.float64] = np.minimum(np.abs(y - x if whole is None else whole), np.finfo(np.float64).max)
        self.finite += int(np.count_nonzero(both))
        self.max_abs = max(self.max_abs, float(d.max(initial=0.0)))
        there = d[d > 0]
        self.zeros += int(np.count_nonzero(both)) - there.size
        self.keys += np.bincount(there.view(np.int64) >> (52 - _KEY_BITS), minlength=_KEYS)
        self._add_moments(x[both], y[both])
        self._add_ulp(a_RC, b_RC, both)
        return d

    def _add_moments(self, x: NDArray[np.float64], y: NDArray[np.float64]) -> None:
        """Means and products around them, chunk by chunk (Chan)."""
        if not x.size:
            return
        n, mean_x, mean_y, xx, yy, xy = self._moments
        with np.errstate(over="ignore", invalid="ignore"):
            new_x, new_y = float(x.mean()), float(y.mean())
            u, v = x - new_x, y - new_y
            dx, dy, total = new_x - mean_x, new_y - mean_y, n + x.size
            weight = n * x.size / total
            self._moments = [
                total, mean_x + dx * x.size / total, mean_y + dy * x.size / total,
                xx + float(np.einsum("i,i->", u, u)) + dx * dx * weight,
                yy + float(np.einsum("i,i->", v, v)) + dy * dy * weight,
                xy + float(np.einsum("i,i->", u, v)) + dx * dy * weight,
            ]  # fmt: skip

    def _add_ulp(self, a_RC: Rows, b_RC: Rows, both: NDArray[np.bool_]) -> None:
        if a_RC.dtype != b_RC.dtype or not is_plain_float(a_RC):
            return
        if self.ulp is None:
            self.ulp, self.ulp_dtype = np.zeros(len(ULP_ENDS) + 1, dtype=np.int64), a_RC.dtype.name
        distance = ulp_distance(a_RC, b_RC)[both]
        if distance.size:
            self.ulp_max = max(self.ulp_max, int(distance.max()))
            places = np.searchsorted(np.asarray(ULP_ENDS, dtype=np.uint64), distance)
            self.ulp += np.bincount(places.reshape(-1), minlength=len(ULP_ENDS) + 1)

    @property
    def pearson(self) -> float | None:
        """Correlation of a with b; None where one of them is constant."""
        _, _, _, xx, yy, xy = self._moments
        if not (xx > 0 and yy > 0 and math.isfinite(xx) and math.isfinite(yy)):
            return None
        return max(-1.0, min(1.0, xy / math.sqrt(xx) / math.sqrt(yy)))

    def quantile(self, share: float) -> float:
        """The |d| that this share of the finite elements does not pass, up to an eighth octave too large."""
        wanted = math.ceil(share * self.finite)
        if wanted <= self.zeros:
            return 0.0
        key = int(np.searchsorted(np.cumsum(self.keys) + self.zeros, wanted))
        upper = np.array([(key + 1) << (52 - _KEY_BITS)], dtype=np.int64).view(np.float64)[0]
        return min(float(upper), self.max_abs)

    def to_mapping(self) -> SpreadEntry:
        octaves = self.keys.reshape(-1, 1 << _KEY_BITS).sum(axis=1)
        bins: list[ExponentBin] = [
            {"exponent": int(key) - 1023, "count": int(octaves[key])} for key in np.flatnonzero(octaves)
        ]
        ulp: UlpEntry | None = None
        if self.ulp is not None:
            ends: list[int | None] = [*ULP_ENDS, None]
            ulp = {
                "dtype": str(self.ulp_dtype),
                "max": self.ulp_max,
                "bins": [{"up_to": end, "count": int(n)} for end, n in zip(ends, self.ulp, strict=True)],
            }
        return {
            "compared": self.compared,
            "mismatched": self.mismatched,
            "max_abs": self.max_abs,
            "pearson": self.pearson,
            "quantiles": [{"share": share, "abs": self.quantile(share)} for share in QUANTILES],
            "log2_abs": {"zeros": self.zeros, "nonfinite": self.compared_parts - self.finite, "bins": bins},
            "ulp": ulp,
        }

    @property
    def compared_parts(self) -> int:
        """Real numbers compared: a complex element is two."""
        return max(self.compared, self.finite)


def ulp_distance(a: Rows, b: Rows) -> NDArray[np.uint64]:
    """How many numbers of their dtype lie between a and b, plus one; 0 where they are equal."""
    width = a.dtype.itemsize * 8
    bits = np.dtype(f"i{a.dtype.itemsize}")
    places = []
    for side in (a, b):
        raw = np.ascontiguousarray(side).view(bits).astype(np.int64)
        magnitude = raw & ((1 << (width - 1)) - 1)
        places.append(np.where(raw < 0, -magnitude, magnitude))
    one, other = places
    # As unsigned numbers a difference of opposite signs cannot overflow.
    return np.where(
        one > other, one.view(np.uint64) - other.view(np.uint64), other.view(np.uint64) - one.view(np.uint64)
    )


class Stretch(Struct):
    """A stretch of rows or columns of the strip: [start, end), the greatest |d| in it, and ||d|| / ||a||."""

    start: int
    end: int
    #: The row or column of the greatest |d|; the first where all are equal.
    at: int
    max_abs: float = 0.0
    sum_d2: float = 0.0
    sum_a2: float = 0.0

    @property
    def rel_l2(self) -> float:
        if not self.sum_d2:
            return 0.0
        return math.sqrt(self.sum_d2 / self.sum_a2) if self.sum_a2 else math.inf


def spread(
    chunks: Iterable[tuple[Rows, Rows]], length: int, cells: int, *, by_column: bool = False
) -> tuple[Distribution, list[Stretch]]:
    """The distribution over chunks of paired rows [r, c], and the strip of `length` rows (or columns) in cells.

    Args:
        length: rows of all chunks together, or columns of a chunk.
        cells: how many cells at most.
    """
    cells = max(1, min(cells, length, MOST_CELLS))
    bounds = [length * number // cells for number in range(cells + 1)]
    strip = [Stretch(start, end, start) for start, end in itertools.pairwise(bounds)]
    cell_of = np.repeat(np.arange(cells), np.diff(bounds))
    greatest, squares_d, squares_a = np.zeros(cells), np.zeros(cells), np.zeros(cells)
    found, row = Distribution(), 0
    greatest_at = np.array(bounds[:-1])
    axis = 0 if by_column else 1
    for a_RC, b_RC in chunks:
        d = found.look(a_RC, b_RC)
        x = as_real(a_RC.astype(np.complex128) if np.iscomplexobj(b_RC) else a_RC)
        x = np.nan_to_num(x, copy=False, nan=0.0, posinf=0.0, neginf=0.0)
        if d.shape != a_RC.shape:  # complex: real and imaginary part are one place
            d, x = (np.hypot(side[:, ::2], side[:, 1::2]) for side in (d, x))
        with np.errstate(over="ignore"):
            parts = d.max(axis=axis), np.einsum("rc,rc->c" if by_column else "rc,rc->r", d, d), (x * x).sum(axis=axis)
        where = cell_of if by_column else cell_of[row : row + a_RC.shape[0]]
        past = np.flatnonzero(parts[0] > greatest[where])
        past = past[np.argsort(parts[0][past], kind="stable")]  # of several in one cell the greatest is written last
        greatest_at[where[past]] = past + (0 if by_column else row)
        np.maximum.at(greatest, where, parts[0])
        np.add.at(squares_d, where, parts[1])
        np.add.at(squares_a, where, parts[2])
        row += a_RC.shape[0]
    for number, cell in enumerate(strip):
        cell.max_abs, cell.sum_d2, cell.sum_a2 = (float(of[number]) for of in (greatest, squares_d, squares_a))
        cell.at = int(greatest_at[number])
    return found, strip
