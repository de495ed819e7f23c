"""What textual 8.2.8 gets wrong about terminals, and the last resort of a terminal without UTF-8.

A terminal rebuilt under the app (tmux re-attach, SSH reconnect) falls back to X10 mouse reports,
whose bytes are not UTF-8. Textual decodes its input strictly, so one click ends the app with exit
code 0 (Textualize/textual#6668). `survive_broken_input` makes the decoder forgiving;
`tests/tui_debugger/test_terminal.py` shows the death without it, and so tells when it is obsolete.
"""

from __future__ import annotations

import codecs
import functools
import os
import select
import signal
import threading
import time
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.segment import Segment
from textual.app import App
from textual.color import Color
from textual.filter import LineFilter

from replay_core.regexes import regex
from tui_debugger.format import UNSAFE

#: What is left to an orderly end once the terminal is gone.
_LEAVING_S = 3.0


def survive_broken_input() -> None:
    """Let textual's input thread replace bytes that are no UTF-8 instead of dying of them."""
    from textual.drivers import linux_driver

    def forgiving(encoding: str) -> Any:
        return functools.partial(codecs.getincrementaldecoder(encoding), errors="replace")

    linux_driver.getincrementaldecoder = forgiving  # type: ignore[attr-defined]


def toggle_mouse(app: App[Any]) -> bool:
    """Give the mouse to the terminal, whose own selection then works, or take it back; whether the app has it now."""
    driver: Any = app._driver  # textual has no public name for it, nor for the switch
    if driver._mouse:
        driver._disable_mouse_support()
    driver._mouse = not driver._mouse  # what a driver that is resumed goes by, too
    if driver._mouse:
        driver._enable_mouse_support()
    return bool(driver._mouse)


def is_behind(app: App[Any]) -> bool:
    """Whether the terminal has not taken yet what was drawn before (a slow link, output stopped by ctrl+s)."""
    if getattr(app._driver, "is_behind", False):
        return True
    writer = getattr(app._driver, "_writer_thread", None)  # none where nothing is drawn; textual has no public name
    if writer is None or not writer.is_alive():
        return False
    return writer._queue.qsize() > 0 or not select.select([], [writer.fileno()], [], 0)[1]


def speaks_utf8() -> bool:
    """Whether the locale says that the terminal shows UTF-8; a bare C locale (a container, an old cron) does not."""
    given = {name: os.environ.get(name) for name in ("LC_ALL", "LC_CTYPE", "LANG")}
    if given["LC_CTYPE"] in _COERCED and not _was_started_with(f"LC_CTYPE={given['LC_CTYPE']}"):
        given["LC_CTYPE"] = None
    said = next((value for value in given.values() if value), None)
    # Nothing said is how most containers start, and nearly every terminal behind one is UTF-8: only tmux, which
    # goes by the locale it was started under, then draws `_` for whatever is not ASCII.
    if not said:
        return not os.environ.get("TMUX")
    return "utf-8" in said.lower() or "utf8" in said.lower()


#: What Python itself puts into LC_CTYPE where it was started in a C locale (PEP 538): it says nothing of the terminal.
_COERCED = ("C.UTF-8", "C.utf8", "UTF-8")


def _was_started_with(setting: str) -> bool:
    """Whether whoever started this process set that variable so; yes where the system does not tell."""
    try:
        return f"\0{setting}\0".encode() in b"\0" + Path("/proc/self/environ").read_bytes()
    except OSError:
        return True


_PLAIN = {
    **dict.fromkeys("─━═╌┄┈╴╶╸╺▔▁", "-"),
    **dict.fromkeys("│┃║╎┆┊▏▎▍▌▐▕▊▋▉", "|"),
    **dict.fromkeys("┌┐└┘├┤┬┴┼╭╮╯╰┏┓┗┛┣┫┳┻╋╔╗╚╝╠╣╦╩╬", "+"),
    "›": ">", "▸": ">", "▶": ">", "►": ">", "▾": "v", "▼": "v", "●": "*", "○": "o", "•": "*", "·": "-", "…": "~",
    "↔": "|", "→": ">", "←": "<", "↑": "^", "↓": "v", "–": "-", "—": "-", "×": "x", "Δ": "d", "≠": "!",
    "▂": ".", "▃": ":", "▄": "-", "▅": "=", "▆": "+", "▇": "*", "█": "#", "−": "-", "≥": ">", "≤": "<",
    "\N{NO-BREAK SPACE}": " ", "▀": "-", "✓": "v", "✗": "x", "▲": "^", "⣿": "#",
}  # fmt: skip


#: Signs that ASCII needs two of, and the blank beside them that gives its cell.
_TWO = {"≤": "<=", "≥": ">=", "≠": "!="}
_BESIDE_A_BLANK = regex("( ?)([≤≥≠]) | ([≤≥≠])")


def plain(text: str) -> str:
    """The text in ASCII, as many cells wide as before."""
    if text.isascii():
        return text
    text = _BESIDE_A_BLANK.sub(lambda found: f"{found[1] or ''}{_TWO[found[2] or found[3]]}", text)
    return "".join(char if char.isascii() else _PLAIN.get(char, "?" * cell_len(char)) for char in text)


class ControlFilter(LineFilter):
    """The last gate before the terminal: what it would act on instead of showing becomes a `?`.

    Names and texts of a dump are untrusted, and panes spell such characters out (`format.safe`); this holds for
    whatever a pane forgot.
    """

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        return [
            Segment(UNSAFE.sub("?", segment.text), segment.style)
            if not segment.control and UNSAFE.search(segment.text)
            else segment
            for segment in segments
        ]


class AsciiFilter(LineFilter):
    """Draws every line in ASCII: for terminals whose locale turns anything else into `_`."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        return [
            segment if segment.control or segment.text.isascii() else Segment(plain(segment.text), segment.style)
            for segment in segments
        ]


def end_when_the_terminal_is_gone(fd: int = 0) -> None:
    """Send this process SIGHUP when its terminal vanishes without the kernel doing so.

    A pty that is not the controlling terminal (started by a tool, its parent killed) goes without a signal, and
    the thread that reads keys would then spin on it for ever. A process that has not left some seconds later is ended:
    there is no terminal to give back, and its children end with their pipe.
    """

    def watch() -> None:
        poll = select.poll()
        poll.register(fd, 0)  # asks for nothing: hang-up and error are told all the same
        poll.poll()
        os.kill(os.getpid(), signal.SIGHUP)
        # A client that fed keys to the end has left more of them than are worked off before the signal is heard.
        time.sleep(_LEAVING_S)
        os._exit(128 + signal.SIGHUP)

    if os.isatty(fd):
        threading.Thread(target=watch, name="rldbg-terminal", daemon=True).start()
