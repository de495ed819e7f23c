"""The fault matrix: labelled pairs, what rldbg and other tools say of them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.faults import HARMLESS, REAL, Fault, batch
from benchmarks.inputs import Inputs
from benchmarks.peers import peers
from replay_core.compare import compare_runs
from replay_core.dumps import open_run
from replay_core.recorder import Recorder


@dataclass(slots=True)
class Matrix:
    """Per tool, which pairs it called right."""

    faults: list[Fault]
    right: dict[str, list[bool]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        return "PASS" if all(self.right["rldbg"]) else "MISSED"

    def text(self) -> str:
        harmless = [fault in HARMLESS for fault in self.faults]
        count = len(self.faults)
        lines = [f"{count} labelled pairs, {sum(harmless)} harmless: {self.verdict}"]
        for tool, right in self.right.items():
            passed = sum(ok for ok, kind in zip(right, harmless, strict=True) if kind)
            found = sum(ok for ok, kind in zip(right, harmless, strict=True) if not kind)
            lines.append(
                f"  {tool:<15} harmless passed {passed:>3} of {sum(harmless)}, real found {found:>3} of "
                f"{count - sum(harmless)}"
            )
        lines.append("  wrong           " + " ".join(f"[{number}] {tool}" for number, tool in enumerate(self.right)))
        for place, fault in enumerate(self.faults):
            marks = " ".join("." if right[place] else "x" for right in self.right.values())
            lines.append(f"    {marks}  {'harmless' if harmless[place] else 'real':<9} {fault.name}")
        return "\n".join([*lines, *(f"  note    {note}" for note in self.notes)])


def rows(_inputs: Inputs) -> Iterator[Matrix]:
    tools, notes = peers()
    faults = [*HARMLESS, *REAL]
    matrix = Matrix(faults, {"rldbg": [], **{tool: [] for tool in tools}}, notes)
    for fault in faults:
        a, b = fault.make()
        with tempfile.TemporaryDirectory(prefix="rldbg-fault-") as folder:
            matrix.right["rldbg"].append(ours(fault, a, b, Path(folder)))
        for tool, passes in tools.items():
            matrix.right[tool].append(passes(a, b) is (fault in HARMLESS))
    matrix.notes.append(
        "rldbg is right when its verdict is the labelled one; others when they pass or fail as labelled"
    )
    yield matrix


def ours(fault: Fault, a: dict[str, object], b: dict[str, object], folder: Path) -> bool:
    """Whether rldbg gives the pair, recorded and compared as dumps are, its label."""
    for name, fields in (("a", a), ("b", b)):
        with Recorder(folder / name).step(0) as record:
            if fault.batch:
                record("batch_inputs", batch(), micro=0)
            record("modules", fields, micro=0)
    compared = compare_runs(open_run(folder / "a"), open_run(folder / "b"))
    (row,) = [row for row in [*compared.tensors, *compared.skipped] if row.name == fault.tensor]
    return row.verdict is fault.says
