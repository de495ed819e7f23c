"""Structured errors: noise is spread evenly and points nowhere; a bug is a factor, a constant, a row, a channel.

Every function takes the figures of a pair and returns the sentence of what it saw, or None. No tolerance a person can
give changes what they see, so it is kept with the figures and rows need not be.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from replay_core.compare.judging import limits, sample
from replay_core.dtypes import EPS
from replay_core.measure.pair import F64, PairFigures


def keep(pair: PairFigures, row: str, *, few: bool = True) -> None:
    """Read off the rows all that a later judgement can ask for, and let them go."""
    for one in (pair, pair.rest):
        if one is not None:
            worst_row(one)
            pattern(one, row, few=few)
            standing_out(one, row, few=few)
            sample.alone(one)
    pair.forget_rows()


def worst_row(pair: PairFigures) -> float:
    """Largest ||d|| / ||a|| of a row that carries weight.

    A row that is nothing but cancellation residue (a thousandth of the typical norm) proves nothing by its ratio,
    and a row of a few numbers may cross zero: it is held against the typical row instead of itself.
    """
    if "worst_row" not in pair.kept:
        pair.kept["worst_row"] = _worst_row(pair)
    return float(pair.kept["worst_row"])


def _worst_row(pair: PairFigures) -> float:
    if not pair.row_d2.any():
        return 0.0
    if pair.row_width < limits.NARROW_ROW:
        typical = float(pair.row_a2.mean())
        if not typical:
            return float("inf")
        return float(np.sqrt((pair.row_d2 / np.maximum(pair.row_a2, typical)).max()))
    weight = np.maximum(pair.row_a2, pair.row_d2) >= 1e-6 * float(np.median(pair.row_a2))
    return float(pair.row_rel[weight].max(initial=0.0))


def pattern(pair: PairFigures, row: str, *, few: bool = True) -> str | None:
    """A factor or a constant that explains the difference, of the whole or of some rows. `row`: of the tables.

    few: whether some rows' own factor counts where the rest has none. Not in a gradient: a row that lives off one token
    has that token's error for a factor.
    """
    if ("pattern", row, few) not in pair.kept:
        pair.kept["pattern", row, few] = _pattern(pair, row, few)
    found: str | None = pair.kept["pattern", row, few]
    return found


def _pattern(pair: PairFigures, row: str, few: bool) -> str | None:
    floor = limits.GAIN_FLOOR[row]
    if pair.finite < limits.PATTERN_ELEMENTS:
        return None
    if explains_gain(pair, row):
        return f"b is a times {_factor(pair.gain)}: one factor explains {100 * pair.gain_share:.0f}% of the difference"
    if pair.bias_share >= limits.GAIN_SHARE and abs(pair.mean_signed) >= floor * pair.rms_a:
        return (
            f"b is a plus {pair.mean_signed:.6g}: one constant explains {100 * pair.bias_share:.0f}% of the difference"
        )
    what, parts = _parts(pair)
    if parts is None:
        return None
    floor = limits.ROW_GAIN_FLOOR[row]
    return _scaled(parts, what, floor, few) or _shifted(parts, what, floor, few)


def explains_gain(pair: PairFigures, row: str) -> bool:
    """Whether b is a times one factor, and not by rounding alone."""
    # An element that outweighs all others (a massive activation) makes its own rounding look like a factor; so do
    # massive channels, which then hold no factor for the rest.
    spread = pair.weighty >= limits.PATTERN_ELEMENTS
    both = (pair,) if pair.rest is None else (pair, pair.rest)
    return spread and all(
        one.gain_share >= limits.GAIN_SHARE and abs(one.gain) >= limits.GAIN_FLOOR[row] for one in both
    )


def explains_gradient(pair: PairFigures, row: str, noise: float) -> bool:
    """Whether the one factor of a gradient, where that is what `pattern` saw, is more than the error of few tokens."""
    if not explains_gain(pair, row) or pair.gain_share >= limits.GRADIENT_GAIN_SHARE:
        return True
    least = max(limits.GRADIENT_GAIN_ROUNDINGS * limits.GAIN_FLOOR[row], limits.GRADIENT_GAIN_NOISE * noise)
    return abs(pair.gain) >= least


@dataclass(frozen=True, slots=True)
class _Parts:
    """Sums over every row, or over every sample where a row is a number or two."""

    count: F64
    d: F64
    d2: F64
    a2: F64
    ad: F64
    a4: F64

    @property
    def typical(self) -> float:
        """The relative L2 of a typical part."""
        some = self.a2 > 0
        return float(np.median(np.sqrt(self.d2[some] / self.a2[some]))) if some.any() else 0.0

    def chosen(self, suspected: NDArray[np.bool_], off: F64, few: bool) -> NDArray[np.bool_]:
        """Those suspected that chance does not explain: too many, or (`few`) off by far more than is typical."""
        if np.count_nonzero(suspected) > limits.MOST_STANDING_OUT * np.count_nonzero(self.a2 > 0):
            return suspected
        return suspected & few & (off >= limits.ROW_GAIN_OVER_TYPICAL * self.typical)


def _parts(pair: PairFigures) -> tuple[str, _Parts | None]:
    sums = (pair.row_d, pair.row_d2, pair.row_a2, pair.row_ad, pair.row_a4)
    if pair.row_width >= limits.PATTERN_ELEMENTS:
        return "rows", _Parts(np.full(pair.row_d.size, float(pair.row_width)), *sums)
    if pair.row_sample is None or not pair.row_sample.size:
        return "samples", None
    count = np.bincount(pair.row_sample).astype(np.float64) * pair.row_width
    return "samples", _Parts(count, *(np.bincount(pair.row_sample, one).astype(np.float64) for one in sums))


def _scaled(parts: _Parts, what: str, floor: float, few: bool) -> str | None:
    """Parts that are each a times a factor of their own."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        beta = parts.ad / parts.a2
        share = parts.ad**2 / (parts.a2 * parts.d2)
        weighty = parts.a2**2 / parts.a4
        enough = np.where(share >= limits.WHOLE_SHARE, limits.PATTERN_ELEMENTS / 2, limits.PATTERN_ELEMENTS)
        scaled = (np.abs(beta) >= floor) & (share >= limits.ROW_GAIN_SHARE) & (weighty >= enough)
        scaled = parts.chosen(scaled, np.sqrt(parts.d2 / parts.a2), few)
    return _listed(scaled, f"{what} are a times a factor", beta[scaled], _factor)


