"""At most three numbers of what is followed, for a dashboard.

A point is made once, at a step of which nothing more is to come, and never again: steps come in order, and a dashboard
keeps no point that was revised. What has no value yet has no point.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from replay_core.documents.diagnosis import DiagnosisDocument
    from replay_core.documents.gathering import GatheringDocument, UnitEntry
    from replay_core.documents.kinds import Document
    from replay_core.documents.ruling import RulingDocument

#: The first step, up to the one that the point stands at, that does not agree.
FIRST_DIVERGENCE = "rldbg/first_divergence_step"
#: mean |recorded - truth| of the log-probabilities over what rounding leaves of them; of both sides the larger.
FLOOR_MULTIPLE = "rldbg/floor_multiple"
#: 0 none, 1 info, 2 warning, 3 error.
WORST_FINDING = "rldbg/worst_finding"

_SEVERITIES = ("none", "info", "warning", "error")
_ENDED = ("done", "failed", "crashed")

Point = tuple[int, dict[str, float]]


class UnitScalars:
    """The points of a directory of units: one for each step whose units, and all before it, have ended.

    read: opens a unit's document; each is opened once.
    """

    def __init__(self, read: Callable[[Path], Document]) -> None:
        self._read = read
        self._told: set[int | None] = set()
        self._first: int | None = None
        self._last = 0

    def news(self, doc: GatheringDocument) -> Iterator[Point]:
        """The points that were not there before."""
        # What has no step (a log; a run in a folder of runs) stands after all steps, at the last that was looked at.
        ordered = sorted(doc["units"], key=lambda one: (one["step"] is None, one["step"] or 0))
        for step, units in groupby(ordered, key=lambda one: one["step"]):
            of_step = list(units)
            if any(one["state"] not in _ENDED for one in of_step):
                return
            if step in self._told:
                continue
            self._told.add(step)
            scalars = self._of(doc, step, of_step)
            if scalars:
                yield self._last, scalars

    def _of(self, doc: GatheringDocument, step: int | None, units: list[UnitEntry]) -> dict[str, float]:
        self._last = step if step is not None else self._last
        found: dict[str, list[float]] = {FLOOR_MULTIPLE: [], WORST_FINDING: []}
        for one in units:
            if one["state"] != "done":
                continue
            if doc["command"] in ("compare", "replay") and one["exit_code"] == 1 and self._first is None:
                self._first = step
            if doc["command"] not in ("diagnose", "referee") or one["file"] is None:
                continue
            answer = self._read(Path(one["file"]))
            if answer["kind"] == "diagnosis":
                found[WORST_FINDING] += worst_finding(answer)
                if step is None:
                    self._last = max(self._last, *(one or 0 for one in answer["steps"]), 0)
            elif answer["kind"] == "ruling":
                found[FLOOR_MULTIPLE] += _floors(answer)
        # One that is no number is worse than any.
        scalars = {name: max(values, key=lambda one: (one != one, one)) for name, values in found.items() if values}
        return scalars if self._first is None else {**scalars, FIRST_DIVERGENCE: float(self._first)}


def worst_finding(doc: DiagnosisDocument, after: Collection[int] | None = None) -> list[float]:
    """How bad the worst finding is; nothing where no rule could look.

    after: only findings of these steps, and those of no step.
    """
    if not doc["checked"]:
        return []
    found = [
        _SEVERITIES.index(one["severity"])
        for one in doc["findings"]
        if one["echo_of"] is None and (after is None or not one["steps"] or not set(after).isdisjoint(one["steps"]))
    ]
    return [float(max(found, default=0))]


def _floors(doc: RulingDocument) -> list[float]:
    sides = (doc["a"], doc["b"])
    return [float(one["floor"]["ratio"]) for one in sides if one is not None and one["floor"] is not None]
