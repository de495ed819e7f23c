"""Log probabilities sample by sample: one that is off many times as far as the others, though below every limit; and
how far the typical token is off, which shows what precision they were computed in.

Rows of a layout are tokens, and their sums are all that is needed. Where nothing but the shape says [sample, token],
rows are samples, and tokens take a second look.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from replay_core.compare.judging import limits
from replay_core.compare.judging.structure import Seen
from replay_core.measure.figures import F64, PairFigures
from replay_core.measure.statistics import as_real


class Samples(Struct):
    """Per sample: its tokens, their sums of d^2 and of (1 - p)^2, the greatest |d| in nats and in units of 1 - p."""

    tokens: NDArray[np.int64]
    d2: F64
    doubt2: F64
    greatest: F64
    most: F64


def by_token(pair: PairFigures) -> dict[str, Seen | None]:
    """What the rules of samples see of a pair whose rows are tokens of known samples."""
    if pair.rows.width != 1 or pair.rows.sample is None or not pair.rows.sample.size:
        return {}
    return _seen(_by_token(pair))


def shows_fp32(pair: PairFigures) -> bool:
    """Whether the typical token of every sample that differs is off by no more than fp32 leaves.

    From the first token that differs on: what came before it was computed from other tokens.
    """
    if "usual" not in pair.kept and pair.rows.width == 1 and pair.rows.sample is not None:
        doubt = _doubt(np.sqrt(pair.rows.a2))
        pair.kept["usual"] = _usual(pair.rows.sample, pair.rows.max / doubt, pair.rows.max > 0, doubt)
    usual = pair.kept.get("usual")
    return usual is not None and usual <= limits.LOGPROB_NOISE_FP32


def look(pair: PairFigures, rows: Iterator[tuple[NDArray[Any], NDArray[Any]]], count: int) -> None:
    """Keep what the rules of samples see of a pair whose `count` rows [token] are its samples."""
    per = Samples(np.zeros(count, np.int64), *(np.zeros(count) for _ in range(4)))
    start, usual = 0, list[float]()
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
        of_RT = np.broadcast_to(np.arange(a.shape[0])[:, None], a.shape)
        typical = _usual(of_RT[there], (d / doubt)[there], d[there] > 0, doubt[there])
        usual += [] if typical is None else [typical]
    pair.kept |= {**_seen(per), "usual": max(usual, default=None)}


def _usual(of: NDArray[Any], off: F64, differs: NDArray[np.bool_], doubt: F64) -> float | None:
    """The greatest of the samples' medians of what their tokens are off, of samples of some length that differ.

    Short ones that differ are one sample. Where even together they are short, most of their tokens being equal bit for
    bit says what a small median does: noise spares no token, but a step of half precision may move one of a few. What
    is certain is equal whatever computed it.

    of: the sample of each token, rising.
    """
    found = list[float]()
    parted = np.unique(of[differs])
    starts, ends = np.searchsorted(of, parted), np.searchsorted(of, parted, side="right")
    short, most = [np.zeros(0)], 0.0
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        first = start + int(differs[start:end].argmax())
        begin = first if end - first >= limits.SAMPLE_TOKENS else start
        if end - begin >= limits.SAMPLE_TOKENS:
            found.append(float(np.median(off[begin:end])))
        else:
            short.append(off[start:end][doubt[start:end] > limits.LEAST_DOUBT])
            most = max(most, float((off * doubt)[start:end].max()))
    together = np.concatenate(short)
    if together.size >= limits.SAMPLE_TOKENS:
        found.append(float(np.median(together)))
    elif not found and most > limits.LOGPROB_STEP_OF_HALF and 2 * np.count_nonzero(together == 0) > together.size:
        found.append(0.0)
    return max(found, default=None)


def _doubt(magnitude: F64) -> F64:
    """1 - p of log probabilities -magnitude."""
    return np.maximum(-np.expm1(-magnitude), limits.LEAST_DOUBT)


def _by_token(pair: PairFigures) -> Samples:
    of_row = pair.rows.sample
    assert of_row is not None
    tokens, doubt = np.bincount(of_row), _doubt(np.sqrt(pair.rows.a2))
    greatest, most = np.zeros(tokens.size), np.zeros(tokens.size)
    np.maximum.at(greatest, of_row, pair.rows.max)
    np.maximum.at(most, of_row, pair.rows.max / doubt)
    d2 = np.bincount(of_row, pair.rows.d2).astype(np.float64)
    doubt2 = np.bincount(of_row, doubt * doubt).astype(np.float64)
    return Samples(tokens, d2, doubt2, greatest, most)


def _seen(per: Samples) -> dict[str, Seen | None]:
    """How many times further off than the others the worst sample is, by its tokens' rms, and by its worst token."""
    # Of short samples the mean says little, but the only one that differs needs none.
    is_alone = np.count_nonzero(per.greatest) == 1
    there = np.flatnonzero(per.tokens >= (1 if is_alone else limits.SAMPLE_TOKENS))
    if there.size < limits.FEWEST_SAMPLES:
        return {}
    d2, greatest, most = per.d2[there], per.greatest[there], per.most[there]
    rms, rel = np.sqrt(d2 / per.tokens[there]), np.sqrt(d2 / per.doubt2[there])
    found: dict[str, Seen | None] = {}
    for id, size in (("sample", rel), ("token", most)):
        worst = int(size.argmax())
        others = np.delete(np.arange(size.size), worst)
        usual = float(np.median(size[others]) if id == "sample" else size[others].max())
        if size[worst] > 0 and greatest[worst] >= _least_alone(greatest[others]):
            text = (
                f"sample {int(there[worst])} stands out: off by {rms[worst]:.3g} nats rms, the others typically by "
                f"{float(np.median(rms[others])):.2g}, its worst token by {greatest[worst]:.3g}, theirs by "
                f"{float(greatest[others].max()):.2g}"
            )
            found[id] = Seen(float(size[worst]) / usual if usual else math.inf, text)
    return found


def _least_alone(others: F64) -> float:
    """Nats by which a sample has to be off to stand out from others whose greatest differences are these."""
    if not np.median(others):
        return limits.LEAST_AMONG_EQUAL
    return (
        limits.MAX_ABS["float32"][0] if float(others.max()) <= limits.LOGPROB_NOISE_FP32 else limits.LEAST_AMONG_NOISE
    )
