"""Two hundred bf16 pairs of 4 MB, four of five differing, against a loop of torch.testing.assert_close."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch

from benchmarks.inputs import Inputs, record_of
from benchmarks.racing import Result, Side, child, race

LIMIT_MIB = 300


def rows(inputs: Inputs) -> Iterator[Result]:
    a, b = inputs.modules(), inputs.differing()
    expect = _exit_code(a, b)
    peaks: list[float] = []

    def ours() -> None:
        peaks.append(child([sys.executable, "-m", "tui_debugger", "compare", str(a), str(b)], expect=expect))

    def theirs() -> None:
        left = torch.load(record_of(a), mmap=True, weights_only=True)
        right = torch.load(record_of(b), mmap=True, weights_only=True)
        failures = []
        for name, tensor in left.items():
            if not isinstance(tensor, torch.Tensor):
                continue
            try:
                torch.testing.assert_close(right[name], tensor, rtol=0, atol=0)
            except AssertionError as error:
                failures.append(str(error))
        assert len(failures) == inputs.pairs * 160 // 200, len(failures)

    result = race(
        f"{inputs.pairs} pairs of 4 MB bf16, {inputs.pairs * 160 // 200} differing, whole command",
        Side("`rldbg compare A B`, start included", ours),
        Side("torch.load(mmap=True) and assert_close, torch already imported", theirs),
        bar=4,
        rounds=2,
    )
    result.limits.append(("MiB resident at the peak", max(peaks), LIMIT_MIB))
    result.notes.append("sglang's comparator (bar 10) and msprobe (bar 15) are not measured here")
    yield result


def _exit_code(a: object, b: object) -> int:
    """What the command answers: a last bit flipped is within bf16's tolerance, or not, by the table of tolerances."""
    for expect in (0, 1):
        try:
            child([sys.executable, "-m", "tui_debugger", "compare", str(a), str(b)], expect=expect)
        except RuntimeError:
            continue
        return expect
    raise RuntimeError(f"rldbg compare {a} {b} neither agrees nor diverges")
