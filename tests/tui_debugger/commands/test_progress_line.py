"""The line on standard error while a command works: there before the job says anything, gone before the answer."""

from __future__ import annotations

import io
import sys
import time

import pytest

from replay_core.jobs import Progress
from tui_debugger.commands import ProgressLine


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _wait_for(terminal: _Terminal, text: str) -> None:
    end = time.monotonic() + 30
    while text not in terminal.getvalue():
        assert time.monotonic() < end, terminal.getvalue()
        time.sleep(0.02)


def test_what_is_done_and_since_when_is_said_before_the_job_says_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    line = ProgressLine("reading names of files")
    _wait_for(terminal, "\rreading names of files  1 s")
    line(Progress(3, 12, "step_000003.pt"))
    _wait_for(terminal, "\r3/12 step_000003.pt")
    line.clear()
    said = terminal.getvalue()
    assert said.endswith("\r"), "the line is taken away"
    line(Progress(4, 12, "step_000004.pt"))
    assert terminal.getvalue() == said, "and stays away"


def test_nothing_is_said_where_nobody_watches(capsys: pytest.CaptureFixture[str]) -> None:
    line = ProgressLine("reading names of files")
    line(Progress(3, 12, "step_000003.pt"))
    line.clear()
    assert capsys.readouterr() == ("", "")
