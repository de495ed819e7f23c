from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from replay_core.dumps import open_run
from replay_core.errors import DumpError
from replay_core.recorder import Recorder
from replay_core.recorder.backlog import Backlog
from replay_core.recorder.patience import Patience
from tests import warm_python


def test_what_the_trainer_changes_afterwards_is_not_what_is_written(tmp_path: Path) -> None:
    with Recorder(tmp_path, asynchronous=True) as recorder, recorder.step(0) as record:
        values = torch.zeros(1000)
        for micro in range(20):
            record("loss", values=values, micro=micro)
            values += 1
    for micro in range(20):
        assert torch.load(tmp_path / "loss" / f"step_000000_rank0_micro{micro}.pt")["values"].eq(micro).all()


def test_when_the_queue_is_full_the_trainer_waits_and_is_told(tmp_path: Path) -> None:
    gate, done = threading.Event(), list[int]()
    backlog = Backlog(100, lambda error: None, Patience(10))

    def job(number: int) -> None:
        gate.wait(10)
        done.append(number)

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        opener = threading.Timer(0.2, gate.set)
        opener.start()
        for number in range(5):
            backlog.put(lambda number=number: job(number), 60)  # type: ignore[misc]
        backlog.close()
    assert done == [0, 1, 2, 3, 4], "in order, none dropped"
    assert backlog.pressure.waits >= 1
    assert backlog.pressure.waited_s > 0.1
    assert backlog.pressure.peak_bytes <= 100
    assert (backlog.pressure.written, backlog.pressure.written_bytes, backlog.pressure.waiting) == (5, 300, 0)
    assert ["slower than the trainer" in str(warning.message) for warning in said] == [True]


def test_one_record_larger_than_the_queue_is_taken_all_the_same(tmp_path: Path) -> None:
    with Recorder(tmp_path, asynchronous=True, queue_bytes=1000) as recorder, recorder.step(0) as record:
        record("loss", values=torch.zeros(10_000))
    assert recorder.pressure.written == 1
    assert len(open_run(tmp_path).records) == 1


def test_a_failure_in_the_thread_reaches_the_trainer_at_its_next_record(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, asynchronous=True)
    (tmp_path / "loss").write_text("a file where the folder should be")
    with recorder.step(0) as record:
        record("loss", loss=1.0)
        with pytest.raises(DumpError, match="cannot be written"):
            recorder.flush()
        record("trajectory", tokens=[1, 2])
    recorder.close()
    assert [r.key.stage for r in open_run(tmp_path).records] == ["trajectory"]


def test_with_warn_a_failure_in_the_thread_costs_that_record_alone(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, asynchronous=True, on_error="warn")
    (tmp_path / "loss").write_text("a file where the folder should be")
    with warnings.catch_warnings(record=True) as said, recorder.step(0) as record:
        warnings.simplefilter("always")
        record("loss", loss=1.0)
        record("trajectory", tokens=[1, 2])
        recorder.close()
    assert len(recorder.lost) == 1
    assert "a record is lost" in str(said[0].message)
    assert [r.key.stage for r in open_run(tmp_path).records] == ["trajectory"]


def test_a_forked_rank_records_its_own_and_leaves_its_parents(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, asynchronous=True)
    with recorder.step(0, rank=0) as record:
        record("loss", loss=0.0)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with recorder.step(0, rank=1) as record:
                record("loss", loss=1.0)
            recorder.flush()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    recorder.close()
    assert status == 0
    assert [record.key.rank for record in open_run(tmp_path).records] == [0, 1]


@pytest.mark.long
def test_the_program_that_just_ends_still_writes_everything(tmp_path: Path) -> None:
    import subprocess

    script = f"""
import torch
from replay_core.recorder import Recorder
recorder = Recorder({str(tmp_path / "dump")!r}, asynchronous=True)
for step in range(5):
    with recorder.step(step) as record:
        record("loss", values=torch.zeros(200_000))
raise RuntimeError("the trainer fails")
"""
    words = [*warm_python.command(), "-c", script]
    answer = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert "the trainer fails" in answer.stderr
    assert len(open_run(tmp_path / "dump").records) == 5


@pytest.mark.long
def test_what_the_writer_computes_starts_no_threads_of_its_own(tmp_path: Path) -> None:
    """A second team of torch's threads would work against the trainer's, on the same cores."""
    tasks = Path("/proc/self/task")
    if not tasks.is_dir():
        pytest.skip("threads are counted under /proc")
    import subprocess
    import sys

    script = f"""
import os, threading, torch
from replay_core.recorder.values import describe
torch.set_num_threads(4)
values = torch.randn(1 << 20)
count = lambda: len(os.listdir({str(tasks)!r}))
before, within = count(), []
def write():
    describe("values", values, 0, stats=True)
    within.append(count())
thread = threading.Thread(target=write)
thread.start()
thread.join()
print(within[0] - before)
"""
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert int(answer.stdout) == 1, "the thread itself"


@pytest.mark.parametrize("end", [Backlog.flush, Backlog.close])
def test_who_waits_for_what_was_handed_over_does_not_wait_for_a_trainer_that_goes_on(
    end: Callable[[Backlog], None],
) -> None:
    """As SIGTERM does: the trainer trains until all is written."""
    done, over = list[int](), threading.Event()
    backlog = Backlog(20, lambda error: None, Patience(10))

    def job(number: int) -> None:
        over.wait(0.0005)  # the disk is slower than the trainer: something always waits
        done.append(number)

    def train() -> None:
        number = 0
        while not over.is_set():
            backlog.put(partial(job, number), 1)
            number += 1

    trainer = threading.Thread(target=train)
    trainer.start()
    try:
        for _ in range(5):
            waiter = threading.Thread(target=end, args=(backlog,), daemon=True)
            waiter.start()
            waiter.join(5)
            assert not waiter.is_alive()
    finally:
        over.set()
        trainer.join()
    backlog.close()
    assert done == list(range(len(done)))  # each once, in order


def test_where_no_thread_can_be_had_who_hands_over_does_it_and_nobody_waits_for_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process has as many as it may; from Python 3.12 on one that ends starts none, and what is recorded as it does
    was waited for without end.
    """
    done, failed = list[int](), list[BaseException]()
    backlog = Backlog(100, failed.append, Patience(10))
    backlog.put(lambda: done.append(0), 60)
    backlog.close()

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    with monkeypatch.context() as at_the_end:
        at_the_end.setattr(threading.Thread, "start", start)
        backlog.put(lambda: done.append(1), 60)
        backlog.put(lambda: done.append(1 // 0), 60)
    closer = threading.Thread(target=backlog.close, daemon=True)
    closer.start()
    closer.join(10)
    assert not closer.is_alive()
    backlog.put(lambda: done.append(2), 60)
    backlog.close()
    assert (done, [type(error) for error in failed]) == ([0, 1, 2], [ZeroDivisionError])
    assert (backlog.pressure.written, backlog.pressure.written_bytes, backlog.pressure.waiting) == (4, 240, 0)
