"""The GPUs of this machine as NVML sees them: name, memory, what is free. Empty where there is none."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from replay_core.documents.info import GpuEntry


MIB = 1 << 20


def gpus() -> list[GpuEntry]:
    """One mapping per GPU: name, total_mib, free_mib, driver. Raises nothing: no NVML is no GPU."""
    try:
        import pynvml
    except ImportError:
        return []
    found: list[GpuEntry] = []
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        driver = str(pynvml.nvmlSystemGetDriverVersion())
        for number in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(number)
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            found.append(
                {
                    "name": str(pynvml.nvmlDeviceGetName(handle)),
                    "total_mib": memory.total // MIB,
                    "free_mib": memory.free // MIB,
                    "driver": driver,
                }
            )
    return found
