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
#: Bytes of a number of a dtype that has NaN, and the bits of its largest one: an infinity, where it has one. What has
#: larger bits, the sign apart, is NaN.
LARGEST = {
    "bfloat16": (2, 0x7F80), "float16": (2, 0x7C00), "float32": (4, 0x7F80_0000), "float64": (8, 0x7FF0 << 48),
    "float8_e4m3fn": (1, 0x7E), "float8_e5m2": (1, 0x7C),
}  # fmt: skip
_FIGURES = 10
_FD, _COUNT, _AT = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p
_BITS = ctypes.c_uint64
_SAME_BYTES = (_FD, _COUNT, _FD, _COUNT, _COUNT, _AT, _AT, _COUNT, _COUNT, _AT, _COUNT, _BITS)
_COUNT_NANS = (_FD, _COUNT, _COUNT, _COUNT, _BITS, _AT, _COUNT)
_PAIR = (_AT, _AT, _COUNT, _COUNT, _AT, _COUNT, _AT, _COUNT, _AT, _AT)
_FILES = (
    *(_FD, _COUNT, _FD, _COUNT, _COUNT), *(_AT, _COUNT, _COUNT), *(_AT, _COUNT), *(_AT, _COUNT), *(_AT,) * 6,
)  # fmt: skip
#: A sum of squares below this may have lost addends to underflow.
LEAST_SQUARES = 1e-30


@cache
def loaded() -> ctypes.CDLL | None:
    """The library; None where none was built, or it is another machine's."""
    try:
        found = ctypes.CDLL(str(PLACE))
        for name in PAIRS:
            pair = getattr(found, f"pair_{name}")
            pair.restype, pair.argtypes = ctypes.c_int64, _PAIR
            files = getattr(found, f"files_{name}")
            files.restype, files.argtypes = ctypes.c_int64, _FILES
        found.read_rows.restype, found.read_rows.argtypes = ctypes.c_int64, (_FD, _COUNT, _COUNT, _AT, _COUNT, _AT)
        found.same_bytes.restype, found.same_bytes.argtypes = ctypes.c_int64, _SAME_BYTES
        found.count_nans.restype, found.count_nans.argtypes = ctypes.c_int64, _COUNT_NANS
        for name in MOMENTS:
            getattr(found, f"moments_{name}").restype = None
        for name in PAIRS:
            getattr(found, f"ends_{name}").restype = None
    except (OSError, AttributeError):
        return None
    return found


def read_rows(file: tuple[int, int], width: int, numbers: int, count: int, into: int) -> bool:
    """Read rows of `width` bytes behind an offset of a file, whose `count` numbers (int64) stand at an address.

    False where there is no library, or the file ends before: who reads it otherwise finds out why.
    """
    library = loaded()
    return library is not None and bool(library.read_rows(*file, width, numbers, count, into))


class Reach(ctypes.Structure):
    """What `same_bytes` tells whoever looks while it reads, and is told: bytes found the same so far, what stops it
    where it is not 0, and how many NaN were among them.
    """

    _fields_ = (("same", ctypes.c_int64), ("stop", ctypes.c_int64), ("nans", ctypes.c_int64))


def same_bytes(
    a: tuple[int, int],
    b: tuple[int, int],
    nbytes: int,
    rooms: tuple[int, int],
    first: int,
    block: int,
    told: Reach,
    dtype: str = "",
) -> bool | None:
    """Whether two stretches of files, each a descriptor and an offset, hold the same bytes.

    `first` bytes are read at once, then `block` after `block`, into rooms of that size at two addresses.
    dtype: what the bytes are, where NaN among them are to be counted (a key of `LARGEST`).

    None where there is no library, a file ends before, or it was stopped: who reads it otherwise finds out why.
    """
    library = loaded()
    at = ctypes.addressof(told)
    of = LARGEST.get(dtype, (0, 0))
    found = library.same_bytes(*a, *b, nbytes, *rooms, first, block, at, *of) if library is not None else -1
    return None if found < 0 else bool(found == nbytes)


def count_nans(file: tuple[int, int], nbytes: int, dtype: str, room: int, block: int) -> int | None:
    """How many numbers are NaN in a stretch of a file, a descriptor and an offset; read block by block into a room.

    None where there is no library, none for that dtype, or the file ends before.
    """
    library = loaded() if dtype in LARGEST else None
    found = -1 if library is None else int(library.count_nans(*file, nbytes, *LARGEST[dtype], room, block))
    return None if found < 0 else found


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
