"""torch's zip: `data.pkl`, the storages beside it, the byte order. Our own directory parser.

`zipfile` looks for the directory's end anywhere in the last 64 KB and builds an object per record; a
torch zip has hundreds, and only their offsets are needed. Storages must be stored, not compressed.
"""

from __future__ import annotations

import struct
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Iterable
from typing import Any, NamedTuple

from replay_core.dtypes import ITEMSIZE
from replay_core.dumps.containers.known_pickles import MOST_BYTES, learn, met_as, recipe
from replay_core.dumps.containers.loading import Loading, Span, Storage, StorageClass
from replay_core.dumps.containers.pickle_machine import Machine
from replay_core.dumps.containers.region import Region
from replay_core.dumps.containers.settle import settle
from replay_core.errors import NotADumpError

_END = struct.Struct("<4s4H2IH")
_LOCATOR = struct.Struct("<4sIQI")
_END64 = struct.Struct("<4sQ2H2I4Q")
#: The two 64-bit ends, which torch writes whether or not the numbers need them.
_WIDE_ENDS = _END64.size + _LOCATOR.size
_ENTRY = struct.Struct("<4s4xHH4xIIIHHH8xI")
_LOCAL = struct.Struct("<4s22xHH")
#: Enough for the end record and, in most files, the directory; a comment can be sixteen times as long.
_TAIL = 1 << 12
_LONGEST_TAIL = 1 << 17
#: Headers that lie at most so many bytes apart are read with what lies between: a call costs more.
_NEAR = 1 << 11
#: So many are looked up one by one sooner than together.
_FEW = 4
#: What torch's writer puts behind a record whose sizes fit in four bytes, where bit 3 of its flags says so; where it
#: lets a record start (caffe2/serialize/inline_container.cc, `kFieldAlignment`).
_DESCRIPTOR, _HAS_DESCRIPTOR, _ALIGNED, _WIDE = 16, 8, 64, 0xFFFFFFFF

_DAMAGED = "data.pkl does not match its checksum: damaged, or saved with crc32 turned off"


class ZipRecord(NamedTuple):
    """One file of the zip, as the directory describes it."""

    flags: int
    method: int
    crc: int
    nbytes: int
    header: int


def read_torch_zip(loading: Loading) -> Any:
    """The tree of a torch zip.

    Raises:
        DumpError: the zip is damaged or compressed; it is no torch file; its pickle is unsafe.
    """
    try:
        return _tree(loading)
    finally:
        # They hold `loading`, and the zip's directory: megabytes that would stay until Python looks for such rings.
        loading.persistent = loading.zip_storage = loading.zip_place = loading.zip_look_up = None


