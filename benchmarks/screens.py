"""The screen on a pseudo-terminal: first paint, what it costs to stand there, and how soon a key shows under load."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil

from benchmarks.inputs import Inputs
from benchmarks.racing import Result, Side, race

#: Records of the long run, and tensors of the long list, at scale 1.
RECORDS, TENSORS = 10_000, 100_000
COLUMNS, ROWS = 160, 48
WATCHED_S = 8.0
KEYS, KEYS_PER_S = 240, 15

_HELLO = """
from textual.app import App
from textual.widgets import Static
class Hello(App):
    def compose(self):
        yield Static("hello world")
Hello().run()
"""
#: Notes when a key came from the terminal and when the paint that followed its action was written, in seconds of wall
#: clock and of this process's processor time; replays run beside, one after the other, and their events are shown.
_KEYED = """
import itertools, json, sys, time
from pathlib import Path
from textual import events
from textual.app import App
from textual.driver import Driver
from replay_core.jobs import Job
from tui_debugger import app, cli
from tui_debugger.screens.pane_layout import PaneLayout
a, b, answer, dump, cells = sys.argv[1:]
came, done, took, ran = [], [], [], []
process, display, move, begin = Driver.process_message, App._display, PaneLayout.do_move, app.RldbgApp._begin
def processed(self, message):
    if isinstance(message, events.Key) and message.key in "jk":
        came.append((time.perf_counter(), time.process_time()))
    process(self, message)
def moved(self, where):
    move(self, where)
    done.extend(came)
    came.clear()
def displayed(self, screen, renderable):
    display(self, screen, renderable)
    took.extend((time.perf_counter() - wall, time.process_time() - cpu) for wall, cpu in done)
    done.clear()
async def begun(self):
    await begin(self)
    self.run_worker(replayed(self), exit_on_error=True)
async def replayed(self):
    for number in itertools.count():
        plan = {"dump": dump, "step": 0, "rank": 0, "micro": 0, "model": "random:llama-tiny"}
        plan["out"] = f"{cells}/{number}"
        cell = await self.engine.run(Job("replay_cell", {"plan": plan}), self.session.errands.take)
        ran.append(cell["outcome"])
Driver.process_message, App._display, PaneLayout.do_move, app.RldbgApp._begin = processed, displayed, moved, begun
code = cli.run([a, b])
Path(answer).write_text(json.dumps({"took": took, "cells": ran}))
sys.exit(code)
"""
_TICKING = """
import sys
from pathlib import Path
from replay_core.jobs import Sample
from tui_debugger import app
begun = app.RldbgApp._begin
async def begin(self):
    await begun(self)
    count = iter(range(10**6))
    self.set_interval(1, lambda: self.session.errands.take(Sample(next(count), 900.0 + next(count) % 7, None, 98.0)))
