"""Scripts as people write them: none is to crash for being recorded, none to be silently unrecorded."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from replay_core.dumps import open_run
from replay_core.pages import array
from replay_core.records import Run
from tests.tui_debugger.commands.test_record import record

BEGIN = """
import os, signal, threading, time
import torch
from torch.nn import functional

def build():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

def batch(number):
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(number))

model = build()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def train(steps, call=None):
    for number in range(steps):
        optimizer.zero_grad()
        (call or model)(batch(number)).pow(2).mean().backward()
        optimizer.step()
"""

CHECKPOINTED = """
from torch.utils.checkpoint import checkpoint
train(2, lambda x: model(x) + 0 * checkpoint(model[0], x, use_reentrant=False).sum())
class Checkpointed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = model
    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)
train(2, Checkpointed())
"""

CALL_THAT_RAISES = """
try:
    model(torch.randn(5, 3))
except RuntimeError:
    pass
train(3)
"""

OTHER_THREAD = """
class Slow(torch.nn.Module):
    def forward(self, x):
        time.sleep(0.2)
        return x
slow = threading.Thread(target=lambda: Slow()(batch(0)))
slow.start()
train(3)
slow.join()
"""

COMPILED_AS_A_WHOLE = """
model.compile(backend="aot_eager", fullgraph=True)
train(3)
"""

COMPILED_FUNCTION = """
step = torch.compile(lambda x: model(x), backend="aot_eager", fullgraph=True)
train(3, step)
"""

TWO_OPTIMIZERS = """
critic = torch.nn.Linear(4, 1)
second = torch.optim.SGD(critic.parameters(), lr=0.1)
for number in range(3):
    optimizer.zero_grad()
    second.zero_grad()
    policy_loss, value_loss = model(batch(number)).mean(), critic(batch(number)).pow(2).mean()
    policy_loss.backward()
    value_loss.backward()
    optimizer.step()
    second.step()
"""

OPTIMIZER_WITH_CLOSURE = """
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
for number in range(3):
    def closure():
        optimizer.zero_grad()
        loss = model(batch(number)).pow(2).mean()
        loss.backward()
        return loss
    optimizer.step(closure)