def _tree(loading: Loading) -> Any:
    region = loading.region
    records = directory(loading)
    name = next((name for name in records if name.endswith(b"/data.pkl") and name.count(b"/") == 1), None)
    if name is None:
        raise NotADumpError(
            "a zip that torch.save did not write: it has no data.pkl",
            file=str(region.path),
            found=", ".join(name.decode("utf-8", "replace") for name in list(records)[:4]) or "an empty zip",
            hint=f"rldbg {region.path} runs a capsule again" if next(iter(records), b"") == b"capsule.json" else None,
        )
    prefix = name[: -len(b"data.pkl")]
    order = records.get(prefix + b"byteorder")
    big_endian = order is not None and _content(loading, order).strip() == b"big"
    _, _, crc, nbytes, _ = records[name]
    start = _data_offset(loading, records[name])
    places: dict[bytes, tuple[int, int]] = {}
    heads, data_prefix = _Heads(records), prefix + b"data/"

    def look_up(keys: Iterable[bytes]) -> dict[bytes, tuple[int, int]]:
        """The places of many records found at once; of an unusual one `place` says what is wrong when asked for it."""
        asked = [(key, record) for key in keys if (record := records.get(data_prefix + key)) is not None]
        places.update(_usual_places(region, asked, heads))
        return places

    met = holds = None
    if nbytes <= MOST_BYTES:
        pickled = region.read(start, nbytes)
        met, holds = met_as(pickled, big_endian, loading.inert), zlib.crc32(pickled) == crc
        del pickled
    known = recipe(met) if met and region.memory is None else None
    tree = known.tree(region.path, look_up) if known else None
    if tree is not None:
        if not holds:
            loading.problems.append(_DAMAGED)
        return tree
    itemsizes, new = ITEMSIZE.get, tuple.__new__

    def place(key: bytes) -> tuple[int, int]:
        known = places.get(key)
        if known is None:
            record = records.get(data_prefix + key)
            if record is None:
                what = f"the zip has no record data/{key.decode('utf-8', 'replace'):.40}"
                raise loading.malformed(what, expected="the storage that a tensor views")
            known = places[key] = _data_offset(loading, record), record[3]
        return known

    def storage(cls: StorageClass, key: str, numel: int) -> Storage:
        span = new(Span, (region, *place(key.encode("utf-8", "replace"))))
        if type(numel) is not int or not 0 <= numel * cls.itemsize <= span.nbytes:
            raise loading.malformed(
                f"storage {key:.40} is not the size its tensors say",
                expected=f"{numel} elements of {cls.itemsize} bytes",
                found=f"{span.nbytes} bytes",
            )
        return new(Storage, (span, cls.dtype, itemsizes(cls.dtype, 0), big_endian, True))

    def persistent(pid: Any) -> Storage:
        if type(pid) is not tuple or len(pid) != 5 or pid[0] != "storage" or not isinstance(pid[1], StorageClass):
            raise loading.malformed(f"a persistent id that is not torch's: {pid!r:.80}")
        if type(pid[2]) is not str:
            raise loading.malformed("a storage key that is not text")
        return storage(pid[1], pid[2], pid[4])

    loading.persistent, loading.zip_storage = persistent, storage
    loading.zip_place, loading.zip_look_up = place, look_up
    loading.big_endian = big_endian
    machine = Machine(loading, region.part(start, nbytes))
    value = machine.run(start)
    loading.refuse_strangers()
    if machine.end < start + nbytes:
        # No checksum of what nobody reads: a sparse file has gigabytes of it.
        loading.problems.append(f"data.pkl goes on for {start + nbytes - machine.end:,} bytes behind its end")
    else:
        if not (_checksum_holds(region, start, nbytes, crc) if holds is None else holds):
            loading.problems.append(_DAMAGED)
        if met and not loading.notes and not loading.problems:
            learn(met, value, places, nbytes)
    return settle(loading, value)


def _content(loading: Loading, record: ZipRecord) -> bytes:
    return loading.region.read(_data_offset(loading, record), min(record.nbytes, 64))


def _checksum_holds(region: Region, start: int, nbytes: int, expected: int) -> bool:
    crc = 0
    for offset in range(start, start + nbytes, 1 << 20):
        crc = zlib.crc32(region.read(offset, min(1 << 20, start + nbytes - offset)), crc)
    return crc == expected


def _usual_offset(region: Region, record: ZipRecord) -> int:
    """Where a stored record starts that lies in the file as torch lays it; 0 where anything is else."""
    flags, method, _, nbytes, header = record
    if method or flags & 1 or region.memory is not None:
        return 0
    at = region.start + header
    head = region.peek(at, _LOCAL.size)
    if len(head) != _LOCAL.size or not head.startswith(b"PK\x03\x04"):
        return 0
    # Two little-endian lengths end the header.
    offset = at + _LOCAL.size + head[26] + (head[27] << 8) + head[28] + (head[29] << 8)
    return offset if offset + nbytes <= region.end else 0


