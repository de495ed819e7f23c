"""The figures of a pair of tensors: all a verdict needs, so judging them again with other tolerances reads nothing.

A is the baseline, d = b - a. Formulas: docs/evidence.md#relative-l2.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

from replay_core.measure.precision import Precision

F64 = NDArray[np.float64]


_NOTHING: F64 = np.zeros(0)
_NOTHING.flags.writeable = False


def _none() -> F64:
    return _NOTHING


class Totals(Struct):
    """Sums over the `count` finite elements compared, and what follows from them."""

    count: int = 0
    d: float = 0.0
    d2: float = 0.0
    a2: float = 0.0
    ad: float = 0.0
    a4: float = 0.0
    #: exp|d|, -d and exp(d) - 1 - d, where logprobs were asked for.
    exp_abs: float = 0.0
    minus_d: float = 0.0
    excess: float = 0.0

    @property
    def rms_a(self) -> float:
        return math.sqrt(self.a2 / self.count) if self.count else 0.0

    @property
    def rms_d(self) -> float:
        return math.sqrt(self.d2 / self.count) if self.count else 0.0

    @property
    def b2(self) -> float:
        """||b||^2 = ||a||^2 + 2 <a, d> + ||d||^2."""
        return max(0.0, self.a2 + 2 * self.ad + self.d2)

    @property
    def rel_l2(self) -> float:
        """||d|| / ||a||; infinite when a is all zeros and d is not."""
        return _ratio(math.sqrt(self.d2), math.sqrt(self.a2))

    @property
    def one_minus_cosine(self) -> float:
        """From ||d||^2 less the part that only the lengths explain: a ratio of norms would lose small angles."""
        norms = math.sqrt(self.a2) * math.sqrt(self.b2)
        if norms == 0 or not np.isfinite(norms + self.d2):
            return 0.0 if self.d2 == 0 else 1.0
        # ||b|| - ||a|| = (||b||^2 - ||a||^2) / (||b|| + ||a||), which cancels nothing.
        gap = (2 * self.ad + self.d2) / (math.sqrt(self.a2) + math.sqrt(self.b2))
        return float(max(0.0, (self.d2 - gap * gap) / (2 * norms)))

    @property
    def mean_signed(self) -> float:
        return self.d / self.count if self.count else 0.0

    @property
    def gain(self) -> float:
        """beta = <d, a> / <a, a>: b is about (1 + beta) a."""
        return self.ad / self.a2 if self.a2 and math.isfinite(self.ad) else 0.0

    @property
    def gain_share(self) -> float:
        """Part of ||d||^2 that the gain explains, 0..1."""
        return _share(self.ad, self.a2, self.d2)

    @property
    def bias_share(self) -> float:
        """Part of ||d||^2 that one added constant explains, 0..1."""
        return _share(self.d, self.count, self.d2)

    @property
    def weighty(self) -> float:
        """How many elements carry ||a||^2: (sum a^2)^2 / sum a^4. One huge activation among thousands makes it 1."""
        return _ratio(self.a2, math.sqrt(self.a4)) ** 2 if self.a4 else 0.0

    @property
    def mean_exp_abs(self) -> float:
        """mean exp|d|, NeMo-RL's token_mult_prob_error for logprobs; 1 is perfect."""
        return self.exp_abs / self.count if self.count else 1.0

    @property
    def k1(self) -> float:
        return self.minus_d / self.count if self.count else 0.0

    @property
    def k3(self) -> float:
        return self.excess / self.count if self.count else 0.0


class RowFigures(Struct):
    """Per row, in the order compared: sums of d, d^2, a^2, a d, a^4, and of exp|d| where logprobs were asked for."""

    d: F64 = field(default_factory=_none)
    d2: F64 = field(default_factory=_none)
    a2: F64 = field(default_factory=_none)
    ad: F64 = field(default_factory=_none)
    a4: F64 = field(default_factory=_none)
    exp_abs: F64 = field(default_factory=_none)
    #: The greatest |d| and the greatest |d| / |a|.
    max: F64 = field(default_factory=_none)
    max_rel: F64 = field(default_factory=_none)
    #: Elements of a row (of the first; the end of a long vector may be a shorter one).
    width: int = 0
    #: The sample every row belongs to; None where nobody says.
    sample: NDArray[np.int64] | None = None

    @property
    def rel(self) -> F64:
        """||d|| / ||a|| per row; a row of zeros on both sides is 0."""
        with np.errstate(divide="ignore", invalid="ignore"):
            rel = np.sqrt(self.d2) / np.sqrt(self.a2)
        return np.where(self.d2 == 0, 0.0, rel)

    @property
    def worst(self) -> tuple[int, float] | None:
        """(row, its relative L2) of the row that is furthest off."""
        if not self.d2.size or not self.d2.any():
            return None
        rel = self.rel
        row = int(np.argmax(rel))
        return row, float(rel[row])

    def envelope(self) -> list[tuple[float, float]]:
        """Lines (height, slope) of the rows whose m - (m / r) t is highest for some t >= 0."""
        with np.errstate(divide="ignore", invalid="ignore"):
            slopes = np.where(self.max > 0, self.max / self.max_rel, 0.0)
        order = np.lexsort((slopes, -self.max))
        # A line below another everywhere is neither higher at 0 nor flatter.
        flattest = np.minimum.accumulate(slopes[order])
        candidates = order[np.concatenate(([True], slopes[order][1:] < flattest[:-1]))] if order.size else order
        hull: list[tuple[float, float]] = []
        for height, slope in zip(self.max[candidates].tolist(), slopes[candidates].tolist(), strict=True):
            while len(hull) > 1 and _meets(hull[-2], (height, slope)) <= _meets(hull[-2], hull[-1]):
                hull.pop()
            hull.append((height, slope))
        return hull


