"""The lines of the tensor list as data: what stands in one, and the orders they can have."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tui_debugger import format as fmt

#: Rows a list shows at most; what is left out is counted on its border.
ROW_CAP = 200_000

#: Orders of the list, the first one being how it comes.
SORTS = ("order of computation", "worst first", "name")


class TensorRow(NamedTuple):
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


#: The parts of a record's key by which rows can be told apart, as they stand in `where`; two are said as they are.
_PARTS = {"step": "s", "rank": "r", "micro": "m", "role": "", "epoch": "e", "minibatch": "mb", "stage": ""}
_SCOPE = ("rank", "micro")


class Places:
    """What must be said of a row's record for its name to mean one tensor: the rank and micro-batch where there are
    several, and whatever tensors of one name differ by. A prompt's ids stand in a trajectory and in the batch made of
    it."""

    def __init__(self) -> None:
        self._scopes: set[tuple[Any, ...]] = set()
        self._first: dict[str, Mapping[str, Any]] = {}
        self._differing: dict[str, set[str]] = {}

    def add(self, rows: Iterable[TensorRow]) -> None:
        last: Mapping[str, Any] | None = None
        for row in rows:
            key = _key(row)
            if key is not last:
                self._scopes.add(tuple(map(key.get, _SCOPE)))
                last = key
            first = self._first.setdefault(row.name, key)
            if first is not key and first != key:
                parts = self._differing.setdefault(row.name, set())
                parts.update(part for part in _PARTS if first.get(part) != key.get(part))

    def __bool__(self) -> bool:
        return len(self._scopes) > 1 or bool(self._differing)

    def of(self, row: TensorRow) -> str:
        """`r0 m1 eval trajectory`: empty where the name alone says which tensor it is."""
        parts = self._differing.get(row.name, frozenset()) | (set(_SCOPE) if len(self._scopes) > 1 else set())
        if not parts:
            return ""
        key = _key(row)
        return " ".join(f"{_PARTS[part]}{key[part]}" for part in _PARTS if part in parts and key.get(part) is not None)


def _key(row: TensorRow) -> Mapping[str, Any]:
    return row.entry.get("a_key") or row.entry.get("b_key") or {}


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
