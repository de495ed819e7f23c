"""Tier 1 figures of a pair: one chunked pass over rows that face each other. A is the baseline, d = b - a.

The figures hold all a verdict needs, so judging them again with other tolerances reads nothing.
Formulas: docs/evidence.md#relative-l2. `measure/sums.py` does the arithmetic of one chunk.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replay_core.measure.equality import is_plain_float, unequal, unequal_bits
from replay_core.measure.precision import Precision
from replay_core.measure.statistics import as_reals
from replay_core.measure.sums import Sums, Total, massive_columns, smooth_sums, sums

Rows = NDArray[Any]
F64 = NDArray[np.float64]

#: Columns are only added up where every chunk has as many, and no more than this.
MOST_COLUMNS = 1 << 18


def _none() -> F64:
    return np.zeros(0)


@dataclass(frozen=True, slots=True)
class ColumnGains:
    """Per column of the rows looked at: beta = <d, a> / <a, a>, the norm of a, and how many elements carry it."""

    gain: F64
    norm: F64
    weighty: F64


@dataclass(slots=True)
class PairFigures:
    """Figures of a pair over the elements compared. Indices are (row, column) of the rows compared."""

    compared: int = 0
    mismatched: int = 0
    nan_a: int = 0
    nan_b: int = 0
    #: Elements non-finite on one side only, or infinite with opposite signs.
    nonfinite_mismatched: int = 0
    max_abs: float = 0.0
    max_abs_at: tuple[int, int] | None = None
    max_abs_a: float | None = None
    max_abs_b: float | None = None
    max_rel: float = 0.0
    first_at: tuple[int, int] | None = None
    first_a: float | None = None
    first_b: float | None = None
    nonfinite_at: tuple[int, int] | None = None
    nonfinite_a: float | None = None
    nonfinite_b: float | None = None
    sum_d: float = 0.0
    sum_d2: float = 0.0
    sum_a2: float = 0.0
    sum_ad: float = 0.0
    sum_a4: float = 0.0
    sum_exp_abs: float = 0.0
    sum_k1: float = 0.0
    sum_k3: float = 0.0
    finite: int = 0
    #: Elements past |d| <= atol + rtol |a|, where such `limits` (atol, rtol) were given.
    beyond: int | None = None
    limits: tuple[float, float] | None = None
    #: Elements of a row (of the first; the end of a long vector may be a shorter one).
    row_width: int = 0
    #: Per row: sums of d, d^2, a^2, a d, a^4, and of exp|d| where logprobs were asked for, in the order compared.
    row_d: F64 = field(default_factory=_none)
    row_d2: F64 = field(default_factory=_none)
    row_a2: F64 = field(default_factory=_none)
    row_ad: F64 = field(default_factory=_none)
    row_a4: F64 = field(default_factory=_none)
    row_exp: F64 = field(default_factory=_none)
    #: Per row: the greatest |d| and the greatest |d| / |a|.
    row_max: F64 = field(default_factory=_none)
    row_max_rel: F64 = field(default_factory=_none)
    #: The sample every row belongs to; None where nobody says.
    row_sample: NDArray[np.int64] | None = None
    #: Per column: sums of d^2 and a^2; empty where rows are not equally long.
    col_d2: F64 = field(default_factory=_none)
    col_a2: F64 = field(default_factory=_none)
    #: Where a second look at the columns was worth it, what it found.
    columns: ColumnGains | None = None
    #: Columns that outweigh all others, and the same figures without them; None where there are none.
    massive: tuple[int, ...] = ()
    rest: PairFigures | None = None
    #: What was read off rows and columns before they were let go (`forget_rows`), by whoever reads it.
    kept: dict[Any, Any] = field(default_factory=dict)
    #: What the trailing bits of either side show of the precision its numbers were computed in.
    precision: tuple[Precision, Precision] = field(default_factory=lambda: (Precision(), Precision()))

    def forget_rows(self) -> None:
        """Let go of what is as long as the tensor; a long comparison would else hold it for every tensor.

        What rows were needed for has to be `kept` before. Of |d| <= atol + rtol |a| the bound stays (`most_past`).
        """
        self.kept["lines"] = _envelope(self.row_max, self.row_max_rel)
        for name in ("d", "d2", "a2", "ad", "a4", "exp", "max", "max_rel"):
            setattr(self, f"row_{name}", _none())
        self.row_sample, self.col_d2, self.col_a2, self.columns = None, _none(), _none(), None
        if self.rest is not None:
            self.rest.forget_rows()

    def most_past(self, rtol: float) -> float:
        """The most by which any |d| can exceed rtol |a|.

        With m the greatest |d| of a row and r its greatest |d| / |a|, d - rtol |a| <= m (1 - rtol / r).
        """
        lines = self.kept.get("lines")
        if lines is None:
            lines = _envelope(self.row_max, self.row_max_rel)
        return max([0.0, *(height - slope * rtol for height, slope in lines)])

    @property
    def rms_a(self) -> float:
        return math.sqrt(self.sum_a2 / self.finite) if self.finite else 0.0

    @property
    def sum_b2(self) -> float:
        """||b||^2 = ||a||^2 + 2 <a, d> + ||d||^2."""
        return max(0.0, self.sum_a2 + 2 * self.sum_ad + self.sum_d2)

    @property
    def rel_l2(self) -> float:
        """||d|| / ||a||; infinite when a is all zeros and d is not."""
        return _ratio(math.sqrt(self.sum_d2), math.sqrt(self.sum_a2))

    @property
    def one_minus_cosine(self) -> float:
        """From ||d||^2 less the part that only the lengths explain: a ratio of norms would lose small angles."""
        norms = math.sqrt(self.sum_a2) * math.sqrt(self.sum_b2)
        if norms == 0 or not np.isfinite(norms + self.sum_d2):
            return 0.0 if self.sum_d2 == 0 else 1.0
        # ||b|| - ||a|| = (||b||^2 - ||a||^2) / (||b|| + ||a||), which cancels nothing.
        gap = (2 * self.sum_ad + self.sum_d2) / (math.sqrt(self.sum_a2) + math.sqrt(self.sum_b2))
        return float(max(0.0, (self.sum_d2 - gap * gap) / (2 * norms)))

    @property
    def mean_signed(self) -> float:
        return self.sum_d / self.finite if self.finite else 0.0

    @property
    def gain(self) -> float:
        """beta = <d, a> / <a, a>: b is about (1 + beta) a."""
        return self.sum_ad / self.sum_a2 if self.sum_a2 and math.isfinite(self.sum_ad) else 0.0

    @property
    def gain_share(self) -> float:
        """Part of ||d||^2 that the gain explains, 0..1."""
        return _share(self.sum_ad, self.sum_a2, self.sum_d2)

    @property
    def bias_share(self) -> float:
        """Part of ||d||^2 that one added constant explains, 0..1."""
        return _share(self.sum_d, self.finite, self.sum_d2)

    @property
    def weighty(self) -> float:
        """How many elements carry ||a||^2: (sum a^2)^2 / sum a^4. One huge activation among thousands makes it 1."""
        return _ratio(self.sum_a2, math.sqrt(self.sum_a4)) ** 2 if self.sum_a4 else 0.0

    @property
    def row_rel(self) -> F64:
        """||d|| / ||a|| per row; a row of zeros on both sides is 0."""
        return _rel(self.row_d2, self.row_a2)

    @property
    def col_rel(self) -> F64:
        """||d|| / ||a|| per column."""
        return _rel(self.col_d2, self.col_a2)

    @property
    def worst_row(self) -> tuple[int, float] | None:
        """(row, its relative L2) of the row that is furthest off."""
        if not self.row_d2.size or not self.row_d2.any():
            return None
        rel = self.row_rel
        row = int(np.argmax(rel))
        return row, float(rel[row])

    @property
    def mean_exp_abs(self) -> float:
        """mean exp|d|, NeMo-RL's token_mult_prob_error for logprobs; 1 is perfect."""
        return self.sum_exp_abs / self.finite if self.finite else 1.0

    @property
    def k1(self) -> float:
        return self.sum_k1 / self.finite if self.finite else 0.0

    @property
    def k3(self) -> float:
        return self.sum_k3 / self.finite if self.finite else 0.0


