"""TextSheet: a long text that scrolls, of which another text of another length lays out nothing but itself."""

from __future__ import annotations

from typing import ClassVar

from rich.segment import Segment
from rich.text import Text
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.scroll_view import ScrollView
from textual.strip import Strip


class TextSheet(ScrollView, can_focus=True):
    """One text; lines wider than the sheet are wrapped.

    A Static inside a scrolling container has the whole screen laid out when its text gets another height: 20 ms in
    which no key is painted. The style sheet has to keep the column of the scroll bar (`overflow-y: scroll`).
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "scroll_up", show=False),
        Binding("down", "scroll_down", show=False),
        Binding("pageup", "page_up", show=False),
        Binding("pagedown", "page_down", show=False),
        Binding("home", "scroll_home", show=False),
        Binding("end", "scroll_end", show=False),
    ]

    def __init__(self, text: str = "", *, id: str) -> None:
        super().__init__(id=id)
        self._text = Text(text)
        self._lines: list[Text] = []
        self._drawn: dict[int, Strip] = {}

    def put(self, text: Text) -> None:
        """Show another text; one that says the same draws nothing."""
        if text == self._text and text.style == self._text.style:  # a Text compares its spans alone
            return
        self._text = text
        self._break_lines()
        self.refresh()

    def on_resize(self, _event: events.Resize) -> None:
        self._break_lines()

    def notify_style_update(self) -> None:
        super().notify_style_update()
        self._drawn.clear()

    def _break_lines(self) -> None:
        width = max(1, self.scrollable_content_region.width)
        self._lines = list(self._text.wrap(self.app.console, width, no_wrap=False, overflow="fold"))
        self._drawn.clear()
        size = Size(width, len(self._lines))
        if size == self.virtual_size:
            return
        # The bar's column stays whatever the length: only what can be scrolled to, and the thumb, are others.
        self.set_reactive(TextSheet.virtual_size, size)
        self.vertical_scrollbar.window_virtual_size = size.height
        self.scroll_to(y=min(self.scroll_offset.y, self.max_scroll_y), animate=False, force=True)

    def render_line(self, y: int) -> Strip:
        width, base = self.scrollable_content_region.width, self.rich_style
        at = self.scroll_offset.y + y
        if at >= len(self._lines):
            return Strip.blank(width, base)
        strip = self._drawn.get(at)
        if strip is None:
            line = self._lines[at]
            line.end = ""
            console = self.app.console
            own = base + console.get_style(line.style)  # rich leaves it out where a text has no spans
            parts = [Segment(part.text, own + part.style if part.style else own) for part in line.render(console)]
            strip = self._drawn[at] = Strip(parts).adjust_cell_length(width, base)
        return strip
