"""Tier 1 figures of a pair: one chunked pass over rows that face each other. A is the baseline, d = b - a.

The figures hold all a verdict needs, so judging them again with other tolerances reads nothing.
Formulas: compare.md section 5; 1 - cosine follows from sum d^2 because the ratio of norms loses it.
"""

from __future__ import annotations

import math
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
    sum_a4: float = 0.0
    sum_exp_abs: float = 0.0
    sum_k1: float = 0.0
    sum_k3: float = 0.0
    finite: int = 0
    #: Elements of a row (of the first; the end of a long vector may be a shorter one).
    row_width: int = 0
    #: Per row: sums of d^2, a^2, a d, a^4, and of exp|d| where logprobs were asked for, in the order compared.
    row_d2: F64 = field(default_factory=lambda: np.zeros(0))
    row_a2: F64 = field(default_factory=lambda: np.zeros(0))
    row_ad: F64 = field(default_factory=lambda: np.zeros(0))
    row_a4: F64 = field(default_factory=lambda: np.zeros(0))
    row_exp: F64 = field(default_factory=lambda: np.zeros(0))

    @property
    def rms_a(self) -> float:
        return float(np.sqrt(self.sum_a2 / self.finite)) if self.finite else 0.0

    @property
    def rel_l2(self) -> float:
        """||d|| / ||a||; infinite when a is all zeros and d is not."""
        return _ratio(math.sqrt(self.sum_d2), math.sqrt(self.sum_a2))

    @property
    def one_minus_cosine(self) -> float:
        norms = math.sqrt(self.sum_a2) * math.sqrt(self.sum_b2)
        if norms == 0 or not np.isfinite(norms + self.sum_d2):
            return 0.0 if self.sum_d2 == 0 else 1.0
        gap = math.sqrt(self.sum_a2) - math.sqrt(self.sum_b2)
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
    chunks: Iterable[tuple[Rows, Rows]], *, exact: bool = False, logprobs: bool = False, bitwise: bool = False
) -> PairFigures:
    """Figures over (a, b) chunks of rows [r, c], dtype as stored.

    exact: count mismatches in the tensors' own type (ids, masks, ints); the float figures then only illustrate.
    logprobs: also mean exp|d|, k1 and k3 of B against A, in nats.
    bitwise: elements are equal when their bits are: 0 differs from -0, one NaN from another, 7 from 7.0.
    """
    pair = PairFigures()
    rows: list[tuple[F64, ...]] = []
    start = 0
    for a_RC, b_RC in chunks:
        unequal = _unequal_bits(a_RC, b_RC) if bitwise else _unequal(a_RC, b_RC)
        x, y = as_real(a_RC), as_real(b_RC)
        pair.compared += a_RC.size
        pair.mismatched += int(unequal.sum())
        parts = 2 if np.iscomplexobj(a_RC) else 1
        if parts == 2:  # x and y hold real and imaginary parts side by side
            unequal = np.repeat(unequal, 2, axis=1)
        _count(pair, x, y, unequal, start, exact, parts)
        both = np.isfinite(x) & np.isfinite(y)
        if not both.all():
            # What is not finite is counted above; sums are over the rest.
            x, y = np.where(both, x, 0.0), np.where(both, y, 0.0)
        pair.finite += int(both.sum())
        with np.errstate(over="ignore"):
            d = y - x
            d2, a2 = d * d, x * x
            _sums(pair, y, d, logprobs)
            row_exp = np.exp(np.minimum(np.abs(d), 700)).sum(axis=1) if logprobs else np.zeros(0)
            # einsum, not @: a BLAS dot wakes its threads, and beside a busy trainer that is 100 x slower.
            products = (np.einsum("rc,rc->r", x, d), np.einsum("rc,rc->r", a2, a2))
            rows.append((d2.sum(axis=1), a2.sum(axis=1), *products, row_exp))
        pair.row_width = pair.row_width or a_RC.shape[1]
        start += a_RC.shape[0]
    if rows:
        per_row = (np.concatenate(parts) for parts in zip(*rows, strict=True))
        pair.row_d2, pair.row_a2, pair.row_ad, pair.row_a4, pair.row_exp = per_row
        pair.sum_d2, pair.sum_a2 = float(pair.row_d2.sum()), float(pair.row_a2.sum())
        pair.sum_ad, pair.sum_a4 = float(pair.row_ad.sum()), float(pair.row_a4.sum())
        pair.sum_exp_abs = float(pair.row_exp.sum())
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
    if differs.any() and a.dtype.kind not in "iub" and b.dtype.kind not in "iub":
        differs &= ~(_isnan(a) & _isnan(b))
    return differs


