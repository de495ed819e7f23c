"""The parity document, from the judged values of two critics."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from replay_core import naming
from replay_core.documents.version import SCHEMA_VERSION
from replay_core.export.documents import first_divergence, stamp
from replay_core.export.numbers import clean
from replay_core.parity.correlation import Measures
from replay_core.parity.judging import BatchResult, Parity, Step
from replay_core.parity.sides import CriticSide

if TYPE_CHECKING:
    from replay_core.documents.parity import (
        BatchEntry,
        BatchKind,
        Counted,
        CriticEntry,
        ParityDocument,
        ParityStep,
        RegionMeasures,
    )


def parity_document(found: Parity) -> ParityDocument:
    """A parity document. `eval`, `train`, `steps`, `cause` and `why` are those of the batch `about` names."""
    about = found.about
    comparison = found.comparison
    batches = [_batch(one) for one in found.batches]
    shown = batches[found.batches.index(about)]
    doc: ParityDocument = {
        "schema_version": SCHEMA_VERSION,
        "kind": "parity",
        **stamp(),
        "a": _side(found.a),
        "b": _side(found.b),
        "backends": [found.a.backend, found.b.backend],
        "about": about.name,
        "agrees": found.agrees,
        "cause": found.cause.kind,
        "why": found.cause.why,
        "also": [one.to_mapping() for one in about.causes[1:]],
        "threshold": found.threshold,
        "eval": shown["eval"],
        "train": shown["train"],
        "steps": shown["steps"],
        "batches": batches,
        "first_divergence": shown["first_divergence"],
        "comparison": None
        if comparison is None
        else {
            "counts": comparison.counts,
            "module_tensors": sum(naming.is_module_tensor(row.name) for row in comparison.tensors),
            "elements_compared": comparison.elements,
            "notes": comparison.notes,
        },
        "randomness": found.randomness,
        "notes": list(dict.fromkeys([*found.notes, *(note for one in found.batches for note in one.notes)])),
    }
    return clean(doc)


def _side(side: CriticSide) -> CriticEntry:
    return {
        "backend": side.backend,
        "engine": side.engine,
        "path": side.path,
        "dump": side.dump,
        "readback": side.readback,
        "weights": side.weights,
        "log": side.log,
        "seconds": side.seconds,
    }


def _batch(one: BatchResult) -> BatchEntry:
    evidence = one.evidence
    return {
        "name": one.name,
        "kind": cast("BatchKind", one.kind),
        "shape": list(one.shape),
        "counted": cast("Counted", evidence.counted),
        "dtype": evidence.dtype,
        "floor": evidence.floor,
        "causes": [found.to_mapping() for found in one.causes],
        "eval": _regions(evidence.masked, evidence.valid, evidence.unmasked),
        "train": None if evidence.train is None else _regions(*evidence.train),
        "steps": [_step(step) for step in one.steps],
        "first_divergence": None if one.first is None else first_divergence(one.first, one.origin),
        "scatter": one.scatter,
        "histogram": one.histogram,
        "worst": one.worst,
        "sources": one.sources,
        "expectations": one.expectations,
    }


def _regions(masked: Measures, valid: Measures | None, unmasked: Measures) -> RegionMeasures:
    return {
        "masked": masked.to_mapping(),
        "valid": None if valid is None else valid.to_mapping(),
        "unmasked": unmasked.to_mapping(),
    }


def _step(step: Step) -> ParityStep:
    return {
        "step": step.step,
        **_regions(step.evidence.masked, step.evidence.valid, step.evidence.unmasked),
        "apart": step.evidence.differs,
        "drift_a": step.drift_a,
        "drift_b": step.drift_b,
        "loss_a": step.loss_a,
        "loss_b": step.loss_b,
        "rows": step.rows,
    }
