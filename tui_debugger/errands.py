"""The seam between the screen and the engine: a job is sent, its events change the state, an error is shown.

No textual here. Every errand ends normally on an RldbgError: it is shown, logged, and the session goes on
with what it had.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from replay_core.errors import JobCancelledError, RldbgError
from replay_core.jobs import Document, Event, Job, LogLine, Partial, Progress, Sample
from tui_debugger import format as fmt
from tui_debugger.engine import Engine
from tui_debugger.state import Busy, Part, State

T = TypeVar("T")


class Errands:
    """What every flow of the screen needs.

    Args:
        engine: runs the jobs.
        changed: called with the parts of the state that changed.
        tell: called with a message for the user and its severity (information, warning, error).
        log: called with a line for the log pane.
    """

    def __init__(
        self,
        engine: Engine,
        state: State,
        changed: Callable[..., None],
        tell: Callable[[str, str], None],
        log: Callable[[str], None],
    ) -> None:
        self.engine = engine
        self.state = state
        self._changed = changed
        self._tell = tell
        self._log = log

    async def _run(
        self, job: Job, what: str, *, is_replay: bool = False, on_part: Callable[[Document], None] | None = None
    ) -> Document:
        """Run a job; while no other is shown, its progress is. `on_part` takes what it sends early."""
        # A record looked at while a replay runs leaves the replay's progress on the screen.
        now = time.monotonic()
        own = Busy(what, is_replay=is_replay, began=now, phase_began=now, now=now)
        if self.state.busy is None:
            self.state.busy = own
            self.state.phases.clear()
        self._changed(Part.ANSWER)

        def on_event(event: Event) -> None:
            if isinstance(event, Partial) and on_part is not None:
                on_part(event.document)
            elif self.state.busy is own:
                self._on_event(event)
            else:
                self._on_log(event)

        try:
            return await self.engine.run(job, on_event)
        finally:
            if self.state.busy is own:
                self._end_phase(own)
                self.state.busy = self.state.early = None
            self._changed(Part.ANSWER)

    async def _guard(self, work: Awaitable[T]) -> T | None:
        """The answer, or None after showing the error."""
        try:
            answer = await work
        except JobCancelledError:
            self._cancelled()
            return None
        except asyncio.CancelledError:
            self._cancelled()
            raise
        except RldbgError as error:
            self._fail(error)
            return None
        self.state.trouble = None
        return answer

    def _cancelled(self) -> None:
        self._log("cancelled")
        self._changed(Part.ANSWER, Part.MATRIX)

    def _fail(self, error: RldbgError) -> None:
        self.state.trouble, self.state.trouble_help = error.message, error.hint or ""
        for line in str(error).splitlines():
            self._log(line)
        self._tell(fmt.error_line(error), "error")
        self._changed(Part.ANSWER)

    def _on_log(self, event: Event) -> None:
        if isinstance(event, LogLine):
            self._log(event.text)

    def _on_event(self, event: Event) -> None:
        state = self.state
        if isinstance(event, Progress) and state.busy:
            self._take_progress(state.busy, event)
            self._changed(Part.ANSWER)
        elif isinstance(event, LogLine):
            self._log(event.text)
        elif isinstance(event, Sample):
            state.samples.append(event)
            self._changed(Part.TELEMETRY)
        elif isinstance(event, Partial) and event.document.get("first_divergence"):
            state.early = event.document["first_divergence"]
            self._changed(Part.ANSWER)

    def _take_progress(self, busy: Busy, event: Progress) -> None:
        busy.now = time.monotonic()
        # Tensors give their own names as what is done; a phase is a thing that is counted to its end.
        if event.total != busy.total or event.done < busy.done:
            self._end_phase(busy)
            busy.phase_began = busy.now
        busy.done, busy.total, busy.unit = event.done, event.total, fmt.safe(event.what)

    def _end_phase(self, busy: Busy) -> None:
        if busy.unit and busy.is_replay:
            self.state.phases.append((busy.unit, time.monotonic() - busy.phase_began))
            self._log(f"{busy.unit}: {fmt.seconds(self.state.phases[-1][1])}")


class Latest:
    """Runs one piece of work at a time; of those asked for meanwhile only the newest is ever done."""

    def __init__(self) -> None:
        self._waiting: Callable[[], Awaitable[None]] | None = None
        self._runs = False

    @property
    def is_superseded(self) -> bool:
        return self._waiting is not None

    async def do(self, work: Callable[[], Awaitable[None]]) -> None:
        self._waiting = work
        if self._runs:
            return
        self._runs = True
        try:
            while (now := self._waiting) is not None:
                self._waiting = None
                await now()
        finally:
            self._runs = False
