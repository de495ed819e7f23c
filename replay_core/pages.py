"""Reads the bytes a TensorRef points at: zero-copy over mmap, faulted in by chunks, dropped behind.

Pages are asked for with MADV_POPULATE_READ before they are touched, so a file that was truncated
underneath raises an error instead of killing the process with SIGBUS, and given back with
MADV_DONTNEED after, so memory does not grow with the dump.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from replay_core.errors import DumpError, TruncatedError
from replay_core.records import FileBytes, Inline, Parts, TensorRef, Unreadable

if TYPE_CHECKING:
    import numpy as np

#: Elements looked at together: 64-128 k keeps a chunk in the L2 cache (facts: 16 k and 1 M were 10-25 % slower).
CHUNK = 131_072

_POPULATE_READ = 22  # Linux 5.14; Python gives it no name before 3.14


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The numpy (or ml_dtypes) dtype of that name."""
    import numpy as np

    if name.startswith(("bfloat", "float8")):
        import ml_dtypes

        dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return dtype
    return np.dtype(name)


class MappedFile:
    """A read-only map of one file, and the manners to read it safely."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with open(path, "rb") as file:
            self.size = os.fstat(file.fileno()).st_size
            self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if self.size else None

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Bytes [offset, offset + nbytes), resident when this returns.

        Raises:
            TruncatedError: the file is shorter than that, or became so since it was opened.
        """
        if nbytes == 0:
            return memoryview(b"")
        if self.map is None or offset + nbytes > self.size:
            raise self._truncated(offset, nbytes, self.size)
        start, length = _page_span(offset, nbytes)
        try:
            self.map.madvise(_POPULATE_READ, start, min(length, self.size - start))
        except OSError as error:
            if error.errno == errno.EFAULT:
                raise self._truncated(offset, nbytes, os.path.getsize(self.path)) from None
            # An older kernel does not know the advice: the size check is what is left.
            if os.path.getsize(self.path) < offset + nbytes:
                raise self._truncated(offset, nbytes, os.path.getsize(self.path)) from None
        return memoryview(self.map)[offset : offset + nbytes]

    def drop(self, offset: int, nbytes: int) -> None:
        """Give the pages of a span back. They are read again when somebody looks again."""
        if self.map is not None and nbytes:
            start, length = _page_span(offset, nbytes)
            self.map.madvise(mmap.MADV_DONTNEED, start, min(length, self.size - start))

    def _truncated(self, offset: int, nbytes: int, size: int) -> TruncatedError:
        return TruncatedError(
            "the file ends inside a tensor",
            file=str(self.path),
            expected=f"{nbytes:,} bytes at offset {offset:,}",
            found=f"a file of {size:,} bytes",
            hint="was the disk full, or is the trainer still writing it?",
        )


def _page_span(offset: int, nbytes: int) -> tuple[int, int]:
    start = offset - offset % mmap.PAGESIZE
    return start, offset + nbytes - start


@lru_cache(maxsize=64)
def _mapped(path: Path, _size: int, _mtime_ns: int) -> MappedFile:
    return MappedFile(path)


def mapped(path: Path) -> MappedFile:
    """The map of a file; reused while the file is the same.

    Raises:
        DumpError: the file cannot be opened.
    """
    try:
        status = os.stat(path)
        return _mapped(path, status.st_size, status.st_mtime_ns)
    except OSError as error:
        raise DumpError(f"cannot open the file: {error.strerror}", file=str(path)) from None


