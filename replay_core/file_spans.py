"""Spans of a file's bytes: mapped, or copied into a caller's buffer.

Mapped pages are asked for with MADV_POPULATE_READ before they are touched, so a file that was truncated
underneath raises an error instead of killing the process with SIGBUS. What is read front to back is read with
pread into a buffer that stays in the processor's cache: cheaper than faulting pages in and dropping them (measured:
.08 s against .11 s for 1.7 GB), and memory does not grow with the dump.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import lru_cache, wraps
from pathlib import Path
from typing import Any, TypeVar, cast

from replay_core.errors import DumpError, TruncatedError

Make = TypeVar("Make", bound=Callable[..., Any])

_POPULATE_READ = 22  # Linux 5.14; Python gives it no name before 3.14


class MappedFile:
    """A read-only map of one file, and the manners to read it safely."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with open(path, "rb") as file:
            self.size = os.fstat(file.fileno()).st_size
            self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if self.size else None

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Bytes [offset, offset + nbytes), resident when this returns.

        Raises:
            TruncatedError: the file is shorter than that, or became so since it was opened.
        """
        if nbytes == 0:
            return memoryview(b"")
        if self.map is None or offset + nbytes > self.size:
            raise self._truncated(offset, nbytes, self.size)
        start, length = _page_span(offset, nbytes)
        try:
            self.map.madvise(_POPULATE_READ, start, min(length, self.size - start))
        except OSError as error:
            if error.errno == errno.EFAULT:
                raise self._truncated(offset, nbytes, os.path.getsize(self.path)) from None
            # An older kernel does not know the advice: the size check is what is left.
            if os.path.getsize(self.path) < offset + nbytes:
                raise self._truncated(offset, nbytes, os.path.getsize(self.path)) from None
        return memoryview(self.map)[offset : offset + nbytes]

    def drop(self, offset: int, nbytes: int) -> None:
        """Give the pages of a span back. They are read again when somebody looks again."""
        if self.map is not None and nbytes:
            start, length = _page_span(offset, nbytes)
            self.map.madvise(mmap.MADV_DONTNEED, start, min(length, self.size - start))

    def _truncated(self, offset: int, nbytes: int, size: int) -> TruncatedError:
        return _truncated(self.path, offset, nbytes, size)


def _truncated(path: Path, offset: int, nbytes: int, size: int) -> TruncatedError:
    return TruncatedError(
        "the file ends inside a tensor",
        file=str(path),
        expected=f"{nbytes:,} bytes at offset {offset:,}",
        found=f"a file of {size:,} bytes",
        hint="was the disk full, or is the trainer still writing it?",
    )


class Stream:
    """An open file whose spans are copied into a caller's buffer."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path, self._fd = path, fd

    def into(self, buffer: memoryview, offset: int) -> None:
        """Fill the buffer from `offset`.

        Raises:
            TruncatedError: the file ends before.
        """
        done = 0
        while done < len(buffer):
            count = os.preadv(self._fd, [buffer[done:]], offset + done)
            if not count:
                raise _truncated(self.path, offset, len(buffer), os.fstat(self._fd).st_size)
            done += count


@contextmanager
def stream(path: Path) -> Iterator[Stream]:
    """A file opened for reading spans.

    Raises:
        DumpError: it cannot be opened or read.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise DumpError(f"cannot open the file: {error.strerror}", file=str(path)) from None
    try:
        yield Stream(path, fd)
    except OSError as error:
        raise DumpError(f"cannot read the file: {error.strerror}", file=str(path)) from None
    finally:
        os.close(fd)


def _page_span(offset: int, nbytes: int) -> tuple[int, int]:
    start = offset - offset % mmap.PAGESIZE
    return start, offset + nbytes - start


def kept_while_unchanged(count: int) -> Callable[[Make], Make]:
    """What a function makes of a file (and of further arguments), kept as long as the file is the same.

    The last `count` answers are. What it makes is shared: nobody may change it.

    Raises (the function that it makes):
        DumpError: the file cannot be opened.
    """

    def keep(make: Make) -> Make:
        @lru_cache(maxsize=count)
        def made(path: Path, _size: int, _mtime_ns: int, *args: Hashable) -> Any:
            return make(path, *args)

        @wraps(make)
        def kept(path: Path, *args: Hashable) -> Any:
            try:
                status = os.stat(path)
                return made(path, status.st_size, status.st_mtime_ns, *args)
            except OSError as error:
                raise DumpError(f"cannot open the file: {error.strerror}", file=str(path)) from None

        return cast("Make", kept)

    return keep


@kept_while_unchanged(64)
def mapped(path: Path) -> MappedFile:
    """The map of a file; reused while the file is the same.

    Raises:
        DumpError: the file cannot be opened.
    """
    return MappedFile(path)
