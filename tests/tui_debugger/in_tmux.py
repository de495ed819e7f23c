"""rldbg in a real tmux pane, on a server of the test's own, driven by keys alone."""

from __future__ import annotations

import itertools
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

needs_tmux = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")

_NUMBERS = itertools.count()


class Tmux:
    """One session with one pane. Close it, or its server goes on."""

    def __init__(self, folder: Path, size: tuple[int, int], **environment: str) -> None:
        # The socket's path must be short, the server must not be the developer's own, and a server that is leaving
        # still holds its socket: the next one has another.
        self._socket = str(folder / f"s{next(_NUMBERS)}")
        path = os.pathsep.join(part for part in sys.path if part)
        self._environment = {**os.environ, "PYTHONPATH": path, "LANG": "C.UTF-8", **environment}
        self._environment.pop("TMUX", None)
        self._given = environment
        self.size = size

    def tmux(self, *arguments: str) -> str:
        command = ["tmux", "-u", "-f", "/dev/null", "-S", self._socket, *arguments]
        return subprocess.run(command, env=self._environment, capture_output=True, text=True, check=True).stdout

    def start(self, *arguments: str, cwd: Path | None = None, through: Sequence[str] = ()) -> None:
        """Run rldbg with these arguments, by the Python program `through`; the pane says `EXIT code` after it."""
        # tmux gives its panes a TERM of its own.
        term = [f"TERM={self._environment['TERM']}"] if "TERM" in self._given else []
        words = [
            "env",
            *term,
            sys.executable,
            *through,
            *([sys.executable] if through else []),
            "-m",
            "tui_debugger",
            *arguments,
        ]
        command = f"{shlex.join(words)}; echo EXIT $?; sleep 600"
        columns, rows = self.size
        where = ["-c", str(cwd)] if cwd else []
        self.tmux("new-session", "-d", "-s", "t", "-x", str(columns), "-y", str(rows), *where, command)

    def keys(self, *keys: str) -> None:
        for key in keys:
            self.tmux("send-keys", "-t", "t", key)
            time.sleep(0.15)

    def type(self, text: str) -> None:
        self.tmux("send-keys", "-t", "t", "-l", text)
        time.sleep(0.15)

    def screen(self) -> str:
        return self.tmux("capture-pane", "-p", "-t", "t")

    def wait_for(self, *texts: str, timeout: float = 30) -> str:
        """The screen, once it shows all of the texts."""
        end = time.monotonic() + timeout
        while not all(text in (shown := self.screen()) for text in texts):
            assert time.monotonic() < end, f"{texts} never came:\n{shown}"
            time.sleep(0.1)
        return shown

    def close(self) -> None:
        subprocess.run(["tmux", "-S", self._socket, "kill-server"], capture_output=True, check=False)
