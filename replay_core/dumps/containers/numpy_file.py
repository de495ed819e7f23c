"""numpy's own files: .npy, one array behind a header; .npz, a zip of them.

An array of objects is a pickle, read like any other. A compressed .npz is unpacked into memory, as far as its
budget goes: its arrays lie nowhere as they are.
"""

from __future__ import annotations

import ast
import struct
import zlib
from functools import lru_cache
from typing import Any

from replay_core.budget import spend_bytes
from replay_core.dtypes import ITEMSIZE
from replay_core.dumps.containers.loading import Loading, Span
from replay_core.dumps.containers.numpy_rebuild import NumpyDType, from_buffer, make_dtype
from replay_core.dumps.containers.pickle_machine import Machine
from replay_core.dumps.containers.region import Region
from replay_core.dumps.containers.settle import settle
from replay_core.dumps.containers.torch_rebuild import geometry, unreadable
from replay_core.dumps.containers.torch_zip import ZipRecord, directory, record_start
from replay_core.errors import DumpError

MAGIC = b"\x93NUMPY"
#: A header is a line of a dictionary; numpy itself refuses longer ones.
MAX_HEADER = 10_000
_LOCAL = struct.Struct("<4s22xHH")
#: Read of a record at once: a file may hold thousands that are small.
_FIRST, _BLOCK = 1 << 12, 1 << 20
#: Of a zip's first record: its header, and its name in most.
_HEAD = 1 << 7


def read_npy(loading: Loading) -> Any:
    """The array of a .npy file.

    Raises:
        DumpError: the header is not numpy's, or the file ends before its array.
    """
    value, end = _array(loading, loading.region)
    if end < loading.region.end:
        loading.problems.append(f"only the file's first array is read: {loading.region.end - end:,} bytes follow it")
    return settle(loading, value)


def is_npz(region: Region) -> bool:
    """Whether a zip's first record is an array."""
    if region.end - region.start < _LOCAL.size:
        return False
    head = region.read(region.start, min(_HEAD, region.end - region.start))
    _, length, _ = _LOCAL.unpack_from(head)
    end = _LOCAL.size + length
    if end > len(head) and region.start + end <= region.end:
        head = region.read(region.start, end)
    return end <= len(head) and head.endswith(b".npy", 0, end)


def read_npz(loading: Loading) -> dict[str, Any]:
    """{name: array}. An array that cannot be read is unreadable; the others are not lost with it.

    Raises:
        DumpError: the zip is damaged.
    """
    tree: dict[str, Any] = {}
    for name, record in directory(loading).items():
        field = name.decode("utf-8", "replace").removesuffix(".npy")
        try:
            if record.method:
                region = loading.region.in_memory(_unpacked(loading, record))
            else:
                start = record_start(loading, record)
                region = loading.region.part(start, record.nbytes)
                if start + record.nbytes > loading.region.end:
                    raise loading.region.truncated(start + record.nbytes)
            tree[field] = settle(loading, _array(loading, region)[0])
        except DumpError as error:
            loading.problems.append(f"{field}: {error.message}")
            tree[field] = unreadable("none", (), error.message)
    return tree


def _unpacked(loading: Loading, record: ZipRecord) -> bytes:
    if record.method != 8 or record.flags & 1:
        raise loading.malformed("a zip record that is neither stored nor deflated")
    spend_bytes(record.nbytes, "compressed arrays")
    region, at, ahead = loading.region, record_start(loading, record), _FIRST
    inflate, parts, size = zlib.decompressobj(-15), [], 0
    try:
        while not inflate.eof and at < region.end and size <= record.nbytes:
            block = region.read(at, min(ahead, region.end - at))
            at, ahead = at + len(block), min(4 * ahead, _BLOCK)
            parts.append(inflate.decompress(block, record.nbytes + 1 - size))
            size += len(parts[-1])
            if not parts[-1] and not inflate.eof and inflate.unconsumed_tail:
                break
    except zlib.error as error:
        raise loading.malformed(f"compressed data are damaged: {error}") from None
    data = b"".join(parts)
    if len(data) != record.nbytes:
        raise loading.malformed("compressed data are not of the size the zip says", found=f"{len(data)} bytes")
    return data


def _array(loading: Loading, region: Region) -> tuple[Any, int]:
    """The array, and where its bytes end."""
    head = region.read(region.start, min(12, region.end - region.start))
    if head[:6] != MAGIC or len(head) < 12:
        raise loading.malformed("not a numpy array", expected=repr(MAGIC), found=repr(head[:6]))
    wide = head[6] >= 2
    length = int.from_bytes(head[8:12] if wide else head[8:10], "little")
    start = region.start + (12 if wide else 10)
    if length > MAX_HEADER:
        raise loading.malformed("a numpy header too long", expected=f"at most {MAX_HEADER} bytes", found=str(length))
    code, shape, order = _header(loading, region.read(start, length).decode("latin-1"))
    start += length
    if not isinstance(code, str):
        return unreadable("numpy struct", shape, "a structured array"), region.end
    if code.lstrip("|") == "O":
        return _objects(loading, region.part(start, region.end - start))
    dtype = make_dtype(loading, (code,))
    dtype.code = code.lstrip("<>|=")
    itemsize = _itemsize(dtype)
    if not itemsize:
        return unreadable(f"numpy {code:.40}", shape, f"rldbg has no dtype like numpy's {code:.40}"), region.end
    try:
        nbytes = geometry(shape, None).extent * itemsize
    except (ValueError, TypeError) as error:
        raise loading.malformed(f"a numpy array has an impossible shape: {error}") from None
    if start + nbytes > region.end:
        raise region.truncated(start + nbytes)
    return from_buffer(loading, (Span(region, start, nbytes), dtype, shape, order)), start + nbytes


def _objects(loading: Loading, region: Region) -> tuple[Any, int]:
    """An array of objects: numpy pickles it behind the header."""
    inner = loading.inside(region)
    machine = Machine(inner)
    value = machine.run(region.start)
    inner.refuse_strangers()
    return value, machine.end


def _itemsize(dtype: NumpyDType) -> int:
    text = dtype.text()
    return text[1] if text else ITEMSIZE.get(dtype.dtype or "", 0)


@lru_cache(maxsize=64)
def _literal(text: str) -> Any:
    """The value of a header; the arrays of one file have few different ones. Nobody changes it."""
    return ast.literal_eval(text)


def _header(loading: Loading, text: str) -> tuple[Any, tuple[int, ...], str]:
    try:
        header = _literal(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        raise loading.malformed("a numpy header that is no dictionary", found=repr(text[:60])) from None
    if not isinstance(header, dict) or not isinstance(header.get("shape"), tuple) or "descr" not in header:
        raise loading.malformed("a numpy header without descr and shape", found=repr(text[:60]))
    return header["descr"], header["shape"], "F" if header.get("fortran_order") is True else "C"
