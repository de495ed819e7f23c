"""torch's format before 1.6, which plain `pickle.dump(tensor)` still nests: five pickles, then the storages.

The storages' places are known only after the pickle that refers to them, so it is read twice: once to
learn keys and sizes, once with the places. torch writes the raw bytes little-endian on every machine.
"""

from __future__ import annotations

import struct
from typing import Any

from replay_core.dtypes import ITEMSIZE
from replay_core.dumps.containers.loading import Loading, Span, Storage, StorageClass
from replay_core.dumps.containers.pickle_machine import Machine
from replay_core.dumps.containers.settle import settle

MAGIC = 0x1950A86A20F9469CFC6C
PROTOCOL = 1001
#: The magic number as a pickler writes it: LONG1 of ten bytes, STOP.
MAGIC_OPCODES = b"\x8a\x0a" + MAGIC.to_bytes(10, "little") + b"."


def read_torch_legacy(loading: Loading) -> Any:
    """The tree of a legacy stream.

    Raises:
        DumpError: the stream is damaged or its pickle unsafe.
    """
    return settle(loading, read_unsettled(loading))


def read_unsettled(loading: Loading) -> Any:
    """The same, as the builders of an outer pickle want it: a storage stays a storage."""
    region = loading.region
    at = region.start
    for what, expected in (("magic number", MAGIC), ("protocol", PROTOCOL)):
        found, at = _pickle(loading, at)
        if type(found) is not int or found != expected:
            raise loading.malformed(f"not torch's {what}", expected=str(expected), found=f"{found!r:.40}")
    info, pickle_start = _pickle(loading, at)
    if type(info) is dict and info.get("little_endian") is False:
        loading.note("written on a big-endian machine; torch stores the bytes of this format little-endian everywhere")

    storages = _Storages(loading)
    loading.persistent = storages.resolve
    value, at = _pickle(loading, pickle_start)
    loading.refuse_strangers()
    keys, at = _pickle(loading, at)
    if type(keys) is not list:
        raise loading.malformed("a torch stream without its list of storage keys")
    end = storages.locate(keys, at)
    if end < region.end:
        loading.problems.append(f"only the file's first stream is read: {region.end - end:,} bytes follow it")
    if keys:
        value, _ = _pickle(loading, pickle_start)
    loading.persistent = None
    return value


def _pickle(loading: Loading, at: int) -> tuple[Any, int]:
    machine = Machine(loading)
    return machine.run(at), machine.end


class _Storages:
    """The storages of one stream: gathered by the first pass, placed, then handed out by the second."""

    def __init__(self, loading: Loading) -> None:
        self.loading = loading
        self.sizes: dict[str, tuple[int, int]] = {}
        self.places: dict[str, Span] | None = None

    def resolve(self, pid: Any) -> Storage:
        """The storage of `("storage", class, key, location, numel, view)`; view is (key, offset, numel) or None."""
        loading = self.loading
        if type(pid) is not tuple or len(pid) not in (5, 6) or pid[0] != "storage":
            raise loading.malformed(f"a persistent id that is not torch's: {pid!r:.80}")
        _, cls, key, _, numel = pid[:5]
        part = pid[5] if len(pid) == 6 else None
        if not isinstance(cls, StorageClass) or type(key) is not str or type(numel) is not int or numel < 0:
            raise loading.malformed(f"a storage that is not torch's: {pid!r:.80}")
        itemsize = ITEMSIZE.get(cls.dtype, 0)
        if self.places is None:
            self.sizes.setdefault(key, (numel, cls.itemsize))
            return Storage(Span(loading.region, loading.region.start, 0), cls.dtype, itemsize, located=False)
        if key not in self.places:
            raise loading.malformed(f"the stream has no storage {key:.40}")
        span = self.places[key]
        if part is not None:
            span = self._part(span, part, cls.itemsize)
        return Storage(span, cls.dtype, itemsize)

    def _part(self, span: Span, part: Any, itemsize: int) -> Span:
        if type(part) is not tuple or len(part) != 3 or any(type(n) is not int or n < 0 for n in part[1:]):
            raise self.loading.malformed(f"a storage view that is not torch's: {part!r:.80}")
        offset, nbytes = part[1] * itemsize, part[2] * itemsize
        if offset + nbytes > span.nbytes:
            raise self.loading.malformed("a storage view reaches past its storage", expected=f"{span.nbytes} bytes")
        return Span(span.region, span.offset + offset, nbytes)

    def locate(self, keys: list[Any], at: int) -> int:
        """Place the storages one after the other from `at`: eight bytes of count, then the elements."""
        region = self.loading.region
        places: dict[str, Span] = {}
        for key in keys:
            if type(key) is not str or key not in self.sizes:
                raise self.loading.malformed(f"storage {key!r:.40} belongs to no tensor")
            numel, itemsize = self.sizes[key]
            (stored,) = struct.unpack("<q", region.read(at, 8))
            if stored != numel:
                raise self.loading.malformed(f"storage {key:.40}", expected=f"{numel} elements", found=f"{stored}")
            at += 8
            nbytes = numel * itemsize
            if at + nbytes > region.end:
                raise region.truncated(at + nbytes)
            places[key] = Span(region, at, nbytes)
            at += nbytes
        self.places = places
        return at
