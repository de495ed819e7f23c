"""Files that cannot be read are problems of a comparison, each named once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from replay_core import workbench
from replay_core.export.outcome import exit_code
from replay_core.recorder import Recorder
from replay_core.selection import Selection
from tests.builders import compare_paths, write_pair


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


def test_two_dumps_that_lost_the_same_file_are_not_said_to_agree(tmp_path: Path) -> None:
    """An index lists it, so that it was there once; a part of the run without it is compared whole."""
    fields = {"modules": {"x.output": torch.ones(8)}, "loss": {"loss": 1.0}}
    pair = write_pair(tmp_path, fields, fields)
    for side in pair:
        next((side / "loss").glob("*.pt")).unlink()
    assert workbench.compare_dumps(*pair, digests=True)["coverage"]["records_unreadable"] == 2
    document = workbench.compare_dumps(*pair)
    assert document["counts"]["SAME"] == document["counts"]["total"] == 1
    assert document["coverage"]["records_unreadable"] == 2
    assert exit_code(document) == 3
    assert exit_code(workbench.open_dump(pair[0])) == 3
    assert len({one["where"] for one in document["problems"] if "file is gone" in one["what"]}) == 2


def test_a_file_that_is_gone_of_another_step_takes_nothing_from_those_that_are_compared(tmp_path: Path) -> None:
    for side in ("a", "b"):
        with Recorder(tmp_path / side) as recorder:
            for step in range(2):
                with recorder.step(step) as record:
                    record("loss", loss=1.0 + step)
    for side in ("a", "b"):
        next((tmp_path / side / "loss").glob("step_000001*")).unlink()
    document = workbench.compare_dumps(tmp_path / "a", tmp_path / "b", step=Selection.parse("0"))
    assert document["coverage"]["records_unreadable"] == 0
    assert exit_code(document) == 0
    asked: dict[str, Any]
    for asked in ({"step": Selection.parse("0:2")}, {"stage": "loss"}):
        assert workbench.compare_dumps(tmp_path / "a", tmp_path / "b", **asked)["coverage"]["records_unreadable"] == 2
    both: dict[str, Any] = {"step": Selection.parse("0"), "stage": "loss"}
    assert workbench.compare_dumps(tmp_path / "a", tmp_path / "b", **both)["coverage"]["records_unreadable"] == 0
