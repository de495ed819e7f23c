"""The line on standard error while a command works: there before the job says anything, gone before the answer."""

from __future__ import annotations

import io
import sys
import time
from pathlib import Path

import pytest

from replay_core.errors import NotADumpError
from replay_core.jobs import Progress
from replay_core.workbench import open_dump
from tui_debugger import progress_line
from tui_debugger.progress_line import ProgressLine


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _wait_for(terminal: io.StringIO, text: str) -> None:
    end = time.monotonic() + 30
    while text not in terminal.getvalue():
        assert time.monotonic() < end, terminal.getvalue()
        time.sleep(0.02)


def test_what_is_done_and_since_when_is_said_before_the_job_says_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    line = ProgressLine()
    _wait_for(terminal, "\rreading names of files  0 s")
    line(Progress(3, 12, "step_000003.pt"))
    _wait_for(terminal, "\r3 of 12 step_000003.pt")
    line.clear()
    said = terminal.getvalue()
    assert said.endswith("\r"), "the line is taken away"
    line(Progress(4, 12, "step_000004.pt"))
    assert terminal.getvalue() == said, "and stays away"


def test_a_log_or_a_pipe_is_told_of_long_work_alone_and_in_whole_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = io.StringIO()
    monkeypatch.setattr(sys, "stderr", pipe)
    line = ProgressLine()
    line(Progress(3, 12, "step_000003.pt"))
    line.clear()
    assert pipe.getvalue() == ""
    monkeypatch.setattr(progress_line, "_UNWATCHED_S", 0.01)
    line = ProgressLine()
    _wait_for(pipe, "\n")
    line.clear()
    assert pipe.getvalue() == "reading names of files  0 s\n"


@pytest.mark.long
def test_a_folder_of_very_many_names_says_how_far_it_is(tmp_path: Path) -> None:
    for number in range(5):
        (tmp_path / str(number)).mkdir()
        for name in range(1000):
            (tmp_path / str(number) / f"{name}.txt").touch()
    told: list[Progress] = []
    with pytest.raises(NotADumpError):
        open_dump(tmp_path, on_event=lambda event: told.append(event) if isinstance(event, Progress) else None)
    read = [event for event in told if event.total is None]
    assert [event.done // 1000 for event in read] == [2, 4]
    assert str(tmp_path) in read[0].what
    assert any(event.total and "kinds of dump" in event.what for event in told)
