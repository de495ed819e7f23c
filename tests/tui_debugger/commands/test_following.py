"""`rldbg diagnose --follow`: a run is diagnosed while its trainer writes it, and what was found is the answer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from replay_core.export.scalars import WORST_FINDING
from replay_core.recorder import Recorder
from tui_debugger.cli import run
from tui_debugger.commands.following import FollowedDiagnosis
from tui_debugger.progress_line import ProgressLine

ROOT = Path(__file__).resolve().parents[3]


def write_step(recorder: Recorder, step: int, *, is_finite: bool = True) -> None:
    ids_BS = torch.arange(12).reshape(2, 6)
    with recorder.step(step) as record:
        record("batch_inputs", micro=0, input_ids=ids_BS, attention_mask=torch.ones_like(ids_BS))
        record("forward_data", micro=0, log_probs=-ids_BS.float() * (1.0 if is_finite else float("nan")) - 0.1)


class Kept:
    """A dashboard that keeps what it is told."""

    def __init__(self) -> None:
        self.points: list[tuple[int, dict[str, float]]] = []

    def take(self, step: int, scalars: Mapping[str, float]) -> None:
        self.points.append((step, dict(scalars)))

    def close(self) -> None:
        pass


def look_until(followed: FollowedDiagnosis, told: Kept, points: int) -> None:
    end = time.monotonic() + 30
    while len(told.points) < points:
        assert time.monotonic() < end
        followed.look()


@pytest.mark.long
def test_a_step_is_looked_at_when_a_newer_one_is_there_or_nothing_more_comes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = Kept()
    followed = FollowedDiagnosis([tmp_path / "run"], (), told, ProgressLine(""))
    followed.look()
    assert followed.document is None, "its trainer has not begun"
    recorder = Recorder(tmp_path / "run")
    write_step(recorder, 0)
    followed.look()
    assert told.points == [], "step 0 may still grow"
    write_step(recorder, 1, is_finite=False)
    look_until(followed, told, 1)
    assert told.points == [(0, {WORST_FINDING: 0.0})]
    write_step(recorder, 2)
    look_until(followed, told, 2)
    assert told.points[1:] == [(1, {WORST_FINDING: 3.0})]
    assert capsys.readouterr().err.count("error: D21") == 1
    look_until(followed, told, 3)
    assert told.points[2:] == [(2, {WORST_FINDING: 0.0})], "the last step, when nothing had come for a while"
    assert followed.document is not None
    assert followed.document["counts"]["error"] == 1, "the answer is of all steps"


@pytest.mark.long
def test_a_kill_ends_it_with_the_answer_so_far_and_its_exit_code(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "run")
    write_step(recorder, 0, is_finite=False)
    write_step(recorder, 1)
    words = [sys.executable, "-m", "tui_debugger", "diagnose", str(tmp_path / "run"), "--follow"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
                          env={**os.environ, "PYTHONUNBUFFERED": "1"}) as follower:  # fmt: skip
        assert follower.stderr is not None
        assert "error: D21" in follower.stderr.readline()
        follower.send_signal(signal.SIGTERM)
        told, _ = follower.communicate()
    assert told.startswith("1 error; first D21")
    assert follower.returncode == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--scalars", "board"], "--follow"),
        (["--follow", "--step", "1"], "without --step"),
        (["--follow", "--out", "units"], "without --step"),
    ],
)
def test_what_cannot_be_followed_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["diagnose", "run", *words]) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
