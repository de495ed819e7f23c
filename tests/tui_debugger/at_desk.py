"""The engine in this process: every job is done by the real desk, and its answer has crossed no pipe."""

from __future__ import annotations

import asyncio
import json

from replay_core import desk
from replay_core.jobs import Answer, Job, OnEvent, ignore


class DeskEngine:
    """What the children do, without children: for tests that open genuine files."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        """Steps that nobody looks at wait for it."""
        self.gate.set()

    async def start(self) -> None:
        return

    async def stop(self) -> None:
        return

    async def run(self, job: Job, on_event: OnEvent = ignore) -> Answer:
        if job.kind == "compare_step":
            await self.gate.wait()
        await asyncio.sleep(0)
        return json.loads(json.dumps(desk.perform(job, on_event)))
