"""A Python that has imported what scripts import already, forked for every script: many of a worker import it once.

`command()` is used like the path of an interpreter: `[*command(), "train.py", …]`, with `-c` and `-m` too. A script
sees the environment, the working directory, the streams and the signals it would see, sitecustomize runs, and torch is
not in sys.modules until the script imports it; an optimizer's first step finds torch's compiler loaded, and a model
transformers. What concerns the start of an interpreter, or starts others, is tested with `sys.executable`.

    test ── client (this file, a few ms) ══ socket ══ server ── fork: keeper ── fork: the script
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from typing import Any

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@functools.cache
def command() -> list[str]:
    """The words that stand for the interpreter. The first worker that asks starts a server; it ends with the run."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    folder = os.path.join(tempfile.gettempdir(), f"warm{run[:16]}") if run else tempfile.mkdtemp(prefix="warm")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    path = os.path.join(folder, "s")  # short: the path of a socket may have 108 letters
    here = os.path.abspath(__file__)
    with open(os.path.join(folder, "lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not os.path.exists(path):
            environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
            words = [sys.executable, here, "serve", path, str(os.getppid() if run else os.getpid())]
            subprocess.run(words, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=True)
    return [sys.executable, "-S", "-E", here, "run", path]


def _run(path: str, words: list[str]) -> None:
    """The client: hand over what a process has, pass signals on, end as the script ends."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    told = json.dumps({"words": words, "directory": os.getcwd(), "environment": dict(os.environ)}).encode()
    for number in _FORWARDED:
        signal.signal(number, lambda got, _frame: connection.send(bytes([got])))
    socket.send_fds(connection, [len(told).to_bytes(4, "big")], [0, 1, 2])
    connection.sendall(told)
    for stream in (0, 1, 2):
        os.close(stream)
    status = int.from_bytes(connection.recv(4), "big")
    if os.WIFSIGNALED(status):
        with contextlib.suppress(OSError):  # SIGKILL has no handler to take away
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))


class _Kept:
    """Finds torch, which is loaded already, as if it were not: importing it runs what waits for its import."""

    def __init__(self, module: Any) -> None:
        self.module, self.spec = module, module.__spec__

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> Any:
        if name != "torch":
            return None
        from importlib.machinery import ModuleSpec

        return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, _spec: Any) -> Any:
        return self.module

    def exec_module(self, module: Any) -> None:
        module.__spec__ = self.spec


def _serve(path: str, run: int) -> tuple[list[str], dict[str, Any]] | None:
    """Fork for every connection. Returns in a process that is to become a script."""
    import torch
    import torch._dynamo  # which the first optimizer asks for  # noqa: F401
    from transformers import LlamaForCausalLM, Qwen2ForCausalLM  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers end by themselves
    over = os.pidfd_open(run)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        if os.fork():  # whoever waits for the server waits no longer
            os._exit(0)
        while True:
            ready, _, _ = select.select([listening.fileno(), over], [], [])
            if over in ready:
                shutil.rmtree(os.path.dirname(path), ignore_errors=True)
                return None
            connection, _ = listening.accept()
            if os.fork() == 0:
                listening.close()
                os.close(over)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                return _keep(connection)
            connection.close()


def _keep(connection: socket.socket) -> tuple[list[str], dict[str, Any]] | None:
    """The keeper of one script: its signals go in, its status comes out; it does not outlive its client."""
    head, streams, _, _ = socket.recv_fds(connection, 4, 3)
    size, told = int.from_bytes(head, "big"), b""
    while len(told) < size:
        told += connection.recv(size - len(told))
    request = json.loads(told)
    script = os.fork()
    if script == 0:
        connection.close()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        return request["words"], request
    for stream in (*streams, 0, 1, 2):
        os.close(stream)
    ended, asked = os.pidfd_open(script), connection.fileno()
    while True:
        ready, _, _ = select.select([asked, ended], [], [])
        if asked in ready:
            got = connection.recv(1)
            with contextlib.suppress(ProcessLookupError):
                os.kill(script, got[0] if got else signal.SIGKILL)
            if not got:
                os._exit(0)
        if ended in ready:
            connection.sendall(os.waitpid(script, 0)[1].to_bytes(4, "big"))
            os._exit(0)


def _become(words: list[str], request: dict[str, Any]) -> None:
    """Take over what the client has: streams, folder, environment, arguments."""
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False, errors="backslashreplace")  # noqa: SIM115
    added = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    own = {"-c": "", "-m": os.getcwd()}.get(words[0], os.path.dirname(os.path.abspath(words[0])))
    sys.path[:] = [own, *added, *sys.path[1:]]
    sys.argv[:] = words if words[0] not in ("-c", "-m") else ["-c", *words[2:]]
    sys.meta_path.insert(0, _Kept(sys.modules.pop("torch")))  # type: ignore[arg-type]
    sys.modules.pop("sitecustomize", None)
    with contextlib.suppress(ModuleNotFoundError):
        import sitecustomize  # type: ignore[import-not-found]  # noqa: F401


def _run_as_main(words: list[str]) -> None:
    import runpy

    if words[0] == "-m":
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        main = sys.modules["__main__"] = type(sys)("__main__")
        exec(compile(words[1], "<string>", "exec"), main.__dict__)
    else:
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    if sys.argv[1] == "run":
        _run(sys.argv[2], sys.argv[3:])
    become = _serve(sys.argv[2], int(sys.argv[3]))
    if become is not None:
        _become(*become)
        _run_as_main(become[0])
