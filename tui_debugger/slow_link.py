"""How far a terminal at the other end of a slow link is: asked after what was drawn, told by its answer.

sshd, the kernels and the network between hold megabytes: a write that went through says nothing of what a person sees.
Where the cursor is (`ESC [ 6 n`) every terminal tells, in its turn: the answer comes when all before it is drawn.
"""

from __future__ import annotations

import os
import select
import time
from threading import Event
from typing import Any

from textual import events
from textual.drivers.linux_driver import LinuxDriver
from textual.message import Message

_WHERE = "\x1b[6n"
#: Characters drawn that are worth a question: a clock that ticks is not, nor is what 2 KB/s shows in a quarter second.
_WORTH = 512
#: An answer is waited for so long, and longer by what a link slower than any (500 characters a second) takes.
_PATIENCE_S, _SLOWEST = 2.0, 500
#: What the first answer may take: the second frame waits for it, so that a slow link is known before it is full.
_FIRST_PATIENCE_S = 0.5
#: An answer that comes after the end would be typed into the shell: what the end waits for it.
_LEAVING_S = 5.0


class AskingDriver(LinuxDriver):
    """Knows whether the terminal has drawn what was written. One that does not answer is not waited for again."""

    _is_open = False
    #: Whether the last question was answered; None before the first answer could have come.
    _answers: bool | None = None
    #: Characters written since the last question, and when the answer to that is given up.
    _drawn = 0
    _asked_until: float | None = None

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        if self._size is None:
            # Else what is painted before the first event of a size goes by COLUMNS and LINES.
            self._size = self._get_terminal_size()

    def _get_terminal_size(self) -> tuple[int, int]:
        """Columns and rows of the terminal itself.

        textual goes by COLUMNS and LINES where they are set. A Python prompt or `docker exec -e` passes on what held
        for another window, or for this one before it was resized.
        """
        try:
            columns, rows = os.get_terminal_size(self.fileno)
        except OSError:
            columns = rows = 0
        return (columns, rows) if columns and rows else super()._get_terminal_size()

    @property
    def is_behind(self) -> bool:
        """Whether an answer is outstanding, of a terminal that gave one the last time."""
        if self._asked_until is None:
            return False
        if time.monotonic() > self._asked_until:
            self._answers, self._asked_until = False, None  # another terminal by now, or none
        return self._answers or (self._answers is None and self._drawn >= _WORTH)

    def start_application_mode(self) -> None:
        self._heard = Event()
        self._answers, self._asked_until = None, None
        super().start_application_mode()  # type: ignore[no-untyped-call]
        self._is_open = True
        self._ask(_FIRST_PATIENCE_S)

    def write(self, data: str) -> None:
        self._drawn += len(data)
        super().write(data)

    def flush(self) -> None:
        super().flush()
        self._ask_again()

    def process_message(self, message: Message) -> None:
        if isinstance(message, events.CursorPosition):  # in the thread that reads
            self._answers, self._asked_until = True, None
            self._heard.set()
            self._ask_again()
        else:
            super().process_message(message)

    def disable_input(self) -> None:
        self._is_open = False
        if self._answers and self.is_behind and not _is_gone(self.fileno):
            self._heard.wait(_LEAVING_S)
        super().disable_input()

    def _ask_again(self) -> None:
        if self._is_open and self._drawn >= _WORTH and self._asked_until is None:
            self._ask(_PATIENCE_S + self._drawn / _SLOWEST)

    def _ask(self, patience_s: float) -> None:
        self._heard.clear()
        self._asked_until, self._drawn = time.monotonic() + patience_s, 0
        super().write(_WHERE)


def _is_gone(fileno: int) -> bool:
    poll = select.poll()
    poll.register(fileno, 0)
    return bool(poll.poll(0))
