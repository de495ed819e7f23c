"""Reads the bytes a TensorRef points at: a whole tensor into memory, a stream of chunks through one small buffer."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from math import copysign, prod
from typing import TYPE_CHECKING, Any

from replay_core import kernel, read_ahead
from replay_core.dtypes import ITEMSIZE
from replay_core.errors import DumpError
from replay_core.file_spans import Stream
from replay_core.landing import LINE, PAGE, LandingRoom
from replay_core.records import FileBytes, Inline, Marks, Parts, Reduced, TensorRef, Unreadable

if TYPE_CHECKING:
    import numpy as np

#: Elements looked at together: they and their scratch stay near the processor, and calls are few enough not to count.
#: Measured on bf16 pairs, ns an element: 2.4 at 128 k, 2.1 at 256 k, 1.95 at 512 k.
CHUNK = 262_144
#: Bytes of a file that a tensor with strides is gathered from at a time.
_SPAN = 1 << 22
#: Rows further apart than this are read one by one: a call costs as much as copying so many bytes.
_FAR = 1 << 16
#: So many rows that lie far apart are read one by one.
_FEW = 16
#: What a number of a log is, whose bytes are those of an array of it.
_PYTHONS = {"bool": bool, "int64": int, "float64": float}


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The numpy (or ml_dtypes) dtype of that name."""
    import numpy as np

    if name.startswith(("bfloat", "float8")):
        import ml_dtypes

        dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return dtype
    return np.dtype(name)


def _stored(ref: TensorRef, where: FileBytes) -> np.dtype[Any]:
    """The dtype as it lies in the file."""
    dtype = numpy_dtype(ref.dtype)
    return dtype.newbyteorder(">") if where.big_endian else dtype


def array(ref: TensorRef) -> np.ndarray[Any, Any]:
    """The tensor as a read-only numpy array of its own dtype and shape, never a look at the file itself.

    Raises:
        DumpError: the field cannot be read (says why), or the file ends too early.
    """
    import numpy as np

    if isinstance(ref.source, Unreadable):
        raise DumpError(ref.source.why, tensor=ref.name)
    if isinstance(ref.source, Inline):
        return _inline(ref, ref.source.value)
    if isinstance(ref.source, Parts):
        return _joined(ref, ref.source)
    if isinstance(ref.source, Reduced):
        return _reduced(ref, ref.source)
    if isinstance(ref.source, Marks):
        return np.asarray(array(ref.source.of) != 0, dtype=numpy_dtype(ref.dtype))
    where = ref.source
    dtype = _stored(ref, where)
    with Stream(where.path) as file:
        if where.strides is None:
            room = _landing(ref.numel * dtype.itemsize, where.offset)
            file.into(room.data, where.offset)
            values = room.view(dtype).reshape(ref.shape)
        else:
            values = _gathered(file, where.offset, ref.shape, where.strides, dtype)
    values.flags.writeable = False
    return values


def _landing(nbytes: int, offset: int) -> np.ndarray[Any, Any]:
    """Memory for bytes from `offset` of a file: it lies in its page as they lie in theirs, or a little before, at a
    multiple of 64 (uint8 [nbytes]).

    Where it lies 1 to 31 bytes further on, as what malloc maps does by 16, a kernel that copies by `rep movsb` waits
    for its own stores: 2.7 GB/s instead of 13 (measured; a processor compares the low twelve bits of addresses).
    """
    import numpy as np

    return (
        np.empty(nbytes, dtype=np.uint8)
        if nbytes < PAGE
        else _placed(np.empty(nbytes + PAGE, np.uint8), nbytes, offset)
    )


def _placed(room: np.ndarray[Any, Any], nbytes: int, offset: int) -> np.ndarray[Any, Any]:
    start = ((offset & -LINE) - room.ctypes.data) % PAGE
    return room[start : start + nbytes]


