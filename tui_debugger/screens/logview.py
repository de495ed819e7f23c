"""A log over the whole screen: of a cell, from its file, or of this session."""

from __future__ import annotations

import os
import re
from bisect import bisect
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import ModalScreen

from tui_debugger import format as fmt
from tui_debugger import paths
from tui_debugger.screens.ask import AskScreen
from tui_debugger.screens.keyed import PatientScreen
from tui_debugger.widgets.paint import write_border
from tui_debugger.widgets.rows import Rows

#: Of a log that a model flooded, the end is what tells; what was left out is said.
_BYTES = 2 << 20
#: Lines shown around a line asked for, and the bytes of each.
_LINES, _LONGEST = 4_000, 4_096


class _LogLines(Rows):
    """The lines of a log: those that a filter lets through, wrapped to the width where that is wanted."""

    head_lines = 0

    def __init__(self, lines: Sequence[str], at: int | None = None) -> None:
        super().__init__(id="log-lines", empty="No line.")
        self.lines, self.at = lines, at
        self.wraps = False
        self.filter: re.Pattern[str] | None = None
        self.pieces: list[tuple[int, str]] = []
        """Of what is shown: which line it is of, and its text."""

    def on_mount(self) -> None:
        self.lay_out(len(self.lines) - 1 if self.at is None else self.at)

    def on_resize(self, _event: events.Resize) -> None:
        if self.wraps:
            self.lay_out(self.here)

    @property
    def here(self) -> int:
        """The line under the cursor."""
        return self.pieces[self.cursor][0] if self.cursor < len(self.pieces) else 0

    def lay_out(self, here: int) -> None:
        """Make the rows anew, the cursor on the first that is of line `here` or a later one."""
        width = self.scrollable_content_region.width if self.wraps else 0
        self.pieces = []
        for number, line in enumerate(self.lines):
            if self.filter is None or self.filter.search(line):
                text = fmt.safe(line).replace("\\t", "    ")
                pieces = [text[i : i + width] for i in range(0, len(text), width)] if width else [text]
                self.pieces += [(number, piece) for piece in pieces or [""]]
        rows = range(len(self.pieces))
        self.set_count(len(rows), next((row for row in rows if self.pieces[row][0] >= here), len(rows) - 1))

    def find(self, wanted: re.Pattern[str], direction: int) -> str | None:
        """Go to the next line that it is found in, round the end; what is to be said, None where no line has it."""
        firsts = {number: row for row, (number, _) in reversed(list(enumerate(self.pieces)))}
        numbers = sorted(firsts)
        here = bisect(numbers, self.here) - 1
        count = len(numbers)
        for steps in range(1, count + 1):
            place = here + direction * steps
            if wanted.search(self.lines[numbers[place % count]]):
                self.move_cursor(firsts[numbers[place % count]])
                if steps == count:
                    return "this line alone has it"
                return "" if 0 <= place < count else f"from the {'top' if direction > 0 else 'end'} again"
        return None

    def is_marked(self, row: int) -> bool:
        return self.pieces[row][0] == self.at

    def line(self, row: int, width: int) -> Text:
        return Text(self.pieces[row][1])


class LogScreen(ModalScreen[None], PatientScreen[None]):
    CSS_PATH = paths.styles_dir() / "on_top.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,l", "back", show=False),
        Binding("j", "move('step', 1)", show=False),
        Binding("k", "move('step', -1)", show=False),
        Binding("g", "move('edge', 'top')", show=False),
        Binding("G", "move('edge', 'end')", show=False),
        Binding("ctrl+d,space", "move('half_page', 1)", show=False),
        Binding("ctrl+u", "move('half_page', -1)", show=False),
        Binding("slash", "ask('find')", show=False),
        Binding("ampersand", "ask('filter')", show=False),
        Binding("n", "find(1)", show=False),
        Binding("N", "find(-1)", show=False),
        Binding("w", "wrap", show=False),
    ]

    def __init__(self, path: Path | None, lines: Sequence[str] = (), *, line: int | None = None) -> None:
        """`line`, counted from 1, is marked and in sight."""
        super().__init__()
        self._path = path
        self._at: int | None = None
        self._wanted: re.Pattern[str] | None = None
        if path is None:
            self._lines = list(lines)
        elif line is None:
            self._lines = _tail(path)
        else:
            self._lines, self._at = _around(path, line)

    def compose(self) -> ComposeResult:
        rows = _LogLines(self._lines, self._at)
        rows.border_title = str(self._path) if self._path else "Log"
        yield rows

    def on_mount(self) -> None:
        self._say()

    def _say(self, said: str = "") -> None:
        rows = self.query_one(_LogLines)
        only = f" with {rows.filter.pattern}" if rows.filter is not None else ""
        shown = f"{len({number for number, _ in rows.pieces}):,} of {len(self._lines):,} lines{only}"
        told = f"{said or shown} · / finds · n N · & filters · w wraps · esc"
        write_border(rows, subtitle=told)

    def action_move(self, name: str, argument: int | str) -> None:
        getattr(self.query_one(_LogLines), f"action_{name}")(argument)

    def action_back(self) -> None:
        """Take the filter away; where there is none, leave."""
        rows = self.query_one(_LogLines)
        if rows.filter is None:
            self.dismiss()
            return
        rows.filter = None
        rows.lay_out(rows.here)
        self._say()

    def action_wrap(self) -> None:
        rows = self.query_one(_LogLines)
        here, rows.wraps = rows.here, not rows.wraps
        rows.lay_out(here)

    def action_ask(self, what: str) -> None:
        def go(text: str | None) -> None:
            if text is None:
                return
            try:
                wanted = re.compile(text, re.IGNORECASE)
            except re.error as error:
                self._say(f"{text} is no regular expression: {error}")
                return
            if what == "find":
                self._wanted = wanted
                self.action_find(1)
            else:
                rows = self.query_one(_LogLines)
                rows.filter = wanted
                rows.lay_out(rows.here)
                self._say()

        hint = "a regular expression; letters of either case"
        question = "Find" if what == "find" else "Only lines with"
        self.app.push_screen(AskScreen(question, hint), go)

    def action_find(self, direction: int) -> None:
        if self._wanted is None:
            self._say("nothing was looked for")
            return
        said = self.query_one(_LogLines).find(self._wanted, direction)
        wanted = self._wanted.pattern
        self._say(f"{wanted}: no line has it" if said is None else f"{wanted}: {said}" if said else "")


def _around(path: Path, line: int) -> tuple[list[str], int | None]:
    """The lines around one, numbered, and which of them it is; None where the file has no such line."""
    first, shown, number = max(1, line - _LINES // 2), [], 0
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                if number >= first:
                    shown.append(f"{number:>6}  {raw[:_LONGEST].decode('utf-8', 'replace').rstrip()}")
                if number >= first + _LINES:
                    break
    except OSError as error:
        return [f"{path}: {error.strerror}"], None
    if number < line:
        return [*shown, f"(the file has {number:,} lines now, not {line:,})"], None
    if first > 1:
        shown.insert(0, f"({first - 1:,} lines before this are in the file)")
    return shown, line - first + (first > 1)


def _tail(path: Path) -> list[str]:
    """The lines of a log file, the last of a long one."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - _BYTES))
            text = file.read(_BYTES).decode("utf-8", "replace")
    except OSError as error:
        return [f"{path}: {error.strerror}"]
    lines = text.splitlines()
    return [f"({size - _BYTES:,} bytes before this are in the file)", *lines] if size > _BYTES else lines
