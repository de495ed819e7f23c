"""What a dialect is: how one framework writes its dumps, and every fact that opening a run needs to know of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct, field

from replay_core.errors import DumpError
from replay_core.records import Problem, RecordKey, TensorRef

#: A file, and the record it holds; one file may hold several.
Entry = tuple[RecordKey, Path]


class Index(Struct):
    """What a dialect finds by looking at names: keys, files, what is wrong, what was inferred."""

    files: list[Entry]
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    flags: dict[str, Any] | None = None
    models: dict[int | None, str] = field(default_factory=dict)
    #: What the trainer noted of the run: its configuration, seeds, tokenizer.
    facts: dict[str, Any] = field(default_factory=dict)
    #: Field names per file where the dump's own index lists them.
    names: dict[Path, tuple[str, ...]] = field(default_factory=dict)
    #: Further files that the records read: no other dialect is to list them.
    beside: list[Path] = field(default_factory=list)


class Dialect(Struct, frozen=True, eq=False):
    """How one framework writes its dumps. A file of several dialects' liking belongs to the first that knows it."""

    name: str
    """What documents and the screen call it. Dialects of one name are asked in the order of the registry."""
    known_by: Literal["index", "names", "content", "rest"]
    """What tells its files from others': an index of its own, which says what belongs to the dump, so that no other
    dialect is asked; the names that its framework gives; what files hold, whatever they are called; or that no other
    dialect has claimed them."""
    detect: Callable[[Path], bool]
    """Whether the path (a directory or a file) is in this dialect. Looks at content, never only at a suffix."""
    index: Callable[[Path], Index]
    """Keys and files, by names alone where they suffice."""
    read: Callable[[RecordKey, Path], Sequence[TensorRef]]
    """The fields of one file, named and aligned. Reads headers, never tensor bytes. What is wrong with the file and
    still lets it be read goes into a `records.Fields`."""
    several: Callable[[Sequence[RecordKey], Path], Iterator[Sequence[TensorRef] | DumpError]] | None = None
    """The same of several records of one file, in the order of the keys, for files of very many small ones: to ask for
    each of them alone costs ten times what stands in it. What is wrong with a record alone stands in its place."""
    told: Callable[[RecordKey, Path], Sequence[TensorRef] | None] | None = None
    """What its index tells of the fields of one file, digests included, and no bytes; None where it does not."""
    before: Mapping[str, str] = field(default_factory=dict)
    """Dialects that would take a file of this one's if they were asked first, each with the reason."""
    grows: str | None = None
    """A regular expression on names of files that are added to while a run goes on: a follower looks at their sizes."""
    is_container: bool = True
    """Its files are read whole. Others are read line by line, record by record, and say themselves where they end."""
    numbered: Callable[[list[Entry]], list[Entry]] | None = None
    """Gives numbers to the files that are left to it in a directory, once it is known which those are."""


def any_of(files: Callable[[Path], Iterable[object]]) -> Callable[[Path], bool]:
    """Detects a dialect by whether any of its files is there."""
    return lambda path: next(iter(files(path)), None) is not None


def alone(
    several: Callable[[Sequence[RecordKey], Path], Iterator[Sequence[TensorRef] | DumpError]],
) -> Callable[[RecordKey, Path], Sequence[TensorRef]]:
    """`Dialect.read` of a dialect that reads several."""

    def read(key: RecordKey, path: Path) -> Sequence[TensorRef]:
        found = next(several([key], path))
        if isinstance(found, DumpError):
            raise found
        return found

    return read


def in_order(dialects: Sequence[Dialect]) -> list[Dialect]:
    """The dialects, each before those it must be asked before, else as they stand.

    Raises:
        ValueError: two must each be asked before the other.
    """
    waiting, ordered = list(dialects), []
    while waiting:
        named = {name for dialect in waiting for name in dialect.before}
        free = next((dialect for dialect in waiting if dialect.name not in named), None)
        if free is None:
            raise ValueError(f"dialects go round in a circle: {', '.join(dialect.name for dialect in waiting)}")
        waiting.remove(free)
        ordered.append(free)
    return ordered
