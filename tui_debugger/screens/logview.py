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


class _Lines(Rows):
    head_lines = 0

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__(id="log-lines", empty="The log is empty.")
        self.lines = lines

    def on_mount(self) -> None:
        self.set_count(len(self.lines), len(self.lines) - 1)

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

    def __init__(self, path: Path | None, lines: Sequence[str] = ()) -> None:
        super().__init__()
        self._path = path
        self._lines = list(lines) if path is None else _tail(path)

    def compose(self) -> ComposeResult:
        rows = _Lines(self._lines)
        rows.border_title = str(self._path) if self._path else "Log"
        rows.border_subtitle = f"{len(self._lines):,} lines · esc closes · j k g G move"
        yield rows

    def action_move(self, name: str, argument: int | str) -> None:
        getattr(self.query_one(_Lines), f"action_{name}")(argument)


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
