"""Whatever ends a command, nothing of it stays: no process, no temporary file, no shared memory, no lock.

Each command runs with a home and a temporary folder of its own, and with a word in its environment by which every
process that it starts is known.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.builders import write_dump
from tests.tui_debugger.on_pty import OnPty

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="looks through /proc")]

_WORD = "RLDBG_LEFTOVERS"
#: A trainer that records step after step, and says so.
_TRAINER = """
import sys, torch
from replay_core.recorder import Recorder
recorder = Recorder(sys.argv[1], asynchronous=sys.argv[2] == "async")
for step in range(int(sys.argv[3])):
    with recorder.step(step) as record:
        record("loss", values=torch.randn(200, 200), loss=step + .5)
    print("recorded", step, flush=True)
recorder.close()
"""


class Ran:
    """One command in a world of its own: its processes, its temporary folder, what it shares."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.word = folder, f"{os.getpid()}-{time.monotonic_ns()}"
        self.tmp, self.home = folder / "tmp", folder / "home"
        self.tmp.mkdir(parents=True)
        self.home.mkdir()
        self._shared = _shared()
        self.started: subprocess.Popen[bytes] | None = None
        self.environment = {
            **os.environ, "HOME": str(self.home), "TMPDIR": str(self.tmp), _WORD: self.word, "OMP_NUM_THREADS": "1",
            "XDG_CACHE_HOME": str(self.home / "cache"), "XDG_STATE_HOME": str(self.home / "state"),
            "XDG_DATA_HOME": str(self.home / "data"), "XDG_CONFIG_HOME": str(self.home / "config"),
        }  # fmt: skip
        self.environment.pop("COLUMNS", None)

    def start(self, *words: str, stdin: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
        self.started = subprocess.Popen(
            [sys.executable, *words], env=self.environment, cwd=self.folder, stdin=stdin, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        return self.started

    def end(self) -> None:
        """Of a test that failed nothing is left either."""
        if self.started is not None and self.started.poll() is None:
            self.started.kill()
            self.started.communicate()

    def rldbg(self, *words: str, stdin: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
        return self.start("-m", "tui_debugger", *words, stdin=stdin)

    def processes(self) -> list[str]:
        """Command lines of what still runs."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and f"{_WORD}={self.word}".encode() in (entry / "environ").read_bytes():
                    found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
            except OSError:
                continue
        return [line for line in found if line]  # a zombie has none

    def left(self) -> list[str]:
        """What is still there of it, ten seconds after it ended at the latest."""
        _until(lambda: not self.processes(), 10)
        files = [str(path) for path in self.tmp.rglob("*") if path.is_file() or not path.is_dir()]
        hidden = [
            str(path) for path in self.folder.rglob("*")
            if path.is_file() and (path.suffix in (".tmp", ".lock", ".part") or path.name.startswith(".claim"))
        ]  # fmt: skip
        return [*self.processes(), *files, *hidden, *sorted(_shared() - self._shared)]


def _shared() -> set[str]:
    return {str(path) for path in Path("/dev/shm").iterdir() if path.name.startswith(("rldbg", "torch_", "psm_"))}


def _until(met: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not met():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


@pytest.fixture
def ran(tmp_path: Path) -> Iterator[Ran]:
    world = Ran(tmp_path / "world")
    yield world
    world.end()


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's dump, and itself the first case: it ends by itself."""
    world = Ran(tmp_path_factory.mktemp("demo") / "world")
    process = world.rldbg("demo", "--text", "--dir", str(world.folder / "dump"))
    said = process.communicate(timeout=300)[0]
    assert process.returncode == 1, said[-2000:]
    assert world.left() == []
    return world.folder / "dump"


def _recorded(demo: Path) -> Path:
    return next(path.parent for path in sorted(demo.rglob("manifest.json")) if (path.parent / "checkpoints").is_dir())


_SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGKILL]


@pytest.mark.parametrize("number", [None, *_SIGNALS])
@pytest.mark.parametrize("what", ["replay", "matrix", "demo", "parity", "diagnose -"])
def test_a_command_that_ends_or_is_ended_leaves_nothing(
    ran: Ran, demo: Path, what: str, number: signal.Signals | None
) -> None:
    dump = str(_recorded(demo))
    words = {
        "replay": ["replay", dump, "--step", "0", "--micro", "0", "--text"],
        "matrix": ["replay", dump, "--step", "0", "--micro", "0", "--text", "attention=eager,sdpa", "dtype=fp32,bf16"],
        "demo": ["demo", "--text", "--dir", str(ran.folder / "dump")],
        "parity": ["parity", "--text", "--steps", "1"],
        "diagnose -": ["diagnose", "-"],
    }[what]  # fmt: skip
    process = ran.rldbg(*words, stdin=subprocess.PIPE if what == "diagnose -" else subprocess.DEVNULL)
    if what == "diagnose -":
        assert process.stdin is not None
        process.stdin.write(b"{'loss': 0.5}\n")
        process.stdin.flush()
    if number is None:
        said = process.communicate(timeout=300)[0]
        assert process.returncode in range(5), said[-2000:]
    else:
        # In the middle: a child of it runs, or its file is there.
        middle = (lambda: bool(list(ran.tmp.iterdir()))) if what == "diagnose -" else (lambda: len(ran.processes()) > 1)
        assert _until(lambda: middle() or process.poll() is not None, 120)
        time.sleep(0.3)
        process.send_signal(number)
        process.communicate(timeout=60)
    left = ran.left()
    if number is signal.SIGKILL:
        # Nobody can take away a file after that; processes go all the same, and what stays is no lock.
        left = [one for one in left if not one.startswith((str(ran.tmp), str(ran.folder / "dump")))]
    assert left == []


@pytest.mark.parametrize("number", _SIGNALS)
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_recorder_that_is_ended_leaves_what_the_next_one_takes_away(
    ran: Ran, kind: str, number: signal.Signals
) -> None:
    dump = ran.folder / "dump"
    process = ran.start("-c", _TRAINER, str(dump), kind, "100000")
    assert process.stdout is not None
    for _ in range(20):
        assert process.stdout.readline().startswith(b"recorded")
    process.send_signal(number)
    process.communicate(timeout=240)
    if number is not signal.SIGKILL:
        assert ran.left() == []
    after = ran.start("-c", _TRAINER.replace("range(int", "range(10**6, 10**6 + int"), str(dump), kind, "2")
    said = after.communicate(timeout=240)[0]
    assert after.returncode == 0, said[-2000:]
    assert ran.left() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
@pytest.mark.parametrize("follows", [False, True])
def test_a_screen_that_is_killed_takes_its_children_along(
    ran: Ran, tmp_path: Path, follows: bool, number: signal.Signals
) -> None:
    write_dump(tmp_path / "run", {"forward_data": {"log_probs": torch.zeros(2, 4), "entropy": torch.ones(2, 4)}})
    environment: dict[str, Any] = {
        name: text for name, text in ran.environment.items() if name not in ("PYTHONPATH", "TERM")
    }
    app = OnPty("-m tui_debugger", "ui", str(tmp_path / "run"), *(["--follow"] if follows else []), **environment)
    try:
        app.wait_for(b"entropy", 60)
        assert len(ran.processes()) > 1  # its reader
        app.process.send_signal(number)
        app.ended(30)
        assert ran.left() == []
    finally:
        app.close()
