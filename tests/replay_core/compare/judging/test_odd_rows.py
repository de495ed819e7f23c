"""Gradients whose slice on one rank is right but for some rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from replay_core.compare.judging import odd_rows
from replay_core.compare.parallel import parallel
from tests.builders import there
from tests.replay_core.compare.ranks.in_memory import alike, as_ref, cut
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


WHOLE = random(16, 32)


def with_rows(at: list[int], values: torch.Tensor | float) -> torch.Tensor:
    made = WHOLE.clone()
    made[at] = values
    return made


#: What each of two ranks holds of the whole -> who is named of what.
WHOLE_ON_EACH: dict[str, tuple[list[torch.Tensor], tuple[str, tuple[int, ...]] | None]] = {
    "rows of one rank that are 0": ([WHOLE, with_rows([3, 4], 0.0)], ("zeros", (1,))),
    "rows of both that are 0": ([with_rows([3, 4], 0.0)] * 2, ("zeros", (0, 1))),
    "rows of both times two": ([with_rows([0, 9], 2 * WHOLE[[0, 9]])] * 2, ("too much", (0, 1))),
    "rows of another place": ([WHOLE, with_rows([5, 6], WHOLE[[8, 9]])], ("order", (1,))),
    "rows times three of two ranks": ([WHOLE, with_rows([3], 3 * WHOLE[3])], None),
    "rows that are off a little as well": ([WHOLE, with_rows([3], 0.0) * 1.1], None),
    "a row that is not finite": ([WHOLE, with_rows([3], torch.nan)], None),
    "all rows": ([WHOLE * 2] * 2, None),
}  # fmt: skip


@pytest.mark.parametrize("case", WHOLE_ON_EACH)
def test_rows_of_a_gradient_that_all_ranks_hold_are_named_too(case: str) -> None:
    parts, expected = WHOLE_ON_EACH[case]
    parted = tuple(rank for rank, part in enumerate(parts) if not torch.equal(part, WHOLE))
    fault = odd_rows.of_rows("x", as_ref(WHOLE), alike(*parts), parted)
    assert (fault and (fault.kind, fault.ranks)) == expected


def test_rows_that_are_0_in_both_runs_are_not_said_to_be_missing() -> None:
    """Nor are rows right that are not finite in the other run."""
    for value in (0.0, torch.nan):
        whole = with_rows([12], value)
        part = whole[8:].clone()
        part[4:6] = 0.0
        fault = odd_rows.of_rows("x", as_ref(whole), cut([whole[:8], part], 0), (1,))
        assert (fault and fault.sentence.count("(13 to 13)")) == (None if value else 1)
    part[4:6] = random(2, 32, seed=1)  # where the other run's are 0
    assert odd_rows.of_rows("x", as_ref(with_rows([12, 13], 0.0)), cut([whole[:8], part], 0), (1,)) is None


def test_a_bias_has_rows_of_one_element() -> None:
    bias = random(16, seed=2)
    part = bias[8:].clone()
    part[6:] = 0.0
    fault = there(odd_rows.of_rows("x", as_ref(bias), cut([bias[:8], part], 0), (1,)))
    assert (fault.kind, fault.ranks) == ("zeros", (1,))
    assert "rank 1 (14 to 15)" in fault.sentence


def test_a_rank_without_rows_is_no_error() -> None:
    held = cut([WHOLE, WHOLE[:0]], 0)
    assert odd_rows.of_rows("x", as_ref(WHOLE), held, (1,)) is None
    assert odd_rows.of_rows("x", as_ref(WHOLE[:0]), held, (1,)) is None
