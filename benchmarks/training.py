"""Training while it is recorded, against the same training unrecorded: hash, stats and full, in the loop and beside it.

The step is a forward and backward of a small transformer, repeated until it takes at least 300 ms; what is
recorded of it is what an RL trainer records (inputs, logprobs, entropy, advantages), and all module outputs besides.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import count
from typing import Any

import torch

from benchmarks.inputs import Inputs
from benchmarks.racing import Result, Side, race
from replay_core.recorder import Recorder

#: The budget: an asynchronous, full record of a step of 300 ms or more, of what an RL trainer records.
BAR = 1 / 1.03
#: The same of a digest of every module's output.
HASHED = 1 / 1.25
_STEP_S = 0.3
#: Steps a side takes before what still waits is written, within its time.
_STEPS = 3
_CASES = (
    ("full", True, False), ("full", False, False), ("full", True, True), ("stats", True, True), ("hash", True, True),
)  # fmt: skip


def rows(inputs: Inputs) -> Iterator[Result]:
    step = _Step()
    for level, asynchronous, modules in _CASES:
        how, what = (
            "async" if asynchronous else "sync",
            "with all module outputs" if modules else "what a trainer records",
        )
        folder = inputs.folder / f"training-{level}-{how}-{modules}"
        recorder = Recorder(folder, level=level, asynchronous=asynchronous)
        numbers = count()

        def ours(recorder: Recorder = recorder, numbers: Iterator[int] = numbers, modules: bool = modules) -> None:
            for _ in range(_STEPS):
                with recorder.step(next(numbers)) as record:
                    step.run(record, modules=modules)
            recorder.flush()

        def theirs() -> None:
            for _ in range(_STEPS):
                step.run()

        result = race(
            f"training, {level}, {how}, {what}",
            Side(f"{_STEPS} steps recorded, all of it on the disk at the end", ours),
            Side(f"the same {_STEPS} steps", theirs),
            bar=HASHED if level == "hash" else BAR if level == "full" and asynchronous and not modules else None,
            rounds=3,
        )
        recorder.close()
        pressure = recorder.pressure
        size = sum(path.stat().st_size for path in folder.rglob("step_*.pt")) / next(numbers) / 1e6
        shutil.rmtree(folder)
        result.notes.append(
            f"recorded/unrecorded {1 / result.ratio:.3f}; {size:.1f} MB a step; trainer waited "
            f"{pressure.waited_s:.2f} s, {pressure.peak_bytes / 1e6:.0f} MB at most in the queue"
        )
        yield result


class _Step:
    """One training step of at least 300 ms."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layer = torch.nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
        self._model = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self._head = torch.nn.Linear(256, 512)
        self._ids_BS = torch.randint(0, 512, (8, 256))
        self._embedded = torch.nn.Embedding(512, 256)
        self._repeats = 1
        side = Side("", self.run)
        side.go()
        side.go()
        self._repeats = max(1, round(_STEP_S / side.wall_s + 0.5))

    def run(self, record: Any = None, *, modules: bool = False) -> None:
        for micro in range(self._repeats):
            if record is None:
                self._forward_backward()
                continue
            with record.modules(self._model, micro=micro) if modules else nullcontext():
                logprobs_BT, entropy_BT = self._forward_backward()
            fields = {"input_ids": self._ids_BS, "attention_mask": torch.ones_like(self._ids_BS)}
            record("forward_data", {**fields, "log_probs": logprobs_BT, "entropy": entropy_BT}, micro=micro)
            record("loss", loss=logprobs_BT.mean(), advantages=entropy_BT, micro=micro)

    def _forward_backward(self) -> tuple[torch.Tensor, torch.Tensor]:
        logits_BSV = self._head(self._model(self._embedded(self._ids_BS)))
        logprobs_BSV = logits_BSV.log_softmax(-1)
        logprobs_BT = logprobs_BSV[:, :-1].gather(-1, self._ids_BS[:, 1:, None])[..., 0]
        entropy_BT = -(logprobs_BSV.exp() * logprobs_BSV).sum(-1)
        logprobs_BT.mean().backward()
        return logprobs_BT.detach(), entropy_BT.detach()
