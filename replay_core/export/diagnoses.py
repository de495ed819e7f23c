"""The diagnosis document, from findings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from msgspec.structs import asdict

from replay_core.documents.version import SCHEMA_VERSION
from replay_core.export.documents import stamp
from replay_core.export.numbers import clean

if TYPE_CHECKING:
    from replay_core.diagnose.finding import Diagnosis, Finding
    from replay_core.documents.diagnosis import (
        DiagnosisDocument,
        EvidenceEntry,
        FindingEntry,
        Link,
        PlaceEntry,
        SeriesEntry,
    )
    from replay_core.records import Run


def diagnosis_document(run: Run, diagnosis: Diagnosis, series: Sequence[SeriesEntry] = ()) -> DiagnosisDocument:
    """A diagnosis document; `series` are the signals over steps that a trends view draws."""
    causes = [finding.severity for finding in diagnosis.findings if finding.downstream_of is None]
    doc: DiagnosisDocument = {
        "schema_version": SCHEMA_VERSION,
        "kind": "diagnosis",
        **stamp(),
        "path": str(run.path),
        "dialect": run.dialect,
        "steps": run.steps(),
        "counts": {
            "error": causes.count("error"),
            "warning": causes.count("warning"),
            "info": causes.count("info"),
            "echoes": len(diagnosis.findings) - len(causes),
        },
        "findings": [_finding(one) for one in diagnosis.findings],
        "checked": list(diagnosis.checked),
        "skipped": [{"id": one.id, "why": one.why} for one in diagnosis.skipped],
        "notes": list(diagnosis.notes),
        "series": list(series),
    }
    return clean(doc)


def _finding(one: Finding) -> FindingEntry:
    return {
        "id": one.id,
        "severity": one.severity,
        "claim": one.claim,
        "evidence": [cast("EvidenceEntry", asdict(evidence)) for evidence in one.evidence],
        "cause": one.cause,
        "next_step": one.next_step,
        "link": cast("Link", one.link),
        "source": one.source,
        "where": cast("PlaceEntry", asdict(one.where)),
        "steps": list(one.steps),
        "looked": one.looked,
        "echo_of": one.downstream_of,
    }
