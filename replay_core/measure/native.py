"""The native kernel (`native.c`) of a pair's figures and of one tensor's, as a wheel carries it.

Without it numpy does the same in sums.py and statistics.py.

One library without an interface to Python, so it is of no Python's version; calls let other threads run.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[Any]
F64 = NDArray[np.float64]

#: Where the build leaves it.
PLACE = Path(__file__).with_name("native.kernel")
#: Dtypes that it knows, and the type in which it adds up.
_REALS = {"bfloat16": np.float32, "float16": np.float32, "float32": np.float64, "float64": np.float64}
_LINES = 7
#: Dtypes whose moments it knows.
_MOMENTS = frozenset(("bfloat16", "float16", "float32", "float64", "int64", "int32", "uint8", "bool"))
_FIGURES = 10


@cache
def loaded() -> ctypes.CDLL | None:
    """The kernel; None where none was built, or it is another machine's."""
    try:
        found = ctypes.CDLL(str(PLACE))
        for name in _REALS:
            getattr(found, f"pair_{name}").restype = ctypes.c_int64
        for name in _MOMENTS:
            getattr(found, f"moments_{name}").restype = None
    except (OSError, AttributeError):
        return None
    return found


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
    """Of a flat chunk: `statistics.Moments`, in its order.

    None where there is no kernel, or none for what this is, or a sum is past what a double holds.
    """
    name = str(values.dtype)
    kernel = loaded() if name in _MOMENTS and _is_plain(values) else None
    if kernel is None:
        return None
    found = np.empty(_FIGURES)
    pointer, size = ctypes.c_void_p(values.ctypes.data), ctypes.c_int64(values.size)
    getattr(kernel, f"moments_{name}")(pointer, size, ctypes.c_void_p(found.ctypes.data))
    return found.tolist() if bool(np.isfinite(found[-3:]).all()) else None


def _is_plain(values: Rows) -> bool:
    return bool(values.flags.c_contiguous and values.flags.aligned and values.dtype.isnative)
