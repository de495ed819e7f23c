from __future__ import annotations

import asyncio
import functools
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from replay_core.errors import ChildDiedError, JobCancelledError, SelectionError
from replay_core.executors import wire
from replay_core.executors.async_child import AsyncChild, _lines, comes
from replay_core.jobs import Event, Job, LogLine, Partial, Progress

Command = Callable[[str], list[str]]


@asynccontextmanager
async def started(command: Command, grace_s: float = 2.0) -> AsyncIterator[AsyncChild]:
    child = AsyncChild(wire.READER, command=command, grace_s=grace_s)
    try:
        yield child
    finally:
        await child.stop()


class Seen(list[Event]):
    """Collects events and lets a test wait for the first Progress, or the first printed line."""

    def __init__(self) -> None:
        super().__init__()
        self.progressed = asyncio.Event()
        self.printed = asyncio.Event()

    def __call__(self, event: Event) -> None:
        self.append(event)
        if isinstance(event, Progress):
            self.progressed.set()
        if isinstance(event, LogLine):
            self.printed.set()


async def test_events_and_printed_lines_arrive_before_the_answer(command: Command) -> None:
    async with started(command) as child:
        seen = Seen()
        await child.run(Job("progress", {"size": 300_000}), seen)
        assert [type(event) for event in seen] == [Progress, Progress, Progress, Partial]
        seen = Seen()
        assert await child.run(Job("print"), seen) == {"read": ""}
        assert seen[0] == LogLine("from print")
        assert seen[-1] == LogLine("no newline")


async def test_the_loop_goes_on_while_a_job_runs_and_jobs_keep_their_order(command: Command) -> None:
    async with started(command) as child:
        finished: list[str] = []

        async def ask(name: str, seconds: float) -> None:
            await child.run(Job("sleep", {"seconds": seconds}))
            finished.append(name)

        jobs = [asyncio.create_task(ask("slow", 0.3)), asyncio.create_task(ask("quick", 0.0))]
        await asyncio.sleep(0)
        assert not finished
        await asyncio.gather(*jobs)
        assert finished == ["slow", "quick"]
        assert not child.is_busy


async def test_cancel_stops_the_job_and_keeps_the_child(command: Command) -> None:
    async with started(command) as child:
        seen = Seen()
        job = asyncio.create_task(child.run(Job("sleep"), seen))
        await seen.progressed.wait()
        pid = child.pid
        await child.cancel()
        with pytest.raises(JobCancelledError, match="sleep was cancelled"):
            await job
        assert (await child.run(Job("pid")))["pid"] == pid


def _set(flowing: asyncio.Event, _event: object) -> None:
    flowing.set()


async def test_a_cancel_in_the_middle_of_a_long_line_waits_for_its_end(command: Command) -> None:
    async with started(command) as child:
        for _ in range(10):
            flowing = asyncio.Event()
            seen = functools.partial(_set, flowing)
            job = asyncio.create_task(child.run(Job("flood"), seen))
            await flowing.wait()
            await child.cancel()
            with pytest.raises(JobCancelledError, match=r"flood was cancelled$"):
                await job


