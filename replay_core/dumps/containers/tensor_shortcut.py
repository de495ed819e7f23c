"""A regular expression for the thirty opcodes that `torch.save` spends on each entry of a state dict.

A state dict is the same thirty opcodes a thousand times over; taking them by columns makes listing it
some five times faster. What the opcodes put in the memo is put there, so the outcome is the loop's. Any
deviation from the pattern (an index put twice, an index read that the run itself puts) and the loop does it.
"""

from __future__ import annotations

import pickle
import re
import struct
from collections.abc import Iterator
from functools import lru_cache
from math import prod
from typing import Any

from replay_core.budget import is_walkable
from replay_core.dumps.containers.loading import Loading, StorageClass
from replay_core.dumps.containers.torch_rebuild import Geometry, geometry, view
from replay_core.naming import held_once
from replay_core.records import FileBytes, TensorRef
from replay_core.regexes import regex

#: Indices below 256 have the short form only, as every pickler writes: equal indices are then equal bytes.
_GET = rb"(h.|j.(?!\0\0\0).{3})"
_PUT = rb"(q.|r.(?!\0\0\0).{3})"
_NUMBER = rb"(?:K.|M..|J.{4})"
#: An empty tuple is a singleton that picklers do not memoise.
_NUMBERS = rb"(?:(%b(?:\x85|%b(?:\x86|%b\x87))|\(%b{4,64}t)%b|\))" % (_NUMBER, _NUMBER, _NUMBER, _NUMBER, _PUT)

#: Key, `_rebuild_tensor_v2`, then ((storage, class, key, location, numel), offset, size, strides, …).
_ENTRY = regex(
    rb"X(..)\0\0([A-Za-z0-9_.:/ -]{1,400})" + _PUT + _GET + rb"\(\(" + _GET + _GET
    + rb"X(.)\0\0\0([0-9]+)" + _PUT + _GET + rb"(" + _NUMBER + rb")t" + _PUT + rb"Q"
    rb"(" + _NUMBER + rb")" + _NUMBERS + _NUMBERS + rb"([\x88\x89])" + _GET + rb"\)R" + _PUT + rb"t" + _PUT + rb"R"
    + _PUT,
    re.DOTALL,
)  # fmt: skip


@lru_cache(maxsize=4096)
def _decoded(opcodes: bytes) -> Any:
    """A number. The pattern let nothing but number opcodes through, the one thing pickle itself may decode."""
    return pickle.loads(opcodes + b".")


@lru_cache(maxsize=4096)
def _size_and_strides(size: bytes | None, strides: bytes | None) -> tuple[Any, Any, Geometry | None]:
    """The two tuples, and what they amount to; no geometry if they are no tensor's."""
    lengths = pickle.loads(size + b".") if size else ()
    steps = pickle.loads(strides + b".") if strides else ()
    try:
        return lengths, steps, geometry(lengths, steps)
    except ValueError:
        return lengths, steps, None


#: Fewer entries are not worth the columns.
_MIN_ENTRIES = 4
#: Taken at once: the opcodes of so many stand in memory by columns, half a kilobyte each.
_MAX_ENTRIES = 512
#: A memo of more is not asked for its largest index.
_MAX_MEMO = 4096
_UNUSUAL: tuple[list[Any], int] = ([], -1)


def _index(opcode: bytes) -> int:
    return int.from_bytes(opcode[1:], "little")


@lru_cache(maxsize=2)
def _puts_from(first: int, count: int) -> bytes:
    """The opcodes that put the next `count` things in the memo, as picklers number them: one after the other."""
    short = b"".join(b"q%c" % index for index in range(first, min(first + count, 256)))
    long = range(max(first, 256), max(first + count, 256))
    indices = struct.pack(f"<{len(long)}I", *long)
    puts = bytearray(b"r" * (5 * len(long)))
    for place in range(4):
        puts[1 + place :: 5] = indices[place::4]
    return short + bytes(puts)


class Memo(dict[int, Any]):
    """The machine's memo. What runs of entries put in it waits: most files never ask for any of it again."""

    def __init__(self) -> None:
        super().__init__()
        #: Where the entries of each run begin in which bytes, and what came of them.
        self.waiting: list[tuple[Loading, bytes, int, dict[bytes, Any], list[Any]]] = []
        self._next = 0

    def defer(
        self, loading: Loading, buf: bytes, at: int, named: dict[bytes, Any], entries: list[Any], span: range
    ) -> bool:
        """Keep what a run puts at the indices of `span`. False where something may stand there: then order matters."""
        if len(self) > _MAX_MEMO or span.start < self._next or max(self, default=-1) >= span.start:
            return False
        self._next = span.stop
        self.waiting.append((loading, buf, at, named, entries))
        return True

    def settle(self) -> bool:
        """Put what waits where nothing newer was put; whether anything waited."""
        waiting, self.waiting = self.waiting, []
        for loading, buf, at, named, entries in waiting:
            for number in range(0, len(entries), 2):
                match = _ENTRY.match(buf, at)
                assert match is not None  # it matched before
                at = match.end()
                for index, value in _puts_of(loading, match.groups(), named, entries[number], entries[number + 1]):
                    self.setdefault(index, value)
        return bool(waiting)


