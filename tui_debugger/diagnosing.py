"""What happens behind the screen: the open run is diagnosed, and followed while its trainer writes it.

No textual here. Nobody waits for a diagnosis: it is read by a child of its own (`engine.ChildEngine`), begins once
what the user asked for stands on the screen, and leaves what is known in place until it knows better.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from replay_core.errors import JobCancelledError, NotADumpError, RldbgError
from replay_core.jobs import Document, Event, Job, Partial, Progress
from tui_debugger.errands import Errands
from tui_debugger.health import Health, merged
from tui_debugger.live import LiveRun
from tui_debugger.state import Part

#: Seconds between two looks at a run that is followed.
POLL_S = 1.0
#: A step is diagnosed when a newer one is there, or nothing has come for so long.
SETTLED_S = 2.0
#: A diagnosis this short is made anew for every step that comes; a longer one looks at the new steps alone.
SHORT_S = 2.0
#: Diagnosing takes at most this share of the time while a run is followed.
SHARE = 0.2


class Diagnosing(Errands):
    """The diagnosis of A, and what has come to A."""

    behind: Callable[[Coroutine[Any, Any, Any]], None] | None = None
    """Who runs what nobody waits for; the screen sets it."""

    def look_behind(self) -> None:
        """Have the open run diagnosed, unless it is a saved document."""
        state = self.state
        state.health = Health()
        if state.a is not None and state.snapshot is None and self.behind is not None:
            self.behind(self.diagnose())

    # ── diagnosing ───────────────────────────────────────────────────────────────────────────────

    async def diagnose(self, steps: tuple[int, ...] = ()) -> None:
        """Diagnose A, or these of its steps; what was known stays on the screen meanwhile."""
        run, health = self.state.a, self.state.health
        if run is None:
            return
        began = time.monotonic()
        health.doing, health.trouble = "reading", ""
        self._changed(Part.RUNS, Part.ANSWER)
        try:
            document = await self._diagnosed(run, steps, health)
        except JobCancelledError:
            health.trouble = "cancelled, E begins again"
        except asyncio.CancelledError:
            health.trouble = "cancelled, E begins again"
            raise
        except RldbgError as error:
            health.trouble = error.message
            self._log(f"not diagnosed: {error}")
        else:
            self._take_diagnosis(health, document, steps, time.monotonic() - began)
        finally:
            health.doing = ""
            self._changed(Part.RUNS, Part.ANSWER)

    async def _diagnosed(self, run: Document, steps: tuple[int, ...], health: Health) -> Document:
        series: list[Document] = []

        def on_event(event: Event) -> None:
            if isinstance(event, Partial):
                series.extend(event.document.get("series") or [])
            elif isinstance(event, Progress):
                health.doing = f"{event.what.removeprefix('diagnosing ')} ({event.done:,} of {event.total or 0:,})"
                self._changed(Part.RUNS, Part.ANSWER)
            else:
                self._on_log(event)

        asked = {"step": ",".join(map(str, steps))} if steps else {}
        paths = [run["path"], *self.state.more] if run is self.state.a else [run["path"]]
        job = Job("diagnose", {"path": run["path"], "paths": paths, "stream": True, **asked})
        document = await self.engine.run(job, on_event)
        return {**document, "series": series or document["series"]}

    def _take_diagnosis(self, health: Health, document: Document, steps: tuple[int, ...], took_s: float) -> None:
        before = health.document
        if steps and before is not None:
            health.document = merged(before, document)
            health.behind += [step for step in steps if step not in health.behind]
        else:
            health.document, health.took_s = document, took_s
            health.behind.clear()
        worst = health.worst
        if worst is not None and (before is None or worst["id"] not in {one["id"] for one in before["findings"]}):
            self._log(f"{worst['severity']}: {worst['id']} {worst['claim']}")

    async def explain(self, id: str) -> str:
        """What a rule looks at, and where its numbers come from."""
        document = await self._guard(self.engine.run(Job("explain", {"id": id}), self._on_log))
        return str(document["text"]) if document else ""

    # ── going where a finding points ─────────────────────────────────────────────────────────────

    def record_at(self, where: Mapping[str, Any]) -> int | None:
        """The record of A that a finding points to: of those that contradict nothing it says, the likest."""
        best: tuple[int, int] | None = None
        for index, record in enumerate((self.state.a or {}).get("records") or []):
            key = record["key"]
            parts = [(key.get(n), where.get(n)) for n in ("step", "micro", "rank", "role", "stage")]
            parts.append((str(record.get("path")), where.get("path")))
            if any(have is not None and want is not None and have != want for have, want in parts):
                continue
            score = sum(have is not None and have == want for have, want in parts)
            if score and (best is None or score > best[0]):
                best = score, index
        return None if best is None else best[1]

    # ── following ────────────────────────────────────────────────────────────────────────────────

    async def follow(self, path: Path) -> None:
        """Look at a run again and again: what has come stands on the screen, and is diagnosed. Until cancelled."""
        state = self.state
        live = state.live_run = LiveRun(waits=state.a is None)
        self._waiting: set[int] = set()
        self._came_at = self._next_look = 0.0
        troubled = ""
        try:
            while True:
                try:
                    have = len(state.a["records"]) if state.a is not None else -1
                    document = await self.engine.run(Job("follow", {"path": str(path), "have": have}), self._on_log)
                    troubled = ""
                    await self._take_more(document, live)
                except NotADumpError:
                    live.waits = state.a is None
                except JobCancelledError:
                    pass  # another job was cancelled, and took this look with it
                except RldbgError as error:
                    if error.message != troubled:
                        self._log(f"while following: {error}")
                    troubled = error.message
                self._changed(Part.ANSWER)
                await asyncio.sleep(POLL_S)
        finally:
            state.live_run = None
            self._changed(Part.ANSWER)

    async def _take_more(self, document: Document, live: LiveRun) -> None:
        live.waits = False
        live.last_step, live.silent_s, live.pace_s = (document[n] for n in ("last_step", "silent_s", "pace_s"))
        if document["run"] is not None:
            await self._grow(document["run"], whole=bool(document["whole"]))
        self._diagnose_news()

    async def _grow(self, run: Document, *, whole: bool) -> None:
        """Take what has come. Who stands on the newest step goes on to the next; nobody else's cursor moves."""
        state = self.state
        before = state.a
        newest = _newest(before)
        stands_there = before is None or state.scope.step == newest
        records = run["records"] if whole or before is None else [*before["records"], *run["records"]]
        state.a = {**(before or {}), **run, "records": records}
        known = set((before or {}).get("steps") or [])
        came = {record["key"]["step"] for record in run["records"]} - {None}
        self._waiting |= came - known if whole else came
        self._came_at = time.monotonic()
        self._changed(Part.RUNS, Part.ANSWER, Part.START)
        latest = _newest(state.a)
        if latest is not None and latest != newest and stands_there and state.b is None and state.shows_record:
            await self._go_to_newest(latest)

    async def _go_to_newest(self, step: int) -> None:
        state = self.state
        here = (state.record or {}).get("key") or {}
        keys = [(index, record["key"]) for index, record in enumerate((state.a or {})["records"])]
        alike = [index for index, key in keys if key["step"] == step and key["stage"] == here.get("stage")]
        index = next(iter(alike), None)
        if index is None:
            index = next(index for index, key in keys if key["step"] == step)
        row = state.row
        await self.show_record(index, row.name if row is not None else None)

    def _diagnose_news(self) -> None:
        """Diagnose the steps that are complete, as often as the work they make allows."""
        state, now = self.state, time.monotonic()
        health = state.health
        if self.behind is None or health.doing or now < self._next_look:
            return
        if health.document is None and not health.trouble and state.a is not None:
            self.behind(self.diagnose())
            return
        newest = _newest(state.a)
        settled = now - self._came_at > SETTLED_S
        ready = tuple(sorted(step for step in self._waiting if settled or step != newest))
        if not ready:
            return
        self._waiting -= set(ready)
        self._next_look = now + max(POLL_S, min(health.took_s, SHORT_S) / SHARE)
        self.behind(self.diagnose(() if health.took_s < SHORT_S else ready))

    async def show_record(self, index: int, tensor: str | None = None) -> None:
        raise NotImplementedError


def _newest(run: Mapping[str, Any] | None) -> int | None:
    return max((step for step in (run or {}).get("steps") or [] if step is not None), default=None)
