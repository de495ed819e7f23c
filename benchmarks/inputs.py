"""The dumps the races run on, written once per run into a temporary folder."""

from __future__ import annotations

import functools
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from replay_core.recorder import Recorder

PAIRS, DIFFERING = 200, 160
#: Elements of a 4 MB bf16 tensor.
ELEMENTS = 2 * 1024 * 1024


@dataclass(frozen=True)
class Inputs:
    """Where dumps are made, and how large: `scale` 1 is the size the budgets name."""

    folder: Path
    scale: float

    @property
    def pairs(self) -> int:
        return max(5, round(PAIRS * self.scale))

    def modules(self) -> Path:
        """A dump of one record: 200 bf16 tensors of 4 MB, as module outputs are."""
        return _modules(self)

    def differing(self) -> Path:
        """The same, four of five tensors with a last bit flipped in one element of a hundred."""
        return _differing(self)

    def noisy(self) -> Path:
        """The same: 1 ulp of noise from a fifth of the tensors on, 1 % of the rows 5 % wrong from three fifths."""
        return _noisy(self)

    def copy(self) -> Path:
        """The same bytes in other files."""
        return _copy(self)

    def small(self) -> Path:
        """A dump of three steps with small tensors, as `rldbg demo` records."""
        return _small(self)


def record_of(dump: Path) -> Path:
    """The one record of a dump made here."""
    (file,) = dump.glob("modules/*.pt")
    return file


@functools.cache
def _tensors(pairs: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        f"model.layers.{number}.output": torch.randn(ELEMENTS // 2048, 2048, generator=generator).to(torch.bfloat16)
        for number in range(pairs)
    }


def _written(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    with Recorder(path).step(0) as record:
        record("modules", tensors, micro=0)
    return path


@functools.cache
def _modules(inputs: Inputs) -> Path:
    return _written(inputs.folder / "modules", _tensors(inputs.pairs))


@functools.cache
def _differing(inputs: Inputs) -> Path:
    kept = inputs.pairs - inputs.pairs * DIFFERING // PAIRS
    changed = {}
    for number, (name, tensor) in enumerate(_tensors(inputs.pairs).items()):
        if number >= kept:
            tensor = tensor.clone()
            tensor.view(torch.int16).view(-1)[::100] ^= 1
        changed[name] = tensor
    return _written(inputs.folder / "differing", changed)


@functools.cache
def _noisy(inputs: Inputs) -> Path:
    generator = torch.Generator().manual_seed(1)
    changed = {}
    for number, (name, tensor) in enumerate(_tensors(inputs.pairs).items()):
        if number * 5 >= inputs.pairs:
            step = torch.randint(-1, 2, tensor.shape, generator=generator, dtype=torch.int16)
            # The bits below those of 0 are a NaN's.
            tensor = torch.where(tensor == 0, tensor, (tensor.view(torch.int16) + step).view(torch.bfloat16))
        if number * 5 >= inputs.pairs * 3:
            tensor[::100] = (tensor[::100].float() * 1.05).to(torch.bfloat16)
        changed[name] = tensor
    return _written(inputs.folder / "noisy", changed)


@functools.cache
def _copy(inputs: Inputs) -> Path:
    return Path(shutil.copytree(inputs.modules(), inputs.folder / "copy"))


@functools.cache
def _small(inputs: Inputs) -> Path:
    recorder = Recorder(inputs.folder / "small")
    for step in range(3):
        with recorder.step(step) as record:
            for micro in range(4):
                ids_BS = torch.arange(64).reshape(4, 16)
                record("batch_inputs", micro=micro, input_ids=ids_BS, attention_mask=torch.ones_like(ids_BS))
                record("forward_data", micro=micro, log_probs=-torch.rand(4, 16))
    return inputs.folder / "small"
