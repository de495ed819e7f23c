"""Many replays by many workers: the same documents however they are done, and after any kill only the rest runs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from replay_core import workbench
from replay_core.desk import perform
from replay_core.errors import CellError, ExitCode
from replay_core.executors.in_process import InProcess
from replay_core.jobs import Answer, Job, OnEvent, ignore
from replay_core.recorder import Recorder
from replay_core.replay.flags import Flags
from replay_core.units.folder import UnitFolder
from replay_core.units.working import keep

ROOT = Path(__file__).resolve().parents[3]
#: What a document holds of the moment and the machine.
#: What a document says of the run and its machine; on a disk that is nearly full the room for a capture is another.
OF_THE_RUN = {"created", "time", "memory", "room_mib"}
ODD = 3
#: Each try of a replay has a folder of its own.
TRY = re.compile(r"(DIR/cells/[0-9a-f]+)/[0-9a-f]{8}")


def write_run(directory: Path, steps: int, micros: int) -> Path:
    """A tiny model's micro-batches with the log-probabilities it computed; one of each step but the last is off."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=32, max_position_embeddings=64)).eval()
    with Recorder(directory) as recorder:
        for step in range(steps):
            recorder.checkpoint(step, model)
            with recorder.step(step) as record, torch.no_grad():
                for micro in range(micros):
                    ids_BS = torch.randint(0, 32, (2, 6))
                    mask_BS = torch.ones_like(ids_BS)
                    mask_BS[0, 0] = 0
                    positions_BS = (mask_BS.cumsum(-1) - 1).clamp(min=0)
                    logits_BSV = model(ids_BS, attention_mask=mask_BS, position_ids=positions_BS).logits
                    logprobs_BS = logits_BSV.log_softmax(-1)[:, :-1].gather(-1, ids_BS[:, 1:, None])[..., 0]
                    record("batch_inputs", micro=micro, input_ids=ids_BS, attention_mask=mask_BS)
                    off = 0.5 if micro == ODD and step < steps - 1 else 0.0
                    record("forward_data", micro=micro, log_probs=logprobs_BS + off)
                for weight in model.parameters():
                    weight.add_(0.01 * torch.randn_like(weight))
    return directory


def documents(out: Path) -> dict[str, Any]:
    def lasting(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: lasting(one) for name, one in value.items() if name not in OF_THE_RUN}
        if isinstance(value, list):
            return [lasting(one) for one in value]
        return TRY.sub(r"\1/TRY", value.replace(str(out.resolve()), "DIR")) if isinstance(value, str) else value

    every = [json.loads(file.read_text()) for file in (out / "documents").iterdir()]
    return {f"{doc['plan']['step']} {doc['plan']['micro']}": lasting(doc) for doc in every}


def worker(run: Path, out: Path, *more: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "tui_debugger", "replay", str(run), "--packing", "--out", str(out), *more]
    # Ray gives an actor as many threads as CPUs, and a document says how many there were.
    return subprocess.Popen(words, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True,
                            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)  # fmt: skip


def until(there: Callable[[], bool], workers: list[subprocess.Popen[str]], limit_s: float) -> None:
    end = time.monotonic() + limit_s
    while not there():
        assert time.monotonic() < end, "what was waited for did not come"
        assert any(one.poll() is None for one in workers), "every worker ended before"
        time.sleep(0.01)


def times(out: Path) -> dict[str, int]:
    return {file.stem: file.stat().st_mtime_ns for file in (out / "outcomes").glob("*.json")}


def alone(run: Path, out: Path) -> Any:
    """All of it by one worker, in this process."""
    plan = {"dump": str(run), "step": None, "rank": None, "micro": None, "model": "checkpoint",
            "flags": Flags.parse(["packing=on"]).to_mapping()}  # fmt: skip
    return workbench.work_units("replay", {"plan": plan}, out, None, InProcess(perform))


