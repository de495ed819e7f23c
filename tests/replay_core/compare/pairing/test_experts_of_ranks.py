"""Experts that one run has on one rank each and the other on every rank."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from replay_core.compare import Comparison, compare_runs
from replay_core.dumps import open_run
from tests.replay_core.compare.ranks.recorded import Step, random, write

LAYER = "layers.0.mlp"
IDS = torch.arange(32).reshape(2, 2, 8)
OUT = random(2, 2, 8, 4)


def step(rank: int, rows: dict[int, Tensor], grads: dict[int, Tensor]) -> Step:
    modules = {f"{LAYER}.experts.{number}.output": one for number, one in rows.items()}
    return {
        "forward_data": {"input_ids": IDS[rank]},
        "modules": {**modules, f"{LAYER}.output": OUT[rank]},
        "gradient": {f"grad.{LAYER}.experts.{number}.weight": one for number, one in grads.items()},
    }


def of_two(folder: Path, *, copy: Tensor | None = None) -> Comparison:
    """Data parallelism against expert parallelism; copy: rank 1's gradient of the expert that rank 0 has there."""
    grads = {number: random(4, 4, seed=number) for number in (0, 1)}
    own = [{number: random(3 + rank + number, 4, seed=10 * rank + number) for number in (0, 1)} for rank in (0, 1)]
    second = grads if copy is None else {0: copy, 1: grads[1]}
    a = write(folder / "a", step(0, own[0], grads), step(1, own[1], second))
    every = {number: torch.cat([own[0][number], own[1][number]]) for number in (0, 1)}
    b = write(folder / "b", *(step(rank, {rank: every[rank]}, {rank: grads[rank]}) for rank in (0, 1)))
    return compare_runs(open_run(a), open_run(b))


def test_what_is_elsewhere_is_noted_and_not_missing(tmp_path: Path) -> None:
    result = of_two(tmp_path)
    assert not result.counts["MISSING"]
    assert any("tensors of experts, which a has on several ranks" in note for note in result.notes)


def test_a_copy_that_is_another_stays_missing(tmp_path: Path) -> None:
    assert of_two(tmp_path, copy=random(4, 4, seed=9)).counts["MISSING"]


def test_an_expert_that_no_rank_has_stays_missing(tmp_path: Path) -> None:
    rows = {number: random(3, 4, seed=number) for number in (0, 1)}
    a = write(tmp_path / "a", step(0, rows, {}), step(1, rows, {}))
    b = write(tmp_path / "b", step(0, {1: rows[1]}, {}), step(1, {1: rows[1]}, {}))
    assert compare_runs(open_run(a), open_run(b)).counts["MISSING"]
