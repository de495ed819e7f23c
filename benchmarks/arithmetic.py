"""The arithmetic alone, on one core: every figure of a pair, and what one tensor looks like, by bytes a second."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.inputs import Inputs
from benchmarks.racing import Result, Side, race
from replay_core.dumps import open_run
from replay_core.measure.pair import figures
from replay_core.measure.statistics import statistics
from replay_core.pages import numpy_dtype
from replay_core.recorder import Recorder

#: GB of both sides of a pair a second and core, by dtype; of one tensor's statistics, whatever it is of.
PAIR_GBS, STATISTICS_GBS = {"bfloat16": 4.0, "float32": 5.0}, 2.0
_SHAPE, _REPEATS = (1024, 2048), 16


def rows(inputs: Inputs) -> Iterator[Result]:
    for dtype, least in PAIR_GBS.items():
        yield _pair(dtype, least)
    for dtype in PAIR_GBS:
        yield _statistics(inputs, dtype)


def _pair(dtype: str, least: float) -> Result:
    generator = torch.Generator().manual_seed(0)
    x_RC = torch.randn(_SHAPE, generator=generator).to(getattr(torch, dtype))
    y_RC = (x_RC.float() * (1 + 2.0**-8 * torch.randn(_SHAPE, generator=generator))).to(x_RC.dtype)
    step = max(1, 262_144 // _SHAPE[1])
    chunks = [(_numpy(x_RC[at : at + step]), _numpy(y_RC[at : at + step])) for at in range(0, _SHAPE[0], step)]

    def ours() -> None:
        for _ in range(_REPEATS):
            figures(chunks)

    def theirs() -> None:
        for _ in range(_REPEATS):
            _by_numpy(chunks)

    nbytes = 2 * x_RC.numel() * x_RC.element_size() * _REPEATS
    return _rated(
        f"figures of pairs in memory, {dtype}",
        Side("every figure the rules need (measure.pair.figures)", ours),
        Side("numpy: largest |d|, sums of d and d^2, in float32", theirs),
        nbytes,
        least,
    )


def _by_numpy(chunks: list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]) -> None:
    for a, b in chunks:
        d = b.astype(np.float32) - a.astype(np.float32)
        _ = np.abs(d).max(), d.sum(), np.dot(d.reshape(-1), d.reshape(-1))


def _numpy(values: torch.Tensor) -> np.ndarray[Any, Any]:
    is_half = values.dtype == torch.bfloat16
    found: np.ndarray[Any, Any] = (values.view(torch.int16) if is_half else values).numpy()
    return found.view(numpy_dtype("bfloat16")) if is_half else found


def _statistics(inputs: Inputs, dtype: str) -> Result:
    """Of a tensor of real bytes in the page cache, its reading included: of a sparse file the holes would be timed."""
    folder: Path = inputs.folder / f"statistics-{dtype}"
    values = torch.randn(max(1, int(2**27 * inputs.scale)), generator=torch.Generator().manual_seed(0))
    values = values.to(getattr(torch, dtype))
    with Recorder(folder).step(0) as record:
        record("modules", {"x": values}, micro=0)
    (ref,) = open_run(folder).records[0].tensors()

    def theirs() -> None:
        whole = values.float()
        _ = whole.min(), whole.max(), whole.mean(), whole.std(), whole.norm()

    return _rated(
        f"statistics of a tensor of {ref.nbytes / 1e9:.2f} GB, {dtype}",
        Side("counts, extremes, mean, deviation, norm, read from its file", lambda: statistics(ref)),
        Side("torch's min, max, mean, std and norm of it in memory, on one core", theirs),
        ref.nbytes,
        STATISTICS_GBS,
    )


def _rated(title: str, ours: Side, theirs: Side, nbytes: int, least: float) -> Result:
    result = _on_one_core(lambda: race(title, ours, theirs, bar=None, rounds=5))
    result.limits.append(("CPU seconds for a GB", ours.cpu_s / (nbytes / 1e9), 1 / least))
    result.notes.append(f"{nbytes / 1e9 / ours.cpu_s:.2f} GB a second and core; bar {least:g}")
    return result


def _on_one_core(run: Callable[[], Result]) -> Result:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return run()
    finally:
        torch.set_num_threads(threads)
