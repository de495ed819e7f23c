from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from replay_core.errors import ChildDiedError, ExitCode, RldbgError, SelectionError
from replay_core.executors import wire
from replay_core.executors.child import ChildRunner
from replay_core.jobs import Event, Job, LogLine, Partial, Progress, Sample

Command = Callable[[str], list[str]]


@pytest.fixture
def runner(command: Command) -> Iterator[ChildRunner]:
    with ChildRunner(warm=True, command=command) as warm:
        yield warm


def gone(pid: int, within_s: float = 60) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.02)
    return False


def test_events_arrive_in_order_before_the_answer(runner: ChildRunner) -> None:
    events: list[Event] = []
    assert runner.run(Job("progress"), events.append) == {}
    piece: Any = {"first": "x"}
    assert events == [Progress(0, 3, "rows"), Progress(1, 3, "rows"), Progress(2, 3, "rows"), Partial(piece)]


def test_a_document_of_megabytes_crosses_in_one_line(runner: ChildRunner) -> None:
    events: list[Event] = []
    runner.run(Job("progress", {"size": 5_000_000}), events.append)
    assert isinstance(events[-1], Partial)
    piece: Any = events[-1].document
    assert len(piece["first"]) == 5_000_000


def test_what_a_job_prints_is_logged_and_never_on_the_wire(runner: ChildRunner) -> None:
    events: list[Event] = []
    assert runner.run(Job("print"), events.append) == {"read": ""}
    assert events == [
        LogLine("from print"),
        LogLine("from file descriptor 1"),
        LogLine("from a grandchild"),
        LogLine("no newline"),
    ]


def test_an_error_comes_out_as_the_class_it_went_in(runner: ChildRunner) -> None:
    with pytest.raises(SelectionError) as raised:
        runner.run(Job("refuse"))
    assert raised.value.hint == "rldbg ls dump"
    assert runner.run(Job("echo", {"still": "alive"})) == {"params": {"still": "alive"}}


def test_an_unexpected_exception_is_an_error_with_a_crash_file_and_no_variables(runner: ChildRunner) -> None:
    with pytest.raises(RldbgError, match="ValueError: a plain mistake") as raised:
        runner.run(Job("fail"))
    assert raised.value.exit_code == ExitCode.INTERNAL
    crash = Path(str(raised.value.file))
    assert "in perform" in crash.read_text()
    assert crash.stat().st_mode & 0o077 == 0
    crash.unlink()


def test_a_document_that_holds_nan_is_an_error_of_its_job(runner: ChildRunner) -> None:
    with pytest.raises(RldbgError, match="nan stopped on ValueError") as raised:
        runner.run(Job("nan"))
    Path(str(raised.value.file)).unlink()
    assert runner.run(Job("echo")) == {"params": {}}


@pytest.mark.parametrize(("kind", "tells"), [("abort", "SIGABRT"), ("exit", "code 7"), ("kill", "SIGKILL")])
def test_a_child_that_dies_names_how_and_its_last_lines(runner: ChildRunner, kind: str, tells: str) -> None:
    with pytest.raises(ChildDiedError, match=tells) as raised:
        runner.run(Job(kind))
    assert raised.value.expected == f"an answer to {kind}"
    if kind == "abort":
        assert "in perform" in str(raised.value), "faulthandler's stack is among the last lines"
    if kind == "exit":
        assert "giving up" in str(raised.value)
    assert runner.run(Job("echo")) == {"params": {}}, "the next job gets a new child"


def test_a_fresh_runner_uses_a_new_process_for_every_job(command: Command) -> None:
    with ChildRunner(command=command) as runner:
        first, second = runner.run(Job("pid")), runner.run(Job("pid"))
    assert first["pid"] != second["pid"]
    assert gone(first["pid"])
    assert gone(second["pid"])


