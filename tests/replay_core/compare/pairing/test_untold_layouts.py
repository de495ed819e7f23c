"""Ranks of two runs that share a step otherwise, of which nothing tells how: that is asked for, and none is another."""

from __future__ import annotations

from pathlib import Path

import torch

from replay_core.compare import Comparison, compare_runs
from replay_core.dumps import open_run
from tests.replay_core.compare.ranks.recorded import Step, random, write

IDS = (2, 8)


def held(*widths: int) -> list[Step]:
    """Ranks with the same tokens, whose slices of an output are so wide."""
    return [
        {
            "batch_inputs": {"input_ids": torch.arange(16).reshape(IDS)},
            "modules": {"up.output": random(*IDS, width, seed=at), "down.output": random(*IDS, 4)},
        }
        for at, width in enumerate(widths)
    ]


def both(folder: Path, a: list[Step], b: list[Step]) -> Comparison:
    return compare_runs(open_run(write(folder / "a", *a)), open_run(write(folder / "b", *b)))


def test_what_could_not_be_put_together_is_asked_for(tmp_path: Path) -> None:
    found = both(tmp_path, held(6, 6), held(5, 5, 5, 5))
    assert not [row.name for row in found.tensors if row.verdict.diverges or row.verdict.value == "MISSING"]
    assert found.first is None
    (why,) = {row.skipped for row in found.skipped if row.name == "up.output"}
    assert why is not None
    assert "ranks 0 and 1 of a and 0, 1, 2 and 3 of b share the step otherwise" in why
    assert "record it with its dims" in why
    assert not found.agrees


def test_ranks_of_one_layout_are_not_asked_for(tmp_path: Path) -> None:
    found = both(tmp_path, held(6, 6), held(5, 6))
    assert [row.name for row in found.tensors if row.verdict.diverges] == ["up.output"]


def test_one_that_could_not_be_put_together_hides_no_other(tmp_path: Path) -> None:
    """Samples dealt to two ranks and to four, of which one output lacks a channel: it is asked for, and no other is."""
    outputs = {f"layers.{layer}.output": random(4, 8, 6, seed=layer) for layer in range(6)}
    cut, wrong = "layers.1.output", "layers.4.output"

    def dealt(count: int, *, is_off: bool = False) -> list[Step]:
        found: list[Step] = []
        for rank in range(count):
            own = {name: x.chunk(count)[rank].contiguous() for name, x in outputs.items()}
            if count > 2:
                own[cut] = own[cut][..., :-1].contiguous()
            if is_off:
                own[wrong] = own[wrong] + 1
            ids = torch.arange(32).reshape(4, 8).chunk(count)[rank].contiguous()
            found.append({"batch_inputs": {"input_ids": ids}, "modules": own})
        return found

    found = both(tmp_path / "right", dealt(2), dealt(4))
    assert {row.name for row in found.skipped} == {cut}
    assert not [row.name for row in found.tensors if row.verdict.diverges or row.verdict.value == "MISSING"]
    assert found.agrees is None
    found = both(tmp_path / "wrong", dealt(2), dealt(4, is_off=True))
    assert {row.name for row in found.tensors if row.verdict.diverges} == {wrong}
    assert {row.name for row in found.skipped} == {cut}
    assert found.agrees is False
