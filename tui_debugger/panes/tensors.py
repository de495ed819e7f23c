"""2 Tensors: the divergence list in order of computation, or the tensors of one record."""

from __future__ import annotations

from bisect import bisect_left

from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.events import Click
from textual.widgets import Input

from tui_debugger import format as fmt
from tui_debugger.actions import pane_title
from tui_debugger.messages import FilterChanged, FilterClosed, SortAsked, TensorHighlighted, TensorOpened
from tui_debugger.panes.start import StartList
from tui_debugger.state import State
from tui_debugger.tensor_rows import SORTS, Places, TensorRow
from tui_debugger.widgets.paint import paint, verdict_token, write_border
from tui_debugger.widgets.rows import Rows

_NO_ROWS = (
    "No tensors yet. Choose a record in 1 Steps, compare with another dump (c), or replay the record (r): "
    "the tensors then stand here in order of computation."
)
_FILTERED = "No tensor matches the filter. esc clears it."
_HOLDS_NONE = "This record holds no tensor that can be read; 7 lists what is wrong, where something is."
_COMPARING = "Comparing. Tensors stand here as they are judged, in order of computation."


#: Rows that the width of a column is measured by.
_MEASURED = 1_000
#: Columns of a record's own tensors, and the most cells of each: what they do not take is left to the names. Not every
#: record fills the last two.
_OWN = (("shape", 20), ("dtype", 8), ("value", 14), ("tokens", 9))
_SPARE = ("value", "tokens")


def _fitting(wanted: list[tuple[str, int]], room: int) -> list[tuple[str, int]]:
    """Of (column, cells) as many, from the first, as there is room for."""
    taken = []
    for name, size in wanted:
        if room < size + 1:
            break
        room -= size + 1
        taken.append((name, size))
    return taken


