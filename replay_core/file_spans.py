"""A file of a dump, opened: only a regular one, read by pread into a buffer of the caller's.

Nothing is mapped. A map is a live look at a file that another process may cut: touching a page that is gone ends the
process with SIGBUS, whatever was checked before. A short read is an error. It is also cheaper than faulting pages in
and dropping them (measured: .08 s against .11 s for 1.7 GB), and memory does not grow with the dump.

A file of a remote dump has holes where nothing was read yet (`remote.mirror`): they are filled before they are read.
"""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import lru_cache, wraps
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, BinaryIO, TypeVar, cast

from replay_core.errors import DumpError, TruncatedError
from replay_core.mirrored import is_mirrored

#: Descriptors of such files, each with its path; one that is given anew to a file of this machine leaves.
_mirrored: dict[int, str] = {}


def _mirror() -> ModuleType:
    from replay_core.remote import mirror  # json and a library of hashes: only who reads a remote dump pays

    return mirror


Make = TypeVar("Make", bound=Callable[..., Any])


def _truncated(path: Path, offset: int, nbytes: int, size: int) -> TruncatedError:
    return TruncatedError(
        "the file ends inside a tensor",
        file=str(path),
        expected=f"{nbytes:,} bytes at offset {offset:,}",
        found=f"a file of {size:,} bytes",
        hint="was the disk full, or is the trainer still writing it?",
    )


class Stream:
    """A file opened for reading spans into a caller's buffer, for the length of a `with`: a class, as a slice of a few
    numbers costs little more than its opening.

    Raises:
        DumpError: it cannot be opened or read.
    """

    __slots__ = ("_fd", "path")

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> Stream:
        self._fd, _ = open_regular(self.path)
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        os.close(self._fd)
        if isinstance(error, OSError):
            raise DumpError(f"cannot read the file: {error.strerror}", file=str(self.path)) from None

    @property
    def descriptor(self) -> int | None:
        """What others may read it by; None of a remote file, which is read by `into` alone."""
        return None if self._fd in _mirrored else self._fd

    def into(self, buffer: memoryview, offset: int) -> None:
        """Fill the buffer from `offset`.

        Raises:
            TruncatedError: the file ends before.
        """
        if self._fd in _mirrored:
            path = _mirrored[self._fd]
            if _mirror().straight(path, buffer, offset):
                return
            _mirror().need(path, self._fd, offset, offset + len(buffer))
        done = 0
        while done < len(buffer):
            count = os.preadv(self._fd, [buffer[done:]], offset + done)
            if not count:
                raise _truncated(self.path, offset, len(buffer), os.fstat(self._fd).st_size)
            done += count


#: Without waiting, where a system knows that; bytes as they are, where it knows another way.
_READ = os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


def open_regular(path: Path | str) -> tuple[int, int]:
    """A descriptor of a regular file, which the caller closes, and the file's size in bytes.

    A pipe would wait for its writer and a device for whatever it does: they are opened without waiting, and refused.

    Raises:
        DumpError: it cannot be opened, or is no file.
    """
    try:
        fd = os.open(path, _READ)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise DumpError(f"cannot open the file: {why}", file=str(path)) from None
    status = os.fstat(fd)
    mode = status.st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        found = "a directory" if stat.S_ISDIR(mode) else "a pipe" if stat.S_ISFIFO(mode) else "a device or socket"
        raise DumpError(f"cannot read {found}", file=str(path), expected="a file", found=found)
    try:
        is_remote = is_mirrored(path)
    except DumpError:
        os.close(fd)
        raise
    if is_remote:
        _mirrored[fd] = os.path.abspath(path)
    elif _mirrored:
        _mirrored.pop(fd, None)
    return fd, status.st_size


def pread(fd: int, nbytes: int, offset: int) -> bytes:
    """Bytes of a file that `open_regular` opened; fewer where it ends before.

    Raises:
        DumpError: it is remote, and they cannot be had.
    """
    if fd in _mirrored:
        _mirror().need(_mirrored[fd], fd, offset, offset + nbytes)
    return os.pread(fd, nbytes, offset)


class _Mirrored(io.FileIO):
    """A file of a remote dump, as Python reads files."""

    def readinto(self, buffer: Any, /) -> int | None:
        _mirror().need(_mirrored[self.fileno()], self.fileno(), self.tell(), self.tell() + memoryview(buffer).nbytes)
        return super().readinto(buffer)

    def readall(self) -> bytes:
        _mirror().need(_mirrored[self.fileno()], self.fileno(), self.tell(), os.fstat(self.fileno()).st_size)
        return super().readall()


@contextmanager
def regular(path: Path | str) -> Iterator[BinaryIO]:
    """A regular file to read from.

    Raises:
        DumpError: it cannot be opened or read, or is no file.
    """
    try:
        fd, _ = open_regular(path)
        with (
            cast("BinaryIO", io.BufferedReader(_Mirrored(fd), 1 << 16))
            if fd in _mirrored
            else os.fdopen(fd, "rb") as file
        ):
            yield file
    except OSError as error:
        raise DumpError(f"cannot read the file: {error.strerror}", file=str(path)) from None


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
