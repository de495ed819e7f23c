"""Which part of two runs is compared: two steps of one run against each other, or as many ranks as were promised."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from replay_core.records import Problem, Record, Run, Selection

if TYPE_CHECKING:
    from replay_core.compare.comparison import Comparison


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


def state_scope(compared: Comparison, promised: Mapping[str, int | None], *sides: Sequence[Record]) -> None:
    """Say of a comparison what its verdicts do not: that it compared a run with itself, and which ranks and
    micro-batches were said to be there and are in neither run.

    promised: "rank" and "micro" -> how many there are to be, counted from 0. What no record numbers is not missed.
    sides: the records of either run that were compared.
    """
    if compared.a.path.samefile(compared.b.path):
        compared.notes.append("a and b are one and the same path: what is compared with itself cannot differ")
    count, problems = 0, []
    for part, size in promised.items():
        there = {number for records in sides for record in records if (number := getattr(record.key, part)) is not None}
        lost = sorted(set(range(size)) - there) if size and there else []
        if lost:
            count += len(lost)
            what = f"{part} {_spans(lost)} of {size} is in no run; there are {part} {_spans(sorted(there))}"
            problems.append(Problem(f"--num_{part}s {size}", what))
    if any(promised.values()):
        compared.numbers_absent = count
        compared.problems += problems


def _spans(numbers: Iterable[int]) -> str:
    """0, 2..63"""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(start) if start == end else f"{start}..{end}" for start, end in spans)
