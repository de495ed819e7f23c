"""What stands in the place of the tensors while nothing is open: recent runs, the demo, how to record."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec

from rich.text import Text
from textual import on

from tui_debugger import format as fmt
from tui_debugger.messages import StartChosen
from tui_debugger.remembered import TOGETHER
from tui_debugger.widgets.paint import paint
from tui_debugger.widgets.rows import Rows

#: As many as leave the demo and how to record in sight on 24 lines.
RUNS_SHOWN = 8

_RECORD = (
    "",
    "Record your own trainer:",
    "  rldbg record -- python train.py     without an edit",
    "  from replay_core.recorder import Recorder",
    "  rldbg record --help                 what is kept, and what it costs",
    "",
    "rldbg A B compares two dumps, rldbg FILE.json opens a saved answer.",
)


class StartList(Rows):
    """Enter opens the line under the cursor."""

    head_lines = 1

    def __init__(self) -> None:
        super().__init__(id="start-list")
        self._recent: list[tuple[list[str], float]] = []
        self._now = 0.0

    def fill(self, recent: Sequence[tuple[list[str], float]]) -> None:
        self._recent, self._now = list(recent)[:RUNS_SHOWN], time.time()
        self.set_count(len(self._recent) + 1 + len(_RECORD), self.cursor)

    def heading(self, width: int) -> Text:
        return Text(" Recent" if self._recent else " Nothing opened yet")

    def line(self, row: int, width: int) -> Text:
        text = Text("› " if row == self.cursor else "  ")
        if row < len(self._recent):
            names, when = self._recent[row]
            past = fmt.ago(self._now - when)
            shown = fmt.safe(_said(names))
            text.append(f"{fmt.middle(shown, max(8, width - len(past) - 4))}")
            text.append(f"  {past}", paint(self, "muted"))
        elif row == len(self._recent):
            text.append("demo", paint(self, "key"))
            text.append(f"  {_demo()}")
        else:
            text = Text("  ")
            text.append(_RECORD[row - len(self._recent) - 1], paint(self, "muted"))
        return text

    @on(Rows.Chosen)
    def _chosen(self, event: Rows.Chosen) -> None:
        event.stop()
        if event.row < len(self._recent):
            self.post_message(StartChosen(tuple(self._recent[event.row][0])))
        elif event.row == len(self._recent):
            self.post_message(StartChosen(()))

    @on(Rows.Highlighted)
    def _highlighted(self, event: Rows.Highlighted) -> None:
        event.stop()
        # The lines below the demo only tell.
        if event.row > len(self._recent):
            self.move_cursor(len(self._recent))


@cache
def _demo() -> str:
    if find_spec("torch") is None:
        return "needs torch (pip: 'rldbg[replay]')"
    return "train a tiny policy, pack it wrongly, see where it shows (a minute)"


def _said(names: Sequence[str]) -> str:
    """`~/runs: cell0 ↔ cell2`: what several paths share is said once, so that what tells them apart is not cut."""
    paths = [name.removeprefix(TOGETHER) for name in names]
    common = os.path.commonpath(paths) if len(paths) > 1 else ""
    told = [os.path.relpath(path, common) for path in paths] if len(common) > 1 else [_short(path) for path in paths]
    joints = [" + " if name.startswith(TOGETHER) else " ↔ " for name in names[1:]]
    text = told[0] + "".join(joint + name for joint, name in zip(joints, told[1:], strict=True))
    return f"{_short(common)}: {text}" if len(common) > 1 else text


def _short(path: str) -> str:
    home = os.path.expanduser("~")
    return "~" + path[len(home) :] if home != "/" and path.startswith(home + os.sep) else path
