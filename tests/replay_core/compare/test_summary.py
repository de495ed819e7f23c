"""What NexRL's script reports, where its dumps differ in ways that the script cannot see."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from replay_core import workbench
from tests.builders import save_file, there, write_nexrl


def trajectories(count: int) -> list[Any]:
    draw = random.Random(0)
    return [
        {
            "tokens": [draw.randrange(100) for _ in range(5 + number % 3)],
            "loss_mask": [0, 0] + [1] * (3 + number % 3),
            "reward": number / 10,
            "is_val": False,
            "extra_fields": {"task_id": number // 4, "group_id": f"g{number // 4}", "run_id": number % 4},
        }
        for number in range(count)
    ]


def dump(directory: Path, rows: list[Any]) -> Path:
    save_file(directory / "trajectory/step_000000.pt", {"step": 0, "num_trajectories": len(rows), "trajectories": rows})
    return directory


def test_all_trajectories_are_paired_by_task_and_run_and_not_the_first_by_place(tmp_path: Path):
    rows = trajectories(12)
    # A group's id may be new in every run, and the order is that of arrival.
    fresh = [{**row, "extra_fields": {**row["extra_fields"], "group_id": f"new{row['reward']}"}} for row in rows]
    shuffled = random.Random(1).sample(fresh, len(rows))
    a, b = dump(tmp_path / "a", rows), dump(tmp_path / "b", shuffled)
    document = workbench.compare_dumps(a, b)
    assert document["first_divergence"] is None
    found = {row["name"]: row for row in there(document["summary"])["trajectories"]}
    assert {name: row["verdict"] for name, row in found.items()} == {
        "input_ids": "SAME", "loss_mask": "SAME", "reward": "SAME"
    }  # fmt: skip
    assert {(row["paired"], row["only_in_a"], row["only_in_b"]) for row in found.values()} == {(12, 0, 0)}


def test_a_reward_of_one_trajectory_is_found_in_both_sides_own_places(tmp_path: Path):
    rows = trajectories(12)
    changed = [dict(row) for row in rows]
    changed[7]["reward"] = 5.0
    order = random.Random(2).sample(range(12), 12)
    a, b = dump(tmp_path / "a", rows), dump(tmp_path / "b", [changed[i] for i in order])
    first = there(workbench.compare_dumps(a, b)["first_divergence"])
    assert first["name"] == "reward"
    assert first["index"]["raw_a"] == [7]
    assert first["index"]["raw_b"] == [order.index(7)]
    assert (first["a"], first["b"]) == (0.7, 5.0)


def test_a_trajectory_that_one_side_lacks_is_counted(tmp_path: Path):
    rows = trajectories(12)
    a, b = dump(tmp_path / "a", rows), dump(tmp_path / "b", rows[:4] + rows[5:])
    document = workbench.compare_dumps(a, b)
    assert document["coverage"]["samples_on_one_side"] == 1
    assert document["counts"]["MISSING"] == 1
    ids = next(row for row in there(document["summary"])["trajectories"] if row["name"] == "input_ids")
    assert (ids["verdict"], ids["paired"], ids["only_in_a"], ids["only_in_b"]) == ("SAME", 11, 1, 0)


@pytest.fixture
def three(tmp_path: Path) -> tuple[Path, Path, Path]:
    """A self-hosted run, a Weaver trainer's with a worse loss, a remote API's with the trajectories alone."""
    rows = trajectories(4)
    for name, loss in (("self", 1.0), ("weaver", 1.5)):
        for rank in range(3):
            for micro in range(2):
                content = {"step": 0, "rank": rank, "micro_idx": micro, "loss": loss + rank + micro, "pg_loss": 0.25,
                           "entropy_loss": 0.125, "metrics": {}, "extra_info": {}}  # fmt: skip
                write_nexrl(tmp_path / name, "loss", content, rank=rank, micro=micro)
    dump(tmp_path / "self", rows)
    dump(tmp_path / "remote", rows[::-1])
    return tmp_path / "self", tmp_path / "weaver", tmp_path / "remote"


def test_three_runs_are_three_comparisons_and_every_rank_and_micro_is_found(three: tuple[Path, Path, Path]):
    document = workbench.compare_three(*three, summarised=True)
    loss = next(field for field in there(document["summary"])["fields"] if field["name"] == "loss")
    assert loss["count"] == 6
    assert (loss["max"], loss["min"], loss["mean"]) == (0.5, 0.5, 0.5)
    assert {(entry["rank"], entry["micro"]) for entry in loss["entries"]} == {
        (r, m) for r in range(3) for m in range(2)
    }
    assert len(document["others"]) == 1
    assert document["others"][0]["first_divergence"] is None
    assert "share no tensor" in document["notes"][-1]


def test_a_loss_debug_that_only_one_side_has_is_missing_and_not_passed_over(tmp_path: Path):
    content = {"step": 0, "rank": 0, "micro_idx": 0, "loss": 1.0}
    for name in "ab":
        write_nexrl(tmp_path / name, "loss", content)
    write_nexrl(tmp_path / "b", "is_loss_debug", {**content, "prob_ratio": torch.ones(2, 3)})
    document = workbench.compare_dumps(tmp_path / "a", tmp_path / "b")
    assert [row["name"] for row in document["tensors"] if row["verdict"] == "MISSING"] == ["is_ratio"]
    assert any(hint.startswith("is_loss_debug is missing in a") for hint in document["hints"])
    field = next(field for field in there(document["summary"])["fields"] if field["section"] == "is_loss_debug")
    assert (field["name"], field["entries"][0]["verdict"], field["max"]) == ("is_ratio", "MISSING", None)
