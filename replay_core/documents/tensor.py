"""`rldbg show RUN TENSOR`, and what the screen looks at: one tensor, or two beside each other."""

from __future__ import annotations

from typing import Any, Literal, TypedDict

from replay_core.documents.comparison import PairEntry
from replay_core.documents.parts import Count, ExponentBin, KeyEntry, NamedTensor, Number, Shape, Value, Versioned
from replay_core.documents.record import FieldEntry, StatisticsEntry


class _More(TypedDict, total=False):
    more: list[str]
    """The other directories of its run."""


class PointedTensor(NamedTensor, _More):
    """A tensor that somebody asks for."""


class CounterpartEntry(TypedDict):
    """Of a parameter its gradient, of a gradient its parameter."""

    kind: Literal["gradient", "param"]
    key: KeyEntry
    name: str
    stats: StatisticsEntry
    values: list[Value]
    """At the window's places."""
    ratio: Number | None
    """The gradient's L2 over the parameter's."""


class _Counterpart(TypedDict, total=False):
    counterpart: CounterpartEntry | None
    """Where the run holds both; only the screen asks."""


class TensorSide(FieldEntry, _Counterpart):
    """One of the tensors, and where it lies."""

    path: str
    key: KeyEntry
    sampled: int | None
    """Elements the statistics looked at, where that is not all of them."""


class ValuesWindow(TypedDict):
    """Values of the last axis around an index of a; d = b - a."""

    index: list[Shape]
    a: list[Value] | None
    b: list[Value] | None
    d: list[Value] | None


class HistogramEntry(TypedDict):
    """Elements by power of two."""

    zeros: Count
    nonfinite: Count
    negative: Count
    bins: list[ExponentBin]


class SliceEntry(TypedDict):
    """A slice that was asked for, flattened."""

    row: int | None
    start: Shape
    shape: Shape
    values: list[Any]
    left_out: Count


class DetectedAlignment(TypedDict):
    """The alignment the data show, where no name settles it."""

    alignment: str | None
    against: str | None
    why: str


class DecodedText(TypedDict):
    """Token ids as text: the values shown, and the first samples."""

    tokenizer: str
    pieces: list[str]
    samples: list[str]


class AxisStrip(TypedDict):
    """Relative L2 of d per stretch of an axis."""

    axis: Count
    size: Count
    rel_l2: list[Number | None]
    """Null where nothing of the stretch was looked at."""


class Log2Differences(TypedDict):
    """Elements by floor(log2 |d|)."""

    zeros: Count
    nonfinite: Count
    bins: list[ExponentBin]


class DifferenceStrips(TypedDict):
    """Where the pair differs: relative L2 of d = b - a per stretch of each axis, and |d| by power of two."""

    axes: list[AxisStrip]
    histogram: Log2Differences
    looked_at: Count


class TokenColumn(TypedDict):
    """A value per token of the sample, as one side recorded it."""

    side: Literal["a", "b"]
    name: str
    stage: str
    values: list[Value]


class _TokensFrom(TypedDict, total=False):
    first: Count
    """The position of the first token shown."""
    position: Count | None
    """The token that the tensor is looked at; null where that is no token's place."""


class TokensEntry(_TokensFrom):
    """One sample token by token."""

    sample: Count
    samples: Count
    ids: list[int]
    left_out: Count
    tokenizer: str | None
    pieces: list[str] | None
    columns: list[TokenColumn]


class TensorDocument(Versioned):
    """One tensor, or a pair."""

    kind: Literal["tensor"]
    a: TensorSide
    b: TensorSide | None
    verdict: PairEntry | None
    window: ValuesWindow
    histogram: HistogramEntry | None
    part: SliceEntry | None
    detected: DetectedAlignment | None
    text: DecodedText | None
    part_b: SliceEntry | None
    difference: DifferenceStrips | None
    tokens: TokensEntry | None