def _usual_places(region: Region, asked: list[tuple[bytes, ZipRecord]], heads: _Heads) -> dict[bytes, tuple[int, int]]:
    """`_usual_offset` of many records and their sizes, those left out that lie otherwise. A fifth of the time each."""
    if len(asked) <= _FEW:
        return {key: (offset, record[3]) for key, record in asked if (offset := _usual_offset(region, record))}
    plain = [entry for entry in asked if not entry[1].method and not entry[1].flags & 1]
    if not plain:
        return {}
    start, size = region.start, _LOCAL.size
    offsets = [start + record[4] for _, record in plain]
    first, last = min(offsets), max(offsets)
    if last - first <= _NEAR * len(plain):
        near = region.peek(first, last - first + size)
        read = b"".join([near[at - first : at - first + size] for at in offsets])
    else:
        told = _places_by_directory(region, plain, heads)
        if told:
            return told
        read = b"".join([region.peek(at, size) for at in offsets])
    if len(read) != size * len(plain):
        return {}
    found = {}
    for (key, record), at, (magic, name_length, extra_length) in zip(
        plain, offsets, _LOCAL.iter_unpack(read), strict=True
    ):
        offset = at + size + name_length + extra_length
        if magic == b"PK\x03\x04" and offset + record[3] <= region.end:
            found[key] = offset, record[3]
    return found


class _Heads:
    """Where the records' headers lie: asked for only where records are large, and sorted once."""

    def __init__(self, records: dict[bytes, ZipRecord]) -> None:
        self._records = records
        self._sorted: array[int] | None = None

    def after(self, header: int) -> int:
        """Where the next record's header lies; -1 behind the last one."""
        if self._sorted is None:
            self._sorted = array("Q", sorted([record[4] for record in self._records.values()]))
        place = bisect_right(self._sorted, header)
        return self._sorted[place] if place < len(self._sorted) else -1


def _places_by_directory(
    region: Region, asked: list[tuple[bytes, ZipRecord]], heads: _Heads
) -> dict[bytes, tuple[int, int]]:
    """Where large records lie, one call for all: each ends where the next one's header, or its own descriptor, begins.

    That is so where the writer left no gap. It is taken only where every start so found is on torch's alignment, at
    most that far behind its header, and the first is where its own header says; nothing is found otherwise.
    """
    found = {}
    for key, (flags, _, _, nbytes, header) in asked:
        start = heads.after(header) - nbytes - (_DESCRIPTOR if flags & _HAS_DESCRIPTOR else 0)
        # A header, a name and, to reach the alignment, an extra field; of a size that fits in four bytes.
        lead = start - header - _LOCAL.size
        if start % _ALIGNED or not 0 < lead < _NEAR or start + nbytes >= min(_WIDE, region.end - region.start):
            return {}
        found[key] = region.start + start, nbytes
    first_key, first = asked[0]
    return found if _usual_offset(region, first) == found[first_key][0] else {}


def _data_offset(loading: Loading, record: ZipRecord) -> int:
    """Where a stored record's bytes start."""
    usual = _usual_offset(loading.region, record)
    if usual:
        return usual
    if record.method or record.flags & 1:
        raise loading.malformed("a compressed or encrypted zip record", expected="stored, as torch.save writes")
    offset = record_start(loading, record)
    if offset + record.nbytes > loading.region.end:
        raise loading.region.truncated(offset + record.nbytes)
    return offset


def record_start(loading: Loading, record: ZipRecord) -> int:
    """Where a record's bytes start, from its local header (whose lengths differ from the directory's)."""
    region = loading.region
    at = region.start + record.header
    magic, name_length, extra_length = _LOCAL.unpack(region.read(at, _LOCAL.size))
    if magic != b"PK\x03\x04":
        raise loading.malformed(f"no zip record at byte {at}", expected="PK\\x03\\x04", found=repr(magic))
    return int(at + _LOCAL.size + name_length + extra_length)