class ColumnGains(Struct, frozen=True):
    """Per column of the rows looked at: beta = <d, a> / <a, a>, the norm of a, and how many elements carry it."""

    gain: F64
    norm: F64
    weighty: F64


class ColumnFigures(Struct):
    """Per column: sums of d^2 and a^2; empty where rows are not equally long."""

    d2: F64 = field(default_factory=_none)
    a2: F64 = field(default_factory=_none)
    #: Where a second look at the columns was worth it, what it found.
    gains: ColumnGains | None = None


class Element(Struct, frozen=True):
    """One element of a pair: its (row, column) among those compared, and both values."""

    at: tuple[int, int]
    a: float
    b: float


class PairFigures(Struct):
    """Figures of a pair over the elements compared. Indices are (row, column) of the rows compared."""

    compared: int = 0
    mismatched: int = 0
    nan_a: int = 0
    nan_b: int = 0
    #: Elements non-finite on one side only, or infinite with opposite signs.
    nonfinite_mismatched: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0
    #: The element furthest off, the first that differs, and the first that is finite on one side only.
    greatest: Element | None = None
    first: Element | None = None
    nonfinite: Element | None = None
    total: Totals = field(default_factory=Totals)
    rows: RowFigures = field(default_factory=RowFigures)
    columns: ColumnFigures = field(default_factory=ColumnFigures)
    #: Elements past |d| <= atol + rtol |a|, where such `limits` (atol, rtol) were given.
    beyond: int | None = None
    limits: tuple[float, float] | None = None
    #: Columns that outweigh all others, and the same figures without them; None where there are none.
    massive: tuple[int, ...] = ()
    rest: PairFigures | None = None
    #: What was read off rows and columns before they were let go (`forget_rows`), by whoever reads it.
    kept: dict[Any, Any] = field(default_factory=dict)
    #: What the trailing bits of either side show of the precision its numbers were computed in.
    precision: tuple[Precision, Precision] = field(default_factory=lambda: (Precision(), Precision()))

    @property
    def nans_of_both(self) -> int:
        """How many elements are NaN on both sides alike; 0 where one side alone has some."""
        return self.nan_a if self.nan_a == self.nan_b and not self.nonfinite_mismatched else 0

    @property
    def at_greatest(self) -> float:
        """|a| of the element furthest off; 0 where none is."""
        return abs(self.greatest.a) if self.greatest else 0.0

    def forget_rows(self) -> None:
        """Let go of what is as long as the tensor; a long comparison would else hold it for every tensor.

        What rows were needed for has to be `kept` before. Of |d| <= atol + rtol |a| the bound stays (`most_past`).
        """
        self.kept["lines"] = self.rows.envelope()
        self.rows, self.columns = RowFigures(width=self.rows.width), ColumnFigures()
        if self.rest is not None:
            self.rest.forget_rows()

    def most_past(self, rtol: float) -> float:
        """The most by which any |d| can exceed rtol |a|.

        With m the greatest |d| of a row and r its greatest |d| / |a|, d - rtol |a| <= m (1 - rtol / r).
        """
        lines = self.kept.get("lines")
        if lines is None:
            lines = self.rows.envelope()
        return max([0.0, *(height - slope * rtol for height, slope in lines)])


@lru_cache(maxsize=256)
def equal_figures(compared: int, nans: int = 0) -> PairFigures:
    """The figures of so many elements that are bitwise equal. They are shared: nobody may change them."""
    return PairFigures(compared=compared, nan_a=nans, nan_b=nans)


def _meets(one: tuple[float, float], other: tuple[float, float]) -> float:
    """Where two falling lines, the first the steeper, meet."""
    return (one[0] - other[0]) / (one[1] - other[1])


def _share(product: float, one: float, other: float) -> float:
    """product^2 / (one * other), 0..1; square roots first, or large doubles overflow."""
    if not one or not other:
        return 0.0
    return float(min(1.0, (product / math.sqrt(one) / math.sqrt(other)) ** 2))


def _ratio(top: float, bottom: float) -> float:
    if math.isinf(top):
        return float("inf")
    if bottom:
        return float(top / bottom)
    return 0.0 if not top else float("inf")
