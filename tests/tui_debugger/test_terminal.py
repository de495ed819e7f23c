"""The app on a real pseudo-terminal: broken mouse bytes, dropped links, crashes."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.segment import Segment
from textual.color import Color

from tests.builders import write_dump
from tests.fixtures import FIXTURES
from tests.tui_debugger.driving import A, B, opened, screen, until
from tests.tui_debugger.on_pty import OnPty
from tui_debugger import terminal

#: A click at column 96, row 150 as a terminal without SGR mode reports it: bytes that are no UTF-8.
X10_CLICK = b"\x1b[M \x80\xb6"

_RUN = "import sys; from tui_debugger.app import run_ui; sys.exit(run_ui(None, None))"
_RUN_WITHOUT_SHIM = "from tui_debugger import terminal; terminal.survive_broken_input = lambda: None; " + _RUN
_CRASH = """
import sys
from tui_debugger import app
from tui_debugger.screens.tensor_search import TensorSearch
def broken(self):
    secret = "hunter2"
    raise ValueError("a bug")
TensorSearch.do_first = broken
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


_KILLED = """
import sys
from pathlib import Path
from tui_debugger import app, engine
start = engine.AsyncChild._started
async def started(self):
    process = await start(self)
    print("CHILD", process.pid, file=open(sys.argv[2], "w"))
    return process
engine.AsyncChild._started = started
sys.exit(app.run_ui(Path(sys.argv[1]), None))
"""


@pytest.fixture
def on_pty() -> Iterator[type[OnPty]]:
    started: list[OnPty] = []

    class Kept(OnPty):
        def __init__(self, code: str, *arguments: str, **options: Any) -> None:
            super().__init__(code, *arguments, **options)
            started.append(self)

    yield Kept
    for app in started:
        app.close()


@pytest.mark.long
def test_a_click_in_the_old_mouse_protocol_is_survived(on_pty: type[OnPty]) -> None:
    app = on_pty(_RUN)
    app.wait_for(b"no dump is open")
    app.send(X10_CLICK)
    time.sleep(0.6)
    assert app.process.poll() is None
    app.send(b"\x1b")  # whatever the click left half-read
    time.sleep(0.3)
    app.send(b"q")
    assert app.ended() == 0


_STARTED_SLOWLY = """
import sys
from tui_debugger import progress_line
progress_line._FIRST_S = 0.001  # a start that takes no longer says nothing
from tui_debugger.cli import main
sys.argv[0] = "rldbg"
main()
"""


@pytest.mark.long
def test_a_start_says_that_something_is_done_until_the_screen_is_drawn(on_pty: type[OnPty]) -> None:
    app = on_pty(_STARTED_SLOWLY, str(FIXTURES / "faults/healthy/batch.pt"))
    app.wait_for(b"1 Steps")
    begun, _, drawn = app.output.partition(b"\x1b[?1049h")
    assert b"\ropening  0 s" in begun or b"kinds of dump looked for" in begun
    assert begun.endswith(b" \r"), "the line is taken away"
    assert b"opening  " not in drawn
    app.send(b"q")
    assert app.ended() == 0


@pytest.mark.long
def test_textual_still_dies_of_that_click_without_our_shim(on_pty: type[OnPty]) -> None:
    app = on_pty(_RUN_WITHOUT_SHIM)
    app.wait_for(b"no dump is open")
    app.send(X10_CLICK)
    # When this fails, textual has fixed #6668: drop terminal.survive_broken_input.
    assert app.ended(10) is not None


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_a_dropped_link_restores_the_terminal_and_ends_the_children(
    on_pty: type[OnPty], number: signal.Signals, tmp_path: Path
) -> None:
    note = tmp_path / "child"
    app = on_pty(_WITH_CHILD, str(note))
    app.wait_for(b"no dump is open")
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


@pytest.mark.long
def test_a_bug_ends_with_70_and_a_report_without_local_variables(on_pty: type[OnPty]) -> None:
    app = on_pty(_CRASH)
    app.wait_for(b"no dump is open")
    app.send(b"d")
    assert app.ended() == 70
    assert b"hunter2" not in app.output
    assert b"the report is in " in app.output
    reports = list((Path(os.environ["XDG_STATE_HOME"]) / "rldbg").glob("crash-*.txt"))
    assert len(reports) == 1
    text = reports[0].read_text()
    assert "builtins.ValueError" in text, "the kind; what it says may quote a dump"
    assert "do_first" in text or "broken" in text
    assert "hunter2" not in text.replace('secret = "hunter2"', "")


