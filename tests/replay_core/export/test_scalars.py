"""At most three numbers per step to a dashboard, written by its own library and read back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from replay_core import workbench
from replay_core.desk import perform
from replay_core.dumps import open_run
from replay_core.errors import DumpError, RequestError, UnavailableError
from replay_core.executors.in_process import InProcess
from replay_core.export.dashboards import dashboard
from replay_core.export.scalars import FIRST_DIVERGENCE, FLOOR_MULTIPLE, WORST_FINDING, UnitScalars, worst_finding
from replay_core.recorder import Recorder
from replay_core.records import Inline
from tui_debugger.cli import run

DOCUMENTS = Path(__file__).parents[2] / "tui_debugger/documents"
ROOT = Path(__file__).parents[3]


def write_run(directory: Path, wrong: dict[int, float]) -> str:
    recorder = Recorder(directory)
    for step in range(4):
        ids_BS = torch.arange(12).reshape(2, 6) + step
        with recorder.step(step) as record:
            record("batch_inputs", micro=0, input_ids=ids_BS, attention_mask=torch.ones_like(ids_BS))
            record("forward_data", micro=0, log_probs=-ids_BS.float() / 7 + wrong.get(step, 0.0))
    return str(directory)


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Four steps of two runs in units; step 2 and step 3 do not agree."""
    folder = tmp_path_factory.mktemp("compared")
    asked = {"a": write_run(folder / "a", {}), "b": write_run(folder / "b", {2: 0.5, 3: 1.0})}
    return workbench.work_units("compare", asked, folder / "units", None, InProcess(perform))


def with_units(doc: Any, **states: str) -> Any:
    """The same gathering with units of these steps (`step_0`) in another state."""
    units = [{**one, "state": states.get(f"step_{one['step']}", one["state"])} for one in doc["units"]]
    return {**doc, "units": units}


def read_back(run: Path, wanted: dict[int | None, dict[str, float]]) -> None:
    """Wait until our own reader finds them in event files or an offline run: both libraries write from a thread or a
    process of their own."""
    end = time.monotonic() + 30
    while (found := _scalars_in(run)) != wanted:
        assert time.monotonic() < end, found


def _scalars_in(run: Path) -> dict[int | None, dict[str, object]]:
    try:
        records = open_run(run).records
    except DumpError:
        return {}  # nothing is written yet
    return {
        record.key.step: {
            ref.name: ref.source.value for ref in record.tensors() if isinstance(ref.source, Inline)
        }
        for record in records
    }  # fmt: skip


def test_the_first_divergence_has_a_point_from_the_step_on_where_it_is(compared: Any) -> None:
    points = list(UnitScalars(workbench.reopen).news(compared))
    assert points == [(2, {FIRST_DIVERGENCE: 2.0}), (3, {FIRST_DIVERGENCE: 2.0})]


def test_a_step_has_its_point_once_and_only_when_no_earlier_one_can_change_it(compared: Any) -> None:
    scalars = UnitScalars(workbench.reopen)
    assert list(scalars.news(with_units(compared, step_2="running"))) == [], "step 3 has ended, step 2 has not"
    assert [step for step, _ in scalars.news(compared)] == [2, 3]
    assert list(scalars.news(compared)) == []


def test_the_worst_finding_is_that_of_the_units_that_looked(tmp_path: Path) -> None:
    shifted: Any = json.loads((DOCUMENTS / "diagnosis_shifted.json").read_text(encoding="utf-8"))
    assert worst_finding(shifted) == [3.0]
    assert worst_finding(shifted | {"checked": []}) == [], "nothing was looked at: that is no 0"
    echoes = [{**one, "echo_of": "D08"} for one in shifted["findings"]]
    assert worst_finding(shifted | {"findings": echoes}) == [0.0]
    of_steps = {step for one in shifted["findings"] for step in one["steps"]}
    others = [one for one in shifted["findings"] if one["steps"]]
    assert worst_finding(shifted | {"findings": others}, after={max(of_steps) + 1}) == [0.0]

    run = tmp_path / "train.log"
    run.write_text("\n".join(str({"loss": 0.5, "reward": 1.0, "kl": 0.1, "step": step}) for step in range(5)))
    doc = workbench.work_units("diagnose", {"paths": [str(run)], "rules": []}, tmp_path / "units", None,
                               InProcess(perform))  # fmt: skip
    answer: Any = workbench.reopen(Path(doc["units"][0]["file"] or ""))
    (point,) = UnitScalars(workbench.reopen).news(doc)
    assert point == (max(answer["steps"], default=0), {WORST_FINDING: worst_finding(answer)[0]})


