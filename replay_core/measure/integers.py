"""Differences of integers that doubles do not hold: ids and hashes of 64 bits, of which the nearest are told apart."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Up to here every integer is a double of its own.
WHOLE = 2**53


def exact_difference(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.float64] | None:
    """b - a of integers, subtracted as such and only then rounded to a double; None where doubles do as well.

    A difference of two 64-bit integers may need 65 bits: it is taken as its size and its sign.
    """
    if a.dtype.kind not in "iu" or b.dtype.kind not in "iu" or max(a.itemsize, b.itemsize) < 8 or not a.size:
        return None
    if not any(_is_large(side) for side in (a, b)):
        return None
    if a.dtype.kind != b.dtype.kind:
        return np.asarray(b.astype(object) - a.astype(object), dtype=np.float64)
    wide = np.int64 if a.dtype.kind == "i" else np.uint64
    x, y = a.astype(wide), b.astype(wide)
    bits_x, bits_y = x.view(np.uint64), y.view(np.uint64)
    up = y >= x
    size = np.where(up, bits_y - bits_x, bits_x - bits_y).astype(np.float64)
    return np.where(up, size, -size)


def _is_large(side: NDArray[Any]) -> bool:
    return int(side.max()) > WHOLE or int(side.min()) < -WHOLE
