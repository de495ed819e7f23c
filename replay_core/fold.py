"""The digest that a device takes of a tensor where it lies, so that not its bytes but at most 68 KiB go to the host.

While more than 68 KiB are left they are folded: each row of 4,096 bytes, read as signed integers of 8 bits, is
multiplied with 16 columns of fixed random integers of 8 bits, and what is left are its 16 sums, integers of 32 bits,
little-endian, one row after the other, and the bytes behind the last whole row. What then is left is hashed by XXH3.

Two different rows have one sum with a chance of at most 1/256 per column, whatever they are (of the column's integers
at a place where they differ, one at most makes the sums equal): 2^-128 for the 16. The sums stay below 2^26, so integer
and float64 arithmetic of any order are exact: a tensor core, a CPU and numpy leave the same bytes.
The columns are SHAKE-128's, of another seed at each fold.
"""

from __future__ import annotations

import hashlib
from functools import cache
from typing import Any

#: Bytes of a row, sums made of it, and what is not folded any more.
ROW, COLUMNS = 4096, 16
#: torch multiplies integers of 8 bits on CUDA from 17 rows on.
ENOUGH = 17 * ROW
#: Folds of a tensor of 18 TB.
_MOST_FOLDS = 5
#: How many bytes a device is asked to fold (twice, with a rest that is no row), and the digest of what is left.
KNOWN_BYTES, KNOWN_DIGITS = (5 << 20) + 1234, "8d03f5fac78b39c9e7cad913a291c686"
#: Rows that the host multiplies together: as float64 they fill 16 MiB.
_ROWS_AT_ONCE = 512


def columns(fold: int) -> bytes:
    """The fixed integers of the n-th fold: 16 columns of 4,096, one after the other."""
    return hashlib.shake_128(b"rldbg fold %d" % fold).digest(COLUMNS * ROW)


def left_on_device(torch: Any, dense: Any) -> Any:
    """What is left of a contiguous tensor's bytes, as a uint8 vector on its device. Waits for nothing.

    A tensor of `ENOUGH` bytes and less is left as it is, in the same memory.

    Raises:
        RuntimeError: the device cannot multiply integers of 8 bits, or has no room.
    """
    left = dense.reshape(-1).view(torch.uint8)
    fold = 0
    while (count := left.numel()) > ENOUGH:
        whole = count // ROW * ROW
        rest = left[whole:] if whole < count else None
        rows = (left if rest is None else left[:whole]).view(torch.int8).view(-1, ROW)
        if rows.data_ptr() % 256:
            # What multiplies may take rows to begin where an allocation does.
            rows = rows.clone()
        # Every call here is time that the trainer waits: a launch costs it more than the product does the device.
        left = torch._int_mm(rows, _columns_on(torch, dense.device, fold)).view(-1).view(torch.uint8)
        if rest is not None:
            left = torch.cat([left, rest])
        fold += 1
    return left


def known_bytes(torch: Any, device: Any) -> Any:
    """A vector whose digest is known, by which a device shows that it folds as it should; made on the host."""
    squares = torch.arange(KNOWN_BYTES, dtype=torch.int64, device="cpu").square()
    return squares.bitwise_right_shift(5).bitwise_and(255).to(torch.uint8).to(device)


def warm(torch: Any, device: Any) -> None:
    """Send every fold's integers to a device, so that no later fold waits for them."""
    for fold in range(_MOST_FOLDS):
        _columns_on(torch, device, fold)


@cache
def _columns_on(torch: Any, device: Any, fold: int) -> Any:
    """(4096, 16), each column contiguous."""
    known = torch.frombuffer(bytearray(columns(fold)), dtype=torch.int8)
    return known.view(COLUMNS, ROW).to(device).t()


class Folding:
    """The same of bytes on the host, given piece by piece. Needs numpy."""

    def __init__(self) -> None:
        #: Of bytes that may prove to be few; the sums of whole rows; what is no whole row yet.
        self._first = bytearray()
        self._sums: list[bytes] = []
        self._begun = bytearray()

    def update(self, piece: Any) -> None:
        data = memoryview(piece).cast("B")
        if len(self._first) <= ENOUGH:
            self._first += data[: ENOUGH + 1 - len(self._first)]
        if self._begun:
            missing = ROW - len(self._begun)
            self._begun += data[:missing]
            data = data[missing:]
            if len(self._begun) < ROW:
                return
            self._sums.append(_sums(self._begun, 0))
            self._begun.clear()
        whole = len(data) // ROW * ROW
        if whole:
            self._sums.append(_sums(data[:whole], 0))
        self._begun += data[whole:]

    def hexdigest(self) -> str:
        import xxhash

        left = bytes(self._first)
        fold = 0
        while len(left) > ENOUGH:
            if fold == 0:
                left = b"".join(self._sums) + bytes(self._begun)
            else:
                whole = len(left) // ROW * ROW
                left = _sums(left[:whole], fold) + left[whole:]
            fold += 1
        return xxhash.xxh3_128_hexdigest(left)


def _sums(rows: Any, fold: int) -> bytes:
    """The sums of whole rows."""
    import numpy as np

    bytes_RB = np.frombuffer(rows, np.int8).reshape(-1, ROW)
    columns_BC = _columns_here(fold)
    sums = [
        (bytes_RB[start : start + _ROWS_AT_ONCE].astype(np.float64) @ columns_BC).astype("<i4").tobytes()
        for start in range(0, len(bytes_RB), _ROWS_AT_ONCE)
    ]
    return b"".join(sums)


@cache
def _columns_here(fold: int) -> Any:
    import numpy as np

    return np.frombuffer(columns(fold), np.int8).reshape(COLUMNS, ROW).T.astype(np.float64)
