from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from replay_core.dumps import open_run
from replay_core.recorder import BlackBox, GradNormSpike, Recorder, rng_state
from tests import warm_python


def steps(directory: Path) -> list[int | None]:
    return open_run(directory).steps()


def incidents(directory: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((directory / "manifest.json").read_text()).get("incidents", [])
    return found


def run(directory: Path, box: BlackBox, count: int, **odd: Any) -> Recorder:
    """Steps of ordinary records; `odd` are the fields of the last step."""
    recorder = Recorder(directory, black_box=box)
    for step in range(count):
        fields = {"advantages": torch.ones(3), "grad_norm": 1.0}
        with recorder.step(step) as record:
            record("loss", {**fields, **(odd if step == count - 1 else {})}, micro=0)
    return recorder


def test_nothing_reaches_the_disk_while_nothing_is_wrong(tmp_path: Path) -> None:
    box = BlackBox(steps=3)
    run(tmp_path, box, 10)
    assert box.steps == [7, 8, 9]
    assert not list(tmp_path.rglob("step_*"))


@pytest.mark.parametrize(
    ("odd", "trigger", "says"),
    [
        ({"advantages": torch.tensor([1.0, float("nan")])}, "non_finite", "advantages of loss holds"),
        ({"loss": float("inf")}, "non_finite", "micro 0"),
        ({"advantages": torch.zeros(4)}, "zero_advantage", "every advantage of loss is zero"),
        ({"advantages": [0.0, 0.0]}, "zero_advantage", "every advantage"),
        ({"grad_norm": 30.0}, "GradNormSpike", "30 is more than 10 times the usual 1"),
        ({"metrics": {"grad_norm": torch.tensor(30.0)}, "grad_norm": None}, "GradNormSpike", "more than"),
    ],
)
def test_a_trigger_commits_the_ring(odd: dict[str, Any], trigger: str, says: str, tmp_path: Path) -> None:
    run(tmp_path, BlackBox(steps=3), 10, **odd)
    assert steps(tmp_path) == [7, 8, 9]
    (incident,) = incidents(tmp_path)
    assert (incident["trigger"], incident["step"], incident["steps_held"]) == (trigger, 9, [7, 8, 9])
    assert says in incident["what"]


def test_a_predicate_of_the_users_own_is_a_trigger(tmp_path: Path) -> None:
    def low_reward(records: Any) -> str | None:
        return next((f"reward {f['reward']}" for _, f in records if f.get("reward", 1) < 0.1), None)

    run(tmp_path, BlackBox(steps=2, triggers=[low_reward]), 5, reward=0.05)
    assert steps(tmp_path) == [3, 4]
    assert incidents(tmp_path)[0]["trigger"] == "low_reward"


def test_whoever_opens_the_dump_is_told_why_the_black_box_wrote(tmp_path: Path) -> None:
    run(tmp_path, BlackBox(steps=2), 4, loss=float("inf"))
    (note,) = [note for note in open_run(tmp_path).notes if "black box" in note]
    assert note.startswith("the black box wrote at step 3: ")
    assert "not finite" in note


def test_an_exception_in_a_step_commits_the_ring(tmp_path: Path) -> None:
    recorder = run(tmp_path, BlackBox(steps=2), 3)
    with pytest.raises(ZeroDivisionError), recorder.step(3) as record:  # noqa: PT012 - the step is what is left
        record("trajectory", tokens=[1])
        raise ZeroDivisionError("oh")
    assert steps(tmp_path) == [2, 3]
    assert incidents(tmp_path)[0]["what"] == "ZeroDivisionError: oh"


@pytest.mark.long
def test_an_exception_outside_a_step_commits_the_ring_too(tmp_path: Path) -> None:
    script = f"""
import torch
from replay_core.recorder import BlackBox, Recorder
recorder = Recorder({str(tmp_path / "dump")!r}, black_box=BlackBox(steps=2), asynchronous=True)
for step in range(4):
    with recorder.step(step) as record:
        record("loss", loss=torch.ones(3))
raise RuntimeError("between two steps")
"""
    answer = subprocess.run(
        [*warm_python.command(), "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert "between two steps" in answer.stderr
    assert steps(tmp_path / "dump") == [2, 3]


def test_the_ring_is_bounded_in_bytes_and_says_what_it_let_go(tmp_path: Path) -> None:
    box = BlackBox(steps=5, nbytes=100_000, triggers=[])
    recorder = Recorder(tmp_path, black_box=box)
    with pytest.warns(RuntimeWarning, match="the black box is full"):  # noqa: PT031 - at some step, once
        for step in range(10):
            with recorder.step(step) as record:
                record("loss", values=torch.zeros(10_000))
    assert box.steps == [8, 9]
    assert box.evicted == 8
    recorder.commit_held({"trigger": "asked"})
    assert steps(tmp_path) == [8, 9]


def test_a_run_that_stays_bad_fills_no_disk(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, black_box=BlackBox(steps=1, incidents=2))
    with pytest.warns(RuntimeWarning, match="commits nothing after"):  # noqa: PT031 - at some step, once
        for step in range(6):
            with recorder.step(step) as record:
                record("loss", loss=float("nan"))
    assert steps(tmp_path) == [0, 1]


def test_a_spike_needs_five_steps_of_history_and_learns_nothing_from_itself() -> None:
    spike = GradNormSpike(times=3)

    def see(norm: float) -> str | None:
        return spike([({"stage": "gradient", "micro": None}, {"grad_norm": norm})])

    assert [see(norm) for norm in (1.0, 50.0, 1.0, 1.0, 1.0)] == [None] * 5
    assert see(50.0) is not None
    assert see(2.0) is None


class Poisoned(torch.nn.Module):
    """Two layers; the second one's input is NaN where the data or the moment says so."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
        self.broken_once = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.nn.functional.dropout(self.first(x), 0.5)
        if self.broken_once:
            self.broken_once = False
            hidden = hidden * float("nan")
        return self.second(hidden).sqrt().sum() if x.sum() < 0 else self.second(hidden).sum()


@pytest.mark.parametrize("kind", ["transient", "persistent"])
def test_a_gradient_that_is_not_finite_is_run_again_and_named(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Poisoned()
    with torch.no_grad():
        model.second.weight.fill_(-1.0)
        model.second.bias.fill_(-100.0)
    recorder = Recorder(tmp_path, black_box=BlackBox(steps=2))
    recorder.note_model(0, "weights")
    batch = torch.full((1, 2), -1.0 if kind == "persistent" else 1.0)
    model.broken_once = kind == "transient"
    with recorder.step(4) as record:
        before = rng_state()
        model(batch).backward()
        gradients = {name: weight.grad.clone() for name, weight in model.named_parameters()}  # type: ignore[union-attr]
        drawn = torch.get_rng_state()
        incident = record.examine(model, lambda: model(batch), micro=3, rng=before)
    assert incident is not None
    assert incident["kind"] == kind
    assert "first.weight" in incident["parameters"]
    assert incident["checkpoint"] == "weights"
    assert incident["weights"].startswith(("xxh3:", "sha256:"))
    assert torch.equal(torch.get_rng_state(), drawn), "the trainer's own random state is as it was"
    for name, weight in model.named_parameters():
        assert torch.equal(weight.grad, gradients[name]) or weight.grad.isnan().any()  # type: ignore[union-attr]
    assert incidents(tmp_path)[0]["kind"] == kind
    (rerun,) = open_run(tmp_path).select(stage="modules", role="rerun")
    assert [ref.name for ref in rerun.tensors()] == ["first.output", "second.output", "loss"]


def test_finite_gradients_are_no_incident_and_a_failing_second_run_does_not_hurt_the_trainer(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    with Recorder(tmp_path).step(0) as record:
        model(torch.ones(1, 2)).sum().backward()
        assert record.examine(model) is None
        model.weight.grad[0, 0] = float("inf")  # type: ignore[index]
        incident = record.examine(model, lambda: model(torch.ones(1, 9)))
    assert incident is not None
    assert (incident["kind"], incident["parameters"]) == ("failed", ["weight"])
    assert model.weight.grad is not None
    assert incidents(tmp_path)[0]["kind"] == "failed"


@pytest.mark.long
@pytest.mark.parametrize("own", [False, True], ids=["no handler of its own", "the trainer's own handler"])
def test_sigterm_commits_the_ring_and_then_ends_the_program_as_before(own: bool, tmp_path: Path) -> None:
    handler = "signal.signal(signal.SIGTERM, lambda *_: (print('own', flush=True), os._exit(7)))" if own else ""
    script = f"""
import os, signal, time
import torch
from replay_core.recorder import BlackBox, Recorder
{handler}
recorder = Recorder({str(tmp_path)!r}, black_box=BlackBox(steps=2), asynchronous=True)
for step in range(4):
    with recorder.step(step) as record:
        record("loss", advantages=torch.ones(3))
with recorder.step(4) as record:
    record("loss", advantages=torch.ones(3))
    print("here", flush=True)
    time.sleep(60)
"""
    child = subprocess.Popen([*warm_python.command(), "-c", script], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "here\n"
    child.terminate()
    said, _ = child.communicate(timeout=60)
    assert (child.returncode, said) == ((7, "own\n") if own else (-signal.SIGTERM, ""))
    assert steps(tmp_path) == [3, 4]
    assert incidents(tmp_path)[0]["trigger"] == "SIGTERM"


@pytest.mark.parametrize(("value", "found"), [(float("nan"), ["non_finite"]), (1.0, [])])
def test_eight_bit_floats_are_looked_at_too(value: float, found: list[str], tmp_path: Path) -> None:
    run(tmp_path, BlackBox(steps=1), 1, scales=torch.tensor([value]).to(torch.float8_e4m3fn)).close()
    assert [incident["trigger"] for incident in incidents(tmp_path)] == found


def test_a_predicate_of_the_users_that_fails_stops_nobody_who_asked_to_go_on(tmp_path: Path) -> None:
    def mine(_records: Any) -> str | None:
        raise KeyError("kl")

    recorder = Recorder(tmp_path, black_box=BlackBox(triggers=[mine]), on_error="warn")
    with pytest.warns(RuntimeWarning, match="kl"), recorder.step(0) as record:
        record("loss", loss=1.0)
    assert ["kl" in lost.why for lost in recorder.lost] == [True]


@pytest.mark.parametrize("level", ["hash", "stats"])
def test_a_level_that_keeps_no_values_looks_at_them_all_the_same(level: str, tmp_path: Path) -> None:
    model = Poisoned()
    recorder = Recorder(tmp_path, level=level)
    recorder.note_model(0, "weights")
    with recorder.step(4) as record:
        model(torch.full((1, 2), float("nan"))).backward()
        incident = record.examine(model, lambda: model(torch.full((1, 2), float("nan"))), micro=3)
    recorder.close()
    assert incident is not None
    assert (incident["kind"], incident["first"]) == ("persistent", "first.output")
