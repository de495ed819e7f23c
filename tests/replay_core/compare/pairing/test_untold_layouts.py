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
