"""`rldbg weights`: did the engine get what the trainer pushed?"""

from __future__ import annotations

from typing import Literal, TypedDict

from replay_core.documents.parts import Count, Number, ProblemEntry, Shape, Versioned

#: What a parameter of the engine holds, beside what it should: `arrived` is the only good word. The second
#: and third lines say what else it holds; `differs` that nothing known explains it; `shape` that it is not made of the
#: trainer's; `unmapped` that the trainer has nothing for it; `unreadable` that it was not looked at.
Arrival = Literal[
    "arrived",
    "untouched", "older", "zero", "swapped", "other shard", "other expert", "other layer", "transposed", "rounded",
    "update", "scaled", "quantised", "partly",
    "differs", "shape", "unmapped", "unreadable",
]  # fmt: skip


class WeightPart(TypedDict):
    """A part of a destination: one projection of a fused one, one expert's of a stack."""

    part: str
    """"" where it is all of it."""
    source: str
    """The trainer's parameter."""
    arrival: Arrival
    what: str
    rel_l2: Number | None
    """Of what it holds against what it should; null where nothing but a digest is known, or where it arrived."""


class DestinationEntry(TypedDict):
    """A parameter of the engine."""

    name: str
    rank: int | None
    dtype: str
    shape: Shape
    arrival: Arrival
    what: str
    by_digest: bool
    """It was recorded as a digest: equal or not is all that is known."""
    parts: list[WeightPart]
    """Those that did not arrive; of a destination in one part, that one."""


class WeightsSide(TypedDict):
    """A state of weights."""

    path: str
    step: int | None
    parameters: Count
    ranks: list[int | None]


class _Unread(TypedDict, total=False):
    unread: Count
    """Files of either side that are missing or cannot be read: what they hold is not compared, and nothing agrees."""


class WeightsCoverage(_Unread):
    """What was looked at."""

    destinations: Count
    compared: Count
    by_digest: Count
    engine_own: Count
    """Parameters that an engine makes itself (rotary tables, scales): not compared."""
    unmoved: Count
    """Arrived, and equal to what was there before: nothing was to be sent, so nothing is proved."""
    padding_rows: Count
    """Rows that the engine adds to the vocabulary: not compared."""


class WeightsDocument(Versioned):
    """Every parameter of the engine, and what it holds."""

    kind: Literal["weights"]
    a: WeightsSide
    b: WeightsSide
    before: WeightsSide | None
    older: list[WeightsSide]
    parallel: Count
    """Over how many ranks the engine's parameters are cut."""
    agrees: bool
    """Every destination arrived, or holds what was allowed; and every parameter of the trainer has a destination."""
    allowed: list[str]
    headline: str
    counts: dict[str, Count]
    """Destinations by arrival."""
    destinations: list[DestinationEntry]
    not_sent: list[str]
    """The trainer's parameters that no destination is made of."""
    coverage: WeightsCoverage
    problems: list[ProblemEntry]
    notes: list[str]
