"""The weights of one side at one time: names and where the values lie."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

from replay_core import naming, pages
from replay_core.dumps import open_run
from replay_core.engine_names import short
from replay_core.errors import NothingComparableError
from replay_core.records import Record, Run, TensorRef

Values = NDArray[Any]


class WeightState(Struct, eq=False, dict=True):
    """One set of parameters, by short name. `label` is what a sentence calls it: `step 40`, a path."""

    path: Path
    label: str
    tensors: dict[str, TensorRef]
    rank: int | None = None
    step: int | None = None
    #: Names that stood twice, and files that cannot be read; the latter alone.
    problems: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Fused tensors ask for the same few sources in turn; more would hold a model in memory.
        self.values = lru_cache(maxsize=6)(self._values)

    def has(self, name: str) -> bool:
        return name in self.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name].shape

    def _values(self, name: str) -> Values:
        """The whole tensor.

        Raises:
            DumpError: it cannot be read.
        """
        return np.asarray(pages.array(self.tensors[name]))


def states_of(path: Path, *, every_step: bool = False) -> list[WeightState]:
    """The parameters that a dump or a checkpoint holds: one state per rank of its last step, or of each step.

    Raises:
        DumpError: the path cannot be opened.
        NothingComparableError: it holds no parameters.
    """
    run = open_run(path)
    records = _of_parameters(run)
    return _found(path, run, records if every_step else _of_step(records, None))


def states_of_step(path: Path, step: int | None) -> tuple[list[WeightState], list[WeightState]]:
    """(The parameters of one step, or of the last; those of the other steps, where they name one), each per rank.

    Raises:
        DumpError: the path cannot be opened.
        NothingComparableError: it holds no parameters of that step.
    """
    run = open_run(path)
    records = _of_parameters(run)
    mine = _of_step(records, step)
    taken = set(map(id, mine))
    beside = [one for one in records if id(one) not in taken and one.key.step is not None]
    return _found(path, run, mine, step), _states(path, beside)


def _of_step(records: list[Record], step: int | None) -> list[Record]:
    """Of a step; None: of the last, and what names none."""
    if step is not None:
        return [record for record in records if record.key.step == step]
    last = max((-1 if record.key.step is None else record.key.step for record in records), default=None)
    return [record for record in records if record.key.step in (last, None)]


def _found(path: Path, run: Run, records: list[Record], step: int | None = None) -> list[WeightState]:
    found = _states(path, records)
    if not found:
        raise NothingComparableError(
            "there are no parameters" + ("" if step is None else f" of step {step}"),
            file=str(path),
            expected="a checkpoint, a state dict, or records of stage param",
            found=", ".join(sorted({record.key.stage for record in run.records})) or "no record",
            hint=f"rldbg ls {path}",
        )
    return found


def _of_parameters(run: Run) -> list[Record]:
    records = [record for record in run.records if record.key.stage == "param"]
    # A state dict that was saved by hand says nothing of what it is.
    return records or [record for record in run.records if record.key.stage == "tensors"]


def _states(path: Path, records: Sequence[Record]) -> list[WeightState]:
    states: dict[tuple[int | None, int | None, str], WeightState] = {}
    for record in records:
        _add(states, path, record)
    return [state for state in states.values() if state.tensors]


def _add(states: dict[tuple[int | None, int | None, str], WeightState], path: Path, record: Record) -> None:
    folder = record.path.parent.name
    # Megatron's pipeline stages are folders of one tensor rank.
    key = (record.key.step, record.key.rank, folder if folder.startswith("mp_rank_") else "")
    label = str(path) if record.key.step is None else f"step {record.key.step}"
    state = states.setdefault(key, WeightState(path, label, {}, record.key.rank, record.key.step))
    for ref in parameters(record.tensors()):
        name = short(naming.canonical(f"param.{ref.name.removeprefix('param.')}"))
        if name in state.tensors:
            state.problems.append(f"{ref.name}: another tensor of {path} is called {name}, too; the first is taken")
        else:
            state.tensors[name] = ref
    unread = [f"{problem.where}: {problem.what}" for problem in record.problems]
    state.problems += unread
    state.unread += unread


def parameters(fields: Sequence[TensorRef]) -> list[TensorRef]:
    """Of a record's fields those that can be weights."""
    return [ref for ref in fields if not ref.is_text and (ref.shape or ref.is_readable) and ref.dtype != "none"]
