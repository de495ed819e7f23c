"""Small dumps of one process and of several ranks, really recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from replay_core.compare import Comparison, compare_runs
from replay_core.dumps import open_run
from replay_core.recorder import Recorder

#: Stage -> fields.
Step = Mapping[str, Mapping[str, Any]]


def write(directory: Path, *ranks: Step) -> Path:
    """A step of as many ranks; gradients and parameters belong to no micro-batch."""
    for rank, stages in enumerate(ranks):
        with Recorder(directory) as recorder, recorder.step(0, rank=rank) as record:
            for stage, fields in stages.items():
                record(stage, fields, micro=None if stage in ("gradient", "param", "optimizer") else 0)
    return directory


def compared(directory: Path, one: Step, *ranks: Step) -> Comparison:
    """One process against ranks."""
    a, b = write(directory / "a", one), write(directory / "b", *ranks)
    return compare_runs(open_run(a), open_run(b))


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def gradients(
    directory: Path, whole: torch.Tensor, ranks: Sequence[torch.Tensor], name: str = "norm.weight"
) -> Comparison:
    """One gradient of one process against what each rank holds of it."""
    return compared(
        directory,
        {"gradient": {f"grad.{name}": whole}},
        *({"gradient": {f"grad.{name}": part.contiguous()}} for part in ranks),
    )
