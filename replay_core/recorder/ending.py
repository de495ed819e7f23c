"""How a recording ends: at the program's exit, by an exception nobody caught, by SIGTERM.

torchrun ends the other ranks with SIGTERM when one rank fails: just then the black box of every rank is wanted.
SIGKILL (and the out-of-memory killer) takes what is in memory with it.

The handler of SIGTERM only starts a thread and returns. The trainer goes on meanwhile: it may have been stopped in the
middle of a record, with locks held that the thread needs. When all is written the thread sends the signal once more.

A trainer that waits in C, for a rank that is gone, runs no handler: without us SIGTERM would end it there, so a thread
that hears of the signal (`unhandled`) writes, and ends the process.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import os
import signal
import sys
import threading
import time
import weakref
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Protocol

from replay_core.recorder import unhandled
from replay_core.recorder.patience import begin_nothing_more, tell

#: How long the main thread may take to run its handler, in seconds.
_HANDLED_S = 0.5


class OpenRecording(Protocol):
    """What has to be ended."""

    directory: Path

    def close(self) -> None:
        """Write what waits."""

    def commit_box(self, trigger: str, what: str) -> None:
        """Write what the black box holds, now."""


_open: weakref.WeakSet[OpenRecording] = weakref.WeakSet()
_boxed: weakref.WeakSet[OpenRecording] = weakref.WeakSet()
#: The process whose SIGTERM handler is ours.
_hooked_in: int | None = None
#: Whether a thread writes because SIGTERM came. A plain value: a handler must wait for no lock.
_writing = False


def close_at_exit(recorder: OpenRecording) -> None:
    """Write what waits, and take the lock away, when the program ends."""
    if not _open:
        atexit.register(_end)
    _open.add(recorder)
    _hook_sigterm()


def commit_on_crash(recorder: OpenRecording) -> None:
    """Commit what the black box holds when an exception between two steps, or SIGTERM, ends the program."""
    if not _boxed:
        _hook_exceptions()
    _hook_sigterm()
    _boxed.add(recorder)


def _hook_exceptions() -> None:
    shown_by = sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, Exception):
            _commit("crash", f"{kind.__name__}: {error}")
        shown_by(kind, error, trace)

    sys.excepthook = excepthook


def _hook_sigterm() -> None:
    """Before what SIGTERM did so far: the trainer's own handler, or the end."""
    global _hooked_in
    if _hooked_in == os.getpid():
        return
    if threading.current_thread() is not threading.main_thread():
        # Python lets no other thread set a handler.
        return
    before: Any = signal.getsignal(signal.SIGTERM)
    process = os.getpid()
    if before is None or before == signal.SIG_IGN:
        return

    written = False
    taken = -_HANDLED_S

    def terminated(number: int, frame: FrameType | None) -> None:
        global _writing
        nonlocal taken, written
        taken = time.monotonic()
        if os.getpid() == process and not written:
            if _writing:
                # A second one before all is written changes nothing.
                return
            _writing = True
            # Where no thread can be had, it ends as if nothing were recorded.
            with contextlib.suppress(RuntimeError):
                _thread.start_new_thread(write, ())
                return
            _writing = False
        written = False
        if callable(before):
            before(number, frame)
            return
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)

    def write() -> None:
        global _writing
        nonlocal written
        try:
            _commit("SIGTERM", "the process was told to end")
            if not callable(before):
                # Nothing unwinds after this: what other recorders still hold is written now.
                begin_nothing_more()
                _close_all()
        finally:
            written = True
            os.kill(process, signal.SIGTERM)
            _writing = False
            if not callable(before):
                time.sleep(_HANDLED_S)
                unhandled.end_by(signal.SIGTERM)

    def told() -> None:
        global _writing
        began = time.monotonic()
        while time.monotonic() < began + _HANDLED_S:
            if _writing or written or taken > began - _HANDLED_S:
                return
            time.sleep(0.01)
        _writing = True
        write()

    signal.signal(signal.SIGTERM, terminated)
    unhandled.watch(signal.SIGTERM, told)
    _hooked_in = process


def _commit(trigger: str, what: str) -> None:
    for recorder in list(_boxed):
        with contextlib.suppress(Exception):
            recorder.commit_box(trigger, what)


def _end() -> None:
    while _writing:
        time.sleep(0.01)
    _close_all()


def _close_all() -> None:
    for recorder in list(_open):
        began = time.monotonic()
        try:
            recorder.close()
        except Exception as error:
            after = f"(after {time.monotonic() - began:.1f} s)"
            tell(f"rldbg: records of {recorder.directory} were not written: {error} {after}")
