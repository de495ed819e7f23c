"""ChildRunner: runs a job in a child process and waits for it. A fresh child per job, or one kept warm.

Fresh children of a replay are forked from one Python that has imported torch (`executors.forking`), where that can be.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import IO, Any

from replay_core.errors import error_from_mapping
from replay_core.executors import forking, wire
from replay_core.jobs import IMPORTING, Answer, Job, LogLine, OnEvent, ignore

#: How long a child that closed its wire, or was asked to leave, may take before it is killed.
GRACE_S = 5.0
#: How long the end mark on stderr may come after the answer.
LOG_GRACE_S = 2.0

_WIRE, _LOG = "wire", "log"


class ChildRunner:
    """Runs jobs one after the other, each in a process of its own. Implements `jobs.Runner`.

    A fresh child makes time and memory independent of order, and a crash costs one job. With `warm`
    one child answers all jobs of a role; it is replaced when it dies. Use as a context manager, or
    call `close`: a warm child otherwise lives until its parent ends (it leaves at stdin EOF).

    Args:
        warm: keep the child between jobs.
        command: makes the command line for a role, in place of the job loop (`wire.child_command`).
        environment: added to the child's environment.
        time_limit_s: how long one job may take, its child's start included; then the child is ended. None: for ever.
    """

    def __init__(
        self,
        *,
        warm: bool = False,
        command: Callable[[str], list[str]] = wire.child_command,
        environment: Mapping[str, str] | None = None,
        time_limit_s: float | None = None,
    ) -> None:
        self.warm = warm
        self.time_limit_s = time_limit_s
        self._command = command
        self._environment = dict(environment or {})
        self._child: _Child | None = None
        self._origin: forking.ForkOrigin | None = None
        self._numbers = itertools.count(1)

    def __enter__(self) -> ChildRunner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """Process id of the warm child, while there is one."""
        return self._child.process.pid if self._child else None

    def run(self, job: Job, on_event: OnEvent = ignore) -> Answer:
        """Run one job to its end; events and log lines reach `on_event` in this thread, all before the answer.

        Raises:
            RldbgError: the error the job raised.
            ChildDiedError: the child ended without an answer, or was ended at the time limit.
        """
        child = self._child_for(job, on_event)
        try:
            document = child.ask(next(self._numbers), job, on_event, self.time_limit_s)
        except BaseException:
            # KeyboardInterrupt, a dead child, a listener that raised. A job's own error is an answer, below.
            self._child = None
            child.kill()
            raise
        if not self.warm:
            self._end_child()
        error = document.get("error")
        if error is not None:
            raise error_from_mapping(error)
        return document["result"]

    def close(self) -> None:
        """End the child, and the Python that children are forked from. Safe to call twice."""
        self._end_child()
        origin, self._origin = self._origin, None
        if origin is not None:
            origin.close()

    def _end_child(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.leave()

    def _child_for(self, job: Job, on_event: OnEvent) -> _Child:
        role = wire.role_of(job)
        if self._child is not None and (self._child.role != role or self._child.process.poll() is not None):
            self._end_child()
        if self._child is None:
            environment = {**wire.child_environment(role), **self._environment}
            self._child = _Child(
                role, self._forked(job, role, environment, on_event) or self._started(role, environment)
            )
        return self._child

    def _started(self, role: str, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self._command(role),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(environment),
            # Its own session: Ctrl-C reaches the parent alone, which then ends the child and whatever it started.
            start_new_session=True,
        )

    def _forked(self, job: Job, role: str, environment: Mapping[str, str], on_event: OnEvent) -> forking.Forked | None:
        """A child that has imported what the job needs; None where it is to import that itself."""
        is_ours = self._command is wire.child_command and not self.warm
        if not (is_ours and job.kind in forking.JOBS and forking.is_possible()):
            return None
        if self._origin is not None and not self._origin.is_free:
            self._origin.close()
            self._origin = None
        if self._origin is None:
            on_event(IMPORTING)
            self._origin = forking.ForkOrigin(role, environment)
        return self._origin.child()


class _Child:
    """One child process and the two threads that drain it into a queue."""

    def __init__(self, role: str, process: subprocess.Popen[bytes] | forking.Forked) -> None:
        self.role, self.process = role, process
        self._tail: deque[str] = deque(maxlen=wire.TAIL_LINES)
        self._arrived: queue.SimpleQueue[tuple[str, bytes | None]] = queue.SimpleQueue()
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self._drains = [
            threading.Thread(target=self._drain, args=(_WIRE, self.process.stdout), daemon=True),
            threading.Thread(target=self._drain, args=(_LOG, self.process.stderr), daemon=True),
        ]
        for drain in self._drains:
            drain.start()

    def _drain(self, source: str, pipe: IO[bytes]) -> None:
        with contextlib.suppress(ValueError, OSError):
            for line in pipe:
                self._arrived.put((source, line))
        self._arrived.put((source, None))

    def ask(self, number: int, job: Job, on_event: OnEvent, time_limit_s: float | None = None) -> dict[str, Any]:
        """The answer to one job: a mapping that holds `result` or `error`."""
        deadline = None if time_limit_s is None else time.monotonic() + time_limit_s
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died: the end of its wire tells how
            self.process.stdin.write(wire.request(number, job))
            self.process.stdin.flush()
        answer: dict[str, Any] | None = None
        log_complete = False
        while True:
            if answer is not None and log_complete:
                return answer
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                source, line = self._arrived.get(timeout=left if answer is None else LOG_GRACE_S)
            except queue.Empty:
                if answer is None:
                    assert time_limit_s is not None
                    raise wire.overdue(job.kind, time_limit_s, list(self._tail)) from None
                log_complete = True  # something the job started still holds stderr; the answer stands
                continue
            if left == 0 and answer is None and line is not None:
                # A job that never stops talking is overdue as well.
                raise wire.overdue(job.kind, time_limit_s or 0.0, list(self._tail))
            if line is None:
                if answer is not None:
                    return answer
                if source == _LOG:
                    log_complete = True
                    continue
                raise self._death(job, log_complete, on_event)
            if source == _LOG:
                log_complete |= self._log(line, on_event) == number
                continue
            told = wire.told(line)
            if told is None:
                raise wire.garbled([job.kind], line)
            if told[0] != number:
                continue  # of a job that was given up
            if isinstance(told[1], dict):
                answer = told[1]
            else:
                on_event(told[1])

    def _log(self, line: bytes, on_event: OnEvent) -> int | None:
        text, ended = wire.read_log(line)
        if text is not None:
            self._tail.append(text)
            on_event(LogLine(text))
        return ended

    def _death(self, job: Job, log_ended: bool, on_event: OnEvent) -> Exception:
        try:
            status: int | None = self.process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            status = None
        # What it printed last may still be on its way.
        with contextlib.suppress(queue.Empty):
            while not log_ended:
                source, line = self._arrived.get(timeout=LOG_GRACE_S)
                if source == _LOG and line is not None:
                    self._log(line, on_event)
                log_ended = source == _LOG and line is None
        return wire.death([job.kind], status, list(self._tail))

    def leave(self) -> None:
        """End at stdin EOF; by force when that takes too long."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(GRACE_S)
        self.kill()

    def kill(self) -> None:
        """End the child and everything it started, now."""
        wire.kill_group(self.process.pid)
        self.process.wait()
        with contextlib.suppress(OSError):
            if self.process.stdin is not None:
                self.process.stdin.close()
        for drain, pipe in zip(self._drains, (self.process.stdout, self.process.stderr), strict=True):
            drain.join(LOG_GRACE_S)
            # A pipe that an escaped grandchild keeps open is left to its thread: closing it here would block.
            if pipe is not None and not drain.is_alive():
                pipe.close()
