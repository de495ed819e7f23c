"""Structured errors: noise is spread evenly and points nowhere; a bug is a factor, a constant, a row, a channel.

Every function takes the figures of a pair and returns how much of such an error it saw, in the unit of its limit, or
None. What is read off rows and columns depends on no limit, so it is kept with the figures and rows need not be.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from replay_core.compare.judging import limits
from replay_core.dtypes import EPS
from replay_core.measure.figures import F64, PairFigures, Totals
from replay_core.measure.quantile import median, quantile

Called = Callable[[float], str]

#: A factor smaller than this is said to be 0: what is left is garbage, whatever digits it has.
NOTHING = 1e-6


class Seen(Struct):
    """What a rule's statistic is, and what is said of it in words where its limit is not part of the sentence."""

    value: float
    text: str = ""
    #: The relative L2 from which on a row is off by too much: rows past it are where to look.
    row_limit: float | None = None


def worst_row(pair: PairFigures, *, is_gradient: bool = False) -> float:
    """Largest ||d|| / ||a|| of a row that carries weight.

    A row that is nothing but cancellation residue (a thousandth of the typical norm) proves nothing by its ratio,
    and a row of a few numbers may cross zero: it is held against the typical row instead of itself. A row of a gradient
    is a sum over all tokens, and rounds as its terms do, not as what they leave: below the typical norm it is asked
    only where it is further off than rows are that carry weight, and below a tenth of it, by far.
    """
    if not pair.rows.d2.any():
        return 0.0
    if pair.rows.width < limits.NARROW_ROW:
        typical = float(pair.rows.a2.mean())
        if not typical:
            return float("inf")
        return float(np.sqrt((pair.rows.d2 / np.maximum(pair.rows.a2, typical)).max()))
    typical = median(pair.rows.a2)
    weight = np.maximum(pair.rows.a2, pair.rows.d2) >= 1e-6 * typical
    if is_gradient:
        heavy = pair.rows.a2 >= limits.SLIGHT_ROW**2 * typical
        usual = max(median(pair.rows.d2), float(pair.rows.d2[heavy].mean()))
        # A row that is gone, or there twice, is off by exactly itself: no rounding is.
        is_itself = (pair.rows.d2 == pair.rows.a2) & (pair.rows.a2 > 0)
        further = np.where(heavy, limits.LIGHT_ROW_OFF, limits.SLIGHT_ROW_OFF)
        weight &= (pair.rows.a2 >= typical) | is_itself | (pair.rows.d2 > further**2 * usual)
    return float(pair.rows.rel[weight].max(initial=0.0))


def gain(pair: PairFigures) -> Seen | None:
    """|beta| where b is a times 1 + beta, as far as one factor explains the difference, and what b is.

    Of two tensors that have nothing to do with each other, the factor 0 explains half of the difference: all of a.
    """
    # An element that outweighs all others (a massive activation) makes its own rounding look like a factor; so do
    # massive channels, which then hold no factor for the rest.
    if min(pair.total.count, pair.total.weighty) < limits.PATTERN_ELEMENTS:
        return None
    both = (pair,) if pair.rest is None else (pair, pair.rest)
    if any(one.total.gain_share < limits.GAIN_SHARE or not _is_of_a(one.total) for one in both):
        return None
    constant = pair.total.bias_share
    if constant >= limits.GAIN_SHARE and constant > pair.total.gain_share + limits.GAIN_BESIDE_BIAS:
        return None
    explained = 100 * pair.total.gain_share
    text = f"b is a times {factor(pair.total.gain)}: one factor explains {explained:.0f}% of the difference"
    return Seen(min(abs(one.total.gain) for one in both), text)


def _is_of_a(total: Totals) -> bool:
    """Whether what the factor leaves of a is most of b; or nothing is left at all."""
    left = total.d2 * (1 - total.gain_share)
    return left <= (1 - limits.GAIN_SHARE) * total.b2 or total.b2 <= NOTHING**2 * total.a2


