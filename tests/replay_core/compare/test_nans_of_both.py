"""NaN at the same places of both runs is no difference, and is said: an all-clear would hide it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from replay_core.compare.judging.verdict import Verdict
from replay_core.export.documents import comparison_document
from tests.builders import compare_fields, row_of
from tui_debugger.reports.comparison import comparison_report


def _with_nans(*places: int, off: float = 0.0) -> torch.Tensor:
    values = torch.linspace(-1, 1, 5000).reshape(50, 100).clone()
    values[0, 1] += off
    values.view(-1)[list(places)] = torch.nan
    return values


@pytest.mark.parametrize(
    ("a", "b", "says"),
    [
        (_with_nans(7, 300), _with_nans(7, 300), "bitwise equal; NaN at the same 2 places of both"),
        (_with_nans(*range(5000)), _with_nans(*range(5000)), "bitwise equal; every one is NaN on both sides"),
        (_with_nans(9, off=1e-6), _with_nans(9), "NaN at the same place of both"),
    ],
)
def test_it_is_said_and_counted(a: torch.Tensor, b: torch.Tensor, says: str, tmp_path: Path):
    compared = compare_fields(tmp_path, {"x": a, "y": _with_nans()}, {"x": b, "y": _with_nans()})
    row, clean = row_of(compared, "x"), row_of(compared, "y")
    assert row.verdict in (Verdict.SAME, Verdict.CLOSE)
    assert row.reason.endswith(says)
    assert row.figures is not None
    assert row.figures.nan_a == row.figures.nan_b == int(a.isnan().sum())
    assert clean.reason == "bitwise equal"
    assert compared.notes[0].startswith("1 of 2 tensors hold NaN at the same places of both, which is no difference")
    assert "first x (step 0" in comparison_report(comparison_document(compared))


def test_nan_on_one_side_alone_is_a_divergence_and_nothing_else_is_said(tmp_path: Path):
    compared = compare_fields(tmp_path, {"x": _with_nans(7)}, {"x": _with_nans(8)})
    assert row_of(compared, "x").verdict is Verdict.NAN
    assert "of both" not in row_of(compared, "x").reason
    assert not compared.notes


def test_two_runs_without_any_say_nothing_of_it(tmp_path: Path):
    compared = compare_fields(tmp_path, {"x": _with_nans()}, {"x": _with_nans()})
    assert not compared.notes


def test_digests_alone_say_it_where_statistics_were_kept_beside_them(tmp_path: Path):
    compared = compare_fields(tmp_path, {"x": _with_nans(7, 8)}, {"x": _with_nans(7, 8)}, level="stats")
    assert row_of(compared, "x").reason.endswith("2 of its values are NaN")
    assert compared.notes[0].startswith("the tensor holds NaN at the same places of both")


def test_padding_is_not_counted(tmp_path: Path):
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    logprobs = torch.full((2, 5), -1.0)
    logprobs[0, :2] = torch.nan
    fields = {"input_ids": torch.arange(10).reshape(2, 5), "attention_mask": mask, "log_probs": logprobs}
    compared = compare_fields(tmp_path, fields, fields, stage="forward_data")
    assert row_of(compared, "policy_logprobs").reason == "bitwise equal"
    assert not compared.notes


def test_a_micro_batch_whose_tokens_are_all_masked_out_is_compared(tmp_path: Path):
    ids = torch.arange(10).reshape(2, 5)
    fields = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "response_mask": torch.zeros_like(ids)}
    a, b = torch.linspace(-3, -1, 10).reshape(2, 5), torch.linspace(-3.3, -1.1, 10).reshape(2, 5)
    compared = compare_fields(tmp_path, {**fields, "log_probs": a}, {**fields, "log_probs": b}, stage="forward_data")
    assert row_of(compared, "policy_logprobs").verdict in (Verdict.PADDING, Verdict.DIFF)
