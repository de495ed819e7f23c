"""Where a file's bytes land in memory: at the place within a page that they have in the file, which copies fastest."""

from __future__ import annotations

import ctypes

#: What two addresses are told apart by before their translation.
PAGE = 1 << 12
#: What a processor's vectors and numpy's types are aligned to.
LINE = 64


class LandingRoom:
    """A buffer for so many bytes of any place in a file."""

    def __init__(self, size: int) -> None:
        block = (ctypes.c_char * (size + 2 * PAGE))()
        first = -ctypes.addressof(block) % PAGE
        self._view, self._at = memoryview(block).cast("B")[first:], ctypes.addressof(block) + first

    def landing(self, offset: int) -> tuple[memoryview, int]:
        """The buffer from where bytes of that offset belong, and the address."""
        start = (offset & -LINE) % PAGE
        return self._view[start:], self._at + start
