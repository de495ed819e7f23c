"""Where along its axes a pair differs, and by how much: one number per stretch of rows, tokens and channels.

What a person sees at a glance: a leak lights up from one token on, a wrong head a band of channels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

from replay_core import pages
from replay_core.measure.statistics import as_real
from replay_core.records import TensorRef

#: Stretches of a strip at most: as many as a terminal is wide.
BUCKETS = 64
#: Elements looked at; of a larger pair evenly spread blocks, and how many is said.
LARGEST = 1 << 23


def difference_strips(a: TensorRef, b: TensorRef) -> dict[str, Any] | None:
    """Relative L2 of d = b - a per stretch of each axis, and how many |d| lie in each power of two.

    axes: [{"axis", "size", "rel_l2": up to BUCKETS numbers, null where a stretch was not looked at}]; axes of size 1
    are left out. A stretch whose baseline is all zero divides by the root mean square of the whole. Elements that
    are not finite on either side are left out of the sums and counted. None where the shapes differ or hold no number.

    Raises:
        DumpError: the bytes cannot be read.
    """
    if a.shape != b.shape or not a.numel or a.is_text or b.is_text or not (a.is_readable and b.is_readable):
        return None
    # Leading axes of size 1 (a pack's batch) say nothing, and would make one block of everything.
    lead = next((axis for axis, length in enumerate(a.shape) if length > 1), len(a.shape))
    array_a, array_b = (pages.array(ref).reshape(ref.shape[lead:] or (1,)) for ref in (a, b))
    axes = [axis for axis in range(array_a.ndim) if array_a.shape[axis] > 1]
    sums = {axis: np.zeros((3, min(BUCKETS, array_a.shape[axis]))) for axis in axes}
    bins: Counter[int] = Counter()
    looked_at = nonfinite = equal = 0
    cut = 1 + int(np.argmax(array_a.shape[1:])) if array_a.ndim > 1 else 0
    for first, step, block_a, block_b in _blocks(array_a, array_b, cut):
        x, y = _real(block_a), _real(block_b)
        with np.errstate(invalid="ignore", over="ignore"):
            d = y - x
        usable = np.isfinite(d)
        looked_at += d.size
        nonfinite += int(d.size - np.count_nonzero(usable))
        d, x = np.where(usable, d, 0.0), np.where(usable, x, 0.0)
        squares, base = d * d, x * x
        for axis in axes:
            others = tuple(other for other in range(d.ndim) if other != axis)
            places = np.arange(d.shape[axis]) * (step if axis == cut else 1) + (first if axis == 0 else 0)
            buckets = places * sums[axis].shape[1] // array_a.shape[axis]
            for row, values in enumerate((squares, base)):
                np.add.at(sums[axis][row], buckets, values.sum(axis=others))
            np.add.at(sums[axis][2], buckets, 1)
        magnitudes = np.abs(d[d != 0])
        equal += int(usable.sum()) - magnitudes.size
        exponents, counts = np.unique(np.frexp(magnitudes)[1] - 1, return_counts=True)
        bins.update(dict(zip(exponents.tolist(), counts.tolist(), strict=True)))
    return {
        "axes": [{"axis": axis + lead, "size": array_a.shape[axis], "rel_l2": _relative(sums[axis])} for axis in axes],
        "histogram": {
            "zeros": equal,
            "nonfinite": nonfinite,
            "bins": [{"exponent": exponent, "count": bins[exponent]} for exponent in sorted(bins)],
        },
        "looked_at": looked_at,
    }


def _real(block: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.float64]]:
    # A complex number's two parts must not become an axis of their own here.
    return np.abs(block).astype(np.float64) if np.iscomplexobj(block) else as_real(block)


def _blocks(
    a: np.ndarray[Any, Any], b: np.ndarray[Any, Any], cut: int
) -> Iterator[tuple[int, int, np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    """(first row, n, block of a, block of b): rows of the first axis, of them every n-th place of the axis `cut`.

    Of a large pair evenly spread rows; where one row alone is too much, not all of its longest axis.
    """
    inner = int(np.prod(a.shape[1:], dtype=np.int64)) or 1
    rows = max(1, pages.CHUNK // inner)
    starts = list(range(0, a.shape[0], rows))
    step = -(-inner // LARGEST)
    most = max(1, LARGEST * step // (rows * inner))
    if len(starts) > most:
        starts = [starts[number * (len(starts) - 1) // max(1, most - 1)] for number in range(most)]
    for start in starts:
        index = (slice(start, start + rows), *[slice(None)] * (cut - 1), slice(None, None, step))[: cut + 1]
        yield start, step, a[index], b[index]


def _relative(sums: np.ndarray[Any, Any]) -> list[float | None]:
    squares, base, seen = sums
    whole = base.sum() / max(1.0, seen.sum())
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = np.sqrt(squares / np.where(base > 0, base, whole * np.maximum(seen, 1)))
    return [None if not count else float(value) for value, count in zip(ratio, seen, strict=True)]
