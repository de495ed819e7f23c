from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading

import pytest
import torch

from replay_core.jobs import Event, Sample
from replay_core.telemetry.sampler import Sampler


class Seen(list[Event]):
    """Collects samples and lets a test wait for a number of them."""

    def __init__(self, wanted: int) -> None:
        super().__init__()
        self._wanted = wanted
        self.enough = threading.Event()

    def __call__(self, event: Event) -> None:
        self.append(event)
        if len(self) >= self._wanted:
            self.enough.set()


def test_samples_come_by_themselves_and_once_more_at_the_end() -> None:
    seen = Seen(3)
    with Sampler(seen, period_s=0.01):
        assert seen.enough.wait(10)
        during = len(seen)
    assert len(seen) >= during + 1
    samples = [event for event in seen if isinstance(event, Sample)]
    assert [sample.elapsed_s for sample in samples] == sorted(sample.elapsed_s for sample in samples)
    assert all(sample.host_mib > 1 for sample in samples)


def test_memory_that_the_process_takes_is_seen() -> None:
    seen: list[Event] = []
    with Sampler(seen.append, period_s=60) as sampler:
        before = sampler.sample()
        # Pages of its own: what earlier tests gave back to the heap would be taken from there, and seen by nobody.
        with mmap.mmap(-1, 64 << 20) as held:
            held.write(os.urandom(1 << 20) * 64)
            after = sampler.sample()
    assert after.host_mib - before.host_mib > 50


def test_gpu_memory_is_what_the_probe_says_or_unknown() -> None:
    with Sampler(lambda _event: None, period_s=60, gpu_mib=lambda: 12.5) as sampler:
        assert sampler.sample().gpu_mib == 12.5
    with Sampler(lambda _event: None, period_s=60, gpu_mib=lambda: None) as sampler:
        assert sampler.sample().gpu_mib is None


def test_a_missing_driver_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # importing it now raises ImportError
    with Sampler(lambda _event: None, period_s=60) as sampler:
        assert sampler.sample().gpu_mib is None


def test_what_no_driver_lists_is_what_torch_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: (3 + device) << 20)
    with Sampler(lambda _event: None, period_s=60) as sampler:
        assert sampler.sample().gpu_mib == 7.0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_memory_that_the_process_takes_of_a_device_is_seen() -> None:
    with Sampler(lambda _event: None, period_s=60) as sampler:
        held = torch.zeros(1, device="cuda")
        before = sampler.sample().gpu_mib
        more = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")
        after = sampler.sample().gpu_mib
    assert before is not None
    assert after is not None
    assert after - before >= 60, (held, more.shape)


def test_a_listener_that_raises_does_not_end_the_job() -> None:
    called = threading.Event()

    def broken(_event: Event) -> None:
        called.set()
        raise OSError("the pipe is gone")

    with Sampler(broken, period_s=0.01):
        assert called.wait(10)


def test_telemetry_imports_neither_torch_nor_numpy() -> None:
    code = "import sys, replay_core.telemetry; sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
