"""Two shapes that differ are explained, and compared as far as both go."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from replay_core.compare.judging.verdict import Verdict
from tests.builders import compare_fields, row_of

VALUES = torch.arange(1.0, 11.0).reshape(2, 5)


@pytest.mark.parametrize(
    ("padding", "says"), [((0, 3), "its last 3 columns are all 0.0"), ((3, 0), "its first 3 columns are all 0.0")]
)
def test_the_padding_that_explains_a_longer_side_is_named_and_left_out(
    padding: tuple[int, int], says: str, tmp_path: Path
):
    longer = torch.nn.functional.pad(VALUES, padding)
    row = row_of(compare_fields(tmp_path, {"x": VALUES}, {"x": longer}), "x")
    assert row.verdict is Verdict.SHAPE
    assert "b is longer on axis 1, by 3" in row.reason
    assert says in row.reason
    assert row.note is not None
    assert "what both have (10 elements) is equal" in row.note


def test_a_difference_beside_the_padding_is_found_in_either_sides_own_index(tmp_path: Path):
    longer = torch.nn.functional.pad(VALUES, (3, 0))
    longer[1, 4] += 9
    row = row_of(compare_fields(tmp_path, {"x": VALUES}, {"x": longer}), "x")
    assert (row.raw_a, row.raw_b) == ((1, 1), (1, 4))
    assert row.value_b == row.value_a + 9


def test_what_is_no_padding_is_not_called_one(tmp_path: Path):
    row = row_of(compare_fields(tmp_path, {"x": VALUES}, {"x": torch.rand(2, 8)}), "x")
    assert row.verdict is Verdict.SHAPE
    assert "padding" not in row.reason


def test_tensors_of_other_ranks_have_nothing_to_compare(tmp_path: Path):
    row = row_of(compare_fields(tmp_path, {"x": VALUES}, {"x": torch.rand(3, 2, 5)}), "x")
    assert row.verdict is Verdict.SHAPE
    assert row.figures is None


def test_positions_before_samples_are_samples_before_positions(tmp_path: Path):
    """Megatron lays hidden states out as [S, B, H]."""
    mask = torch.ones(2, 5, dtype=torch.long)
    mask[0, :2] = 0
    hidden = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0))
    common = {"input_ids": torch.arange(10).reshape(2, 5), "attention_mask": mask}
    a, b = {**common, "layers.0.output": hidden}, {**common, "layers.0.output": hidden.transpose(0, 1).contiguous()}
    assert row_of(compare_fields(tmp_path / "same", a, b), "layers.0.output").verdict is Verdict.SAME
    b["layers.0.output"][3, 1, 2] += 4
    row = row_of(compare_fields(tmp_path / "other", a, b), "layers.0.output")
    assert row.verdict is Verdict.DIFF
    assert (row.token, row.raw_a, row.raw_b) == ((1, 3), (1, 3, 2), (3, 1, 2))
