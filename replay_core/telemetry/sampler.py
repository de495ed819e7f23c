"""Sampler: a background thread that reports this process's memory and time at 1 Hz.

GPU memory is what NVML says this process holds. Inside a container whose process ids differ from the host's NVML
knows no such process: then it is what torch holds, if this process uses torch, else None. Sampling raises nothing.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import psutil

from replay_core.jobs import OnEvent, Sample

MIB = 1 << 20


class Sampler:
    """While open, sends a `Sample` to `on_sample` every `period_s`, and a last one when it closes.

    `on_sample` is called from the sampling thread, the last time from the thread that closes.
    """

    def __init__(
        self, on_sample: OnEvent, *, period_s: float = 1.0, gpu_mib: Callable[[], float | None] | None = None
    ) -> None:
        self._on_sample = on_sample
        self._period_s = period_s
        self._gpu_mib = gpu_mib
        self._gpu: _Gpu | None = None
        self._process = psutil.Process()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="telemetry", daemon=True)
        self._began = 0.0

    def __enter__(self) -> Sampler:
        if self._gpu_mib is None:
            self._gpu = _Gpu()
            self._gpu_mib = self._gpu.mib
        self._began = time.monotonic()
        self._process.cpu_percent()  # the first call only sets the mark that the next one measures from
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        self._thread.join()
        self._report()
        if self._gpu is not None:
            self._gpu.close()

    def _watch(self) -> None:
        while not self._closing.wait(self._period_s):
            self._report()

    def _report(self) -> None:
        # A listener whose pipe is gone, a process file system that is not mounted: the job matters more.
        with contextlib.suppress(Exception):
            self._on_sample(self.sample())

    def sample(self) -> Sample:
        """This process, now. CPU percent is of one core, since the last sample."""
        return Sample(
            elapsed_s=round(time.monotonic() - self._began, 3),
            host_mib=round(self._process.memory_info().rss / MIB, 1),
            gpu_mib=self._gpu_mib() if self._gpu_mib else None,
            cpu_percent=self._process.cpu_percent(),
        )


class _Gpu:
    """This process's memory over all NVIDIA devices, or None where nobody can tell.

    In a container a driver knows this process by another number and lists it as nobody's: then it is what torch holds,
    which is less by the context.
    """

    def __init__(self) -> None:
        self._nvml: Any = None
        self._devices: list[Any] = []
        with contextlib.suppress(Exception):  # no driver, no library, no permission: all mean "cannot tell"
            import pynvml

            pynvml.nvmlInit()
            self._nvml = pynvml
            self._devices = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]

    def mib(self) -> float | None:
        if not self._devices:
            return _held_by_torch()
        used, seen = 0, False
        for device in self._devices:
            with contextlib.suppress(Exception):
                for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(device):
                    if process.pid == os.getpid() and process.usedGpuMemory is not None:
                        used, seen = used + process.usedGpuMemory, True
        return round(used / MIB, 1) if seen else _held_by_torch()

    def close(self) -> None:
        if self._nvml is not None:
            with contextlib.suppress(Exception):
                self._nvml.nvmlShutdown()


def _held_by_torch() -> float | None:
    # While torch is being imported it is there in part.
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None or not hasattr(cuda, "is_initialized") or not cuda.is_initialized():
        return None
    held: int = sum(cuda.memory_reserved(one) for one in range(cuda.device_count()))
    return round(held / MIB, 1)