def test_the_floor_multiple_is_the_larger_of_the_two_sides(compared: Any) -> None:
    def ruled(_path: Path) -> Any:
        side = {"floor": {"ratio": 1.5}}
        return {"kind": "ruling", "a": side, "b": {"floor": {"ratio": "inf"}} if "inf" in str(_path) else None}

    doc: Any = {**with_units(compared), "command": "referee"}
    doc["units"][3] = {**doc["units"][3], "file": "inf.json"}
    points = dict(UnitScalars(ruled).news(doc))
    assert [points[step] for step in (0, 3)] == [{FLOOR_MULTIPLE: 1.5}, {FLOOR_MULTIPLE: float("inf")}]


@pytest.mark.long
def test_event_files_that_are_written_are_read_back(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX", reason="tensorboardX is not installed")
    board = dashboard(str(tmp_path / "board"))
    board.take(0, {WORST_FINDING: 2.0})
    board.take(7, {WORST_FINDING: 3.0, FLOOR_MULTIPLE: 1.25, FIRST_DIVERGENCE: 7.0})
    wanted: dict[int | None, dict[str, float]] = {
        0: {WORST_FINDING: 2.0},
        7: {WORST_FINDING: 3.0, FLOOR_MULTIPLE: 1.25, FIRST_DIVERGENCE: 7.0},
    }
    read_back(tmp_path / "board", wanted)  # before it is closed: who looks meanwhile sees them
    board.close()
    read_back(tmp_path / "board", wanted)


def test_gather_hands_the_points_of_its_units_to_the_dashboard(compared: Any, tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX", reason="tensorboardX is not installed")
    assert run(["gather", compared["directory"], "--follow", "--scalars", str(tmp_path / "board"), "--json"]) == 1
    read_back(tmp_path / "board", {2: {FIRST_DIVERGENCE: 2.0}, 3: {FIRST_DIVERGENCE: 2.0}})


def test_an_offline_run_of_wandb_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    board = dashboard("wandb")
    board.take(3, {WORST_FINDING: 2.0})
    board.take(9, {FLOOR_MULTIPLE: 1.25, FIRST_DIVERGENCE: 7.0})
    board.close()
    (run,) = (tmp_path / "wandb").glob("offline-run-*")
    read_back(run, {3: {WORST_FINDING: 2.0}, 9: {FLOOR_MULTIPLE: 1.25, FIRST_DIVERGENCE: 7.0}})
    assert not list(run.rglob("requirements.txt")), "nothing of the machine goes along"


@pytest.mark.long
def test_without_its_library_a_dashboard_names_the_extra_that_brings_it() -> None:
    refused = (
        "import sys; sys.modules['tensorboardX'] = sys.modules['wandb'] = None\n"
        "from tui_debugger.cli import run; sys.exit(run(sys.argv[1:]))"
    )
    for where, extra in (("board", "tensorboard"), ("wandb", "wandb")):
        words = ["diagnose", "nothing", "--follow", "--scalars", where]
        told = subprocess.run([sys.executable, "-c", refused, *words], capture_output=True, text=True, check=False,
                              timeout=60, env={**os.environ, "PYTHONPATH": str(ROOT)})  # fmt: skip
        assert told.returncode == 4
        assert f"pip install 'rldbg[{extra}]'" in told.stderr
        assert f"expected: the extra `{extra}`" in told.stderr


@pytest.mark.skipif(find_spec("tensorboardX") is None, reason="tensorboardX is not installed")
def test_a_place_that_takes_no_event_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError) as raised:
        dashboard(str(tmp_path / "file"))
    assert raised.value.file == str(tmp_path / "file")


def test_a_folder_of_runs_does_not_pass_for_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wandb" / "offline-run-1").mkdir(parents=True)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *(one for one in sys.path if "site-packages" not in one)])
    with pytest.raises(UnavailableError, match="needs wandb"):
        dashboard("wandb")
    sys.modules.pop("wandb", None)
