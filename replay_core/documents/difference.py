"""How the differences of one pair are spread, and where; the screen asks."""

from __future__ import annotations

from typing import Literal, TypedDict

from replay_core.documents.parts import Count, NamedTensor, Number, Shape, Versioned
from replay_core.documents.tensor import Log2Differences


class QuantileEntry(TypedDict):
    """|d| that a share of the finite elements does not pass; at most an eighth octave too large."""

    share: float
    abs: Number


class UlpBin(TypedDict):
    """Elements at most `up_to` numbers of the dtype apart; null: all beyond."""

    up_to: int | None
    count: Count


class UlpEntry(TypedDict):
    """Numbers of the dtype between a and b. The last bin has no end."""

    dtype: str
    max: Count
    bins: list[UlpBin]


class TokenPlace(TypedDict):
    """A token of a sample."""

    sample: Count
    position: Count


class StripPlace(TypedDict):
    """Where in a stretch |d| is greatest: the first element of that row (or channel)."""

    token: TokenPlace | None
    raw_a: Shape
    raw_b: Shape


class StripCell(TypedDict):
    """A stretch [start, end) of the rows (or channels) compared."""

    start: Count
    end: Count
    token: TokenPlace | None
    max_abs: Number
    rel_l2: Number
    at: StripPlace


class SpreadEntry(TypedDict):
    """The differences of a pair over the elements that count."""

    compared: Count
    mismatched: Count
    max_abs: Number
    pearson: Number | None
    quantiles: list[QuantileEntry]
    log2_abs: Log2Differences
    ulp: UlpEntry | None
    """Null where the dtypes differ."""


class StripEntry(SpreadEntry):
    """The same, and a strip along an axis: rows are tokens where the layout tells."""

    axis: Literal["row", "channel"]
    strip: list[StripCell]


class DifferenceDocument(Versioned, StripEntry):
    """How the differences of one pair are spread, and where."""

    kind: Literal["difference"]
    a: NamedTensor
    b: NamedTensor