def bias(pair: PairFigures) -> Seen | None:
    """|c| in rms of a where b is a + c, as far as one constant explains the difference."""
    total = pair.total
    if total.count < limits.PATTERN_ELEMENTS or total.bias_share < limits.GAIN_SHARE:
        return None
    explained = 100 * total.bias_share
    text = f"b is a plus {total.mean_signed:.6g}: one constant explains {explained:.0f}% of the difference"
    is_finite = total.rms_a and math.isfinite(total.mean_signed)
    return Seen(abs(total.mean_signed) / total.rms_a if is_finite else math.inf, text)


class _Parts(Struct, frozen=True):
    """Sums over every row, or over every sample where a row is a number or two."""

    what: str
    count: F64
    d: F64
    d2: F64
    a2: F64
    ad: F64
    a4: F64

    def seen(
        self, size: F64, holds: NDArray[np.bool_], floor: float, few: bool, values: F64, said: tuple[str, Called]
    ) -> Seen | None:
        """The largest limit at which parts of this size that hold a pattern are no chance: too many, or (`few`) moved
        by it far more than the others are: a router's weight or a norm hands its own noise to a row as a factor."""
        if not holds.any():
            return None
        some = self.a2 > 0
        moved = np.where(some, size * np.sqrt(self.a2), 0.0)
        usual = float(np.quantile(moved[some], 1 - limits.MOST_STANDING_OUT, method="lower")) if some.any() else 0.0
        far = holds & few & (moved >= limits.ROW_GAIN_OVER_OTHERS * usual)
        crowd = int(limits.MOST_STANDING_OUT * np.count_nonzero(some))
        sizes = np.sort(size[holds])
        value = max(float(size[far].max(initial=0.0)), float(sizes[-crowd - 1]) if sizes.size > crowd else 0.0)
        if not value:
            return None
        chosen = holds & (size >= min(floor, value))
        if np.count_nonzero(chosen) <= crowd:
            chosen &= far
        return Seen(value, listed(chosen, f"{self.what} {said[0]}", values, said[1]))


def _parts(pair: PairFigures) -> _Parts | None:
    sums = (pair.rows.d, pair.rows.d2, pair.rows.a2, pair.rows.ad, pair.rows.a4)
    if pair.rows.width >= limits.PATTERN_ELEMENTS:
        return _Parts("rows", np.full(pair.rows.d.size, float(pair.rows.width)), *sums)
    if pair.rows.sample is None or not pair.rows.sample.size:
        return None
    count = np.bincount(pair.rows.sample).astype(np.float64) * pair.rows.width
    return _Parts("samples", count, *(np.bincount(pair.rows.sample, one).astype(np.float64) for one in sums))


def _is_explained(pair: PairFigures, row: str) -> bool:
    """Whether one factor or constant of the whole explains the difference: its rows' own say nothing then."""
    return any(seen is not None and seen.value > limits.GAIN_FLOOR[row] for seen in (gain(pair), bias(pair)))


def row_gain(pair: PairFigures, row: str, few: bool) -> Seen | None:
    """|beta| of rows (or samples) that are each a times a factor of their own. `row`: of the tables of limits.

    few: whether some rows' own factor counts where the rest has none. Not in a gradient: a row that lives off one token
    has that token's error for a factor.
    """
    parts = None if pair.total.count < limits.PATTERN_ELEMENTS or _is_explained(pair, row) else _parts(pair)
    if parts is None:
        return None
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        beta = parts.ad / parts.a2
        share = parts.ad**2 / (parts.a2 * parts.d2)
        weighty = parts.a2**2 / parts.a4
        enough = np.where(share >= limits.WHOLE_SHARE, limits.PATTERN_ELEMENTS / 2, limits.PATTERN_ELEMENTS)
        holds = (share >= limits.ROW_GAIN_SHARE) & (weighty >= enough)
        floor = limits.ROW_GAIN_FLOOR[row]
        return parts.seen(np.abs(beta), holds, floor, few, beta, ("are a times a factor", factor))


def row_bias(pair: PairFigures, row: str, few: bool) -> Seen | None:
    """|c|, in the row's rms, of rows (or samples) that are each a plus a constant of their own."""
    parts = None if pair.total.count < limits.PATTERN_ELEMENTS or _is_explained(pair, row) else _parts(pair)
    if parts is None:
        return None
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        mean = parts.d / parts.count
        share = parts.d**2 / (parts.count * parts.d2)
        rms = np.sqrt(parts.a2 / parts.count)
        holds = (share >= limits.ROW_GAIN_SHARE) & (rms > 0) & (parts.count >= limits.PATTERN_ELEMENTS)
        size = np.where(rms > 0, np.abs(mean) / rms, 0.0)
        floor = limits.ROW_GAIN_FLOOR[row]
        return parts.seen(size, holds, floor, few, mean, ("are a plus a constant", "{:.4g}".format))


