"""A thread that writes while the trainer trains: bounded, in order, and nothing is ever dropped from it.

When the waiting records hold more bytes than allowed, `put` waits; how often and how long is counted in
`pressure` and said once on standard error.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class Pressure:
    """How the disk keeps up with the trainer. Bytes are those of tensors."""

    waiting: int = 0
    waiting_bytes: int = 0
    peak_bytes: int = 0
    written: int = 0
    written_bytes: int = 0
    #: How often, and for how many seconds in all, the trainer had to wait for room.
    waits: int = 0
    waited_s: float = 0.0


class Backlog:
    """Jobs done one after the other by a thread of its own, at most `limit_bytes` of them waiting.

    One job larger than the limit is taken once nothing else waits. A forked child starts with an empty
    backlog: what its parent still had to write, the parent writes.

    Args:
        failed: called in the thread with the exception a job left with; the next job is done all the same.
    """

    def __init__(self, limit_bytes: int, failed: Callable[[BaseException], None]) -> None:
        self.limit_bytes = limit_bytes
        self._failed = failed
        self._start_anew()

    def _start_anew(self) -> None:
        self.pressure = Pressure()
        self._jobs: deque[tuple[Callable[[], None], int]] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._ended: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self._process = os.getpid()
        self._said = False

    def put(self, job: Callable[[], None], nbytes: int) -> None:
        """Hand a job over; returns when there is room for it, before it is done."""
        if self._process != os.getpid():
            self._start_anew()
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="rldbg-recorder", daemon=True)
                self._thread.start()
            pressure = self.pressure
            if pressure.waiting and pressure.waiting_bytes + nbytes > self.limit_bytes:
                self._wait_for_room(nbytes)
            self._jobs.append((job, nbytes))
            pressure.waiting += 1
            pressure.waiting_bytes += nbytes
            pressure.peak_bytes = max(pressure.peak_bytes, pressure.waiting_bytes)
            self._changed.notify_all()

    def _wait_for_room(self, nbytes: int) -> None:
        pressure = self.pressure
        began = time.monotonic()
        self._changed.wait_for(lambda: not pressure.waiting or pressure.waiting_bytes + nbytes <= self.limit_bytes)
        pressure.waits += 1
        pressure.waited_s += time.monotonic() - began
        if not self._said:
            self._said = True
            warnings.warn(
                f"rldbg: the disk is slower than the trainer: training waits for records to be written "
                f"(queue_bytes is {self.limit_bytes:,}); recorder.pressure counts how long",
                RuntimeWarning,
                stacklevel=2,
            )

    def flush(self) -> None:
        """Wait until everything handed over is done."""
        if self._process != os.getpid():
            return
        with self._changed:
            self._changed.wait_for(lambda: not self.pressure.waiting)

    def close(self) -> None:
        """Finish what waits and end the thread. A later `put` starts it again."""
        self.flush()
        if self._process != os.getpid():
            return
        with self._changed:
            thread, self._thread = self._thread, None
            self._changed.notify_all()
            # Not joined: a signal's handler may run within `put`, whose lock the thread needs and waiting lets go of.
            self._changed.wait_for(lambda: thread is None or thread in self._ended)

    def _work(self) -> None:
        me = threading.current_thread()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._jobs) or self._thread is not me)
                if not self._jobs:
                    self._ended.add(me)
                    self._changed.notify_all()
                    return
                job, nbytes = self._jobs.popleft()
            try:
                job()
            except BaseException as error:
                self._failed(error)
            # The job holds its record's memory, which is free before the next one is let in.
            del job
            with self._changed:
                pressure = self.pressure
                pressure.waiting -= 1
                pressure.waiting_bytes -= nbytes
                pressure.written += 1
                pressure.written_bytes += nbytes
                self._changed.notify_all()