class _Rooms(threading.local):
    """Memory that a thread has read chunks into: a megabyte made anew is faulted in page by page, for each tensor."""

    MOST, LARGEST = 4, 1 << 22

    def __init__(self) -> None:
        self._kept: list[np.ndarray[Any, Any]] = []

    def take(self, nbytes: int) -> np.ndarray[Any, Any]:
        import numpy as np

        for place in range(len(self._kept)):
            # The list's own reference and the argument's: nobody holds a chunk of it any more.
            if self._kept[place].size >= nbytes and sys.getrefcount(self._kept[place]) == 2:
                return self._kept.pop(place)
        return np.empty(nbytes, dtype=np.uint8)

    def give(self, room: np.ndarray[Any, Any]) -> None:
        if room.size <= self.LARGEST:
            self._kept = [*self._kept[1 - self.MOST :], room]


_rooms = _Rooms()


@contextmanager
def room(nbytes: int, offset: int) -> Iterator[np.ndarray[Any, Any]]:
    """Memory of a thread's for bytes from `offset` of a file, lying in its pages as they do (uint8 [nbytes])."""
    whole = _rooms.take(nbytes + PAGE)
    try:
        yield _placed(whole, nbytes, offset)
    finally:
        _rooms.give(whole)


def _inline(ref: TensorRef, value: Any) -> np.ndarray[Any, Any]:
    import numpy as np

    if ref.is_text:
        return np.asarray(value, dtype=object)
    dtype = numpy_dtype(ref.dtype)
    try:
        if isinstance(value, bytes):
            # The file kept the tensor's bytes inside its structure (pickle protocol 2): little-endian, C order.
            return np.frombuffer(value, dtype=dtype).reshape(ref.shape)
        return np.asarray(value, dtype=dtype).reshape(ref.shape)
    except (ValueError, TypeError, OverflowError) as error:
        found = f"{str(error)[:80]}"
        raise DumpError(
            "the field's values are not of its dtype", tensor=ref.name, expected=ref.dtype, found=found
        ) from None


