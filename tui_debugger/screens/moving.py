"""Where the focus is and how the panes lie: the part of the debugger screen that knows no tensor."""

from __future__ import annotations

from typing import Any

from textual.screen import Screen
from textual.widget import Widget

from tui_debugger.actions import PANES
from tui_debugger.panes.start import StartList
from tui_debugger.panes.tensors import TensorsPane
from tui_debugger.widgets.bars import KeyBar, TabLine


class Moving(Screen[None]):
    """Focus, the narrow form's one pane, and a pane that has the screen to itself."""

    active = "tensors"
    alone = False

    def pane(self, name: str) -> Widget:
        return self.query_one(f"#{name}")

    def _focus_pane(self, name: str) -> None:
        self.active = name
        self._mark_active()
        start = self.query_one(StartList)
        if name == "tensors":
            (start if start.display else self.query_one(TensorsPane).rows).focus()
        else:
            self.pane(name).focus()

    def _mark_active(self) -> None:
        for name in PANES:
            for pane in self.query(f"#{name}"):  # some are mounted after the first paint
                pane.set_class(name == self.active, "-active")
        for column in self.query("#left, #centre, #right"):
            column.set_class(bool(column.query(".-active")), "-has-active")
        self.set_class(self.alone, "-alone")
        self.query_one(TabLine).show(self.active)
        self.query_one(KeyBar).show(self._bar, self.job_runs, self.compares)

    @property
    def _bar(self) -> str:
        """Whose keys the bar lists."""
        starts = self.active == "tensors" and self.query_one(StartList).display
        return "start" if starts else self.active

    @property
    def job_runs(self) -> bool:
        raise NotImplementedError

    @property
    def compares(self) -> bool:
        """Whether two things are compared on the screen."""
        raise NotImplementedError

    def on_descendant_focus(self) -> None:
        for widget in self.focused.ancestors_with_self if self.focused else ():
            if widget.id in PANES and widget.id != self.active:
                self.active = widget.id
                self._mark_active()

    def action_pane(self, name: str) -> None:
        self._focus_pane(name)

    def action_next_pane(self, direction: str) -> None:
        step = 1 if direction == "next" else -1
        self._focus_pane(PANES[(PANES.index(self.active) + step) % len(PANES)])

    def action_maximise(self) -> None:
        if self.has_class("-narrow") and not self.alone:
            self.app.notify("on a narrow screen every pane has all of it already", markup=False, timeout=3)
            return
        self.alone = not self.alone
        self._mark_active()

    def action_move(self, where: str) -> None:
        move(self.focused, where)


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
