"""Rows: a list that draws only the lines on screen, so a million rows cost what forty do."""

from __future__ import annotations

from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.message import Message
from textual.reactive import reactive
from textual.scroll_view import ScrollView
from textual.strip import Strip

from tui_debugger import format as fmt
from tui_debugger.widgets.paint import paint


class Rows(ScrollView, can_focus=True):
    """A cursor over lines that `line` draws, under a heading that stays.

    Subclasses say how many rows there are (`set_count`) and draw one (`line`, `heading`).
    """

    COMPONENT_CLASSES: ClassVar[set[str]] = {
        "rows--cursor",
        "rows--cursor-blurred",
        "rows--first",
        "rows--heading",
    }
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "step(-1)", show=False),
        Binding("down", "step(1)", show=False),
        Binding("pageup", "page(-1)", show=False),
        Binding("pagedown", "page(1)", show=False),
        Binding("home", "edge('top')", show=False),
        Binding("end", "edge('end')", show=False),
        Binding("enter", "choose", show=False),
    ]

    cursor: reactive[int] = reactive(0, repaint=False)
    head_lines = 1

    class Highlighted(Message):
        """The cursor moved by the user's hand."""

        def __init__(self, rows: Rows, row: int) -> None:
            super().__init__()
            self.rows = rows
            self.row = row

        @property
        def control(self) -> Rows:
            return self.rows

    class Chosen(Highlighted):
        """Enter, or a click on the row under the cursor."""

    def __init__(self, *, id: str | None = None, empty: str = "") -> None:
        super().__init__(id=id)
        self.count = 0
        self.empty = empty

    def line(self, row: int, width: int) -> Text:
        raise NotImplementedError

    def heading(self, width: int) -> Text:
        return Text()

    def is_marked(self, row: int) -> bool:
        """Whether the row is drawn as the first divergence."""
        return False

    def set_count(self, count: int, cursor: int = 0) -> None:
        self.count = count
        self._fit()
        self.move_cursor(cursor)
        self.refresh()

    def move_cursor(self, row: int) -> None:
        """Put the cursor on a row and bring it into sight."""
        before = self.cursor
        self.set_reactive(Rows.cursor, max(0, min(row, self.count - 1)))
        self._bring_into_sight()
        # Two lines are other than before. Where the list scrolls too, that draws all of it.
        for line in {before, self.cursor}:
            self.refresh_line(line + self.head_lines)

    def _fit(self) -> None:
        self.virtual_size = Size(self.size.width, self.count + self.head_lines)

    def _bring_into_sight(self) -> None:
        if self.size.height <= self.head_lines:
            return  # not laid out yet: the first resize comes back here
        room = self.size.height - self.head_lines
        top = self.scroll_offset.y
        beyond = top - self.cursor if self.cursor < top else self.cursor - top - room + 1
        if beyond <= 0:
            return
        step = self.cursor if self.cursor < top else self.cursor - room + 1
        goal = self.cursor - room // 3 if beyond > 1 else step  # a jump shows what comes before and after it
        self.scroll_to(y=max(0, goal), animate=False, force=True)

    def on_resize(self, _event: events.Resize) -> None:
        self._fit()
        self._bring_into_sight()

    def on_focus(self) -> None:
        self.refresh()

    def on_blur(self) -> None:
        self.refresh()

    def _user_moved(self, row: int) -> None:
        before = self.cursor
        self.move_cursor(row)
        if self.cursor != before:
            self.post_message(self.Highlighted(self, self.cursor))

    def action_step(self, by: int) -> None:
        self._user_moved(self.cursor + by)

    def action_page(self, by: int) -> None:
        self._user_moved(self.cursor + by * max(1, self.size.height - self.head_lines - 1))

    def action_half_page(self, by: int) -> None:
        self._user_moved(self.cursor + by * max(1, (self.size.height - self.head_lines) // 2))

    def action_edge(self, edge: str) -> None:
        self._user_moved(0 if edge == "top" else self.count - 1)

    def action_choose(self) -> None:
        if self.count:
            self.post_message(self.Chosen(self, self.cursor))

    def on_click(self, event: events.Click) -> None:
        row = self.scroll_offset.y + event.y - self.head_lines
        if event.y < self.head_lines or not 0 <= row < self.count:
            return
        if row == self.cursor:
            self.action_choose()
        else:
            self._user_moved(row)

    def render_line(self, y: int) -> Strip:
        width = self.scrollable_content_region.width
        base = self.rich_style
        if not self.count:
            return self._message(y, width, base)
        if y < self.head_lines:
            return self._strip(
                self.heading(width), width, base + self.get_component_rich_style("rows--heading", partial=True)
            )
        row = self.scroll_offset.y + y - self.head_lines
        if row >= self.count:
            return Strip.blank(width, base)
        text = self.line(row, width)
        if self.is_marked(row):
            # Louder than the cursor, and in one colour: this row is what the eye must meet.
            text.spans.clear()
            return self._strip(text, width, base + self.get_component_rich_style("rows--first", partial=True))
        if row == self.cursor:
            kind = "rows--cursor" if self.has_focus else "rows--cursor-blurred"
            base += self.get_component_rich_style(kind, partial=True)
        return self._strip(text, width, base)

    def _message(self, y: int, width: int, base: Style) -> Strip:
        lines = fmt.wrapped(self.empty, max(1, width - 2))
        said = Text(f" {lines[y]}", style=paint(self, "muted")) if y < len(lines) else Text()
        return self._strip(said, width, base)

    def _strip(self, text: Text, width: int, style: Style) -> Strip:
        text.end = ""
        text.no_wrap = True
        segments = [
            Segment(part.text, style + part.style if part.style else style)
            for part in text.render(self.app.console)
            if not part.control
        ]
        return Strip(segments).adjust_cell_length(width, style)
