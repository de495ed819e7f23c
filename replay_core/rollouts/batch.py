"""One step's recorded batch as torch tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from msgspec import Struct

from replay_core.errors import NothingComparableError, SelectionError
from replay_core.pages import array
from replay_core.records import Inline, TensorRef

#: What a trainer computes from a rollout: left out of scope "rollout", so that it is computed again.
COMPUTED = frozenset({"old_logprobs", "ref_logprobs", "values", "advantages", "returns", "token_rewards"})


class BatchPart(Struct, frozen=True):
    """What one record gives to a batch: its fields by name, and where they lie."""

    refs: dict[str, TensorRef]
    path: Path

    @property
    def samples(self) -> int | None:
        """How many samples it holds; None where no field has a row of tokens per sample."""
        return next((_length(ref) for ref in self.refs.values() if is_tokens(ref)), None)


class RolloutSample(dict[str, Any]):
    """One row of a batch: fields under the last parts of their recorded names, found by canonical name too."""

    def __init__(self, fields: Mapping[str, Any], meanings: Mapping[str, str]) -> None:
        super().__init__(fields)
        self._meanings = meanings

    def __missing__(self, name: str) -> Any:
        return self[self._meanings[name]]

    def get(self, name: str, default: Any = None) -> Any:
        return super().get(name, super().get(self._meanings.get(name, name), default))


class RolloutBatch(Mapping[str, Any]):
    """One step's recorded batch: names as recorded, found by canonical name too.

    A value is a torch tensor, a list of tensors where rows have different lengths, a list of texts, or a number.
    Of a step recorded in several parts (micro-batches, ranks) the samples follow one another in recorded order;
    what is said of a part as a whole is one value where all say the same, else a list with a value per part.
    Read when first asked for.
    """

    def __init__(self, step: int | None, parts: Sequence[BatchPart]) -> None:
        self.step = step
        self._parts = list(parts)
        # A field that some parts lack would leave samples without a value.
        self._refs = {
            name: ref for name, ref in self._parts[0].refs.items() if all(name in part.refs for part in self._parts)
        }
        self._values: dict[str, Any] = {}

    @property
    def source(self) -> Path:
        """The file of its first part."""
        return self._parts[0].path

    def __repr__(self) -> str:
        return f"RolloutBatch(step {self.step}: {', '.join(self._refs)})"

    def __iter__(self) -> Iterator[str]:
        return iter(self._refs)

    def __len__(self) -> int:
        return len(self._refs)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._found(name) is not None

    def __getitem__(self, name: str) -> Any:
        found = self._found(name)
        if found is None:
            raise self._missing(name)
        if found not in self._values:
            self._values[found] = _together([(part.refs[found], part.samples) for part in self._parts])
        return self._values[found]

    def _missing(self, name: str) -> SelectionError:
        having = [part.path.name for part in self._parts if name in part.refs]
        hint = 'scope="full" takes what the trainer computed too' if name in COMPUTED else None
        return SelectionError(
            f"the recorded batch of step {self.step} has no field {name!r}",
            file=str(self.source),
            expected=", ".join(self._refs),
            found=name,
            hint=f"only {', '.join(having)} of the step's {len(self._parts)} records has it" if having else hint,
        )

    def _found(self, name: str) -> str | None:
        if name in self._refs:
            return name
        by_meaning = [field for field, ref in self._refs.items() if last_part(ref) == name]
        by_last_part = [field for field in self._refs if field.rpartition(".")[2] == name]
        return next(iter([*by_meaning, *by_last_part]), None)

    def samples(self) -> list[RolloutSample]:
        """The batch row by row: every field that has a row per sample.

        Raises:
            NothingComparableError: the fields do not say how many samples there are.
        """
        counts = [part.samples for part in self._parts]
        if None in counts:
            raise NothingComparableError(
                "the recorded batch has no field with a row of tokens per sample",
                file=str(self.source),
                found=", ".join(self._refs),
            )
        every = [
            name
            for name in self._refs
            if all(part.samples == _length(part.refs[name]) for part in self._parts if part.refs[name].shape != ())
            and self._refs[name].shape != ()
        ]
        # Fields that share the last part of their name keep the whole of it.
        shorts = Counter(_short(name) for name in every)
        names = {name: _short(name) if shorts[_short(name)] == 1 else name for name in every}
        meanings: dict[str, str] = {}
        for name in every:
            meanings.setdefault(last_part(self._refs[name]), names[name])
        columns = {names[name]: self[name] for name in every}
        total = sum(count for count in counts if count is not None)
        return [
            RolloutSample({name: values[row] for name, values in columns.items()}, meanings) for row in range(total)
        ]


def _length(ref: TensorRef) -> int | None:
    """How many samples a field would be of."""
    if ref.rows is not None:
        return len(ref.rows)
    return ref.shape[0] if ref.shape else None


def _together(parts: Sequence[tuple[TensorRef, int | None]]) -> Any:
    """One field's values of every part of a batch."""
    values = [_value(ref) for ref, _ in parts]
    if len(values) == 1:
        return values[0]
    if all(samples is not None and _length(ref) == samples for ref, samples in parts):
        shapes = {(type(value), getattr(value, "shape", ())[1:], getattr(value, "dtype", None)) for value in values}
        if len(shapes) == 1 and not isinstance(values[0], list):
            import torch

            return torch.cat(values)
        return [row for value in values for row in value]
    return values[0] if all(_same(values[0], value) for value in values[1:]) else values


def _same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if hasattr(one, "dtype"):
        import torch

        return bool(one.dtype == other.dtype and torch.equal(one, other))
    if isinstance(one, list):
        return len(one) == len(other) and all(_same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


def _value(ref: TensorRef) -> Any:
    if ref.is_text:
        assert isinstance(ref.source, Inline)
        texts = ref.source.value
        if ref.rows is None:
            return texts
        ends = list(accumulate(ref.rows))
        return [texts[end - length : end] for end, length in zip(ends, ref.rows, strict=True)]
    if isinstance(ref.source, Inline) and ref.shape == () and not isinstance(ref.source.value, bytes):
        return ref.source.value
    tensor = _tensor(ref)
    return list(tensor.split(list(ref.rows))) if ref.rows is not None else tensor


def _tensor(ref: TensorRef) -> Any:
    import numpy as np
    import torch

    values = np.array(array(ref), order="C")  # a copy: the trainer may change it
    if ref.dtype.startswith(("bfloat", "float8")):
        # numpy's name for these is ml_dtypes', which torch does not know: the bits go over as they are.
        same_width = np.uint8 if values.dtype.itemsize == 1 else np.int16
        return torch.from_numpy(values.view(same_width)).view(getattr(torch, ref.dtype))
    return torch.from_numpy(values)


def is_tokens(ref: TensorRef) -> bool:
    return last_part(ref) in ("input_ids", "response_ids", "prompt_ids", "target_ids") or ref.rows is not None


def last_part(ref: TensorRef) -> str:
    return (ref.canonical or ref.name).rpartition(".")[2]


def _short(field: str) -> str:
    return field.rpartition(".")[2]
