"""One large record, against writing the same bytes under the same policy: temporary name, fsync, rename."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import torch

from benchmarks.inputs import Inputs
from benchmarks.racing import Result, Side, race
from replay_core.recorder import Recorder

#: Sizes, and the part of a raw write's pace that is held.
SIZES_MB = {16: 0.85, 128: 0.9}


def rows(inputs: Inputs) -> Iterator[Result]:
    for size, bar in SIZES_MB.items():
        tensor = torch.arange(size * 1_000_000 // 4, dtype=torch.float32)
        folder = inputs.folder / f"recording{size}"
        recorder = Recorder(folder / "ours")
        raw = folder / "theirs"
        raw.mkdir()
        numbers = count()

        def ours(
            recorder: Recorder = recorder, tensor: torch.Tensor = tensor, numbers: Iterator[int] = numbers
        ) -> None:
            with recorder.step(next(numbers)) as record:
                path = record("forward_data", micro=0, hidden=tensor)
            assert path is not None
            path.unlink()

        def theirs(raw: Path = raw, tensor: torch.Tensor = tensor) -> None:
            _write(raw / "record.bin", memoryview(tensor.numpy()).cast("B"))

        result = race(
            f"recording {size} MB",
            Side("one record: copy to the host, write, fsync, digest, index line", ours),
            Side("the same bytes: write, fsync, rename, fsync of the folder", theirs),
            bar=bar,
            rounds=9,
        )
        result.notes.append("synchronous; what it costs a training step is the row `training`")
        yield result


def _write(path: Path, data: memoryview) -> None:
    temporary = path.with_suffix(".tmp")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    path.unlink()
