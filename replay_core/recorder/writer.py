"""Puts a file under its final name whole or not at all, and never over one that is there."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from replay_core.errors import RecordExistsError


def commit(path: Path, write: Callable[[IO[bytes]], None]) -> int:
    """Write a new file atomically: temporary name, fsync, link to the final name. Returns its size in bytes.

    The link fails where the name exists, so two writers of one key cannot overwrite each other.

    Raises:
        RecordExistsError: the final name is taken.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            told = _Telling(file)
            try:
                write(told)  # type: ignore[arg-type]  # as much of a file as a writer needs
            except Exception:
                if told.failure is not None:
                    raise told.failure from None
                raise
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        _link(temporary, path)
    except OSError as error:
        # A failed write names no file of its own.
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
    _sync_directory(path.parent)
    return size


#: The disk is set to work whenever so many bytes wait in the page cache: at the end little is left to wait for.
_BEHIND = 4 << 20


class _Telling:
    """A file that goes to the disk while it is written, and remembers why a write failed."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._behind = 0
        self.failure: OSError | None = None
        self.flush = file.flush
        self.tell = file.tell
        self.seek = file.seek

    def write(self, data: Any) -> int:
        try:
            written = self._file.write(data)
        except OSError as error:
            self.failure = self.failure or error
            raise
        self._behind += written
        if self._behind >= _BEHIND:
            self._behind = 0
            _start_writing(self._file)
        return written


def _start_writing(file: IO[bytes]) -> None:
    """Let the disk begin with what was written so far. Linux does so for pages that are said to be needed no more."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _link(temporary: Path, path: Path) -> None:
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise RecordExistsError(
            "a record of this key is already on disk; nothing recorded is ever overwritten",
            file=str(path),
            hint="give the second write its own micro number, or record into a new directory",
        ) from None
    except OSError:
        # A filesystem without hard links (some FUSE and SMB mounts): claim the name, then rename over the claim.
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            raise RecordExistsError("a record of this key is already on disk", file=str(path)) from None
        os.replace(temporary, path)


def replace_whole(path: Path, data: bytes) -> None:
    """Write or rewrite a small file atomically (the manifest): readers see the old text or the new, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_directory(path.parent)


def append_line(path: Path, line: bytes, *, durable: bool = True) -> None:
    """Append one line in a single write, so a reader that follows never sees half of it twice.

    `durable` waits until it is on the disk.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        whole = line + b"\n"
        written = 0
        try:
            while written < len(whole):
                written += os.write(descriptor, whole[written:])
        except OSError:
            # The disk is full: the next line must not continue half of this one. Cutting needs no room.
            end = os.lseek(descriptor, 0, os.SEEK_CUR)
            if written and os.fstat(descriptor).st_size == end:
                os.ftruncate(descriptor, end - written)
            raise
        if durable:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_directory(path: Path) -> None:
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