def directory(loading: Loading) -> dict[bytes, ZipRecord]:
    """The zip's records by name.

    Raises:
        DumpError: the directory is damaged.
    """
    region = loading.region
    count, size, start = _find_directory(loading)
    if count * _ENTRY.size > size:
        raise loading.malformed(f"a zip directory of {size} bytes for {count} records")
    data = region.read(region.start + start, size)
    records: dict[bytes, ZipRecord] = {}
    at = 0
    unpack, header, new = _ENTRY.unpack_from, _ENTRY.size, tuple.__new__
    try:
        for _ in range(count):
            magic, flags, method, crc, packed, nbytes, name_length, extra_length, comment_length, local = unpack(
                data, at
            )
            if magic != b"PK\x01\x02":
                raise loading.malformed("the zip's directory is damaged")
            at += header
            name = data[at : at + name_length]
            at += name_length
            if nbytes == 0xFFFFFFFF or local == 0xFFFFFFFF or packed == 0xFFFFFFFF:
                nbytes, packed, local = _wide(loading, data[at : at + extra_length], nbytes, packed, local)
            at += extra_length + comment_length
            if not method and packed != nbytes:
                raise loading.malformed("a stored zip record of two sizes", expected=str(nbytes), found=str(packed))
            records[name] = new(ZipRecord, (flags, method, crc, nbytes, local))
    except struct.error:
        raise loading.malformed("the zip's directory is damaged") from None
    if len(records) != count:
        raise loading.malformed("the zip has two records of one name")
    return records


def _wide(loading: Loading, extra: bytes, nbytes: int, packed: int, local: int) -> tuple[int, int, int]:
    """The zip64 extra field: 8-byte values for those of the three that did not fit in four, in this order."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            wide = iter(struct.unpack_from(f"<{length // 8}Q", extra, at + 4))
            sizes = [next(wide, 0) if value == 0xFFFFFFFF else value for value in (nbytes, packed, local)]
            return sizes[0], sizes[1], sizes[2]
        at += 4 + length
    raise loading.malformed("a zip record too long for its header")


def _find_directory(loading: Loading) -> tuple[int, int, int]:
    """(records, bytes, offset) of the directory, from the end of the file.

    Raises:
        DumpError: there is none, or it is of a zip that does not begin where the file does.
    """
    region = loading.region
    tail_start, tail, at = region.end, b"", -1
    for length in (_TAIL, _LONGEST_TAIL):
        tail_start = max(region.start, region.end - length)
        tail = region.read(tail_start, region.end - tail_start)
        # torch writes no comment; the record is then the file's last 22 bytes.
        at = len(tail) - _END.size if tail[-_END.size :][:4] == b"PK\x05\x06" else tail.rfind(b"PK\x05\x06")
        if at >= 0:
            break
    if at < 0 or at + _END.size > len(tail):
        error = region.truncated(region.end + 1)
        error.message = "the zip ends before its directory"
        error.expected = "a directory at the end of the zip"
        raise error
    _, disk, _, _, count, size, start, _ = _END.unpack_from(tail, at)
    end = tail_start + at - region.start
    if count == 0xFFFF or size == 0xFFFFFFFF or start == 0xFFFFFFFF:
        count, size, start, end = _find_wide_directory(loading, tail_start + at) or (count, size, start, end)
    if disk not in (0, 0xFFFF):
        raise loading.malformed("a zip in several parts")
    if start + size < end - _WIDE_ENDS:
        # Its places are counted from its own beginning: read from the file's, they would be another zip's.
        what = "a zip with something before it, such as another one"
        raise loading.malformed(what, expected=f"a directory that ends at byte {end}", found=f"at byte {start + size}")
    return count, size, start


def _find_wide_directory(loading: Loading, end: int) -> tuple[int, int, int, int] | None:
    region = loading.region
    if end - _LOCATOR.size < region.start:
        return None
    magic, _, offset, _ = _LOCATOR.unpack(region.read(end - _LOCATOR.size, _LOCATOR.size))
    if magic != b"PK\x06\x07":
        return None
    record = _END64.unpack(region.read(region.start + offset, _END64.size))
    if record[0] != b"PK\x06\x06":
        raise loading.malformed("the zip's 64-bit directory is damaged")
    return record[7], record[8], record[9], offset