def array(ref: TensorRef) -> np.ndarray[Any, Any]:
    """The tensor as a read-only numpy array of its own dtype and shape; no copy when it lies in a file.

    Raises:
        DumpError: the field cannot be read (says why), or the file ends too early.
    """
    import numpy as np

    if isinstance(ref.source, Unreadable):
        raise DumpError(ref.source.why, tensor=ref.name)
    if isinstance(ref.source, Inline):
        if ref.is_text:
            return np.asarray(ref.source.value, dtype=object)
        if isinstance(ref.source.value, bytes):
            # The file kept the tensor's bytes inside its structure (pickle protocol 2): little-endian, C order.
            return np.frombuffer(ref.source.value, dtype=numpy_dtype(ref.dtype)).reshape(ref.shape)
        return np.asarray(ref.source.value, dtype=numpy_dtype(ref.dtype)).reshape(ref.shape)
    if isinstance(ref.source, Parts):
        return _joined(ref, ref.source)
    where = ref.source
    dtype = numpy_dtype(ref.dtype)
    if where.big_endian:
        dtype = dtype.newbyteorder(">")
    file = mapped(where.path)
    if where.strides is None:
        flat = np.frombuffer(file.view(where.offset, ref.nbytes), dtype=dtype, count=ref.numel)
        return flat.reshape(ref.shape)
    buffer = np.frombuffer(file.view(where.offset, where.nbytes), dtype=dtype)
    byte_strides = tuple(stride * dtype.itemsize for stride in where.strides)
    return np.lib.stride_tricks.as_strided(buffer, ref.shape, byte_strides, writeable=False)


def element(ref: TensorRef, index: tuple[int, ...]) -> Any:
    """One element as a Python value; of a file, only its own page is read.

    Raises:
        DumpError: the bytes cannot be read.
    """
    where = ref.source
    if not isinstance(where, FileBytes):
        return array(ref)[index].item()
    import numpy as np

    strides = where.strides
    if strides is None:
        flat = int(np.ravel_multi_index(index, ref.shape)) if index else 0
    else:
        flat = sum(place * stride for place, stride in zip(index, strides, strict=True))
    dtype = numpy_dtype(ref.dtype)
    stored = dtype.newbyteorder(">") if where.big_endian else dtype
    view = mapped(where.path).view(where.offset + flat * dtype.itemsize, dtype.itemsize)
    return np.frombuffer(view, dtype=stored)[0].item()


def stretch(ref: TensorRef, start: int, count: int) -> np.ndarray[Any, Any]:
    """`count` elements from a flat place on, in C order; of a contiguous file only their own pages are read.

    Raises:
        DumpError: the bytes cannot be read.
    """
    import numpy as np

    where = ref.source
    if not isinstance(where, FileBytes) or where.strides is not None:
        return array(ref).reshape(-1)[start : start + count]
    dtype = numpy_dtype(ref.dtype)
    stored = dtype.newbyteorder(">") if where.big_endian else dtype
    view = mapped(where.path).view(where.offset + start * dtype.itemsize, count * dtype.itemsize)
    return np.frombuffer(view, dtype=stored, count=count)


def _joined(ref: TensorRef, source: Parts) -> np.ndarray[Any, Any]:
    """The parts copied into one array, each part's pages given back behind it."""
    import numpy as np

    whole = np.empty(ref.shape, dtype=numpy_dtype(ref.dtype))
    flat, start = whole.reshape(-1), 0
    for part in source.parts:
        if source.axis == 0:
            flat[start : start + part.numel] = array(part).reshape(-1)
            start += part.numel
        else:
            end = start + part.shape[source.axis]
            whole[(slice(None),) * source.axis + (slice(start, end),)] = array(part)
            start = end
        if isinstance(part.source, FileBytes):
            mapped(part.source.path).drop(part.source.offset, part.source.nbytes)
    whole.flags.writeable = False
    return whole


