"""A second look at the columns of a pair: whether some are a times a factor of their own, below the noise by size.

One pass adds up |d|^2 per column, not a d: that is wanted only where a column is off by more than a factor that would
count and by more than its neighbours, and a few rows then tell.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replay_core.compare.judging import limits
from replay_core.compare.judging.structure import Seen, crowded, factor, listed
from replay_core.measure.figures import ColumnGains, PairFigures
from replay_core.measure.quantile import median
from replay_core.measure.statistics import as_reals

Rows = NDArray[Any]


def is_open(pair: PairFigures, row: str) -> bool:
    """Whether a column could be scaled: it is off by the factor that counts, and further than the typical one."""
    if pair.rows.width < limits.PATTERN_ELEMENTS or pair.rows.d2.size < limits.FEWEST_ROWS:
        return False
    there = (pair.columns.a2 > 0) & np.isfinite(pair.columns.a2) & np.isfinite(pair.columns.d2)
    if np.count_nonzero(there) < limits.FEWEST_TYPICAL:
        return False
    rel2 = pair.columns.d2[there] / pair.columns.a2[there]
    greatest = float(rel2.max())
    return greatest >= limits.ROW_GAIN_FLOOR[row] ** 2 and greatest >= limits.MAYBE_SCALED**2 * median(rel2)


def gains(chunks: Iterator[tuple[Rows, Rows]]) -> ColumnGains | None:
    """The factor of every column, from the first rows [r, c] of a pair; None where they are not equally long."""
    taken: list[tuple[NDArray[np.float64], NDArray[np.float64]]] = []
    rows = 0
    for a_RC, b_RC in chunks:
        some = slice(0, limits.MOST_ROWS - rows)
        taken.append(as_reals(a_RC[some], b_RC[some]))
        if taken[-1][0].shape[1] != taken[0][0].shape[1]:
            return None
        rows += taken[-1][0].shape[0]
        if rows >= limits.MOST_ROWS:
            break
    if not taken:
        return None
    a, b = (np.concatenate([pair[side] for pair in taken]) for side in (0, 1))
    with np.errstate(all="ignore"):
        d = np.where(np.isfinite(a) & np.isfinite(b), b - a, 0.0)
        a = np.where(np.isfinite(a), a, 0.0)
        a2 = (a * a).sum(axis=0)
        gain = np.where(a2 > 0, (a * d).sum(axis=0) / a2, 0.0)
        weighty = np.where(a2 > 0, a2 * a2 / (a**4).sum(axis=0), 0.0)
    return ColumnGains(np.nan_to_num(gain), np.sqrt(a2), np.nan_to_num(weighty))


def column_gain(pair: PairFigures, row: str) -> Seen | None:
    """How many times the typical column's factor that of the worst column is, in itself and by the norm it moves."""
    gains = pair.columns.gains
    if gains is None or pair.rows.width < limits.PATTERN_ELEMENTS:
        return None
    gain, norm, weighty = gains.gain, gains.norm, gains.weighty
    # What attention averages is alike from token to token: the gains of the other columns say what chance makes of it.
    pull = np.abs(gain) * norm
    unit = max(float(np.median(np.abs(gain))), limits.ROW_GAIN_FLOOR[row] / limits.COLUMN_GAIN)
    with np.errstate(divide="ignore", invalid="ignore"):
        size = np.nan_to_num(np.minimum(np.abs(gain) / unit, pull / float(np.median(pull))))
    size[weighty < limits.PATTERN_ELEMENTS] = 0.0
    value = crowded(size, limits.COLUMN_GAIN)
    if not value:
        return None
    chosen = size >= min(limits.COLUMN_GAIN, value)
    return Seen(value, listed(chosen, "columns are a times a factor", gain, factor))
