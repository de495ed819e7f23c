"""`--shard`, `--out` and `rldbg gather` as a shell sees them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from replay_core import workbench
from tui_debugger.cli import run

ROOT = Path(__file__).resolve().parents[3]
DATA = Path(__file__).parents[2] / "data"
A, B = str(DATA / "nexrl/self_hosted_fp32"), str(DATA / "nexrl/self_hosted_bf16")


@pytest.fixture(autouse=True)
def _no_array(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT", "SLURM_ARRAY_TASK_MIN", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.long
def test_parts_of_a_comparison_are_gathered_and_the_code_is_the_whole_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "units")
    assert run(["compare", A, B, "--shard", "2/2", "--out", out]) == 1
    assert "1 of 1 units done" in capsys.readouterr().out
    assert run(["gather", out]) == 4, "a step is left"
    said = capsys.readouterr().out
    assert said.startswith("DISAGREES")
    assert "left 1" in said
    assert run(["compare", A, B, "--shard", "1/2", "--out", out]) == 1
    capsys.readouterr()
    assert run([out]) == 1, "a directory of units is opened as what it has come to"
    said = capsys.readouterr().out
    assert "2 of 2 units done" in said
    shown = next(line.split()[1] for line in said.splitlines() if line.startswith("       rldbg "))
    assert run([shown]) == 1
    assert capsys.readouterr().out.startswith("DIFF  first diverging tensor")


@pytest.mark.long
def test_a_task_of_a_slurm_array_takes_its_own_part_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "1")
    monkeypatch.setenv("SLURM_ARRAY_TASK_COUNT", "2")
    assert run(["compare", A, B, "--out", str(tmp_path / "units"), "--json"]) == 1
    said = capsys.readouterr()
    assert json.loads(said.out)["shard"] == "2/2"
    assert "part 2/2, as SLURM_ARRAY_TASK_ID and SLURM_ARRAY_TASK_COUNT say" in said.err


@pytest.mark.long
def test_a_rank_alone_does_not_cut_the_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert run(["compare", A, B, "--out", str(tmp_path / "units"), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["shard"] is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--shard", "1/2"], "--out DIR"),
        (["--shard", "3/2", "--out", "x"], "which of how many parts"),
        (["--out", "x", "--jsonl"], "--jsonl is about one answer"),
        (["--out", "x", "--explain", "loss"], "--explain is about one answer"),
    ],
)
def test_what_cannot_be_cut_is_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["compare", A, B, *words]) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_follow_waits_until_every_unit_has_ended_and_says_what_is_found_first(tmp_path: Path) -> None:
    out, words = str(tmp_path / "units"), [sys.executable, "-m", "tui_debugger"]
    assert subprocess.run([*words, "compare", A, B, "--shard", "1/2", "--out", out], capture_output=True, check=False,
                          cwd=ROOT).returncode == 1  # fmt: skip
    follower = subprocess.Popen([*words, "gather", out, "--follow"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                text=True, cwd=ROOT)  # fmt: skip
    assert follower.stderr is not None
    assert "first so far: step 0: DIFF" in follower.stderr.readline()
    assert follower.poll() is None, "a unit is left"
    assert run(["compare", A, B, "--shard", "2/2", "--out", out]) == 1
    told, _ = follower.communicate()
    assert "done 2 of 2" in told
    assert follower.returncode == 1


@pytest.mark.slow
def test_the_recipes_of_scale_md_that_need_nothing_else_do_what_they_say(tmp_path: Path) -> None:
    page = (ROOT / "docs/scale.md").read_text(encoding="utf-8")
    shim = tmp_path / "rldbg"
    shim.write_text(f'#!/bin/sh\nexec {sys.executable} -m tui_debugger "$@"\n')
    shim.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    torchrun = f"{sys.executable} -m torch.distributed.run"
    for number, start in enumerate(("seq 1 4", "torchrun")):
        line = next(line.strip() for line in page.splitlines() if line.startswith(f"    {start} "))
        out = str(tmp_path / f"units-{number}")
        typed = line.replace("--nnodes 2 --nproc-per-node 8", "--nproc-per-node 2").replace("torchrun", torchrun)
        typed = re.sub(r"(/shared/)?UNITS", out, typed).replace("compare A B", f"compare {A} {B}")
        ran = subprocess.run(["sh", "-c", typed], capture_output=True, text=True, check=False, env=environment)
        assert ran.returncode == (123 if start == "seq 1 4" else 0), ran.stderr[-2000:]
        assert workbench.gather(Path(out))["counts"]["done"] == 2, line


def test_a_directory_without_units_is_an_error_of_four_parts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["gather", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    for part in (str(tmp_path), "expected:", "found:", "hint:"):
        assert part in said
