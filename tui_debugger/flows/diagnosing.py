"""The open run is diagnosed behind the screen.

Nobody waits for a diagnosis: it is read by a child of its own (`engine.ChildEngine`), begins once what the user asked
for stands on the screen, and leaves what is known in place until it knows better.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from replay_core.errors import JobCancelledError, RldbgError
from replay_core.jobs import Event, Job, Partial, Progress
from tui_debugger.flows.errands import Errands
from tui_debugger.health import Health
from tui_debugger.state import Part

if TYPE_CHECKING:
    from replay_core.documents.diagnosis import DiagnosisDocument, SeriesEntry
    from replay_core.documents.run import RunDocument


class Diagnosing:
    """The diagnosis of A."""

    def __init__(self, errands: Errands) -> None:
        self._errands, self.state = errands, errands.state
        self.behind: Callable[[Coroutine[Any, Any, Any]], None] | None = None
        """Who runs what nobody waits for; the screen sets it."""

    def look_behind(self) -> None:
        """Have the open run diagnosed, unless it is a saved document."""
        state = self.state
        state.opened.health = Health()
        if state.opened.a is not None and state.opened.snapshot is None and self.behind is not None:
            self.behind(self.diagnose())

    async def diagnose(self, steps: tuple[int, ...] = ()) -> None:
        """Diagnose A, or these of its steps; what was known stays on the screen meanwhile."""
        run, health = self.state.opened.a, self.state.opened.health
        if run is None:
            return
        began = time.monotonic()
        health.doing, health.trouble = "reading", ""
        self._errands.changed(Part.RUNS, Part.ANSWER)
        try:
            document = await self._diagnosed(run, steps, health)
        except JobCancelledError:
            health.trouble = "cancelled, E begins again"
        except asyncio.CancelledError:
            health.trouble = "cancelled, E begins again"
            raise
        except RldbgError as error:
            health.trouble = error.message
            self._errands.log(f"not diagnosed: {error}")
        else:
            self._take_diagnosis(health, document, steps, time.monotonic() - began)
        finally:
            health.doing = ""
            self._errands.changed(Part.RUNS, Part.ANSWER)

    async def _diagnosed(self, run: RunDocument, steps: tuple[int, ...], health: Health) -> DiagnosisDocument:
        series: list[SeriesEntry] = []

        def on_event(event: Event) -> None:
            if isinstance(event, Partial):
                series.extend(event.document.get("series") or [])
            elif isinstance(event, Progress):
                health.doing = f"{event.what.removeprefix('diagnosing ')} ({event.done:,} of {event.total or 0:,})"
                self._errands.changed(Part.RUNS, Part.ANSWER)
            else:
                self._errands.take_log(event)

        before = health.document if steps else None
        asked: dict[str, Any] = {"step": ",".join(map(str, steps))} if steps else {}
        if before is not None:
            asked["known"] = {name: before[name] for name in ("findings", "checked", "skipped", "notes")}
        paths = [run["path"], *self.state.opened.more] if run is self.state.opened.a else [run["path"]]
        job = Job("diagnose", {"path": run["path"], "paths": paths, "stream": True, **asked})
        document: DiagnosisDocument = await self._errands.engine.run(job, on_event)
        # Steps that come are no new curves: those of the whole run stay.
        document["series"] = before["series"] if before is not None else series or document["series"]
        return document

    def _take_diagnosis(
        self, health: Health, document: DiagnosisDocument, steps: tuple[int, ...], took_s: float
    ) -> None:
        before = health.document
        if steps and before is not None:
            health.document = document
            health.behind += [step for step in steps if step not in health.behind]
        else:
            health.document, health.took_s = document, took_s
            health.behind.clear()
        worst = health.worst
        if worst is not None and (before is None or worst["id"] not in {one["id"] for one in before["findings"]}):
            self._errands.log(f"{worst['severity']}: {worst['id']} {worst['claim']}")

    async def explain(self, id: str) -> str:
        """What a rule looks at, and where its numbers come from."""
        document = await self._errands.guard(self._errands.quietly(Job("explain", {"id": id})))
        return str(document["text"]) if document else ""