def _isnan(values: Rows) -> NDArray[np.bool_]:
    missing: NDArray[np.bool_] = np.isnan(values if values.dtype.kind in "fc" else values.astype(np.float64))
    return missing


def _unequal_bits(a: Rows, b: Rows) -> NDArray[np.bool_]:
    a, b = (values.astype(values.dtype.newbyteorder("="), order="C") for values in (a, b))
    if a.dtype != b.dtype:
        return np.ones(a.shape, dtype=np.bool_)
    raw_a, raw_b = (values.view(np.uint8).reshape(*values.shape, -1) for values in (a, b))
    return np.asarray((raw_a != raw_b).any(axis=-1))


def _count(pair: PairFigures, x: F64, y: F64, unequal: NDArray[np.bool_], start: int, exact: bool, parts: int) -> None:
    if not exact:
        nan_x, nan_y = np.isnan(x), np.isnan(y)
        pair.nan_a += int(nan_x.sum())
        pair.nan_b += int(nan_y.sum())
        odd = unequal & ~(np.isfinite(x) & np.isfinite(y))
        if odd.any():
            pair.nonfinite_mismatched += int(odd.sum())
            if pair.nonfinite_at is None:
                row, column = _first(odd)
                pair.nonfinite_at = (start + row, column // parts)
                pair.nonfinite_a, pair.nonfinite_b = float(x[row, column]), float(y[row, column])
    if pair.first_at is None and unequal.any():
        row, column = _first(unequal)
        pair.first_at = (start + row, column // parts)
        pair.first_a, pair.first_b = float(x[row, column]), float(y[row, column])
    with np.errstate(invalid="ignore", over="ignore"):
        gap = np.where(unequal, np.abs(y - x), 0.0)
    if not np.isfinite(gap).all():
        # What is not finite is counted apart; a difference of finite doubles may still pass the largest one.
        gap = np.where(np.isfinite(x) & np.isfinite(y), np.minimum(gap, np.finfo(np.float64).max), 0.0)
    if gap.size and gap.max() > pair.max_abs:
        row, column = (int(part) for part in np.unravel_index(int(gap.argmax()), gap.shape))
        pair.max_abs = float(gap[row, column])
        pair.max_abs_at = (start + row, column // parts)
        pair.max_abs_a, pair.max_abs_b = float(x[row, column]), float(y[row, column])
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        relative = np.where(gap > 0, gap / np.abs(x), 0.0)
    if relative.size:
        pair.max_rel = max(pair.max_rel, float(np.nanmax(relative)))


def _first(mask: NDArray[np.bool_]) -> tuple[int, int]:
    row, column = np.unravel_index(int(mask.argmax()), mask.shape)
    return int(row), int(column)


def _sums(pair: PairFigures, y: F64, d: F64, logprobs: bool) -> None:
    pair.sum_d += float(d.sum())
    pair.sum_b2 += float(np.einsum("rc,rc->", y, y))
    if logprobs:
        pair.sum_k1 += float(-d.sum())
        pair.sum_k3 += float((np.exp(np.minimum(d, 700)) - 1 - d).sum())
