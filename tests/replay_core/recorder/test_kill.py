"""kill -9 at random moments of two recording ranks: what was committed is whole, what was not is not there."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch

from replay_core.dumps import open_run
from replay_core.pages import array
from replay_core.recorder import Recorder

RANKS = 2
#: Elements of a record's tensor: large enough that a kill can fall within its writing.
SIZE = 50_000


def record_until_killed(directory: Path, rank: int, form: str, asynchronous: bool, tell: int) -> None:
    """A rank that records for ever, and says over a pipe which record is committed."""
    # OpenMP's threads do not survive a fork.
    torch.set_num_threads(1)
    recorder = Recorder(directory, format=form, asynchronous=asynchronous)
    for step in range(1_000_000):
        with recorder.step(step, rank=rank) as record:
            for micro in range(2):
                value = step * 10 + micro
                record("loss", values=torch.full((SIZE,), value), value=value, micro=micro, epoch=micro)
                if not asynchronous:
                    os.write(tell, f"{rank} {step} {micro}\n".encode())


def fork_ranks(directory: Path, form: str, asynchronous: bool, tell: int) -> list[int]:
    children = []
    for rank in range(RANKS):
        child = os.fork()
        if child == 0:
            try:
                record_until_killed(directory, rank, form, asynchronous, tell)
            finally:
                os._exit(1)
        children.append(child)
    return children


def strike(
    directory: Path, form: str, asynchronous: bool, after_s: float, *, is_among: bool
) -> set[tuple[int, int, int]]:
    """Let the ranks record, kill them, and return what they had said is committed.

    is_among: once a record is committed, however long that takes on a busy machine.
    """
    hear, tell = os.pipe()
    children = fork_ranks(directory, form, asynchronous, tell)
    os.close(tell)
    while is_among and not any(index.stat().st_size for index in directory.glob("index_rank*.jsonl")):
        time.sleep(0.002)
    time.sleep(after_s)
    for child in children:
        os.kill(child, signal.SIGKILL)
    for child in children:
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), "the rank ended by itself"
    with os.fdopen(hear, "rb") as pipe:
        whole = pipe.read().split(b"\n")[:-1]
    return {tuple(map(int, line.split())) for line in whole}  # type: ignore[misc]


def check(directory: Path, promised: set[tuple[int, int, int]]) -> int:
    """Every record is readable and whole, all that was promised is there, the index agrees. Returns how many."""
    if not (directory / "manifest.json").exists():
        assert not promised
        return 0
    run = open_run(directory)
    found = set()
    for record in run.records:
        key = record.key
        fields = {ref.name: ref for ref in record.tensors()}
        expected = (key.step or 0) * 10 + (key.micro or 0)
        values = array(fields["values"])
        assert values.shape == (SIZE,)
        assert (values == expected).all()
        assert array(fields["value"]) == expected
        found.add((key.rank, key.step, key.micro))
    assert len(found) == len(run.records)
    assert promised <= found
    # A rank that was killed leaves holes in the grid, and the run says so; nothing else may be wrong.
    holes = ("holds no record", ": micro ", ": nothing of rank ", "more holes in ranks")
    assert not [problem for problem in run.problems if not any(hole in problem.what for hole in holes)]
    listed = set()
    for index in directory.glob("index_rank*.jsonl"):
        lines = index.read_text().splitlines()
        entries = [json.loads(line) for line in lines]
        assert len({entry["file"] for entry in entries}) == len(entries)
        listed |= {(entry["key"]["rank"], entry["key"]["step"], entry["key"]["micro"]) for entry in entries}
    assert listed <= found, "the index lists nothing that is not there"
    assert len(found - listed) <= RANKS, "at most the record whose line was being written"
    return len(found)


def kill_many(tmp_path: Path, times: int, seed: int) -> list[int]:
    chance = random.Random(seed)
    # Warmed here once, so that a forked rank records at once.
    with Recorder(tmp_path / "warm").step(0) as record:
        record("loss", values=torch.zeros(4))
    counts = []
    for number in range(times):
        directory = tmp_path / f"run{number}"
        form = chance.choice(["pt", "pt", "safetensors", "jsonl"])
        asynchronous, after_s, is_among = chance.random() < 0.5, chance.uniform(0.0, 0.25), number % 4 != 0
        promised = strike(directory, form, asynchronous, after_s, is_among=is_among)
        counts.append(check(directory, promised))
        if number % 10 == 0 and (directory / "manifest.json").exists():
            # The next run on it, killed again: the index is whole, nothing of the first one is lost.
            before = counts[-1]
            for rank in range(RANKS):
                with Recorder(directory, format=form) as again, again.step(2_000_000, rank=rank) as record:
                    record("loss", values=torch.full((SIZE,), 20_000_000), value=20_000_000, micro=0)
            assert check(directory, {(rank, 2_000_000, 0) for rank in range(RANKS)}) == before + RANKS
            lines = sum(len(i.read_text().splitlines()) for i in directory.glob("index_rank*.jsonl"))
            assert lines == before + RANKS
            assert not list(directory.rglob("*.tmp"))
    return counts


@pytest.mark.long
@pytest.mark.parametrize("seed", [1])
def test_a_dozen_kills_lose_nothing_that_was_committed(seed: int, tmp_path: Path) -> None:
    counts = kill_many(tmp_path, 12, seed)
    assert sum(counts) > 20, "most kills fell among records"


@pytest.mark.slow
def test_three_hundred_kills_lose_nothing_that_was_committed(tmp_path: Path) -> None:
    counts = kill_many(tmp_path, 300, 20_260_101)
    assert sum(count > 0 for count in counts) > 200


#: Elements of a record that takes long enough to write: 8 MB.
LARGE = 2_000_000


def record_large(directory: Path, form: str, asynchronous: bool) -> None:
    torch.set_num_threads(1)
    recorder = Recorder(directory, format=form, asynchronous=asynchronous)
    for step in range(1_000_000):
        with recorder.step(step) as record:
            record("loss", values=torch.full((LARGE,), float(step)))


def strike_mid_write(directory: Path, form: str, asynchronous: bool, chance: random.Random) -> bool:
    """Kill a recorder that has a file open; True if it had written a byte of it and not yet given it its name."""
    child = os.fork()
    if child == 0:
        try:
            record_large(directory, form, asynchronous)
        finally:
            os._exit(1)
    wanted = chance.randint(0, 4)
    seen: set[str] = set()
    while len(seen) <= wanted:
        seen |= {path.name for path in directory.glob("loss/.step_*.tmp")}
    time.sleep(chance.uniform(0, 0.004))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return any(path.stat().st_size > 0 for path in directory.glob("loss/.step_*.tmp"))


@pytest.mark.slow
def test_three_hundred_kills_within_a_write_lose_and_tear_nothing(tmp_path: Path) -> None:
    chance = random.Random(20_261_122)
    with Recorder(tmp_path / "warm").step(0) as record:
        record("loss", values=torch.zeros(4))
    within = 0
    for number in range(300):
        directory = tmp_path / f"run{number}"
        form = chance.choice(["pt", "safetensors"])
        within += strike_mid_write(directory, form, chance.random() < 0.5, chance)
        before = open_run(directory)
        steps = before.steps() if before.records else []
        for record_ in before.records:
            values = array(next(ref for ref in record_.tensors() if ref.name == "values"))
            assert values.shape == (LARGE,)
            assert (values == record_.key.step).all()
        assert steps == list(range(len(steps))), "in order, none missing"
        with Recorder(directory, format=form) as again, again.step(2_000_000) as record:
            record("loss", values=torch.zeros(4))
        assert len(open_run(directory).records) == len(steps) + 1
        assert not [path for path in directory.rglob(".*") if path.is_file()], "nothing of the killed is left"
        shutil.rmtree(directory)
    assert within >= 150, f"{within} of 300 kills fell between the first byte and the name"
