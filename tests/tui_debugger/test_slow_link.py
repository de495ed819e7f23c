"""A terminal behind a slow line shows what the keys came to, not every step on the way."""

from __future__ import annotations

import os
import re
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fixtures import FIXTURES
from tests.tui_debugger.in_tmux import Tmux, needs_tmux
from tests.tui_debugger.on_pty import OnPty

_LINE = Path(__file__).with_name("slow_line.py")
_BYTES_PER_S, _DELAY_MS = 2000, 200
_PAIR = [str(FIXTURES / "sglang_dumper/baseline_sdpa_fp32"), str(FIXTURES / "sglang_dumper/target_eager_bf16")]
#: Draws a frame of 3,000 characters every 20 ms unless the terminal is behind; says how many of them it drew.
_FRAMES = """
import sys
from textual.app import App
from tui_debugger import terminal
from tui_debugger.slow_link import AskingDriver
drawn = [0]
class Frames(App):
    def on_mount(self):
        self.set_interval(0.02, self.frame)
    def frame(self):
        if not terminal.is_behind(self):
            drawn[0] += 1
            self._driver.write(f"frame {drawn[0]} " + "." * 3000)
            self._driver.flush()
    def on_key(self, event):
        if event.key == "q":
            self.exit()
Frames(driver_class=AskingDriver).run()
print("LEFT after", drawn[0])
"""


class _Answering(OnPty):
    """A terminal that tells where its cursor is, `after_s` later than it took the question, or never."""

    after_s: float | None = 0.0
    told = 0

    def _read(self) -> None:
        asked = 0
        while True:
            try:
                data = os.read(self.master, 65536)
            except OSError:
                return
            self.output += data
            for _ in range(self.output.count(b"\x1b[6n") - asked):
                asked += 1
                if self.after_s is not None:
                    threading.Timer(self.after_s, self._tell).start()

    def _tell(self) -> None:
        self.told += 1
        os.write(self.master, b"\x1b[30;1R")


@pytest.fixture(params=[0.3, None], ids=["answers late", "never answers"])
def terminal_of(request: pytest.FixtureRequest) -> Iterator[_Answering]:
    _Answering.after_s = request.param
    app = _Answering(_FRAMES)
    yield app
    app.close()


@pytest.mark.long
def test_a_frame_waits_for_the_answer_to_the_one_before_and_a_silent_terminal_for_none(terminal_of: _Answering) -> None:
    app = terminal_of
    app.wait_for(b"frame 1 ")
    began, first = time.monotonic(), app.output.count(b"frame ")
    app.wait_for(b"frame 5 " if app.after_s else b"frame 60 ")
    app.send(b"q")
    assert app.ended() == 0
    questions = app.output.count(b"\x1b[6n")
    if app.after_s:
        per_s = (app.output.count(b"frame ") - first) / (time.monotonic() - began)
        assert per_s <= 1 / app.after_s, "one at a time"
        assert app.told == questions, "no answer is left over for the shell"
    last = int(re.findall(rb"LEFT after (\d+)", app.output)[0])
    assert app.output.count(b"frame ") == last


@pytest.mark.slow
@needs_tmux
@pytest.mark.parametrize("size", [(80, 24), (160, 48)], ids=lambda size: f"{size[0]}x{size[1]}")
def test_twenty_keys_over_two_kilobytes_a_second_show_where_they_led_a_frame_later(size: tuple[int, int]) -> None:
    with tempfile.TemporaryDirectory(prefix="rt") as folder:
        near, far = Tmux(Path(folder), size), Tmux(Path(folder), size)
        note = Path(folder) / "arrived"
        line = [str(_LINE), str(_BYTES_PER_S), str(_DELAY_MS), str(note)]
        try:
            near.start(*_PAIR)
            far.start(*_PAIR, through=line)
            near.wait_for("first at", "25 DIFF", timeout=120)
            far.wait_for("first at", "25 DIFF", timeout=120)
            arrived = _at_rest(note)
            far.keys("?")
            one_frame = _at_rest(note) - arrived  # help dims everything: every line is drawn
            far.keys("Escape")
            _at_rest(note)
            near.keys(*"j" * 20)
            end = _list(near)
            for _ in range(20):
                far.tmux("send-keys", "-t", "t", "j")
            pressed = time.monotonic()
            while _list(far) != end:
                assert time.monotonic() - pressed < 60, far.screen()
                time.sleep(0.05)
            took = time.monotonic() - pressed
            assert took <= one_frame / _BYTES_PER_S + 1, (took, one_frame)
        finally:
            near.close()
            far.close()


def _list(pane: Tmux) -> list[str]:
    """The rows of the list of tensors."""
    return [line for line in pane.screen().splitlines() if re.match(r"│[›▶ ] +[A-Z]{3,} ", line)]


def _at_rest(note: Path) -> int:
    """How many bytes have arrived, once more are not under way: no line is silent for longer that has any."""
    while True:
        seen = note.read_text()
        end = time.monotonic() + 3
        while note.read_text() == seen and time.monotonic() < end:
            time.sleep(0.05)
        if note.read_text() == seen:
            return int(seen)
