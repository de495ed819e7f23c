from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from replay_core.errors import ChildDiedError
from replay_core.executors import forking, wire
from replay_core.executors.child import ChildRunner, _Child
from replay_core.jobs import IMPORTING, Event, Job, LogLine, Progress
from tests.replay_core.executors.conftest import PERFORM
from tests.replay_core.executors.test_child import gone

pytestmark = pytest.mark.skipif(not forking.is_possible(), reason="children are forked on Linux alone")

#: An origin whose imports are a line that is printed and a list that is filled.
LOOP = (
    PERFORM
    + """
def prepare():
    print("imported", flush=True)
    PREPARED.append(os.getpid())
main(perform, prepare=prepare)
"""
)
KINDS = ("pid", "prepared", "abort", "exit", "kill", "sleep", "echo", "environment")


def command(imports: str = "PREPARED.append(os.getpid())") -> Callable[[str], list[str]]:
    loop = LOOP.replace("PREPARED.append(os.getpid())", imports)
    return lambda role: [*wire.child_command(role, loop), "--origin"]


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Iterator[ChildRunner]:
    monkeypatch.setattr(forking, "command", command())
    monkeypatch.setattr(forking, "JOBS", frozenset(KINDS))
    with ChildRunner(time_limit_s=60) as fresh:
        yield fresh


def test_every_job_has_a_process_of_its_own_that_begins_with_the_imports_of_one(runner: ChildRunner) -> None:
    pids = [runner.run(Job("pid")) for _ in range(2)]
    assert pids[0]["pid"] != pids[1]["pid"]
    assert all(said["session"] == said["pid"] for said in pids), "its own session: Ctrl-C is the parent's"
    prepared = [runner.run(Job("prepared"))["prepared"] for _ in range(2)]
    assert prepared[0] == prepared[1]
    assert len(prepared[0]) == 1
    assert all(gone(said["pid"]) for said in pids)
    runner.close()
    assert gone(prepared[0][0])


def test_it_steps_back_once_and_its_session_with_it(runner: ChildRunner) -> None:
    said = runner.run(Job("pid"))
    assert said["nice"] == min(19, os.nice(0) + 5)
    if said["autogroup"] is not None:
        assert said["autogroup"].split()[-2:] == ["nice", str(said["nice"])]


def test_what_is_printed_while_importing_is_in_the_log_of_the_job_that_waits(runner: ChildRunner) -> None:
    events: list[Event] = []
    runner.run(Job("echo"), events.append)
    assert events == [IMPORTING, LogLine("imported")]
    events.clear()
    runner.run(Job("echo"), events.append)
    assert events == []


@pytest.mark.parametrize(("kind", "tells"), [("abort", "SIGABRT"), ("exit", "code 7"), ("kill", "SIGKILL")])
def test_a_child_that_dies_names_how_and_its_last_lines(runner: ChildRunner, kind: str, tells: str) -> None:
    before = runner.run(Job("prepared"))["prepared"]
    with pytest.raises(ChildDiedError, match=tells) as raised:
        runner.run(Job(kind))
    if kind == "abort":
        assert "in perform" in str(raised.value), "faulthandler's stack is among the last lines"
    if kind == "exit":
        assert "giving up" in str(raised.value)
    assert runner.run(Job("prepared"))["prepared"] == before, "the imports outlive it"


def test_where_the_imports_process_is_killed_the_job_says_so_and_the_next_imports_anew(runner: ChildRunner) -> None:
    before = runner.run(Job("prepared"))["prepared"]

    def kill(event: Event) -> None:
        if isinstance(event, Progress):
            os.kill(before[0], signal.SIGKILL)

    with pytest.raises(ChildDiedError, match="SIGKILL"):
        runner.run(Job("sleep"), kill)
    assert runner.run(Job("prepared"))["prepared"] != before


def test_a_job_past_its_time_limit_is_ended_and_the_next_runs(runner: ChildRunner) -> None:
    before = runner.run(Job("prepared"))["prepared"]
    pids: list[int | None] = []
    runner.time_limit_s = 0.5
    with pytest.raises(ChildDiedError, match=r"hung: no answer within 0\.5 s"):
        runner.run(Job("sleep"), lambda _: pids.append(runner.pid))
    assert gone(pids[-1] or 0)
    runner.time_limit_s = 60
    assert runner.run(Job("prepared"))["prepared"] == before


def test_an_import_past_the_time_limit_is_ended(runner: ChildRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forking, "command", command("time.sleep(60)"))
    runner.time_limit_s = 3
    with pytest.raises(ChildDiedError, match="no answer within 3 s"):
        runner.run(Job("echo"))


def test_an_import_that_crashes_is_told_as_the_childs_end(runner: ChildRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forking, "command", command("os.abort()"))
    with pytest.raises(ChildDiedError, match="SIGABRT") as raised:
        runner.run(Job("echo"))
    assert "in prepare" in str(raised.value), "faulthandler's stack is among the last lines"


def test_a_child_whose_end_was_not_heard_is_not_taken_for_the_next(
    runner: ChildRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_event: Event) -> None:
        raise KeyboardInterrupt

    left: list[_Child] = []

    def again(child: _Child) -> None:
        left.append(child)
        raise KeyboardInterrupt

    first = runner.run(Job("pid"))["pid"]
    with monkeypatch.context() as patch:
        patch.setattr("replay_core.executors.child._Child.kill", again)
        with pytest.raises(KeyboardInterrupt):
            runner.run(Job("sleep"), interrupted)
    said = runner.run(Job("pid"))
    assert said["pid"] == said["session"] != first
    left[0].kill()


def test_where_a_kernel_has_no_file_for_a_process_nothing_is_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_pid: int) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", refused)
    forking.is_possible.cache_clear()
    assert not forking.is_possible()
    monkeypatch.undo()
    forking.is_possible.cache_clear()
    assert forking.is_possible()


def test_a_child_starts_anew_where_an_import_touched_a_device(
    runner: ChildRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A stand-in for CUDA's file that stays open: what counts is that the child's interpreter is another one.
    held = "from replay_core.executors import forking; forking._holds_a_device = lambda: True"
    monkeypatch.setattr(forking, "command", command(held))
    with pytest.raises(Exception, match="no job"):
        runner.run(Job("prepared"))


def test_all_of_them_end_with_their_parent(tmp_path: object) -> None:
    parent = (
        "import os\n"
        "from replay_core.executors import forking\n"
        "from replay_core.executors.child import ChildRunner\n"
        "from replay_core.jobs import Job, Progress\n"
        f"forking.JOBS, words = {KINDS!r}, {command()(wire.REPLAYER)!r}\n"
        "forking.command = lambda role: words\n"
        "runner = ChildRunner()\n"
        "print(*runner.run(Job('prepared'))['prepared'], flush=True)\n"
        "def leave(event):\n"
        "    if isinstance(event, Progress) and event.what == 'asleep':\n"
        "        print(runner.pid, flush=True)\n"
        "        os._exit(0)\n"
        "runner.run(Job('sleep'), leave)\n"
    )
    answer = subprocess.run([sys.executable, "-c", parent], capture_output=True, text=True, timeout=60, check=True)
    origin, child = map(int, answer.stdout.split())
    assert gone(child)
    assert gone(origin)
