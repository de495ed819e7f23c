"""Structured errors: noise is spread evenly and points nowhere; a bug is a factor, a constant, a row, a channel.

Every function takes the figures of a pair and returns the sentence of what it saw, or None. No tolerance a person can
give changes what they see, so it is kept with the figures and rows need not be.
"""

from __future__ import annotations

import numpy as np

from replay_core.compare import limits
from replay_core.measure.pair import F64, PairFigures


def keep(pair: PairFigures, row: str) -> None:
    """Read off the rows all that a later judgement can ask for, and let them go."""
    for one in (pair, pair.rest):
        if one is not None:
            worst_row(one)
            pattern(one, row)
            standing_out(one, row)
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


def pattern(pair: PairFigures, row: str) -> str | None:
    """A factor or a constant that explains the difference, of the whole or of some rows. `row`: of the tables."""
    if ("pattern", row) not in pair.kept:
        pair.kept["pattern", row] = _pattern(pair, row)
    found: str | None = pair.kept["pattern", row]
    return found


def _pattern(pair: PairFigures, row: str) -> str | None:
    floor = limits.GAIN_FLOOR[row]
    if pair.finite < limits.PATTERN_ELEMENTS:
        return None
    if explains_gain(pair, row):
        return f"b is a times {1 + pair.gain:.6g}: one factor explains {100 * pair.gain_share:.0f}% of the difference"
    if pair.bias_share >= limits.GAIN_SHARE and abs(pair.mean_signed) >= floor * pair.rms_a:
        return (
            f"b is a plus {pair.mean_signed:.6g}: one constant explains {100 * pair.bias_share:.0f}% of the difference"
        )
    return _scaled_rows(pair, limits.ROW_GAIN_FLOOR[row])


def explains_gain(pair: PairFigures, row: str) -> bool:
    """Whether b is a times one factor, and not by rounding alone."""
    # An element that outweighs all others (a massive activation) makes its own rounding look like a factor; so do
    # massive channels, which then hold no factor for the rest.
    spread = pair.weighty >= limits.PATTERN_ELEMENTS
    both = (pair,) if pair.rest is None else (pair, pair.rest)
    return spread and all(
        one.gain_share >= limits.GAIN_SHARE and abs(one.gain) >= limits.GAIN_FLOOR[row] for one in both
    )


def _scaled_rows(pair: PairFigures, floor: float) -> str | None:
    """Rows that are each a times a factor of their own."""
    if pair.row_width < limits.PATTERN_ELEMENTS:
        return None
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        beta = pair.row_ad / pair.row_a2
        share = pair.row_ad**2 / (pair.row_a2 * pair.row_d2)
        weighty = pair.row_a2**2 / pair.row_a4
    scaled = (np.abs(beta) >= floor) & (share >= limits.ROW_GAIN_SHARE) & (weighty >= limits.PATTERN_ELEMENTS)
    if not scaled.any():
        return None
    factors = 1 + beta[scaled]
    return f"{int(scaled.sum()):,} of {scaled.size:,} rows are a times a factor: {float(factors.min()):.4g}" + (
        f" to {float(factors.max()):.4g}" if factors.size > 1 else ""
    )


def standing_out(pair: PairFigures, row: str) -> tuple[str | None, float | None]:
    """Rows, or columns, that are off many times more than the rest, though below every absolute limit.

    The second value is the relative L2 from which on a row stands out.
    """
    if ("standing_out", row) not in pair.kept:
        pair.kept["standing_out", row] = _standing_out(pair, row)
    found: tuple[str | None, float | None] = pair.kept["standing_out", row]
    return found


def _standing_out(pair: PairFigures, row: str) -> tuple[str | None, float | None]:
    if pair.row_width < limits.PATTERN_ELEMENTS:
        return None, None
    floor = limits.STANDING_OUT_FLOOR * limits.GAIN_FLOOR[row]
    for what, d2, a2 in (("rows", pair.row_d2, pair.row_a2), ("columns", pair.col_d2, pair.col_a2)):
        found = _outliers(d2, a2, floor)
        if found is not None:
            number, worst, typical, least = found
            sentence = (
                f"{number:,} of {d2.size:,} {what} stand out: off by up to {worst:.3g} of their norm, "
                f"the others typically by {typical:.2g}"
            )
            return sentence, least if what == "rows" else None
    return None, None


def _outliers(d2: F64, a2: F64, floor: float) -> tuple[int, float, float, float] | None:
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
    least = max(floor, limits.STANDING_OUT * typical)
    against_typical = np.sqrt(d2[there]) / typical_norm
    out = (rel >= least) & (against_typical >= least)
    number = int(np.count_nonzero(out))
    if not number or number > limits.MOST_STANDING_OUT * rel.size:
        return None
    return number, float(rel[out].max()), typical, least