def _puts_of(
    loading: Loading, row: tuple[bytes, ...], named: dict[bytes, Any], text: str, tensor: Any
) -> Iterator[tuple[int, Any]]:
    """What the opcodes of one entry put in the memo, in their order."""
    (
        _, _, name_put, _, _, cls, _, key, key_put, location, numel, id_put, offset, size, size_put, strides,
        stride_put, grad, _, hooks_put, args_put, tensor_put,
    ) = row  # fmt: skip
    lengths, steps, _ = _size_and_strides(size, strides)
    count, first = _decoded(numel), _decoded(offset)
    hooks: dict[str, Any] = {}
    assert loading.zip_storage is not None
    storage = loading.zip_storage(named[cls], key.decode(), count)
    yield _index(name_put), text
    yield _index(key_put), key.decode()
    yield _index(id_put), ("storage", named[cls], key.decode(), named[location], count)
    if size_put:
        yield _index(size_put), lengths
    if stride_put:
        yield _index(stride_put), steps
    yield _index(hooks_put), hooks
    yield _index(args_put), (storage, first, lengths, steps, grad == b"\x88", hooks)
    yield _index(tensor_put), tensor


def match_entries(loading: Loading, memo: Memo, buf: bytes, pos: int, rebuild: Any) -> tuple[list[Any], int]:
    """Key, tensor, key, tensor … from `pos` on, and where they end.

    Empty when there are few; when they are unusual, the end is -1 and asking again is a waste.
    """
    find_place, look_up = loading.zip_place, loading.zip_look_up
    if find_place is None or look_up is None or loading.region.memory is not None:
        return _UNUSUAL
    rows: list[tuple[bytes, ...]] = []
    start, entry, match = pos, _ENTRY.match, _ENTRY.match(buf, pos)
    while match is not None and len(rows) < _MAX_ENTRIES:
        rows.append(match.groups())
        pos = match.end()
        match = entry(buf, pos)
    if len(rows) < _MIN_ENTRIES:
        return [], start
    (
        name_lengths, names, name_puts, functions, words, classes, key_lengths, keys, key_puts, locations, numels,
        id_puts, offsets, sizes, size_puts, strides, stride_puts, _, hooks, hook_puts, args_puts, tensor_puts,
    ) = zip(*rows, strict=True)  # fmt: skip
    count = len(rows)
    if b"".join(name_lengths) != struct.pack(f"<{count}H", *map(len, names)):
        return _UNUSUAL
    if b"".join(key_lengths) != bytes(map(len, keys)):
        return _UNUSUAL

    indices = {get: _index(get) for get in {*functions, *words, *classes, *locations, *hooks}}
    named = {get: memo.get(index) for get, index in indices.items()}
    if None in named.values() and memo.settle():
        named = {get: memo.get(index) for get, index in indices.items()}
    columns = zip(name_puts, key_puts, id_puts, size_puts, stride_puts, hook_puts, args_puts, tensor_puts, strict=True)
    puts = [put for row in columns for put in row if put]
    span = range(_index(puts[0]), _index(puts[0]) + len(puts))
    if b"".join(puts) != _puts_from(span.start, len(span)) or max(indices.values()) >= span.start:
        return _UNUSUAL
    wrong = [get for get in {*functions} if named[get] is not rebuild]
    wrong += [get for get in {*words} if named[get] != "storage"]
    wrong += [get for get in {*classes} if type(named[get]) is not StorageClass]
    wrong += [get for get in {*hooks} if getattr(named[get], "name", None) != "collections.OrderedDict"]
    if wrong:
        return _UNUSUAL

    places = look_up(keys)
    entries: list[Any] = []
    add, path, big_endian = entries.append, loading.region.path, loading.big_endian
    # Most tensors of a record are alike: what follows from the opcodes alone is worked out once for each kind.
    kinds: dict[tuple[bytes, ...], tuple[Any, ...]] = {}
    for name, key, kind in zip(names, keys, zip(classes, numels, offsets, sizes, strides, strict=True), strict=True):
        known = kinds.get(kind)
        if known is None:
            known = kinds[kind] = _of_kind(named, *kind)
        dtype, shape, steps, first, extent, needed, swaps = known
        place, nbytes = places.get(key) or find_place(key)
        add(held_once(name.decode()))  # every rank has the same
        if needed <= nbytes:
            where = FileBytes(path, place + first, extent, steps, big_endian and swaps)
            add(TensorRef("", dtype, shape, where))
        else:
            get, numel, offset, size, stride = kind
            cls: Any = named[get]
            add(_worded(loading, cls, key, _decoded(numel), _decoded(offset), size, stride))
    if not memo.defer(loading, buf, start, named, entries, span):
        return _UNUSUAL
    return entries, pos


#: More bytes than any storage has: the tensor goes the long way, which says what is wrong with it.
_NONE = 1 << 80


def _of_kind(
    named: dict[bytes, Any], get: bytes, numel: bytes, offset: bytes, size: bytes | None, stride: bytes | None
) -> tuple[Any, ...]:
    """dtype, shape, strides, first byte, extent in bytes, bytes its storage must have, whether bytes can be swapped."""
    cls, count, first = named[get], _decoded(numel), _decoded(offset)
    shape = _size_and_strides(size, stride)[2]
    if shape is None or not cls.is_plain or count < 0 or first < 0:
        return cls.dtype, (), None, 0, 0, _NONE, False
    start, extent = first * cls.itemsize, shape[2] * cls.itemsize
    if (shape[1] is not None or not extent) and not is_walkable(shape[0], prod(shape[0]), extent):
        return cls.dtype, (), None, 0, 0, _NONE, False
    return cls.dtype, shape[0], shape[1], start, extent, max(count * cls.itemsize, start + extent), cls.itemsize > 1


def _worded(
    loading: Loading, cls: StorageClass, key: bytes, count: int, first: int, size: bytes | None, stride: bytes | None
) -> TensorRef:
    """The tensor by the long way, which says what is wrong with it.

    Raises:
        DumpError: it is no view of its storage.
    """
    assert loading.zip_storage is not None
    lengths, steps, _ = _size_and_strides(size, stride)
    return view(loading, loading.zip_storage(cls, key.decode(), count), first, lengths, steps)