def flat_chunks(ref: TensorRef, elements: int = CHUNK) -> Iterator[tuple[int, np.ndarray[Any, Any]]]:
    """(start, flat chunk) over the tensor in C order, `elements` at a time, giving pages back behind.

    A tensor that is not contiguous is copied chunk by chunk of its leading axis.
    """
    import numpy as np

    where = ref.source
    if isinstance(where, FileBytes) and where.strides is None:
        file = mapped(where.path)
        dtype = numpy_dtype(ref.dtype)
        if where.big_endian:
            dtype = dtype.newbyteorder(">")
        for start in range(0, ref.numel, elements):
            count = min(elements, ref.numel - start)
            offset, nbytes = where.offset + start * dtype.itemsize, count * dtype.itemsize
            yield start, np.frombuffer(file.view(offset, nbytes), dtype=dtype, count=count)
            file.drop(offset, nbytes)
        return
    if isinstance(where, Parts) and where.axis == 0:
        yield from _chunks_of_parts(where, ref.numel, elements)
        return
    flat = array(ref).reshape(-1)
    for start in range(0, ref.numel, elements):
        yield start, flat[start : start + elements]


def spread_chunks(ref: TensorRef, chunks: int, elements: int = CHUNK) -> Iterator[tuple[int, np.ndarray[Any, Any]]]:
    """As `flat_chunks`, but at most `chunks` of them, evenly spread; all of them where that is not more.

    Only a tensor whose bytes lie in one piece can be read here and there; any other is read whole.
    """
    import numpy as np

    where = ref.source
    total = -(-ref.numel // elements)
    if total <= chunks or not isinstance(where, FileBytes) or where.strides is not None:
        yield from flat_chunks(ref, elements)
        return
    file, dtype = mapped(where.path), numpy_dtype(ref.dtype)
    if where.big_endian:
        dtype = dtype.newbyteorder(">")
    for number in range(chunks):
        start = (number * (total - 1) // (chunks - 1)) * elements
        count = min(elements, ref.numel - start)
        offset, nbytes = where.offset + start * dtype.itemsize, count * dtype.itemsize
        yield start, np.frombuffer(file.view(offset, nbytes), dtype=dtype, count=count)
        file.drop(offset, nbytes)


def _chunks_of_parts(source: Parts, numel: int, elements: int) -> Iterator[tuple[int, np.ndarray[Any, Any]]]:
    """Chunks of `elements` whatever the parts' sizes, so that two tensors' chunks face each other."""
    import numpy as np

    waiting: list[np.ndarray[Any, Any]] = []
    start = size = 0
    for part in source.parts:
        for _, piece in flat_chunks(part, elements):
            waiting.append(np.array(piece))
            size += piece.size
            while size >= elements:
                flat = np.concatenate(waiting)
                yield start, flat[:elements]
                start, waiting, size = start + elements, [flat[elements:]], size - elements
    if start < numel:
        yield start, np.concatenate(waiting)


def same_bytes(a: TensorRef, b: TensorRef, block: int = 8 << 20) -> bool | None:
    """Whether two tensors of one dtype and shape hold the same bytes; None when that cannot be asked of the maps."""
    if not (isinstance(a.source, FileBytes) and isinstance(b.source, FileBytes)):
        return None
    if a.source.strides is not None or b.source.strides is not None:
        return None
    if a.dtype != b.dtype or a.shape != b.shape or a.source.big_endian != b.source.big_endian:
        return None
    file_a, file_b = mapped(a.source.path), mapped(b.source.path)
    for start in range(0, a.nbytes, block):
        count = min(block, a.nbytes - start)
        view_a = file_a.view(a.source.offset + start, count)
        view_b = file_b.view(b.source.offset + start, count)
        same = _memcmp(view_a, view_b)
        file_a.drop(a.source.offset + start, count)
        file_b.drop(b.source.offset + start, count)
        if not same:
            return False
    return True


def _memcmp(a: memoryview, b: memoryview) -> bool:
    """C's memcmp on the maps: memoryview's own == unpacks item by item, np.array_equal reaches a third of its speed."""
    import ctypes

    import numpy as np

    pointer_a, pointer_b = (np.frombuffer(view, np.uint8).ctypes.data for view in (a, b))
    compare = ctypes.CDLL(None).memcmp
    compare.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    return bool(compare(pointer_a, pointer_b, len(a)) == 0)