app.RldbgApp._begin = begin
sys.exit(app.run_ui(Path(sys.argv[1]), None))
"""


def rows(inputs: Inputs) -> Iterator[Result]:
    run = _long_run(inputs)
    yield race(
        "10,000-record run, first paint with its steps",
        Side("`rldbg RUN` until a step stands there", lambda: _painted(_rldbg(run), b"step 3")),
        Side("textual's hello-world until it stands there", lambda: _painted(["-c", _HELLO], b"hello world")),
        bar=1 / 1.4,
        rounds=7,
    )
    small = inputs.small()
    yield _standing("idle screen", _rldbg(small), 0.5)
    yield _standing("telemetry once a second", ["-c", _TICKING, str(small)], 2.0)
    yield _keys(inputs)


def _rldbg(path: Path) -> list[str]:
    """As the installed command starts; `-m` would look for the module with runpy first, which hello-world does not."""
    return ["-c", "from tui_debugger.cli import main; main()", str(path)]


class _Terminal:
    """A Python program on a pseudo-terminal; its output is counted and, up to a marker, kept."""

    def __init__(self, arguments: list[str]) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        path = os.pathsep.join(part for part in sys.path if part)
        self._home = tempfile.TemporaryDirectory(prefix="rldbg-home-")
        homes = {f"XDG_{name}_HOME": self._home.name for name in ("CONFIG", "STATE", "CACHE")}
        environment = {**os.environ, "TERM": "xterm-256color", "PYTHONPATH": path, **homes}
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment,
            start_new_session=True,
        )
        os.close(slave)

    def read(self, timeout: float) -> bytes:
        ready, _, _ = select.select([self.master], [], [], timeout)
        try:
            return os.read(self.master, 1 << 16) if ready else b""
        except OSError:
            return b""

    def wait_for(self, marker: bytes, timeout: float = 60) -> None:
        seen, end = b"", time.monotonic() + timeout
        while marker not in seen:
            if time.monotonic() > end or self.process.poll() is not None:
                raise RuntimeError(f"{marker!r} never came: {seen[-500:]!r}")
            seen = seen[-(1 << 16) :] + self.read(0.5)

    def drain(self, seconds: float) -> int:
        count, end = 0, time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            count += len(self.read(left))
        return count

    def close(self) -> None:
        self.process.terminate()
        while self.process.poll() is None:
            self.read(0.1)
        os.close(self.master)
        self._home.cleanup()


def _painted(arguments: list[str], marker: bytes) -> None:
    terminal = _Terminal(arguments)
    try:
        terminal.wait_for(marker)
    finally:
        # Its end is no part of the paint, but of the wall clock: it leaves at once.
        terminal.process.kill()
        terminal.process.wait()
        os.close(terminal.master)


def _standing(title: str, arguments: list[str], percent: float) -> Result:
    """Processor time and bytes of a screen that nobody touches."""
    load = os.getloadavg()[0]
    terminal = _Terminal(arguments)
    try:
        terminal.wait_for(b"native dump")
        terminal.drain(3)
        watched = psutil.Process(terminal.process.pid)
        before = watched.cpu_times()
        count = terminal.drain(WATCHED_S)
        after = watched.cpu_times()
    finally:
        terminal.close()
    cpu_s = after.user + after.system - before.user - before.system
    ours = Side(title, lambda: None, WATCHED_S, cpu_s)
    limits = [
        ("percent of a core", 100 * cpu_s / WATCHED_S, percent),
        ("KB/s to the terminal", count / WATCHED_S / 1e3, 10.0),
    ]
    return Result(title, ours, Side("nothing", lambda: None, WATCHED_S, 0.0), None, load, limits=limits)


def _keys(inputs: Inputs) -> Result:
    """Keys pressed at a steady pace while a comparison of very many tensors streams in and replays run beside."""
    a, b = _long_pair(inputs)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "took.json"
        terminal = _Terminal(["-c", _KEYED, str(a), str(b), str(answer), str(inputs.small()), folder])
        try:
            terminal.wait_for(b"as they are judged")
            for number in range(KEYS):
                os.write(terminal.master, b"jjjk"[number % 4 : number % 4 + 1])
                terminal.drain(1 / KEYS_PER_S)
            os.write(terminal.master, b"qq")
            end = time.monotonic() + 30
            while terminal.process.poll() is None and time.monotonic() < end:
                terminal.read(0.1)
            said = json.loads(answer.read_text())
        finally:
            terminal.close()
    wall, cpu = (sorted(part) for part in zip(*said["took"], strict=True))
    percentile = {p: (_at(wall, p), _at(cpu, p)) for p in (50, 95, 99)}
    ours = Side(f"{len(wall)} keys among {TENSORS:,} tensors, key to paint, median", lambda: None, *percentile[50])
    theirs = Side("the bar", lambda: None, 0.04, 0.0)
    notes = [
        f"{p}th percentile {took * 1e3:.1f} ms, of which {spent * 1e3:.1f} ms of this process's own processor time"
        for p, (took, spent) in percentile.items()
    ]
    notes.append(f"slowest {wall[-1] * 1e3:.1f} ms; {KEYS - len(wall)} keys were not painted one by one")
    outcomes = Counter(said["cells"])
    notes.append(f"replays beside: {', '.join(f'{count} {what}' for what, count in outcomes.items()) or 'none ended'}")
    limits = [("ms, 99th percentile", percentile[99][0] * 1e3, 40.0)]
    return Result("key to paint while a comparison streams in and replays run", ours, theirs, None, load, notes, limits)


def _at(ordered: list[float], percent: int) -> float:
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]


def _long_run(inputs: Inputs) -> Path:
    """A run of very many steps: one really recorded file under as many names."""
    source, target = inputs.small(), inputs.folder / "long"
    if target.exists():
        return target
    file = next((source / "forward_data").glob("*.pt"))
    (target / "forward_data").mkdir(parents=True)
    for step in range(max(100, round(RECORDS * inputs.scale))):
        os.link(file, target / "forward_data" / f"step_{step:06d}_rank0_micro0.pt")
    return target


def _long_pair(inputs: Inputs) -> tuple[Path, Path]:
    import torch

    from replay_core.recorder import Recorder

    made = []
    for side, value in (("a", 0.0), ("b", 1.0)):
        folder = inputs.folder / f"many-{side}"
        if not folder.exists():
            count = max(1000, round(TENSORS * inputs.scale))
            tensors = {f"layers.{number}.output": torch.full((4,), number % 97 + value) for number in range(count)}
            recorder = Recorder(folder, format="safetensors")
            with recorder.step(0) as record:
                record("modules", tensors, micro=0)
        made.append(folder)
    return made[0], made[1]
