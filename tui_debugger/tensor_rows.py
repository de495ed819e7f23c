"""The lines of the tensor list as data: what stands in one, and the orders they can have."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tui_debugger import format as fmt

#: Rows a list shows at most; what is left out is counted on its border.
ROW_CAP = 200_000

#: Orders of the list, the first one being how it comes.
SORTS = ("order of computation", "worst first", "name")


@dataclass(frozen=True, slots=True)
class TensorRow:
    """One line of the tensor list."""

    name: str
    verdict: str
    entry: Mapping[str, Any]
    """The document's own entry: a comparison's `tensors` item, or a record's `fields` item."""
    is_first: bool = False

    @property
    def diverges(self) -> bool:
        return self.verdict in fmt.DIVERGING

    @property
    def said(self) -> str:
        """What the filter looks at."""
        return f"{self.verdict} {self.name}"


def comparison_rows(tensors: Iterable[Mapping[str, Any]], first: Mapping[str, Any] | None) -> Iterator[TensorRow]:
    """The rows of a comparison as they come, the first divergence marked once."""
    first = first or {}
    marked = False
    for entry in tensors:
        is_first = (
            not marked
            and entry.get("name") == first.get("name")
            and (first.get("a_key") is None or entry.get("a_key") == first.get("a_key"))
        )
        marked = marked or is_first
        yield TensorRow(str(entry["name"]), str(entry.get("verdict", "")), entry, is_first)


#: The parts of a record's key by which rows can be told apart, as they stand in `where`.
_PARTS = ("step", "rank", "micro", "role", "epoch", "minibatch", "stage")


class Places:
    """Which parts of their records' keys tell rows apart: a rank or micro-batch that is not the only one, and whatever
    two tensors of one name differ by. A prompt's ids stand in a trajectory and in the batch that is made of it."""

    def __init__(self) -> None:
        self._scopes: set[tuple[Any, Any]] = set()
        self._named: dict[str, Mapping[str, Any]] = {}
        self._parts: set[str] = set()

    def add(self, rows: Iterable[TensorRow]) -> None:
        last: Mapping[str, Any] | None = None
        for row in rows:
            key = row.entry.get("a_key") or row.entry.get("b_key") or {}
            if key is not last:
                self._scopes.add((key.get("rank"), key.get("micro")))
                last = key
            first = self._named.setdefault(row.name, key)
            if first is not key and len(self._parts) < len(_PARTS) and first != key:
                self._parts.update(part for part in _PARTS if first.get(part) != key.get(part))

    @property
    def parts(self) -> tuple[str, ...]:
        """In the order of `_PARTS`; none where rows need no telling apart."""
        several = {"rank", "micro"} if len(self._scopes) > 1 else set()
        return tuple(part for part in _PARTS if part in self._parts | several)


def place_of(row: TensorRow, parts: Iterable[str]) -> str:
    """`r0 m1 eval trajectory`: those parts of the key that the record has."""
    key = row.entry.get("a_key") or row.entry.get("b_key") or {}
    said = ((part, key.get(part)) for part in parts)
    return " ".join(
        str(value) if part in ("role", "stage") else f"{_SHORT.get(part, part[0])}{value}"
        for part, value in said
        if value is not None
    )


#: Of a mini-batch, whose first letter is the micro-batch's.
_SHORT = {"minibatch": "mb"}


def record_rows(fields: Iterable[Mapping[str, Any]]) -> Iterator[TensorRow]:
    """The rows of a record's own tensors."""
    for entry in fields:
        yield TensorRow(str(entry["name"]), "BAD" if entry.get("problem") else "", entry)


def order_key(how: str) -> Callable[[TensorRow], Any]:
    """What one of the SORTS but the first goes by; equals keep the order of computation."""
    return _badness if how == "worst first" else _name


def ordered(rows: Sequence[TensorRow], indexes: Iterable[int], how: str) -> list[int]:
    """The indexes in one of the SORTS."""
    if how == SORTS[0]:
        return sorted(indexes)
    key = order_key(how)
    return sorted(indexes, key=lambda index: key(rows[index]))


def _name(row: TensorRow) -> str:
    return row.name


def _badness(row: TensorRow) -> tuple[int, float]:
    rank = fmt.VERDICTS.index(row.verdict) if row.verdict in fmt.VERDICTS else len(fmt.VERDICTS)
    far = (row.entry.get("metrics") or {}).get("rel_l2")
    # A document writes nan and inf as words; both are worse than any number.
    distance = math.inf if isinstance(far, str) else float(far or 0.0)
    return rank, -distance


def matching(rows: Sequence[TensorRow], wanted: Callable[[str], object], start: int, stop: int) -> list[int]:
    """The indexes of rows[start:stop] that the filter lets through."""
    return [index for index in range(start, min(stop, len(rows))) if wanted(rows[index].said)]
