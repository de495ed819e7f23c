"""What ten times the tensors, bytes, ranks and steps of a log cost, as a table.

Each size is a whole command of its own, best of three, sizes alternating.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.inputs import Inputs
from benchmarks.racing import Side, child
from replay_core.recorder import Recorder

#: Times as long and times the memory for ten times as much, at most.
TIME, MEMORY = 11.0, 1.2
_ROUNDS = 3
#: Of each of ten tensors, in rows of _WIDTH as hidden states are.
_ELEMENTS, _WIDTH = 2048 * 1024, 1024


@dataclass(slots=True)
class Table:
    """One line per thing that grows."""

    lines: list[str] = field(default_factory=list)
    is_within: bool = True

    @property
    def verdict(self) -> str:
        return "PASS" if self.is_within else "MISSED"

    def text(self) -> str:
        head = f"  {'ten times as many':<28} {'CPU s':>15} {'x':>6} {'MiB at most':>15} {'x':>6}"
        bars = f"  bars                         {'':>15} {TIME:>6.1f} {'':>15} {MEMORY:>6.2f}"
        return "\n".join([f"growth of whole commands: {self.verdict}", head, *self.lines, bars])


def rows(inputs: Inputs) -> Iterator[Table]:
    table = Table()
    for name, expect, words, is_barred in (
        ("tensors: compare", 1, lambda much: _compared(inputs, f"tensors-{much}", tensors=500 * much), True),
        ("bytes: compare", 1, lambda much: _compared(inputs, f"bytes-{much}", elements=_ELEMENTS * much), True),
        ("bytes: show", 0, lambda much: ["show", _dump(inputs, f"bytes-{much}-a", elements=_ELEMENTS * much)], True),
        ("ranks: compare", 1, lambda much: _compared(inputs, f"ranks-{much}", ranks=16 * much), True),
        ("steps of a log: diagnose", 0, lambda much: ["diagnose", str(_log(inputs, 2000 * much))], False),
    ):
        _measure(table, name, expect, words, is_barred=is_barred)
    yield table


def _measure(table: Table, name: str, expect: int, words: Callable[[int], list[str]], *, is_barred: bool) -> None:
    sides, peaks = [], [math.inf, math.inf]
    for place, much in enumerate((1, 10)):
        command = [sys.executable, "-m", "tui_debugger", *words(much)]

        def run(command: list[str] = command, place: int = place) -> None:
            peaks[place] = min(peaks[place], child(command, expect=expect))

        sides.append(Side(name, run))
    for _ in range(_ROUNDS):
        for side in sides:
            side.go()
    one, ten = sides
    longer, larger = ten.cpu_s / one.cpu_s, peaks[1] / peaks[0]
    table.is_within &= not is_barred or (longer <= TIME and larger <= MEMORY)
    seconds, held = f"{one.cpu_s:.2f} {ten.cpu_s:>8.2f}", f"{peaks[0]:.0f} {peaks[1]:>8.0f}"
    table.lines.append(
        f"  {name:<28} {seconds:>15} {longer:>6.1f} {held:>15} {larger:>6.2f}{'' if is_barred else '  no bar'}"
    )


def _compared(inputs: Inputs, name: str, *, tensors: int = 10, elements: int = 4096, ranks: int = 1) -> list[str]:
    return ["compare", *(_dump(inputs, f"{name}-{side}", tensors, elements, ranks) for side in "ab")]


def _dump(inputs: Inputs, name: str, tensors: int = 10, elements: int = 4096, ranks: int = 1) -> str:
    """Tensors of noise; of those of side b each has a hundredth of its elements off by a half."""
    path: Path = inputs.folder / f"growth-{name}"
    if not path.exists():
        for rank in range(ranks):
            generator = torch.Generator().manual_seed(rank)
            fields = {}
            for number in range(tensors):
                values = torch.randn(elements, generator=generator).reshape(-1, _WIDTH)
                if name.endswith("b"):
                    values.view(-1)[::100] += 0.5
                fields[f"model.layers.{number}.output"] = values
            with Recorder(path).step(0, rank=rank) as record:
                record("modules", fields, micro=0)
    return str(path)


def _log(inputs: Inputs, steps: int) -> Path:
    """A log in which nothing is wrong: a loss that falls, a gradient norm that stays."""
    path: Path = inputs.folder / f"growth-{steps}.jsonl"
    if not path.exists():
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(steps, 2, generator=generator).tolist()
        with path.open("w") as file:
            for step, (loss, norm) in enumerate(noise):
                metrics = {"step": step, "loss": 1 / (1 + step / steps) + 0.01 * loss, "grad_norm": 1 + 0.1 * norm}
                file.write(json.dumps(metrics) + "\n")
    return path
