"""`rldbg ls`: what a run holds."""

from __future__ import annotations

from typing import Annotated, Literal, TypedDict

from replay_core.documents.parts import Count, KeyEntry, ProblemEntry, Says, Settings, Versioned


class RecordLine(TypedDict):
    """A record of a run."""

    key: KeyEntry
    path: str
    fields: list[str] | None
    """Names; null until the header was read."""
    problems: list[Count]
    """Places in the document's problems of those that are about this record."""


class SeveralRuns(TypedDict, total=False):
    inside: list[str]
    """Where the path is a folder of runs that repeat each other's steps: theirs. No header of them was read."""


class RunDocument(Versioned, SeveralRuns):
    """A run and its records."""

    kind: Literal["run"]
    path: str
    dialect: str
    steps: list[int | None]
    records: list[RecordLine]
    problems: list[ProblemEntry]
    checked: Literal["names", "headers", "bytes"]
    """How far opening looked."""
    notes: list[str]
    flags: Settings | None
    """What the dump says of its settings."""
    models: Annotated[dict[str, str], Says(propertyNames={"pattern": r"^(\*|\d+)$"})]
    """Step ("*": every step) to the weights that computed it."""
    unreadable: Count
    """Records whose header could not be read."""
