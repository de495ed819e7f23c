"""Gradient norms that ranks took of what they hold, where that is not what the other run's ranks hold."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from replay_core.compare import compare_runs
from replay_core.dumps import open_run
from tests.builders import there
from tests.replay_core.compare.ranks.recorded import Step, compared, random, write

IDS = torch.arange(32).reshape(2, 2, 8)
EXPERTS = [random(6, 6, seed=number) for number in (0, 1)]
NORM = random(32, seed=4)


def step(rank: int, experts: list[int], norm: float | None = None) -> Step:
    found = {f"grad.layers.0.mlp.experts.{number}.weight": EXPERTS[number] for number in experts}
    found["grad.layers.0.norm.weight"] = NORM
    square = sum(float(one.square().sum()) for one in found.values())
    return {
        "forward_data": {"input_ids": IDS[rank]},
        "modules": {"layers.0.output": random(2, 8, 4, seed=7 + rank)},
        "gradient": {**found, "grad_norm": torch.tensor(square**0.5 if norm is None else norm)},
    }


@pytest.mark.parametrize(("norm", "is_noted"), [(None, True), (1.0, False)])
def test_a_norm_of_the_experts_of_its_rank_is_no_other_norm_of_all(
    norm: float | None, is_noted: bool, tmp_path: Path
) -> None:
    a = write(tmp_path / "a", *(step(rank, [0, 1]) for rank in (0, 1)))
    b = write(tmp_path / "b", *(step(rank, [rank], norm) for rank in (0, 1)))
    found = compare_runs(open_run(a), open_run(b))
    assert bool([row for row in found.tensors if row.verdict.diverges]) != is_noted
    assert any("norm of the gradients that its rank holds" in note for note in found.notes) == is_noted


def test_norms_of_the_same_gradients_are_compared(tmp_path: Path) -> None:
    a = write(tmp_path / "a", *(step(rank, [0, 1]) for rank in (0, 1)))
    b = write(tmp_path / "b", *(step(rank, [0, 1], 1.0) for rank in (0, 1)))
    found = compare_runs(open_run(a), open_run(b))
    assert {row.name for row in found.tensors if row.verdict.diverges} == {"grad_norm"}


@pytest.mark.parametrize("times", [2, 1.5])
def test_a_norm_that_counts_what_every_rank_holds_whole_again_is_told(times: float, tmp_path: Path) -> None:
    cut, kept = random(12, 8, seed=1), random(8, seed=2)

    def of(part: torch.Tensor, square: torch.Tensor) -> Step:
        gradients = {"grad.layers.0.up.weight": part.contiguous(), "grad.layers.0.norm.weight": kept}
        return {
            "forward_data": {"input_ids": IDS[0], "logits": random(2, 8, 4, seed=3)},
            "gradient": {**gradients, "grad_norm": square.sqrt()},
        }

    once = cut.square().sum() + kept.square().sum()
    counted = once + (times - 1) * kept.square().sum()
    found = compared(tmp_path, of(cut, once), *(of(part, counted) for part in cut.chunk(2)))
    row = next(row for row in found.tensors if row.name == "grad_norm")
    fault = there(row.ranks).fault
    if times != 2:  # of no number of ranks
        assert fault is None or fault.kind != "norm counted again"
        return
    assert (there(fault).kind, there(fault).ranks) == ("norm counted again", (0, 1))
    assert "counts the gradients of layers.0.norm.weight 2 times" in there(fault).sentence
