"""`rldbg diagnose` of what people arrive with: a pasted line, a log, a curve."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from tests.replay_core.diagnose.logs import trl, written
from tui_debugger.cli import run

DEAD = "{'loss': 0.0, 'grad_norm': 0.0, 'rewards/f/std': 5.08, 'reward_std': 0.0, 'frac_reward_zero_std': 1.0}\n"


def test_one_pasted_line_is_diagnosed_from_standard_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(DEAD.encode())))
    assert run(["diagnose", "-", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["path"] == "-"
    assert document["findings"][0]["id"] == "D03"
    assert document["findings"][0]["where"]["path"] == "-"
    assert document["findings"][0]["where"]["line"] == 1


def test_a_healthy_log_exits_with_0_and_shows_its_trends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, trl([{"loss": n / 4 - 0.5, "grad_norm": 0.42 + n / 50} for n in range(5)]))
    assert run(["diagnose", str(path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("no warning and no error")
    assert "▁▃▅▇█" in out


def test_a_metric_that_is_no_number_is_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, trl([{}, {"loss": float("nan")}]))
    assert run(["diagnose", str(path), "--json"]) == 1
    document = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    (loss,) = [one for one in document["series"] if one["name"] == "loss"]
    assert loss["values"][1] == "nan"


def test_the_log_of_another_program_is_an_error_with_a_way_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["diagnose", str(written(tmp_path, "GET / 200\n"))]) == 3
    err = capsys.readouterr().err
    assert "there is no metric in this text" in err
    assert "hint:" in err
