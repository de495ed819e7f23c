"""Peak memory of a stretch of work: resident on the host, allocated on the GPU."""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path

import torch


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
