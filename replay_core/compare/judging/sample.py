"""Log probabilities sample by sample: one that is off many times as far as the others, though below every limit.

Rows of a layout are tokens, and their sums are all that is needed. Where nothing but the shape says [sample, token],
rows are samples, and tokens take a second look.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replay_core.compare.judging import limits
from replay_core.measure.pair import F64, PairFigures
from replay_core.measure.statistics import as_real

#: Where a pair keeps what was seen of its samples.
KEPT = "sample_alone"


@dataclass(slots=True)
class Samples:
    """Per sample: its tokens, their sums of d^2 and of (1 - p)^2, the greatest |d| in nats and in units of 1 - p."""

    tokens: NDArray[np.int64]
    d2: F64
    doubt2: F64
    greatest: F64
    most: F64


def alone(pair: PairFigures) -> str | None:
    """The sample of log probabilities that stands out from the others, in a sentence; None where none does."""
    if KEPT not in pair.kept:
        known = pair.row_width == 1 and pair.row_sample is not None and pair.row_sample.size > 0
        pair.kept[KEPT] = _alone(_by_token(pair)) if known else None
    found: str | None = pair.kept[KEPT]
    return found


def look(pair: PairFigures, rows: Iterator[tuple[NDArray[Any], NDArray[Any]]], count: int) -> None:
    """Keep what the tokens say of a pair whose `count` rows [token] are its samples."""
    per = Samples(np.zeros(count, np.int64), *(np.zeros(count) for _ in range(4)))
    start = 0
    for a_RT, b_RT in rows:
        here = slice(start, start + a_RT.shape[0])
        start = here.stop
        a, b = as_real(a_RT), as_real(b_RT)
        # Zeros on both sides are what a trainer fills padding with, and say nothing where they are not.
        there = np.isfinite(a) & np.isfinite(b) & ((a != 0) | (b != 0))
        with np.errstate(invalid="ignore", over="ignore"):
            d = np.where(there, np.abs(b - a), 0.0)
            doubt = np.where(there, _doubt(np.abs(a)), 1.0)
        per.tokens[here] = there.sum(axis=1)
        per.d2[here], per.doubt2[here] = (d * d).sum(axis=1), np.where(there, doubt * doubt, 0.0).sum(axis=1)
        per.greatest[here], per.most[here] = d.max(axis=1, initial=0.0), (d / doubt).max(axis=1, initial=0.0)
    pair.kept[KEPT] = _alone(per)


def _doubt(magnitude: F64) -> F64:
    """1 - p of log probabilities -magnitude."""
    return np.maximum(-np.expm1(-magnitude), limits.LEAST_DOUBT)


def _by_token(pair: PairFigures) -> Samples:
    of_row = pair.row_sample
    assert of_row is not None
    tokens, doubt = np.bincount(of_row), _doubt(np.sqrt(pair.row_a2))
    greatest, most = np.zeros(tokens.size), np.zeros(tokens.size)
    np.maximum.at(greatest, of_row, pair.row_max)
    np.maximum.at(most, of_row, pair.row_max / doubt)
    d2 = np.bincount(of_row, pair.row_d2).astype(np.float64)
    doubt2 = np.bincount(of_row, doubt * doubt).astype(np.float64)
    return Samples(tokens, d2, doubt2, greatest, most)


def _alone(per: Samples) -> str | None:
    there = np.flatnonzero(per.tokens >= limits.SAMPLE_TOKENS)
    if there.size < limits.FEWEST_SAMPLES:
        return None
    d2, greatest, most = per.d2[there], per.greatest[there], per.most[there]
    rms, rel = np.sqrt(d2 / per.tokens[there]), np.sqrt(d2 / per.doubt2[there])
    for size, allowed in ((rel, limits.SAMPLE_STANDING_OUT), (most, limits.TOKEN_STANDING_OUT)):
        worst = int(size.argmax())
        others = np.delete(np.arange(size.size), worst)
        usual = float(np.median(size[others]) if size is rel else size[others].max())
        if size[worst] >= allowed * usual and greatest[worst] >= _least_alone(greatest[others]):
            return (
                f"sample {int(there[worst])} stands out: off by {rms[worst]:.3g} nats rms, the others typically by "
                f"{float(np.median(rms[others])):.2g}, its worst token by {greatest[worst]:.3g}, theirs by "
                f"{float(greatest[others].max()):.2g}"
            )
    return None


def _least_alone(others: F64) -> float:
    """Nats by which a sample has to be off to stand out from others whose greatest differences are these."""
    noise, _, bug = limits.LOGPROB_FP32.max_abs
    if not np.median(others):
        return limits.LEAST_AMONG_EQUAL
    return bug if float(others.max()) <= noise else limits.LEAST_AMONG_NOISE
