"""The compiled loops of `native.c`, as a wheel carries them: a library that knows neither numpy nor torch.

A library of no Python's version; its calls let other threads run. Where none was built, whoever asks does the same with
what it has.
"""

from __future__ import annotations

import ctypes
import math
from functools import cache
from pathlib import Path

#: Where the build leaves it.
PLACE = Path(__file__).with_name("native.kernel")
#: Dtypes of a pair that it knows.
PAIRS = frozenset(("bfloat16", "float16", "float32", "float64"))
#: Dtypes of one tensor that it knows.
MOMENTS = PAIRS | {"int64", "int32", "uint8", "bool"}
_FIGURES = 10
#: A sum of squares below this may have lost addends to underflow.
LEAST_SQUARES = 1e-30


@cache
def loaded() -> ctypes.CDLL | None:
    """The library; None where none was built, or it is another machine's."""
    try:
        found = ctypes.CDLL(str(PLACE))
        for name in PAIRS:
            getattr(found, f"pair_{name}").restype = ctypes.c_int64
        for name in MOMENTS:
            getattr(found, f"moments_{name}").restype = None
        for name in PAIRS:
            getattr(found, f"ends_{name}").restype = None
    except (OSError, AttributeError):
        return None
    return found


def moments_at(address: int, count: int, dtype: str) -> list[float] | None:
    """What `count` elements look like that lie in one piece.

    How many are finite, NaN, +inf, -inf and 0; of the finite ones the least (inf where there is none), the greatest,
    the mean, the sum of squares around it, and the sum of squares.

    None where there is no library, or none for that dtype, or a sum is past what a double holds.
    """
    library = loaded() if dtype in MOMENTS else None
    if library is None:
        return None
    found = (ctypes.c_double * _FIGURES)()
    getattr(library, f"moments_{dtype}")(ctypes.c_void_p(address), ctypes.c_int64(count), found)
    # An infinity or NaN among the sums, and only such, makes their difference NaN.
    return list(found) if all(one - one == 0 for one in found[7:]) else None


def ends_at(address: int, count: int, dtype: str) -> tuple[float, float, float] | None:
    """The least, the greatest, and the sum of squares of `count` elements that lie in one piece, all of them finite.

    None where there is no library, or none for that dtype, one is not finite, or the squares leave what its type holds.
    """
    library = loaded() if dtype in PAIRS and count else None
    if library is None:
        return None
    found = (ctypes.c_double * 3)()
    getattr(library, f"ends_{dtype}")(ctypes.c_void_p(address), ctypes.c_int64(count), found)
    low, high, squares = found
    return (low, high, squares) if LEAST_SQUARES < squares < math.inf else None
