"""A thread that writes while the trainer trains: bounded, in order, and nothing is ever dropped from it.

When the waiting records hold more bytes than allowed, `put` waits; how often and how long is counted in
`pressure` and said once on standard error, before it waits. A disk that hangs is not waited for (`patience`).
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from replay_core.recorder.patience import Errand, Patience, is_ending, tell

#: How often a waiting trainer looks whether the disk answers, in seconds.
_LOOK_S = 0.25


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
        patience: how long a call of the disk is waited for.
    """

    def __init__(self, limit_bytes: int, failed: Callable[[BaseException], None], patience: Patience) -> None:
        self.limit_bytes = limit_bytes
        self._failed = failed
        self._patience = patience
        self._start_anew()

    def _start_anew(self) -> None:
        self.pressure = Pressure()
        #: The first is being done. Nothing else says whether something waits: Ctrl-C may end `put` anywhere.
        self._jobs: deque[tuple[Errand, int, str]] = deque()
        self._changed = threading.Condition()
        self._given_bytes = 0
        self._thread: threading.Thread | None = None
        self._ended: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self._process = os.getpid()
        self._said = False
        #: Somebody waits for the thread to end, as where the process was told to: what comes now waits for that.
        self._closing = False

    def put(self, job: Callable[[], None], nbytes: int, what: str = "") -> None:
        """Hand a job over; returns when there is room for it, before it is done. `what` it writes, in a person's words.

        Raises:
            DumpError: there is no room, and the disk does not answer.
        """
        if self._process != os.getpid():
            self._start_anew()
        with self._changed:
            while self._closing or is_ending():
                self._changed.wait(_LOOK_S)
            if self._thread is None:
                self._thread = self._started()
                if self._thread is None:
                    self._do_now(job, nbytes)
                    return
            if self._jobs and self._bytes() + nbytes > self.limit_bytes:
                self._wait_for_room(nbytes)
            self._jobs.append((Errand(job), nbytes, what))
            self._given_bytes += nbytes
            self._count()
            self._changed.notify_all()

    def _started(self) -> threading.Thread | None:
        """A thread that works; None where none can be had: a process has as many as it may, or ends (Python 3.12)."""
        thread = threading.Thread(target=self._work, name="rldbg-recorder", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return None
        return thread

    def _do_now(self, job: Callable[[], None], nbytes: int) -> None:
        errand = Errand(job)
        errand.run()
        if errand.error is not None:
            self._failed(errand.error)
        self._given_bytes += nbytes
        self.pressure.written += 1
        self.pressure.written_bytes += nbytes

    def _wait_for_room(self, nbytes: int) -> None:
        if not self._said:
            self._said = True
            tell(
                f"rldbg: the disk is slower than the trainer: training waits for records to be written "
                f"(queue_bytes is {self.limit_bytes:,}); recorder.pressure counts how long"
            )
        began = time.monotonic()
        self.pressure.waits += 1
        try:
            self._wait(lambda: not self._jobs or self._bytes() + nbytes <= self.limit_bytes)
        finally:
            self.pressure.waited_s += time.monotonic() - began

    def _wait(self, until: Callable[[], bool]) -> None:
        self._changed.notify_all()
        while not self._changed.wait_for(until, _LOOK_S):
            self._patience.judge(self._jobs[0][0] if self._jobs else None)

    def _bytes(self) -> int:
        return max(0, self._given_bytes - self.pressure.written_bytes) if self._jobs else 0

    def _count(self) -> None:
        pressure = self.pressure
        pressure.waiting, pressure.waiting_bytes = len(self._jobs), self._bytes()
        pressure.peak_bytes = max(pressure.peak_bytes, pressure.waiting_bytes)

    def flush(self) -> None:
        """Wait until everything handed over so far is done; a trainer that goes on hands over more.

        Raises:
            DumpError: the disk does not answer.
        """
        if self._process != os.getpid():
            return
        with self._changed:
            given = self.pressure.written + len(self._jobs)
            self._wait(lambda: self.pressure.written >= given)

    def close(self) -> None:
        """Finish what waits and end the thread. A later `put` starts it again.

        Raises:
            DumpError: the disk does not answer.
        """
        if self._process != os.getpid():
            return
        with self._changed:
            self._closing = True
            try:
                self._wait(lambda: not self._jobs)
                thread, self._thread = self._thread, None
                self._changed.notify_all()
                # Not joined: the thread needs the lock, which waiting lets go of.
                self._changed.wait_for(lambda: thread is None or thread in self._ended)
            finally:
                self._closing = False
                self._changed.notify_all()

    def give_up(self) -> list[str]:
        """Let nothing that waits be written, also where the disk answers again; what each of it would have been."""
        with self._changed:
            for errand, _, _ in self._jobs:
                errand.given_up = True
            return [what for _, _, what in self._jobs]

    def _work(self) -> None:
        me = threading.current_thread()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._jobs) or self._thread is not me)
                if not self._jobs:
                    self._ended.add(me)
                    self._changed.notify_all()
                    return
                errand, nbytes, _ = self._jobs[0]
            errand.run()
            if errand.error is not None:
                self._failed(errand.error)
            # The job holds its record's memory, which is free before the next one is let in.
            del errand
            with self._changed:
                self._jobs.popleft()
                self.pressure.written += 1
                self.pressure.written_bytes += nbytes
                self._count()
                self._changed.notify_all()
