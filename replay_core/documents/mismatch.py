"""`rldbg mismatch`: why the rollout engine's log-probabilities are not the trainer's."""

from __future__ import annotations

from typing import Literal, TypedDict

from replay_core.documents.parts import Count, Number, Versioned

#: Whose setting a cause is: it was in force where the rollout was sampled, or in the trainer's forward.
SideWord = Literal["engine", "trainer", "both"]


class GapEntry(TypedDict):
    """Figures of d = trainer - rollout, in nats, over the tokens that count."""

    tokens: Count
    mean: Number
    """mean |d|."""
    p99: Number
    max: Number
    k3: Number
    """mean(e^d - d - 1)."""
    multiplier: Number
    """mean e^|d|."""


class TokenProblem(TypedDict):
    """Something about the tokens themselves, told without any model."""

    what: str
    is_fault: bool
    """False: worth knowing, and no cause of a gap by itself."""
    samples: Count
    sample: int | None
    position: int | None
    texts: list[str] | None
    """The first token that differs, as each side has it; null without a tokenizer."""


class GapCause(TypedDict):
    """A candidate: what is left of the gap where it is taken for true."""

    name: str
    family: str
    side: SideWord
    told_by: Literal["dump", "replay"]
    left: GapEntry | None
    """null where it is told by a sign and not by a prediction, or could not be tried."""
    share: Number | None
    """Of the gap above the floor, what goes away; below 0 where the gap grows."""
    tokens_explained: Number | None
    """Of the tokens off by more than the floor, the share that is off by less than half afterwards."""
    named: bool
    why_not: str | None
    """Why it could not be tried."""


class MismatchFloor(TypedDict):
    """What rounding alone leaves between two right forwards of this model on these tokens."""

    floor: Number
    """nats."""
    observed: Number
    """Of the same tokens, before any cause is taken away."""
    left: Number
    """And after the named ones are."""
    ratio: Number
    """left / floor."""
    dtype: str
    """Of either side: `engine bfloat16, trainer float32`."""
    runs: Count


class VersionSpan(TypedDict):
    """The tokens of a sequence that one set of weights explains."""

    weights: str
    begin: Count
    end: Count
    """The first token that it does not explain any more; both count from the beginning of the response."""


class SequenceEntry(TypedDict):
    """A sequence, those that are further off first."""

    sample: Count
    tokens: Count
    mean: Number
    share: Number
    """Of the sum of |d| over all."""
    is_outlier: bool
    versions: list[VersionSpan]


class RoutingEntry(TypedDict):
    """A mixture's experts: what the recording chose otherwise than this model's live router."""

    tokens: Count
    observed: Number
    """Share of choices (token and layer)."""
    expected: Number | None
    """What rounding alone makes of it in the floor's runs."""


class MismatchDocument(Versioned):
    """Why engine and trainer disagree, and what is left."""

    kind: Literal["mismatch"]
    path: str
    step: int | None
    model: str | None
    rollout: str
    """The tensor and file that the rollout's log-probabilities were read from."""
    trainer: str
    samples: Count
    tried_on: Count
    """Samples that the candidates were replayed on; 0 without a model."""
    gap: GapEntry | None
    correlation: Number | None
    headline: str
    agrees: bool | None
    """Nothing left to explain; null where there was no answer (`lacks` says why)."""
    tokens: list[TokenProblem]
    causes: list[GapCause]
    """Those named first, then by what they explain."""
    explained: Number | None
    """The share that the named causes explain together."""
    floor: MismatchFloor | None
    sequences: list[SequenceEntry]
    routing: RoutingEntry | None
    lacks: list[str]
    next: list[str]
    """Commands that run as printed."""
    notes: list[str]
