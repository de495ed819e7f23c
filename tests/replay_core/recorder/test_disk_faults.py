"""Every call a recorder makes of the operating system fails, hangs or is slow in turn (`disk_faults.c` is preloaded).

With on_error "warn" the trainer takes every step; with "raise" it is told in words; and in either case what the trainer
was not told is lost is on the disk, whole.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from replay_core.dumps import open_run
from replay_core.pages import array
from tests.replay_core.recorder import disk_faults

HERE = Path(__file__).parent
#: What a case is asked; the answer of `disk_faults.py`.
Ask = Callable[..., dict[str, Any]]
FOR_EVER = 3600.0
#: name -> errno, seconds.
FAULTS = {
    "full": (errno.ENOSPC, 0.0),
    "broken": (errno.EIO, 0.0),
    "refused": (errno.EPERM, 0.0),
    "read-only": (errno.EROFS, 0.0),
    "no more files": (errno.EMFILE, 0.0),
    "over quota": (errno.EDQUOT, 0.0),
    "stale": (errno.ESTALE, 0.0),
    "hangs": (0, FOR_EVER),
    "hangs, then fails": (errno.EIO, 0.6),
    "slow": (0, 0.05),
}


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    if sys.platform != "linux" or shutil.which("cc") is None:
        pytest.skip("a C compiler and Linux are needed to preload a failing disk")
    folder = tmp_path_factory.mktemp("faults")
    library = folder / "faults.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, HERE / "disk_faults.c", "-ldl"], check=True)
    root = str(HERE.parents[2])
    environment = {**os.environ, "LD_PRELOAD": str(library), "PYTHONPATH": root}
    driver = subprocess.Popen(
        [sys.executable, str(HERE / "disk_faults.py"), str(folder / "warm")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip
    numbers = itertools.count()

    def asked(options: dict[str, Any], first: int = -1, many: int = 0, fault: str = "slow") -> dict[str, Any]:
        number, wait_s = FAULTS[fault]
        directory = folder / f"dump{next(numbers)}"
        case = {"directory": str(directory), "options": options, "first": first, "many": many}
        assert driver.stdin is not None
        assert driver.stdout is not None
        driver.stdin.write(json.dumps({**case, "errno": number, "wait_s": wait_s}) + "\n")
        driver.stdin.flush()
        answer: dict[str, Any] = json.loads(driver.stdout.readline())
        check(directory, answer, f"call {first} and {many - 1} more, {fault}, {options}: {answer}")
        # What the trainer saw is looked at, the files are not needed any more.
        shutil.rmtree(directory, ignore_errors=True)
        return answer

    yield asked
    driver.kill()
    driver.communicate()


def check(directory: Path, answer: dict[str, Any], case: str) -> None:
    """What was promised is there, and nothing is half there."""
    assert "hung" not in answer, case
    assert not (answer["raised"] or "").startswith("unclear"), case
    manifest = directory / "manifest.json"
    if not manifest.exists():
        assert answer["kept"] == [], case
        return
    content = json.loads(manifest.read_bytes())
    for reference in content["models"].values():
        assert (directory / reference / "model.safetensors").read_text() == "weights", case
    run = open_run(directory)
    found = []
    for record in run.records:
        fields = {ref.name: ref for ref in record.tensors()}
        values = array(fields["values"])
        assert values.shape == (disk_faults.SIZE,), case
        assert (values == record.key.step).all(), case
        found.append(f"step {record.key.step}")
    assert set(answer["kept"]) <= set(found), case
    said = ("was lost", "holds no record")
    assert [problem for problem in run.problems if not any(words in problem.what for words in said)] == [], case


def every_call(ask: Ask, options: dict[str, Any], fault: str, *, stays: bool, by: int = 1) -> list[dict[str, Any]]:
    calls = ask(options, fault=fault)["calls"]
    assert calls > 20, "the shim sees the recorder's calls"
    return [ask(options, first, 10_000 if stays else 1, fault) for first in range(0, calls, by)]


def options(form: str, asynchronous: bool, on_error: str) -> dict[str, Any]:
    return {"format": form, "asynchronous": asynchronous, "on_error": on_error, "patience_s": 0.3}


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "stays", "asynchronous", "on_error"),
    [("full", True, False, "warn"), ("broken", False, True, "warn"), ("refused", False, False, "raise")],
)
def test_a_trainer_outlives_a_disk_that_fails(
    fault: str, stays: bool, asynchronous: bool, on_error: str, ask: Ask
) -> None:
    answers = every_call(ask, options("pt", asynchronous, on_error), fault, stays=stays, by=7)
    if on_error == "warn":
        assert {(answer["steps"], answer["raised"]) for answer in answers} == {(disk_faults.STEPS, None)}
    else:
        assert sum(answer["raised"] is not None for answer in answers) > 2


@pytest.mark.long
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("on_error", ["warn", "raise"])
def test_a_disk_that_hangs_is_given_up(on_error: str, asynchronous: bool, ask: Ask) -> None:
    asked = options("pt", asynchronous, on_error)
    calls = ask(asked, fault="hangs")["calls"]
    for first in (0, 2 * calls // 3):
        answer = ask(asked, first, 10_000, "hangs")
        if on_error == "warn":
            assert (answer["steps"], answer["raised"]) == (disk_faults.STEPS, None)
            assert answer["lost"]
        else:
            assert "the disk does not answer" in answer["raised"]


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("form", ["pt", "jsonl", "safetensors"])
@pytest.mark.parametrize("on_error", ["warn", "raise"])
def test_every_fault_at_calls_of_every_kind(on_error: str, form: str, asynchronous: bool, fault: str, ask: Ask) -> None:
    for stays in (False, True):
        # Every call in turn of one form takes half an hour; the calls of the three forms are the same.
        answers = every_call(ask, options(form, asynchronous, on_error), fault, stays=stays, by=11)
        if on_error == "warn" or fault == "slow":
            assert {(answer["steps"], answer["raised"]) for answer in answers} == {(disk_faults.STEPS, None)}
        assert fault != "slow" or not any(answer["lost"] for answer in answers)
