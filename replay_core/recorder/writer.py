"""Puts a file under its final name whole or not at all, and never over one that is there."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import IO, Any

from replay_core.errors import RecordExistsError
from replay_core.recorder.patience import disk_call

#: Permissions of a dump's files: their owner alone. What the umask leaves, where they are to be shared.
PRIVATE, SHARED = 0o600, 0o666

#: Two threads of a process never write under the same temporary name.
_numbers = count()


def commit(path: Path, write: Callable[[IO[bytes]], None], *, mode: int = PRIVATE) -> int:
    """Write a new file atomically: temporary name, fsync, link to the final name. Returns its size in bytes.

    The link fails where the name exists, so two writers of one key cannot overwrite each other.

    Raises:
        RecordExistsError: the final name is taken.
    """
    with _becoming(path, mode) as (file, temporary):
        try:
            write(file)
        except Exception:
            # What a writer makes of it may say less.
            if file.raw.failure is not None:
                raise file.raw.failure from None
            raise
        with disk_call():
            size = _to_disk(file)
            _link(temporary, path)
    with disk_call():
        _sync_directory(path.parent)
    return size


@contextlib.contextmanager
def _becoming(path: Path, mode: int) -> Iterator[tuple[_Buffered, Path]]:
    """A new file beside `path`, open; it is gone at the end, under this name at least."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{next(_numbers)}.tmp")
    file = None
    try:
        with disk_call():
            path.parent.mkdir(parents=True, exist_ok=True)
            file = _new_file(temporary, mode)
        yield file, temporary
    except OSError as error:
        # A failed write names no file of its own.
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise
    finally:
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()
            with contextlib.suppress(OSError):
                temporary.unlink()


def _new_file(path: Path, mode: int) -> _Buffered:
    """A file that was not there; never one that a link of this name leads to."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    try:
        descriptor = os.open(path, flags, mode)
    except FileExistsError:
        # What a killed process of our number left: in a container every run has the same.
        path.unlink()
        descriptor = os.open(path, flags, mode)
    return _Buffered(_DiskFile(descriptor))


def _to_disk(file: IO[bytes]) -> int:
    file.flush()
    os.fsync(file.fileno())
    size = file.tell()
    # Some file systems say only now that there was no room.
    file.close()
    return size


#: The disk is set to work whenever so many bytes wait in the page cache: at the end little is left to wait for.
_BEHIND = 4 << 20
#: A larger piece is written in several calls: each is to be answered in time.
_PIECE = 8 << 20


class _DiskFile(io.FileIO):
    """A file that goes to the disk while it is written, and remembers why a write failed.

    Below a buffer, so that only what reaches the operating system is timed.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "wb")
        self._behind = 0
        self.failure: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            with disk_call():
                # Whoever buffers comes again with the rest.
                written = super().write(memoryview(data)[:_PIECE])
                self._behind += written
                if self._behind >= _BEHIND:
                    self._behind = 0
                    _start_writing(self)
        except OSError as error:
            self.failure = self.failure or error
            raise
        return written


class _Buffered(io.BufferedWriter):
    raw: _DiskFile


def _start_writing(file: io.FileIO) -> None:
    """Let the disk begin with what was written so far. Linux does so for pages that are said to be needed no more."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _link(temporary: Path, path: Path) -> None:
    try:
        os.link(temporary, path)
    except FileExistsError:
        # A network file system may answer its own second try.
        if not _same(temporary, path):
            raise _taken(path) from None
    except OSError:
        _rename_unless_taken(temporary, path)


def _rename_unless_taken(temporary: Path, path: Path) -> None:
    """For a file system without hard links (some FUSE and SMB mounts): whoever has the claim may rename."""
    claim = path.with_name(f".{path.name}.0-0.tmp")
    try:
        os.close(os.open(claim, os.O_CREAT | os.O_EXCL | os.O_WRONLY, PRIVATE))
    except FileExistsError:
        raise _taken(path) from None
    try:
        if os.path.lexists(path):
            raise _taken(path)
        os.rename(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            claim.unlink()


def _same(one: Path, other: Path) -> bool:
    with contextlib.suppress(OSError):
        return os.path.samestat(os.lstat(one), os.lstat(other))
    return False


def _taken(path: Path) -> RecordExistsError:
    return RecordExistsError(
        "a record of this key is already on disk; nothing recorded is ever overwritten",
        file=str(path),
        hint="give the second write its own micro number, or record into a new directory",
    )


def replace_whole(path: Path, data: bytes | Iterable[bytes], *, mode: int = PRIVATE) -> None:
    """Write or rewrite a file atomically (the manifest): readers see the old text or the new, never a part.

    data: the bytes, or pieces of them that are made while they are written.
    """
    with _becoming(path, mode) as (file, temporary), disk_call():
        file.writelines([data] if isinstance(data, bytes) else data)
        _to_disk(file)
        os.replace(temporary, path)
        _sync_directory(path.parent)


def append_line(path: Path, line: bytes, *, durable: bool = True, mode: int = PRIVATE) -> None:
    """Append one line in a single write, so a reader that follows never sees half of it twice.

    `durable` waits until it is on the disk.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0)
    with disk_call():
        descriptor = os.open(path, flags, mode)
        try:
            whole = line + b"\n"
            written = 0
            try:
                while written < len(whole):
                    written += os.write(descriptor, whole[written:])
                if durable:
                    os.fsync(descriptor)
            except OSError:
                # The disk is full: the next line must not continue half of this one. Cutting needs no room.
                end = os.lseek(descriptor, 0, os.SEEK_CUR)
                if written and os.fstat(descriptor).st_size == end:
                    os.ftruncate(descriptor, end - written)
                raise
        finally:
            os.close(descriptor)


def _sync_directory(path: Path) -> None:
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
