"""The diagnosis document, from findings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from replay_core.export.documents import document
from replay_core.jobs import Document

if TYPE_CHECKING:
    from replay_core.diagnose.finding import Diagnosis, Finding
    from replay_core.records import Run


def diagnosis_document(run: Run, diagnosis: Diagnosis, series: Sequence[dict[str, Any]] = ()) -> Document:
    """A diagnosis document; `series` are the signals over steps that a trends view draws."""
    causes = [finding for finding in diagnosis.findings if finding.downstream_of is None]
    counts = {level: sum(one.severity == level for one in causes) for level in ("error", "warning", "info")}
    return document(
        "diagnosis",
        path=str(run.path),
        dialect=run.dialect,
        steps=run.steps(),
        counts={**counts, "echoes": len(diagnosis.findings) - len(causes)},
        findings=[_finding(one) for one in diagnosis.findings],
        checked=list(diagnosis.checked),
        skipped=[{"id": one.id, "why": one.why} for one in diagnosis.skipped],
        notes=list(diagnosis.notes),
        series=list(series),
    )


def _finding(one: Finding) -> dict[str, Any]:
    said = asdict(one)
    downstream_of = said.pop("downstream_of")
    return {**said, "evidence": list(said["evidence"]), "steps": list(one.steps), "echo_of": downstream_of}
