"""Two hundred bf16 pairs of 4 MB, four of five differing, against loops over torch.testing.assert_close and others."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks import installed
from benchmarks.inputs import Inputs, record_of
from benchmarks.racing import Result, Side, child, race

LIMIT_MIB = 300
#: Times as fast as assert_close's whole command, and as its loop alone.
WHOLE, LOOP = 8.0, 6.0

#: A command as people write it: load both files, compare tensor by tensor, count.
_LOOP = """
import sys, torch
from benchmarks import peers
left, right = (torch.load(path, mmap=True, weights_only=True) for path in sys.argv[1:3])
names = [name for name, value in left.items() if isinstance(value, torch.Tensor)]
failed = [name for name in names if not getattr(peers, sys.argv[3])({name: left[name]}, {name: right[name]})]
"""


def rows(inputs: Inputs) -> Iterator[Result]:
    a, noisy = inputs.modules(), inputs.noisy()
    for title, b, expect in (
        ("a last bit flipped in 1 % of the elements", inputs.differing(), 0),
        ("1 ulp of noise everywhere from tensor 40, 1 % of the rows 5 % wrong from tensor 120", noisy, 1),
    ):
        for bar, name, said in (
            (WHOLE, "torch_assert_close", "torch.load(mmap=True) and assert_close"),
            (25.0, "sglang_rule", "sglang's comparator"),
            (25.0, "msprobe_rule", "msprobe compare"),
        ):
            of = f"{inputs.pairs} pairs of 4 MB bf16, {title}"
            if name == "torch_assert_close":
                yield _raced(of, a, b, expect, bar, _loop(a, b, name), said)
            elif b is noisy:
                yield _raced_by_peer(of, a, b, bar, name, said)


def _raced_by_peer(title: str, a: Path, b: Path, bar: float, rule: str, said: str) -> Result:
    """Against the package itself on dumps of its own form; where it is not installed, against its rule, no bar."""
    tool, write = {
        "sglang_rule": (installed.SGLANG, installed.write_sglang),
        "msprobe_rule": (installed.MSPROBE, installed.write_msprobe),
    }[rule]
    why = tool.missing()
    if why is not None:
        said = f"torch.load(mmap=True) and the rule of {said}, not the tool itself (bar {bar:g} for that)"
        result = _raced(title, a, b, 1, None, _loop(a, b, rule), said)
        result.notes.append(f"the tool itself: {why}")
        return result
    with tempfile.TemporaryDirectory(prefix=f"rldbg-{tool.name}-", dir=a.parent) as folder:
        sides = [write(Path(folder) / side.name, _tensors(side)) for side in (a, b)]
        words = [sys.executable, "-m", "benchmarks.installed", tool.name, *map(str, sides), f"{folder}/out"]
        return _raced(title, a, b, 1, bar, words, f"{said}, {tool.version()}, its own dumps")


def _tensors(dump: Path) -> dict[str, torch.Tensor]:
    loaded = torch.load(record_of(dump), mmap=True, weights_only=True)
    return {name: value for name, value in loaded.items() if isinstance(value, torch.Tensor)}


def _loop(a: Path, b: Path, name: str) -> list[str]:
    return [sys.executable, "-c", _LOOP, str(record_of(a)), str(record_of(b)), name]


def _raced(title: str, a: Path, b: Path, expect: int, bar: float | None, words: list[str], said: str) -> Result:
    peaks: list[float] = []

    def ours() -> None:
        peaks.append(child([sys.executable, "-m", "tui_debugger", "compare", str(a), str(b)], expect=expect))

    result = race(
        f"{title}, whole commands",
        Side("`rldbg compare A B`", ours),
        Side(f"{said}, importing torch included", lambda: child(words, expect=0)),
        bar=bar,
        rounds=2,
    )
    result.limits.append(("MiB resident at the peak", max(peaks), LIMIT_MIB))
    bare = Side("", lambda: child([sys.executable, "-c", "import torch"], expect=0))
    bare.go()
    loop_s = result.theirs.wall_s - bare.wall_s
    if bar == WHOLE:
        result.limits.append(("of their loop's time, torch imported before", result.ours.wall_s / loop_s, 1 / LOOP))
    result.notes.append(
        f"importing torch alone takes {bare.wall_s:.2f} s; without it the ratio is {loop_s / result.ours.wall_s:.2f}"
    )
    if b.name == "noisy":
        result.notes += _named(a, b)
    return result


def _named(a: Path, b: Path) -> list[str]:
    """Which tensor rldbg calls first, by tolerance and bitwise."""
    said = []
    for how in ((), ("--exact",)):
        words = [sys.executable, "-m", "tui_debugger", "compare", str(a), str(b), "--json", *how]
        document = json.loads(subprocess.run(words, capture_output=True, check=False).stdout)
        said.append(f"first with {' '.join(how) or 'the default tolerances'}: {document['first_divergence']['name']}")
    return said
