"""Peak memory of a stretch of work: resident on the host, allocated on the GPU."""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path

import psutil
import torch

from replay_core.errors import UnavailableError
from replay_core.replay.flags import Flags

#: Rows whose softmax is held beside a chunk of logits.
ENTROPY_ROWS = 64


def need_logits(flags: Flags, rows: int, vocabulary: int, chunk: int) -> float:
    """MiB the logits of `rows` token slots will take; whole, they are held twice in float32 (2 x T x V x 4 bytes).

    Raises:
        UnavailableError: more than is free, with both figures.
    """
    held = 2 * rows if flags.logits == "whole" else min(rows, chunk) + 2 * ENTROPY_ROWS
    forecast = held * vocabulary * 4
    free = torch.cuda.mem_get_info()[0] if flags.device == "cuda" else psutil.virtual_memory().available
    if forecast > free:
        raise UnavailableError(
            f"logits={flags.logits} of {rows:,} token slots x {vocabulary:,} words do not fit in memory",
            expected=f"about {forecast / 2**30:.1f} GiB",
            found=f"{free / 2**30:.1f} GiB free",
            hint="logits=chunked holds a few rows at once and gives the same numbers",
        )
    return forecast / 2**20


class PeakMemory:
    """Highest memory since it was made, in MiB: on the GPU where one is used, else of this process."""

    def __init__(self, device: str) -> None:
        self._cuda = device == "cuda"
        self._reset = False
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
        else:
            with contextlib.suppress(OSError):
                # Linux: 5 sets the high-water mark back to what is resident now.
                Path("/proc/self/clear_refs").write_text("5")
                self._reset = True

    def mib(self) -> float:
        if self._cuda:
            return float(torch.cuda.max_memory_allocated()) / 2**20
        if self._reset:
            for line in Path("/proc/self/status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) / 1024
        # Elsewhere only the peak of the whole process is known.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
