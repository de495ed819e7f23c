"""`rldbg show RUN`: the fields of one record."""

from __future__ import annotations

from typing import Literal, TypedDict

from replay_core.documents.parts import Count, KeyEntry, Number, ProblemEntry, Shape, Value, Versioned

Alignment = Literal["full", "response", "next", "packed", "prompt", "sample"]


class StatisticsEntry(TypedDict):
    """Over every element, padding included; min, max, mean, std and l2 over the finite ones, null without any."""

    numel: Count
    nan: Count
    pos_inf: Count
    neg_inf: Count
    zeros: Count
    min: Number | None
    max: Number | None
    mean: Number | None
    std: Number | None
    l2: Number | None


class FieldEntry(TypedDict):
    """A field of a record: what it is, and its value where it is a scalar or a text."""

    name: str
    """As the file calls it."""
    canonical: str | None
    dtype: str
    shape: Shape
    alignment: Alignment | None
    """What the token axis means."""
    pad: str | None
    """Where padding lies, if the dialect says so."""
    rows: Shape | None
    """Lengths of the rows of a ragged list."""
    stats: StatisticsEntry | None
    """Null where nobody looked."""
    value: Value
    problem: str | None
    """Why the field cannot be read."""
    sentinel: str | None


class RecordDocument(Versioned):
    """A record and its fields."""

    kind: Literal["record"]
    key: KeyEntry
    path: str
    fields: list[FieldEntry]
    problems: list[ProblemEntry]
