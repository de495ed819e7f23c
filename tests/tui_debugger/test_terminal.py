"""The app on a real pseudo-terminal: broken mouse bytes, dropped links, crashes."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tui_debugger import terminal

#: A click at column 96, row 150 as a terminal without SGR mode reports it: bytes that are no UTF-8.
X10_CLICK = b"\x1b[M \x80\xb6"

_RUN = "import sys; from tui_debugger.app import run_ui; sys.exit(run_ui(None, None))"
_RUN_WITHOUT_SHIM = "from tui_debugger import terminal; terminal.survive_broken_input = lambda: None; " + _RUN
_CRASH = """
import sys
from tui_debugger import app
def broken(self):
    secret = "hunter2"
    raise ValueError("a bug")
app.DebuggerScreen.action_first = broken
sys.exit(app.run_ui(None, None))
"""
_WITH_CHILD = """
import sys
from tui_debugger import app, engine
async def begin(self, a, b):
    await self.engine.start()
    print("CHILD", self.engine._reader.pid, file=open(sys.argv[1], "w"))
app.RldbgApp._first_look = begin
sys.exit(app.run_ui(None, None))
"""


class OnPty:
    """A Python program on a pseudo-terminal of 100x30."""

    def __init__(self, code: str, *arguments: str) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
        environment = {**os.environ, "TERM": "xterm-256color", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True,
        )  # fmt: skip
        os.close(slave)
        self.output = b""
        self._drain = threading.Thread(target=self._read, daemon=True)
        self._drain.start()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self.master, 65536)
            except OSError:
                return
            if not data:
                return
            self.output += data

    def wait_for(self, text: bytes, timeout: float = 20) -> None:
        end = time.monotonic() + timeout
        while text not in self.output:
            assert time.monotonic() < end, f"{text!r} never came: {self.output[-2000:]!r}"
            assert self.process.poll() is None, self.output[-2000:].decode(errors="replace")
            time.sleep(0.02)

    def send(self, data: bytes) -> None:
        os.write(self.master, data)

    def ended(self, timeout: float = 15) -> int:
        code = self.process.wait(timeout)
        self._drain.join(2)
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.master)


@pytest.fixture
def on_pty() -> Iterator[type[OnPty]]:
    started: list[OnPty] = []

    class Kept(OnPty):
        def __init__(self, code: str, *arguments: str) -> None:
            super().__init__(code, *arguments)
            started.append(self)

    yield Kept
    for app in started:
        app.close()


def test_a_click_in_the_old_mouse_protocol_is_survived(on_pty: type[OnPty]) -> None:
    app = on_pty(_RUN)
    app.wait_for(b"no dump open")
    app.send(X10_CLICK)
    time.sleep(0.6)
    assert app.process.poll() is None
    app.send(b"\x1b")  # whatever the click left half-read
    time.sleep(0.3)
    app.send(b"q")
    assert app.ended() == 0


def test_textual_still_dies_of_that_click_without_our_shim(on_pty: type[OnPty]) -> None:
    app = on_pty(_RUN_WITHOUT_SHIM)
    app.wait_for(b"no dump open")
    app.send(X10_CLICK)
    # When this fails, textual has fixed #6668: drop terminal.survive_broken_input.
    assert app.ended(10) is not None


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_a_dropped_link_restores_the_terminal_and_ends_the_children(
    on_pty: type[OnPty], number: signal.Signals, tmp_path: Path
) -> None:
    note = tmp_path / "child"
    app = on_pty(_WITH_CHILD, str(note))
    app.wait_for(b"no dump open")
    child = _pid_in(note)
    assert _runs(child)
    app.process.send_signal(number)
    assert app.ended() == 128 + number
    assert b"\x1b[?1049l" in app.output  # the alternate screen is left
    assert b"\x1b[?1000l" in app.output  # mouse reports are off
    end = time.monotonic() + 5
    while _runs(child):
        assert time.monotonic() < end, "the child outlived the screen"
        time.sleep(0.05)


def test_a_bug_ends_with_70_and_a_report_without_local_variables(on_pty: type[OnPty]) -> None:
    app = on_pty(_CRASH)
    app.wait_for(b"no dump open")
    app.send(b"d")
    assert app.ended() == 70
    assert b"hunter2" not in app.output
    assert b"crash report: " in app.output
    reports = list((Path(os.environ["XDG_STATE_HOME"]) / "rldbg").glob("crash-*.txt"))
    assert len(reports) == 1
    text = reports[0].read_text()
    assert "ValueError: a bug" in text
    assert "action_first" in text or "broken" in text
    assert "hunter2" not in text.replace('secret = "hunter2"', "")


def test_plain_text_is_ascii_and_as_wide() -> None:
    from rich.cells import cell_len

    for text in ("╭─ 2 Tensors ▸ ▂▄█", "2×12×64 → Δ ≠", "中文 ok", "naïve…"):
        assert terminal.plain(text).isascii()
        assert len(terminal.plain(text)) == cell_len(text)


def _pid_in(path: Path) -> int:
    end = time.monotonic() + 15
    while not (path.exists() and path.read_text().endswith("\n")):
        assert time.monotonic() < end, "the child never started"
        time.sleep(0.05)
    return int(path.read_text().split()[1])


def _runs(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
