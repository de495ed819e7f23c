"""Runs of one folder, diagnosed apart: what is said of each carries its name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from replay_core.diagnose.finding import LINKS, SEVERITIES, Diagnosis, Skipped


def together(named: Sequence[tuple[str, Diagnosis]]) -> Diagnosis:
    """One diagnosis of several: causes before echoes, worst first; a rule is skipped if no run let it look."""
    findings = [
        replace(finding, claim=f"{name}: {finding.claim}")
        for name, diagnosis in named
        for finding in diagnosis.findings
    ]
    findings.sort(
        key=lambda one: (one.echo_of is not None, SEVERITIES.index(one.severity), LINKS.index(one.link), one.id)
    )
    checked = dict.fromkeys(id for _, diagnosis in named for id in diagnosis.checked)
    whys: dict[str, list[str]] = {}
    for _, diagnosis in named:
        for one in diagnosis.skipped:
            if one.id not in checked and one.why not in whys.setdefault(one.id, []):
                whys[one.id].append(one.why)
    notes = [f"{len(named)} runs of this folder were diagnosed apart: {', '.join(name for name, _ in named)}"]
    notes += [f"{name}: {note}" for name, diagnosis in named for note in diagnosis.notes]
    skipped = tuple(Skipped(id, "; ".join(why)) for id, why in whys.items())
    return Diagnosis(tuple(findings), tuple(sorted(checked)), skipped, tuple(notes))
