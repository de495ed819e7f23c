"""Where along its axes a pair differs, and by how much: one number per stretch of rows, tokens and channels.

What a person sees at a glance: a leak lights up from one token on, a wrong head a band of channels.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from replay_core import pages
from replay_core.measure.integers import exact_difference
from replay_core.records import TensorRef

if TYPE_CHECKING:
    from replay_core.documents.parts import Number
    from replay_core.documents.tensor import DifferenceStrips

#: Stretches of a strip at most: as many as a terminal is wide.
BUCKETS = 64
#: Elements looked at; of a larger pair evenly spread pieces, and how many is said.
LARGEST = 1 << 23


def difference_strips(a: TensorRef, b: TensorRef) -> DifferenceStrips | None:
    """Relative L2 of d = b - a per stretch of each axis, and how many |d| lie in each power of two.

    axes: [{"axis", "size", "rel_l2": up to BUCKETS numbers, null where a stretch was not looked at}]; axes of size 1
    are left out. A stretch whose baseline is all zero divides by the root mean square of the whole. Elements that
    are not finite on either side are left out of the sums and counted. None where the shapes differ or hold no number.

    Raises:
        DumpError: the bytes cannot be read.
    """
    if a.shape != b.shape or not a.numel or a.is_text or b.is_text or not (a.is_readable and b.is_readable):
        return None
    shape = a.shape or (1,)
    axes = [axis for axis, size in enumerate(shape) if size > 1]
    sums = {axis: np.zeros((3, min(BUCKETS, shape[axis]))) for axis in axes}
    bins: Counter[int] = Counter()
    looked_at = nonfinite = equal = 0
    chunks = max(2, LARGEST // pages.CHUNK)
    for (start, chunk_a), (_, chunk_b) in zip(
        pages.spread_chunks(a, chunks, pages.CHUNK), pages.spread_chunks(b, chunks, pages.CHUNK), strict=True
    ):
        x = _wide(chunk_a)
        with np.errstate(invalid="ignore", over="ignore"):
            whole = exact_difference(chunk_a, chunk_b)
            d = np.abs(_wide(chunk_b) - x if whole is None else whole)
            x = np.abs(x)
        usable = np.isfinite(d)
        looked_at += d.size
        nonfinite += int(d.size - np.count_nonzero(usable))
        d, x = np.where(usable, d, 0.0), np.where(usable, x, 0.0)
        places = np.unravel_index(np.arange(start, start + d.size), shape)
        for axis in axes:
            count = sums[axis].shape[1]
            buckets = places[axis] * count // shape[axis]
            sums[axis][0] += np.bincount(buckets, weights=d * d, minlength=count)
            sums[axis][1] += np.bincount(buckets, weights=x * x, minlength=count)
            sums[axis][2] += np.bincount(buckets, minlength=count)
        magnitudes = d[d != 0]
        equal += int(usable.sum()) - magnitudes.size
        exponents, counts = np.unique(np.frexp(magnitudes)[1] - 1, return_counts=True)
        bins.update(dict(zip(exponents.tolist(), counts.tolist(), strict=True)))
    return {
        "axes": [{"axis": axis, "size": shape[axis], "rel_l2": _relative(sums[axis])} for axis in axes],
        "histogram": {
            "zeros": equal,
            "nonfinite": nonfinite,
            "bins": [{"exponent": exponent, "count": bins[exponent]} for exponent in sorted(bins)],
        },
        "looked_at": looked_at,
    }


def _wide(block: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    # A complex number's two parts must not become an axis of their own here.
    return block.astype(np.complex128 if np.iscomplexobj(block) else np.float64)


def _relative(sums: np.ndarray[Any, Any]) -> list[Number | None]:
    squares, base, seen = sums
    whole = base.sum() / max(1.0, seen.sum())
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = np.sqrt(squares / np.where(base > 0, base, whole * np.maximum(seen, 1)))
    return [None if not count else float(value) for value, count in zip(ratio, seen, strict=True)]
