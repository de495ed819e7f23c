"""Where the focus is and how the panes lie: the part of the debugger's screen that knows no tensor."""

from __future__ import annotations

from typing import Any

from textual.screen import Screen
from textual.widget import Widget

from tui_debugger.actions import PANES
from tui_debugger.panes.start import StartList
from tui_debugger.panes.tensors import TensorsPane
from tui_debugger.state import State
from tui_debugger.widgets.bars import KeyBar, TabLine


class PaneLayout:
    """Focus, the narrow form's one pane, and a pane that has the screen to itself."""

    def __init__(self, screen: Screen[None], state: State) -> None:
        self._screen, self._state = screen, state
        self.active = "tensors"
        self.alone = False

    @property
    def pane(self) -> Widget | None:
        """The active pane, once it is mounted."""
        return self._screen.query_one_optional(f"#{self.active}", Widget)

    def focus(self, name: str) -> None:
        self.active = name
        self.mark_active()
        start = self._screen.query_one(StartList)
        if name == "tensors":
            (start if start.display else self._screen.query_one(TensorsPane).rows).focus()
        elif (pane := self.pane) is not None:
            pane.focus()

    def mark_active(self) -> None:
        """Have every pane, column and bar look as the active pane asks for."""
        for name in PANES:
            for pane in self._screen.query(f"#{name}"):  # some are mounted after the first paint
                pane.set_class(name == self.active, "-active")
        for column in self._screen.query("#left, #centre, #right"):
            column.set_class(bool(column.query(".-active")), "-has-active")
        self._screen.set_class(self.alone, "-alone")
        self._screen.query_one(TabLine).show(self.active)
        self.show_keys()

    def show_keys(self) -> None:
        """Draw the key bar: the keys that matter where the focus is."""
        starts = self.active == "tensors" and self._screen.query_one(StartList).display
        bar = "start" if starts else self.active
        self._screen.query_one(KeyBar).show(bar, self._state.job.busy is not None, not self._state.tensors.shows_record)

    def follow_focus(self) -> None:
        """The pane that holds the focused widget is the active one."""
        focused = self._screen.focused
        for widget in focused.ancestors_with_self if focused else ():
            if widget.id in PANES and widget.id != self.active:
                self.active = widget.id
                self.mark_active()

    def do_pane(self, name: str) -> None:
        self.focus(name)

    def do_next_pane(self, direction: str) -> None:
        step = 1 if direction == "next" else -1
        self.focus(PANES[(PANES.index(self.active) + step) % len(PANES)])

    def do_maximise(self) -> None:
        if self._screen.has_class("-narrow") and not self.alone:
            said = "on a narrow screen every pane has all of it already"
            self._screen.app.notify(said, markup=False, timeout=3)
            return
        self.alone = not self.alone
        self.mark_active()

    def do_move(self, where: str) -> None:
        move(self._screen.focused, where)


def move(widget: Widget | None, where: str) -> None:
    """Move in whatever has the focus: a list's cursor, a tree's, or the page."""
    for name, arguments in _MOVES[where]:
        method = getattr(widget, f"action_{name}", None)
        if method is not None:
            method(*arguments)
            return


_MOVES: dict[str, list[tuple[str, tuple[Any, ...]]]] = {
    "down": [("step", (1,)), ("cursor_down", ()), ("scroll_down", ())],
    "up": [("step", (-1,)), ("cursor_up", ()), ("scroll_up", ())],
    "top": [("edge", ("top",)), ("scroll_home", ())],
    "end": [("edge", ("end",)), ("scroll_end", ())],
    "page_down": [("half_page", (1,)), ("page_down", ())],
    "page_up": [("half_page", (-1,)), ("page_up", ())],
}
