"""The child process: `python -m replay_core [reader|replayer]` answers jobs over stdio until stdin ends.

    main thread      performs one job at a time
    wire thread      reads requests; a cancel interrupts the main thread; EOF ends the process at once
    sampler thread   a Sample per second while a torch job runs

Nobody imports this module but the tests of it. A job that fails is an answer; the process lives on.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

from replay_core.budget import lift_limit, limit_process
from replay_core.errors import JobCancelledError, RldbgError
from replay_core.executors import forking, wire
from replay_core.executors.in_process import unexpected
from replay_core.jobs import Answer, Event, Job, OnEvent, event_to_mapping, is_coordinating

Perform = Callable[[Job, OnEvent], Answer]

#: Added to the nice value: a child must not slow a trainer on the same machine.
NICENESS = 5

#: How soon a job that was not stopped is asked again.
_AGAIN_S = 0.02

_PR_SET_PDEATHSIG = 1


def main(
    perform: Perform | None = None, argv: list[str] | None = None, prepare: Callable[[], None] | None = None
) -> NoReturn:
    """Answer jobs until stdin ends. `perform` and `prepare` stand in for the workbench in tests of this loop."""
    options = argparse.ArgumentParser(prog="python -m replay_core", description=__doc__)
    options.add_argument("role", nargs="?", choices=(wire.READER, wire.REPLAYER), default=wire.REPLAYER)
    options.add_argument(
        "--die-with-parent", action="store_true", help="ask the kernel (Linux) to end us with our parent"
    )
    options.add_argument("--origin", action="store_true", help="import what replays need, and fork who answers")
    options.add_argument("--forked", action="store_true", help="the process that forked us stepped back for us")
    chosen = options.parse_args(argv)

    if chosen.die_with_parent:
        _die_with_parent()
    _step_back(0 if chosen.forked else NICENESS)
    if chosen.origin:
        forking.serve(chosen.role, lambda words: main(perform, words), prepare or _imports)
    requests_fd, answers_fd = _take_the_wire()
    faulthandler.enable(all_threads=True)
    if chosen.role == wire.READER:
        limit_process()
    else:
        lift_limit()
    _Loop(perform or _workbench, requests_fd, answers_fd).run()


def _step_back(by: int = NICENESS) -> None:
    """Leave the processor to whoever else wants it, this child's own screen first.

    Linux shares the processor out between sessions before it looks at nice values (sched(7), "The autogroup feature"),
    and this child leads a session of its own: its session has to step back as well.
    """
    with contextlib.suppress(OSError, AttributeError):
        niceness = os.nice(by)
        if os.getsid(0) == os.getpid():
            with open("/proc/self/autogroup", "w") as group:
                group.write(str(niceness))


def _workbench(job: Job, on_event: OnEvent) -> Answer:
    # Deferred: a child answers its first cancel before the workbench and what it needs are imported.
    from replay_core.desk import perform

    return perform(job, on_event)


def _imports() -> None:
    from replay_core.desk import prepare

    prepare()


class _Loop:
    """Requests in, events and answers out."""

    def __init__(self, perform: Perform, requests_fd: int, answers_fd: int) -> None:
        self._perform = perform
        self._requests = os.fdopen(requests_fd, "rb")
        self._answers_fd = answers_fd
        self._answering = threading.Lock()
        self._waiting: queue.SimpleQueue[tuple[int, Job]] = queue.SimpleQueue()
        self._cancelled: set[int] = set()
        self._running: int | None = None
        #: The main thread is inside `_write`: a cancel waits, since half a line would spoil the next.
        self._is_writing = False

    def run(self) -> NoReturn:
        signal.signal(signal.SIGINT, self._on_interrupt)
        threading.Thread(target=self._listen, name="wire", daemon=True).start()
        while True:
            number, job = self._waiting.get()
            try:
                self._answer(number, job)
            except KeyboardInterrupt:  # came between the job's end and its answer
                self._running = None
                self._send(number, {"error": _cancelled(job)})

    def _listen(self) -> None:
        for line in self._requests:
            message = wire.decode(line)
            if message is None:
                os.write(2, b"not a request: %r\n" % line[:200])
            elif message.get("cancel"):
                self._cancelled.add(message["id"])
                threading.Thread(target=self._interrupt, args=(message["id"],), name="cancel", daemon=True).start()
            elif isinstance(message.get("job"), str) and isinstance(message.get("params") or {}, dict):
                self._waiting.put((message["id"], Job(message["job"], message.get("params") or {})))
            else:
                os.write(2, b"not a request: %r\n" % line[:200])
        _leave()

    def _interrupt(self, number: int) -> None:
        """Again until it is heard: an import in the job's way is not interrupted."""
        while self._running == number and number in self._cancelled and hasattr(signal, "pthread_kill"):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            time.sleep(_AGAIN_S)

    def _on_interrupt(self, _signal: int, frame: FrameType | None) -> None:
        if not self._is_writing and not _is_importing(frame):
            self._stop_if_cancelled()

    def _stop_if_cancelled(self) -> None:
        if self._running in self._cancelled:
            self._cancelled.discard(self._running or 0)
            raise KeyboardInterrupt

    def _answer(self, number: int, job: Job) -> None:
        def on_event(event: Event) -> None:
            self._send(number, event_to_mapping(event))

        try:
            self._running = number
            self._stop_if_cancelled()
            with _samples(job, on_event):
                result = self._perform(job, on_event)
            self._running = None  # from here on a cancel comes too late
            line = wire.encode({"id": number, "result": result})
        except KeyboardInterrupt:
            line = wire.encode({"id": number, "error": _cancelled(job)})
        except RldbgError as error:
            line = wire.encode({"id": number, "error": error.to_mapping()})
        except BaseException as error:
            line = wire.encode({"id": number, "error": unexpected(job, error).to_mapping()})
        self._running = None
        self._cancelled.discard(number)
        # The parent delivers what the job printed before it delivers the answer.
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os.write(2, wire.end_mark(number).encode())
        self._write(line)

    def _send(self, number: int, content: dict[str, Any]) -> None:
        self._write(wire.encode({"id": number, **content}))

    def _write(self, line: bytes) -> None:
        if threading.current_thread() is not threading.main_thread():
            self._write_whole(line)
            return
        self._is_writing = True
        try:
            self._write_whole(line)
        finally:
            self._is_writing = False
        if not _is_importing(sys._getframe()):
            self._stop_if_cancelled()

    def _write_whole(self, line: bytes) -> None:
        with self._answering:
            rest = memoryview(line)
            try:
                while rest:
                    rest = rest[os.write(self._answers_fd, rest) :]
            except BrokenPipeError:
                _leave()


