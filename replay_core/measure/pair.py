"""Tier 1 figures of a pair: one chunked pass over rows that face each other. A is the baseline, d = b - a.

The figures hold all a verdict needs, so judging them again with other tolerances reads nothing.
Formulas: compare.md section 5; 1 - cosine follows from sum d^2 because the ratio of norms loses it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replay_core.measure.statistics import as_real

Rows = NDArray[Any]
F64 = NDArray[np.float64]


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
    sum_b2: float = 0.0
    sum_ad: float = 0.0
    sum_exp_abs: float = 0.0
    sum_k1: float = 0.0
    sum_k3: float = 0.0
    finite: int = 0
    #: Per row: sum d^2 and sum a^2, in the order compared.
    row_d2: F64 = field(default_factory=lambda: np.zeros(0))
    row_a2: F64 = field(default_factory=lambda: np.zeros(0))
    column_d2: F64 = field(default_factory=lambda: np.zeros(0))
    column_a2: F64 = field(default_factory=lambda: np.zeros(0))

    @property
    def rms_a(self) -> float:
        return float(np.sqrt(self.sum_a2 / self.finite)) if self.finite else 0.0

    @property
    def rel_l2(self) -> float:
        """||d|| / ||a||; infinite when a is all zeros and d is not."""
        return _ratio(np.sqrt(self.sum_d2), np.sqrt(self.sum_a2))

    @property
    def one_minus_cosine(self) -> float:
        norms = np.sqrt(self.sum_a2) * np.sqrt(self.sum_b2)
        if norms == 0:
            return 0.0 if self.sum_d2 == 0 else 1.0
        gap = np.sqrt(self.sum_a2) - np.sqrt(self.sum_b2)
        return float(max(0.0, (self.sum_d2 - gap * gap) / (2 * norms)))

    @property
    def mean_signed(self) -> float:
        return self.sum_d / self.finite if self.finite else 0.0

    @property
    def gain(self) -> float:
        """beta = <d, a> / <a, a>: b is about (1 + beta) a."""
        return self.sum_ad / self.sum_a2 if self.sum_a2 else 0.0

    @property
    def gain_share(self) -> float:
        """Part of ||d||^2 that the gain explains, 0..1."""
        return min(1.0, self.sum_ad**2 / (self.sum_a2 * self.sum_d2)) if self.sum_a2 and self.sum_d2 else 0.0

    @property
    def row_rel(self) -> F64:
        """||d|| / ||a|| per row; a row of zeros on both sides is 0."""
        with np.errstate(divide="ignore", invalid="ignore"):
            rel = np.sqrt(self.row_d2) / np.sqrt(self.row_a2)
        return np.where(self.row_d2 == 0, 0.0, rel)

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


def _ratio(top: float, bottom: float) -> float:
    if bottom:
        return float(top / bottom)
    return 0.0 if not top else float("inf")


def figures(chunks: Iterable[tuple[Rows, Rows]], *, exact: bool = False, logprobs: bool = False) -> PairFigures:
    """Figures over (a, b) chunks of rows [r, c], dtype as stored.

    exact: count mismatches in the tensors' own type (ids, masks, ints); the float figures then only illustrate.
    logprobs: also mean exp|d|, k1 and k3 of B against A, in nats.
    """
    pair = PairFigures()
    rows_d2: list[F64] = []
    rows_a2: list[F64] = []
    start = 0
    for a_RC, b_RC in chunks:
        unequal = _unequal(a_RC, b_RC)
        x, y = as_real(a_RC), as_real(b_RC)
        if x.shape != a_RC.shape:  # complex: an element is unequal when either part is
            unequal = np.repeat(unequal, 2, axis=1)
        pair.compared += a_RC.size
        _count(pair, x, y, unequal, start, exact)
        both = np.isfinite(x) & np.isfinite(y)
        if not both.all():
            # What is not finite is counted above; sums are over the rest.
            x, y = np.where(both, x, 0.0), np.where(both, y, 0.0)
        pair.finite += int(both.sum())
        with np.errstate(over="ignore"):
            d = y - x
            d2, a2 = d * d, x * x
            _sums(pair, x, y, d, logprobs)
            rows_d2.append(d2.sum(axis=1))
            rows_a2.append(a2.sum(axis=1))
            columns_d2, columns_a2 = d2.sum(axis=0), a2.sum(axis=0)
        pair.column_d2 = columns_d2 if start == 0 else pair.column_d2 + columns_d2
        pair.column_a2 = columns_a2 if start == 0 else pair.column_a2 + columns_a2
        start += a_RC.shape[0]
    if rows_d2:
        pair.row_d2, pair.row_a2 = np.concatenate(rows_d2), np.concatenate(rows_a2)
        pair.sum_d2, pair.sum_a2 = float(pair.row_d2.sum()), float(pair.row_a2.sum())
    return pair


def _unequal(a: Rows, b: Rows) -> NDArray[np.bool_]:
    """Elements that differ, each in its own type: NaN equals NaN, 0 equals -0, 2**63 is not a float."""
    if {a.dtype.kind, b.dtype.kind} == {"i", "u"} and np.dtype(np.uint64) in (a.dtype, b.dtype):
        signed, unsigned = (a, b) if a.dtype.kind == "i" else (b, a)
        differs: NDArray[np.bool_] = (signed < 0) | (signed.astype(np.uint64) != unsigned.astype(np.uint64))
        return differs
    if a.dtype != b.dtype and "V" in (a.dtype.kind, b.dtype.kind):  # ml_dtypes' own kinds
        a, b = a.astype(np.float64), b.astype(np.float64)
    differs = np.asarray(a != b)
    if differs.any():
        differs &= ~(np.isnan(as_real(a)) & np.isnan(as_real(b))) if a.dtype.kind not in "iub" else True
    return differs


def _count(pair: PairFigures, x: F64, y: F64, unequal: NDArray[np.bool_], start: int, exact: bool) -> None:
    pair.mismatched += int(unequal.sum())
    if not exact:
        nan_x, nan_y = np.isnan(x), np.isnan(y)
        pair.nan_a += int(nan_x.sum())
        pair.nan_b += int(nan_y.sum())
        odd = unequal & ~(np.isfinite(x) & np.isfinite(y))
        if odd.any():
            pair.nonfinite_mismatched += int(odd.sum())
            if pair.nonfinite_at is None:
                row, column = _first(odd)
                pair.nonfinite_at = (start + row, column)
                pair.nonfinite_a, pair.nonfinite_b = float(x[row, column]), float(y[row, column])
    if pair.first_at is None and unequal.any():
        row, column = _first(unequal)
        pair.first_at = (start + row, column)
        pair.first_a, pair.first_b = float(x[row, column]), float(y[row, column])
    with np.errstate(invalid="ignore", over="ignore"):
        gap = np.where(unequal, np.abs(y - x), 0.0)
    gap = np.where(np.isfinite(gap), gap, 0.0)
    if gap.size and gap.max() > pair.max_abs:
        row, column = (int(part) for part in np.unravel_index(int(gap.argmax()), gap.shape))
        pair.max_abs = float(gap[row, column])
        pair.max_abs_at = (start + row, column)
        pair.max_abs_a, pair.max_abs_b = float(x[row, column]), float(y[row, column])
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        relative = np.where(gap > 0, gap / np.abs(x), 0.0)
    if relative.size:
        pair.max_rel = max(pair.max_rel, float(np.nanmax(relative)))


def _first(mask: NDArray[np.bool_]) -> tuple[int, int]:
    row, column = np.unravel_index(int(mask.argmax()), mask.shape)
    return int(row), int(column)


def _sums(pair: PairFigures, x: F64, y: F64, d: F64, logprobs: bool) -> None:
    # einsum, not @: a BLAS dot wakes its threads, and beside a busy trainer that is 100 x slower.
    pair.sum_d += float(d.sum())
    pair.sum_b2 += float(np.einsum("rc,rc->", y, y))
    pair.sum_ad += float(np.einsum("rc,rc->", x, d))
    if logprobs:
        pair.sum_exp_abs += float(np.exp(np.minimum(np.abs(d), 700)).sum())
        pair.sum_k1 += float(-d.sum())
        pair.sum_k3 += float((np.exp(np.minimum(d, 700)) - 1 - d).sum())
