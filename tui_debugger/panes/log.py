"""4 Log: what jobs and models print, and every error in full."""

from __future__ import annotations

from rich.text import Text
from textual.widgets import RichLog

from tui_debugger.widgets.paint import paint

_EMPTY = "What a replay prints stands here, and every error in full."


class LogPane(RichLog):
    BORDER_TITLE = "4 Log"
    COMPONENT_CLASSES = {"t-muted", "t-diff"}

    def __init__(self) -> None:
        super().__init__(id="log", max_lines=5000, wrap=True, min_width=0, markup=False, highlight=False)
        self.written = 0

    def on_mount(self) -> None:
        self.write(Text(_EMPTY, style=paint(self, "muted")))

    def add(self, line: str) -> None:
        if not self.written:
            self.clear()
        self.written += 1
        self.write(Text(line), scroll_end=self.auto_scroll)

    def toggle_pause(self) -> None:
        self.auto_scroll = not self.auto_scroll
        self.border_subtitle = "" if self.auto_scroll else "paused: space follows again"
