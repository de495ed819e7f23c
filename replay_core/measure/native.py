"""The compiled loops for numpy's arrays: a pair's figures and one chunk's. Without: sums.py, statistics.py."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replay_core.measure.kernel import loaded, moments_at

Rows = NDArray[Any]
F64 = NDArray[np.float64]

#: Dtypes of pairs, and the type in which the library adds them up.
_REALS = {"bfloat16": np.float32, "float16": np.float32, "float32": np.float64, "float64": np.float64}
_LINES = 7


def pair_lines(a_RC: Rows, b_RC: Rows, spans: NDArray[np.int64]) -> tuple[F64, F64, F64, int] | None:
    """Of two chunks: `sums.LINES` [7, R]; sums of d^2 and of a^2 per column [C]; how many elements differ.

    spans: first column and the one behind the last, of each stretch that is looked at [N, 2].

    None where there is no kernel, or none for what these are. Nothing is said of what is not finite: sums show it.
    """
    name = str(a_RC.dtype)
    real = _REALS.get(name)
    if real is None or a_RC.dtype != b_RC.dtype or not (_is_plain(a_RC) and _is_plain(b_RC)):
        return None
    kernel = loaded()
    if kernel is None:
        return None
    rows, columns = a_RC.shape
    lines, found = np.empty((_LINES, rows)), np.zeros((2, columns), real)
    pointers = [ctypes.c_void_p(one.ctypes.data) for one in (a_RC, b_RC, spans, lines, *found)]
    size = [ctypes.c_int64(one) for one in (rows, columns, len(spans))]
    differ = getattr(kernel, f"pair_{name}")(*pointers[:2], *size[:2], pointers[2], size[2], *pointers[3:])
    return lines, found[0].astype(np.float64), found[1].astype(np.float64), int(differ)


def moments(values: Rows) -> list[float] | None:
    """Of a flat chunk: `statistics.Accumulated`, in its order; None where numpy has to (`moments_at` says when)."""
    return moments_at(values.ctypes.data, values.size, str(values.dtype)) if _is_plain(values) else None


def _is_plain(values: Rows) -> bool:
    return bool(values.flags.c_contiguous and values.flags.aligned and values.dtype.isnative)
