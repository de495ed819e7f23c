"""Slices of a context-parallel group, cut here as slime's and miles' own code cuts them, come back as the response."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from replay_core import pages
from replay_core.dumps import open_run
from replay_core.dumps.context_parallel import Lengths, put_together, stretches
from tests.builders import save_file

TOTALS, RESPONSES = [13, 9, 4], [11, 4, 1]


def cut(values: torch.Tensor, total: int, response: int, rank: int, ranks: int, padded: int = 0) -> torch.Tensor:
    """slice_log_prob_with_cp of slime/backends/megatron_utils/cp_utils.py, written out."""
    prompt, chunk = total - response, ((padded or total) + 2 * ranks - 1) // (2 * ranks)
    spans = [(rank * chunk, (rank + 1) * chunk), ((2 * ranks - rank - 1) * chunk, (2 * ranks - rank) * chunk)]
    parts = []
    for start, end in spans:
        first, last = max(start, prompt - 1), min(end, total - 1)
        if first < last:
            parts.append(values[first - (prompt - 1) : last - (prompt - 1)])
    return torch.cat(parts) if parts else values[:0]


def write(root: Path, ranks: int, copies: int = 1, **said: Any) -> list[torch.Tensor]:
    whole = [torch.randn(length) for length in RESPONSES]
    for number in range(ranks * copies):
        rank = number // copies
        padded = said.get("padded", 0)
        slices = [cut(v, t, r, rank, ranks, padded) for v, t, r in zip(whole, TOTALS, RESPONSES, strict=True)]
        data = {
            "tokens": [torch.arange(total) for total in TOTALS], "total_lengths": TOTALS,
            "response_lengths": RESPONSES, "sample_indices": [5, 2, 9], "log_probs": slices,
            "loss_masks": [torch.ones(length, dtype=torch.int32) for length in RESPONSES],
        }  # fmt: skip
        if padded:
            data["max_seq_lens"] = [padded] * len(TOTALS)
        form = said.get("form") or ("bshd" if padded else "thd")
        more = {"cp_rank": rank, "cp_size": ranks, "qkv_format": form} if said.get("names_ranks") else {}
        content = {"rollout_id": 3, "rank": number, "rollout_data": data, **more}
        save_file(root / f"train_data/3_{number}.pt", content)
    for file in root.rglob("*.pt"):
        os.utime(file, (1, 1))
    return whole


@pytest.mark.parametrize("names_ranks", [True, False])
@pytest.mark.parametrize("padded", [0, 16])
@pytest.mark.parametrize(("ranks", "copies"), [(2, 1), (2, 2), (4, 1)])
def test_every_rank_shows_the_whole_response(
    tmp_path: Path, names_ranks: bool, padded: int, ranks: int, copies: int
) -> None:
    whole = write(tmp_path, ranks, copies, names_ranks=names_ranks, padded=padded)
    run = open_run(tmp_path)
    assert any("context-parallel" in note for note in run.notes)
    assert len(run.records) == ranks * copies
    for record in run.records:
        ref = record.get("old_logprobs")
        assert ref is not None
        assert (ref.rows, ref.alignment) == (tuple(RESPONSES), "response")
        np.testing.assert_array_equal(pages.array(ref), torch.cat(whole).numpy())
        assert record.problems == ()


@pytest.mark.parametrize("said", [{"form": "bshd"}, {"form": "sbhd", "padded": 16}])
def test_slices_in_a_form_that_is_not_known_are_not_put_together(tmp_path: Path, said: dict[str, Any]) -> None:
    write(tmp_path, 2, names_ranks=True, **said)
    record = open_run(tmp_path).records[0]
    assert record.get("old_logprobs") is None
    assert ("sbhd" in record.problems[0].what) == (said["form"] == "sbhd")


def test_a_slice_whose_others_are_gone_is_not_said_to_be_the_response(tmp_path: Path) -> None:
    write(tmp_path, 2, names_ranks=True)
    (tmp_path / "train_data/3_0.pt").unlink()
    (record,) = open_run(tmp_path).records
    assert record.get("old_logprobs") is None
    sliced = record.get("slice.log_probs")
    assert sliced is not None
    assert sliced.alignment is None
    assert "context-parallel" in record.problems[0].what


@given(st.integers(2, 8), st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40)), min_size=1, max_size=4))
def test_slices_of_any_lengths_make_the_response(ranks: int, drawn: list[tuple[int, int]]) -> None:
    samples = [Lengths(prompt + response, response) for prompt, response in drawn]
    whole = [list(range(one.response)) for one in samples]
    slices = {
        rank: [
            [value for first, last in stretches(one, rank, ranks) for value in row[first:last]]
            for row, one in zip(whole, samples, strict=True)
        ]
        for rank in range(ranks)
    }
    ref = put_together("x", slices, samples)
    if not any(whole):
        assert ref is None
    else:
        assert ref is not None
        assert pages.array(ref).reshape(-1).tolist() == [value for row in whole for value in row]


def test_slices_of_the_wrong_lengths_are_not_put_together() -> None:
    assert put_together("x", {0: [[1.0]], 1: [[2.0]]}, [Lengths(13, 7)]) is None
    assert put_together("x", {0: [[1.0]], 2: [[2.0]]}, [Lengths(13, 7)]) is None