async def test_a_queued_job_can_be_cancelled_before_it_runs(command: Command) -> None:
    async with started(command) as child:
        seen = Seen()
        running = asyncio.create_task(child.run(Job("sleep"), seen))
        queued = asyncio.create_task(child.run(Job("sleep")))
        await seen.progressed.wait()
        await child.cancel()
        outcomes = await asyncio.gather(running, queued, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [JobCancelledError] * 2


async def test_a_job_that_will_not_stop_dies_with_its_child_and_the_next_job_gets_a_new_one(command: Command) -> None:
    async with started(command, grace_s=0.3) as child:
        seen = Seen()
        job = asyncio.create_task(child.run(Job("deaf"), seen))
        await seen.printed.wait()
        pid = child.pid
        await child.cancel()
        with pytest.raises(JobCancelledError, match="process was ended"):
            await job
        assert (await child.run(Job("pid")))["pid"] != pid


async def test_a_job_asked_for_while_a_cancelled_one_does_not_stop_is_run_by_the_next_child(command: Command) -> None:
    async with started(command, grace_s=0.3) as child:
        seen = Seen()
        deaf = asyncio.create_task(child.run(Job("deaf"), seen))
        await seen.printed.wait()
        pid = child.pid
        deaf.cancel()
        await asyncio.wait([deaf])
        assert (await child.run(Job("pid")))["pid"] != pid


async def test_cancelling_the_waiting_task_cancels_the_job(command: Command) -> None:
    async with started(command) as child:
        seen = Seen()
        job = asyncio.create_task(child.run(Job("sleep"), seen))
        await seen.progressed.wait()
        pid = child.pid
        job.cancel()
        with pytest.raises(asyncio.CancelledError):
            await job
        assert (await child.run(Job("pid")))["pid"] == pid, "the sleep no longer stands before it"
        assert not child.is_busy


async def test_a_death_is_an_error_of_every_job_in_flight(command: Command) -> None:
    async with started(command) as child:
        outcomes = await asyncio.gather(child.run(Job("abort")), child.run(Job("echo")), return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [ChildDiedError] * 2
        assert "SIGABRT" in str(outcomes[0])
        assert "about to abort" in str(outcomes[0]) or "in perform" in str(outcomes[0])
        assert await child.run(Job("echo")) == {"params": {}}


async def test_errors_and_a_raising_listener_leave_the_child_usable(command: Command) -> None:
    def broken(_event: Event) -> None:
        raise RuntimeError("the pane is gone")

    async with started(command) as child:
        with pytest.raises(SelectionError):
            await child.run(Job("refuse"))
        with pytest.raises(RuntimeError, match="the pane is gone"):
            await child.run(Job("sleep"), broken)
        assert await child.run(Job("echo")) == {"params": {}}


async def test_stop_before_start_and_twice_is_harmless(command: Command) -> None:
    child = AsyncChild(wire.READER, command=command)
    await child.stop()
    await child.start()
    assert child.pid is not None
    await child.stop()
    await child.stop()
    assert child.pid is None


async def test_lines_are_whole_however_they_come() -> None:
    stream = asyncio.StreamReader(limit=16)
    long = b"x" * 200_000
    for piece in (b"one\ntw", b"o\n\n", long, b"\nlast"):
        stream.feed_data(piece)
    stream.feed_eof()
    lines = [line async for line in _lines(stream)]
    assert lines[3] == long
    assert [*lines[:3], *lines[4:]] == [b"one", b"two", b"", b"last"]


@pytest.mark.parametrize(
    "line", ["no message", '{"id": 1, "event": "none"}', '{"id": 1, "event": "progress"}', '{"id": [1]}', '{"id": 1}']
)
async def test_a_line_that_is_no_message_ends_the_child_and_nobody_waits(line: str) -> None:
    code = f"import sys\nfor request in sys.stdin: sys.stdout.write({line!r} + '\\n'); sys.stdout.flush()"
    async with started(lambda role: [sys.executable, "-c", code]) as child:
        with pytest.raises(ChildDiedError, match="no message"):
            await asyncio.wait_for(child.run(Job("open")), 20)


async def test_a_cancel_inside_an_import_waits_for_its_end(command: Command) -> None:
    async with started(command, grace_s=20.0) as child:
        seen = Seen()
        running = asyncio.create_task(child.run(Job("import", {"name": "slow_to_import"}), seen))
        await asyncio.wait_for(seen.progressed.wait(), 20)
        await child.cancel()
        with pytest.raises(JobCancelledError):
            await running
        # A module that was stopped half-way would be imported anew, or be half of one.
        assert await child.run(Job("imported", {"name": "slow_to_import"})) == {"whole": True}


@pytest.mark.parametrize("turns", range(5))
async def test_a_cancellation_that_comes_with_what_is_waited_for_is_not_lost(turns: int) -> None:
    event = asyncio.Event()
    task = asyncio.ensure_future(comes(event, 5))
    await asyncio.sleep(0.01)
    event.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    was_waiting = task.cancel()
    if was_waiting:
        with pytest.raises(asyncio.CancelledError):
            await task
    else:
        await task
