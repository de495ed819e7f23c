"""The weights that a process holds, recorded in one line: by an engine's worker after a push, by a trainer's rank."""

from __future__ import annotations

import os
from typing import Any

from replay_core.recorder.recorder import Recorder


def record_weights(
    model: Any,
    directory: str | os.PathLike[str],
    *,
    step: int,
    rank: int | None = 0,
    role: str = "rollout",
    digests: bool = True,
) -> None:
    """Record every parameter of a module as it stands, for `rldbg weights`.

    Args:
        step: the training step whose weights these should be.
        rank: of the engine or trainer; each has its own parameters.
        digests: keep a digest of each in place of its values: a pass over memory, a few KB on the disk.

    Raises:
        RequestError: the module has no parameters, or the directory holds something else.
        DumpError: the record cannot be written.
        RecordExistsError: these weights were recorded already.
    """
    with (
        Recorder(directory, level="hash" if digests else "full", asynchronous=False) as recorder,
        recorder.step(step, rank=rank, role=role) as record,
    ):
        record.params(model)
