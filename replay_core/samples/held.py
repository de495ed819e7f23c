"""What a record holds of its samples: its own fields, and those of records that speak of the same samples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from numpy.typing import NDArray

from replay_core import pages
from replay_core.records import Record, TensorRef


def find(fields: Iterable[TensorRef], *names: str) -> TensorRef | None:
    """The first readable numeric field of one of these canonical names, the first name that has any."""
    usable = [ref for ref in fields if ref.is_readable and not ref.is_text]
    return next((ref for name in names for ref in usable if (ref.canonical or ref.name) == name), None)


class Held:
    """The readable fields of a record.

    ids: its token ids; None where it holds none.
    siblings: records of the same micro-batch whose fields are among them: its losses.
    """

    def __init__(self, record: Record, fields: Sequence[TensorRef]) -> None:
        self.record = record
        self.siblings: list[Record] = []
        self._fields = [ref for ref in fields if ref.is_readable]
        self.ids = find((ref for ref in self._fields if ref.shape), "input_ids")

    def fields(self) -> list[TensorRef]:
        """What can be read of the record and of those that speak of the same samples."""
        return self._fields

    def take_in(self, record: Record) -> None:
        """Add a record of the same micro-batch that holds no tokens of its own."""
        self.siblings.append(record)
        self._fields += [ref for ref in record.tensors() if ref.is_readable]

    def find(self, *names: str) -> TensorRef | None:
        """The first readable numeric field of one of these canonical names."""
        return find(self._fields, *names)

    def named(self, name: str) -> TensorRef | None:
        """The first readable field of a canonical name, a text too."""
        return next((ref for ref in self._fields if (ref.canonical or ref.name) == name), None)

    def numbers(self, *names: str) -> NDArray[Any] | None:
        """The values of the first numeric field of a canonical name, of the first name that has any."""
        ref = self.find(*names)
        return None if ref is None else pages.array(ref)
