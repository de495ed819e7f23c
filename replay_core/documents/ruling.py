"""`rldbg referee A [B]`: noise or bug, which side, and where: each side against fp64 of its own recorded inputs."""

from __future__ import annotations

from typing import Literal, TypedDict

from replay_core.documents.parts import Count, Number, Versioned

RulingWord = Literal["NOISE", "SUSPECT", "BUG"]


class StatisticEntry(TypedDict):
    """A statistic of an error: its value, the most that rounding had of it, and its share of what noise may have."""

    name: str
    value: Number
    noise: Number
    excess: Number
    """Above 1 is no noise."""


class RuledTensor(TypedDict):
    """A recorded tensor against what its side's own inputs make of it."""

    tensor: str
    module: str
    """Whose work lies between the last recorded tensors and this one."""
    handed: bool
    """Whether the module hands it to a module that it calls; else it puts it out."""
    kind: str
    dtype: str
    ruling: RulingWord
    excess: Number
    """The largest of the statistics' excesses."""
    size: Number
    """rms of the error, in units of one rounding of the tensor."""
    relative: Number
    """|recorded - truth| / |truth|."""
    unequal: Number
    """Share of elements that are not the rounded truth."""
    gain: Number
    """The error is this times the truth, as far as it is a part of it."""
    what: str
    """What in it stands out: a token, a channel, a gain, low rank; its size alone."""
    sample: int | None
    position: int | None
    channel: int | None
    """Where it is worst."""
    recipe: str | None
    """Where other roundings than the model's own code has explain it."""
    rounding: str | None
    """Whether its kernel rounds once, or as the model's code is written; null where that cannot be told."""
    statistics: list[StatisticEntry]


class HypothesisEntry(TypedDict):
    """What was changed in the model, and how much of the error that leaves."""

    name: str
    explains: bool
    before: Number
    after: Number
    """Excess of the tensor over noise with the model as it is, and with the change."""


class LogprobFloor(TypedDict):
    """The log-probabilities against the noise of this model on this batch."""

    observed: Number
    """mean |recorded - truth|, nats."""
    floor: Number
    """mean of what rounding does to each token, nats (rms over the noise runs)."""
    ratio: Number
    tokens: Count
    past: Number
    """Share of tokens more than six times their own floor away."""


class ScalarRuling(TypedDict):
    """A loss or KL whose formula is known: of the recorded log-probabilities it makes the recorded number."""

    name: str
    recorded: Number
    truth: Number
    """Of the log-probabilities of the whole model in fp64."""
    floor: Number
    """What the log-probabilities' own noise leaves of it."""
    ratio: Number
    """|recorded - truth| / floor."""
    ruling: RulingWord


class RulingCoverage(TypedDict):
    """What was ruled and what was not; names are of tensors."""

    recorded: Count
    ruled: Count
    modules_ruled: Count
    modules_of_model: Count
    not_recorded: list[str]
    """Modules of the model of which nothing is recorded: the module around them answers for them."""
    unrooted: list[str]
    """Nothing recorded leads to them."""
    misfit: list[str]
    """They do not have the shape that the model gives them."""
    unreached: list[str]
    """The model's forward never comes to them."""
    routed_otherwise: list[str]
    """Whole numbers (experts) that the truth would choose otherwise; what was recorded was taken."""


class SideRuling(TypedDict):
    """One side, ruled alone."""

    path: str
    computation: str
    """Which step, rank and micro-batch."""
    weights: str | None
    dtype: str | None
    ruling: RulingWord | None
    why_not: str | None
    """Why it could not be ruled."""
    first: RuledTensor | None
    """The first BUG in order of computation, else the first SUSPECT."""
    hypotheses: list[HypothesisEntry]
    """Those tried on the first, the best first."""
    tensors: list[RuledTensor]
    """In order of computation."""
    floor: LogprobFloor | None
    scalars: list[ScalarRuling]
    coverage: RulingCoverage | None
    notes: list[str]


class GraftEntry(TypedDict):
    """B's recorded output of a module in A's forward, and A's in B's."""

    tensor: str
    comes: Number
    """The part of what the log-probabilities differ by that comes with B's output."""
    goes: Number | None
    """The part that goes with A's; null where B's weights and settings do not make the difference of themselves."""


class GraftingPart(TypedDict):
    """Proof by transplant: the first module, in order of computation, whose output carries the end difference."""

    sentence: str
    module: str | None
    grafts: list[GraftEntry]


class RulingDocument(Versioned):
    """Noise or bug."""

    kind: Literal["ruling"]
    ruling: RulingWord | None
    """null: not ruled; `sentence` says what is missing."""
    side: Literal["a", "b", "both"] | None
    module: str | None
    tensor: str | None
    what: str | None
    hypothesis: str | None
    sentence: str
    differences: list[str]
    """What the two sides were given differently: weights, settings, tokens, recipes."""
    graft: GraftingPart | None
    """null: not asked for."""
    a: SideRuling
    b: SideRuling | None
