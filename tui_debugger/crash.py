"""The report of a bug of our own: the stack, and never a local variable (it may be a secret, or a tensor)."""

from __future__ import annotations

import os
import time
from pathlib import Path

import replay_core
from replay_core.errors import stack_of
from tui_debugger import paths

#: Reports that are kept.
KEPT = 8


def crash_text(error: BaseException) -> str:
    """What the report holds."""
    stack = "".join(stack_of(error))
    return f"rldbg {replay_core.__version__}\n\n{stack}"


def write_crash(error: BaseException) -> Path | None:
    """Write the report into the state folder; None where even that fails."""
    name = f"crash-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
    try:
        folder = paths.private_dir(paths.state_dir())
        # Their names begin with the time.
        for old in sorted(folder.glob("crash-*.txt"))[: 1 - KEPT]:
            old.unlink(missing_ok=True)
        path = folder / name
        path.write_text(crash_text(error), encoding="utf-8")
    except OSError:
        return None
    return path
