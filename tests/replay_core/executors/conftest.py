"""A child loop whose jobs are small misbehaviours, in place of the workbench."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from replay_core.executors import wire

PERFORM = """
import os, signal, subprocess, sys, time
PREPARED = []
from replay_core.__main__ import main
from replay_core.errors import SelectionError
from replay_core.jobs import LogLine, Partial, Progress

def perform(job, on_event):
    params = dict(job.params)
    if job.kind == "pid":
        group = open("/proc/self/autogroup").read() if os.path.exists("/proc/self/autogroup") else None
        return {"pid": os.getpid(), "session": os.getsid(0), "nice": os.nice(0), "autogroup": group}
    if job.kind == "environment":
        import resource
        names = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "PYTHONUTF8")
        return {"limit": resource.getrlimit(resource.RLIMIT_DATA)[0], **{name: os.environ.get(name) for name in names}}
    if job.kind == "print":
        print("from print")
        os.write(1, b"from file descriptor 1\\n")
        subprocess.run(["echo", "from a grandchild"], check=True)
        print("no newline", end="")
        return {"read": sys.stdin.readline()}
    if job.kind == "progress":
        for done in range(3):
            on_event(Progress(done, 3, "rows"))
        on_event(Partial({"first": "x" * int(params.get("size", 1))}))
        return {}
    if job.kind == "refuse":
        raise SelectionError("no record of step 9", file="dump", hint="rldbg ls dump")
    if job.kind == "fail":
        secret = "hunter2"
        raise ValueError("a plain mistake")
    if job.kind == "nan":
        return {"value": float("nan")}
    if job.kind == "abort":
        print("about to abort", file=sys.stderr)
        os.abort()
    if job.kind == "exit":
        print("giving up", file=sys.stderr)
        os._exit(7)
    if job.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if job.kind in ("sleep", "replay_cell"):
        if params.get("grandchild"):
            child = subprocess.Popen(["sleep", "60"])
            on_event(LogLine(f"grandchild {child.pid}"))
        on_event(Progress(0, None, "asleep"))
        time.sleep(params.get("seconds", 60))
        return {"slept": True}
    if job.kind == "flood":
        while True:
            on_event(Partial({"first": "x" * 1_000_000}))
    if job.kind == "import":
        import importlib, tempfile
        folder = tempfile.mkdtemp()
        sys.path.insert(0, folder)
        with open(f"{folder}/{params['name']}.py", "w") as module:
            module.write("import time\\ntold()\\nuntil = time.monotonic() + 1\\n"
                         "while time.monotonic() < until: time.sleep(.01)\\nwhole = True\\n")
        import builtins
        builtins.told = lambda: on_event(Progress(0, None, "importing"))
        importlib.import_module(params["name"])
        time.sleep(60)
    if job.kind == "imported":
        return {"whole": getattr(sys.modules.get(params["name"]), "whole", False)}
    if job.kind == "deaf":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # Printed, not sent: a cancel that meets an event on its way would still be heard.
        print("deaf", flush=True)
        time.sleep(60)
    if job.kind == "prepared":
        return {"at": os.environ.get("PREPARED"), "prepared": PREPARED, "argv": sys.argv}
    return {"params": params}
"""


@pytest.fixture(scope="session")
def command() -> Callable[[str], list[str]]:
    """Makes the command line of a child whose job kinds are the names in `PERFORM`."""
    return lambda role: wire.child_command(role, PERFORM + "\nmain(perform)\n")
