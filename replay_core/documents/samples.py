"""`rldbg samples RUN`: the samples of a step as a person reads them, and every token of those that were asked for."""

from __future__ import annotations

from typing import Literal, TypedDict

from replay_core.documents.parts import Count, Number, Versioned

#: What samples are put in order by: the furthest, the longest, the least first; `order` is as recorded.
SampleOrder = Literal["order", "reward", "length", "mismatch", "clipped", "group"]


class RewardPart(TypedDict):
    """A number of the sample that is a reward, or a part of one."""

    name: str
    value: Number | None


class SampleEntry(TypedDict):
    """One sample: what was asked, what was answered, and what it was worth."""

    sample: Count
    group: int | None
    """Samples of one prompt have one number."""
    prompt: str | None
    response: str | None
    """null without recorded texts and without a tokenizer."""
    tokens: Count | None
    """Of the response, where it is known; else of all; null where only texts are recorded."""
    reward: Number | None
    reward_parts: list[RewardPart]
    advantage: Number | None
    """null where there is none, or where it changes from token to token."""
    mismatch: Number | None
    """mean |trainer - rollout| over the tokens that count, nats."""
    clipped: Number | None
    """Share of the tokens that count whose ratio policy / old is more than .2 from 1."""
    truncated: bool | None


class SampleColumn(TypedDict):
    """A number for each token of the sample; null where nothing was said of it."""

    name: str
    """`delta_logprob` is trainer - rollout, `ratio` policy / old; the others are as recorded."""
    values: list[Number | None]


class TurnText(TypedDict):
    """What one of a conversation says."""

    role: str
    """As the recorded messages or the marks of the chat template say; else `prompt` and `response`."""
    text: str


class TurnOfTokens(TypedDict):
    """Which tokens of a sample are whose turn."""

    role: str
    """By the marks in the decoded text; else by the mask: `prompt`, `response`, and `environment` for what lies in the
    response and does not count."""
    begin: Count
    end: Count
    """The first token that is no longer of the turn."""
    counted: Count | None
    """Tokens that count in the loss; null without a mask."""


class SampleTokens(TypedDict):
    """A sample in full: its turns as text, and token by token."""

    sample: Count
    begin: Count
    """Where the response begins."""
    texts: list[TurnText]
    """Empty without recorded texts and without a tokenizer."""
    turns: list[TurnOfTokens]
    ids: list[int]
    """Empty where only texts are recorded."""
    pieces: list[str] | None
    left_out: Count
    columns: list[SampleColumn]


class TokenOfStep(TypedDict):
    """A token of the step."""

    sample: Count
    position: Count
    id: int
    piece: str | None
    value: Number


class SamplesDocument(Versioned):
    """The samples of a step."""

    kind: Literal["samples"]
    path: str
    step: int | None
    by: SampleOrder
    search: str | None
    """Only samples whose prompt or response holds it, whatever the case."""
    total: Count
    """Samples of the step."""
    groups: Count | None
    tokenizer: str | None
    samples: list[SampleEntry]
    left_out: Count
    """Samples that were found and are not listed."""
    tokens: list[SampleTokens]
    """Of the samples that were asked for, else of the first listed."""
    worst_by: str | None
    """The column that `worst` is by: the first of those that the step has."""
    worst: list[TokenOfStep]
    """The tokens of the whole step where that is greatest."""
    notes: list[str]
