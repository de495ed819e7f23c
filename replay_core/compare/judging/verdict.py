"""What a pair is called, by which rule, and what is known of it beside its figures."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from msgspec import Struct

from replay_core import naming
from replay_core.compare.judging import limits
from replay_core.dtypes import coarsest
from replay_core.naming import Meaning

if TYPE_CHECKING:
    from replay_core.documents.comparison import RuleEntry
    from replay_core.documents.parts import VerdictWord

EXACT_KINDS = frozenset({"ids", "mask", "layout", "text"})

#: Kinds whose single numbers (a loss, a gradient norm) the trainer reduced itself.
SCALAR_KINDS = frozenset({"loss", "metric", "value", "gradient"})


class Verdict(str, Enum):
    """What a pair is called, everywhere."""

    _value_: VerdictWord

    SAME = "SAME"
    CLOSE = "CLOSE"
    DIFF = "DIFF"
    NAN = "NAN"
    SHAPE = "SHAPE"
    MISSING = "MISSING"
    PADDING = "PADDING"

    @property
    def diverges(self) -> bool:
        return self in (Verdict.DIFF, Verdict.NAN, Verdict.SHAPE)


class Decision(Struct):
    """The rule that decided a verdict, and what it held against what."""

    id: str
    value: float
    limit: float

    def to_mapping(self) -> RuleEntry:
        return {"id": self.id, "value": self.value, "limit": self.limit}


class Judgement(Struct):
    """A verdict, whether it is CLOSE only just, and why in one sentence."""

    verdict: Verdict
    reason: str
    suspect: bool = False
    #: How far one row could have been off: rows past it are where to look.
    row_limit: float | None = None
    #: None where nothing had to be weighed: equal bytes, other shapes.
    rule: Decision | None = None


class Rounded(Struct, frozen=True):
    """Two resolutions rounded to the narrower dtype: how many elements still differ."""

    dtype: str
    unequal: int
    #: What is said where none does.
    said: str = ""


class Context(Struct):
    """What the judge knows beside the figures. Not frozen, like all that a comparison makes thousands of."""

    meaning: Meaning
    dtype: str
    exact: bool
    #: The module's recorded inputs are bitwise equal: the local column.
    local: bool = False
    #: How far the activations and log probabilities before it are off (`limits.WIDENED`).
    noise: float = 0.0
    #: The standard error of a mean over the log probabilities before it, in nats.
    mean_error: float = 0.0
    #: Both sides are known to be computed in fp32: their runs say so, or the figures show it.
    known_fp32: bool = False
    scalar: bool = False
    bitwise_only: bool = False
    #: What makes as much of a difference as there is, although it is no fault, in a sentence: told, not judged, once.
    explained: str | None = None
    #: Of logprobs: (sample, mean exp|d| over its tokens) of the sample furthest off.
    worst_sample: tuple[int, float] | None = None
    #: The canonical name, for rules that go by it.
    name: str = ""
    #: Two resolutions: what is more than a cast.
    rounded: Rounded | None = None
    #: Of positions that differ: the one constant that shifts each sample, in words; None where it is no constant.
    shift: str | None = None

    @property
    def form(self) -> str:
        """Which rules are asked: those of positions, scalars, log probabilities, or of numbers."""
        kind = self.meaning.kind
        if kind == "logprob" or (kind == "positions" and not self.bitwise_only):
            return kind
        return "scalar" if self.scalar and kind in SCALAR_KINDS else "number"

    @property
    def row(self) -> str:
        """The row of the tables: the dtype's family."""
        return coarsest(self.dtype)

    @property
    def computed(self) -> str:
        """The family that log probabilities were computed in: how they are stored does not tell."""
        if self.known_fp32:
            return "float32"
        return "bfloat16" if self.row in ("float64", "float32") else self.row

    @property
    def column(self) -> str:
        """The column of the tables."""
        if self.meaning.kind in ("gradient", "param"):
            return self.meaning.kind
        return "local" if self.local else "end-to-end"

    @property
    def is_projection(self) -> bool:
        """Whether it is what one matrix product returned, and its inputs were equal."""
        of = naming.module_of(self.name)
        return self.local and not naming.is_input(self.name) and of.endswith(limits.PROJECTIONS)

    def widened(self, id: str, limit: float) -> float:
        """The limit of a rule after the noise before the tensor, in half precision."""
        times = limits.WIDENED[id].get(self.column)
        if times is None or self.row not in limits.PROJECTION:
            return limit
        return max(limit, min(times[0] * self.noise, times[1] * limit))
