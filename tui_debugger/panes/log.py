"""4 Log: what jobs and models print, and every error in full."""

from __future__ import annotations

from collections import deque

from rich.text import Text
from textual import events
from textual.geometry import Size
from textual.reactive import Reactive
from textual.widgets import RichLog

from tui_debugger import format as fmt
from tui_debugger.actions import pane_title
from tui_debugger.widgets.paint import paint

LINES_KEPT = 5000
_EMPTY = "What a replay prints stands here, and every error in full."


class LogPane(RichLog):
    BORDER_TITLE = pane_title("log")
    #: Lines come many times a second: none of them lays out the screen, once there is a bar to scroll by.
    virtual_size: Reactive[Size] = Reactive(Size(0, 0), layout=False)

    def watch_virtual_size(self, size: Size) -> None:
        if self.show_vertical_scrollbar and size.height > self.size.height:
            self.vertical_scrollbar.window_virtual_size = size.height
        else:
            self.refresh(layout=True)

    def __init__(self) -> None:
        super().__init__(id="log", max_lines=LINES_KEPT, wrap=True, min_width=0, markup=False, highlight=False)
        self._wrapped_to = 0
        """Cells of a line as it was drawn; 0 where something was not."""
        self.kept: deque[str] = deque(maxlen=LINES_KEPT)
        """The lines themselves, for the log over the whole screen."""

    def on_resize(self, _event: events.Resize) -> None:
        """What came while the pane was hidden had no width to be wrapped to, and what came before has another."""
        width = self.scrollable_content_region.width
        if width and width != self._wrapped_to:
            self._wrapped_to = width
            self.clear()
            self._append(list(self.kept)) if self.kept else self.write(Text(_EMPTY, style=paint(self, "muted")))

    def add(self, lines: list[str]) -> None:
        """Append what arrived since the last drawing; of a flood only the end, and how much was left out."""
        if not lines:
            return
        is_first = not self.kept
        self.kept.extend(lines)
        if not self.scrollable_content_region.width:
            self._wrapped_to = 0
            return
        if is_first:
            self.clear()
        self._append(lines)

    def _append(self, lines: list[str]) -> None:
        left_out = len(lines) - LINES_KEPT
        if left_out > 0:
            lines = [f"({left_out:,} lines not shown)", *lines[left_out:]]
        self.write(Text("\n".join(fmt.safe(line, lines=True) for line in lines)), scroll_end=self.auto_scroll)

    def do_mark(self) -> None:
        self.auto_scroll = not self.auto_scroll
        self.border_subtitle = "" if self.auto_scroll else "paused: space follows again"
