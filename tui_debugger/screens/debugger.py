"""The debugger's one screen: seven panes, the answer above them, the keys below."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from textual import on
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical

from tui_debugger import keymap, remembered
from tui_debugger.actions import ACTIONS, Action
from tui_debugger.flag_choices import FLAGS
from tui_debugger.messages import (
    FilterChanged,
    FilterClosed,
    FlagPressed,
    RecordHighlighted,
    RecordOpened,
    StartChosen,
    TensorHighlighted,
    TensorOpened,
)
from tui_debugger.panes.start import StartList
from tui_debugger.panes.steps import StepsPane
from tui_debugger.panes.tensors import TensorsPane
from tui_debugger.screens.asking import Watching
from tui_debugger.screens.examining import Examining
from tui_debugger.screens.finding import Finding
from tui_debugger.screens.taking import Taking
from tui_debugger.session import Session
from tui_debugger.state import Mark, Part, Scope, State
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


class DebuggerScreen(Finding, Examining, Taking):
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (110, "-wide"), (150, "-roomy")]
    VERTICAL_BREAKPOINTS = [(0, "-short"), (36, "-tall")]
    AUTO_FOCUS = ""
    ESCAPE_TO_MINIMIZE = False

    def __init__(self, session: Session, actions: tuple[Action, ...] = ACTIONS) -> None:
        super().__init__()
        self.session = session
        self.actions = actions
        for binding in keymap.bindings("debugger", actions):
            for key in binding.key.split(","):
                self._bindings.bind(key, binding.action, binding.description, show=False)
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
    def state(self) -> State:
        return self.session.state

    @property
    def job_runs(self) -> bool:
        return self.state.busy is not None

    @property
    def compares(self) -> bool:
        return not self.state.shows_record

    def compose(self) -> ComposeResult:
        yield TitleLine()
        yield Headline()
        yield TabLine()
        with Horizontal(id="columns"):
            with Vertical(id="left"):
                yield StepsPane()
            # As `_mark_active` leaves them: a class that comes later has everything below styled again.
            with Vertical(id="centre", classes="-has-active"):
                yield TensorsPane()
            yield Vertical(id="right")
        yield KeyBar(self.actions)

    def on_mount(self) -> None:
        self._draw_first(set(Part))
        self._focus_pane("tensors")

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
            )
        self.is_whole = True
        self._mark_active()
        self.redraw(*Part)

    # ── drawing ──────────────────────────────────────────────────────────────────────────────────

    def redraw(self, *parts: Part) -> None:
        """Have parts drawn soon. Events arrive in bursts; the screen follows at a steady pace, and rests between."""
        self._stale.update(parts)
        if not self._redraw_due and self.is_whole and self.is_attached:
            self._redraw_due = True
            self.set_timer(_REDRAW_S, self._redraw_stale)

    @property
    def is_current_with_state(self) -> bool:
        """Whether everything that changed has been drawn."""
        return self.is_whole and not self._redraw_due

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
            if Part.INSPECT in parts:
                self._inspect.show(state)
            if parts & {Part.FLAGS, Part.TELEMETRY, Part.RUNS}:
                self._flags.show(state)
            if Part.TELEMETRY in parts or (Part.TENSORS in parts and not state.live):
                self._telemetry.show(state)
        on_top = self.app.screen
        if on_top is not self and isinstance(on_top, Watching):
            on_top.redraw()

    def _can_wait(self, parts: set[Part]) -> set[Part]:
        """What of these a running job changes many times a second."""
        state, now = self.state, time.monotonic()
        theirs = parts & {*({Part.TENSORS} if state.live else ()), *({Part.ANSWER} if state.busy is not None else ())}
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
            self.query_one(KeyBar).show(self._bar, state.busy is not None, self.compares)

    def _show_start(self) -> None:
        state = self.state
        pane, failed = self.query_one(TensorsPane), state.a is None and state.trouble is not None
        is_open = state.a_path is not None and not failed
        if pane.starts == (not is_open):
            return
        if not is_open:
            self.query_one(StartList).fill(remembered.recent())
        pane.show_start(not is_open)
        if self.active == "tensors":
            self._focus_pane("tensors")

    @property
    def kept_log(self) -> list[str]:
        return list(self._log.kept)

    def log_line(self, line: str) -> None:
        self._lines.append(line)
        self.redraw()

    @on(TabLine.Pressed)
    def _tab_pressed(self, event: TabLine.Pressed) -> None:
        self._focus_pane(event.pane)

    def action_back(self) -> None:
        if self.alone:
            self.action_maximise()
        elif self.state.filter:
            self._set_filter("")
            self.query_one(TensorsPane).close_filter(hide=True)
        elif self.state.step_filter:
            self.state.step_filter = ""
            self.redraw(Part.RUNS)
        elif self.active != "tensors":
            self._focus_pane("tensors")
        elif not self.state.tolerance.is_table and not self.job_runs:
            self._judge_by(Tolerance())
            if self.state.compared is not None:
                self.say("judged by the table's own tolerances again")

    def action_open(self) -> None:
        if self.active == "flags":
            self._flags.press()
        elif self.active == "inspect":
            if self.session.looking.closer.place is None:
                self.say("arrow left and right move along the strip; enter then goes to the stretch")
            self.work(self.session.looking.open_strip(), "inspect")

    # ── replay, compare, flags ───────────────────────────────────────────────────────────────────

    def action_replay(self) -> None:
        if self.state.busy is not None:
            self.say(f"{self.state.busy} · ctrl+c cancels")
            return
        self.work(self.session.replaying.replay(), "job")

    def action_matrix(self) -> None:
        from tui_debugger.screens.matrix import MatrixScreen  # 5 ms that nobody waits for who never opens it

        self.app.push_screen(MatrixScreen(self))

    def action_flag(self, name: str) -> None:
        choice = next(choice for choice in FLAGS if choice.name == name)
        value = self.state.flags.get(name)
        at = choice.settings.index(value) if value in choice.settings else -1
        now = self.state.flags[name] = choice.settings[(at + 1) % len(choice.settings)]
        self.redraw(Part.FLAGS)
        from replay_core.replay.forecast import unavailable  # comes with the flags pane, after the first paint

        why = unavailable(name, now, self.state.flags)
        if why is not None:
            self.app.notify(f"{choice.label} {now} cannot run here: {why}", severity="warning", markup=False, timeout=3)
        elif self.active != "flags" and not self._flags.region:
            self.app.notify(f"{choice.label}: {'all' if now is None else now}", markup=False, timeout=2)

    def action_mark(self) -> None:
        if self.active == "flags":
            self._flags.press()
        elif self.active == "log":
            self._log.toggle_pause()
        elif self.active == "steps":
            spot = self.query_one(StepsPane).here
            if spot is None or self.state.a is None:
                self.say("nothing to mark: o opens a dump")
                return
            self._mark(Mark("record", str(spot.scope), spot.scope.params()))
        elif self.active == "tensors" and self.state.row is not None and not self.query_one(StartList).display:
            row = self.state.row
            sides = self.session.looking.sides(row)
            side = sides.get("a") or sides.get("b")
            if side is None:
                self.say("nothing of it can be read: it cannot be compared")
                return
            self._mark(Mark("tensor", row.name, side))
        else:
            self.say("space marks a tensor in 2, a step or micro-batch in 1, a cell in the matrix; = compares two")

    def _mark(self, mark: Mark) -> None:
        self.state.toggle_mark(mark)
        if len(self.state.marks) == 2:
            self.say(f"two marked: = compares {self.state.marks[0].name} with {self.state.marks[1].name}")
        self.redraw(Part.TENSORS, Part.RUNS)

    def action_pair(self) -> None:
        if len(self.state.marks) != 2:
            self.say("mark two first: space marks a tensor in 2, a step or micro-batch in 1, a cell in the matrix")
            return
        one, other = self.state.marks
        if one.kind == "tensor":
            self.work(self.session.looking.inspect_pair(one, other), "inspect")
            self._focus_pane("inspect")
        elif one.kind == "record":
            self.work(self.session.comparing.compare_scopes(Scope(**one.what), Scope(**other.what)), "job")
            self._focus_pane("tensors")
        else:
            self.work(self.session.replaying.compare_cells(dict(one.what), dict(other.what)), "job")

    def action_cancel(self) -> None:
        if self.state.busy is None and self.state.health.doing:
            self.workers.cancel_group(self, "diagnose")
            return
        if self.state.busy is None:
            self.say("nothing runs; q quits")
        for group in ("job", "judge"):
            self.workers.cancel_group(self, group)
        self.session.comparing.judging_by = None  # of a judging that had not begun nobody else would say so

    # ── the rest ─────────────────────────────────────────────────────────────────────────────────

    def action_theme(self) -> None:
        from tui_debugger.screens.themes import ThemeScreen  # textual's OptionList: 5 ms

        self.app.push_screen(ThemeScreen())

    def action_palette(self) -> None:
        self.app.action_command_palette()

    def action_help(self) -> None:
        from tui_debugger.screens.help import HelpScreen  # rich.table: 10 ms

        self.app.push_screen(HelpScreen(self.actions))

    def action_quit(self) -> None:
        busy = self.state.busy
        if busy is not None and busy.is_replay and not self._quit_asked:
            self._quit_asked = True
            self.say("a replay runs: q again quits, ctrl+c cancels it", "warning")
            return
        self.app.exit(return_code=0)

    # ── what panes say ───────────────────────────────────────────────────────────────────────────

    @on(TensorHighlighted)
    def _tensor_highlighted(self, event: TensorHighlighted) -> None:
        self.state.selected = event.index
        self.work(self.session.looking.inspect(), "inspect")

    @on(TensorOpened)
    def _tensor_opened(self) -> None:
        self._focus_pane("inspect")

    @on(RecordHighlighted)
    def _record_highlighted(self, event: RecordHighlighted) -> None:
        # With a pair open the list stays on the comparison until enter asks for another.
        if self.state.b is None and event.index is not None:
            self.work(self.session.looking.show_record(event.index), "look")

    @on(RecordOpened)
    def _record_opened(self, event: RecordOpened) -> None:
        if self.state.b is not None and self.state.snapshot is None:
            self.work(self.session.comparing.compare(event.scope), "job")
        elif event.index is not None:
            self.work(self.session.looking.show_record(event.index), "look")
            self._focus_pane("tensors")

    @on(StartChosen)
    def _start_chosen(self, event: StartChosen) -> None:
        if not event.paths:
            self.work(self.session.replaying.demo(), "job")
            return
        more = [Path(path[1:]) for path in event.paths if path.startswith(remembered.TOGETHER)]
        a, *others = (Path(path) for path in event.paths if not path.startswith(remembered.TOGETHER))
        self.work(self.session.opening.open_another(a, others[0] if others else None, more), "job")

    @on(FlagPressed)
    def _flag_pressed(self, event: FlagPressed) -> None:
        if event.name == "model":
            self.action_model()
        else:
            self.action_flag(event.name)

    @on(FilterChanged)
    def _filter_changed(self, event: FilterChanged) -> None:
        self._set_filter(event.text)

    @on(FilterClosed)
    def _filter_closed(self, event: FilterClosed) -> None:
        if not event.keep:
            self._set_filter("")
        self.query_one(TensorsPane).close_filter(hide=not (event.keep and self.state.filter))

    def act_on(self, name: str, *arguments: Any) -> None:
        """An action asked for by a screen on top of this one."""
        getattr(self, f"action_{name}")(*arguments)
