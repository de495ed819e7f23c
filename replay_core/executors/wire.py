"""What a parent and its child agree on: JSON lines, the command that starts a child, how a death is told.

    parent -> child   {"id": 1, "job": "inspect", "params": {...}}     {"id": 1, "cancel": true}
    child -> parent   {"id": 1, "event": "progress", ...}              {"id": 1, "result": {...}}  or "error"

The wire is the child's stdin and the stdout it was born with. What the job prints goes to the child's
stderr, which the parent turns into LogLine events; before each answer the child writes an end mark
there, so every printed line is delivered before the answer is.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from replay_core.errors import ChildDiedError, ChildHungError
from replay_core.jobs import REPLAYER_JOBS, Event, Job, event_from_mapping

READER = "reader"
REPLAYER = "replayer"

#: How many of a dead child's last lines its error quotes.
TAIL_LINES = 8
#: And of each of them; a line may be of any length.
TAIL_LETTERS = 400

#: Opens the end mark on stderr: a control character that no log line starts with.
_END_MARK = "\x1e\x1erldbg-end "

#: The child sees the modules its parent sees, but never the working directory by accident: a dump
#: folder that holds a `json.py` must not be imported.
_START = "import sys; sys.path[:] = {path!r}\n{code}"
_LOOP = "from replay_core.__main__ import main; main()"

_LIKELY = {
    "SIGKILL": "nothing in the process can raise this: most often the kernel's out-of-memory killer "
    "(`dmesg | tail` names the process)",
    "SIGABRT": "a library gave up: the lines above the abort say which",
    "SIGSEGV": "native code touched memory it does not own: the stack above names the Python line that called it",
    "SIGBUS": "a mapped file shrank while it was read, or /dev/shm is full",
    "SIGILL": "a library was built for another processor",
}


def encode(message: Mapping[str, Any]) -> bytes:
    """One line of the wire.

    Raises:
        ValueError: a number is NaN or infinite; documents spell those as strings.
        TypeError: something in the message is not JSON.
    """
    text = json.dumps(message, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # A lone surrogate, which a file's names and texts may hold, crosses the pipe as it is.
    return text.encode("utf-8", "surrogatepass") + b"\n"


def decode(line: bytes) -> dict[str, Any] | None:
    """The message of one line, or None when the line is not a message."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) and type(message.get("id")) is int else None


def told(line: bytes) -> tuple[int, Event | dict[str, Any]] | None:
    """Of a child's line: which job it is about, and the event or answer. None where it is neither.

    Nothing but messages goes over the wire, so that whoever reads such a line is told by a broken child.
    """
    message = decode(line)
    if message is None:
        return None
    try:
        if "event" in message:
            return message["id"], event_from_mapping(message)
    except ValueError:
        return None
    is_answer = "result" in message or isinstance(message.get("error"), dict)
    return (message["id"], message) if is_answer else None


def garbled(jobs: Iterable[str], line: bytes) -> ChildDiedError:
    """The error for a child that said what is no message."""
    return ChildDiedError(
        "the child process said what is no message, so it was ended",
        expected=f"an event of or an answer to {', '.join(jobs) or 'no job'}",
        found=repr(line[:80]),
    )


def request(number: int, job: Job) -> bytes:
    return encode({"id": number, "job": job.kind, "params": dict(job.params)})


def cancellation(number: int) -> bytes:
    return encode({"id": number, "cancel": True})


def end_mark(number: int) -> str:
    """What the child writes to stderr once everything a job printed has been flushed there."""
    return f"{_END_MARK}{number}\n"


def read_log(line: bytes) -> tuple[str | None, int | None]:
    """A stderr line as (text to log or None, number of the job whose output is complete or None)."""
    text = line.decode("utf-8", "replace").rstrip("\r\n")
    printed, mark, number = text.partition(_END_MARK)
    if not mark:
        return text, None
    return printed or None, int(number) if number.isdecimal() and number.isascii() and len(number) < 19 else None


def role_of(job: Job) -> str:
    """Which kind of child runs a job: a light reader, or a replayer that may import torch."""
    return REPLAYER if job.kind in REPLAYER_JOBS else READER


def child_command(role: str, code: str = _LOOP) -> list[str]:
    """The command that starts a child of this interpreter. `code` is what it runs in place of the job loop."""
    root = str(Path(__file__).resolve().parents[2])
    path = [str(Path(entry).resolve()) for entry in sys.path if entry]
    if root not in path:
        path.append(root)
    command = [sys.executable, "-c", _START.format(path=path, code=code), role]
    # PR_SET_PDEATHSIG fires when the *thread* that forked ends, so only the main thread may ask for it.
    if threading.current_thread() is threading.main_thread():
        command.append("--die-with-parent")
    return command


def child_environment(role: str, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a child: an explicit thread count, threads that sleep while they wait, UTF-8."""
    environment = dict(os.environ if base is None else base)
    environment["PYTHONUTF8"] = "1"
    environment["PYTHONUNBUFFERED"] = "1"
    if role == READER:
        # Readers stream; BLAS buffers for every core would only count against their memory limit.
        environment["OMP_NUM_THREADS"] = environment["OPENBLAS_NUM_THREADS"] = "1"
        return environment
    environment.setdefault("OMP_NUM_THREADS", str(usable_cores()))
    # Spinning threads beside a busy process ran 10-25 times slower than sleeping ones.
    environment["OMP_WAIT_POLICY"] = "PASSIVE"
    environment.setdefault("TOKENIZERS_PARALLELISM", "false")
    return environment


def usable_cores() -> int:
    """Cores this process may run on (its affinity mask where the system has one)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def kill_group(pid: int) -> None:
    """End a child started in its own session, and every process it started."""
    if pid <= 1:  # our own group, or everybody's
        return
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def death(jobs: Iterable[str], status: int | None, tail: Sequence[str]) -> ChildDiedError:
    """The error for a child that ended with `status` (as Popen.returncode: negative is a signal) unasked."""
    work = ", ".join(jobs) or "no job"
    if status is None:
        ended, likely = "stopped answering", None
    elif status < 0:
        name = _signal_name(-status)
        ended, likely = f"was killed by {name} ({-status})", _LIKELY.get(name)
    else:
        ended, likely = f"exited with code {status}", "its last lines say why"
    quoted = _quoted(tail)
    return ChildDiedError(
        f"the child process {ended} before it answered",
        expected=f"an answer to {work}",
        found=f"its last lines:{quoted}" if quoted else "it printed nothing",
        hint=likely,
    )


def overdue(job: str, limit_s: float, tail: Sequence[str]) -> ChildHungError:
    """The error for a child that was ended because its job took longer than it may."""
    quoted = _quoted(tail)
    return ChildHungError(
        f"the child process hung: no answer within {limit_s:g} s, so it was ended",
        expected=f"an answer to {job}",
        found=f"its last lines:{quoted}" if quoted else "it printed nothing",
        hint="a longer --time-limit, if it was only slow",
    )


def _quoted(tail: Sequence[str]) -> str:
    return "".join(f"\n            | {line[:TAIL_LETTERS]}" for line in tail[-TAIL_LINES:])


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
