"""The debugger's one screen: seven panes, the answer above them, the keys below."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from textual import on
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.events import ScreenResume

from tui_debugger import remembered
from tui_debugger.actions import ACTIONS, Action
from tui_debugger.messages import (
    FilterChanged,
    FilterClosed,
    FindingOpened,
    FlagPressed,
    ProblemOpened,
    RecordHighlighted,
    RecordOpened,
    SortAsked,
    StartChosen,
    TensorHighlighted,
    TensorOpened,
)
from tui_debugger.panes.start import StartList
from tui_debugger.panes.steps import StepsPane
from tui_debugger.panes.tensors import TensorsPane
from tui_debugger.screens.examining import Examining
from tui_debugger.screens.keyed import KeyedScreen, Overlay
from tui_debugger.screens.leaving import Leaving
from tui_debugger.screens.marking import Marking
from tui_debugger.screens.requests import Requests
from tui_debugger.screens.stage import Stage
from tui_debugger.screens.taking import Taking
from tui_debugger.screens.tensor_search import TensorSearch
from tui_debugger.session import Session
from tui_debugger.state import Part
from tui_debugger.tolerance import Tolerance
from tui_debugger.widgets.bars import KeyBar, TabLine
from tui_debugger.widgets.headline import Headline, TitleLine

if TYPE_CHECKING:
    from tui_debugger.panes.findings import FindingsPane
    from tui_debugger.panes.flags import FlagsPane
    from tui_debugger.panes.inspect import InspectPane
    from tui_debugger.panes.log import LogPane
    from tui_debugger.panes.telemetry import TelemetryPane

_REDRAW_S = 1 / 15
#: How often what a job sends by itself is drawn, its rows and how far it is: keys draw what they change themselves.
_LIVE_S = 1 / 4


class DebuggerScreen(KeyedScreen):
    KEYS_OF = "debugger"
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (110, "-wide"), (150, "-roomy"), (190, "-vast")]
    VERTICAL_BREAKPOINTS = [(0, "-short"), (36, "-tall")]
    AUTO_FOCUS = ""
    ESCAPE_TO_MINIMIZE = False

    def __init__(self, session: Session, actions: tuple[Action, ...] = ACTIONS) -> None:
        super().__init__(actions)
        self.session, self.state = session, session.state
        self.stage = Stage(self, session)
        self.panes = self.stage.panes
        self.requests = Requests(self.stage)
        self.search = TensorSearch(self.stage, self.requests)
        self.marking, self.taking = Marking(self.stage), Taking(self.stage)
        self._leaving = Leaving(self.stage)
        self.examining = Examining(self.stage, self.requests)
        session.comparing.behind = partial(self.stage.work, group="steps")
        session.diagnosing.behind = partial(self.stage.work, group="diagnose")
        self._stale: set[Part] = set()
        self._lines: list[str] = []
        self._redraw_due = False
        self._job_drawn = 0.0
        self._quit_asked = False
        self.is_whole = False
        """Every pane is mounted."""

    _flags: FlagsPane
    _findings: FindingsPane
    _log: LogPane
    _inspect: InspectPane
    _telemetry: TelemetryPane

    @property
    def parts(self) -> tuple[object, ...]:
        """Who does the actions, whatever screen is on top."""
        return self, self.panes, self.search, self.requests, self.marking, self.taking, self.examining, self._leaving

    def doers(self) -> Iterable[object]:
        # A pane does what its keys do to itself.
        return self.panes.pane, *self.parts

    def compose(self) -> ComposeResult:
        # textual sets it after the first paint, which would squeeze every pane into a narrow screen.
        self.set_class(self.app.size.width < self.HORIZONTAL_BREAKPOINTS[1][0], "-narrow")
        yield TitleLine()
        yield Headline()
        yield TabLine()
        with Horizontal(id="columns"):
            with Vertical(id="left"):
                yield StepsPane()
            # As `PaneLayout.mark_active` leaves them: a class that comes later has everything below styled again.
            with Vertical(id="centre", classes="-has-active"):
                yield TensorsPane()
            yield Vertical(id="right")
        yield KeyBar(self.actions)

    def on_screen_resume(self, event: ScreenResume) -> None:
        # Before the first paint everything was styled when it was mounted: textual would do so again.
        event.refresh_styles = event.refresh_styles and self.is_whole

    def on_mount(self) -> None:
        self._draw_first(set(Part))
        self.panes.focus("tensors")

    async def mount_rest(self) -> None:
        """The panes that a person does not look for first: imported and mounted once the steps are on the screen."""
        from tui_debugger.panes.findings import FindingsPane
        from tui_debugger.panes.flags import FlagsPane
        from tui_debugger.panes.inspect import InspectPane
        from tui_debugger.panes.log import LogPane
        from tui_debugger.panes.telemetry import TelemetryPane

        self._flags, self._findings, self._log = FlagsPane(self.actions), FindingsPane(), LogPane()
        self._inspect, self._telemetry = InspectPane(), TelemetryPane()
        if not self.is_attached:
            return  # left already: a hand that is quicker than the second paint
        with self.app.batch_update():
            await asyncio.gather(
                self.query_one("#left").mount(self._flags),
                self.query_one("#centre").mount(self._findings, self._log),
                self.query_one("#right").mount(self._inspect, self._telemetry),
                self.query_one(TensorsPane).mount_filter(),
            )
        self.is_whole = True
        self.set_interval(_LIVE_S, self._show_that_it_runs)
        self.panes.mark_active()
        self.redraw(*Part)

    # ── drawing ──────────────────────────────────────────────────────────────────────────────────

    def redraw(self, *parts: Part) -> None:
        """Have parts drawn soon. Events arrive in bursts; the screen follows at a steady pace, and rests between."""
        self._stale.update(parts)
        if not self._redraw_due and self.is_whole and self.is_attached:
            self._redraw_due = True
            self.set_timer(_REDRAW_S, self._redraw_stale)

    def _redraw_stale(self) -> None:
        self._redraw_due = False
        parts, self._stale = self._stale, set()
        lines, self._lines = self._lines, []
        state = self.state
        if waiting := self._can_wait(parts):
            parts -= waiting
            self.redraw(*waiting)
            if not parts and not lines:
                return
        with self.app.batch_update():
            self._draw_first(parts, Part.ANSWER not in waiting)
            self._log.add(lines)
            if Part.RUNS in parts:
                self._findings.show(state)
            if Part.INSPECT in parts or (Part.TENSORS in parts and state.inspection.document is None):
                self._inspect.show(state)
            if parts & {Part.FLAGS, Part.TELEMETRY, Part.RUNS}:
                self._flags.show(state)
            if Part.TELEMETRY in parts or (Part.TENSORS in parts and not state.tensors.live):
                self._telemetry.show(state)
        on_top = self.app.screen
        if on_top is not self and isinstance(on_top, Overlay):
            on_top.redraw()

    def _show_that_it_runs(self) -> None:
        """A job that says nothing for a while is still seen to run: how long it has."""
        if (busy := self.state.job.busy) is not None:
            busy.now = time.monotonic()
            self.redraw(Part.ANSWER)

    def _can_wait(self, parts: set[Part]) -> set[Part]:
        """What of these a running job changes many times a second."""
        state, now = self.state, time.monotonic()
        theirs = parts & {
            *({Part.TENSORS} if state.tensors.live else ()),
            *({Part.ANSWER} if state.job.busy is not None else ()),
        }
        if not theirs or now - self._job_drawn < _LIVE_S:
            return theirs
        self._job_drawn = now
        return set()

    def _draw_first(self, parts: set[Part], with_answer: bool = True) -> None:
        """What the first paint holds: the answer, the steps, the tensors, the keys."""
        state = self.state
        if Part.START in parts:
            self._show_start()
        if Part.RUNS in parts:
            self.query_one(StepsPane).show(state)
        if Part.TENSORS in parts:
            self.query_one(TensorsPane).show(state)
        if with_answer and parts != {Part.TELEMETRY}:
            self.query_one(Headline).show(state)
            self.query_one(TitleLine).show(state)
            self.panes.show_keys()

    def _show_start(self) -> None:
        state = self.state
        pane, failed = self.query_one(TensorsPane), state.opened.a is None and state.job.trouble is not None
        is_open = state.opened.a_path is not None and not failed
        if pane.starts == (not is_open):
            return
        if not is_open:
            self.query_one(StartList).fill(remembered.recent())
        pane.show_start(not is_open)
        if self.panes.active == "tensors":
            self.panes.focus("tensors")

    def log_line(self, line: str) -> None:
        self._lines.append(line)
        self.redraw()

    def on_descendant_focus(self) -> None:
        self.panes.follow_focus()

    @on(TabLine.Pressed)
    def _tab_pressed(self, event: TabLine.Pressed) -> None:
        self.panes.focus(event.pane)

    def do_back(self) -> None:
        if self.panes.alone:
            self.panes.do_maximise()
        elif self.state.tensors.filter:
            self.search.set_filter("")
            self.query_one(TensorsPane).close_filter(hide=True)
        elif self.state.opened.step_filter:
            self.state.opened.step_filter = ""
            self.redraw(Part.RUNS)
        elif self.panes.active != "tensors":
            self.panes.focus("tensors")
        elif self.stage.go_back():
            return
        elif not self.state.tolerance.is_table and self.state.job.busy is None:
            self.requests.judge_by(Tolerance())
            if self.state.compared is not None:
                self.stage.say("judged by the table's own tolerances again")

    def do_quit(self) -> None:
        busy = self.state.job.busy
        if busy is not None and busy.is_replay and not self._quit_asked:
            self._quit_asked = True
            self.stage.say("a replay runs: q again quits, ctrl+c cancels it", "warning")
            return
        self.app.exit(return_code=0)

    # ── what panes say ───────────────────────────────────────────────────────────────────────────

    @on(TensorHighlighted)
    def _tensor_highlighted(self, event: TensorHighlighted) -> None:
        self.state.tensors.selected = event.index
        self.stage.work(self.session.looking.inspect(), "inspect")

    @on(TensorOpened)
    def _tensor_opened(self) -> None:
        self.panes.focus("inspect")

    @on(SortAsked)
    def _sort_asked(self, event: SortAsked) -> None:
        self.search.do_sort(event.by)

    @on(RecordHighlighted)
    def _record_highlighted(self, event: RecordHighlighted) -> None:
        # With a pair open the list stays on the comparison until enter asks for another.
        if self.state.opened.b is None and event.index is not None:
            self.stage.work(self.session.looking.show_record(event.index), "look")

    @on(RecordOpened)
    def _record_opened(self, event: RecordOpened) -> None:
        if self.state.opened.b is not None and self.state.opened.snapshot is None:
            self.stage.work(self.session.comparing.compare(event.scope), "compare")
        elif event.index is not None:
            self.stage.work(self.session.looking.show_record(event.index), "look")
            self.panes.focus("tensors")

    @on(FindingOpened)
    def _finding_opened(self, event: FindingOpened) -> None:
        self.examining.go_to_finding(event.finding)

    @on(ProblemOpened)
    def _problem_opened(self, event: ProblemOpened) -> None:
        self.examining.go_to_problem(event.step, event.where)

    @on(StartChosen)
    def _start_chosen(self, event: StartChosen) -> None:
        if not event.paths:
            self.stage.work(self.session.replaying.demo(), "job")
            return
        more = [Path(path[1:]) for path in event.paths if path.startswith(remembered.TOGETHER)]
        a, *others = (Path(path) for path in event.paths if not path.startswith(remembered.TOGETHER))
        self.stage.work(self.session.opening.open_another(a, others[0] if others else None, more), "job")

    @on(FlagPressed)
    def _flag_pressed(self, event: FlagPressed) -> None:
        if event.name == "model":
            self.requests.do_model()
        else:
            self.requests.do_flag(event.name)

    @on(FilterChanged)
    def _filter_changed(self, event: FilterChanged) -> None:
        self.search.set_filter(event.text)

    @on(FilterClosed)
    def _filter_closed(self, event: FilterClosed) -> None:
        if not event.keep:
            self.search.set_filter("")
        self.query_one(TensorsPane).close_filter(hide=not (event.keep and self.state.tensors.filter))
