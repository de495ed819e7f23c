"""Two parts of a run set against each other: two of its steps, two ranks of one step."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from replay_core.records import Record, Run, Selection


def records_of_scope(run: Run, scope: dict[str, int | None], asked: dict[str, Any]) -> list[Record]:
    """The records of a scope (step, rank, micro) under the numbers of those they face: pairing goes by key.

    Raises:
        SelectionError: the run holds no such record.
    """
    wanted = {name: Selection.parse(value) for name, value in scope.items() if value is not None}
    keys = {name: next(iter(one.numbers)) for name, one in asked.items() if one is not None and one.numbers}
    named = {name: value for name, value in keys.items() if scope.get(name) is not None}
    found = []
    for record in run.select(**wanted):  # type: ignore[arg-type]
        stand_in = copy.copy(record)
        stand_in.key = replace(record.key, **named)
        found.append(stand_in)
    return found
