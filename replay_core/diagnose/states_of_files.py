"""Weights and gradients in files of no framework, under `param.` and `grad.`: the records that rules ask for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from replay_core.errors import RldbgError
from replay_core.records import Record, TensorRef

#: What a training state calls its weights and gradients; so many of them are no chance.
_PREFIXES = {"param": ("param.", "params."), "gradient": ("grad.", "grads.")}
_FEWEST = 2


def states_in(records: Iterable[Record]) -> list[Record]:
    """Of each file in a folder whose first holds weights or gradients: a record of those, as a recorder has them."""
    found: list[Record] = []
    stages: dict[Path, list[str]] = {}
    for record in records:
        if record.key.stage != "tensors" or record.key.step is None:
            continue
        folder = record.path.parent
        if folder not in stages:
            stages[folder] = [stage for stage in _PREFIXES if len(_fields(record, stage)) >= _FEWEST]
        for stage in stages[folder]:
            load: Callable[[], Sequence[TensorRef]] = partial(_fields, record, stage)
            found.append(Record(replace(record.key, stage=stage, micro=None), record.path, load))
    return found


def _fields(record: Record, stage: str) -> list[TensorRef]:
    try:
        refs = record.tensors()
    except RldbgError:
        return []
    return [ref for ref in refs if ref.name.startswith(_PREFIXES[stage]) and ref.shape]


def bare(name: str) -> str:
    """A weight's own name, of its gradient's too."""
    prefix = next((one for each in _PREFIXES.values() for one in each if name.startswith(one)), "")
    return name.removeprefix(prefix)
