"""A tree of snapshots as the zip archive that torch.save writes, at the speed of the disk.

torch.save reads every byte once more for the archive's checksums after it has left the cache; here each chunk is
summed right after it was written. The pickle inside, its names and its alignment are torch's own, so that
torch.load (weights_only too) and every reader of torch's archives take it for theirs.
"""

from __future__ import annotations

import io
import pickle
import sys
import zipfile
from collections.abc import Callable
from functools import cache
from typing import IO, Any

#: Storages begin at multiples of this, as torch's do, so that a map of the file is a map of tensors.
ALIGNMENT = 64
#: Bytes written and summed together: they are still in the cache when the second of the two looks.
_CHUNK = 1 << 20
#: An archive of fewer bytes is put together in memory.
_SMALL = 1 << 20
#: From here on an entry's size takes a zip64 field of 20 bytes.
_ZIP64 = 1 << 31
_ROOT = "archive"


def write(content: Any, file: IO[bytes]) -> None:
    """Write the archive. `file` must be able to seek: an entry's checksum stands before its bytes."""
    storages: dict[str, Any] = {}
    tree = _pickled(content, storages)
    if sum(storage.nbytes() for storage in storages.values()) < _SMALL:
        # A zip goes back and forth twice an entry, which costs a small record more than its bytes.
        whole = io.BytesIO()
        _fill(whole, tree, storages)
        file.write(whole.getbuffer())
    else:
        _fill(file, tree, storages)


def _fill(file: IO[bytes], tree: bytes, storages: dict[str, Any]) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        _entry(archive, "data.pkl", tree)
        _entry(archive, ".format_version", b"1")
        _entry(archive, ".storage_alignment", str(ALIGNMENT).encode())
        _entry(archive, "byteorder", sys.byteorder.encode())
        for key, storage in storages.items():
            _entry(archive, f"data/{key}", _bytes_of(storage))
        _entry(archive, "version", b"3\n")


def _pickled(content: Any, storages: dict[str, Any]) -> bytes:
    import torch

    keys: dict[int, str] = {}

    class Pickler(pickle.Pickler):
        """Storages go beside the pickle, under a number, as torch.serialization does it."""

        def persistent_id(self, obj: Any) -> Any:
            if isinstance(obj, torch.storage.TypedStorage):
                storage, kind, count = obj._untyped_storage, obj._pickle_storage_type(), obj._size()
            elif isinstance(obj, torch.UntypedStorage):
                storage, kind, count = obj, "UntypedStorage", obj.nbytes()
            else:
                return None
            key = keys.setdefault(storage._cdata, str(len(keys)))
            storages[key] = storage
            return ("storage", getattr(torch, kind), key, "cpu", count)

    buffer = io.BytesIO()
    Pickler(buffer, protocol=2).dump(content)
    return buffer.getvalue()


def _bytes_of(storage: Any) -> memoryview:
    import ctypes

    count = storage.nbytes()
    return memoryview((ctypes.c_ubyte * count).from_address(storage.data_ptr()) if count else b"").cast("B")


def _entry(archive: zipfile.ZipFile, name: str, data: bytes | memoryview) -> None:
    info = zipfile.ZipInfo(f"{_ROOT}/{name}")
    info.file_size = len(data)
    large = len(data) >= _ZIP64
    assert archive.fp is not None
    # Local header, name, zip64 field, and the four bytes that open the padding's own field.
    begins = archive.fp.tell() + 30 + len(info.filename) + (20 if large else 0) + 4
    padding = -begins % ALIGNMENT
    # A field of the extra part is a kind, a length and its bytes; torch pads with the kind FB.
    info.extra = b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
    with archive.open(info, "w", force_zip64=large) as entry:
        crc32 = _fast_crc32() if len(data) >= _SMALL and all(hasattr(entry, name) for name in _COUNTS) else None
        write, crc = (entry.write if crc32 is None else archive.fp.write), 0
        for start in range(0, len(data), _CHUNK):
            chunk = data[start : start + _CHUNK]
            write(chunk)
            if crc32 is not None:
                crc = crc32(chunk, crc)
        if crc32 is not None:
            for name, value in zip(_COUNTS, (crc, len(data), len(data)), strict=True):
                setattr(entry, name, value)


#: What zipfile counts of an entry while it is written, and puts into the entry's header when it is closed.
_COUNTS = ("_crc", "_file_size", "_compress_size")


@cache
def _fast_crc32() -> Callable[[Any, int], int] | None:
    """The checksum of zip archives at the memory's pace, twelve times zlib's; None where its library is not there."""
    try:
        from isal import isal_zlib  # not at the top: a trainer may have none, and small records never need it
    except ImportError:
        return None
    return isal_zlib.crc32
