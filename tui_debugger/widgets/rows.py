"""Rows: a list that draws only the lines on screen, so a million rows cost what forty do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size, Spacing
from textual.message import Message
from textual.reactive import reactive
from textual.scroll_view import ScrollView
from textual.strip import Strip

from tui_debugger import format as fmt
from tui_debugger.widgets.paint import paint

if TYPE_CHECKING:
    from typing_extensions import Self

#: Drawn lines that are kept: a few screens of them.
_KEPT = 400
#: Textual draws the thumb of a scroll bar in eighths of a cell.
_EIGHTHS = 8


class _Look(NamedTuple):
    """What every line of one paint is drawn with: worked out once, not once a line."""

    width: int
    theme: str
    base: Style
    heading: Style
    first: Style
    cursor: Style


_NO_GUTTER = Spacing()


class Rows(ScrollView, can_focus=True):
    """A cursor over lines that `line` draws, under a heading that stays.

    Subclasses say how many rows there are (`set_count`) and draw one (`line`, `heading`). A line once drawn is kept
    until `refresh` or its own `refresh_line`: a list that scrolls draws the line that comes, not those that stay.
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
        self._look: _Look | None = None
        self._kept: dict[int, Strip] = {}
        super().__init__(id=id)
        self.count = 0
        self.empty = empty

    def line(self, row: int, width: int) -> Text:
        return Text()

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

    def grow(self, count: int, cursor: int) -> None:
        """More rows at the end of the same list: what is drawn stays."""
        before, self.count = self.count, count
        self._fit()
        self.move_cursor(cursor)
        if not before:
            self.refresh()
        elif before + self.head_lines < self.scroll_offset.y + self.size.height:
            self.refresh(self.size.region)

    def move_cursor(self, row: int) -> None:
        """Put the cursor on a row and bring it into sight."""
        before = self.cursor
        self.set_reactive(Rows.cursor, max(0, min(row, self.count - 1)))
        self._bring_into_sight()
        # Two lines are other than before. Where the list scrolls too, that draws all of it.
        for line in {before, self.cursor}:
            self.refresh_line(line + self.head_lines)

    def _fit(self) -> None:
        size = Size(self.size.width, self.count + self.head_lines)
        if size == self.virtual_size:
            return
        stays = self.show_vertical_scrollbar and size.width == self.virtual_size.width
        if stays and size.height > self.size.height and self.scroll_offset.y + self.size.height <= size.height:
            # A longer list lays out nothing anew: only the thumb of its bar is smaller.
            self.set_reactive(Rows.virtual_size, size)
            self.vertical_scrollbar.window_virtual_size = size.height
            return
        self.virtual_size = size

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        # The bar has as many lines as the list: it is drawn when its thumb moves, not with every row.
        if self.show_vertical_scrollbar and self._thumb(new_value) != self._thumb(self.vertical_scrollbar.position):
            self.vertical_scrollbar.position = new_value
        if round(old_value) != round(new_value):
            self.refresh(self.size.region)

    def _thumb(self, position: float) -> int:
        """Where the bar's thumb begins, in eighths of a cell."""
        height, beyond = self.size.height, max(1, self.virtual_size.height - self.size.height)
        thumb = max(1.0, height * height / max(1, self.virtual_size.height))
        return int((height - thumb) * position / beyond * _EIGHTHS)

    def refresh(self, *regions: Region, **how: Any) -> Self:
        if not regions and how.get("repaint", True):
            self._kept.clear()
        return super().refresh(*regions, **how)

    def refresh_line(self, y: int) -> None:
        self._kept.pop(y - self.head_lines, None)
        super().refresh_line(y)

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

    def render_lines(self, crop: Region) -> list[Strip]:
        self._take_look()
        if self.styles.gutter != _NO_GUTTER or self.opacity < 1:
            return super().render_lines(crop)
        # Without a border or padding a line is what `render_line` says: textual has nothing to add around it.
        _, background = self.background_colors
        filters = self.get_line_filters()
        lines = []
        for y in crop.line_range:
            strip = self.render_line(y)
            for filter in filters:
                strip = strip.apply_filter(filter, background)
            lines.append(strip)
        start, end = crop.column_span
        return lines if (start, end) == (0, self.size.width) else [strip.crop(start, end) for strip in lines]

    def _take_look(self) -> _Look:
        """The styles of this paint; another width, theme or style than before draws every line anew."""
        base = self.rich_style

        def style(name: str) -> Style:
            return base + self.get_component_rich_style(name, partial=True)

        cursor = style("rows--cursor" if self.has_focus else "rows--cursor-blurred")
        width = self.scrollable_content_region.width
        look = _Look(width, self.app.theme, base, style("rows--heading"), style("rows--first"), cursor)
        if look != self._look:
            self._kept.clear()
            self._look = look
        return look

    def render_line(self, y: int) -> Strip:
        look = self._look or self._take_look()
        if not self.count:
            return self._message(y, look.width, look.base)
        if y < self.head_lines:
            return self._strip(self.heading(look.width), look.width, look.heading)
        row = self.scroll_offset.y + y - self.head_lines
        if row >= self.count:
            return Strip.blank(look.width, look.base)
        strip = self._kept.get(row)
        if strip is None:
            if len(self._kept) >= _KEPT:
                self._kept.clear()
            strip = self._kept[row] = self._draw_row(row, look)
        return strip

    def _draw_row(self, row: int, look: _Look) -> Strip:
        text = self.line(row, look.width)
        if self.is_marked(row):
            # Louder than the cursor, and in one colour: this row is what the eye must meet.
            text.spans.clear()
            return self._strip(text, look.width, look.first)
        return self._strip(text, look.width, look.cursor if row == self.cursor else look.base)

    def _message(self, y: int, width: int, base: Style) -> Strip:
        lines = fmt.wrapped(self.empty, max(1, width - 2))
        said = Text(f" {lines[y]}", style=paint(self, "muted")) if y < len(lines) else Text()
        return self._strip(said, width, base)

    def _strip(self, text: Text, width: int, style: Style) -> Strip:
        text.end = ""
        text.no_wrap = True
        if text.cell_len > width:
            text.truncate(width, overflow="ellipsis")  # what is cut says so
        segments = [
            Segment(part.text, style + part.style if part.style else style)
            for part in text.render(self.app.console)
            if not part.control
        ]
        return Strip(segments).adjust_cell_length(width, style)
