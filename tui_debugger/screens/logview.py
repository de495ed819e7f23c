"""A log over the whole screen: of a cell, from its file, or of this session."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import ModalScreen

from tui_debugger import format as fmt
from tui_debugger.widgets.rows import Rows

#: Of a log that a model flooded, the end is what tells; what was left out is said.
_BYTES = 2 << 20
#: Lines shown around a line asked for, and the bytes of each.
_LINES, _LONGEST = 4_000, 4_096


class _LogLines(Rows):
    head_lines = 0

    def __init__(self, lines: Sequence[str], at: int | None = None) -> None:
        super().__init__(id="log-lines", empty="The log is empty.")
        self.lines, self.at = lines, at

    def on_mount(self) -> None:
        self.set_count(len(self.lines), len(self.lines) - 1 if self.at is None else self.at)

    def is_marked(self, row: int) -> bool:
        return row == self.at

    def line(self, row: int, width: int) -> Text:
        return Text(fmt.safe(self.lines[row]).replace("\\t", "    "))


class LogScreen(ModalScreen[None]):
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,l", "dismiss", show=False),
        Binding("j", "move('step', 1)", show=False),
        Binding("k", "move('step', -1)", show=False),
        Binding("g", "move('edge', 'top')", show=False),
        Binding("G", "move('edge', 'end')", show=False),
        Binding("ctrl+d,space", "move('half_page', 1)", show=False),
        Binding("ctrl+u", "move('half_page', -1)", show=False),
    ]

    def __init__(self, path: Path | None, lines: Sequence[str] = (), *, line: int | None = None) -> None:
        """`line`, counted from 1, is marked and in sight."""
        super().__init__()
        self._path = path
        self._at: int | None = None
        if path is None:
            self._lines = list(lines)
        elif line is None:
            self._lines = _tail(path)
        else:
            self._lines, self._at = _around(path, line)

    def compose(self) -> ComposeResult:
        rows = _LogLines(self._lines, self._at)
        rows.border_title = str(self._path) if self._path else "Log"
        rows.border_subtitle = f"{len(self._lines):,} lines · esc closes · j k g G move"
        yield rows

    def action_move(self, name: str, argument: int | str) -> None:
        getattr(self.query_one(_LogLines), f"action_{name}")(argument)


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