def _shifted(parts: _Parts, what: str, floor: float, few: bool) -> str | None:
    """Parts that are each a plus a constant of their own."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        mean = parts.d / parts.count
        share = parts.d**2 / (parts.count * parts.d2)
        rms = np.sqrt(parts.a2 / parts.count)
        shifted = (np.abs(mean) >= floor * rms) & (share >= limits.ROW_GAIN_SHARE) & (rms > 0)
        shifted &= parts.count >= limits.PATTERN_ELEMENTS
        shifted = parts.chosen(shifted, np.sqrt(parts.d2 / parts.a2), few)
    return _listed(shifted, f"{what} are a plus a constant", mean[shifted], _constant)


def _listed(chosen: NDArray[np.bool_], what: str, values: F64, called: Callable[[float], str]) -> str | None:
    if not chosen.any():
        return None
    least, most = called(float(values.min())), called(float(values.max()))
    to = f" to {most}" if most != least else ""
    return f"{int(chosen.sum()):,} of {chosen.size:,} {what}: {least}{to}"


def _factor(gain: float) -> str:
    """1 + gain in digits that never read 1."""
    if abs(gain) >= 5e-5:
        return f"{1 + gain:.6g}"
    return f"1 {'-' if gain < 0 else '+'} {abs(gain):.3g}"


def _constant(value: float) -> str:
    return f"{value:.4g}"


def standing_out(pair: PairFigures, row: str, *, few: bool = True) -> tuple[str | None, float | None]:
    """Rows, or columns, that are off many times more than the rest, though below every absolute limit.

    The second value is the relative L2 from which on a row stands out.
    """
    if ("standing_out", row, few) not in pair.kept:
        times = limits.STANDING_OUT if few else limits.STANDING_OUT_GRADIENT
        pair.kept["standing_out", row, few] = _standing_out(pair, row, times)
    found: tuple[str | None, float | None] = pair.kept["standing_out", row, few]
    return found


def _standing_out(pair: PairFigures, row: str, times: float) -> tuple[str | None, float | None]:
    if pair.row_width < limits.PATTERN_ELEMENTS:
        return None, None
    floor = limits.STANDING_OUT_FLOOR * limits.GAIN_FLOOR[row]
    sides = [("rows", pair.row_d2, pair.row_a2)]
    if pair.row_d2.size >= limits.PATTERN_ELEMENTS:
        # A column of a few numbers has no norm to speak of: one of them may be next to nothing.
        sides.append(("columns", pair.col_d2, pair.col_a2))
    for what, d2, a2 in sides:
        found = _outliers(d2, a2, floor, times)
        if found is not None:
            number, worst, typical, least = found
            sentence = (
                f"{number:,} of {d2.size:,} {what} stand out: off by up to {worst:.3g} of their norm, "
                f"the others typically by {typical:.2g}"
            )
            return sentence, least if what == "rows" else None
    return column_gain(pair, row), None


def _outliers(d2: F64, a2: F64, floor: float, times: float) -> tuple[int, float, float, float] | None:
    """(how many, the largest ratio, the typical one, the least that stands out)."""
    # What could not be squared stands out in `verdict` by other rules.
    there = (a2 > 0) & np.isfinite(a2) & np.isfinite(d2)
    if int(np.count_nonzero(there)) < limits.FEWEST_TYPICAL:
        return None
    rel = np.sqrt(d2[there] / a2[there])
    if float(rel.max()) < floor:
        return None
    norm = np.sqrt(a2[there])
    typical, typical_norm = float(np.median(rel)), float(np.median(norm))
    least = max(floor, times * typical)
    against_typical = np.sqrt(d2[there]) / typical_norm
    out = (rel >= least) & (against_typical >= least)
    number = int(np.count_nonzero(out))
    if not number or number > limits.MOST_STANDING_OUT * rel.size:
        return None
    return number, float(rel[out].max()), typical, least


def column_gain(pair: PairFigures, row: str) -> str | None:
    """A few columns that are a times a factor of their own, among noise in which they do not stand out by size."""
    if pair.columns is None:
        return None
    floor = limits.ROW_GAIN_FLOOR[row]
    gain, norm, weighty = pair.columns.gain, pair.columns.norm, pair.columns.weighty
    # What attention averages is alike from token to token: the gains of the other columns say what chance makes of it.
    pull = np.abs(gain) * norm
    out = np.abs(gain) >= max(floor, limits.COLUMN_GAIN * float(np.median(np.abs(gain))))
    out &= (pull >= limits.COLUMN_GAIN * float(np.median(pull))) & (weighty >= limits.PATTERN_ELEMENTS)
    if np.count_nonzero(out) > limits.MOST_STANDING_OUT * gain.size:
        return None
    return _listed(out, "columns are a times a factor", gain[out], _factor)


def updated(pair: PairFigures, row: str) -> str | None:
    """Stored numbers off by more than their own rounding, most of them alike: an update, or a quantisation."""
    if pair.finite < limits.FEWEST_UPDATED or pair.rel_l2 < limits.LEAST_UPDATE:
        return None
    crest = pair.max_abs / math.sqrt(pair.sum_d2 / pair.finite)
    roundings = pair.max_rel / EPS[row]
    if roundings <= limits.MOST_ROUNDINGS or crest > limits.MOST_CREST:
        return None
    return (
        f"{100 * pair.mismatched / pair.compared:.3g}% of the elements differ, by up to {roundings:.3g} roundings of "
        f"{row} (up to {limits.MOST_ROUNDINGS:g} allowed), the greatest difference {crest:.2g} times the rms one "
        f"(noise from {limits.MOST_CREST:g} on): an update or a quantisation"
    )
