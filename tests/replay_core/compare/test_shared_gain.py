"""Gradients that share one factor: one finding, with the ratio that explains it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from replay_core.compare import Comparison, compare_runs
from replay_core.dumps import open_run
from replay_core.recorder import Recorder


def recorded(path: Path, factor: float, *, micros: int, dtype: torch.dtype = torch.float32, odd: bool = False) -> Path:
    generator = torch.Generator().manual_seed(0)
    recorder = Recorder(path)
    with recorder.step(0) as record:
        for micro in range(micros):
            ids = torch.arange(24).reshape(4, 6)
            record("batch_inputs", {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, micro=micro)
        grads = {
            f"grad.layers.{layer}.mlp.up_proj.weight": (torch.randn(32, 16, generator=generator) * 1e-4 * factor).to(
                dtype
            )
            for layer in range(5)
        }
        if odd:
            grads["grad.layers.3.mlp.up_proj.weight"] *= 1.7
        record("gradient", grads, micro=0)
    return path


def compared(a: Path, b: Path) -> Comparison:
    return compare_runs(open_run(a), open_run(b))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_factor_that_is_one_over_the_micro_batches_is_named(dtype: torch.dtype, tmp_path: Path):
    a = recorded(tmp_path / "a", 1.0, micros=4, dtype=dtype)
    b = recorded(tmp_path / "b", 0.25, micros=4, dtype=dtype)
    (said,) = [note for note in compared(a, b).notes if "gradients" in note]
    assert "all 5 gradients of b are a times 0.25" in said
    assert "one over the number of micro-batches" in said


def test_a_factor_that_is_the_ratio_of_the_runs_is_named(tmp_path: Path):
    a, b = recorded(tmp_path / "a", 1.0, micros=2), recorded(tmp_path / "b", 1.5, micros=3)
    (said,) = [note for note in compared(a, b).notes if "gradients" in note]
    assert "micro-batches, 2 in a and 3 in b" in said


def test_a_factor_that_nothing_explains_says_so(tmp_path: Path):
    a, b = recorded(tmp_path / "a", 1.0, micros=2), recorded(tmp_path / "b", 1.37, micros=2)
    (said,) = [note for note in compared(a, b).notes if "gradients" in note]
    assert "no count of the runs explains it" in said


def test_gradients_of_several_factors_are_no_single_finding(tmp_path: Path):
    a, b = recorded(tmp_path / "a", 1.0, micros=2), recorded(tmp_path / "b", 0.5, micros=2, odd=True)
    assert not [note for note in compared(a, b).notes if "gradients" in note]
    same = recorded(tmp_path / "c", 1.0, micros=2)
    assert not [note for note in compared(a, same).notes if "gradients" in note]
