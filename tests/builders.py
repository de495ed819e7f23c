"""Small dumps that tests write: really recorded, really on disk."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from replay_core.compare import Comparison, TensorVerdict, compare_runs
from replay_core.dumps import open_run
from replay_core.recorder import Recorder
from replay_core.records import Inline, Record, RecordKey, TensorRef
from replay_core.replay.batch import MicroBatch
from replay_core.samples.batch import Batch

Fields = Mapping[str, Any]
T = TypeVar("T")


def write_dump(directory: Path, records: Mapping[str, Fields], *, micro: int | None = 0, **options: Any) -> Path:
    """A native dump of one step: a record per stage. `options` go to the Recorder (flags, model)."""
    recorder = Recorder(directory, **options)
    with recorder.step(0) as record:
        for stage, fields in records.items():
            record(stage, fields, micro=micro)
    return directory


def write_pair(directory: Path, a: Mapping[str, Fields], b: Mapping[str, Fields], **options: Any) -> tuple[Path, Path]:
    """Two dumps side by side: <directory>/a and <directory>/b."""
    return write_dump(directory / "a", a, **options), write_dump(directory / "b", b, **options)


def compare_paths(a: Path, b: Path, **options: Any) -> Comparison:
    return compare_runs(open_run(a), open_run(b), **options)


def compare_fields(directory: Path, a: Fields, b: Fields, *, stage: str = "modules", **options: Any) -> Comparison:
    """The comparison of one record against another of the same key."""
    return compare_paths(*write_pair(directory, {stage: a}, {stage: b}, **options))


def row_of(compared: Comparison, name: str) -> TensorVerdict:
    """The only row of that canonical name."""
    rows = [row for row in [*compared.tensors, *compared.skipped] if row.name == name]
    assert len(rows) == 1, f"{len(rows)} rows are called {name}, of {[row.name for row in compared.tensors]}"
    return rows[0]


def save_file(path: Path, content: Any) -> Path:
    """A file as a trainer's own torch.save leaves it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, path)
    return path


def write_nexrl(directory: Path, stage: str, content: Any, *, step: int = 0, rank: int = 0, micro: int = 0) -> Path:
    """One record in NexRL's own tree."""
    name = f"step_{step:06d}_rank{rank}_micro{micro}"
    if isinstance(content, list):
        path = directory / stage / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(line) + "\n" for line in content))
    else:
        save_file(directory / stage / f"{name}.pt", content)
    return directory


def record_with(*fields: TensorRef, stage: str = "tensors") -> Record:
    """A record of these fields that lies in no file."""
    return Record(RecordKey(0, 0, 0, "actor", stage), Path("file.pt"), lambda: fields)


def samples_with(**fields: Any) -> Batch:
    """The samples of a record of these canonical fields; those that are None are left out."""
    arrays = {name: np.asarray(value) for name, value in fields.items() if value is not None}
    refs = [TensorRef(name, x.dtype.name, x.shape, Inline(x.tolist()), name) for name, x in arrays.items()]
    return Batch(record_with(*refs), refs)


def padded_batch(ids: Any, mask: Any, response: Any = None, temperature: float | None = None) -> MicroBatch:
    """A micro-batch from [B, S] ids and mask; `response` may be [B, S] or the last columns [B, A]."""
    return MicroBatch.of(samples_with(input_ids=ids, attention_mask=mask, response_mask=response), temperature)


@dataclass
class TokensOfSample:
    """A sample's ids, and values by canonical name: element t is about token t (of the first nothing is said)."""

    ids: Any
    values: dict[str, Any]


#: The forms that `write_form` knows.
FORMS = (
    "right", "left", "packed", "packed and padded", "positions", "positions and ones", "lengths", "ragged",
    "response slice", "apart", "split", "shuffled",
)  # fmt: skip


