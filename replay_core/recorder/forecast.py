"""What a step will take on disk, before the first byte is written."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from replay_core.recorder.settings import Settings

#: Bytes per token that a stage usually holds: int64 ids and masks are 8, float32 per-token figures 4.
_PER_TOKEN = {
    "trajectory": 8 * 3 + 4 * 2,
    "prepared_trajectories": 8 * 3 + 4 * 2,
    "datums": 8 * 2 + 4 * 3,
    "old_log_probs": 8 * 3 + 4,
    "ref_log_probs": 8 * 3 + 4,
    "values": 8 * 3 + 4,
    "forward_data": 8 * 3 + 4 * 5,
    "loss": 8 + 4 * 2,
    "is_loss_debug": 8 + 4 * 5,
    "batch_inputs": 8 * 3,
}
#: A zip entry, its padding to 64 bytes, and the pickle's words for a field.
_PER_FIELD = 512
#: The archive around a record's fields, and its line in the index.
_PER_FILE = 1024


@dataclass(frozen=True, slots=True)
class Forecast:
    """Bytes of one recorded step, stage by stage, beside the room there is."""

    step_bytes: int
    free_bytes: int
    by_stage: dict[str, int] = field(default_factory=dict)
    #: Stages that are recorded and whose size nothing given tells.
    unknown: tuple[str, ...] = ()
    #: The level, where it is one that writes no files.
    index_alone: str | None = None
    #: What the bytes are of.
    of_what: str = "a recorded step"

    @property
    def steps_that_fit(self) -> int | None:
        return self.free_bytes // self.step_bytes if self.step_bytes else None

    def __str__(self) -> str:
        if self.index_alone:
            lines = f"level {self.index_alone} writes lines of the index and no files, some 250 bytes a tensor"
            return f"{lines}; {_size(self.free_bytes)} free"
        stages = ", ".join(
            f"{stage} {_size(size)}" for stage, size in sorted(self.by_stage.items(), key=lambda e: -e[1])
        )
        unknown = f"; not known beforehand: {', '.join(self.unknown)}" if self.unknown else ""
        fit = "" if self.steps_that_fit is None else f", room for {self.steps_that_fit:,} steps"
        step = f"{self.of_what} takes about {_size(self.step_bytes)} ({stages}){unknown}"
        return f"{step}; {_size(self.free_bytes)} free{fit}"

    @classmethod
    def of(
        cls, settings: Settings, directory: Path, model: Any = None, *, rows: int, tokens: int, micros: int
    ) -> Forecast:
        """The forecast of one step.

        Args:
            model: gives the sizes of params, gradients and module outputs; without it they are unknown.
            rows, tokens: of one micro-batch, padding included.
            micros: micro-batches in a step.
        """
        if not settings.enabled or settings.level != "full":
            return cls(0, _free(directory), index_alone=settings.level if settings.enabled else None)
        stages = (
            sorted(settings.stages) if settings.stages is not None else [*_PER_TOKEN, "param", "gradient", "modules"]
        )
        by_stage: dict[str, int] = {}
        unknown = []
        for stage in stages:
            size = _stage(stage, settings, model, rows * tokens * micros)
            if size is None:
                unknown.append(stage)
            else:
                by_stage[stage] = size
        return cls(sum(by_stage.values()), _free(directory), by_stage, tuple(unknown))

    @classmethod
    def of_records(cls, settings: Settings, directory: Path, records: Mapping[str, Iterable[Any]]) -> Forecast:
        """The forecast of a step with one call of its model, where the tensors themselves are at hand.

        Args:
            records: stage -> the tensors (and anything else, which counts as one field) of its record.
        """
        by_stage = {
            stage: _PER_FILE + sum(_PER_FIELD + int(getattr(value, "nbytes", 0)) for value in fields)
            for stage, fields in records.items()
        }
        index_alone = settings.level if settings.level != "full" else None
        what = "a step with one call of the model"
        return cls(sum(by_stage.values()), _free(directory), by_stage, index_alone=index_alone, of_what=what)


def _stage(stage: str, settings: Settings, model: Any, tokens: int) -> int | None:
    if stage in _PER_TOKEN:
        return tokens * _PER_TOKEN[stage] if tokens else None
    if model is None:
        return None
    if stage in ("param", "gradient"):
        chosen = [
            weight
            for name, weight in model.named_parameters()
            if settings.wants_param(name) and (stage == "param" or weight.requires_grad)
        ]
        return sum(int(weight.numel() * weight.element_size()) + _PER_FIELD for weight in chosen)
    if stage == "modules" and tokens:
        return _modules(model, tokens)
    return None


def _modules(model: Any, tokens: int) -> int | None:
    """Outputs of every module: a linear layer's is as wide as its weight says, any other's as the model."""
    hidden = getattr(getattr(model, "config", None), "hidden_size", None)
    size = 0
    for name, module in model.named_modules():
        if not name or re.search(r"(ModuleList|ModuleDict|Sequential)$", type(module).__name__):
            continue
        width = getattr(module, "out_features", None) or getattr(module, "embedding_dim", None) or hidden
        if width is None:
            return None
        weight = next(module.parameters(), None)
        size += tokens * width * (weight.element_size() if weight is not None else 4) + _PER_FIELD
    return size


def _free(directory: Path) -> int:
    there = next((path for path in (directory, *directory.absolute().parents) if path.exists()), Path("."))
    return shutil.disk_usage(there).free


def _size(nbytes: int) -> str:
    number, unit = float(nbytes), "B"
    for larger in ("KB", "MB", "GB", "TB"):
        if number < 1000:
            break
        number, unit = number / 1000, larger
    return f"{number:.0f} {unit}" if number >= 100 or unit == "B" else f"{number:.1f} {unit}"