def _envelope(row_max: F64, row_max_rel: F64) -> list[tuple[float, float]]:
    """Lines (height, slope) of the rows whose m - (m / r) t is highest for some t >= 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        slopes = np.where(row_max > 0, row_max / row_max_rel, 0.0)
    order = np.lexsort((slopes, -row_max))
    # A line below another everywhere is neither higher at 0 nor flatter.
    flattest = np.minimum.accumulate(slopes[order])
    candidates = order[np.concatenate(([True], slopes[order][1:] < flattest[:-1]))] if order.size else order
    hull: list[tuple[float, float]] = []
    for height, slope in zip(row_max[candidates].tolist(), slopes[candidates].tolist(), strict=True):
        while len(hull) > 1 and _meets(hull[-2], (height, slope)) <= _meets(hull[-2], hull[-1]):
            hull.pop()
        hull.append((height, slope))
    return hull


def _meets(one: tuple[float, float], other: tuple[float, float]) -> float:
    """Where two falling lines, the first the steeper, meet."""
    return (one[0] - other[0]) / (one[1] - other[1])


def _rel(d2: F64, a2: F64) -> F64:
    with np.errstate(divide="ignore", invalid="ignore"):
        rel = np.sqrt(d2) / np.sqrt(a2)
    return np.where(d2 == 0, 0.0, rel)


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


def figures(
    chunks: Iterable[tuple[Rows, Rows]],
    *,
    exact: bool = False,
    logprobs: bool = False,
    bitwise: bool = False,
    limits: tuple[float, float] | None = None,
) -> PairFigures:
    """Figures over (a, b) chunks of rows [r, c], dtype as stored. A chunk is looked at before the next is asked for.

    Arithmetic is in float64. bf16 and fp16 are added up in float32 as long as nothing under- or overflows there: a
    difference is rounded by 6e-8 at most, and a sum is off by less than 2e-6 of the sum of its magnitudes.

    exact: count mismatches in the tensors' own type (ids, masks, ints); the float figures then only illustrate.
    logprobs: also mean exp|d|, k1 and k3 of B against A, in nats.
    bitwise: elements are equal when their bits are: 0 differs from -0, one NaN from another, 7 from 7.0.
    limits: (atol, rtol): also count the elements past |d| <= atol + rtol |a|.
    """
    return _Pass(exact=exact, logprobs=logprobs, bitwise=bitwise, limits=limits).over(chunks)


class _Pass:
    """One pass over the chunks of a pair."""

    def __init__(self, *, exact: bool, logprobs: bool, bitwise: bool, limits: tuple[float, float] | None) -> None:
        self.exact, self.logprobs, self.bitwise, self.limits = exact, logprobs, bitwise, limits
        self.pair = PairFigures(beyond=None if limits is None else 0, limits=limits)
        self.total, self.rest = Total(), Total()
        self.massive: NDArray[np.intp] | None = None
        self.start = 0

    def over(self, chunks: Iterable[tuple[Rows, Rows]]) -> PairFigures:
        pair = self.pair
        for a_RC, b_RC in chunks:
            if not a_RC.size:
                continue
            self._chunk(a_RC, b_RC)
            pair.row_width = pair.row_width or a_RC.shape[1]
            self.start += a_RC.shape[0]
        self.total.fill(pair)
        if self.massive is not None and self.massive.size:
            pair.massive = tuple(int(column) for column in self.massive)
            # As if those columns were equal and empty.
            rest = pair.rest = PairFigures(compared=pair.compared, mismatched=pair.mismatched, finite=pair.finite)
            rest.row_width = pair.row_width
            self.rest.fill(rest)
        return pair

    def _chunk(self, a_RC: Rows, b_RC: Rows) -> None:
        pair = self.pair
        pair.compared += a_RC.size
        for precision, side in zip(pair.precision, (a_RC, b_RC), strict=True):
            precision.look(side)
        plain = is_plain_float(a_RC) and is_plain_float(b_RC)
        if self.massive is None:
            self.massive = massive_columns(a_RC) if plain and not self.exact else np.zeros(0, dtype=np.intp)
        if plain and not (self.exact or self.logprobs or self.bitwise or self.limits):
            found = smooth_sums(a_RC, b_RC, self.massive)
            if found is not None:
                self._smooth(a_RC, b_RC, *found)
                return
        self._general(a_RC, b_RC)

    def _smooth(self, a_RC: Rows, b_RC: Rows, total: Sums, rest: Sums | None) -> None:
        """A chunk of finite floats: what is unequal is what has a difference."""
        pair = self.pair
        pair.finite += a_RC.size
        if total.mismatched and pair.first_at is None:
            row = int((total.row_max > 0).argmax())
            column = int(unequal(a_RC[row], b_RC[row]).argmax())
            pair.first_at = (self.start + row, column)
            pair.first_a, pair.first_b = float(a_RC[row, column]), float(b_RC[row, column])
        row = int(total.row_max.argmax())
        if total.row_max[row] > pair.max_abs:
            x, y = a_RC[row].astype(np.float64), b_RC[row].astype(np.float64)
            column = int(np.abs(y - x).argmax())
            pair.max_abs_at = (self.start + row, column)
            pair.max_abs_a, pair.max_abs_b = float(x[column]), float(y[column])
            pair.max_abs = abs(pair.max_abs_b - pair.max_abs_a)
        pair.mismatched += total.mismatched
        self._add(total, rest)

    def _general(self, a_RC: Rows, b_RC: Rows) -> None:
        """Any chunk: integers, complex numbers, what is not finite, magnitudes that squares cannot hold."""
        pair = self.pair
        differs = unequal_bits(a_RC, b_RC) if self.bitwise else unequal(a_RC, b_RC)
        pair.mismatched += int(np.count_nonzero(differs))
        parts = 2 if np.iscomplexobj(a_RC) or np.iscomplexobj(b_RC) else 1
        x, y = as_reals(a_RC, b_RC)
        if parts == 2:  # x and y hold real and imaginary parts side by side
            differs = np.repeat(differs, 2, axis=1)
        both = np.isfinite(x) & np.isfinite(y)
        self._odd(x, y, differs, both, parts)
        if self.limits is not None:
            atol, rtol = self.limits
            with np.errstate(invalid="ignore", over="ignore"):
                past = differs & ~(np.abs(y - x) <= atol + rtol * np.abs(x))
            pair.beyond = (pair.beyond or 0) + int(np.count_nonzero(past))
        if not both.all():
            # What is not finite is counted above; sums are over the rest.
            x, y = np.where(both, x, 0.0), np.where(both, y, 0.0)
        pair.finite += int(np.count_nonzero(both))
        assert self.massive is not None
        with np.errstate(over="ignore", invalid="ignore"):
            d = y - x
        if not np.isfinite(d).all():
            # A difference of finite doubles may pass the largest one.
            d = np.nan_to_num(d)
        total, rest = sums(x, d, self.massive)
        row = int(total.row_max.argmax())
        if total.row_max[row] > pair.max_abs:
            column = int(np.abs(d[row]).argmax())
            pair.max_abs, pair.max_abs_at = float(total.row_max[row]), (self.start + row, column // parts)
            pair.max_abs_a, pair.max_abs_b = float(x[row, column]), float(y[row, column])
        if self.logprobs:
            total.row_exp = np.exp(np.minimum(np.abs(d), 700)).sum(axis=1)
            pair.sum_k1 += float(-d.sum())
            pair.sum_k3 += float((np.exp(np.minimum(d, 700)) - 1 - d).sum())
        self._add(total, rest)

    def _odd(self, x: F64, y: F64, differs: NDArray[np.bool_], both: NDArray[np.bool_], parts: int) -> None:
        """Counts NaN and infinities, and notes the first of what is unequal."""
        pair = self.pair
        if not self.exact and not both.all():
            pair.nan_a += int(np.count_nonzero(np.isnan(x)))
            pair.nan_b += int(np.count_nonzero(np.isnan(y)))
            odd = differs & ~both
            if odd.any():
                pair.nonfinite_mismatched += int(np.count_nonzero(odd))
                if pair.nonfinite_at is None:
                    row, column = _first(odd)
                    pair.nonfinite_at = (self.start + row, column // parts)
                    pair.nonfinite_a, pair.nonfinite_b = float(x[row, column]), float(y[row, column])
        if pair.first_at is None and differs.any():
            row, column = _first(differs)
            pair.first_at = (self.start + row, column // parts)
            pair.first_a, pair.first_b = float(x[row, column]), float(y[row, column])

    def _add(self, total: Sums, rest: Sums | None) -> None:
        self.total.add(total)
        if rest is not None:
            self.rest.add(rest)


def _first(mask: NDArray[np.bool_]) -> tuple[int, int]:
    row, column = np.unravel_index(int(mask.argmax()), mask.shape)
    return int(row), int(column)
