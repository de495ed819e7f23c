"""What a `.pt` record holds, safety pass included, against torch.load(mmap=True)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.inputs import Inputs, record_of
from benchmarks.racing import Result, Side, race
from replay_core.dumps import open_run


def rows(inputs: Inputs) -> Iterator[Result]:
    for dump, what in ((inputs.modules(), "many large tensors"), (inputs.small(), "a few small ones")):
        file = record_of(dump) if "many" in what else next((dump / "batch_inputs").glob("*.pt"))
        fields = len(open_run(file).records[0].tensors())

        def ours(file: object = file) -> int:
            return len(open_run(str(file)).records[0].tensors())

        def theirs(file: object = file) -> int:
            return len(torch.load(str(file), mmap=True, weights_only=True))

        yield race(
            f"listing a .pt record of {fields} fields ({what})",
            Side("open_run(FILE) and the headers of its record", ours),
            Side("torch.load(FILE, mmap=True, weights_only=True), torch already imported", theirs),
            bar=8,
            rounds=30,
        )
