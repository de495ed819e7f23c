from __future__ import annotations

import math
import sys

import pytest

from replay_core.executors import wire
from replay_core.jobs import Job


def test_a_message_is_one_line_and_comes_back_equal() -> None:
    line = wire.encode({"id": 3, "result": {"text": "two\nlines, naïve", "none": None}})
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    assert wire.decode(line) == {"id": 3, "result": {"text": "two\nlines, naïve", "none": None}}


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_number_json_cannot_carry_never_reaches_the_wire(number: float) -> None:
    with pytest.raises(ValueError, match="JSON"):
        wire.encode({"id": 1, "result": {"value": number}})


@pytest.mark.parametrize("line", [b"", b"hello\n", b"[1]\n", b'{"event": "log"}\n', b"\xff\xfe\n"])
def test_a_line_that_is_no_message_is_none(line: bytes) -> None:
    assert wire.decode(line) is None


GARBLED = [
    b"no message",
    b'{"id": 1, "event": "none"}',
    b'{"id": 1, "event": "progress", "done": 1}',
    b'{"id": 1, "event": "sample", "elapsed_s": "x", "host_mib": 1, "gpu_mib": null, "cpu_percent": 1}',
    b'{"id": 1, "event": "progress", "done": 1, "what": "x"}',
    b'{"id": 1, "event": ["log"], "text": "x"}',
    b'{"id": 1}',
    b'{"id": 1, "error": "text"}',
    b'{"id": [1], "result": {}}',
    b'{"id": true, "result": {}}',
    b'{"id": 1, "result": ' + b"[" * 100_000,
]


@pytest.mark.parametrize("line", GARBLED, ids=lambda line: line[:40].decode())
def test_a_line_that_is_neither_event_nor_answer_tells_nothing(line: bytes) -> None:
    assert wire.told(line) is None


def test_a_lone_surrogate_crosses_the_pipe() -> None:
    line = wire.encode({"id": 1, "result": {"name": "a\ud800b"}})
    assert wire.told(line) == (1, {"id": 1, "result": {"name": "a\ud800b"}})


@pytest.mark.parametrize("number", ["²", "٣", "9" * 30, "", "-1"])
def test_an_end_mark_of_no_number_ends_nothing(number: str) -> None:
    mark = wire.end_mark(4).replace("4", number)
    assert wire.read_log(mark.encode())[1] is None


def test_an_end_mark_glued_to_a_line_without_newline_keeps_the_line() -> None:
    assert wire.read_log(b"no newline" + wire.end_mark(4).encode()) == ("no newline", 4)
    assert wire.read_log(wire.end_mark(4).encode()) == (None, 4)
    assert wire.read_log(b"plain \xff\n") == ("plain \ufffd", None)


def test_torch_jobs_go_to_a_replayer_and_the_rest_to_a_reader() -> None:
    assert wire.role_of(Job("replay_cell")) == wire.REPLAYER
    assert wire.role_of(Job("compare")) == wire.READER


def test_a_replayer_gets_sleeping_threads_and_an_explicit_thread_count() -> None:
    assert wire.child_environment(wire.REPLAYER, {})["OMP_WAIT_POLICY"] == "PASSIVE"
    assert wire.child_environment(wire.REPLAYER, {})["OMP_NUM_THREADS"] == str(wire.usable_cores())
    assert wire.child_environment(wire.REPLAYER, {"OMP_NUM_THREADS": "3"})["OMP_NUM_THREADS"] == "3"


def test_a_child_never_imports_from_the_working_directory_by_accident(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", ["", "/somewhere"])
    code = wire.child_command(wire.READER)[2]
    assert "/somewhere" in code
    assert "''" not in code


def test_a_death_names_the_signal_the_job_and_the_last_lines() -> None:
    error = wire.death(["replay_cell"], -6, ["one", "two"])
    assert "SIGABRT (6)" in error.message
    assert error.expected == "an answer to replay_cell"
    assert "| one" in str(error)
    assert "| two" in str(error)
    assert "out-of-memory" in str(wire.death(["replay_cell"], -9, []))
    assert "code 3" in str(wire.death([], 3, []))
    assert "stopped answering" in str(wire.death([], None, []))
