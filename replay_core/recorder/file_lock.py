"""A lock between processes that leaves no file behind."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from replay_core.recorder.patience import disk_call

#: Seconds between two tries.
_AGAIN_S = 0.02


class FileLock:
    """Held by one process; its file is there as long as it is held, or after a kill, when it binds nobody.

    Where files cannot be locked (some network file systems) it is always had: then nothing can be said.

    Args:
        mode: permissions of the file.
    """

    def __init__(self, path: Path, mode: int = 0o600) -> None:
        self._path, self._mode = path, mode
        self._descriptor: int | None = None
        #: Whether it holds others off.
        self.is_certain = False
        self._process = os.getpid()

    def take(self, wait_s: float = 0.0) -> bool:
        """Lock it. False when another holds it, after waiting so long.

        Raises:
            OSError: its file cannot be made.
        """
        until = time.monotonic() + wait_s
        while not self._try():
            if time.monotonic() >= until:
                return False
            time.sleep(_AGAIN_S)
        return True

    def _try(self) -> bool:
        with disk_call():
            flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
            descriptor = os.open(self._path, flags, self._mode)
            try:
                locked = _locked(descriptor)
                if locked is False or not self._is_ours(descriptor):
                    os.close(descriptor)
                    return False
            except BaseException:
                os.close(descriptor)
                raise
        self._descriptor, self._process, self.is_certain = descriptor, os.getpid(), locked is True
        return True

    def _is_ours(self, descriptor: int) -> bool:
        """Whoever held it before took its file away: a lock on that file holds nobody off."""
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(self._path))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Let go. In a forked child the lock stays its parent's."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return
        with disk_call():
            with contextlib.suppress(OSError):
                if self._process == os.getpid():
                    self._path.unlink(missing_ok=True)
                    # A forked child may still have it open; closing alone would not let go.
                    _unlock(descriptor)
            with contextlib.suppress(OSError):
                os.close(descriptor)


def is_let_go(path: Path) -> bool:
    """Whether a file or folder is locked by nobody; False too where that cannot be known."""
    with contextlib.suppress(OSError, ImportError):
        import fcntl

        descriptor = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        finally:
            os.close(descriptor)
    return False


def _locked(descriptor: int) -> bool | None:
    """None where files cannot be locked."""
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):
        return None
    return True


def _unlock(descriptor: int) -> None:
    with contextlib.suppress(ImportError, OSError):
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_UN)
