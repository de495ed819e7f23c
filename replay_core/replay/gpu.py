"""Before a GPU is taken: what is free, who else is on it, and one replay at a time."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from replay_core.errors import UnavailableError
from replay_core.jobs import LogLine, OnEvent
from replay_core.replay.flags import Flags

#: Memory that an idle GPU's driver and context may hold, in bytes.
_IDLE = 1 << 30


@contextlib.contextmanager
def taken(flags: Flags, share: bool, on_event: OnEvent) -> Iterator[None]:
    """Hold the GPU for one replay; nothing at all on the CPU.

    Raises:
        UnavailableError: another process uses it and `share` is False, or another replay holds it.
    """
    if flags.device != "cuda":
        yield
        return
    free, total = torch.cuda.mem_get_info()
    own = torch.cuda.memory_reserved()
    others = total - free - own
    on_event(LogLine(f"GPU memory: {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"))
    if others > _IDLE and not share:
        raise UnavailableError(
            "another process uses this GPU: a running trainer is not disturbed unasked",
            expected="an idle GPU, or --share-gpu",
            found=f"{others / 2**30:.1f} of {total / 2**30:.1f} GiB in use",
            hint="--share-gpu runs beside it; --device cpu leaves it alone",
        )
    with _lock(share):
        yield


@contextlib.contextmanager
def _lock(share: bool) -> Iterator[None]:
    import fcntl  # not on Windows, where there is no lock either

    path = Path(tempfile.gettempdir()) / f"rldbg-gpu{torch.cuda.current_device()}.lock"
    with open(path, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if not share:
                raise UnavailableError("another replay holds this GPU", file=str(path), hint="--share-gpu") from None
        yield
