"""What a handout is made of. Plain data: a page and a comment draw the same blocks, each in its own way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Union

#: How good a thing is, which a page colours; a word stands beside every colour.
Tone = Literal["same", "close", "warn", "bad", "muted", ""]


@dataclass(frozen=True)
class Facts:
    """Names and what they are."""

    rows: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Grid:
    """`tones`: one per row, or none. `right`: columns of numbers. `left_out`: rows that stand in the document alone."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    tones: Sequence[Tone] = ()
    right: frozenset[int] = frozenset()
    left_out: int = 0


@dataclass(frozen=True)
class StripMark:
    """A layer, a step, a tensor: its word (`DIFF`), and how far it is off, if a number says so."""

    label: str
    word: str
    tone: Tone
    size: float | None = None


@dataclass(frozen=True)
class Strip:
    """Marks in order, and where the eye is to go first. `sizes`: what `StripMark.size` is, drawn by powers of ten.
    `left_out`: marks after these."""

    marks: Sequence[StripMark]
    first: int | None = None
    sizes: str = ""
    left_out: int = 0


@dataclass(frozen=True)
class Bars:
    """Counts of a distribution, in order."""

    rows: Sequence[tuple[str, float]]
    unit: str = ""


@dataclass(frozen=True)
class Curve:
    """A signal over steps; `marks` are places in `values` that stand out. None in `values` is no finite number."""

    name: str
    steps: Sequence[str]
    values: Sequence[float | None]
    marks: Sequence[int] = ()
    note: str = ""


@dataclass(frozen=True)
class TokenMark:
    """A token as text, what is said of it, and how strongly it is coloured: 0 to 1; `here`: the one spoken of."""

    text: str
    said: str
    level: float = 0.0
    here: bool = False


@dataclass(frozen=True)
class Tokens:
    """Tokens of a sample in order. `colour`: what the colour means. `left_out`: those after them that are not here."""

    marks: Sequence[TokenMark]
    colour: str
    left_out: int = 0


@dataclass(frozen=True)
class Sayings:
    """Sentences, one below the other."""

    lines: Sequence[str]


@dataclass(frozen=True)
class Plain:
    """Text as a terminal shows it."""

    text: str


Block = Union[Facts, Grid, Strip, Bars, Curve, Tokens, Sayings, Plain]  # noqa: UP007 - isinstance of 3.10 takes both


@dataclass(frozen=True)
class Section:
    """`folded`: shut until somebody opens it."""

    title: str
    blocks: Sequence[Block]
    folded: bool = False
    tone: Tone = ""


@dataclass(frozen=True)
class Handout:
    """What one kind of document has to say: the answer, then its parts."""

    word: str
    tone: Tone
    sentence: str
    facts: Sequence[tuple[str, str]] = ()
    sections: Sequence[Section] = field(default_factory=list)
