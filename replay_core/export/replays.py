"""The replay document, from the cells that ran."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from replay_core.export.documents import document, first_divergence
from replay_core.jobs import Document
from replay_core.replay.matrix import CellResult
from replay_core.replay.plan import ReplayPlan


def replay_document(plan: ReplayPlan, results: Sequence[CellResult]) -> Document:
    """A replay document; cell 0 is the baseline, every row alone."""
    asked = {name: value for name, value in plan.to_mapping().items() if name != "out"}
    notes = list(dict.fromkeys(note for result in results for note in result.cell["notes"]))
    return document("replay", baseline=0, plan=asked, cells=[_cell(result) for result in results], notes=notes)


def _cell(result: CellResult) -> dict[str, Any]:
    return {**result.cell, "asked": result.asked, "agreement": _agreement(result), "segments": result.segments}


def _agreement(result: CellResult) -> dict[str, Any] | None:
    """Null for the baseline; `agrees` is null when the cell did not run, so nothing was compared."""
    comparison = result.comparison
    if comparison is None:
        return {"agrees": None, "first_divergence": None, "counts": None}
    first = comparison.first
    return {
        "agrees": comparison.agrees,
        "first_divergence": None if first is None else first_divergence(first, comparison.origin),
        "counts": comparison.counts,
    }
