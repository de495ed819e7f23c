"""The bytes being read: a whole file, a stretch of one, or bytes that only exist in memory.

Everything goes through `os.pread`, never a memory map: a file that another process truncates while
its header is read ends in a `TruncatedError` and not in SIGBUS, and what is held is what was asked for.
Offsets are absolute in the file, whatever the stretch.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from replay_core.errors import TruncatedError
from replay_core.file_spans import pread
from replay_core.records import FileBytes, Inline

#: A region of at most so many bytes is read at once: its directory and its headers are many small pieces.
SMALL = 1 << 16
_SWAPPABLE = {2: "H", 4: "I", 8: "Q"}


class Region:
    """`start`..`end` of the open file `fd`; of `memory` instead, where the file holds the bytes encoded."""

    __slots__ = ("_held", "end", "fd", "memory", "path", "start")

    def __init__(self, path: Path, fd: int, start: int, end: int, memory: bytes | None = None) -> None:
        self.path = path
        self.fd = fd
        self.start = start
        self.end = end
        self.memory = memory
        #: Where the region begins and its bytes, where it is so small that one call fetches them all.
        self._held: tuple[int, bytes] | None = None
        if fd >= 0 and 0 < end - start <= SMALL:
            self._held = start, pread(fd, end - start, start)

    def part(self, offset: int, nbytes: int) -> Region:
        """The stretch of `nbytes` from `offset`; the caller has checked that it lies inside."""
        part = Region(self.path, -1, offset, offset + nbytes, self.memory)
        part.fd, part._held = self.fd, self._held
        return part

    def in_memory(self, data: bytes) -> Region:
        """Bytes that this region's file holds in another encoding."""
        return Region(self.path, -1, 0, len(data), data)

    def read(self, offset: int, nbytes: int) -> bytes:
        """Exactly `nbytes` from `offset`.

        Raises:
            TruncatedError: the region, or the file underneath, ends before.
        """
        if offset < self.start or nbytes < 0 or offset + nbytes > self.end:
            raise self.truncated(offset + nbytes)
        if self.memory is not None:
            return self.memory[offset : offset + nbytes]
        if self._held is not None:
            start, held = self._held
            data = held[offset - start : offset - start + nbytes]
        else:
            data = pread(self.fd, nbytes, offset)
        if len(data) != nbytes:
            raise self.truncated(offset + nbytes, offset + len(data))
        return data

    def peek(self, offset: int, nbytes: int) -> bytes:
        """What the file holds of `nbytes` from `offset`, which lies in the region; no memory region's."""
        if self._held is not None:
            start, held = self._held
            return held[offset - start : offset - start + nbytes]
        return pread(self.fd, nbytes, offset)

    def truncated(self, needed: int, found: int | None = None) -> TruncatedError:
        """The error for a region that should have reached `needed`."""
        found = self.end if found is None else found
        return TruncatedError(
            "the file ends before what it declares",
            file=str(self.path),
            expected=f"at least {needed - self.start} bytes",
            found=f"{found - self.start} bytes",
            hint="the writer was stopped, or the copy is not complete",
        )

    def source(
        self,
        offset: int,
        nbytes: int,
        itemsize: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...] | None,
        big_endian: bool,
        parts: int = 1,
    ) -> FileBytes | Inline:
        """Where a tensor's bytes lie; the little-endian bytes in C order where no file holds them as they are.

        parts: numbers an element consists of: two of a complex one, each with its own byte order.
        """
        if self.memory is None:
            return FileBytes(self.path, offset, nbytes, strides, big_endian)
        data = self.memory[offset : offset + nbytes]
        if strides is not None:
            starts = _element_starts(shape, strides, itemsize)
            data = b"".join(data[start : start + itemsize] for start in starts)
        return Inline(_swapped(data, itemsize // parts) if big_endian else data)


def _element_starts(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> Iterator[int]:
    steps = [range(0, length * stride, stride) if stride else (0,) * length
             for length, stride in zip(shape, strides, strict=True)]  # fmt: skip
    return (sum(index) * itemsize for index in product(*steps))


def _swapped(data: bytes, itemsize: int) -> bytes:
    code = _SWAPPABLE.get(itemsize)
    if code is None:
        return data
    numbers = array(code, data)
    numbers.byteswap()
    return numbers.tobytes()
