"""numpy's arrays, scalars and dtypes as pickles spell them, without numpy.

An array is first made empty and filled by BUILD, so it is a `PendingArray` until then.
"""

from __future__ import annotations

import struct
from math import prod
from typing import Any

from replay_core.budget import spend_bytes, spend_values
from replay_core.dtypes import ITEMSIZE
from replay_core.dumps.containers.loading import DType, Loading, ShortBytes, Span, Storage
from replay_core.dumps.containers.torch_rebuild import geometry, unreadable, view
from replay_core.records import TensorRef

_NAMES = {
    "b1": "bool", "i1": "int8", "u1": "uint8", "i2": "int16", "u2": "uint16", "i4": "int32", "u4": "uint32",
    "i8": "int64", "u8": "uint64", "f2": "float16", "f4": "float32", "f8": "float64", "c8": "complex64",
    "c16": "complex128",
}  # fmt: skip
_STRUCT = {
    "bool": "?", "int8": "b", "uint8": "B", "int16": "h", "uint16": "H", "int32": "i", "uint32": "I", "int64": "q",
    "uint64": "Q", "float16": "e", "float32": "f", "float64": "d", "complex64": "ff", "complex128": "dd",
}  # fmt: skip
#: Arrays of text are turned into lists of text; longer ones are left where they are.
MAX_TEXT_BYTES = 1 << 24
_MAX_EMPTY_ROWS = 1 << 16


class NumpyDType:
    """`numpy.dtype(code)`, its byte order filled in by BUILD. `dtype` is None where rldbg has none like it."""

    __slots__ = ("big_endian", "code", "dtype")

    def __init__(self, code: str, dtype: str | None) -> None:
        self.code = code
        self.dtype = dtype
        self.big_endian = code.startswith(">")

    def build(self, loading: Loading, state: Any) -> None:
        if type(state) is not tuple or len(state) < 2:
            raise loading.malformed("a numpy dtype whose state is not numpy's")
        self.big_endian = state[1] == ">"

    def text(self) -> tuple[str, int] | None:
        """("U" or "S", bytes per element) of a text dtype."""
        kind, width = self.code[:1], self.code[1:]
        if kind not in "US" or not width.isdecimal() or not 0 < len(width) < 9:
            return None
        return kind, int(width) * (4 if kind == "U" else 1)


class PendingArray:
    """An array between `_reconstruct` and BUILD; `ref` is what it became."""

    __slots__ = ("ref",)

    def __init__(self) -> None:
        self.ref: Any = TensorRef("", "int8", (0,), unreadable("int8", (0,), "an array that was never filled").source)

    def build(self, loading: Loading, state: Any) -> None:
        if type(state) is not tuple or len(state) not in (4, 5):
            raise loading.malformed("a numpy array whose state is not numpy's")
        shape, dtype, is_fortran, data = state[-4:]
        self.ref = _array(loading, data, dtype, shape, "F" if is_fortran is True else "C", None)


def make_dtype(loading: Loading, args: tuple[Any, ...]) -> NumpyDType:
    """`numpy.dtype(code, align, copy)`; the code is a text, or an ml_dtypes class."""
    code = args[0] if args else None
    if isinstance(code, DType):
        return NumpyDType(code.name, code.dtype)
    if type(code) is not str:
        raise loading.malformed(f"a numpy dtype of {code!r:.40}")
    return NumpyDType(code, _NAMES.get(code.lstrip("<>|=")))


def reconstruct(loading: Loading, args: tuple[Any, ...]) -> PendingArray:
    return PendingArray()


def from_buffer(loading: Loading, args: tuple[Any, ...]) -> Any:
    """`_frombuffer(data, dtype, shape, order, axis_order)`, how protocol 5 keeps an array."""
    data, dtype, shape, order = args[:4]
    return _array(loading, data, dtype, shape, order, args[4] if len(args) > 4 else None)


