"""A gradient's norm that was recorded beside the gradient is a signal of the run, as the same number in its log is."""

from __future__ import annotations

from pathlib import Path

import pytest

from replay_core import workbench
from replay_core.diagnose.signals import Signals
from replay_core.dumps.opening import open_run
from replay_core.recorder import Recorder

STEPS = 24


def _norm(step: int) -> float:
    return 1.0 if step < 12 else 1.6 ** (step - 11)


def recorded(folder: Path, *, role: str = "actor", logged: bool = False) -> Path:
    recorder = Recorder(folder)
    for step in range(STEPS):
        with recorder.step(step) as record:
            record("loss", {"loss": 4.0}, micro=0)
            if logged:
                record("training_metrics", {"grad_norm": 1.0})
        with recorder.step(step, role=role) as record:
            record("gradient", {"grad_norm": _norm(step)})
    recorder.close()
    return folder


def codes(path: Path) -> set[str]:
    return {one["id"] for one in workbench.diagnose(path)["findings"]}


def test_a_dump_says_of_its_gradients_what_its_log_says(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    log.write_text("".join(f"step={step} loss=4.0 grad_norm={_norm(step):.4f}\n" for step in range(STEPS)))
    assert "L02" in codes(log)
    assert "L02" in codes(recorded(tmp_path / "dump"))


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_a_critics_norm_is_the_critics(role: str, tmp_path: Path) -> None:
    signals = Signals.of(open_run(recorded(tmp_path / "dump", role=role)))
    assert signals is not None
    (log,) = signals.logs
    assert log.has("grad_norm") == (role == "actor")
    assert log.has("critic_grad_norm") == (role == "critic")


def test_a_run_that_logs_its_norm_is_not_contradicted_by_the_recorded_one(tmp_path: Path) -> None:
    signals = Signals.of(open_run(recorded(tmp_path / "dump", logged=True)))
    assert signals is not None
    (log,) = signals.logs
    series = log.get("grad_norm")
    assert series is not None
    assert set(series.values) == {1.0}
