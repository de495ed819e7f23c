"""The element a pair shows, and the place of its greatest difference beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from replay_core.export.documents import tensor_row
from tests.builders import compare_paths, row_of


def _compared(folder: Path, name: str, a: torch.Tensor, b: torch.Tensor) -> Any:
    ids = torch.arange(12).view(3, 4)
    for side, values in (("a.pt", a), ("b.pt", b)):
        torch.save({"input_ids": ids, "attention_mask": torch.ones_like(ids), name: values}, folder / side)
    return tensor_row(row_of(compare_paths(folder / "a.pt", folder / "b.pt"), name))


def test_the_place_of_the_greatest_difference_stands_beside_the_first_token_past_its_limit(tmp_path: Path) -> None:
    a = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(0))
    b = a.clone()
    b[0, 1] += 1
    b[2, 3, 5] += 9
    row = _compared(tmp_path, "layers.0.mlp.output", a, b)
    assert (row["index"]["sample"], row["index"]["position"]) == (0, 1)
    found = row["greatest"]
    assert (found["index"]["sample"], found["index"]["position"], found["index"]["raw_a"]) == (2, 3, [2, 3, 5])
    assert abs(found["b"] - found["a"]) == row["metrics"]["max_abs"]


def test_an_element_that_is_the_greatest_is_not_told_twice(tmp_path: Path) -> None:
    a = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(0))
    b = a.clone()
    b[2, 3, 5] += 9
    assert "greatest" not in _compared(tmp_path, "layers.0.mlp.output", a, b)
