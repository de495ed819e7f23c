"""The tensor that is looked at, and which records are beside its own."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from msgspec import Struct

from replay_core.errors import RequestError, RldbgError
from replay_core.records import Record, Run, TensorRef

if TYPE_CHECKING:
    from replay_core.documents.parts import NamedTensor


class Subject(Struct, frozen=True):
    """A tensor of a record of a run."""

    run: Run
    record: Record
    ref: TensorRef

    @classmethod
    def find(cls, run: Run, record: Record, name: str) -> Subject:
        """The tensor of that name.

        Raises:
            RequestError: the record has none; says which it has.
        """
        ref = record.get(name)
        if ref is None:
            known = [tensor.name for tensor in record.tensors()]
            more = f" and {len(known) - 12} more" if len(known) > 12 else ""
            raise RequestError(
                f"the record has no tensor {name!r}",
                file=str(record.path),
                expected="one of " + ", ".join(known[:12]) + more,
                found=name,
            )
        return cls(run, record, ref)

    @property
    def has_numbers(self) -> bool:
        return self.ref.is_readable and not self.ref.is_text

    @property
    def name(self) -> str:
        """Canonical, where a dialect names it."""
        return self.ref.canonical or self.ref.name

    def named(self) -> NamedTensor:
        return {"path": str(self.run.path), "key": self.record.key.to_mapping(), "name": self.ref.name}

    def micro_batch(self, *, of_any_role: bool = False) -> list[Record]:
        """The records of its step, rank and micro-batch, its own included: what was computed with it.

        A layout and the inputs are its own role's; tokens and masks may have been written down by another.
        """
        here = self.record.key
        return [
            other
            for other in self.run.records
            if (other.key.step, other.key.rank, other.key.micro) == (here.step, here.rank, here.micro)
            and (of_any_role or other.key.role == here.role)
        ]


def holders(records: list[Record], name: str) -> list[Record]:
    """The records that hold a tensor of that name; one that cannot be read holds none."""
    holding = []
    for record in records:
        with contextlib.suppress(RldbgError):
            if record.get(name) is not None:
                holding.append(record)
    return holding
