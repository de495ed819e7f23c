"""How long a trainer waits for its disk: work on it is done by another thread, and given up when one call hangs.

What counts is the time within one call of the operating system: a large record may take minutes and computing its text
too, a disk that answers no call for `limit_s` seconds does not answer.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, ClassVar, TypeVar

from replay_core.errors import DumpError

T = TypeVar("T")

#: Seconds within one call after which the trainer is told what it waits for.
SAY_S = 3.0
#: How often a waiting trainer looks.
_LOOK_S = 0.25
#: How long a thread waits for the next errand: starting one costs more than a small record.
_IDLE_S = 1.0

_doing = threading.local()
#: Errands that somebody waits for now, and the thread that ends the process, once it does.
_running: set[Errand] = set()
_last: int | None = None


class Errand:
    """One piece of work on the disk: whether it is done, what it gave, and how long its present call takes."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self.ended = threading.Event()
        #: Nobody waits for it any more: it makes no further call.
        self.given_up = False
        #: When the call it is in began.
        self.called: float | None = None
        self._result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        """Do it, in this thread. Raises nothing: see `error`."""
        before = getattr(_doing, "errand", None)
        _doing.errand = self
        try:
            self._result = self._work()
        except BaseException as error:
            self.error = error
        finally:
            _doing.errand = before
            # What it wrote was the trainer's memory.
            del self._work
            self.ended.set()

    def answer(self) -> Any:
        """What it gave.

        Raises:
            BaseException: what it ended with.
        """
        if self.error is not None:
            raise self.error
        return self._result

    @property
    def silent_s(self) -> float:
        called = self.called
        return 0.0 if called is None else time.monotonic() - called


class disk_call:  # noqa: N801 - reads as the words of a `with`
    """Around calls of the operating system: they are timed, and not made for an errand that was given up.

    Raises:
        DumpError: nobody waits for this errand any more.
    """

    __slots__ = ("_before", "_errand")

    def __enter__(self) -> None:
        self._errand: Errand | None = getattr(_doing, "errand", None)
        if self._errand is not None:
            if self._errand.given_up:
                raise DumpError("given up: the disk took too long")
            self._before = self._errand.called
            self._errand.called = time.monotonic()

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if self._errand is not None:
            self._errand.called = None if self._before is None else time.monotonic()


def is_given_up() -> bool:
    """Whether nobody waits any more for what this thread does."""
    errand: Errand | None = getattr(_doing, "errand", None)
    return errand is not None and errand.given_up


class Clerk:
    """A thread that runs errands, one at a time, and goes when none came for a while.

    No lock is taken: a signal handler of the trainer's thread may record in the middle of `give`.
    """

    _idle: ClassVar[deque[Clerk]] = deque()

    def __init__(self) -> None:
        self._errands: SimpleQueue[Errand] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="rldbg-disk", daemon=True)
        self._thread.start()

    @classmethod
    def give(cls, errand: Errand) -> None:
        """Have an errand run by a thread that has nothing to do, or a new one; where none can be had, by this one."""
        clerk = None
        with contextlib.suppress(IndexError):
            clerk = cls._idle.pop()
        # A forked child has the object without its thread.
        if clerk is None or not clerk._thread.is_alive():
            try:
                clerk = cls()
            except RuntimeError:
                errand.run()
                return
        clerk._errands.put(errand)

    def _work(self) -> None:
        while True:
            try:
                errand = self._errands.get(timeout=_IDLE_S)
            except Empty:
                with contextlib.suppress(ValueError):
                    Clerk._idle.remove(self)
                    return
                # Somebody took it from among the idle and is about to give.
                errand = self._errands.get()
            errand.run()
            del errand
            if Clerk._idle:
                return
            Clerk._idle.append(self)


class Patience:
    """What a trainer waits with.

    Args:
        limit_s: seconds that one call of the operating system may take.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._hung: Errand | None = None
        self._said = False

    def run(self, work: Callable[[], T]) -> T:
        """Do the work and wait for it.

        Raises:
            DumpError: the disk does not answer, now or since an earlier errand. What was begun changes nothing more.
            Exception: what the work raised.
        """
        if getattr(_doing, "errand", None) is not None:
            return work()
        if self._hung is not None and not self._hung.ended.is_set():
            raise self._no_answer()
        while is_ending():
            time.sleep(_LOOK_S)
        errand = Errand(work)
        _running.add(errand)
        try:
            Clerk.give(errand)
            while not errand.ended.wait(_LOOK_S):
                self.judge(errand)
        except BaseException:
            # Also for Ctrl-C: the trainer may now change what would still be written.
            errand.given_up = True
            self._hung = errand
            raise
        finally:
            _running.discard(errand)
        result: T = errand.answer()
        return result

    def judge(self, errand: Errand | None) -> None:
        """Say it when an errand's present call takes long.

        Raises:
            DumpError: it takes longer than the limit.
        """
        silent_s = 0.0 if errand is None else errand.silent_s
        if silent_s > min(SAY_S, self._limit_s) and not self._said:
            self._said = True
            tell(f"rldbg: the disk has not answered for {silent_s:.0f} s; it is given up after {self._limit_s:g} s")
        if silent_s > self._limit_s:
            raise self._no_answer()

    def _no_answer(self) -> DumpError:
        return DumpError(
            "a record cannot be written: the disk does not answer",
            expected=f"an answer within {self._limit_s:g} s (patience_s)",
            hint='record onto another disk, or train on without records: Recorder(..., on_error="warn")',
        )


def begin_nothing_more() -> None:
    """Let this thread alone go on, and wait a little for what others have begun: the process ends next."""
    global _last
    _last = threading.get_ident()
    until = time.monotonic() + SAY_S
    while any(not errand.ended.is_set() for errand in list(_running)) and time.monotonic() < until:
        time.sleep(0.005)


def is_ending() -> bool:
    """Whether another thread ends the process, as a signal had it: nothing new is begun."""
    return _last not in (None, threading.get_ident())


def tell(text: str) -> None:
    """Warn the trainer's owner; a trainer run with `-W error` is not ended by it."""
    try:
        warnings.warn(text, RuntimeWarning, stacklevel=3)
    except RuntimeWarning:
        with contextlib.suppress(Exception):
            sys.stderr.write(f"{text}\n")
