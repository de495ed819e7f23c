"""How far a command is, on one line of standard error."""

from __future__ import annotations

import shutil
import sys
import threading
import time

from replay_core.jobs import Event, LogLine, Progress
from tui_debugger.aside import aside
from tui_debugger.busy import Busy
from tui_debugger.format import safe

#: A terminal is told after so long what is done: who waits longer thinks that nothing is.
_FIRST_S = 0.3
#: A log, a pipe or a notebook is told after so long, and then each time as long again.
_UNWATCHED_S = 10.0


class ProgressLine:
    """One line on standard error that says what a job does, how far it is and since when, from `_FIRST_S` on. Where no
    terminal is, a line of its own after ten seconds, and whenever as much time again has gone.

    `first`: what is done before the job says anything itself; where that is empty, the line does not go on by itself.
    """

    def __init__(self, first: str = "reading names of files", *, verbose: bool = False) -> None:
        self._watched = sys.stderr.isatty()
        self._next_s = _FIRST_S if self._watched else _UNWATCHED_S
        self._verbose = verbose
        self._began = time.monotonic()
        self._width = 0
        self._busy = Busy("", began=self._began, far=Progress(0, None, first))
        self._ended, self._drawing = threading.Event(), threading.Lock()
        if first:
            threading.Thread(target=self._go_on, name="rldbg-progress", daemon=True).start()
        _standing.append(self)

    def __call__(self, event: Event) -> None:
        if isinstance(event, LogLine) and self._verbose:
            self._erase()
            aside(f"{safe(event.text, lines=True)}\n")
        if isinstance(event, Progress):
            now = time.monotonic()
            self._busy.take(event, now)
            if now - self._began >= self._next_s:
                self._draw()

    def note(self, text: str) -> None:
        """A line of its own, at once."""
        self._erase()
        aside(f"{safe(text, lines=True)}\n")

    def _go_on(self) -> None:
        while not self._ended.wait(_FIRST_S):
            self._draw()

    def _draw(self) -> None:
        with self._drawing:
            self._busy.now = time.monotonic()
            spent = self._busy.spent_s
            if spent < self._next_s or self._ended.is_set():
                return
            self._next_s = spent + 0.1 if self._watched else 2 * spent
            said, tail = self._busy.how_far, f"  {spent:.0f} s{self._busy.cost}"
            if self._watched:
                text = said[: min(78, shutil.get_terminal_size().columns - 1) - len(tail)] + tail
                aside("\r" + text.ljust(self._width))
                self._width = len(text)
            else:
                aside(f"{said}{tail}\n")

    def _erase(self) -> None:
        with self._drawing:
            if self._width:
                aside("\r" + " " * self._width + "\r")
                self._width = 0

    def clear(self) -> None:
        """Take the line away: what comes now is the answer."""
        self._ended.set()
        self._erase()


#: The lines that a command of this process has begun.
_standing: list[ProgressLine] = []


def clear_lines() -> None:
    """Take away every line that stands: what comes now is the answer, or why there is none."""
    while _standing:
        _standing.pop().clear()
