"""SIGTERM and Ctrl-C wherever they hit a recorder: the process ends soon, and what it held is written."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from replay_core.dumps import open_run
from replay_core.recorder import Recorder
from tests.warm_python import command

_TRAINER = """
import signal, sys, torch
from replay_core.recorder import BlackBox, Recorder
signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in its background ignores it
{handler}
recorder = Recorder(sys.argv[1], asynchronous={asynchronous}, {box})
for step in range(10**6):
    with recorder.step(step) as record:
        record("loss", advantages=torch.ones(300))
    if step >= 5:
        recorder.note(latest=step)
    if step == 10:
        print("here", flush=True)
        {then}
"""


def trainer(folder: Path, *, asynchronous: bool, box: bool, handler: str = "", then: str = "") -> subprocess.Popen[str]:
    script = folder / "train.py"
    boxed = "black_box=BlackBox(steps=3, incidents=100)" if box else ""
    then = then.strip().replace("\n", "\n        ")
    script.write_text(_TRAINER.format(handler=handler, asynchronous=asynchronous, box=boxed, then=then))
    child = subprocess.Popen([*command(), str(script), str(folder / "dump")], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "here\n"
    return child


@pytest.mark.parametrize("asynchronous", [False, True])
def test_sigterm_anywhere_in_a_recorder_ends_the_process_and_writes_what_the_box_holds(
    asynchronous: bool, tmp_path: Path
) -> None:
    chance = random.Random(7)
    for number in range(3):
        folder = tmp_path / str(number)
        folder.mkdir()
        child = trainer(folder, asynchronous=asynchronous, box=True)
        time.sleep(chance.uniform(0, 0.05))
        child.terminate()
        child.terminate()
        try:
            assert child.wait(20) == -signal.SIGTERM
        finally:
            child.kill()
            child.communicate()
        (incident,) = json.loads((folder / "dump" / "manifest.json").read_text())["incidents"]
        steps = open_run(folder / "dump").steps()
        assert (incident["trigger"], incident["steps_held"]) == ("SIGTERM", steps)
        assert not list(folder.rglob("*.tmp"))


_IN_C = """
import ctypes
lock = ctypes.create_string_buffer(256)
for _ in range(2):
    ctypes.CDLL(None).pthread_mutex_lock(lock)  # the second time it waits for itself, whatever signal comes
"""


@pytest.mark.parametrize("box", [True, False])
def test_sigterm_ends_a_trainer_that_waits_in_c_once_all_is_written(box: bool, tmp_path: Path) -> None:
    """As in a collective whose other ranks are gone: torchrun waits half a minute for such a rank."""
    child = trainer(tmp_path, asynchronous=True, box=box, then=_IN_C)
    child.terminate()
    try:
        assert child.wait(20) == -signal.SIGTERM
    finally:
        child.kill()
        child.communicate()
    incidents = json.loads((tmp_path / "dump" / "manifest.json").read_text()).get("incidents", [])
    assert [incident["trigger"] for incident in incidents] == ["SIGTERM"] * box
    assert open_run(tmp_path / "dump").steps() == ([8, 9, 10] if box else list(range(11)))
    assert not [path for path in tmp_path.rglob(".*") if path.suffix in (".lock", ".tmp")]


def test_signals_of_a_forked_child_are_not_told_its_parent(tmp_path: Path) -> None:
    """It has the end of the pipe that a parent hears of its own signals by."""
    Recorder(tmp_path).close()
    before = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(before)
    child = os.fork()
    if not child:
        os._exit(signal.set_wakeup_fd(-1) != -1)
    assert os.waitpid(child, 0)[1] == 0
    assert before != -1


def test_sigterm_of_a_plain_recorder_leaves_no_lock(tmp_path: Path) -> None:
    child = trainer(tmp_path, asynchronous=False, box=False)
    child.terminate()
    try:
        assert child.wait(20) == -signal.SIGTERM
    finally:
        child.kill()
        child.communicate()
    assert not [path for path in tmp_path.rglob(".*") if path.suffix in (".lock", ".tmp")]
    assert open_run(tmp_path / "dump").records


def test_a_trainers_own_handler_runs_in_its_main_thread_each_time_after_the_box_is_written(tmp_path: Path) -> None:
    handler = """
import signal, threading
asked = []
def stop(number, frame):
    asked.append(threading.current_thread() is threading.main_thread())
    print("asked", asked, flush=True)
    if len(asked) == 2:
        raise SystemExit(5)
signal.signal(signal.SIGTERM, stop)
"""
    child = trainer(tmp_path, asynchronous=False, box=True, handler=handler)
    assert child.stdout is not None
    child.terminate()
    assert child.stdout.readline() == "asked [True]\n"
    assert len(json.loads((tmp_path / "dump" / "manifest.json").read_text())["incidents"]) == 1
    child.terminate()
    assert child.stdout.readline() == "asked [True, True]\n"
    child.communicate(timeout=20)
    assert child.returncode == 5


@pytest.mark.parametrize("asynchronous", [False, True])
def test_ctrl_c_anywhere_in_a_recorder_ends_the_trainer_and_leaves_the_dump_whole(
    asynchronous: bool, tmp_path: Path
) -> None:
    chance = random.Random(11)
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        child = trainer(folder, asynchronous=asynchronous, box=False)
        time.sleep(chance.uniform(0, 0.05))
        child.send_signal(signal.SIGINT)
        try:
            assert child.wait(20) in (1, -signal.SIGINT)
        finally:
            child.kill()
            child.communicate()
        run = open_run(folder / "dump")
        steps = [step for step in run.steps() if step is not None]
        assert len(steps) >= 10
        assert steps == list(range(len(steps))), "in order, none dropped"
        assert run.problems == []
        for record in run.records:
            assert [ref.shape for ref in record.tensors()] == [(300,)]


def test_os_exit_loses_what_waited_and_tears_nothing(tmp_path: Path) -> None:
    script = f"""
import os, torch
from replay_core.recorder import Recorder
recorder = Recorder({str(tmp_path / "dump")!r}, asynchronous=True)
for step in range(40):
    with recorder.step(step) as record:
        record("loss", values=torch.full((100_000,), float(step)))
os._exit(0)
"""
    subprocess.run([*command(), _script(tmp_path, script)], check=True, timeout=60)
    run = open_run(tmp_path / "dump")
    steps = run.steps()
    assert steps == list(range(len(steps)))
    assert [ref.shape for record in run.records for ref in record.tensors()] == [(100_000,)] * len(steps)


def test_a_recorder_in_a_recorder_writes_both_dumps(tmp_path: Path) -> None:
    outer, inner = Recorder(tmp_path / "outer"), Recorder(tmp_path / "outer" / "inner", asynchronous=True)
    with outer, inner:
        for step in range(3):
            with outer.step(step) as record, inner.step(step) as within:
                record("loss", loss=1.0)
                within("trajectory", loss=2.0)
    assert [len(list((tmp_path / "outer" / where).glob("*.pt"))) for where in ("loss", "inner/trajectory")] == [3, 3]
    assert len(open_run(tmp_path / "outer" / "inner").records) == 3


def _script(folder: Path, text: str) -> str:
    (folder / "train.py").write_text(text)
    return str(folder / "train.py")