"""

ENDS_HARD = """
train(3)
os._exit(0)
"""

TOLD_TO_END = """
train(3)
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(20)
"""

ODD_ARGUMENTS = """
class Odd(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = model
    def forward(self, x, **rest):
        return {"y": self.inner(x), "sparse": torch.ones(2).to_sparse()}
odd = Odd()
train(3, lambda x: odd(x, thing=object(), sparse=torch.ones(2, 2).to_sparse(), meta=torch.ones(1, device="meta"))["y"])
"""


ALL_CALLS_FIRST = """
for number in range(3):
    optimizer.zero_grad()
    out = [model(batch(10 * number + micro)) for micro in range(4)]
    for micro in {turn}:
        (out[micro].pow(2).mean() + micro).backward()
    optimizer.step()
"""


TWO_LOSSES_OF_A_CALL = """
for number in range(2):
    optimizer.zero_grad()
    out = [model(batch(10 * number + micro)) for micro in range(3)]
    for micro in range(3):
        (out[micro].pow(2).mean() + micro).backward(retain_graph=True)
        (out[micro].mean() + 100 + micro).backward()
    optimizer.step()
"""

KEEPS_ANOTHER = """
class Sharded(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {})
        self.own = torch.optim.SGD(self.param_groups[0]["params"][:2], lr=0.1)
    def step(self, closure=None):
        self.own.step()
optimizer = Sharded(model.parameters())
train(3)
"""


def counted(run: Run) -> dict[str, int]:
    return Counter(str(record.key.stage) for record in run.records)


@pytest.mark.long
@pytest.mark.parametrize("turn", ["range(4)", "reversed(range(4))"], ids=["first first", "last first"])
def test_a_loss_is_of_the_call_it_was_made_from_where_all_calls_come_first(turn: str, tmp_path: Path) -> None:
    """As stages of a pipeline do (GPipe), which go back from the first micro-batch or from the last."""
    answer = record(tmp_path, BEGIN + ALL_CALLS_FIRST.format(turn=turn))
    assert answer.returncode == 0, answer.stderr
    records = {record.key: record for record in open_run(tmp_path / "dump").records}
    losses = {key: record for key, record in records.items() if key.stage == "loss"}
    assert len(losses) == 12
    for key, record_ in losses.items():
        assert int(array(next(iter(record_.tensors())))) == key.micro


@pytest.mark.long
def test_a_second_loss_of_a_call_takes_no_later_calls_number(tmp_path: Path) -> None:
    answer = record(tmp_path, BEGIN + TWO_LOSSES_OF_A_CALL)
    assert answer.returncode == 0, answer.stderr
    losses = [one for one in open_run(tmp_path / "dump").records if one.key.stage == "loss"]
    said = {one.key.micro: float(array(next(iter(one.tensors())))) for one in losses if one.key.step == 0}
    assert all(int(said[micro]) == micro for micro in range(3))
    assert sorted(int(said[micro]) // 100 for micro in range(3, 6)) == [1, 1, 1]


@pytest.mark.long
def test_an_optimizer_that_keeps_another_steps_once(tmp_path: Path) -> None:
    """As ZeroRedundancyOptimizer does for its share."""
    answer = record(tmp_path, BEGIN + KEEPS_ANOTHER)
    assert answer.returncode == 0, answer.stderr
    run = open_run(tmp_path / "dump")
    assert run.steps() == [0, 1, 2]
    assert [one.key.micro for one in run.records if one.key.stage == "gradient"] == [None] * 3


@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "steps", "calls", "losses", "code"),
    [
        pytest.param(CALL_THAT_RAISES, 3, 3, 3, 0, id="a call raises"),
        pytest.param(OTHER_THREAD, 3, 3, 3, 0, id="another thread computes", marks=pytest.mark.slow),
        pytest.param(CHECKPOINTED, 4, 6, 4, 0, id="activations are computed again", marks=pytest.mark.slow),
        pytest.param(COMPILED_AS_A_WHOLE, 3, 3, 3, 0, id="module.compile", marks=pytest.mark.slow),
        pytest.param(COMPILED_FUNCTION, 3, 0, 3, 0, id="a compiled function calls the model", marks=pytest.mark.slow),
        pytest.param(TWO_OPTIMIZERS, 3, 6, 6, 0, id="two optimizers"),
        pytest.param(OPTIMIZER_WITH_CLOSURE, 3, 6, 6, 0, id="an optimizer calls the model", marks=pytest.mark.slow),
        pytest.param(ENDS_HARD, 3, 3, 3, 0, id="os._exit"),
        pytest.param(TOLD_TO_END, 3, 3, 3, 143, id="SIGTERM"),
        pytest.param(ODD_ARGUMENTS, 3, 3, 3, 0, id="arguments no record can hold"),
    ],
)
def test_every_step_call_and_loss_of_an_odd_script_is_recorded(
    script: str, steps: int, calls: int, losses: int, code: int, tmp_path: Path
) -> None:
    answer = record(tmp_path, BEGIN + script)
    assert answer.returncode == code, answer.stderr
    run = open_run(tmp_path / "dump")
    assert run.steps() == list(range(steps))
    found = counted(run)
    assert (found["batch_inputs"], found["loss"]) == (calls, losses)
    assert not run.problems


@pytest.mark.long
def test_a_critics_optimizer_shares_the_step_and_has_its_own_role(tmp_path: Path) -> None:
    record(tmp_path, BEGIN + TWO_OPTIMIZERS)
    gradients = [record.key for record in open_run(tmp_path / "dump").records if record.key.stage == "gradient"]
    assert {(key.step, key.role) for key in gradients} == {(s, role) for s in range(3) for role in ("actor", "critic")}


@pytest.mark.long
def test_a_copy_that_no_optimizer_trains_is_the_reference(tmp_path: Path) -> None:
    script = """
import copy
copied = copy.deepcopy(model)
with torch.no_grad():
    copied(batch(0))
train(1)
"""
    record(tmp_path, BEGIN + script)
    calls = [record.key for record in open_run(tmp_path / "dump").records if record.key.stage == "batch_inputs"]
    assert sorted((key.role, key.micro) for key in calls) == [("actor", 0), ("ref", 0)]


@pytest.mark.long
def test_a_scaled_loss_is_recorded_as_the_loss_it_was(tmp_path: Path) -> None:
    script = """
scaler = torch.amp.GradScaler("cpu")
loss = model(batch(0)).pow(2).mean()
print(loss.item())
scaler.scale(loss).backward()
scaler.step(optimizer)
"""
    answer = record(tmp_path, BEGIN + script)
    (found,) = [record for record in open_run(tmp_path / "dump").records if record.key.stage == "loss"]
    loss, scale = found.get("loss"), found.get("loss_scale")
    assert loss is not None
    assert scale is not None
    assert float(array(loss)) == float(answer.stdout)
    assert float(array(scale)) == 65536


@pytest.mark.slow
def test_ranks_are_those_of_the_process_group(tmp_path: Path) -> None:
    script = """
import torch.multiprocessing, torch.distributed
def work(rank, port):
    store = torch.distributed.TCPStore("127.0.0.1", port, 2, rank == 0)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    train(2)
    torch.distributed.destroy_process_group()
if __name__ == "__main__":
    import socket
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(work, (port,), nprocs=2)
"""
    answer = record(tmp_path, BEGIN + script, cold=True)
    assert answer.returncode == 0, answer.stderr
    keys = {(record.key.step, record.key.rank) for record in open_run(tmp_path / "dump").records}
    assert keys == {(step, rank) for step in range(2) for rank in range(2)}


@pytest.mark.long
def test_a_directory_that_cannot_be_recorded_into_is_said_and_the_script_runs_on(tmp_path: Path) -> None:
    (tmp_path / "dump").mkdir()
    (tmp_path / "dump" / "somebody.txt").write_text("else's")
    answer = record(tmp_path, BEGIN + "train(2); print('trained')")
    assert answer.stdout == "trained\n"
    assert answer.returncode == 3
    assert "the directory holds other files and is no native dump" in answer.stderr
    assert "Traceback" not in answer.stderr


def test_a_second_recording_into_one_directory_is_refused_before_the_script_starts(tmp_path: Path) -> None:
    assert record(tmp_path, BEGIN + "train(1)").returncode == 0
    answer = record(tmp_path, BEGIN + "print('started')")
    assert answer.returncode == 2
    assert answer.stdout == ""
    assert "holds a recording already" in answer.stderr


@pytest.mark.long
def test_a_forked_child_trains_on_and_says_that_its_records_are_lost(tmp_path: Path) -> None:
    script = """
train(1)
child = os.fork()
if not child:
    train(1)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
train(1)
"""
    answer = record(tmp_path, BEGIN + script)
    assert answer.returncode == 0, answer.stderr
    assert "lost: 4 records" in answer.stderr
    run = open_run(tmp_path / "dump")
    assert counted(run)["loss"] == 2
    assert any("lost" in problem.what for problem in run.problems)


@pytest.mark.long
def test_an_option_in_the_environment_that_is_wrong_is_said_and_the_script_runs_on(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(BEGIN + "train(1); print('trained')")
    root = Path(__file__).resolve().parents[3]
    paths = os.pathsep.join([str(root / "replay_core/recorder/injection"), str(root)])
    answer = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60,
        env={**os.environ, "PYTHONPATH": paths, "RLDBG_RECORD": "dump", "RLDBG_RECORD_OPTIONS": '{"level": "x"}'},
    )  # fmt: skip
    assert answer.stdout == "trained\n"
    assert "level: 'x'" in answer.stderr
