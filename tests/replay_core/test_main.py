from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "replay_core", "reader"]
    with subprocess.Popen(command, stdin=-1, stdout=-1, stderr=-1, start_new_session=True) as process:
        yield process
        process.kill()


def test_the_real_loop_skips_garbage_answers_and_leaves_at_end_of_input(child: subprocess.Popen[bytes]) -> None:
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(b"not json\n" + json.dumps({"id": 5, "job": "no such job", "params": {}}).encode() + b"\n")
    child.stdin.flush()
    answer = json.loads(child.stdout.readline())
    assert answer["id"] == 5
    assert answer["error"]["type"] == "RequestError"
    child.stdin.close()
    assert child.wait(10) in (0, -9), "it ends itself, with whatever it started"
    assert child.stdout.read() == b""


def test_a_cancel_for_a_job_that_is_over_is_ignored(child: subprocess.Popen[bytes]) -> None:
    assert child.stdin is not None
    assert child.stdout is not None
    for number in (1, 2):
        child.stdin.write(json.dumps({"id": number, "job": "no such job"}).encode() + b"\n")
        child.stdin.flush()
        assert json.loads(child.stdout.readline())["id"] == number
        child.stdin.write(json.dumps({"id": number, "cancel": True}).encode() + b"\n")
        child.stdin.flush()


def test_the_loop_itself_imports_neither_torch_nor_numpy() -> None:
    code = "import sys, replay_core.__main__; sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
