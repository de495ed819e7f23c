"""What a handout is made of. Plain data: a page and a comment draw the same blocks, each in its own way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Union

from msgspec import Struct, field

#: How good a thing is, which a page colours; a word stands beside every colour.
Tone = Literal["same", "close", "warn", "bad", "muted", ""]


class Facts(Struct, frozen=True):
    """Names and what they are."""

    rows: Sequence[tuple[str, str]]


class Grid(Struct, frozen=True):
    """`tones`: one per row, or none. `right`: columns of numbers. `left_out`: rows that stand in the document alone."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    tones: Sequence[Tone] = ()
    right: frozenset[int] = frozenset()
    left_out: int = 0


class StripMark(Struct, frozen=True):
    """A layer, a step, a tensor: its word (`DIFF`), and how far it is off, if a number says so."""

    label: str
    word: str
    tone: Tone
    size: float | None = None


class Strip(Struct, frozen=True):
    """Marks in order, and where the eye is to go first. `sizes`: what `StripMark.size` is, drawn by powers of ten.
    `left_out`: marks after these."""

    marks: Sequence[StripMark]
    first: int | None = None
    sizes: str = ""
    left_out: int = 0


class Bars(Struct, frozen=True):
    """Counts of a distribution, in order."""

    rows: Sequence[tuple[str, float]]
    unit: str = ""


class Curve(Struct, frozen=True):
    """A signal over steps; `marks` are places in `values` that stand out. None in `values` is no finite number."""

    name: str
    steps: Sequence[str]
    values: Sequence[float | None]
    marks: Sequence[int] = ()
    note: str = ""


class TokenMark(Struct, frozen=True):
    """A token as text, what is said of it, and how strongly it is coloured: 0 to 1; `here`: the one spoken of."""

    text: str
    said: str
    level: float = 0.0
    here: bool = False


class Tokens(Struct, frozen=True):
    """Tokens of a sample in order. `colour`: what the colour means. `left_out`: those after them that are not here."""

    marks: Sequence[TokenMark]
    colour: str
    left_out: int = 0


class Sayings(Struct, frozen=True):
    """Sentences, one below the other."""

    lines: Sequence[str]


class Plain(Struct, frozen=True):
    """Text as a terminal shows it."""

    text: str


Block = Union[Facts, Grid, Strip, Bars, Curve, Tokens, Sayings, Plain]  # noqa: UP007 - isinstance of 3.10 takes both


class Section(Struct, frozen=True):
    """`folded`: shut until somebody opens it."""

    title: str
    blocks: Sequence[Block]
    folded: bool = False
    tone: Tone = ""


class Handout(Struct, frozen=True):
    """What one kind of document has to say: the answer, then its parts."""

    word: str
    tone: Tone
    sentence: str
    facts: Sequence[tuple[str, str]] = ()
    sections: Sequence[Section] = field(default_factory=list)
