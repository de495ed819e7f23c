"""`rldbg diagnose`: findings, worst first, and the rules that could not look."""

from __future__ import annotations

from typing import Literal, TypedDict

from replay_core.documents.parts import Count, Number, Pair, Versioned

Severity = Literal["info", "warning", "error"]
Link = Literal[
    "dump", "tokens", "rewards", "groups", "advantages", "masks", "packing", "rollout_logprobs", "logprobs", "ref",
    "ratio", "loss", "reduction", "gradient", "optimizer", "trend", "time", "memory",
]  # fmt: skip


class EvidenceEntry(TypedDict):
    """One number and where it comes from."""

    name: str
    value: float | str | bool | None
    expected: str | None
    source: str | None


class PlaceEntry(TypedDict):
    """As much of a record's key, tensor and index, or of a log's line, as the evidence has; line counts from 1."""

    step: int | None
    micro: int | None
    rank: int | None
    role: str | None
    stage: str | None
    tensor: str | None
    sample: int | None
    position: int | None
    line: int | None
    path: str | None


class _Looked(TypedDict, total=False):
    looked: int
    """Steps that the rule looked at; 0 where it does not look step by step. Not in documents written before it was
    kept."""


class FindingEntry(_Looked):
    """One claim about a run."""

    id: str
    severity: Severity
    claim: str
    evidence: list[EvidenceEntry]
    cause: str
    next_step: str
    link: Link
    source: str
    where: PlaceEntry
    steps: list[int]
    echo_of: str | None
    """Id of the finding of an earlier link that explains this one."""


class SkippedRule(TypedDict):
    """A rule that could not look, and what it would need."""

    id: str
    why: str


class FindingCounts(TypedDict):
    """Findings by severity; echoes are counted apart."""

    error: Count
    warning: Count
    info: Count
    echoes: Count


class SeenRange(TypedDict):
    """What a log has of a signal."""

    min: Number
    median: Number
    max: Number


class ExpectedRow(TypedDict):
    """Expected beside seen. `holds` is null where the expected range is corrected."""

    what: str
    signal: str
    expected: Pair[Number | None]
    unit: str
    seen: SeenRange
    holds: bool | None
    source: str
    correction: str | None


class SeriesEntry(TypedDict):
    """A signal over steps, for a trends view."""

    signal: str
    name: str
    framework: str | None
    formula: str | None
    run: str
    steps: list[int | None]
    values: list[Number]
    marks: list[Count]
    """Places in `values` that stand out, those that are not finite included."""
    sparkline: str
    expected: list[ExpectedRow]
    share: Number | None
    """Of the time that the phases of a step take."""


class DiagnosisDocument(Versioned):
    """What is wrong with a run."""

    kind: Literal["diagnosis"]
    path: str
    dialect: str
    steps: list[int | None]
    counts: FindingCounts
    findings: list[FindingEntry]
    """Worst first; of one severity, earlier links of the chain first; echoes last."""
    checked: list[str]
    """Rules that looked."""
    skipped: list[SkippedRule]
    notes: list[str]
    series: list[SeriesEntry]
    """Signals over steps, for a trends view."""
