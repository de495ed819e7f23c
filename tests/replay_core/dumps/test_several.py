from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch

from replay_core.dumps import open_run
from replay_core.dumps.several import runs_inside
from tests.fixtures import FIXTURES


def write(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"log_probs": torch.ones(2, 3)}, path)


def inside(folder: Path) -> list[str]:
    run = open_run(folder)
    return [str(one.relative_to(folder)) for one in runs_inside(run.path, run.records)]


def test_folders_that_repeat_each_others_steps_are_runs_of_their_own(tmp_path: Path) -> None:
    for run in ("a", "b/deep", "b/flat"):
        write(tmp_path / run, "forward_data/step_000000_rank0_micro0.pt", "loss/step_000000_rank0_micro0.pt")
    assert inside(tmp_path) == ["a", "b/deep", "b/flat"]
    first, *rest = open_run(tmp_path).problems
    assert first.what.startswith("holds 3 runs that repeat each other's steps: a, b/deep, b/flat")
    assert not [one for one in rest if "second record" in one.what]


def test_the_stages_of_one_run_are_no_runs(tmp_path: Path) -> None:
    write(tmp_path, "forward_data/step_000000_rank0_micro0.pt", "loss/step_000000_rank0_micro0.pt")
    assert inside(tmp_path) == []


def test_a_folder_that_repeats_nothing_makes_the_whole_one_run(tmp_path: Path) -> None:
    write(tmp_path / "a", "loss/step_000000_rank0_micro0.pt")
    write(tmp_path / "b", "loss/step_000000_rank0_micro0.pt")
    write(tmp_path / "c", "forward_data/step_000001_rank0_micro0.pt")
    assert inside(tmp_path) == []
    assert [one for one in open_run(tmp_path).problems if "second record" in one.what]


def test_the_parent_of_genuine_runs_names_them() -> None:
    assert inside(FIXTURES / "nexrl") == ["seedtime/jsonl", "seedtime/pt", "self_hosted_bf16", "self_hosted_fp32"]


def test_a_broken_dump_below_a_folder_does_not_hide_the_others(small_dump: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        shutil.copytree(small_dump, tmp_path / name)
    (tmp_path / "b" / "manifest.json").write_text('{"format": "rldbg-dump", nonsense')
    run = open_run(tmp_path)
    assert {record.path.parent.parent.name for record in run.records} == {"a"}
    assert [problem.where for problem in run.problems if "not JSON" in problem.what] == [str(tmp_path / "b")]


def test_a_step_of_thousands_of_digits_is_no_step(small_dump: Path, tmp_path: Path) -> None:
    shutil.copytree(small_dump, tmp_path / "a")
    manifest = tmp_path / "a/manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "models": {"9" * 5000: "somewhere"}}))
    assert any("is no step" in problem.what for problem in open_run(tmp_path / "a").problems)
