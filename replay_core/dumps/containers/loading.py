"""What one reading knows: the bytes, what was noticed on the way, and what the file's own names turn into.

The builders get a `Loading` as their first argument; each container format gives it its `persistent` ids. A global that
a pickle names becomes a `Symbol` of ours, never the thing itself: a name and, when the file may call it, a function of
ours to call instead. One that nobody knows becomes a `Stranger`: holding it is harmless, calling or keeping it is
refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from msgspec import Struct, field

from replay_core.dtypes import ITEMSIZE
from replay_core.dumps.containers.region import Region
from replay_core.errors import DumpError, UnsafeFileError

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


class Storage(NamedTuple):
    """A run of bytes that tensors are views of. `itemsize` 0: numpy has no such dtype."""

    span: Span
    dtype: str
    itemsize: int
    big_endian: bool = False
    #: False while a stream is read only to learn where its storages are.
    located: bool = True


class Loading(Struct):
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
    #: Of a file of lines only so many are wanted; `is_cut` where there are more.
    most_rows: int | None = None
    is_cut: bool = False
    #: Reads a torch file that lies inside a pickle's bytes; the room's door gives it.
    torch_stream: Callable[[Loading], Any] | None = None

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
        return Loading(
            region, self.inert, self.nesting + 1, self.notes, self.problems, self.strangers, self.nested,
            torch_stream=self.torch_stream,
        )  # fmt: skip

    def refuse_strangers(self) -> None:
        """Raise for a global that was named and is not on the allow-list."""
        for stranger in self.strangers.values():
            if not stranger.excused:
                raise stranger.refusal(str(self.region.path))


class Symbol:
    """Something a pickle may name. `call(loading, args)` is what REDUCE does with it."""

    __slots__ = ("call", "name")

    def __init__(self, name: str, call: Callable[[Loading, tuple[Any, ...]], Any] | None = None) -> None:
        self.name = name
        self.call = call or self._not_callable

    def _not_callable(self, loading: Loading, args: tuple[Any, ...]) -> Any:
        raise loading.malformed(f"the pickle calls `{self.name}`, which is not a function")

    def __repr__(self) -> str:
        return self.name


class DType(Symbol):
    """A torch or ml_dtypes dtype; `dtype` is None where numpy has none like it."""

    __slots__ = ("dtype",)

    def __init__(self, name: str, dtype: str | None) -> None:
        super().__init__(name)
        self.dtype = dtype


class StorageClass(Symbol):
    """`torch.FloatStorage` and its kin; `dtype` is the name, `itemsize` 0 where numpy has none like it."""

    __slots__ = ("dtype", "is_plain", "itemsize")

    def __init__(self, name: str, dtype: str, itemsize: int) -> None:
        super().__init__(name)
        self.dtype = dtype
        self.itemsize = itemsize
        #: numpy has it, so that a tensor of it can be read.
        self.is_plain = dtype in ITEMSIZE


class TensorClass(Symbol):
    """A class that is a plain tensor to us: `torch.Tensor`, `Parameter`, `Buffer`."""

    __slots__ = ()


class InertClass(Symbol):
    """A framework's record class: an instance is kept as `{"__class__": name, "args": …, "state": …}`."""

    __slots__ = ()

    def __init__(self, name: str) -> None:
        super().__init__(name, self._instance)

    def _instance(self, loading: Loading, args: tuple[Any, ...]) -> dict[str, Any]:
        return {"__class__": self.name, "args": args} if args else {"__class__": self.name}


class Stranger(Symbol):
    """A global that is not on the allow-list. `excused` once it only names an unreadable tensor's class."""

    __slots__ = ("excused",)

    def __init__(self, name: str) -> None:
        super().__init__(name, self._refuse)
        self.excused = False

    def _refuse(self, loading: Loading, args: tuple[Any, ...]) -> Any:
        raise self.refusal(str(loading.region.path))

    def refusal(self, file: str) -> UnsafeFileError:
        return UnsafeFileError(
            f"the file asks to use `{self.name}`; nothing was run",
            file=file,
            expected="tensors, numbers, text and containers of these",
            found=f"the global `{self.name}`",
            hint="if you trust the file, load it where it was written and save plain tensors: torch.save({...})",
        )
