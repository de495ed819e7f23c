"""Files that only their order numbers (a folder of tensors of no known dialect) face each other by name: one file more
on one side must not make every later one face its neighbour.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import count
from typing import Any

from replay_core.records import Record

#: (step, rank, role, stage)
_Place = tuple[Any, ...]


def renumbered(
    records_a: Iterable[Record], records_b: Iterable[Record], steps: Mapping[int | None, int | None]
) -> dict[int, int]:
    """Micro-batch numbers for records of b, by `id`, where a file of the same name has another number in a.

    A place keeps its numbers where files called alike have the same ones, and where no file is called alike.
    """
    told: dict[int, int] = {}
    if all(record.key.micro is None for record in records_b):
        return told
    by_name_a, by_name_b = _names(records_a, {}), _names(records_b, steps)
    for place, ours in by_name_a.items():
        theirs = by_name_b.get(place, {})
        if all(ours[name].key.micro == theirs[name].key.micro for name in ours.keys() & theirs.keys()):
            continue
        numbers = {name: record.key.micro or 0 for name, record in ours.items()}
        fresh = count(1 + max(*numbers.values(), *(record.key.micro or 0 for record in theirs.values())))
        told.update((id(record), numbers[name] if name in numbers else next(fresh)) for name, record in theirs.items())
    return told


def _names(records: Iterable[Record], steps: Mapping[int | None, int | None]) -> dict[_Place, dict[str, Record]]:
    """Records by place and name of file; left out is a place where a name stands twice, or has no number."""
    found: dict[_Place, dict[str, Record]] = defaultdict(dict)
    unclear = set()
    path, name = None, ""
    for record in records:
        key = record.key
        if record.path is not path:  # a log is one file of tens of thousands
            path, name = record.path, record.path.name
        place = (steps.get(key.step, key.step), key.rank, key.role, key.stage)
        if key.micro is None or found[place].setdefault(name, record) is not record:
            unclear.add(place)
    return {place: names for place, names in found.items() if place not in unclear}
