"""What one reading knows: the bytes, what was noticed on the way, and how a file's own ids resolve.

The builders get it as their first argument; each container format gives it its `persistent` ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from replay_core.dumps.containers.region import Region
from replay_core.errors import DumpError

if TYPE_CHECKING:
    from replay_core.dumps.containers.symbols import StorageClass, Stranger
    from replay_core.dumps.containers.torch_rebuild import Storage

#: Files inside files inside files: a tensor pickled the plain way is one level, DataProto two.
MAX_NESTING = 4


class Span(NamedTuple):
    """Bytes that the pickle declares and nobody has read: `nbytes` from `offset` of `region`."""

    region: Region
    offset: int
    nbytes: int

    def read(self) -> bytes:
        return self.region.read(self.offset, self.nbytes)


class ShortBytes(bytes):
    """A handful of bytes, read, that still know where they lie."""

    span: Span


@dataclass(slots=True)
class Loading:
    """One container being read."""

    region: Region
    inert: frozenset[str] = frozenset()
    nesting: int = 0
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    strangers: dict[str, Stranger] = field(default_factory=dict)
    #: Streams stored in bytes, by where they lie: the same bytes are read once.
    nested: dict[Any, Any] = field(default_factory=dict)
    persistent: Callable[[Any], Any] | None = None
    #: The torch zip's storage of a class, key and number of elements.
    zip_storage: Callable[[StorageClass, str, int], Storage] | None = None
    #: Where the torch zip's storage of a key lies, and how many bytes it has.
    zip_place: Callable[[bytes], tuple[int, int]] | None = None
    #: Reads where the storages of many keys lie, ahead of `zip_place`.
    zip_look_up: Callable[[Iterable[bytes]], dict[bytes, tuple[int, int]]] | None = None
    big_endian: bool = False

    def malformed(self, what: str, *, expected: str | None = None, found: str | None = None) -> DumpError:
        return DumpError(what, file=str(self.region.path), expected=expected, found=found)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def inside(self, region: Region) -> Loading:
        """The reading of a file stored in this one's bytes.

        Raises:
            DumpError: nested deeper than any writer does.
        """
        if self.nesting >= MAX_NESTING:
            raise self.malformed("a stream inside a stream inside a stream", expected=f"at most {MAX_NESTING} deep")
        return Loading(region, self.inert, self.nesting + 1, self.notes, self.problems, self.strangers, self.nested)

    def refuse_strangers(self) -> None:
        """Raise for a global that was named and is not on the allow-list."""
        for stranger in self.strangers.values():
            if not stranger.excused:
                raise stranger.refusal(str(self.region.path))
