"""The debugger's one screen: six panes, the answer above them, the keys below."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from textual import on
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.screen import Screen
from textual.widget import Widget

from tui_debugger import clipboard, keymap
from tui_debugger.actions import PANES
from tui_debugger.messages import (
    FilterChanged,
    FilterClosed,
    FlagPressed,
    RecordHighlighted,
    RecordOpened,
    TensorHighlighted,
    TensorOpened,
)
from tui_debugger.panes.flags import FlagsPane
from tui_debugger.panes.inspect import InspectPane
from tui_debugger.panes.log import LogPane
from tui_debugger.panes.steps import StepsPane
from tui_debugger.panes.tensors import TensorsPane
from tui_debugger.panes.usage import UsagePane
from tui_debugger.screens.ask import AskScreen
from tui_debugger.screens.help import HelpScreen
from tui_debugger.session import Session
from tui_debugger.state import FLAGS, Part, Scope, State
from tui_debugger.widgets.bars import KeyBar, TabLine
from tui_debugger.widgets.headline import Headline, TitleLine

_REDRAW_S = 1 / 15


class DebuggerScreen(Screen[None]):
    BINDINGS = keymap.bindings()  # type: ignore[assignment]
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (110, "-wide"), (150, "-roomy")]
    AUTO_FOCUS = "#tensor-rows"
    ESCAPE_TO_MINIMIZE = False

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.session = session
        self.active = "tensors"
        self.alone = False
        self._stale: set[Part] = set()
        self._lines: list[str] = []
        self._redraw_due = False
        self._quit_asked = False

    @property
    def state(self) -> State:
        return self.session.state

    def compose(self) -> ComposeResult:
        yield TitleLine()
        yield Headline()
        yield TabLine()
        with Horizontal(id="columns"):
            with Vertical(id="left"):
                yield StepsPane()
            with Vertical(id="centre"):
                yield TensorsPane()
                yield LogPane()
            with Vertical(id="right"):
                yield InspectPane()
                yield FlagsPane()
                yield UsagePane()
        yield KeyBar()

    def on_mount(self) -> None:
        self.redraw(*Part)
        self._mark_active()

    # ── drawing ──────────────────────────────────────────────────────────────────────────────────

    def redraw(self, *parts: Part) -> None:
        """Have parts drawn soon. Events arrive in bursts; the screen follows at a steady pace, and rests between."""
        self._stale.update(parts)
        if not self._redraw_due and self.is_attached:
            self._redraw_due = True
            self.set_timer(_REDRAW_S, self._redraw_stale)

    @property
    def is_current_with_state(self) -> bool:
        """Whether everything that changed has been drawn."""
        return not self._redraw_due

    def _redraw_stale(self) -> None:
        self._redraw_due = False
        parts, self._stale = self._stale, set()
        lines, self._lines = self._lines, []
        state = self.state
        with self.app.batch_update():
            self.query_one(LogPane).add(lines)
            if Part.RUNS in parts:
                self.query_one(StepsPane).show(state)
            if Part.TENSORS in parts:
                self.query_one(TensorsPane).show(state)
            if Part.INSPECT in parts:
                self.query_one(InspectPane).show(state)
            if parts & {Part.FLAGS, Part.USAGE, Part.RUNS}:
                self.query_one(FlagsPane).show(state)
            if Part.USAGE in parts or Part.TENSORS in parts:
                self.query_one(UsagePane).show(state)
            self.query_one(Headline).show(state)
            self.query_one(TitleLine).show(state)
            self.query_one(KeyBar).show(self.active, state.busy is not None)

    def log_line(self, line: str) -> None:
        self._lines.append(line)
        self.redraw()

    # ── focus and layout ─────────────────────────────────────────────────────────────────────────

    def pane(self, name: str) -> Widget:
        return self.query_one(f"#{name}")

    def _focus_pane(self, name: str) -> None:
        self.active = name
        self._mark_active()
        target = self.query_one(TensorsPane).rows if name == "tensors" else self.pane(name)
        target.focus()

    def _mark_active(self) -> None:
        for name in PANES:
            self.pane(name).set_class(name == self.active, "-active")
        for column in self.query("#left, #centre, #right"):
            column.set_class(bool(column.query(".-active")), "-has-active")
        self.set_class(self.alone, "-alone")
        self.query_one(TabLine).show(self.active)
        self.query_one(KeyBar).show(self.active, self.state.busy is not None)

    def on_descendant_focus(self) -> None:
        for widget in self.focused.ancestors_with_self if self.focused else ():
            if widget.id in PANES and widget.id != self.active:
                self.active = widget.id
                self._mark_active()

    @on(TabLine.Pressed)
    def _tab_pressed(self, event: TabLine.Pressed) -> None:
        self._focus_pane(event.pane)

    def action_pane(self, name: str) -> None:
        self._focus_pane(name)

    def action_next_pane(self, direction: str) -> None:
        step = 1 if direction == "next" else -1
        self._focus_pane(PANES[(PANES.index(self.active) + step) % len(PANES)])

    def action_maximise(self) -> None:
        self.alone = not self.alone
        self._mark_active()

    def action_move(self, where: str) -> None:
        widget = self.focused
        for name, arguments in _MOVES[where]:
            method = getattr(widget, f"action_{name}", None)
            if method is not None:
                method(*arguments)
                return

    def action_back(self) -> None:
        if self.alone:
            self.action_maximise()
        elif self.state.filter:
            self._set_filter("")
            self.query_one(TensorsPane).close_filter(hide=True)
        elif self.active != "tensors":
            self._focus_pane("tensors")

    def action_open(self) -> None:
        if self.active == "flags":
            self.query_one(FlagsPane).press()

    # ── the divergence ───────────────────────────────────────────────────────────────────────────

    def action_first(self) -> None:
        state = self.state
        if state.comparison is None:
            self.app.notify("nothing compared yet: press c or r", markup=False)
            return
        if state.shows_record:
            state.show_comparison(state.comparison)
        index = state.first()
        if index is None:
            self.app.notify("nothing diverges", markup=False)
            index = state.selected
        elif index not in state.shown:
            self._set_filter("")
        self._select(index)
        self._focus_pane("tensors")

    def action_diverging(self, direction: str) -> None:
        index = self.state.diverging(self.state.selected, 1 if direction == "next" else -1)
        if index is None:
            self.app.notify(f"no {direction} diverging tensor", markup=False)
            return
        self._select(index)

    def _select(self, index: int) -> None:
        self.state.selected = index
        self.redraw(Part.TENSORS)
        self._work(self.session.inspect(), "inspect")

    def action_view(self) -> None:
        state = self.state
        if state.shows_record and state.comparison is not None:
            state.show_comparison(state.comparison)
        elif not state.shows_record and state.record is not None and Scope.of(state.record["key"]) == state.scope:
            state.show_record(state.record)
        elif not state.shows_record and state.a and state.a.get("records"):
            keys = [record["key"] for record in state.a["records"]]
            here = next((i for i, key in enumerate(keys) if key.get("step") == state.scope.step), 0)
            self._work(self.session.show_record(here), "look")
            return
        else:
            self.app.notify("nothing compared yet: press c or r", markup=False)
            return
        self.redraw(Part.TENSORS, Part.ANSWER)
        self._work(self.session.inspect(), "inspect")

    def action_filter(self) -> None:
        self._focus_pane("tensors")
        self.query_one(TensorsPane).ask_filter(self.state.filter)

    def _set_filter(self, text: str) -> None:
        self.state.filter = text
        self.state.refilter()
        if self.state.shown and self.state.selected not in self.state.shown:
            self._select(self.state.shown[0])
        self.redraw(Part.TENSORS)

    def action_at(self) -> None:
        def go(text: str | None) -> None:
            if text is None:
                return
            try:
                at = [int(part) for part in text.replace("[", "").replace("]", "").split(",")]
            except ValueError:
                self.app.notify(f"not an index: {text} (expected e.g. 0,12)", severity="error", markup=False)
                return
            self._work(self.session.inspect(at), "inspect")

        self.app.push_screen(AskScreen("Values from index", "one number per dimension, e.g. 0,12"), go)

    # ── replay, compare, flags ───────────────────────────────────────────────────────────────────

    def action_replay(self) -> None:
        if self.state.busy is not None:
            self.app.notify(f"{self.state.busy} · ctrl+c cancels", markup=False)
            return
        self._work(self.session.replay(), "job")

    def action_compare(self) -> None:
        def go(text: str | None) -> None:
            if text is not None:
                self._work(self.session.compare_with(Path(text).expanduser()), "job")

        value = str(self.state.b_path or "")
        self.app.push_screen(AskScreen("Compare with", "a dump: directory or file", value, is_path=True), go)

    def action_model(self) -> None:
        def go(text: str | None) -> None:
            if text is not None:
                self.state.model = text
                self.redraw(Part.FLAGS)

        hint = "a directory, a cached hub id, or random:llama-tiny"
        self.app.push_screen(AskScreen("Model to replay with", hint, self.state.model or "", is_path=True), go)

    def action_flag(self, name: str) -> None:
        choice = next(choice for choice in FLAGS if choice.name == name)
        value = self.state.flags.get(name)
        at = choice.settings.index(value) if value in choice.settings else -1
        self.state.flags[name] = choice.settings[(at + 1) % len(choice.settings)]
        self.redraw(Part.FLAGS)
        if self.active != "flags" and not self.query_one(FlagsPane).region:
            shown = self.state.flags[name]
            self.app.notify(f"{choice.label}: {'all' if shown is None else shown}", markup=False, timeout=2)

    def action_change(self) -> None:
        if self.active == "flags":
            self.query_one(FlagsPane).press()
        elif self.active == "log":
            self.query_one(LogPane).toggle_pause()

    def action_cancel(self) -> None:
        if self.state.busy is None:
            self.app.notify("nothing runs; q quits", markup=False)
        self.workers.cancel_group(self, "job")

    # ── the rest ─────────────────────────────────────────────────────────────────────────────────

    def action_export(self) -> None:
        try:
            written = self.session.export(Path.cwd())
        except (OSError, ValueError) as error:
            self.app.notify(f"cannot export: {error}", severity="error", markup=False)
            return
        names = "\n".join(str(path) for path in written)
        self.app.notify(f"wrote {names}" if written else "nothing to export: open a dump first", markup=False)
        for path in written:
            self.log_line(f"wrote {path}")

    def action_copy(self) -> None:
        inspected = self.query_one(InspectPane).text if self.active == "inspect" else ""
        self._work(self._copy(inspected or self.state.answer().sentence), "copy")

    async def _copy(self, text: str) -> None:
        self.app.copy_to_clipboard(text)
        in_tmux = await clipboard.tmux_buffer(text)
        self.app.notify(clipboard.said(in_tmux, clipboard.keep_copy(text)), markup=False)

    def action_palette(self) -> None:
        self.app.action_command_palette()

    def action_help(self) -> None:
        self.app.push_screen(HelpScreen())

    def action_quit(self) -> None:
        busy = self.state.busy
        if busy is not None and busy.is_replay and not self._quit_asked:
            self._quit_asked = True
            self.app.notify("a replay runs: q again quits, ctrl+c cancels it", severity="warning", markup=False)
            return
        self.app.exit(return_code=0)

    # ── what panes say ───────────────────────────────────────────────────────────────────────────

    @on(TensorHighlighted)
    def _tensor_highlighted(self, event: TensorHighlighted) -> None:
        self.state.selected = event.index
        self._work(self.session.inspect(), "inspect")

    @on(TensorOpened)
    def _tensor_opened(self) -> None:
        self._focus_pane("inspect")

    @on(RecordHighlighted)
    def _record_highlighted(self, event: RecordHighlighted) -> None:
        # With a pair open the list stays on the comparison until enter asks for another.
        if self.state.b is None and event.index is not None:
            self._work(self.session.show_record(event.index), "look")

    @on(RecordOpened)
    def _record_opened(self, event: RecordOpened) -> None:
        if self.state.b is not None:
            self._work(self.session.compare(event.scope), "job")
        elif event.index is not None:
            self._work(self.session.show_record(event.index), "look")
            self._focus_pane("tensors")

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

    def _work(self, work: Coroutine[Any, Any, Any], group: str) -> None:
        # Looking never cancels: the session keeps the latest look. Of jobs the newer wins.
        self.run_worker(_quietly(work), group=group, exclusive=group == "job")


_MOVES: dict[str, list[tuple[str, tuple[Any, ...]]]] = {
    "down": [("step", (1,)), ("cursor_down", ()), ("scroll_down", ())],
    "up": [("step", (-1,)), ("cursor_up", ()), ("scroll_up", ())],
    "top": [("edge", ("top",)), ("scroll_home", ())],
    "end": [("edge", ("end",)), ("scroll_end", ())],
    "page_down": [("half_page", (1,)), ("page_down", ())],
    "page_up": [("half_page", (-1,)), ("page_up", ())],
}


async def _quietly(work: Coroutine[Any, Any, Any]) -> None:
    try:
        await work
    except asyncio.CancelledError:
        return
