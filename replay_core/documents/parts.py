"""What documents of several kinds have in common."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypedDict, TypeVar

T = TypeVar("T")


class Says:
    """Beside a type in `Annotated`: a piece of the schema. What has a `title` stands there once, under it."""

    def __init__(self, **piece: Any) -> None:
        self.piece = piece


Number = Annotated[
    float | Literal["nan", "inf", "-inf"],
    Says(title="number", description="What JSON cannot say of a number is a word."),
]
Count = Annotated[int, Says(minimum=0)]
Shape = list[Count]
Pair = Annotated[list[T], Says(minItems=2, maxItems=2)]
Value = Annotated[
    float | str | bool | list[float | str | bool | None] | None,
    Says(
        title="value",
        description="One element: a number, a truth value, a text; a complex number is its Python text. A list where a "
        "field holds texts.",
    ),
]
#: Settings by name, as a trainer, a model or a person gave them: any names, any values.
Settings = dict[str, Any]
#: What JSON reads as an object before anybody has looked at it.
Untyped = dict[str, Any]

VerdictWord = Literal["SAME", "CLOSE", "DIFF", "NAN", "SHAPE", "MISSING", "PADDING"]


class Stamp(TypedDict):
    """Who wrote a document, and when (UTC)."""

    tool: Annotated[str, Says(pattern=r"^rldbg \S+$")]
    created: Annotated[str, Says(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$")]


class Versioned(Stamp):
    """What every document has, beside its kind."""

    schema_version: Literal[1]


class KeyEntry(TypedDict):
    """Which computation a record holds; a part the dump lacks is null. epoch and minibatch explain it without naming
    it."""

    step: int | None
    micro: int | None
    rank: int | None
    role: str | None
    stage: str
    epoch: int | None
    minibatch: int | None


class ProblemEntry(TypedDict):
    """What a reader must know before trusting the dump."""

    where: str
    what: str


class NamedTensor(TypedDict):
    """A tensor of a record."""

    path: str
    key: KeyEntry
    name: str


class ErrorEntry(TypedDict):
    """An error, as the tree of `errors.py` has it."""

    type: str
    message: str
    file: str | None
    tensor: str | None
    expected: str | None
    found: str | None
    hint: str | None


class ExponentBin(TypedDict):
    """Elements whose floor(log2 |x|) is the exponent."""

    exponent: int
    count: Count
