"""Files that cannot be read are problems of a comparison, each named once."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.builders import compare_paths


def test_a_file_that_was_touched_just_now_and_cannot_be_read_is_one_problem(tmp_path: Path) -> None:
    for side in ("a", "b"):
        (tmp_path / side).mkdir()
        for step in range(3):
            fields = {"input_ids": torch.arange(10).view(2, 5), "log_probs": torch.randn(2, 5)}
            torch.save(fields, tmp_path / side / f"step_{step}.pt")
    for step in range(2):
        file = tmp_path / "b" / f"step_{step}.pt"
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    problems = compare_paths(tmp_path / "a", tmp_path / "b").problems
    assert sorted(Path(one.where).name for one in problems) == ["step_0.pt", "step_1.pt"]
    assert all("still being written?" in one.what for one in problems)