def test_plain_text_is_ascii_and_as_wide() -> None:
    from rich.cells import cell_len

    for text in ("╭─ 2 Tensors ▸ ▂▄█", "2×12×64 → Δ ≠", "中文 ok", "naïve…"):
        assert terminal.plain(text).isascii()
        assert len(terminal.plain(text)) == cell_len(text)
    assert terminal.plain("A alone ↔ B packed") == "A alone | B packed", (
        "two that are compared are not said to be equal"
    )
    # A sign that takes two letters has the cell of the blank beside it.
    assert [terminal.plain(text) for text in ("|d| ≤ 1e-3", "p ≤3", "a ≠ b", "x≥y")] == [
        "|d| <=1e-3",
        "p<=3",
        "a !=b",
        "x>y",
    ]


@pytest.mark.long
@pytest.mark.parametrize(
    "environment",
    [
        {"TERM": "xterm"},
        {"LC_ALL": "C"},
        {"LC_ALL": "", "LC_CTYPE": "", "LANG": "C"},
        {"NO_COLOR": "1"},
        {"TERM": "linux", "LC_ALL": "POSIX"},
        {"COLUMNS": "200", "LINES": "70"},
    ],
    ids=str,
)
def test_it_starts_and_ends_on_any_terminal(on_pty: type[OnPty], environment: dict[str, str]) -> None:
    app = on_pty(_RUN, size=(80, 24), **environment)
    app.wait_for(b"no dump is open")
    moves = [tuple(map(int, move)) for move in re.findall(rb"\x1b\[(\d+);(\d+)H", app.output)]
    assert max(row for row, _ in moves) <= 24
    assert max(column for _, column in moves) <= 80
    if "LC_ALL" in environment or "LANG" in environment:
        drawn = app.output.decode("utf-8", "replace")
        assert drawn.isascii(), sorted({char for char in drawn if not char.isascii()})
    if "NO_COLOR" in environment:
        assert not re.findall(rb"\x1b\[[0-9;]*38;2;(\d+);(?!\1;\1m)", app.output)
    app.send(b"q")
    assert app.ended() == 0
    assert b"\x1b[?1049l" in app.output


@pytest.mark.long
def test_a_storm_of_resizes_is_survived(on_pty: type[OnPty]) -> None:
    app = on_pty(_RUN)
    app.wait_for(b"no dump is open")
    for number in range(60):
        app.resize(20 + number * 7 % 180, 5 + number * 3 % 50)
        os.kill(app.process.pid, signal.SIGWINCH)
        time.sleep(0.005)
    app.resize(100, 30)
    os.kill(app.process.pid, signal.SIGWINCH)
    time.sleep(0.3)
    app.send(b"?")
    app.wait_for(b"Find the divergence")
    app.send(b"\x1b")
    time.sleep(0.3)
    app.send(b"q")
    assert app.ended() == 0


@pytest.mark.long
def test_ctrl_z_gives_the_terminal_back_and_fg_draws_the_screen_again(on_pty: type[OnPty]) -> None:
    app = on_pty(_RUN)
    app.wait_for(b"no dump is open")
    app.send(b"\x1a")
    app.wait_for(b"\x1b[?1049l")
    status = Path(f"/proc/{app.process.pid}/status")
    end = time.monotonic() + 10
    while "State:\tT" not in status.read_text():
        assert time.monotonic() < end, "it was not stopped"
        time.sleep(0.02)
    app.output = b""
    app.process.send_signal(signal.SIGCONT)
    app.wait_for(b"\x1b[?1049h")
    app.wait_for(b"no dump is open")
    app.send(b"q")
    assert app.ended() == 0


@pytest.mark.long
def test_f3_leaves_the_mouse_to_the_terminal_and_takes_it_back(on_pty: type[OnPty]) -> None:
    app = on_pty(_RUN)
    app.wait_for(b"no dump is open")
    app.output = b""
    app.send(b"\x1bOR")
    app.wait_for(b"\x1b[?1000l")
    app.wait_for(b"the terminal's")
    app.output = b""
    app.send(b"\x1bOR")
    app.wait_for(b"\x1b[?1000h")
    app.send(b"q")
    assert app.ended() == 0


@pytest.mark.long
def test_no_mouse_asks_for_no_mouse(on_pty: type[OnPty]) -> None:
    app = on_pty("-m tui_debugger", "ui", "--no-mouse")
    app.wait_for(b"no dump is open")
    app.send(b"q")
    assert app.ended() == 0
    assert b"\x1b[?1000h" not in app.output