def listed(chosen: NDArray[np.bool_], what: str, values: F64, called: Called) -> str:
    """How many parts are chosen, and between which values they lie."""
    least, most = called(float(values[chosen].min())), called(float(values[chosen].max()))
    to = f" to {most}" if most != least else ""
    return f"{int(chosen.sum()):,} of {chosen.size:,} {what}: {least}{to}"


def factor(beta: float) -> str:
    """1 + beta in digits that never read 1; 0 where next to nothing is left."""
    if abs(1 + beta) < NOTHING:
        return "0"
    if abs(beta) >= 5e-5:
        return f"{1 + beta:.6g}"
    return f"1 {'-' if beta < 0 else '+'} {abs(beta):.3g}"


def standing_row(pair: PairFigures, row: str, times: float) -> Seen | None:
    """How many times more than a typical row the worst one is off, though below every absolute limit."""
    if pair.rows.width < limits.PATTERN_ELEMENTS:
        return None
    return _standing_out("rows", pair.rows.d2, pair.rows.a2, row, times)


def standing_column(pair: PairFigures, row: str, times: float) -> Seen | None:
    """The same of a column. One of a few numbers has no norm to speak of: one of them may be next to nothing."""
    if pair.rows.width < limits.PATTERN_ELEMENTS or pair.rows.d2.size < limits.PATTERN_ELEMENTS:
        return None
    return _standing_out("columns", pair.columns.d2, pair.columns.a2, row, times)


def _standing_out(what: str, d2: F64, a2: F64, row: str, times: float) -> Seen | None:
    # What could not be squared stands out by other rules.
    there = (a2 > 0) & np.isfinite(a2) & np.isfinite(d2)
    if int(np.count_nonzero(there)) < limits.FEWEST_TYPICAL:
        return None
    rel, norm = np.sqrt(d2[there] / a2[there]), np.sqrt(a2[there])
    # Rows of attention or of a router are off by more where scores are near each other: noise has a tail there.
    typical = quantile(rel, 0.5 if what == "columns" else 1 - limits.MOST_STANDING_OUT)
    unit = max(typical, limits.STANDING_OUT_FLOOR * limits.GAIN_FLOOR[row] / times)
    size = np.minimum(rel, np.sqrt(d2[there]) / median(norm)) / unit
    value = crowded(size, times)
    if value is None:
        return None
    out = size >= min(times, value)
    text = (
        f"{int(np.count_nonzero(out)):,} of {d2.size:,} {what} stand out: off by up to {float(rel[out].max()):.3g} of "
        f"their norm, the others typically by {typical:.2g}"
    )
    return Seen(value, text, times * unit if what == "rows" else None)


def crowded(size: F64, times: float) -> float | None:
    """The greatest size; None where more than a few reach the limit: then it is no few that stand out."""
    if np.count_nonzero(size >= times) > limits.MOST_STANDING_OUT * size.size:
        return None
    return float(size.max(initial=0.0))


def updated(pair: PairFigures, row: str) -> Seen | None:
    """By how many of its own roundings a stored number is off, where most are off alike: an update, a quantisation."""
    if pair.total.count < limits.FEWEST_UPDATED or pair.total.rel_l2 < limits.LEAST_UPDATE:
        return None
    crest = pair.max_abs / math.sqrt(pair.total.d2 / pair.total.count)
    if crest > limits.MOST_CREST:
        return None
    roundings = pair.max_rel / EPS[row]
    text = (
        f"{100 * pair.mismatched / pair.compared:.3g}% of the elements differ, by up to {roundings:.3g} roundings of "
        f"{row} (up to {limits.MOST_ROUNDINGS:g} allowed), the greatest difference {crest:.2g} times the rms one "
        f"(noise from {limits.MOST_CREST:g} on): an update or a quantisation"
    )
    return Seen(roundings, text)
