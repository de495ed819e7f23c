"""One chunked pass over rows that face each other leaves the figures of a pair. A is the baseline, d = b - a.

`measure/sums.py` does the arithmetic of one chunk, `measure/figures.py` holds what comes out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replay_core.measure.equality import is_plain_float, unequal, unequal_bits
from replay_core.measure.figures import F64, Element, PairFigures
from replay_core.measure.integers import exact_difference
from replay_core.measure.statistics import as_reals
from replay_core.measure.sums import Sums, Total, massive_columns, smooth_sums, sums

Rows = NDArray[Any]


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
    return Pass(exact=exact, logprobs=logprobs, bitwise=bitwise, limits=limits).over(chunks)


class Pass:
    """One pass over the rows of a pair, chunk by chunk or in one."""

    def __init__(
        self,
        *,
        exact: bool = False,
        logprobs: bool = False,
        bitwise: bool = False,
        limits: tuple[float, float] | None = None,
    ) -> None:
        self.exact, self.logprobs, self.bitwise, self.limits = exact, logprobs, bitwise, limits
        self.pair = PairFigures(beyond=None if limits is None else 0, limits=limits)
        self.total, self.rest = Total(), Total()
        self.massive: NDArray[np.intp] | None = None
        self.start = 0

    def over(self, chunks: Iterable[tuple[Rows, Rows]]) -> PairFigures:
        for a_RC, b_RC in chunks:
            if not a_RC.size:
                continue
            self._chunk(a_RC, b_RC)
            self.pair.rows.width = self.pair.rows.width or a_RC.shape[1]
            self.start += a_RC.shape[0]
        return self.finished()

    def finished(self) -> PairFigures:
        """What all rows add up to."""
        pair = self.pair
        self.total.fill(pair)
        if self.massive is not None and self.massive.size:
            pair.massive = tuple(int(column) for column in self.massive)
            # As if those columns were equal and empty.
            rest = pair.rest = PairFigures(compared=pair.compared, mismatched=pair.mismatched)
            rest.total.count, rest.rows.width = pair.total.count, pair.rows.width
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
                self.smooth(*found, a_RC.size, lambda row: (a_RC[row], b_RC[row]))
                return
        self._general(a_RC, b_RC)

    def smooth(self, total: Sums, rest: Sums | None, count: int, rows: Callable[[int], tuple[Rows, Rows]]) -> None:
        """Take `count` finite floats into account by their sums: what is unequal is what has a difference.

        rows: both sides of a row of what was added up, by its number.
        """
        pair = self.pair
        pair.total.count += count
        first, row = None, int(total.row_max.argmax())
        if total.mismatched and pair.first is None:
            first = int((total.row_max > 0).argmax())
            a_C, b_C = rows(first)
            column = int(unequal(a_C, b_C).argmax())
            pair.first = Element((self.start + first, column), float(a_C[column]), float(b_C[column]))
        if total.row_max[row] > pair.max_abs:
            if row != first:
                a_C, b_C = rows(row)
            column = int(np.abs(b_C.astype(np.float64) - a_C.astype(np.float64)).argmax())
            pair.greatest = Element((self.start + row, column), float(a_C[column]), float(b_C[column]))
            pair.max_abs = abs(pair.greatest.b - pair.greatest.a)
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
        whole = exact_difference(a_RC, b_RC)
        if self.limits is not None:
            atol, rtol = self.limits
            with np.errstate(invalid="ignore", over="ignore"):
                past = differs & ~(np.abs(y - x if whole is None else whole) <= atol + rtol * np.abs(x))
            pair.beyond = (pair.beyond or 0) + int(np.count_nonzero(past))
        if not both.all():
            # What is not finite is counted above; sums are over the rest.
            x, y = np.where(both, x, 0.0), np.where(both, y, 0.0)
        pair.total.count += int(np.count_nonzero(both))
        assert self.massive is not None
        with np.errstate(over="ignore", invalid="ignore"):
            d = y - x if whole is None else whole
        if not np.isfinite(d).all():
            # A difference of finite doubles may pass the largest one.
            d = np.nan_to_num(d)
        total, rest = sums(x, d, self.massive)
        row = int(total.row_max.argmax())
        if total.row_max[row] > pair.max_abs:
            column = int(np.abs(d[row]).argmax())
            pair.max_abs, pair.greatest = float(total.row_max[row]), self._element(row, column, x, y, parts)
        if self.logprobs:
            total.row_exp_abs = np.exp(np.minimum(np.abs(d), 700)).sum(axis=1)
            pair.total.minus_d += float(-d.sum())
            pair.total.excess += float((np.exp(np.minimum(d, 700)) - 1 - d).sum())
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
                pair.nonfinite = pair.nonfinite or self._element(*_first(odd), x, y, parts)
        if pair.first is None and differs.any():
            pair.first = self._element(*_first(differs), x, y, parts)

    def _element(self, row: int, column: int, x: Rows, y: Rows, parts: int = 1) -> Element:
        """The element at (row, column) of this chunk; `parts` columns hold one of it."""
        return Element((self.start + row, column // parts), float(x[row, column]), float(y[row, column]))

    def _add(self, total: Sums, rest: Sums | None) -> None:
        self.total.add(total)
        if rest is not None:
            self.rest.add(rest)


def _first(mask: NDArray[np.bool_]) -> tuple[int, int]:
    row, column = np.unravel_index(int(mask.argmax()), mask.shape)
    return int(row), int(column)
