"""Whether the host waits for the device while something is done."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch


def seconds_of_the_host_and_of_both(work: Callable[[], Any]) -> tuple[float, float]:
    """Wall seconds until `work` returns, and until the device is done, which was kept busy for some seconds before."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(4):
        torch.cuda._sleep(1 << 30)
    work()
    host = time.perf_counter() - began
    torch.cuda.synchronize()
    return host, time.perf_counter() - began
