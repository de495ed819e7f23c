"""AsyncChild: one warm child behind asyncio, for a screen that goes on drawing while jobs run."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from msgspec import Struct, field

from replay_core.errors import JobCancelledError, error_from_mapping
from replay_core.executors import wire
from replay_core.jobs import Answer, Event, Job, LogLine, OnEvent, ignore

#: Bytes taken from a child at once. What is not taken yet stays in its pipe, and the child waits: a fast child fills no
#: buffer here that would have to be moved about while keys wait.
_TAKEN = 1 << 16
#: After so long at what arrives, whoever shares the loop has it for as long as the rest: a key's paint is a chain of
#: turns, and one line between any two of them would make it late.
_BUSY_S, _REST_S = 0.003, 0.002
#: How long a child may take to leave when asked, a job to stop when cancelled, a last log line to arrive.
GRACE_S = 2.0


class _Pending(Struct, eq=False):
    """A job that was sent: who listens to it, and what has come back so far."""

    number: int
    job: Job
    on_event: OnEvent
    answer: asyncio.Future[dict[str, Any]]
    finished: asyncio.Event = field(default_factory=asyncio.Event)
    log_complete: asyncio.Event = field(default_factory=asyncio.Event)
    #: `run` has left without the answer; whoever stops the job clears it away.
    is_abandoned: bool = False

    def settle(self, outcome: dict[str, Any] | BaseException) -> None:
        if self.answer.done():
            return
        if isinstance(outcome, BaseException):
            self.answer.set_exception(outcome)
        else:
            self.answer.set_result(outcome)

    def deliver(self, event: Event) -> None:
        try:
            self.on_event(event)
        except Exception as error:  # the listener's mistake is its caller's to see, not the drain's to die of
            self.on_event = ignore
            self.settle(error)


class AsyncChild:
    """A child that starts with its first job and stays warm; a dead one is replaced by the next job.

    Jobs sent while one runs wait in the child, in order. All methods belong to one event loop.

    Args:
        role: `wire.READER` (no torch, memory limit) or `wire.REPLAYER`.
        command: makes the command line for a role, in place of the job loop (`wire.child_command`).
        environment: added to the child's environment.
        grace_s: how long a cancelled job may take to stop before its child is killed.
    """

    def __init__(
        self,
        role: str,
        *,
        command: Callable[[str], list[str]] = wire.child_command,
        environment: Mapping[str, str] | None = None,
        grace_s: float = GRACE_S,
    ) -> None:
        self.role = role
        self.grace_s = grace_s
        self._command = command
        self._environment = dict(environment or {})
        self._numbers = itertools.count(1)
        self._process: asyncio.subprocess.Process | None = None
        self._pending: dict[int, _Pending] = {}
        self._tail: deque[str] = deque(maxlen=wire.TAIL_LINES)
        self._starting = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def pid(self) -> int | None:
        """Process id of the child, while there is one."""
        return self._process.pid if self._process else None

    @property
    def is_busy(self) -> bool:
        return bool(self._pending)

    async def start(self) -> None:
        """Start the child before its first job needs it (after the screen's first paint, say)."""
        await self._started()

    async def run(self, job: Job, on_event: OnEvent = ignore) -> Answer:
        """Run one job to its end. Its events and log lines reach `on_event` before the answer does.

        Cancelling the task that awaits this cancels the job and keeps the child.

        Raises:
            RldbgError: the error the job raised.
            JobCancelledError: `cancel` was called.
            ChildDiedError: the child ended without an answer.
        """
        number = next(self._numbers)
        line = wire.request(number, job)
        # A child is ended whose cancelled job does not stop (torch's import, a kernel): what is sent meanwhile would
        # die with it.
        while leaving := [pending for pending in self._pending.values() if pending.is_abandoned]:
            await leaving[0].finished.wait()
            self._pending.pop(leaving[0].number, None)
        process = await self._started()
        pending = _Pending(number, job, on_event, asyncio.get_running_loop().create_future())
        self._pending[number] = pending
        try:
            await _write(process, line)
            message = await pending.answer
            await comes(pending.log_complete, GRACE_S)
        except BaseException:
            pending.on_event = ignore
            if not pending.finished.is_set():
                pending.is_abandoned = True
                self._spawn(self._stop_job(process, pending))
            raise
        finally:
            if pending.finished.is_set():
                self._pending.pop(number, None)
        error = message.get("error")
        if error is not None:
            raise error_from_mapping(error)
        return message["result"]

    async def cancel(self) -> None:
        """Stop every job in flight: `run` raises JobCancelledError. A job that does not stop dies with its child."""
        process = self._process
        if process is not None:
            await asyncio.gather(*(self._stop_job(process, pending) for pending in list(self._pending.values())))

    async def stop(self) -> None:
        """End the child: at stdin EOF, by force when that takes too long. Safe to call twice."""
        process = self._process
        if process is not None:
            assert process.stdin is not None
            process.stdin.close()
            try:
                await asyncio.wait_for(process.wait(), self.grace_s)
            except asyncio.TimeoutError:
                wire.kill_group(process.pid)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=2 * GRACE_S)

    async def _started(self) -> asyncio.subprocess.Process:
        async with self._starting:
            if self._process is None:
                self._tail.clear()
                self._process = await asyncio.create_subprocess_exec(
                    *self._command(self.role),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.PIPE,
                    env={**wire.child_environment(self.role), **self._environment},
                    limit=_TAKEN,
                    start_new_session=True,
                )
                self._spawn(self._attend(self._process))
            return self._process

    async def _attend(self, process: asyncio.subprocess.Process) -> None:
        """Drain one child until it ends, then tell every job it leaves behind."""
        logs = asyncio.create_task(self._drain_logs(process))
        await self._drain_wire(process)
        try:
            status: int | None = await asyncio.wait_for(process.wait(), GRACE_S)
        except asyncio.TimeoutError:
            status = None
        wire.kill_group(process.pid)
        await asyncio.wait([logs], timeout=GRACE_S)
        logs.cancel()
        if self._process is process:
            self._process = None
        left = list(self._pending.values())
        error = wire.death([pending.job.kind for pending in left], status, list(self._tail))
        for pending in left:
            if not pending.finished.is_set():
                self._pending.pop(pending.number, None)
                pending.finished.set()
                pending.settle(error)

    async def _drain_wire(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        began = time.monotonic()
        async for line in _lines(process.stdout):
            told = wire.told(line)
            if told is None:
                self._end_garbled(process, line)
                continue
            number, message = told
            pending = self._pending.get(number)
            if pending is None:
                continue
            if not isinstance(message, dict):
                pending.deliver(message)
                # Lines that have arrived are read without ever waiting: nobody else would have a turn.
                is_long = time.monotonic() - began > _BUSY_S
                await asyncio.sleep(_REST_S if is_long else 0)
                began = time.monotonic() if is_long else began
            else:
                pending.finished.set()
                pending.settle(message)

    def _end_garbled(self, process: asyncio.subprocess.Process, line: bytes) -> None:
        """Whoever waits for what that line should have been would wait for ever."""
        waiting = list(self._pending.values())
        for pending in waiting:
            pending.settle(wire.garbled([pending.job.kind], line))
        wire.kill_group(process.pid)

    async def _drain_logs(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        async for line in _lines(process.stderr):
            text, ended = wire.read_log(line)
            if text is not None:
                self._tail.append(text)
                speaking = min((p.number for p in self._pending.values() if not p.log_complete.is_set()), default=None)
                if speaking is not None:
                    self._pending[speaking].deliver(LogLine(text))
            if ended in self._pending:
                self._pending[ended].log_complete.set()

    async def _stop_job(self, process: asyncio.subprocess.Process, pending: _Pending) -> None:
        """Ask for one job to stop; when it does not, end its child (every job in it hears ChildDiedError)."""
        await _write(process, wire.cancellation(pending.number))
        try:
            await asyncio.wait_for(pending.finished.wait(), self.grace_s)
        except asyncio.TimeoutError:
            pending.settle(
                JobCancelledError(f"{pending.job.kind} was cancelled; it did not stop, so its process was ended")
            )
            wire.kill_group(process.pid)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(pending.finished.wait(), GRACE_S)
        if pending.answer.done() and not pending.answer.cancelled():
            pending.answer.exception()  # nobody may be left to look at it
        if pending.is_abandoned:
            self._pending.pop(pending.number, None)

    def _spawn(self, work: Any) -> None:
        # asyncio holds tasks weakly: one that nobody keeps may vanish in the middle.
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _lines(stream: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Its lines without their ends, of any length: a document is one."""
    parts: list[bytes] = []
    while chunk := await stream.read(_TAKEN):
        first, *rest = chunk.split(b"\n")
        parts.append(first)
        for line in rest:
            yield b"".join(parts)
            parts = [line]
    if any(parts):
        yield b"".join(parts)


async def _write(process: asyncio.subprocess.Process, line: bytes) -> None:
    assert process.stdin is not None
    with contextlib.suppress(ConnectionError, RuntimeError):  # it died: the end of its wire tells how
        process.stdin.write(line)
        await process.stdin.drain()


async def comes(event: asyncio.Event, seconds: float) -> None:
    """Wait until it is set, so long at most. Up to Python 3.11 `wait_for` loses a cancellation that arrives with it."""
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({waiting}, timeout=seconds)
    finally:
        waiting.cancel()
