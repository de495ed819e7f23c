"""Two sides of one race, alternating in one process, and what came of it."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf, nan


@dataclass(slots=True)
class Side:
    """One contestant: what it does, and the best of its runs."""

    name: str
    run: Callable[[], object]
    wall_s: float = inf
    cpu_s: float = inf

    def go(self) -> None:
        own, children = time.process_time(), _children_s()
        began = time.perf_counter()
        self.run()
        wall = time.perf_counter() - began
        cpu = time.process_time() - own + _children_s() - children
        self.wall_s, self.cpu_s = min(self.wall_s, wall), min(self.cpu_s, cpu)


@dataclass(slots=True)
class Result:
    """One line of the report. `ratio` is how many times the other side's wall time ours fits into."""

    title: str
    ours: Side
    theirs: Side
    bar: float | None
    load: float
    notes: list[str] = field(default_factory=list)
    #: Bars beside the ratio: (what, measured, limit), each an upper limit.
    limits: list[tuple[str, float, float]] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        return self.theirs.wall_s / self.ours.wall_s

    @property
    def verdict(self) -> str:
        if self.bar is None and not self.limits:
            return "no bar"
        if self.load > (os.cpu_count() or 1):
            return "not measurable"
        reached = self.bar is None or self.ratio >= self.bar
        return "PASS" if reached and all(measured <= limit for _, measured, limit in self.limits) else "MISSED"

    def text(self) -> str:
        bar = "none" if self.bar is None else f">= {self.bar:g}"
        lines = [f"{self.title}: {self.verdict}"]
        for who, side in (("ours", self.ours), ("theirs", self.theirs)):
            lines.append(f"  {who:<7} {side.wall_s * 1e3:>9.2f} ms  {side.cpu_s:>7.3f} CPU s  {side.name}")
        lines.append(f"  ratio   {self.ratio:>9.2f}     bar {bar}; load {self.load:.1f} on {os.cpu_count()} cores")
        lines += [f"  limit   {measured:>9.2f}     bar <= {limit:g}; {what}" for what, measured, limit in self.limits]
        return "\n".join([*lines, *(f"  note    {note}" for note in self.notes)])


def race(title: str, ours: Side, theirs: Side, *, bar: float | None, rounds: int) -> Result:
    """Both sides in turn, best of `rounds`, after one round that warms caches and does not count."""
    ours.run()
    theirs.run()
    # Taken before: what the race itself adds is the race's.
    load = os.getloadavg()[0]
    for _ in range(rounds):
        ours.go()
        theirs.go()
    return Result(title, ours, theirs, bar, load)


def child(arguments: list[str], *, expect: int) -> float:
    """Run a whole command, its output thrown away. Returns its peak resident memory in MiB (nan without /proc).

    Raises:
        RuntimeError: it left with another exit code.
    """
    peak = nan
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=said)
        # ru_maxrss would say how large this process was when it forked; the child's own mark is in /proc.
        while process.poll() is None:
            peak = _high_water_mib(process.pid) or peak
            time.sleep(0.002)
        if process.returncode != expect:
            said.seek(0)
            raise RuntimeError(
                f"{' '.join(arguments)}: exit {process.returncode}\n{said.read().decode(errors='replace')}"
            )
    return peak


def _high_water_mib(pid: int) -> float | None:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as status:
        for line in status:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    return None


def _children_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
