"""The replay document, from the cells that ran."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from replay_core.documents.version import SCHEMA_VERSION
from replay_core.export.documents import first_divergence, stamp
from replay_core.export.numbers import clean
from replay_core.replay.matrix import CellResult
from replay_core.replay.plan import ReplayPlan
from replay_core.replay.request import Replayed

if TYPE_CHECKING:
    from replay_core.documents.replay import (
        AgreementEntry,
        CellEntry,
        MatrixEntry,
        PlanEntry,
        RankingEntry,
        RecordingEntry,
        RepeatEntry,
        ReplayDocument,
    )

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
_PARTS = ("time", "memory", "itself")


def _filled(figures: dict[str, Any] | None, names: tuple[str, ...]) -> dict[str, Any] | None:
    return None if figures is None else {name: figures.get(name) for name in names}


def replay_document(plan: ReplayPlan, replayed: Replayed) -> ReplayDocument:
    """A replay document; `baseline` is the number of the cell that ran every row alone."""
    asked = {name: value for name, value in plan.to_mapping().items() if name != "out"}
    asked["role"] = replayed.role
    results = replayed.results
    notes = list(dict.fromkeys(note for result in results for note in result.cell["notes"]))
    doc: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "kind": "replay",
        **stamp(),
        "baseline": replayed.baseline,
        "plan": cast("PlanEntry", asked),
        "cells": [cell_entry(result) for result in results],
        "matrix": _matrix(replayed),
        "recording": cast("RecordingEntry | None", replayed.recording),
        "floors": replayed.floors,
        "determinism": cast("RepeatEntry | None", replayed.determinism),
        "ranking": cast("RankingEntry | None", replayed.ranking),
        "is_warm": replayed.is_warm,
        "notes": [*notes, *replayed.notes],
    }
    return clean(cast("ReplayDocument", doc))


def _matrix(replayed: Replayed) -> MatrixEntry | None:
    if replayed.axes is None:
        return None
    axes = {name: list(values) for name, values in replayed.axes.values.items()}
    return {"axes": axes, "breaking": replayed.breaking, "failing": replayed.failing}


def cell_entry(result: CellResult) -> CellEntry:
    """A cell of the document; what it does not say is null there."""
    said = {name: value for name, value in result.cell.items() if name not in _PARTS}
    cell = {
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
    return cast("CellEntry", cell)


def _agreement(result: CellResult) -> AgreementEntry:
    """`agrees` is null for the baseline, and where the cell did not run, so that nothing was compared."""
    comparison = result.comparison
    if comparison is None:
        return {"agrees": result.agreement, "first_divergence": None, "counts": None, "off": []}
    first = None if result.is_noise else comparison.first
    return {
        "agrees": result.agreement,
        "first_divergence": None if first is None else first_divergence(first, comparison.origin),
        "counts": comparison.counts,
        "off": [] if result.is_noise else result.off,
    }
