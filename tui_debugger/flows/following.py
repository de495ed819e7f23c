"""A run is followed while its trainer writes it: what has come stands on the screen, and is diagnosed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from replay_core.errors import JobCancelledError, NotADumpError, RldbgError
from replay_core.jobs import Job
from tui_debugger.flows.diagnosing import Diagnosing
from tui_debugger.flows.errands import Errands
from tui_debugger.flows.looking import Looking
from tui_debugger.live import LiveRun
from tui_debugger.state import Part

if TYPE_CHECKING:
    from replay_core.documents.following import FollowingDocument
    from replay_core.documents.run import RunDocument

#: Seconds between two looks at a run that is followed.
POLL_S = 1.0
#: A step is diagnosed when a newer one is there, or nothing has come for so long.
SETTLED_S = 2.0
#: A diagnosis this short is made anew for every step that comes; a longer one looks at the new steps alone.
SHORT_S = 2.0
#: Diagnosing takes at most this share of the time while a run is followed.
SHARE = 0.2


class Following:
    """What has come to A."""

    def __init__(self, errands: Errands, looking: Looking, diagnosing: Diagnosing) -> None:
        self._errands, self.state = errands, errands.state
        self._looking, self._diagnosing = looking, diagnosing

    async def follow(self, path: Path) -> None:
        """Look at a run again and again: what has come stands on the screen, and is diagnosed. Until cancelled."""
        state = self.state
        live = state.opened.live_run = LiveRun(waits=state.opened.a is None)
        self._waiting: set[int] = set()
        self._came_at = self._next_look = 0.0
        troubled = ""
        try:
            while True:
                try:
                    have = len(state.opened.a["records"]) if state.opened.a is not None else -1
                    document = await self._errands.quietly(Job("follow", {"path": str(path), "have": have}))
                    troubled = ""
                    await self._take_more(document, live)
                except NotADumpError:
                    live.waits = state.opened.a is None
                except JobCancelledError:
                    pass  # another job was cancelled, and took this look with it
                except RldbgError as error:
                    if state.opened.a is None and not path.exists():
                        live.waits = True
                    elif error.message != troubled:
                        self._errands.log(f"while following: {error}")
                    troubled = error.message
                self._errands.changed(Part.ANSWER)
                await asyncio.sleep(POLL_S)
        finally:
            state.opened.live_run = None
            self._errands.changed(Part.ANSWER)

    async def _take_more(self, document: FollowingDocument, live: LiveRun) -> None:
        live.waits = False
        live.last_step, live.silent_s, live.pace_s = document["last_step"], document["silent_s"], document["pace_s"]
        if document["run"] is not None:
            await self._grow(document["run"], whole=document["whole"])
        self._diagnose_news()

    async def _grow(self, run: RunDocument, *, whole: bool) -> None:
        """Take what has come. Who stands on the newest step goes on to the next; nobody else's cursor moves."""
        state = self.state
        before = state.opened.a
        newest = _newest(before)
        stands_there = before is None or state.opened.scope.step == newest
        records = run["records"] if whole or before is None else [*before["records"], *run["records"]]
        state.opened.a = cast("RunDocument", {**run, "records": records})
        known = set(before["steps"] if before else ())
        came = {step for record in run["records"] if (step := record["key"]["step"]) is not None}
        self._waiting |= came - known if whole else came
        self._came_at = time.monotonic()
        self._errands.changed(Part.RUNS, Part.ANSWER, Part.START)
        latest = _newest(state.opened.a)
        if (
            latest is not None
            and latest != newest
            and stands_there
            and state.opened.b is None
            and state.tensors.shows_record
        ):
            await self._go_to_newest(latest)

    async def _go_to_newest(self, step: int) -> None:
        state = self.state
        stage = state.tensors.record["key"]["stage"] if state.tensors.record else None
        keys = [
            (index, record["key"]) for index, record in enumerate(state.opened.a["records"] if state.opened.a else ())
        ]
        alike = [index for index, key in keys if key["step"] == step and key["stage"] == stage]
        index = next(iter(alike), None)
        if index is None:
            index = next(index for index, key in keys if key["step"] == step)
        row = state.tensors.row
        await self._looking.show_record(index, row.name if row is not None else None)

    def _diagnose_news(self) -> None:
        """Diagnose the steps that are complete, as often as the work they make allows."""
        state, now = self.state, time.monotonic()
        health = state.opened.health
        if self._diagnosing.behind is None or health.doing or now < self._next_look:
            return
        if health.document is None and not health.trouble and state.opened.a is not None:
            self._diagnosing.behind(self._diagnosing.diagnose())
            return
        newest = _newest(state.opened.a)
        settled = now - self._came_at > SETTLED_S
        ready = tuple(sorted(step for step in self._waiting if settled or step != newest))
        if not ready:
            return
        self._waiting -= set(ready)
        self._next_look = now + max(POLL_S, min(health.took_s, SHORT_S) / SHARE)
        self._diagnosing.behind(self._diagnosing.diagnose(() if health.took_s < SHORT_S else ready))


def _newest(run: Mapping[str, Any] | None) -> int | None:
    return max((step for step in (run or {}).get("steps") or [] if step is not None), default=None)
