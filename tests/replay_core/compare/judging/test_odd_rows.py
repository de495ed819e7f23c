"""Gradients whose slice on one rank is right but for some rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from replay_core.compare.parallel import parallel
from tests.builders import there
from tests.replay_core.compare.ranks.recorded import gradients, random


def _faults(folder: Path, whole: torch.Tensor, *parts: torch.Tensor) -> list[Any]:
    found = gradients(folder, whole, parts, "layers.0.self_attn.k_proj.weight")
    return [one.fault for one in there(parallel(found.tensors, found.together)).faults]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("wrong", "kind", "said"), [
    (lambda x: 0 * x[12:], "zeros", "is 0 in rows of rank 1 (12 to 15)"),
    (lambda x: 0.5 * x[12:], "too little", "0.5 x the other run's in rows of rank 1 (12 to 15)"),
    (lambda x: x[:4], "order", "rows 12 to 15 on rank 1 are the other run's 0 to 3"),
])  # fmt: skip
def test_rows_that_are_off_say_what_they_hold(
    wrong: Any, kind: str, said: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    whole = random(16, 32).to(dtype)
    (fault,) = _faults(tmp_path, whole, whole[:8], torch.cat([whole[8:12], wrong(whole)]))
    assert (fault.kind, fault.ranks) == (kind, (1,))
    assert said in fault.sentence


def test_rows_that_are_off_by_what_nothing_explains_have_no_name(tmp_path: Path) -> None:
    whole = random(16, 32)
    (fault,) = _faults(tmp_path, whole, whole[:8], torch.cat([whole[8:12], random(4, 32, seed=1)]))
    assert fault.kind == "apart"


@pytest.mark.parametrize("times", [1.0, 0.5])
def test_slices_that_all_ranks_hold_the_sum_or_mean_of_are_of_a_wrong_group(times: float, tmp_path: Path) -> None:
    """Four ranks, of which two hold a slice each: summed over all."""
    whole = random(16, 32)
    total = times * (whole[:8] + whole[8:])
    (fault,) = _faults(tmp_path, whole, total, total, total, total)
    assert (fault.kind, fault.ranks) == ("wrong group", (0, 1, 2, 3))
    assert "summed over all of ranks 0, 1, 2 and 3" in fault.sentence
