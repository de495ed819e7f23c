"""The precision numbers were computed in, read off the bits they leave empty: bf16 stored as fp32 ends in 16 zeros."""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

#: Numbers below which empty bits prove nothing.
FEWEST = 256
#: Part of the numbers that must use the last bit left: of full mantissas it is one half, of 0, 1 and .5 nothing.
USED = 0.1

#: Of an fp32: bits that stay empty, the dtype that leaves them so, and its own last bit.
_EMPTY = ((0xFFFF, "bfloat16", 1 << 16), (0x1FFF, "float16", 1 << 13))


class Precision(Struct):
    """What the fp32 numbers looked at have in common. `dtype` is None where nothing shows."""

    ored: int = 0
    numbers: int = 0
    used: tuple[int, ...] = (0, 0)

    @property
    def is_settled(self) -> bool:
        """Whether nothing shows, and nothing that follows can change that."""
        return bool(self.ored & 0x1FFF)

    def look(self, chunk: NDArray[Any]) -> None:
        """Take a chunk into account; anything but native fp32 says nothing."""
        if self.is_settled or chunk.dtype != np.float32 or not chunk.dtype.isnative:
            self.ored |= 0x1FFF
            return
        bits = np.ascontiguousarray(chunk).view(np.uint32)
        # A look at the beginning settles it for nearly every tensor.
        self.ored |= int(np.bitwise_or.reduce(bits.reshape(-1)[:1024], initial=0))
        if self.is_settled:
            return
        self.ored |= int(np.bitwise_or.reduce(bits, axis=None))
        self.numbers += int(np.count_nonzero(bits))
        self.used = tuple(
            known + int(np.count_nonzero(bits & last)) for known, (_, _, last) in zip(self.used, _EMPTY, strict=True)
        )

    @property
    def dtype(self) -> str | None:
        """bfloat16 or float16 where every number is one and enough of them use its last bit; else None.

        TF32's products, rounded to 10 bits, read as float16.
        """
        if self.numbers < FEWEST:
            return None
        for (empty, name, _), used in zip(_EMPTY, self.used, strict=True):
            if not self.ored & empty and used >= USED * self.numbers:
                return name
        return None


def as_bfloat16(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Values to the nearest of bfloat16, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
