"""A run is followed while its trainer writes it: every record is seen once, and looking at nothing new is cheap."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from replay_core import pages
from replay_core.dumps import open_run
from replay_core.dumps.following import Follower
from replay_core.recorder import Recorder
from tests.builders import save_file

WRITER = """
import sys, time, torch
from replay_core.recorder import Recorder
recorder = Recorder(sys.argv[1])
for step in range(12):
    with recorder.step(step) as record:
        for micro in range(2):
            record("forward_data", micro=micro, log_probs=torch.full((2, 3), float(step)))
    print(step, flush=True)
    time.sleep(0.02)
"""


@pytest.mark.long
def test_every_record_of_a_real_recorder_is_seen_exactly_once(tmp_path: Path) -> None:
    dump = tmp_path / "run"
    arguments = [sys.executable, "-c", WRITER, str(dump)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline().strip() == "0"
        follower = Follower(dump)
        seen = [record.key for record in follower.run.records]
        polls = 0
        while writer.poll() is None:
            seen += [record.key for record in follower.poll()]
            polls += 1
            time.sleep(0.01)
        seen += [record.key for record in follower.poll()]
    assert writer.returncode == 0
    assert polls > 3
    whole = open_run(dump)
    assert sorted(map(str, seen)) == sorted(str(record.key) for record in whole.records)
    assert [record.key for record in follower.run.records] == [record.key for record in whole.records]
    assert len(seen) == 24
    # What was being written while somebody looked is whole in the end.
    assert follower.run.problems == []


def settled(root: Path) -> None:
    for folder in [root, *(path for path in root.rglob("*") if path.is_dir())]:
        os.utime(folder, (1, 1))


def test_records_that_were_there_stay_the_same_objects(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "run")
    with recorder.step(0) as record:
        record("loss", micro=0, loss=1.0)
    follower = Follower(tmp_path / "run")
    (first,) = follower.run.records
    first.tensors()
    with recorder.step(1) as record:
        record("loss", micro=0, loss=2.0)
    (came,) = follower.poll()
    assert came.key.step == 1
    assert follower.run.records[0] is first
    assert first.is_read


def test_nothing_new_is_found_without_reading_the_names_again(tmp_path: Path) -> None:
    save_file(tmp_path / "run/loss/step_000000_rank0_micro0.pt", {"loss": 1.0})
    settled(tmp_path)
    follower = Follower(tmp_path / "run")
    before = follower.run
    assert follower.poll() == []
    assert follower.run is before


def test_lines_that_are_added_to_a_file_are_new_records(tmp_path: Path) -> None:
    def line(step: int) -> str:
        return json.dumps({"step": step, "prompt": ["a"], "completion": ["b"]}) + "\n"

    file = tmp_path / "completions.jsonl"
    file.write_text(line(1))
    settled(tmp_path)
    follower = Follower(tmp_path)
    with open(file, "a") as opened:
        opened.write(line(2))
    assert [record.key.step for record in follower.poll()] == [2]


def test_a_record_that_was_written_over_is_read_again(tmp_path: Path) -> None:
    file = save_file(tmp_path / "run/forward_data/step_000000_rank0_micro0.pt", {"log_probs": torch.zeros(2, 3)})
    follower = Follower(tmp_path / "run")
    (record,) = follower.run.records
    record.tensors()
    follower.poll()
    save_file(file, {"log_probs": torch.ones(2, 30)})
    assert follower.poll() == []
    ref = record.get("policy_logprobs")
    assert ref is not None
    assert pages.array(ref).shape == (2, 30)


def test_a_record_that_is_gone_leaves_the_run(tmp_path: Path) -> None:
    for step in (0, 1):
        save_file(tmp_path / f"run/loss/step_{step:06d}_rank0_micro0.pt", {"loss": 1.0})
    follower = Follower(tmp_path / "run")
    (tmp_path / "run/loss/step_000000_rank0_micro0.pt").unlink()
    assert follower.poll() == []
    assert [record.key.step for record in follower.run.records] == [1]


def test_a_log_that_grows_is_looked_at_again_whatever_its_ending(tmp_path: Path):
    log = tmp_path / "train.out"
    log.write_text("{'loss': 0.1, 'step': 0}\n")
    follower = Follower(tmp_path)
    os.utime(tmp_path, (1, 1))
    follower.poll()
    with open(log, "a") as file:
        file.write("{'loss': 0.2, 'step': 1}\n")
    assert [record.key.step for record in follower.poll()] == [1]
