"""Signals that no handler is run for, as the main thread is in a call of C: a collective whose other ranks are gone.

Python runs handlers in the main thread alone, between two of its bytecodes. What it does in C, wherever the process is,
is to write the signal's number to a pipe: a thread reads it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
from collections.abc import Callable

#: The end of the pipe that Python writes to.
_written_to = -1


def watch(number: int, told: Callable[[], None]) -> None:
    """Call `told` in a thread of its own whenever the signal comes, beside the handler that it has.

    To be called in the main thread. Where somebody reads the numbers already (asyncio), or no thread can be had, it
    stays as it is.
    """
    global _written_to
    if os.name != "posix":
        return
    read_from, written_to = os.pipe()
    os.set_blocking(written_to, False)
    before = signal.set_wakeup_fd(written_to, warn_on_full_buffer=False)

    def read() -> None:
        while numbers := os.read(read_from, 64):
            if number in numbers:
                told()

    try:
        if before != -1:
            raise RuntimeError("somebody reads them")
        threading.Thread(target=read, name="rldbg-signals", daemon=True).start()
    except RuntimeError:
        signal.set_wakeup_fd(before)
        os.close(read_from)
        os.close(written_to)
        return
    if _written_to == -1:
        os.register_at_fork(after_in_child=_leave_alone)
    _written_to = written_to


def _leave_alone() -> None:
    """In a forked child: its signals are not its parent's."""
    with contextlib.suppress(ValueError):
        before = signal.set_wakeup_fd(-1)
        if before not in (-1, _written_to):
            signal.set_wakeup_fd(before)


def end_by(number: int) -> None:
    """End this process as the signal does that nobody handles: Python lets the main thread alone say so."""
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    libc.signal(number, None)
    os.kill(os.getpid(), number)
