"""With on_error "warn" nothing a trainer asks of its recorder ends the training; with "raise" it is told in words."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from replay_core.dumps import open_run
from replay_core.errors import DumpError, RecordExistsError, RequestError, RldbgError
from replay_core.recorder import BlackBox, Recorder, manifest
from replay_core.recorder.writer import commit
from tests.replay_core.recorder.disk_faults import Weights


def record(recorder: Recorder, *words: Any, **key: Any) -> Path | None:
    path: Path | None = None
    with recorder.step(0) as step:
        path = step(*words, **key)
    return path


def within(recorder: Recorder, what: str, *words: Any, **key: Any) -> None:
    with recorder.step(0) as step, getattr(step, what)(*words, **key):
        pass


MODEL = torch.nn.Sequential(torch.nn.Linear(2, 2))
#: What a trainer may ask by mistake.
MISTAKES: dict[str, Callable[[Recorder], Any]] = {
    "a step that is a float": lambda it: it.open_step(1.0)("loss", loss=1.0),  # type: ignore[arg-type]
    "a negative step": lambda it: it.open_step(-1)("loss", loss=1.0),
    "a step that is a text": lambda it: it.open_step("1")("loss", loss=1.0),  # type: ignore[arg-type]
    "no step": lambda it: it.open_step(None)("loss", loss=1.0),  # type: ignore[arg-type]
    "a negative rank": lambda it: it.open_step(0, rank=-1)("loss", loss=1.0),
    "a role of two words": lambda it: it.open_step(0, role="the actor")("loss", loss=1.0),
    "a role nobody would see": lambda it: it.open_step(0, role="checkpoints")("loss", loss=1.0),
    "a model of no step": lambda it: it.note_model("x", "weights"),  # type: ignore[arg-type]
    "a model of a step that is a float": lambda it: it.note_model(1.0, "weights"),  # type: ignore[arg-type]
    "a checkpoint of a step before": lambda it: [it.checkpoint(0, Weights()), it.checkpoint(0, Weights())],
    "a checkpoint of no step": lambda it: it.checkpoint("x", Weights()),  # type: ignore[arg-type]
    "a checkpoint of no model": lambda it: it.checkpoint(0, object()),
    "a fact that is no JSON": lambda it: it.note(seed=object()),
    "a fact that holds itself": lambda it: it.note(seed=_endless()),
    "a model without parameters": lambda it: it.note(model=3),
    "an incident that is none": lambda it: it.note(incident=3),  # type: ignore[arg-type]
    "a stage that is no text": lambda it: record(it, 3, loss=1.0),
    "a stage that is a list": lambda it: record(it, ["loss"], loss=1.0),
    "a stage nobody would see": lambda it: record(it, "checkpoints", loss=1.0),
    "fields that are no mapping": lambda it: record(it, "loss", 3),
    "a micro-batch that is a text": lambda it: record(it, "loss", micro="a"),
    "a record twice": lambda it: [record(it, "loss", loss=1.0), record(it, "loss", loss=1.0)],
    "modules no pattern chooses": lambda it: within(it, "modules", MODEL, "no such"),
    "modules of no pattern": lambda it: within(it, "modules", MODEL, "("),
    "modules of no model": lambda it: within(it, "modules", 3),
    "gradients of no model": lambda it: within(it, "accumulating", 3, micro=0),
    "parameters of no model": lambda it: it.open_step(0).params(3),
    "gradients now of no model": lambda it: it.open_step(0).gradients(3),
    "looking into no model": lambda it: it.open_step(0).examine(3),
    "the nearest of no step": lambda it: it.nearest_checkpoint("x"),  # type: ignore[arg-type]
}


def _endless() -> dict[str, Any]:
    holds: dict[str, Any] = {}
    holds["itself"] = holds
    return holds


@pytest.mark.parametrize("options", [{}, {"asynchronous": True, "max_keep": 1}], ids=["sync", "async, max_keep"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_costs_the_record_and_not_the_training(mistake: str, options: Any, tmp_path: Path) -> None:
    boxed = BlackBox(triggers=[]) if "looking" in mistake else None
    recorder = Recorder(tmp_path, on_error="warn", **options)
    recorder.black_box = boxed
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        MISTAKES[mistake](recorder)
        recorder.black_box = None
        with recorder.step(5) as step:
            step("loss", loss=1.0, micro=7)
        recorder.close()
    assert recorder.lost
    assert len([one for one in said if "training goes on" in str(one.message)]) == 1
    assert 5 in open_run(tmp_path).steps()


@pytest.mark.parametrize("mistake", ["a step that is a float", "a model of no step", "a stage nobody would see",
                                     "a role nobody would see", "a checkpoint of a step before"])  # fmt: skip
def test_with_raise_a_mistake_is_told_in_words(mistake: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError):
        MISTAKES[mistake](Recorder(tmp_path))


def test_what_a_trainer_raises_itself_is_its_own(tmp_path: Path) -> None:
    with warnings.catch_warnings(), Recorder(tmp_path, on_error="warn") as recorder:
        with pytest.raises(ZeroDivisionError), recorder.step(0) as step, step.modules(MODEL):  # noqa: PT012
            MODEL(torch.ones(1, 2))
            raise ZeroDivisionError
        assert recorder.lost == []


def test_a_warning_that_is_made_an_error_ends_no_trainer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        recorder = Recorder(tmp_path, on_error="warn")
        record(recorder, "loss", value=object())
    assert "training goes on" in capsys.readouterr().err


def test_a_disk_that_cannot_be_written_at_the_start_is_asked_again_later(tmp_path: Path) -> None:
    (tmp_path / "dump").write_text("in the way")
    with pytest.warns(RuntimeWarning, match="cannot be recorded into"):
        recorder = Recorder(tmp_path / "dump", on_error="warn")
    record(recorder, "loss", loss=1.0)
    assert len(recorder.lost) == 2
    (tmp_path / "dump").unlink()
    with recorder.step(1) as step:
        step("loss", loss=2.0)
    recorder.close()
    assert open_run(tmp_path / "dump").steps() == [1]


@contextlib.contextmanager
def held(lock: Path) -> Iterator[None]:
    """Another process holds the lock."""
    hold = "import fcntl, sys; f = open(sys.argv[1], 'a'); fcntl.flock(f, fcntl.LOCK_EX); print(flush=True); input()"
    other = subprocess.Popen(
        [sys.executable, "-c", hold, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None
    other.stdout.readline()
    try:
        yield
    finally:
        other.communicate("\n")


@pytest.mark.parametrize("on_error", ["warn", "raise"])
def test_a_manifest_that_another_locks_costs_the_note_once_waited_for(
    on_error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest, "LOCK_S", 0.3)
    recorder = Recorder(tmp_path, on_error=on_error)
    with held(tmp_path / ".manifest.lock"), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        began = time.monotonic()
        recorder.note(seed=1)
        waited_s = time.monotonic() - began
        for seed in range(20):
            recorder.note(seed=seed)
        assert time.monotonic() - began < waited_s + 0.25, "it is not waited for again"
        record(recorder, "loss", loss=1.0)
    assert 0.3 <= waited_s < 3
    assert len(said) == 1
    assert "locked by another process" in recorder.lost[0].why
    recorder.note(seed=7)
    recorder.close()
    assert json.loads((tmp_path / "manifest.json").read_text())["facts"]["seed"] == 7
    assert len(open_run(tmp_path).records) == 1


def test_a_slow_disk_is_told_before_it_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    with Recorder(tmp_path, asynchronous=True, queue_bytes=1000) as recorder, recorder.step(0) as step:
        write = recorder._write

        def waiting(*words: Any) -> None:
            gate.wait(20)
            write(*words)

        monkeypatch.setattr(recorder, "_write", waiting)
        told: list[bool] = []

        def warn(*_: Any, **__: Any) -> None:
            told.append(gate.is_set())
            gate.set()

        monkeypatch.setattr(warnings, "warn", warn)
        for micro in range(3):
            step("loss", values=torch.zeros(200), micro=micro)
    assert told == [False]
    assert recorder.pressure.written == 3


@pytest.mark.parametrize("ending", ["power fails", "the rename fails"])
def test_without_hard_links_a_write_that_is_interrupted_leaves_no_empty_record(
    ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    def interrupted(*_: Any) -> None:
        if ending == "the rename fails":
            raise OSError(5, "Input/output error")
        raise KeyboardInterrupt

    recorder = Recorder(tmp_path)
    monkeypatch.setattr("os.link", refused)
    with monkeypatch.context() as failing:
        failing.setattr("os.rename", interrupted)
        failing.setattr("os.replace", interrupted)
        with pytest.raises((DumpError, KeyboardInterrupt)):
            record(recorder, "loss", loss=1.0)
        assert not list(tmp_path.rglob("step_*"))
    record(recorder, "trajectory", tokens=[1])
    with pytest.raises(RecordExistsError):
        commit(tmp_path / "trajectory" / "step_000000_rank0.pt", lambda file: None)
    recorder.close()
    assert [one.key.stage for one in open_run(tmp_path).records] == ["trajectory"]
    assert not [path for path in tmp_path.rglob(".*") if path.is_file()]


def test_a_link_that_was_made_though_its_answer_was_lost_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    link = os.link

    def twice(*words: Any) -> None:
        link(*words)
        link(*words)

    monkeypatch.setattr("os.link", twice)
    record(Recorder(tmp_path), "loss", loss=1.0)
    assert len(open_run(tmp_path).records) == 1


def test_what_others_may_write_leads_a_recorder_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    foreign = tmp_path / "foreign"
    foreign.write_text("as it was")
    dump = tmp_path / "dump"
    recorder = Recorder(dump, on_error="warn")
    monkeypatch.setattr("replay_core.recorder.writer._numbers", iter([3, 3, 3, 3, 3]))
    (dump / "loss").mkdir()
    import os

    for planted in ("loss/.step_000000_rank0.pt", ".manifest.json"):
        (dump / f"{planted}.{os.getpid()}-3.tmp").symlink_to(foreign)
    for planted in ("index_rank0.jsonl", ".actor_rank0.lock"):
        (dump / planted).symlink_to(foreign)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        recorder.note(seed=1)
        record(recorder, "loss", loss=1.0)
        for planted in ("index_rank0.jsonl", ".actor_rank0.lock"):
            (dump / planted).unlink()
        record(recorder, "loss", loss=1.0)
    assert foreign.read_text() == "as it was"
    assert (dump / "loss" / "step_000000_rank0.pt").is_file()


@pytest.mark.parametrize("share", [False, True])
def test_files_are_their_owners_alone_unless_they_are_shared(share: bool, tmp_path: Path) -> None:
    import os

    before = os.umask(0o022)
    try:
        with Recorder(tmp_path / "dump", share=share) as recorder:
            recorder.checkpoint(0, Weights())
            record(recorder, "loss", loss=1.0)
    finally:
        os.umask(before)
    found = {path.relative_to(tmp_path).as_posix(): path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
    files = {"dump/manifest.json", "dump/index_rank0.jsonl", "dump/loss/step_000000_rank0.pt"}
    assert {name: found[name] for name in files} == dict.fromkeys(files, 0o644 if share else 0o600)
    assert found["dump"] == found["dump/checkpoints/step_000000"] == (0o755 if share else 0o700)


def test_a_recorder_that_is_closed_leaves_its_dump_and_nothing_else(tmp_path: Path) -> None:
    left = tmp_path / "checkpoints" / ".step_000009.0a1b2c3d.tmp"
    with Recorder(tmp_path) as recorder:
        recorder.checkpoint(0, Weights())
        record(recorder, "loss", loss=1.0)
    left.mkdir()
    left.with_suffix(".lock").touch()
    (tmp_path / ".manifest.json.7-1.tmp").touch()
    (tmp_path / ".manifest.lock").touch()
    again = Recorder(tmp_path)
    again.note(seed=1)
    again.close()
    assert [path for path in tmp_path.rglob("*") if path.name.startswith(".")] == []


def test_another_recorders_checkpoint_is_left_alone_while_it_is_saved(tmp_path: Path) -> None:
    class Slow(Weights):
        def save_pretrained(self, directory: Path, safe_serialization: bool) -> None:
            super().save_pretrained(directory, safe_serialization)
            Recorder(tmp_path).close()

    recorder = Recorder(tmp_path)
    recorder.checkpoint(0, Slow())
    recorder.close()
    assert (tmp_path / "checkpoints" / "step_000000" / "model.safetensors").is_file()


def test_a_forked_child_that_ends_lets_go_of_none_of_its_parents_locks(tmp_path: Path) -> None:
    import os

    recorder = Recorder(tmp_path)
    record(recorder, "loss", loss=1.0)
    child = os.fork()
    if child == 0:
        recorder._claims.popitem()[1].release()
        os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(RldbgError, match="another recorder"):
        record(Recorder(tmp_path), "trajectory", tokens=[1])
    recorder.close()
    record(Recorder(tmp_path), "trajectory", tokens=[1])