def _gathered(
    file: Stream, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype[Any]
) -> np.ndarray[Any, Any]:
    """A tensor with strides (in elements), through spans of _SPAN bytes: a column of a large matrix is not its extent.

    An element that stands at many places is read once.
    """
    import numpy as np

    if not all(shape):
        return np.empty(shape, dtype)
    size = dtype.itemsize
    stored = tuple(length if stride else 1 for length, stride in zip(shape, strides, strict=True))
    if stored != shape:
        return np.broadcast_to(_gathered(file, offset, stored, strides, dtype), shape)
    extent = 1 + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
    if extent * size <= _SPAN:
        span = _landing(extent * size, offset)
        file.into(span.data, offset)
        # Not as_strided, which knows none of the dtypes that numpy itself lacks.
        values: np.ndarray[Any, Any] = np.ndarray(
            shape, dtype, span.data, strides=[stride * size for stride in strides]
        )
        return values
    whole = np.empty(shape, dtype)
    axis = max((axis for axis, length in enumerate(shape) if length > 1), key=lambda axis: strides[axis])
    step = 1 if strides[axis] * size > _FAR else max(1, _SPAN // (strides[axis] * size))
    for start in range(0, shape[axis], step):
        count = min(step, shape[axis] - start)
        here = (slice(None),) * axis + (slice(start, start + count),)
        inner = (*shape[:axis], count, *shape[axis + 1 :])
        whole[here] = _gathered(file, offset + start * strides[axis] * size, inner, strides, dtype)
    return whole


def part(ref: TensorRef, spans: Sequence[tuple[int, int]]) -> np.ndarray[Any, Any]:
    """The stretch `start:end` of every axis (those not named whole), `start <= end` within it.

    Of a tensor that lies in a file only the pages from the stretch's first element to its last are read.

    Raises:
        DumpError: as `array`.
    """
    every = [*spans, *((0, length) for length in ref.shape[len(spans) :])]
    where = ref.source
    if not isinstance(where, FileBytes) or not ref.numel or any(start == end for start, end in every):
        return array(ref)[tuple(slice(*span) for span in every)]
    strides = where.strides
    if strides is None:
        strides = tuple(prod(ref.shape[axis + 1 :]) for axis in range(len(ref.shape)))
    shape = tuple(end - start for start, end in every)
    first = sum(start * stride for (start, _), stride in zip(every, strides, strict=True))
    extent = 1 + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
    size = ITEMSIZE[ref.dtype]
    lies = FileBytes(where.path, where.offset + first * size, extent * size, strides, where.big_endian)
    return array(ref.with_(shape=shape, source=lies, rows=None))


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
    dtype = _stored(ref, where)
    number = np.empty(dtype.itemsize, dtype=np.uint8)
    with Stream(where.path) as file:
        file.into(number.data, where.offset + flat * dtype.itemsize)
    return number.view(dtype)[0].item()


def _joined(ref: TensorRef, source: Parts) -> np.ndarray[Any, Any]:
    """The parts copied into one array."""
    import numpy as np

    whole = np.empty(ref.shape, dtype=numpy_dtype(ref.dtype))
    flat, start = whole.reshape(-1), 0
    with ExitStack() as opened:
        file: Stream | None = None
        for part in source.parts:
            if source.axis:
                end = start + part.shape[source.axis]
                whole[(slice(None),) * source.axis + (slice(start, end),)] = array(part)
                start = end
                continue
            here, where = flat[start : start + part.numel], part.source
            start += part.numel
            if not isinstance(where, FileBytes) or where.strides is not None or where.big_endian:
                here[:] = array(part).reshape(-1)
                continue
            if file is None or file.path != where.path:
                opened.close()
                file = opened.enter_context(Stream(where.path))
            file.into(here.view(np.uint8).data, where.offset)
    whole.flags.writeable = False
    return whole


def _reduced(ref: TensorRef, source: Reduced) -> np.ndarray[Any, Any]:
    """The parts added up (averaged, the largest or smallest of each element) in doubles, as the tensor's dtype."""
    import numpy as np

    total = array(source.parts[0]).astype(np.float64)
    step = {"max": np.maximum, "min": np.minimum}.get(source.how, np.add)
    for part in source.parts[1:]:
        step(total, array(part).astype(np.float64), out=total)
    if source.how == "avg":
        total /= len(source.parts)
    made = total.astype(numpy_dtype(ref.dtype)).reshape(ref.shape)
    made.flags.writeable = False
    return made


def flat_chunks(ref: TensorRef, elements: int = CHUNK) -> Iterator[tuple[int, np.ndarray[Any, Any]]]:
    """(start, flat chunk) over the tensor in C order, `elements` at a time. A chunk holds until the next is asked for.

    A tensor that is not contiguous is copied chunk by chunk of its leading axis.
    """

    where = ref.source
    if isinstance(where, FileBytes) and where.strides is None:
        yield from _read_chunks(ref, where, range(0, ref.numel, elements), elements)
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

    where = ref.source
    total = -(-ref.numel // elements)
    if total <= chunks or not isinstance(where, FileBytes) or where.strides is not None:
        yield from flat_chunks(ref, elements)
        return
    starts = [(number * (total - 1) // (chunks - 1)) * elements for number in range(chunks)]
    yield from _read_chunks(ref, where, starts, elements)


def _read_chunks(
    ref: TensorRef, where: FileBytes, starts: Iterable[int], elements: int
) -> Iterator[tuple[int, np.ndarray[Any, Any]]]:
    """Chunks that lie in one piece, each in the buffer of the one before."""
    dtype = _stored(ref, where)
    with room(min(elements, ref.numel) * dtype.itemsize, where.offset) as buffer, Stream(where.path) as file:
        for start in starts:
            part = buffer[: min(elements, ref.numel - start) * dtype.itemsize]
            file.into(part.data, where.offset + start * dtype.itemsize)
            yield start, part.view(dtype)


def row_reader(ref: TensorRef, width: int, file: Stream | None = None) -> Callable[[Any], np.ndarray[Any, Any]]:
    """Reads rows of the tensor seen as [-1, width], by their numbers: [len(numbers), width].

    Rows that lie near each other in a file are read as one span; nothing else of the tensor is.
    file: the tensor's, where it is open.
    """
    where = ref.source
    if not (isinstance(where, FileBytes) and where.strides is None):
        whole = array(ref).reshape(-1, width)
        return lambda numbers: whole[numbers]
    return _RowReader(where, _stored(ref, where), width, file)


class _RowReader:
    """Rows of a stretch of a file. No function in a function: one that calls itself is a ring, which stays until Python
    looks for rings, and there is one for every pair."""

    __slots__ = ("_dtype", "_file", "_offset", "_path", "_row", "_width")

    def __init__(self, where: FileBytes, dtype: Any, width: int, file: Stream | None) -> None:
        self._path, self._offset, self._file = where.path, where.offset, file
        self._dtype, self._width, self._row = dtype, width, width * dtype.itemsize

    def __call__(self, numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        import numpy as np

        if not len(numbers):
            return np.empty((0, self._width), dtype=self._dtype)
        if self._file is not None:
            return self._near(self._file, numbers)
        with Stream(self._path) as opened:
            return self._near(opened, numbers)

    def _near(self, file: Stream, numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        import numpy as np

        offset, row, dtype, width = self._offset, self._row, self._dtype, self._width
        low, high = int(numbers.min()), int(numbers.max()) + 1
        if high - low > 4 * len(numbers) + 64:
            if len(numbers) > _FEW:
                return np.concatenate([self._near(file, part) for part in np.array_split(numbers, 2)])
            each = np.empty((len(numbers), width), dtype=dtype)
            by = np.ascontiguousarray(numbers, dtype=np.int64)
            where = file.descriptor
            if where is not None and kernel.read_rows((where, offset), row, by.ctypes.data, by.size, each.ctypes.data):
                return each
            for number, into in zip(numbers.tolist(), each, strict=True):
                file.into(into.view(np.uint8).data, offset + number * row)
            return each
        span = _landing((high - low) * row, offset + low * row)
        file.into(span.data, offset + low * row)
        rows: np.ndarray[Any, Any] = span.view(dtype).reshape(-1, width)
        return rows if high - low == len(numbers) and bool((np.diff(numbers) == 1).all()) else rows[numbers - low]


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


class _Blocks(threading.local):
    """Two buffers of a thread, each with where its pages begin in memory."""

    FIRST = 1 << 14
    SIZE = 1 << 18  # both fit twice in an L2 cache of 1 MB; twice as much was a little slower, 2 MB far

    def __init__(self) -> None:
        self._a, self._b = (LandingRoom(self.SIZE) for _ in range(2))

    def landing(self, offset_a: int, offset_b: int) -> tuple[tuple[memoryview, int], tuple[memoryview, int]]:
        """As `_landing`, each with its address."""
        return self._a.landing(offset_a), self._b.landing(offset_b)


_blocks = _Blocks()


def number_of(ref: TensorRef) -> bool | int | float | None:
    """The number that stood in a file's text, as Python has it; None of anything else."""
    if ref.shape or not isinstance(ref.source, Inline):
        return None
    value: bool | int | float | None = ref.source.value
    return value if type(value) is _PYTHONS.get(ref.dtype, type) else None


def is_same_number(a: TensorRef, b: TensorRef) -> bool:
    """Whether both are one and the same number that stood in a file's text, to the last bit. A NaN is none."""
    if a.dtype != b.dtype or not (isinstance(a.source, Inline) and isinstance(b.source, Inline)):
        return False
    x, y = a.source.value, b.source.value
    kind = _PYTHONS.get(a.dtype)
    # -0.0 equals 0.0 and is another.
    return type(x) is kind and type(y) is kind and x == y and (x != 0 or copysign(1, x) == copysign(1, y))


def same_bytes(a: TensorRef, b: TensorRef, block: int = _Blocks.SIZE) -> bool | None:
    """Whether two tensors of one dtype, shape and cut into rows hold the same bytes; None where that cannot be asked.

    Raises:
        DumpError: the bytes of one cannot be read.
    """
    return _held_together(a, b, block)[0]


def same_bytes_and_nans(a: TensorRef, b: TensorRef) -> tuple[bool | None, int]:
    """As `same_bytes`; and, where they are the same, how many of the numbers are NaN, on both sides alike.

    Raises:
        DumpError: the bytes of one cannot be read.
    """
    is_same, nans = _held_together(a, b, _Blocks.SIZE, a.dtype)
    return is_same, 0 if not is_same else count_nans(a) if nans is None else nans


def _held_together(a: TensorRef, b: TensorRef, block: int, nans_of: str = "") -> tuple[bool | None, int | None]:
    """What `same_bytes` says, and how many NaN of the dtype were seen on the way; None where nobody counted."""
    if a.rows != b.rows:
        return None, None
    if isinstance(a.source, Inline) and isinstance(b.source, Inline):
        # A log is made of numbers: to measure two that are the same costs twenty times as much.
        if a.dtype != b.dtype or a.shape != b.shape or a.is_text:
            return False, None
        one = array(a)
        # A NaN on both sides is worth counting.
        return (None if bool((one != one).any()) else one.tobytes() == array(b).tobytes()), 0
    if not (isinstance(a.source, FileBytes) and isinstance(b.source, FileBytes)):
        return None, None
    if a.source.strides is not None or b.source.strides is not None:
        return None, None
    if a.dtype != b.dtype or a.shape != b.shape or a.source.big_endian != b.source.big_endian:
        return None, None
    if a.source.offset == b.source.offset and read_ahead.knows_same(
        a.source.path, b.source.path, a.source.offset, a.nbytes
    ):
        return True, None
    (room_a, at_a), (room_b, at_b) = _blocks.landing(a.source.offset, b.source.offset)
    # Most tensors that differ do so at once.
    start, count = 0, min(_Blocks.FIRST, block)
    with Stream(a.source.path) as file_a, Stream(b.source.path) as file_b:
        fd_a, fd_b = file_a.descriptor, file_b.descriptor
        if fd_a is not None and fd_b is not None:
            spans = (fd_a, a.source.offset), (fd_b, b.source.offset)
            is_counted = nans_of in kernel.LARGEST and not a.source.big_endian and sys.byteorder == "little"
            told = kernel.Reach()
            known = kernel.same_bytes(*spans, a.nbytes, (at_a, at_b), count, block, told, nans_of if is_counted else "")
            if known is not None:
                return known, int(told.nans) if is_counted else None
        compare, nans = _memcmp(), 0
        while start < a.nbytes:
            count = min(count, a.nbytes - start)
            file_a.into(room_a[:count], a.source.offset + start)
            file_b.into(room_b[:count], b.source.offset + start)
            if compare(at_a, at_b, count):
                return False, None
            if _may_be_nan(nans_of):
                import numpy as np

                nans += _nans_of(np.frombuffer(room_a[:count], _stored(a, a.source)))
            start, count = start + count, block
    return True, nans


def count_nans(ref: TensorRef) -> int:
    """How many of a tensor's numbers are NaN.

    Raises:
        DumpError: its bytes cannot be read.
    """
    if not _may_be_nan(ref.dtype):
        return 0
    where = ref.source
    if isinstance(where, FileBytes) and where.strides is None and not where.big_endian and sys.byteorder == "little":
        (_, at), _ = _blocks.landing(where.offset, 0)
        with Stream(where.path) as file:
            if file.descriptor is not None:
                span = file.descriptor, where.offset
                known = kernel.count_nans(span, ref.nbytes, ref.dtype, at, _Blocks.SIZE)
                if known is not None:
                    return known
    return sum(_nans_of(chunk) for _, chunk in flat_chunks(ref))


def _may_be_nan(dtype: str) -> bool:
    return dtype.startswith(("float", "bfloat", "complex"))


def _nans_of(values: np.ndarray[Any, Any]) -> int:
    return int((values != values).sum())


@cache
def _memcmp() -> Callable[[int, int, int], int]:
    """C's memcmp: memoryview's own == unpacks item by item, np.array_equal reaches a third of its speed."""
    compare = ctypes.CDLL(None).memcmp
    compare.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    compare.restype = ctypes.c_int
    return compare
