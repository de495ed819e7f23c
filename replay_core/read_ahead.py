"""The files of two dumps, held against each other on another core while Python still imports what compares dumps.

Half of a short comparison is imports. What was found the same by then, byte by byte, is not read again; where files
differ, or one is asked about before it was reached, nothing is known and whoever asks reads for itself.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from replay_core import kernel
from replay_core.landing import LandingRoom
from replay_core.mirrored import INSIDE

#: Below this a file is compared sooner than it is looked for; what lies behind so many files and folders is left alone.
_SMALLEST, _MOST_ENTRIES = 1 << 20, 1000
_FIRST, _BLOCK = 1 << 16, 1 << 18


class _Ahead(threading.Thread):
    """Holds the files of b against those of the same place in a that are as large."""

    def __init__(self, a: Path, b: Path) -> None:
        super().__init__(name="rldbg-read-ahead")
        self._a, self._b = str(a), str(b)
        self._reached: dict[tuple[str, str], kernel.Reach] = {}
        self._is_stopped = False

    def stop(self) -> None:
        self._is_stopped = True
        for reached in list(self._reached.values()):
            reached.stop = 1

    def knows_same(self, a: str, b: str, end: int) -> bool:
        """Whether both files were found the same up to byte `end`; where they were not yet, no more is read."""
        reached = self._reached.get((a, b))
        if reached is None:
            return False
        if end > reached.same:
            self.stop()
        return bool(end <= reached.same)

    def run(self) -> None:
        rooms = LandingRoom(_BLOCK), LandingRoom(_BLOCK)
        at = rooms[0].landing(0)[1], rooms[1].landing(0)[1]
        for a, b in _facing(self._a, self._b):
            # A process that ends waits for this thread.
            if self._is_stopped or not threading.main_thread().is_alive():
                return
            try:
                self._hold(a, b, at)
            except OSError:
                return  # whoever compares them says what is wrong

    def _hold(self, a: str, b: str, rooms: tuple[int, int]) -> None:
        file_a = os.open(a, os.O_RDONLY | os.O_CLOEXEC)
        try:
            file_b = os.open(b, os.O_RDONLY | os.O_CLOEXEC)
            try:
                size = os.fstat(file_a).st_size
                reached = self._reached[a, b] = kernel.Reach()
                if self._is_stopped:
                    return
                kernel.same_bytes((file_a, 0), (file_b, 0), size, rooms, _FIRST, _BLOCK, reached)
            finally:
                os.close(file_b)
        finally:
            os.close(file_a)


def _facing(a: str, b: str) -> Iterator[tuple[str, str]]:
    """Files of equal size at the same place of both, or both themselves, among the first so many."""
    waiting = [(a, b)]
    for _ in range(_MOST_ENTRIES):
        if not waiting:
            return
        a, b = waiting.pop()
        # A mirror of a remote dump has holes, which would be the same zeros; who reads it fills or refuses it.
        if any(INSIDE in os.path.abspath(path) + os.sep for path in (a, b)):
            continue
        size_a, size_b = _size(a), _size(b)
        if size_a is None and size_b is None:
            with suppress(OSError):
                names = sorted(os.listdir(a), reverse=True)
                waiting += [(os.path.join(a, name), os.path.join(b, name)) for name in names]
        elif size_a is not None and size_a == size_b and size_a >= _SMALLEST:
            yield a, b


def _size(path: str) -> int | None:
    """Bytes of a regular file; None of a folder, and -1 of what is neither or is not there."""
    try:
        found = os.stat(path)
    except OSError:
        return -1
    if stat.S_ISDIR(found.st_mode):
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else -1


_now: _Ahead | None = None


@contextmanager
def reading(a: Path, b: Path) -> Iterator[None]:
    """Hold the files of two dumps against each other, on a thread, for the length of a `with`."""
    global _now
    if kernel.loaded() is None:
        yield
        return
    _now = ahead = _Ahead(a, b)
    ahead.start()
    try:
        yield
    finally:
        _now = None
        ahead.stop()
        ahead.join()


def knows_same(a: Path, b: Path, start: int, nbytes: int) -> bool:
    """Whether so many bytes from one offset of two files were found the same."""
    return _now is not None and _now.knows_same(str(a), str(b), start + nbytes)
