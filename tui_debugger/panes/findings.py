"""7 Findings: what is wrong, worst first: with the dump itself, with what was compared."""

from __future__ import annotations

import re
from typing import Any

from rich.text import Text
from textual import on

from tui_debugger import format as fmt
from tui_debugger.actions import pane_title
from tui_debugger.messages import FindingOpened
from tui_debugger.state import State, plural
from tui_debugger.widgets.paint import paint
from tui_debugger.widgets.rows import Rows

_EMPTY = "No problem met while reading. What cannot be read, or is missing from a dump, stands here; enter goes to it."
_WORDS = {"error": ("ERROR", "first"), "warning": ("WARN", "missing"), "info": ("INFO", "muted")}
_STEP = re.compile(r"\bstep (\d+)\b")


class FindingsPane(Rows):
    BORDER_TITLE = pane_title("findings")
    head_lines = 0

    def __init__(self) -> None:
        super().__init__(id="findings", empty=_EMPTY)
        self._findings: list[dict[str, Any]] = []

    def show(self, state: State) -> None:
        found = state.findings()
        if found == self._findings and self.count:
            return
        self._findings = found
        self.border_subtitle = plural(len(found), "finding") if found else ""
        self.set_count(len(found))

    def line(self, row: int, width: int) -> Text:
        finding = self._findings[row]
        word, token = _WORDS.get(str(finding.get("severity")), _WORDS["info"])
        text = Text("› " if row == self.cursor else "  ")
        text.append(f"{word:<6}", paint(self, token))
        text.append(fmt.safe(finding.get("claim")))
        where = fmt.safe(finding.get("where") or "")
        room = width - text.cell_len - 3
        if where and room > 8:
            text.append(f" · {fmt.middle(where, room)}", paint(self, "muted"))
        return text

    @property
    def text(self) -> str:
        """The finding under the cursor, for copying."""
        if not self._findings:
            return ""
        finding = self._findings[self.cursor]
        return f"{finding.get('claim')} ({finding.get('where')})"

    @on(Rows.Chosen)
    def _chosen(self, event: Rows.Chosen) -> None:
        event.stop()
        finding = self._findings[event.row]
        step = _STEP.search(str(finding.get("claim")))
        self.post_message(FindingOpened(str(finding.get("where") or ""), int(step.group(1)) if step else None))