@pytest.mark.long
def test_a_killed_reader_is_an_error_and_the_next_job_gets_another(on_pty: type[OnPty], tmp_path: Path) -> None:
    write_dump(tmp_path / "run", {"forward_data": {"log_probs": torch.zeros(2, 4), "entropy": torch.ones(2, 4)}})
    note = tmp_path / "child"
    app = on_pty(_KILLED, str(tmp_path / "run"), str(note))
    app.wait_for(b"entropy")
    os.kill(_pid_in(note), signal.SIGKILL)
    time.sleep(0.3)
    app.send(b"j3")
    app.wait_for(b"elements")
    app.send(b"q")
    assert app.ended() == 0


@pytest.mark.long
def test_names_of_a_dump_cannot_speak_to_the_terminal(on_pty: type[OnPty], tmp_path: Path) -> None:
    evil = "logits\x1b]52;c;aGFjaw==\x07\x1b[2J\x9b31m"
    write_dump(tmp_path / "run", {"forward_data": {evil: torch.zeros(2, 4), "log_probs": torch.zeros(2, 4)}})
    app = on_pty("-m tui_debugger", str(tmp_path / "run"))
    app.wait_for(b"logits")
    for key in b"\r13z":
        app.send(bytes([key]))
        time.sleep(0.2)
    app.send(b"q")
    assert app.ended() == 0
    assert b"]52;c;aGFjaw" not in app.output.replace(b"\\x1b]52", b"")
    assert b"\x9b31m" not in app.output


def test_control_characters_are_stopped_at_the_last_gate_too() -> None:
    segments = [Segment("a\x1b[2Jb\x07"), Segment("plain")]
    shown = terminal.ControlFilter().apply(segments, Color(0, 0, 0))
    assert [segment.text for segment in shown] == ["a?[2Jb?", "plain"]


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


@pytest.mark.long
@pytest.mark.parametrize("flood", [False, True], ids=["quiet", "NULs"])
def test_a_terminal_that_vanishes_without_a_signal_ends_the_screen(tmp_path: Path, flood: bool) -> None:
    """A pty that is nobody's controlling terminal: the kernel sends no SIGHUP when its other end is closed. A client
    that feeds it NULs to the end leaves a queue of keys that takes half a minute."""
    ours, theirs = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-c", _RUN], stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        env={**os.environ, "TERM": "xterm-256color", "HOME": str(tmp_path)},
    )  # fmt: skip
    os.close(theirs)
    try:
        drawn = b""
        while b"no dump is open" not in drawn:
            drawn += os.read(ours, 65536)
        end = time.monotonic() + 2
        while flood and time.monotonic() < end:
            os.write(ours, bytes(4096))
        os.close(ours)
        assert child.wait(timeout=12) == 128 + signal.SIGHUP
    finally:
        child.kill()
        child.wait()


def test_a_terminal_that_takes_nothing_is_behind_until_it_has_taken_all() -> None:
    from textual.drivers._writer_thread import WriterThread

    master, slave = os.openpty()
    with open(slave, "w") as file:
        writer = WriterThread(file)
        writer.start()
        app: Any = SimpleNamespace(_driver=SimpleNamespace(_writer_thread=writer))
        assert not terminal.is_behind(app)
        writer.write("x" * 100_000)
        end = time.monotonic() + 20
        while not terminal.is_behind(app):
            assert time.monotonic() < end
        taken = 0
        while taken < 100_000:
            taken += len(os.read(master, 65_536))
        while terminal.is_behind(app):
            assert time.monotonic() < end
        writer.stop()
    os.close(master)
    assert not terminal.is_behind(SimpleNamespace(_driver=None)), "nothing is drawn"  # type: ignore[arg-type]


async def test_while_the_terminal_is_behind_nothing_is_drawn_and_then_once_what_the_keys_came_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    behind, drawn = [False], 0

    async with opened(A, B) as (app, pilot):
        display = app._display

        def counted(*arguments: Any) -> None:
            nonlocal drawn
            drawn += 1
            display(*arguments)

        monkeypatch.setattr(app, "_display", counted)
        monkeypatch.setattr(terminal, "is_behind", lambda _app: behind[0])
        at = app.session.state.tensors.selected or 0
        behind[0] = True
        for _ in range(5):
            await pilot.press("j")
        assert (app.session.state.tensors.selected, drawn) == (at + 5, 0), "the keys go on"
        behind[0] = False
        await until(pilot, lambda: drawn, "what the keys came to")
        row = app.session.state.tensors.row
        assert row is not None
        assert f"› {row.verdict}" in screen(app)
