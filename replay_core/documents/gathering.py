"""`rldbg gather DIR`: what the units of a long job have come to so far."""

from __future__ import annotations

from typing import Literal, TypedDict

from replay_core.documents.parts import Count, ErrorEntry, Number, ProblemEntry, Settings, Versioned

#: `done` has an answer. `failed` an error, `crashed` took its process along, or its worker is gone; both run again
#: when a worker comes. `running` is held by a worker that gives signs of life. `left`: nobody has begun it.
UnitState = Literal["done", "failed", "crashed", "running", "left"]


class UnitEntry(TypedDict):
    """One unit of work: one job on one part of the run, and the file of its answer."""

    id: str
    """Digest of the records, the weights, the settings and rldbg's version."""
    label: str
    run: str | None
    """Of a folder of runs: which."""
    step: int | None
    rank: int | None
    micro: int | None
    state: UnitState
    exit_code: Count | None
    """Of its answer, or of its error; null before there is either, and of one that only measures for another."""
    said: str
    """What it came to, in a line."""
    file: str | None
    """Its document; `rldbg FILE` shows it. null of one that only measures for another."""
    error: ErrorEntry | None
    tries: Count
    """How often it ended, with an answer or without."""


class UnitCounts(TypedDict):
    """Units by state, and those that are done and have judged by what they came to."""

    total: Count
    done: Count
    failed: Count
    crashed: Count
    running: Count
    left: Count
    agree: Count
    diverge: Count
    """Done, and its own exit code is not 0."""


class UnitFirst(TypedDict):
    """The first unit, in order of computation, that does not agree."""

    id: str
    label: str
    said: str
    file: str | None


class OneSided(TypedDict):
    """Steps that only one of two runs has: no unit can compare them."""

    a: list[int]
    b: list[int]


class GatheringDocument(Versioned):
    """The units of a directory, folded; while they run, as far as they are."""

    kind: Literal["gathering"]
    directory: str
    command: Literal["compare", "diagnose", "replay", "referee"]
    asked: Settings
    shard: str | None
    """The part that is told of, `2/4`; null: every unit."""
    agrees: bool | None
    """false: a unit that is done does not agree, or a step has one side; null: not so, and not all are done, or
    all that are only measured for others."""
    headline: str
    counts: UnitCounts
    first: UnitFirst | None
    one_sided: OneSided
    eta_s: Number | None
    """Seconds that what is left takes the workers that run now; null where none runs, or none has ended yet."""
    stale: Count
    """Answers that lie there of other records, weights, settings or versions: not counted, not removed."""
    units: list[UnitEntry]
    """In order of computation."""
    problems: list[ProblemEntry]
    notes: list[str]