def killed_and_finished(run: Path, out: Path, begun: Callable[[], list[subprocess.Popen[str]]], after: int) -> None:
    """Begin, end every worker by SIGKILL after so many units, begin again: what was done is not done again."""
    workers = begun()
    until(lambda: len(UnitFolder(out).ended()) >= after, workers, 600)
    for one in workers:
        one.send_signal(signal.SIGKILL)
    for one in workers:
        one.communicate()
    before, left = times(out), workbench.gather(out)["counts"]
    assert left["running"] == 0
    assert left["done"] >= after - 1
    codes = []
    for one in begun():
        _, said = one.communicate()
        codes.append(one.returncode)
        assert "Traceback" not in said
    assert max(codes) == ExitCode.DIVERGES
    done = times(out)
    assert {id: done[id] for id in before} == before
    assert workbench.gather(out)["counts"]["done"] == len(done)
    assert not [file for file in out.rglob(".*") if file.is_file()], "what a kill left half written is gone"


def of_shards(steps: int, micros: int, shards: int, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps, micros)
    worker(run, tmp_path / "alone", "--shard", "1/1").communicate()
    whole = workbench.gather(tmp_path / "alone")["counts"]
    assert (whole["total"], whole["done"], whole["diverge"]) == (steps * micros, steps * micros, steps - 1)
    out = tmp_path / "shards"
    killed_and_finished(
        run, out, lambda: [worker(run, out, "--shard", f"{one + 1}/{shards}") for one in range(shards)], micros // 2
    )
    assert documents(out) == documents(tmp_path / "alone")


@pytest.mark.long
def test_what_a_killed_replay_left_is_in_no_ones_way_and_neither_is_a_second_worker(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 1, 2)
    whole = alone(run, tmp_path / "out")
    first, second = (unit["id"] for unit in whole["units"])
    folder = UnitFolder(tmp_path / "out")
    (tmp_path / "out" / "outcomes" / f"{first}.json").unlink()
    half = folder.cells(first) / "0123abcd" / "cell0"
    with Recorder(half) as recorder, recorder.step(0) as record:
        record("batch_inputs", micro=0, input_ids=torch.zeros(1, 2))

    class Meanwhile(InProcess):
        def run(self, job: Job, on_event: OnEvent = ignore) -> Answer:
            if job.kind == "replay" and job.params["plan"]["micro"] == 0 and not list(folder.path.glob("between*")):
                (folder.path / "between").touch()
                alone(run, folder.path)  # another worker, in the middle of this one's unit
            return super().run(job, on_event)

    plan = {"dump": str(run), "step": None, "rank": None, "micro": None, "model": "checkpoint",
            "flags": Flags.parse(["packing=on"]).to_mapping()}  # fmt: skip
    doc = workbench.work_units("replay", {"plan": plan}, folder.path, None, Meanwhile(perform))
    assert doc["counts"]["done"] == 2
    assert not half.exists()
    # One that fails beside an answer does not take it away.
    unit = next(one for one in folder.plan().units if one.id == second)
    keep(folder.plan(), folder, unit, None, CellError("out of memory"), 1.0)
    assert workbench.gather(folder.path)["counts"]["done"] == 2


@pytest.mark.long
def test_two_shard_processes_that_were_killed_leave_what_one_worker_leaves(tmp_path: Path) -> None:
    of_shards(2, 4, 2, tmp_path)


@pytest.mark.slow
def test_four_shard_processes_do_two_thousand_units(tmp_path: Path) -> None:
    of_shards(4, 500, 4, tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
def test_a_cluster_whose_driver_was_killed_leaves_what_one_worker_leaves(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 2, 20)
    worker(run, tmp_path / "alone", "--shard", "1/1").communicate()
    out = tmp_path / "ray"
    killed_and_finished(run, out, lambda: [worker(run, out, "--ray")], 8)
    assert documents(out) == documents(tmp_path / "alone")
