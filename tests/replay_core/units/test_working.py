"""Units on disk: done once, whoever is killed; folded while they run; nothing lost, nothing counted twice."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from replay_core import workbench
from replay_core.desk import perform
from replay_core.dumps import open_run
from replay_core.errors import ChildDiedError, DumpError, ExitCode, RequestError
from replay_core.executors.in_process import InProcess
from replay_core.export.outcome import exit_code
from replay_core.jobs import Answer, Job, OnEvent, ignore
from replay_core.recorder import Recorder
from replay_core.units import folder as folders
from replay_core.units.folder import UnitFolder
from replay_core.units.shard import Shard
from tests.builders import there

STEPS = 6


def write_run(directory: Path, wrong: dict[int, float], steps: int = STEPS) -> Path:
    """A dump of one micro-batch a step, off by so much in some of them."""
    recorder = Recorder(directory)
    for step in range(steps):
        ids_BS = torch.arange(12).reshape(2, 6) + step
        with recorder.step(step) as record:
            record("batch_inputs", micro=0, input_ids=ids_BS, attention_mask=torch.ones_like(ids_BS))
            record("forward_data", micro=0, log_probs=-ids_BS.float() / 7 + wrong.get(step, 0.0))
    return directory


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("runs")
    return write_run(directory / "a", {}), write_run(directory / "b", {2: 0.5, 4: 1.0})


class Counting:
    """The real workbench, in this process; counts what it did, and dies of the steps it is told to."""

    def __init__(self, *deadly: int) -> None:
        self.done: list[str] = []
        self._deadly = {str(step) for step in deadly}
        self._inner = InProcess(perform)

    def run(self, job: Job, on_event: OnEvent = ignore) -> Answer:
        if job.params.get("step") in self._deadly:
            raise ChildDiedError("the child process ended", found="signal 9")
        self.done.append(str(job.params.get("step")))
        return self._inner.run(job, on_event)


def compared(runs: tuple[Path, Path], out: Path, runner: Any = None, shard: Shard | None = None, **asked: Any) -> Any:
    params = {"a": str(runs[0]), "b": str(runs[1]), **asked}
    return workbench.work_units("compare", params, out, shard, runner or Counting())


def test_the_units_of_a_comparison_are_its_steps_and_their_first_divergence_is_its_own(
    runs: tuple[Path, Path], tmp_path: Path
) -> None:
    doc = compared(runs, tmp_path)
    whole = workbench.compare_dumps(*runs)
    assert [unit["step"] for unit in doc["units"]] == list(range(STEPS))
    assert [unit["step"] for unit in doc["units"] if unit["exit_code"]] == [2, 4]
    assert whole["first_divergence"] is not None
    first = workbench.reopen(Path(doc["first"]["file"]))
    assert first["kind"] == "comparison"
    assert first["first_divergence"] is not None
    for part in ("name", "verdict", "raw_a", "a", "b", "why"):
        assert first["first_divergence"].get(part) == whole["first_divergence"].get(part)
    assert exit_code(doc) == exit_code(whole) == ExitCode.DIVERGES


def test_shards_together_are_the_same_as_one_worker(runs: tuple[Path, Path], tmp_path: Path) -> None:
    alone = compared(runs, tmp_path / "alone")
    for number in (3, 1, 2):
        part = compared(runs, tmp_path / "shared", shard=Shard(number, 3))
        assert (part["shard"], part["counts"]["total"]) == (f"{number}/3", 2)
    together = workbench.gather(tmp_path / "shared")

    def told(doc: Any) -> Any:
        units = [{**unit, "file": None} for unit in doc["units"]]
        return {**doc, "directory": "", "created": "", "first": doc["first"]["label"], "units": units}

    assert told(together) == told(alone)
    for unit in together["units"]:
        one, other = (json.loads((tmp_path / place / "documents" / f"{unit['id']}.json").read_text())
                      for place in ("alone", "shared"))  # fmt: skip
        assert {**one, "created": ""} == {**other, "created": ""}


def test_what_is_done_is_not_done_again_and_a_damaged_file_is(runs: tuple[Path, Path], tmp_path: Path) -> None:
    doc = compared(runs, tmp_path)
    again = Counting()
    compared(runs, tmp_path, again)
    assert again.done == []
    (tmp_path / "outcomes" / f"{doc['units'][3]['id']}.json").write_text('{"schema_version": 1, "sta')
    (tmp_path / "documents" / f"{doc['units'][5]['id']}.json").unlink()
    damaged = workbench.gather(tmp_path)
    assert damaged["problems"][0]["where"].endswith(f"{doc['units'][3]['id']}.json")
    assert [unit["state"] for unit in damaged["units"]] == ["done"] * 3 + ["failed", "done", "left"]
    assert exit_code(damaged) == ExitCode.BAD_BYTES
    compared(runs, tmp_path, again)
    assert again.done == ["3", "5"]


def test_a_unit_that_takes_its_process_along_is_one_outcome_and_runs_again(
    runs: tuple[Path, Path], tmp_path: Path
) -> None:
    doc = compared(runs, tmp_path, Counting(1))
    assert [unit["state"] for unit in doc["units"]] == ["done", "crashed", *["done"] * 4]
    assert doc["units"][1]["error"]["type"] == "ChildDiedError"
    assert exit_code(doc) == ExitCode.CELL_FAILED
    assert "1 crashed" in doc["headline"]
    again = Counting()
    doc = compared(runs, tmp_path, again)
    assert again.done == ["1"]
    assert (doc["units"][1]["state"], doc["units"][1]["tries"]) == ("done", 2)


def test_a_dump_that_has_grown_or_changed_since_is_done_where_it_did(tmp_path: Path) -> None:
    pair = write_run(tmp_path / "a", {}, 3), write_run(tmp_path / "b", {}, 3)
    compared(pair, tmp_path / "out")
    file = next(record.path for record in open_run(pair[1]).records if record.key.step == 1)
    os.utime(file, ns=(0, time.time_ns()))
    changed = Counting()
    doc = compared(pair, tmp_path / "out", changed)
    assert changed.done == ["1"]
    assert doc["stale"] == 1
    with Recorder(pair[0]).step(3) as record:
        record("forward_data", micro=0, log_probs=torch.zeros(2, 6))
    doc = compared(pair, tmp_path / "out", grown := Counting())
    assert grown.done == []
    assert doc["one_sided"] == {"a": [3], "b": []}
    assert doc["agrees"] is False
    assert exit_code(doc) == ExitCode.DIVERGES


def test_other_settings_and_other_files_are_refused_a_directory(runs: tuple[Path, Path], tmp_path: Path) -> None:
    compared(runs, tmp_path / "out")
    with pytest.raises(RequestError, match="units of another request"):
        compared(runs, tmp_path / "out", exact=True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(RequestError, match="holds other files"):
        compared(runs, tmp_path / "mine")
    assert (tmp_path / "mine" / "notes.txt").read_text() == "mine"
    with pytest.raises(RequestError, match="holds no units"):
        workbench.gather(tmp_path / "mine")


def test_a_plan_of_another_version_or_torn_is_said(runs: tuple[Path, Path], tmp_path: Path) -> None:
    compared(runs, tmp_path)
    plan = json.loads((tmp_path / "plan.json").read_text())
    (tmp_path / "plan.json").write_text(json.dumps({**plan, "schema_version": 99}))
    with pytest.raises(DumpError, match="another version"):
        workbench.gather(tmp_path)
    with pytest.raises(DumpError, match="another version"):
        compared(runs, tmp_path)
    assert json.loads((tmp_path / "plan.json").read_text())["schema_version"] == 99
    (tmp_path / "plan.json").write_text(json.dumps({**plan, "units": [{"id": 3}]}))
    with pytest.raises(DumpError, match="damaged"):
        workbench.gather(tmp_path)


def test_a_truncated_record_fails_its_own_unit_and_no_other(tmp_path: Path) -> None:
    pair = write_run(tmp_path / "a", {}, 3), write_run(tmp_path / "b", {}, 3)
    file = next(record.path for record in open_run(pair[1]).records if record.key.step == 1)
    file.write_bytes(file.read_bytes()[:40])
    doc = compared(pair, tmp_path / "out")
    assert [unit["exit_code"] for unit in doc["units"]] == [0, int(ExitCode.BAD_BYTES), 0]
    assert exit_code(doc) == ExitCode.BAD_BYTES


def test_a_worker_that_is_alive_runs_and_one_that_is_dead_has_crashed(
    runs: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    doc = compared(runs, tmp_path, shard=Shard(1, 3))
    whole, folder = workbench.gather(tmp_path), UnitFolder(tmp_path)
    left = [unit["id"] for unit in whole["units"] if unit["state"] == "left"]
    assert (doc["counts"]["done"], len(left)) == (2, 4)
    with folder.held(left[0]):
        during = workbench.gather(tmp_path)
        assert during["counts"]["running"] == 1
        assert during["eta_s"] is not None
        # Its disk's clock, not this machine's: an hour apart is no silence.
        monkeypatch.setattr(time, "time", lambda: 0.0)
        assert workbench.gather(tmp_path)["counts"]["running"] == 1
        monkeypatch.undo()
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    held = {"worker": [*folders.worker()[:2], gone.pid], "began": 0}
    (tmp_path / "held" / f"{left[1]}.json").write_text(json.dumps(held))
    (tmp_path / "held" / f"{left[2]}.json").write_text(json.dumps({"worker": ["another-host", "", 1], "began": 0}))
    assert [workbench.gather(tmp_path)["counts"][name] for name in ("crashed", "running")] == [1, 1]
    silent = time.time() - 2 * folders.GONE_AFTER_S
    os.utime(tmp_path / "held" / f"{left[2]}.json", (silent, silent))
    assert [workbench.gather(tmp_path)["counts"][name] for name in ("crashed", "running")] == [2, 0]


def _until(there: Any, limit_s: float = 60.0) -> Iterator[None]:
    until = time.monotonic() + limit_s
    while not there():
        assert time.monotonic() < until, "what was waited for did not come"
        time.sleep(0.01)
        yield


def test_gathers_at_once_say_the_same_and_change_nothing(runs: tuple[Path, Path], tmp_path: Path) -> None:
    compared(runs, tmp_path, shard=Shard(1, 2))
    before = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*") if file.is_file()}
    with ThreadPoolExecutor(8) as pool:
        docs = [{**doc, "created": ""} for doc in pool.map(workbench.gather, [tmp_path] * 40)]
    assert all(doc == docs[0] for doc in docs)
    assert {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*") if file.is_file()} == before


def test_an_outcome_of_another_version_is_said_and_its_unit_runs_again(runs: tuple[Path, Path], tmp_path: Path) -> None:
    doc = compared(runs, tmp_path)
    file = tmp_path / "outcomes" / f"{doc['units'][3]['id']}.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "schema_version": 99}))
    other = workbench.gather(tmp_path)
    assert "another version" in other["problems"][0]["what"]
    assert exit_code(other) == ExitCode.BAD_BYTES
    again = Counting()
    assert compared(runs, tmp_path, again)["counts"]["done"] == STEPS
    assert again.done == ["3"]


@pytest.mark.long
def test_a_worker_without_the_model_fails_its_units_by_name_and_one_that_has_it_does_them(tmp_path: Path) -> None:
    with Recorder(tmp_path / "run") as recorder, recorder.step(0) as record:
        ids_BS = torch.arange(12).reshape(2, 6)
        record("batch_inputs", micro=0, input_ids=ids_BS, attention_mask=torch.ones_like(ids_BS))
    model = tmp_path / "weights"
    plan = {"dump": str(tmp_path / "run"), "step": None, "rank": None, "micro": None, "model": str(model)}
    doc = workbench.work_units("replay", {"plan": plan}, tmp_path / "out", None, InProcess(perform))
    (unit,) = doc["units"]
    assert (unit["state"], exit_code(doc)) == ("failed", ExitCode.CELL_FAILED)
    assert "not a directory on this machine" in unit["said"]
    assert there(unit["error"])["file"] == str(model)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=32)).save_pretrained(model)
    doc = workbench.work_units("replay", {"plan": plan}, tmp_path / "out", None, InProcess(perform))
    assert (doc["counts"]["done"], doc["counts"]["failed"]) == (1, 0)


@pytest.mark.slow
def test_a_worker_that_is_killed_is_started_again_and_only_the_rest_runs(
    runs: tuple[Path, Path], tmp_path: Path
) -> None:
    words = [sys.executable, "-m", "tui_debugger", "compare", *map(str, runs), "--out", str(tmp_path)]
    worker = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for _ in _until(lambda: len(UnitFolder(tmp_path).ended()) >= 2):
        assert worker.poll() is None or len(UnitFolder(tmp_path).ended()) >= 2
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "outcomes").glob("*.json")}
    assert workbench.gather(tmp_path)["counts"]["running"] == 0
    finished = subprocess.run(words, capture_output=True, text=True, check=False)
    assert finished.returncode == ExitCode.DIVERGES, finished.stderr
    after = {path: path.stat().st_mtime_ns for path in (tmp_path / "outcomes").glob("*.json")}
    assert len(after) == STEPS
    assert {path: after[path] for path in before} == before
    assert not list(tmp_path.rglob("*.tmp")) or len(before) < STEPS


def test_a_gathering_is_as_the_schema_says_and_opens_again(runs: tuple[Path, Path], tmp_path: Path) -> None:
    doc = compared(runs, tmp_path / "out", Counting(1))
    file = tmp_path / "gathering.json"
    file.write_text(json.dumps(doc))
    assert workbench.reopen(file) == json.loads(file.read_text())


def test_a_part_without_a_unit_agrees_with_nothing_and_fails_nothing(runs: tuple[Path, Path], tmp_path: Path) -> None:
    doc = compared(runs, tmp_path, shard=Shard(1, 40))
    assert doc["counts"]["total"] == 0
    assert doc["agrees"] is None, "nothing was looked at"
    assert "more parts than units (6)" in doc["headline"]
    assert exit_code(doc) == ExitCode.AGREES


def test_two_workers_that_take_the_same_leave_one_answer(runs: tuple[Path, Path], tmp_path: Path) -> None:
    class Meanwhile(Counting):
        def run(self, job: Job, on_event: OnEvent = ignore) -> Answer:
            if not self.done:
                compared(runs, tmp_path)  # another worker, in the middle of this one's first unit
            return super().run(job, on_event)

    first = Meanwhile()
    doc = compared(runs, tmp_path, first)
    assert first.done == ["0"]
    assert doc["counts"]["done"] == STEPS


def test_the_units_of_a_diagnosis_are_steps_of_tensors_and_the_whole_of_a_log(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {})
    asked = {"paths": [str(run)]}
    doc = workbench.work_units("diagnose", asked, tmp_path / "steps", None, InProcess(perform))
    assert [unit["step"] for unit in doc["units"]] == list(range(STEPS))
    assert "rldbg diagnose" in doc["notes"][0]
    log = tmp_path / "train.log"
    log.write_text("".join(f"step:{step} - loss:{1 / (step + 1)}\n" for step in range(40)))
    asked = {"paths": [str(log)]}
    doc = workbench.work_units("diagnose", asked, tmp_path / "log", None, InProcess(perform))
    assert [unit["label"] for unit in doc["units"]] == ["every step"]


def write_files(directory: Path, off: float = 0.0, of_no_step: str | None = "layers.0.weight") -> Path:
    """Two steps of tensors, and weights that belong to none."""
    directory.mkdir()
    for step in range(2):
        save_file({"layers.0.output": torch.arange(32.0).reshape(4, 8)}, directory / f"step_{step}.safetensors")
    if of_no_step is not None:
        save_file({of_no_step: torch.arange(32.0).reshape(4, 8) + off}, directory / "params.safetensors")
    return directory


@pytest.mark.parametrize(("name", "labels"), [
    ("layers.0.weight", ["no step", "step 0", "step 1"]), ("another.weight", ["every step"]), (None, ["every step"])
])  # fmt: skip
def test_what_belongs_to_no_step_is_in_a_unit_too(name: str | None, labels: list[str], tmp_path: Path) -> None:
    sides = write_files(tmp_path / "a"), write_files(tmp_path / "b", 1.0, name)
    doc = compared(sides, tmp_path / "units")
    assert [unit["label"] for unit in doc["units"]] == labels
    whole = workbench.compare_dumps(*sides)
    rows: list[Any] = [workbench.reopen(Path(unit["file"])) for unit in doc["units"]]
    assert sum(row["counts"]["total"] for row in rows) == whole["counts"]["total"]
    assert exit_code(doc) == exit_code(whole)
    assert doc["units"][0]["exit_code"] == exit_code(whole)


def test_the_units_of_a_replay_are_micro_batches_of_ranks(tmp_path: Path) -> None:
    from replay_core.units.plan import Request, planned

    recorder = Recorder(tmp_path / "run")
    for step in range(2):
        with recorder.step(step) as record:
            for micro in range(3):
                record("batch_inputs", micro=micro, input_ids=np.arange(6).reshape(1, 6))
                record("forward_data", micro=micro, log_probs=np.zeros((1, 6), np.float32))
            record("training_metrics", loss=1.0)
    plan = {"dump": str(tmp_path / "run"), "model": "random:llama-tiny"}
    units = planned(Request("replay", {"plan": plan}, {"step": "1"})).units
    assert [(unit.step, unit.micro) for unit in units] == [(1, 0), (1, 1), (1, 2)]
    assert [unit.job.params["plan"]["micro"] for unit in units] == [0, 1, 2]
    assert len({unit.id for unit in units}) == 3
    moved = shutil.copytree(tmp_path / "run", tmp_path / "elsewhere", copy_function=shutil.copy2)
    there = planned(Request("replay", {"plan": {**plan, "dump": str(moved)}}, {"step": "1"})).units
    assert [unit.id for unit in there] == [unit.id for unit in units], "where the dump lies is no part of the answer"


def test_what_a_killed_worker_left_half_written_goes_with_its_unit(tmp_path: Path) -> None:
    folder = UnitFolder(tmp_path)
    held = tmp_path / "held"
    held.mkdir()
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    left = held / f".one.json.{int(gone.stdout)}-7.tmp"
    young, other = held / f".one.json.{int(gone.stdout)}-8.tmp", held / f".two.json.{int(gone.stdout)}-7.tmp"
    ours = held / f".one.json.{os.getpid()}-9.tmp"
    for file in (left, young, other, ours):
        file.write_text("{")
        if file != young:
            os.utime(file, (1, 1))
    with folder.held("one"):
        pass
    assert {file.name for file in held.iterdir()} == {young.name, other.name, ours.name}


@pytest.mark.parametrize("left", [0, 100])
def test_a_document_that_was_cut_short_is_no_answer_and_its_unit_runs_again(
    runs: tuple[Path, Path], tmp_path: Path, left: int
) -> None:
    compared(runs, tmp_path / "out")
    cut = sorted((tmp_path / "out" / "documents").iterdir())[0]
    os.truncate(cut, left)
    found = workbench.gather(tmp_path / "out")
    (entry,) = [one for one in found["units"] if one["id"] == cut.stem]
    assert (entry["state"], entry["said"]) == ("left", "its document is cut short: it runs again")
    again = Counting()
    compared(runs, tmp_path / "out", again)
    assert len(again.done) == 1


def test_a_damaged_plan_is_written_anew_and_what_is_done_is_kept(runs: tuple[Path, Path], tmp_path: Path) -> None:
    whole = compared(runs, tmp_path / "out")
    os.truncate(tmp_path / "out" / "plan.json", 100)
    with pytest.raises(DumpError, match="no JSON object") as raised:
        workbench.gather(tmp_path / "out")
    assert "keeps what is done" in str(raised.value)
    again = Counting()
    assert compared(runs, tmp_path / "out", again)["counts"] == whole["counts"]
    assert again.done == []
