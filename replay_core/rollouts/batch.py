"""One step's recorded batch as torch tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from replay_core.errors import NothingComparableError, SelectionError
from replay_core.pages import array
from replay_core.records import Inline, TensorRef

#: What a trainer computes from a rollout: left out of scope "rollout", so that it is computed again.
COMPUTED = frozenset({"old_logprobs", "ref_logprobs", "values", "advantages", "returns", "token_rewards"})


class RolloutBatch(Mapping[str, Any]):
    """One step's recorded batch: names as recorded, found by canonical name too.

    A value is a torch tensor, a list of tensors where rows have different lengths, a list of texts, or a number.
    Read when first asked for.
    """

    def __init__(self, step: int | None, refs: Mapping[str, TensorRef], source: Path) -> None:
        self.step = step
        self.source = source
        self._refs = dict(refs)
        self._values: dict[str, Any] = {}

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
            raise SelectionError(
                f"the recorded batch of step {self.step} has no field {name!r}",
                file=str(self.source),
                expected=", ".join(self._refs),
                found=name,
                hint='scope="full" takes what the trainer computed too' if name in COMPUTED else None,
            )
        if found not in self._values:
            self._values[found] = _value(self._refs[found])
        return self._values[found]

    def _found(self, name: str) -> str | None:
        if name in self._refs:
            return name
        by_meaning = [field for field, ref in self._refs.items() if last_part(ref) == name]
        by_last_part = [field for field in self._refs if field.rpartition(".")[2] == name]
        return next(iter([*by_meaning, *by_last_part]), None)

    def samples(self) -> list[dict[str, Any]]:
        """The batch row by row: every field that has a row per sample, under the last parts of its name.

        Raises:
            NothingComparableError: the fields do not say how many samples there are.
        """
        rows = {field: _rows(ref, self[field]) for field, ref in self._refs.items()}
        counts = [len(values) for field, values in rows.items() if values is not None and is_tokens(self._refs[field])]
        if not counts:
            raise NothingComparableError(
                "the recorded batch has no field with a row of tokens per sample",
                file=str(self.source),
                found=", ".join(self._refs),
            )
        table = {
            _short(field): values for field, values in rows.items() if values is not None and len(values) == counts[0]
        }
        return [{name: values[row] for name, values in table.items()} for row in range(counts[0])]


def _value(ref: TensorRef) -> Any:
    if ref.is_text:
        assert isinstance(ref.source, Inline)
        return ref.source.value
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


def _rows(ref: TensorRef, value: Any) -> Any:
    """A value as one row per sample, or None for what is not said of samples."""
    if ref.shape == ():
        return None
    return value


def is_tokens(ref: TensorRef) -> bool:
    return last_part(ref) in ("input_ids", "response_ids", "prompt_ids", "target_ids") or ref.rows is not None


def last_part(ref: TensorRef) -> str:
    return (ref.canonical or ref.name).rpartition(".")[2]


def _short(field: str) -> str:
    return field.rpartition(".")[2]