def _array(loading: Loading, data: Any, dtype: Any, shape: Any, order: Any, axes: Any) -> Any:
    if not isinstance(dtype, NumpyDType) or type(shape) is not tuple:
        raise loading.malformed("a numpy array without a dtype or a shape")
    try:
        numel = geometry(shape, None).extent
    except (ValueError, TypeError) as error:
        raise loading.malformed(f"a numpy array has an impossible shape: {error}") from None
    if type(data) is list:
        spend_values(len(data), "an array of objects")
        if len(data) != numel:
            raise loading.malformed("an array of objects", expected=f"{numel} objects", found=str(len(data)))
        return _reshaped(data, shape, order, axes)
    span = _span(loading, data)
    if dtype.dtype is None:
        if (text := dtype.text()) and order == "C" and span.nbytes <= MAX_TEXT_BYTES:
            return _texts(loading, span, text, shape, numel, dtype.big_endian)
        return unreadable(f"numpy {dtype.code}", shape, f"rldbg has no dtype like numpy's {dtype.code!r}")
    itemsize = ITEMSIZE[dtype.dtype]
    if span.nbytes != numel * itemsize:
        raise loading.malformed("a numpy array's bytes", expected=f"{numel * itemsize}", found=f"{span.nbytes}")
    strides: tuple[int, ...] | None = None
    if order == "F":
        strides = _fortran_strides(shape)
    elif order == "K" and axes is not None:
        c_strides = _c_strides(shape)
        if type(axes) is not tuple or sorted(axes) != list(range(len(shape))):
            raise loading.malformed(f"a numpy array's axes are {axes!r:.60}")
        shape, strides = tuple(shape[axis] for axis in axes), tuple(c_strides[axis] for axis in axes)
    elif order not in ("C", "K"):
        raise loading.malformed(f"a numpy array's order is {order!r:.40}")
    return view(loading, Storage(span, dtype.dtype, itemsize, dtype.big_endian), 0, shape, strides)


def _c_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _fortran_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(prod(shape[:axis]) for axis in range(len(shape)))


def _reshaped(items: list[Any], shape: tuple[int, ...], order: Any, axes: Any) -> Any:
    if len(shape) == 1:
        return items
    if order != "C" or axes is not None:
        return unreadable("object", shape, "an array of objects that is not in C order")
    if 0 in shape:
        outer = shape[: shape.index(0)]
        if prod(outer) > _MAX_EMPTY_ROWS:
            return unreadable("object", shape, "an array of no objects in very many rows")
        items, shape = [[] for _ in range(prod(outer))], outer
        if not outer:
            return []
    for length in reversed(shape[1:]):
        items = [items[start : start + length] for start in range(0, len(items), length)]
    return items if shape else items[0]


def _texts(
    loading: Loading, span: Span, text: tuple[str, int], shape: tuple[int, ...], numel: int, big_endian: bool
) -> Any:
    kind, width = text
    if span.nbytes != numel * width:
        raise loading.malformed("a numpy text array's bytes", expected=str(numel * width), found=str(span.nbytes))
    spend_bytes(span.nbytes + 64 * numel, "an array of texts")
    data = span.read()
    encoding = ("utf-32-be" if big_endian else "utf-32-le") if kind == "U" else "latin-1"
    words = [
        data[start : start + width].decode(encoding, "replace").rstrip("\0") for start in range(0, len(data), width)
    ]
    return _reshaped(words, shape, "C", None)


def _span(loading: Loading, data: Any) -> Span:
    if isinstance(data, Span):
        return data
    if isinstance(data, ShortBytes):
        return data.span
    if type(data) is bytes:
        return Span(loading.region.in_memory(data), 0, len(data))
    raise loading.malformed(f"a numpy array's data are a {type(data).__name__}, not bytes")


def scalar(loading: Loading, args: tuple[Any, ...]) -> Any:
    """`scalar(dtype, bytes)`: a plain number or text where Python has one."""
    dtype, data = args
    if not isinstance(dtype, NumpyDType):
        raise loading.malformed("a numpy scalar without a dtype")
    if dtype.dtype not in _STRUCT:
        value = _array(loading, data, dtype, (), "C", None)
        return value
    data = _span(loading, data).read()
    try:
        numbers = struct.unpack((">" if dtype.big_endian else "<") + _STRUCT[dtype.dtype], data)
    except struct.error as error:
        raise loading.malformed(f"a numpy scalar: {error}") from None
    return complex(*numbers) if len(numbers) == 2 else numbers[0]