class TensorRows(Rows):
    """The list itself. Columns leave as the pane narrows; verdict and name stay."""

    def __init__(self) -> None:
        super().__init__(id="tensor-rows", empty=_NO_ROWS)
        self._rows: list[TensorRow] = []
        self._shown: list[int] = []
        self._comparing = False
        self._places = Places()
        self._with_place = False
        self._where, self._furthest = 5, 7
        self._named = 30
        """Cells that names are given before any other column."""
        self._measured = 0
        """Rows whose widths are known."""
        self._marked: set[str] = set()
        self._own: list[tuple[str, int]] = []

    def show(self, state: State) -> None:
        """Draw the list; while a comparison runs it only grows, and what stands there is not drawn again."""
        grows = state.tensors.live and state.tensors.rows is self._rows and state.tensors.shown is self._shown
        before = self._comparing, self._with_place, self._marked
        self._comparing = not state.tensors.shows_record
        if state.tensors.rows is not self._rows and not self._comparing:
            self._own = self._measured_columns(state.tensors.rows[:_MEASURED])
        self._rows, self._shown = state.tensors.rows, state.tensors.shown
        self.empty = _FILTERED if state.tensors.rows else _COMPARING if state.tensors.live else _NO_ROWS
        if not state.tensors.rows and state.tensors.shows_record and state.tensors.record is not None:
            self.empty = _HOLDS_NONE
        self._places = state.tensors.places
        self._with_place = self._comparing and bool(self._places)
        self._measure(from_row=self._measured if grows and before[1] == self._with_place else 0)
        here = {str(path) for path in (state.opened.a_path, state.opened.b_path)} | (
            {state.opened.a["path"]} if state.opened.a else set()
        )
        if state.tensors.comparison:
            here |= {state.tensors.comparison["a"]["path"], state.tensors.comparison["b"]["path"]}
        self._marked = {mark.name for mark in state.marks if mark.kind == "tensor" and mark.what.get("path") in here}
        place = _place(self._shown, state.tensors.selected)
        if grows and before == (self._comparing, self._with_place, self._marked):
            self.grow(len(self._shown), place)
        else:
            self.set_count(len(self._shown), place)

    def _measure(self, *, from_row: int) -> None:
        """How wide the columns must be; rows before `from_row` have been measured, and stay."""
        if not from_row:
            self._where, self._furthest, self._named = 5, 0, 0
        # From one end to the other: names grow with the number of a layer.
        fresh = self._shown[from_row:]
        rows = [self._rows[index] for index in fresh[:: len(fresh) // _MEASURED + 1]]
        self._measured = len(self._shown)
        if self._with_place:
            self._where = max([self._where, *(len(self._cell(row, "where")) for row in rows)])
        if self._comparing:
            # An index that is cut in its middle names another element.
            first = (self._rows[index] for index in self._shown[from_row:_MEASURED])
            self._furthest = min(20, max([self._furthest, *(len(self._cell(row, "max at")) for row in first)]))
        if self._shown:
            self._named = min(60, max([self._named, *(len(fmt.safe(row.name)) for row in rows)]))
        else:
            self._named = 30

    def is_marked(self, row: int) -> bool:
        return self._rows[self._shown[row]].is_first

    def index(self, row: int) -> int | None:
        return self._shown[row] if row < len(self._shown) else None

    def _columns(self, width: int) -> list[tuple[str, int]]:
        """The columns that fit behind verdict and name."""
        if not self._comparing:
            return _fitting(self._own, width - 2 - 20)
        # Figures come before the ends of long names, and these before what the two have alike.
        room = width - 11 - min(30, self._named)
        figures = [("rel l2", 9), ("max |d|", 9), ("max at", max(7, self._furthest))]
        if self._with_place:
            taken = sum(size + 1 for _, size in figures)
            figures.insert(0, ("where", max(7, min(self._where, room - taken - 1))))
        figures = _fitting(figures, room)
        room = width - 11 - self._named - sum(size + 1 for _, size in figures)
        return [*figures, *_fitting([("shape", 14), ("dtype", 10)], room)]

    def _measured_columns(self, rows: list[TensorRow]) -> list[tuple[str, int]]:
        widest = {name: max((len(fmt.safe(self._cell(row, name))) for row in rows), default=0) for name, _ in _OWN}
        return [
            (name, min(most, max(len(name), widest[name]) + 1))
            for name, most in _OWN
            if widest[name] or name not in _SPARE
        ]

    def heading(self, width: int) -> Text:
        columns = self._columns(width)
        text = Text("  verdict  tensor" if self._comparing else "  tensor")
        text.append(" " * max(0, width - len(text.plain) - sum(size + 1 for _, size in columns)))
        for name, size in columns:
            text.append(f" {name:>{size}}")
        return text

    def line(self, row: int, width: int) -> Text:
        item = self._rows[self._shown[row]]
        columns = self._columns(width)
        at_cursor = row == self.cursor
        glyph = "▶ " if at_cursor and item.is_first else "● " if item.is_first else "› " if at_cursor else "  "
        text = Text(f"+{glyph[0] if at_cursor else ' '}" if item.name in self._marked else glyph)
        if self._comparing:
            suspect = "?" if item.entry.get("suspect") else " "
            text.append(f"{item.verdict + suspect:<9}", paint(self, verdict_token(item.verdict)))
        elif item.verdict:
            text.append(f"{item.verdict} ", paint(self, verdict_token(item.verdict)))
        room = max(1, width - text.cell_len - sum(size + 1 for _, size in columns))
        quiet = item.verdict in ("SAME", "PADDING")
        name = fmt.safe(item.name)
        if columns and columns[0][0] == "where":
            # A name and where it is share their cells: what one does not need is the other's.
            needed = fmt.cells(fmt.safe(self._cell(item, "where")))
            both = room + columns[0][1]
            size = min(needed, max(columns[0][1], both - fmt.cells(name)))
            room, columns = both - size, [("where", size), *columns[1:]]
        name = fmt.dotted(name, room)
        style = paint(self, "muted") if quiet else ""
        text.append(name + " " * (room - fmt.cells(name)), style)
        for column, size in columns:
            said = fmt.middle(fmt.safe(self._cell(item, column)), size)
            text.append(" " * (1 + size - fmt.cells(said)) + said, style)
        return text

    def on_click(self, event: Click) -> None:
        """Twice on a column's head sorts by it."""
        if event.y >= self.head_lines or event.chain != 2:
            return
        figures = sum(size + 1 for _, size in self._columns(self.size.width))
        by = SORTS[2] if 11 <= event.x < self.size.width - figures else SORTS[1]
        self.post_message(SortAsked(by))

    def _cell(self, item: TensorRow, column: str) -> str:
        entry, metrics = item.entry, item.entry.get("metrics") or {}
        if column == "rel l2":
            return "" if item.verdict == "SAME" else fmt.number(metrics.get("rel_l2"), 3)
        if column == "max |d|":
            return "" if item.verdict == "SAME" else fmt.number(metrics.get("max_abs"), 3)
        if column == "max at":
            return fmt.greatest(entry) if item.verdict != "SAME" else ""
        if column == "where":
            return self._places.of(item)
        if column == "shape":
            return fmt.pair(entry.get("shape"), fmt.shape) if self._comparing else fmt.shape(entry.get("shape"))
        if column == "dtype":
            if self._comparing:
                return fmt.pair(entry.get("dtype"), fmt.short_dtype)
            return fmt.short_dtype(entry.get("dtype"))
        if column == "tokens":
            return str(entry.get("alignment") or "")
        if entry.get("problem"):
            return str(entry["problem"])
        value = entry.get("value")
        return "" if value is None else fmt.number(value)


class TensorsPane(Vertical):
    BORDER_TITLE = pane_title("tensors")

    def __init__(self) -> None:
        super().__init__(id="tensors", classes="-active")

    def compose(self) -> ComposeResult:
        yield StartList()
        yield TensorRows()

    def on_mount(self) -> None:
        self.show_start(False)

    @property
    def starts(self) -> bool:
        """Whether the start list stands in the place of the tensors."""
        return self.query_one(StartList).display

    def show_start(self, shown: bool) -> None:
        self.query_one(StartList).display = shown
        self.rows.display = not shown
        if shown:
            self.border_title, self.border_subtitle = "Begin", "enter opens · o asks for a path"

    @property
    def rows(self) -> TensorRows:
        return self.query_one(TensorRows)

    def show(self, state: State) -> None:
        self.rows.show(state)
        if self.starts:
            return
        name = pane_title("tensors")
        if state.tensors.shows_record:
            title = f"{name} · of {state.opened.scope}" if state.tensors.record and str(state.opened.scope) else name
        elif state.tensors.live:
            title = f"{name} · as they are judged"
        else:
            title = f"{name} · {'in ' if state.tensors.sort == SORTS[0] else ''}{state.tensors.sort}"
        left_out = len(state.tensors.rows) - len(state.tensors.shown)
        if state.tensors.filter_error:
            under = f"not a regular expression: {state.tensors.filter_error}"
        elif left_out:
            under = f"{len(state.tensors.shown):,} of {len(state.tensors.rows):,} shown"
        else:
            under = f"{len(state.tensors.rows):,}" if state.tensors.rows else ""
        write_border(self, title, under)

    async def mount_filter(self) -> None:
        """Not for the first paint: textual's Input and its styles are 4 ms of it."""
        from tui_debugger.panes.filter_input import FilterInput

        await self.mount(FilterInput())

    def ask_filter(self, text: str) -> None:
        field = self.query_one_optional("#filter", Input)
        if field is None:  # a hand that is quicker than the second paint
            self.call_after_refresh(self.ask_filter, text)
            return
        field.display = True
        field.value = text
        field.focus()

    def close_filter(self, *, hide: bool) -> None:
        self.query("#filter").set(display=not hide)
        self.rows.focus()

    @on(Input.Changed)
    def _changed(self, event: Input.Changed) -> None:
        event.stop()
        self.post_message(FilterChanged(event.value))

    @on(Input.Submitted)
    def _submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self.post_message(FilterClosed(keep=True))

    @on(Rows.Highlighted)
    def _highlighted(self, event: Rows.Highlighted) -> None:
        event.stop()
        index = self.rows.index(event.row)
        if index is not None and not isinstance(event, Rows.Chosen):
            self.post_message(TensorHighlighted(index))

    @on(Rows.Chosen)
    def _chosen(self, event: Rows.Chosen) -> None:
        event.stop()
        self.post_message(TensorOpened())


def _place(shown: list[int], selected: int) -> int:
    """Where the selected row stands among those shown: the list comes sorted unless the user sorted it otherwise."""
    at = bisect_left(shown, selected)
    if at < len(shown) and shown[at] == selected:
        return at
    return shown.index(selected) if selected in shown else 0