def write_form(directory: Path, samples: Sequence[TokensOfSample], form: str) -> Path:
    """A dump of one batch in one of the ways that trainers lay tokens out."""
    groups = {
        "split": [list(samples[: len(samples) // 2]), list(samples[len(samples) // 2 :])],
        "shuffled": [list(samples)[::-1]],
    }.get(form, [list(samples)])
    layout = "right" if form in ("split", "shuffled") else form
    recorder = Recorder(directory)
    with recorder.step(0) as record:
        for micro, group in enumerate(group for group in groups if group):
            record("forward_data", _laid_out(group, layout), micro=micro)
    return directory


def _laid_out(samples: Sequence[TokensOfSample], layout: str) -> dict[str, Any]:
    lengths = np.array([sample.ids.size for sample in samples])
    names = list(samples[0].values)
    if layout == "ragged":
        rows = {"input_ids": [sample.ids.tolist() for sample in samples]}
        return rows | {name: [_said_before(sample, name).tolist() for sample in samples] for name in names}
    if layout.startswith(("packed", "positions", "lengths")):
        found = {"input_ids": np.concatenate([sample.ids for sample in samples])[None]}
        found |= {name: np.concatenate([_said_before(sample, name) for sample in samples])[None] for name in names}
        positions = np.concatenate([np.arange(length) for length in lengths])[None]
        bounds = np.concatenate(([0], np.cumsum(lengths)))
        if layout == "packed and padded":
            found = {name: np.pad(values, ((0, 0), (0, 3))) for name, values in found.items()}
        said = {"packed": "cu_seqlens", "positions": "position_ids", "lengths": "sample_lengths"}[layout.split()[0]]
        found[said] = {"cu_seqlens": bounds, "position_ids": positions, "sample_lengths": lengths}[said]
        if layout == "positions and ones":
            found["attention_mask"] = np.ones_like(positions)
        return {name: torch.from_numpy(values) for name, values in found.items()}
    width = int(lengths.max()) + 2
    prompts = np.array([int(sample.values["response_mask"].argmax()) for sample in samples])
    starts = np.zeros_like(lengths) if layout == "right" else width - lengths
    if layout in ("response slice", "apart"):
        # Prompts end in one column, responses begin in the next.
        starts = prompts.max() - prompts
        width = int((starts + lengths).max()) + 1
    slots = [slice(start, start + length) for start, length in zip(starts, lengths, strict=True)]
    found = {"input_ids": np.zeros((len(samples), width), np.int64), "attention_mask": np.zeros((len(samples), width))}
    found |= {name: np.zeros((len(samples), width), np.float32) for name in names}
    for row, (sample, here) in enumerate(zip(samples, slots, strict=True)):
        found["input_ids"][row, here], found["attention_mask"][row, here] = sample.ids, 1
        for name in names:
            whole = layout in ("response slice", "apart")
            found[name][row, here] = sample.values[name] if whole else _said_before(sample, name)
    if layout in ("response slice", "apart"):
        found |= {name: found[name][:, prompts.max() :] for name in names}
    if layout == "apart":
        ids, valid = found.pop("input_ids"), found.pop("attention_mask")
        found |= {"prompt_ids": ids[:, : prompts.max()], "prompt_mask": valid[:, : prompts.max()]}
        found["response_ids"] = ids[:, prompts.max() :]
    return {name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in found.items()}


def _said_before(sample: TokensOfSample, name: str) -> Any:
    """The values where a forward says them: a mask at its own token, any other one slot before the token."""
    values = sample.values[name]
    return values if name == "response_mask" else np.append(values[1:], values[:1] * 0)


class Bomb:
    """Runs a shell command where somebody unpickles it. `os.system` by name, so that any pickle module can write it."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        import os

        return os.system, (self.command,)


class Here:
    """Runs jobs in this very process: what a warm child does, without its start."""

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def run(self, job: Any, on_event: Any = lambda _event: None) -> dict[str, Any]:
        from replay_core.desk import perform

        return perform(job, on_event)


@contextmanager
def as_rank(rank: int, world: int) -> Iterator[Any]:
    """A mesh of `world` ranks as one of them sees it, without the others: to write its DTensors as torch does."""
    from torch.distributed import destroy_process_group, init_process_group
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield init_device_mesh("cpu", (world,))
    finally:
        destroy_process_group()


def shards_of(state: Mapping[str, Any], rank: int, world: int) -> dict[str, Any]:
    """One rank's DTensors of a state dict, each cut along its first axis as torch cuts it."""
    from torch.distributed.tensor import DTensor, Shard

    shards = {}
    with as_rank(rank, world) as mesh:
        for name, value in sorted(state.items()):
            local, sizes = value.chunk(world)[rank].clone(), {"shape": value.shape, "stride": value.stride()}
            shards[name] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, **sizes)
    return shards


def there(value: T | None) -> T:
    """What an answer may lack, and this one must not."""
    assert value is not None
    return value
