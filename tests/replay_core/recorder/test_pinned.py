"""Copies from a device: on a device where there is one, and on a model of its streams everywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from replay_core.recorder import Recorder, pinned
from tests.replay_core.recorder.on_a_device import seconds_of_the_host_and_of_both

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


class Event:
    def __init__(self, blocking: bool = False) -> None:
        self.stream: Stream | None = None
        self.position = 0

    def record(self, stream: Stream) -> None:
        self.stream, self.position = stream, len(stream.work)

    def synchronize(self) -> None:
        assert self.stream is not None
        self.stream.run_to(self.position)


class Stream:
    """Work in order; nothing runs before somebody has to wait for it."""

    def __init__(self, _device: Any = None) -> None:
        self.work: list[Callable[[], object]] = []
        self._done = 0

    def wait_event(self, event: Event) -> None:
        self.work.append(event.synchronize)

    def wait_stream(self, other: Stream) -> None:
        upto = len(other.work)
        self.work.append(lambda: other.run_to(upto))

    def run_to(self, position: int) -> None:
        while self._done < position:
            self._done += 1
            self.work[self._done - 1]()


class Memory:
    """A tensor of one number, in a device's or the host's memory."""

    def __init__(self, device: Device, number: list[int], where: int) -> None:
        self._of, self.number, self._where = device, number, where
        self.device, self.shape, self.dtype = "cuda:0", (1,), "int"

    def resolve_conj(self) -> Memory:
        return self

    resolve_neg = contiguous = resolve_conj

    def numel(self) -> int:
        return 1

    def element_size(self) -> int:
        return 8

    def data_ptr(self) -> int:
        return self._where

    def record_stream(self, _stream: Stream) -> None:
        pass

    def clone(self) -> Memory:
        copy = Memory(self._of, [0], self._where + 1)
        self._of.launch(lambda: copy.number.__setitem__(0, self.number[0]))
        return copy

    def copy_(self, other: Memory, non_blocking: bool) -> None:
        assert non_blocking
        self._of.launch(lambda: self.number.__setitem__(0, other.number[0]))

    def add_(self, amount: int) -> None:
        self._of.launch(lambda: self.number.__setitem__(0, self.number[0] + amount))


class Device:
    """torch, as far as a copy needs it."""

    def __init__(self) -> None:
        self.trainer = self._current = Stream()
        self.cuda = SimpleNamespace(
            current_stream=lambda _device: self._current,
            Stream=Stream,
            Event=Event,
            stream=self._switch,
            OutOfMemoryError=MemoryError,
        )

    def launch(self, work: Callable[[], object]) -> None:
        self._current.work.append(work)

    @contextmanager
    def _switch(self, stream: Stream) -> Iterator[None]:
        before, self._current = self._current, stream
        yield
        self._current = before

    def empty(self, _shape: Any, dtype: str, pin_memory: bool) -> Memory:
        assert pin_memory
        return Memory(self, [-1], 1000)


@pytest.mark.parametrize("clones", [pinned.CLONES, 0])
@pytest.mark.parametrize("trainer_first", [True, False])
def test_a_copy_holds_what_stood_there_whichever_stream_runs_first(
    clones: int, trainer_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinned, "CLONES", clones)
    monkeypatch.setattr(pinned, "_streams", {})
    device = Device()
    value = Memory(device, [0], 1)
    value.add_(7)
    host, arrive = pinned.copy_aside(device, value)
    value.add_(100)
    assert host.number == [-1], "taking it waited for nothing"
    if trainer_first:
        device.trainer.run_to(len(device.trainer.work))
        assert (host.number == [7]) is (clones == 0), "the trainer waits for the copy only where nothing was cloned"
    arrive()
    assert host.number == [7]
    device.trainer.run_to(len(device.trainer.work))
    assert value.number == [107]
    assert not any(pinned._held.values())


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("clones", [pinned.CLONES, 0])
def test_copies_from_a_device_are_what_stood_there_and_hold_up_nobody(
    clones: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinned, "CLONES", clones)
    with Recorder(tmp_path, asynchronous=True) as recorder, recorder.step(0) as record:
        values = torch.zeros(1 << 22, device="cuda")
        # To pin memory waits for the device; what was pinned is given again.
        kept = [torch.empty(1 << 22, pin_memory=True) for _ in range(10)]
        kept += [torch.empty(8, pin_memory=True) for _ in range(10)]
        clones_there = [values.clone() for _ in range(10)]
        del kept, clones_there
        record("warm", values=values, view=values[:8].view(2, 4).t(), micro=0)
        recorder.flush()

        def step() -> None:
            for micro in range(10):
                record("loss", values=values, view=values[:8].view(2, 4).t(), micro=micro)
                values.add_(1)

        host_s, both_s = seconds_of_the_host_and_of_both(step)
        assert host_s < both_s / 2, "the host waited for the device"
    for micro in range(10):
        content = torch.load(tmp_path / "loss" / f"step_000000_rank0_micro{micro}.pt")
        assert content["values"].eq(micro).all()
        assert content["view"].shape == (4, 2)


@pytest.mark.gpu
@needs_cuda
def test_gradients_and_module_outputs_of_a_device_are_those_of_the_host(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)).cuda()
    inputs = torch.randn(4, 8, device="cuda")
    with Recorder(tmp_path, asynchronous=True) as recorder, recorder.step(0) as record:
        with record.modules(model, micro=0), record.accumulating(model, micro=0):
            model(inputs).sum().backward()
        expected = {f"grad.{name}": weight.grad.cpu().clone() for name, weight in model.named_parameters()}
        first = model[0](inputs).detach().cpu()
        model.zero_grad(set_to_none=False)
    gradients = torch.load(tmp_path / "gradient" / "step_000000_rank0_micro0.pt")
    assert all(torch.equal(gradients[name], value) for name, value in expected.items())
    outputs = torch.load(tmp_path / "modules" / "step_000000_rank0_micro0.pt")
    assert torch.equal(outputs["0.output"], first)
