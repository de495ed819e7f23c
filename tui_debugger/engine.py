"""Who does the work: a light reader child and a warm replayer child. The screen only ever waits for them."""

from __future__ import annotations

import asyncio
from typing import Protocol

from replay_core.executors import wire
from replay_core.executors.async_child import AsyncChild
from replay_core.jobs import BACKGROUND_JOBS, Answer, Job, OnEvent, ignore, is_coordinating


class Engine(Protocol):
    """Runs jobs for the screen. Tests put a script in its place."""

    async def run(self, job: Job, on_event: OnEvent = ignore) -> Answer:
        """One job to its end. Cancelling the task that waits cancels the job.

        Raises:
            RldbgError: what the job raised, or ChildDiedError.
        """
        ...

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


class ChildEngine:
    """Children by what they do: reading never waits for a replay, and torch is loaded only by a replay.

    A matrix has a child of its own that starts one per cell; the warm replayer leaves first, since it may hold the
    memory that the cells need. What nobody asked for (diagnosing a run that was opened) is read by a child of its
    own: what somebody looks at never waits for it.
    """

    def __init__(self) -> None:
        self._reader = AsyncChild(wire.READER)
        self._background = AsyncChild(wire.READER)
        self._replayer = AsyncChild(wire.REPLAYER)
        self._coordinator = AsyncChild(wire.REPLAYER)
        self._replayed: AsyncChild | None = None
        """Who ran the last replay to its end: it knows how the cells compared."""

    async def start(self) -> None:
        """Start the reader; the replayer starts with its first job."""
        await self._reader.start()

    async def run(self, job: Job, on_event: OnEvent = ignore) -> Answer:
        if is_coordinating(job):
            await self._replayer.stop()
        child = self._child_of(job)
        if job.kind == "replay":
            self._replayed = None
        answer = await child.run(job, on_event)
        if job.kind == "replay":
            self._replayed = child
        return answer

    def _child_of(self, job: Job) -> AsyncChild:
        if is_coordinating(job):
            return self._coordinator
        if job.kind in BACKGROUND_JOBS:
            return self._background
        if job.params.get("replayed") and self._replayed is not None:
            return self._replayed
        return self._replayer if wire.role_of(job) == wire.REPLAYER else self._reader

    async def stop(self) -> None:
        children = (self._reader, self._background, self._replayer, self._coordinator)
        await asyncio.gather(*(child.stop() for child in children))
