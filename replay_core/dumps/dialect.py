"""The Protocol every dialect of dump speaks, and the Index it answers with."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from replay_core.records import Problem, RecordKey, TensorRef


@dataclass(slots=True)
class Index:
    """What a dialect finds by looking at names: keys, files, what is wrong, what was inferred."""

    files: list[tuple[RecordKey, Path]]
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    flags: dict[str, Any] | None = None
    models: dict[int | None, str] = field(default_factory=dict)
    #: Field names per file where the dump's own index lists them.
    names: dict[Path, tuple[str, ...]] = field(default_factory=dict)
    #: Further files that the records read: no other dialect is to list them.
    beside: list[Path] = field(default_factory=list)


class Dialect(Protocol):
    """How one framework writes its dumps. Implemented by modules: `detect`, `index`, `read` are functions."""

    #: What documents and the screen call it.
    name: str

    def detect(self, path: Path) -> bool:
        """Whether the path (a directory or a file) is in this dialect. Looks at content, never only at a suffix."""

    def index(self, path: Path) -> Index:
        """Keys and files, by names alone where they suffice."""

    def read(self, key: RecordKey, path: Path) -> list[TensorRef]:
        """The fields of one file, named and aligned. Reads headers, never tensor bytes.

        What is wrong with the file and still lets it be read goes into a `records.Fields`.
        """