def test_a_warm_runner_keeps_its_process_until_closed(runner: ChildRunner) -> None:
    first, second = runner.run(Job("pid")), runner.run(Job("pid"))
    assert first["pid"] == second["pid"] == runner.pid
    assert first["session"] == first["pid"], "its own session: Ctrl-C is the parent's"
    assert first["nice"] >= min(19, os.nice(0) + 5)
    runner.close()
    assert gone(first["pid"])


def test_a_childs_session_steps_back_as_the_child_does(runner: ChildRunner) -> None:
    # Linux shares the processor out between sessions first: a nice value alone would count only within the child's own.
    said = runner.run(Job("pid"))
    if said["autogroup"] is None:
        pytest.skip("this kernel has no autogroups")
    assert said["autogroup"].split()[-2:] == ["nice", str(said["nice"])]


def test_readers_are_limited_and_replayers_get_quiet_threads(command: Command, tmp_path: Path) -> None:
    with ChildRunner(command=command) as runner:
        reader = runner.run(Job("environment"))
    assert reader["limit"] >= 2 << 30
    assert reader["OMP_NUM_THREADS"] == "1"


def test_a_torch_job_is_sampled_while_it_runs(runner: ChildRunner) -> None:
    events: list[Event] = []
    runner.run(Job("replay_cell", {"seconds": 1.3}), events.append)
    samples = [event for event in events if isinstance(event, Sample)]
    assert len(samples) == 2, "one per second and one at the end"
    assert samples[-1].elapsed_s >= 1.3
    assert samples[-1].host_mib > 1


def test_a_listener_that_raises_ends_the_child(runner: ChildRunner) -> None:
    def interrupted(event: Event) -> None:
        if isinstance(event, Progress):
            raise KeyboardInterrupt

    pid = runner.run(Job("pid"))["pid"]
    with pytest.raises(KeyboardInterrupt):
        runner.run(Job("sleep"), interrupted)
    assert gone(pid)


def test_a_killed_child_takes_what_it_started_along(runner: ChildRunner) -> None:
    found: list[int] = []

    def interrupted(event: Event) -> None:
        if isinstance(event, LogLine):
            found.append(int(event.text.split()[1]))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runner.run(Job("sleep", {"grandchild": True}), interrupted)
    assert gone(found[0])


def test_a_child_leaves_when_its_parent_dies(command: Command) -> None:
    parent = (
        "import os, sys\n"
        "from replay_core.executors.child import ChildRunner\n"
        "from replay_core.jobs import Job, Progress\n"
        f"runner = ChildRunner(warm=True, command=lambda role: {command(wire.READER)!r}[:3] + [role])\n"
        "print(runner.run(Job('pid'))['pid'], flush=True)\n"
        "runner.run(Job('sleep'), lambda event: os._exit(0))\n"
    )
    answer = subprocess.run([sys.executable, "-c", parent], capture_output=True, text=True, timeout=60, check=True)
    assert gone(int(answer.stdout)), "stdin EOF ends it even in the middle of a job"


def test_a_job_past_its_time_limit_is_ended_with_its_child_and_the_next_job_runs(command: Command) -> None:
    events: list[Event] = []
    with ChildRunner(warm=True, command=command, time_limit_s=20) as runner:
        pid = runner.run(Job("pid"))["pid"]
        runner.time_limit_s = 0.5
        with pytest.raises(ChildDiedError, match=r"hung: no answer within 0\.5 s"):
            runner.run(Job("sleep"), events.append)
        assert gone(pid)
        runner.time_limit_s = 20
        assert runner.run(Job("pid"))["pid"] != pid
    assert Progress(0, None, "asleep") in events


@pytest.mark.long
def test_a_job_that_never_stops_talking_is_overdue_as_well(command: Command) -> None:
    with (
        ChildRunner(command=command, time_limit_s=2) as runner,
        pytest.raises(ChildDiedError, match="no answer within 2 s"),
    ):
        runner.run(Job("flood"))
