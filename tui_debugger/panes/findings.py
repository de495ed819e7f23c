"""7 Findings: what is wrong, worst first: what the diagnosis found, and what could not be read or compared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.text import Text
from textual import on

from tui_debugger import format as fmt
from tui_debugger.actions import pane_title
from tui_debugger.health import WORDS, Line, lines, problem_step
from tui_debugger.messages import FindingOpened, ProblemOpened
from tui_debugger.state import State
from tui_debugger.widgets.paint import paint, write_border
from tui_debugger.widgets.rows import Rows

_EMPTY = (
    "Nothing diagnosed yet. An opened dump or log is diagnosed by itself (E: again); what is wrong with it, and what "
    "cannot be read of it, stands here, worst first. enter goes there, f shows the evidence."
)
_FOLDS = ("downstream", "skipped")


class FindingsPane(Rows):
    BORDER_TITLE = pane_title("findings")
    head_lines = 0

    def __init__(self) -> None:
        super().__init__(id="findings", empty=_EMPTY)
        self._lines: list[Line] = []
        self._opened: set[str] = set()
        self._state: State | None = None

    def show(self, state: State) -> None:
        self._state = state
        listed = lines(state.opened.health, state.findings(), self._opened, beside=state.of_two)
        counts = [sum(line.severity == level and not line.fold for line in listed if line.kind in _FOUND)
                  for level in ("error", "warning", "info")]  # fmt: skip
        parts = [f"{n} {word}" for n, word in zip(counts, ("error", "warning", "info"), strict=True) if n]
        if state.opened.health.doing and state.opened.health.document is not None:
            parts.append(f"again: {state.opened.health.doing}")
        write_border(self, subtitle=" · ".join(parts))
        self.set_class(len(listed) > 3, "-more")
        if listed == self._lines and self.count:
            return
        here = self._lines[self.cursor] if self.cursor < len(self._lines) and self.cursor else None
        self._lines = listed
        # Findings come while the cursor stands somewhere: it stays on what it stands on.
        self.set_count(len(listed), listed.index(here) if here in listed else min(self.cursor, len(listed)))

    def line(self, row: int, width: int) -> Text:
        line = self._lines[row]
        text = Text("› " if row == self.cursor else "  ")
        text.append("  " * line.depth)
        if line.kind in _FOUND:
            word, token = WORDS[line.severity]
            text.append(f"{word:<6}", paint(self, token))
            said = fmt.safe(line.text)
            where = fmt.safe(line.where)
            room = width - text.cell_len
            if where and len(said) + len(where) + 3 <= room:
                text.append(said)
                text.append(f" · {where}", paint(self, "muted"))
            elif where and room - len(where) - 3 >= 60:
                text.append(fmt.end(said, room - len(where) - 3))
                text.append(f" · {where}", paint(self, "muted"))
            else:
                text.append(fmt.end(said, room))
        elif line.kind in _FOLDS:
            arrow = "▾" if line.fold in self._opened else "▸"
            text.append(f"{arrow} {line.text}", paint(self, "muted"))
        elif line.kind == "clean":
            text.append("✓ CLEAN ", paint(self, "same"))
            text.append(line.text)
        else:
            text.append(fmt.end(fmt.safe(line.text), width - text.cell_len), paint(self, "muted"))
        return text

    @property
    def here(self) -> Line | None:
        return self._lines[self.cursor] if self.cursor < len(self._lines) else None

    @property
    def finding(self) -> Mapping[str, Any] | None:
        """The finding under the cursor; of a fold the one it belongs to."""
        line = self.here
        if line is not None and line.kind == "downstream":
            return self._lines[self.cursor - 1].finding
        return line.finding if line is not None else None

    @property
    def text(self) -> str:
        """The line under the cursor, for copying."""
        line = self.here
        return "" if line is None else f"{line.text} ({line.where})" if line.where else line.text

    def turn(self) -> bool:
        """Open or close the fold under the cursor; False where there is none."""
        line = self.here
        if line is None or line.kind not in _FOLDS or self._state is None:
            return False
        self._opened ^= {line.fold}
        self.show(self._state)
        return True

    @on(Rows.Chosen)
    def _chosen(self, event: Rows.Chosen) -> None:
        event.stop()
        line = self._lines[event.row]
        if self.turn():
            return
        if line.finding is not None:
            self.post_message(FindingOpened(line.finding))
        elif line.kind == "problem":
            self.post_message(ProblemOpened(line.where, problem_step(line.text)))


_FOUND = ("finding", "problem")
