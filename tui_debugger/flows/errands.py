"""What every flow is given: a job is sent, its events change the state, an error is shown, the screen is told.

No textual here. `guard` ends normally on an RldbgError: it is shown, logged, and the session goes on with what it had.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from replay_core.errors import JobCancelledError, RldbgError
from replay_core.jobs import Answer, DocumentPiece, Event, Job, LogLine, Partial, Progress, Sample
from tui_debugger import format as fmt
from tui_debugger import remembered
from tui_debugger.busy import Busy
from tui_debugger.engine import Engine
from tui_debugger.state import Part, State

T = TypeVar("T")

#: A job that takes less is over before anybody has read what it will cost.
_WORTH_S = 2.0


class Errands:
    """The seam between the flows, the engine that works for them, and the screen that shows what came of it.

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
        self.changed = changed
        self.tell = tell
        self.log = log
        self._stopped = ""
        """What the last job that was cancelled did; another may be shown by then."""

    async def run(
        self, job: Job, what: str, *, is_replay: bool = False, on_part: Callable[[DocumentPiece], None] | None = None
    ) -> Answer:
        """Run a job; while no other is shown, its progress is. `on_part` takes what it sends early."""
        # A record looked at while a replay runs leaves the replay's progress on the screen.
        now, opened = time.monotonic(), self.state.opened
        # Two replays of other settings, or one and a matrix, have nothing alike.
        of = what if is_replay else job.kind, opened.a_path, opened.b_path
        own = Busy(what, is_replay, began=now, now=now, usual_s=remembered.took(*of))
        if self.state.job.busy is None:
            self.state.job.busy = own
            self.state.job.phases.clear()
            # What went wrong before is no answer to what is asked now.
            self.state.job.trouble, self.state.job.cancelled = None, ""
        self.changed(Part.ANSWER)

        def on_event(event: Event) -> None:
            if isinstance(event, Partial) and on_part is not None:
                on_part(event.document)
            elif self.state.job.busy is own:
                self.take(event)
            else:
                self.take_log(event)

        try:
            answer = await self.engine.run(job, on_event)
            if (took := time.monotonic() - now) >= _WORTH_S:
                remembered.keep_took(*of, took)
            return answer
        except (JobCancelledError, asyncio.CancelledError):
            self._stopped = what
            if self.state.job.busy is own:
                self.state.job.cancelled = what
            raise
        finally:
            if self.state.job.busy is own:
                self._end_phase(own)
                self.state.job.busy = self.state.tensors.early = None
            self.changed(Part.ANSWER)

    async def guard(self, work: Awaitable[T]) -> T | None:
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
        self.state.job.trouble = None
        return answer

    def _cancelled(self) -> None:
        if self._stopped:  # what nobody was shown, nobody misses
            self.log(f"cancelled: {self._stopped}")
            self.tell(f"cancelled: {self._stopped}", "information")
        self._stopped = ""
        self.changed(Part.ANSWER, Part.MATRIX)

    def _fail(self, error: RldbgError) -> None:
        of = f": {error.file}" if error.file and error.file not in error.message else ""
        self.state.job.trouble, self.state.job.trouble_help = f"{error.message}{of}", error.hint or ""
        for line in str(error).splitlines():
            self.log(line)
        self.tell(fmt.error_line(error), "error")
        self.changed(Part.ANSWER)

    async def quietly(self, job: Job) -> Answer:
        """Run a job that shows no progress; what it logs is logged."""
        return await self.engine.run(job, self.take_log)

    def take_log(self, event: Event) -> None:
        """Log a line that a job sent; what else it sends is let go."""
        if isinstance(event, LogLine):
            self.log(event.text)

    def take(self, event: Event) -> None:
        state = self.state
        if isinstance(event, Progress) and state.job.busy:
            self._take_progress(state.job.busy, event)
            self.changed(Part.ANSWER)
        elif isinstance(event, LogLine):
            self.log(event.text)
        elif isinstance(event, Sample):
            state.job.samples.append(event)
            self.changed(Part.TELEMETRY)
        elif isinstance(event, Partial) and event.document.get("first_divergence"):
            state.tensors.early = event.document["first_divergence"]
            self.changed(Part.ANSWER)

    def _take_progress(self, busy: Busy, event: Progress) -> None:
        if busy.begins_phase(event):
            self._end_phase(busy)
        busy.take(event, time.monotonic())

    def _end_phase(self, busy: Busy) -> None:
        if busy.far is not None and busy.is_replay:
            unit = fmt.safe(busy.far.what)
            self.state.job.phases.append((unit, time.monotonic() - busy.phase_began))
            self.log(f"{unit}: {fmt.seconds(self.state.job.phases[-1][1])}")