def _is_importing(frame: FrameType | None) -> bool:
    """Whether the frame is inside an import: stopped there, a library is half a library for every later job."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


@contextlib.contextmanager
def _samples(job: Job, on_event: OnEvent) -> Any:
    # Who coordinates has nothing to weigh: its children send samples of their own.
    if wire.role_of(job) != wire.REPLAYER or is_coordinating(job):
        yield
        return
    # Deferred: psutil costs a reader 20 ms and would sample nothing there.
    from replay_core.telemetry.sampler import Sampler

    with Sampler(on_event):
        yield


def _take_the_wire() -> tuple[int, int]:
    """Keep stdin and stdout for the wire; a job that prints writes to stderr, one that reads finds nothing."""
    requests_fd, answers_fd = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(line_buffering=True)
    return requests_fd, answers_fd


def _leave() -> NoReturn:
    """End now, with every process a job started, whatever the main thread is doing."""
    if hasattr(os, "getsid") and os.getsid(0) == os.getpid():
        wire.kill_group(os.getpid())
    os._exit(0)


def _die_with_parent() -> None:
    # stdin EOF does the same, but a thread must run to see it, and native code may hold the interpreter.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _cancelled(job: Job) -> dict[str, Any]:
    return JobCancelledError(f"{job.kind} was cancelled").to_mapping()


if __name__ == "__main__":
    main()
