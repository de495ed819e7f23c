"""The replay document, from the cells that ran."""

from __future__ import annotations

from typing import Any

from replay_core.export.documents import document, first_divergence
from replay_core.jobs import Document
from replay_core.replay.matrix import CellResult
from replay_core.replay.plan import ReplayPlan
from replay_core.replay.request import Replayed

#: What a cell that did not run, or the recording, has nothing to say of.
_UNSAID: dict[str, Any] = {
    **dict.fromkeys(
        (
            "compile",
            "observer",
            "capture",
            "not_finite",
            "weights",
            "determinism",
            "forward",
            "loss",
            "optimizer",
            "log",
            "key",
            "threads",
        )
    ),
    "inputs": [],
    "left_pads": [],
}
_TIME = ("load_s", "compile_s", "steady_s", "forward_s", "backward_s")
_MEMORY = ("peak_mib", "forecast_logits_mib")
_PARTS = ("time", "memory")


def _filled(figures: dict[str, Any] | None, names: tuple[str, ...]) -> dict[str, Any] | None:
    return None if figures is None else {name: figures.get(name) for name in names}


def replay_document(plan: ReplayPlan, replayed: Replayed) -> Document:
    """A replay document; `baseline` is the number of the cell that ran every row alone."""
    asked = {name: value for name, value in plan.to_mapping().items() if name != "out"}
    asked["role"] = replayed.role
    results = replayed.results
    notes = list(dict.fromkeys(note for result in results for note in result.cell["notes"]))
    return document(
        "replay",
        baseline=replayed.baseline,
        plan=asked,
        cells=[cell_entry(result) for result in results],
        matrix=_matrix(replayed),
        recording=replayed.recording,
        floors=replayed.floors,
        determinism=replayed.determinism,
        ranking=replayed.ranking,
        is_warm=replayed.is_warm,
        notes=[*notes, *replayed.notes],
    )


def _matrix(replayed: Replayed) -> dict[str, Any] | None:
    if replayed.axes is None:
        return None
    axes = {name: list(values) for name, values in replayed.axes.values.items()}
    return {"axes": axes, "breaking": replayed.breaking, "failing": replayed.failing}


def cell_entry(result: CellResult) -> dict[str, Any]:
    """A cell of the document; what it does not say is null there."""
    said = {name: value for name, value in result.cell.items() if name not in _PARTS}
    return {
        **_UNSAID,
        **said,
        "time": _filled(result.cell["time"], _TIME),
        "memory": _filled(result.cell["memory"], _MEMORY),
        "part": result.part,
        "asked": result.asked,
        "agreement": _agreement(result),
        "segments": result.segments,
        "cause": result.cause,
        "toggles": result.toggles,
        "same_as": result.same_as,
        "recorded": result.recorded,
        "recorded_training": result.training,
        "recorded_params": result.params,
    }


def _agreement(result: CellResult) -> dict[str, Any]:
    """`agrees` is null for the baseline, and where the cell did not run, so that nothing was compared."""
    comparison = result.comparison
    if comparison is None:
        return {"agrees": result.agreement, "first_divergence": None, "counts": None, "off": []}
    first = comparison.first
    return {
        "agrees": result.agreement,
        "first_divergence": None if first is None else first_divergence(first, comparison.origin),
        "counts": comparison.counts,
        "off": result.off,
    }
