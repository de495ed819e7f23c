"""Storages and tensors: from a storage, an offset, a size and strides to where the first element lies.

Nothing here reads a tensor's bytes. What torch can hold and numpy cannot (sparse, quantised, nested,
conjugated) comes out as a tensor that says why it is unreadable, so the rest of the file still reads.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import islice
from math import prod
from typing import Any, NamedTuple

from replay_core.budget import is_walkable
from replay_core.dtypes import ITEMSIZE
from replay_core.dumps.containers.loading import (
    DType,
    InertClass,
    Loading,
    ShortBytes,
    Span,
    Storage,
    Stranger,
    Symbol,
    TensorClass,
)
from replay_core.records import TensorRef, Unreadable

#: torch and numpy both stop at 64 axes.
MAX_NDIM = 64
_MAX_NUMEL = 2**62
#: Tensor subclasses that keep plain tensors inside: kept as `{"__class__": …}` for the dialects to assemble.
DTENSOR = "torch.distributed.tensor.DTensor"
_INDEX = "torch.distributed.checkpoint.metadata.MetadataIndex"
SHARDED = "torch.distributed._shard.sharded_tensor.api.ShardedTensor"
NESTED = "torch.nested._internal.nested_tensor.NestedTensor"


class Geometry(NamedTuple):
    """A size and strides, checked. `strides` is None for C order; `extent` is elements from first to last touched."""

    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    extent: int


@lru_cache(maxsize=4096, typed=True)
def geometry(size: tuple[int, ...], strides: tuple[int, ...] | None) -> Geometry:
    """Check a size and its strides (None: contiguous).

    Raises:
        ValueError: they are no tensor's.
    """
    if len(size) > MAX_NDIM or (strides is not None and len(strides) != len(size)):
        raise ValueError(f"size {size[:MAX_NDIM]} with strides {strides and strides[:MAX_NDIM]}")
    numbers = size if strides is None else size + strides
    if any(type(number) is not int or not 0 <= number < _MAX_NUMEL for number in numbers):
        raise ValueError(f"size {size} with strides {strides}")
    numel = prod(size)
    if numel >= _MAX_NUMEL:
        raise ValueError(f"size {size} is more than any memory holds")
    if numel == 0 or strides is None:
        return Geometry(tuple(size), None, numel)
    extent = 1 + sum((length - 1) * stride for length, stride in zip(size, strides, strict=True))
    expected = 1
    for length, stride in zip(reversed(size), reversed(strides), strict=True):
        if length != 1:
            if stride != expected:
                return Geometry(tuple(size), tuple(strides), extent)
            expected *= length
    return Geometry(tuple(size), None, extent)


def view(
    loading: Loading, storage: Storage, offset: int, size: tuple[int, ...], strides: tuple[int, ...] | None,
    dtype: str | None = None,
) -> TensorRef:  # fmt: skip
    """The tensor of `size` and `strides` (in elements) that starts `offset` elements into the storage.

    Raises:
        DumpError: it would reach past its storage.
    """
    try:
        shape, steps, extent = geometry(size, strides)
    except (ValueError, TypeError) as error:
        raise loading.malformed(f"a tensor has an impossible geometry: {error}") from None
    if dtype is None:
        dtype, itemsize = storage.dtype, storage.itemsize
    else:
        itemsize = ITEMSIZE.get(dtype, 0)
    if not itemsize:
        return TensorRef("", dtype, shape, Unreadable(f"numpy has no dtype like {dtype}"))
    if type(offset) is not int or offset < 0:
        raise loading.malformed(f"a tensor starts at element {offset!r} of its storage")
    span = storage.span
    start, nbytes = offset * itemsize, extent * itemsize
    if (steps is not None or not extent) and not is_walkable(shape, prod(shape), nbytes):
        return TensorRef("", dtype, shape, Unreadable(overlapping(shape, nbytes)))
    if start + nbytes > span.nbytes and nbytes and storage.located:
        raise loading.malformed(
            "a tensor reaches past its storage",
            expected=f"at most {span.nbytes} bytes",
            found=f"{nbytes} bytes from byte {start} (shape {list(shape)}, strides {steps and list(steps)})",
        )
    source = span.region.source(
        span.offset + start,
        nbytes,
        itemsize,
        shape,
        steps,
        storage.big_endian and itemsize > 1,
        2 if dtype.startswith("complex") else 1,
    )
    return TensorRef("", dtype, shape, source)


def overlapping(shape: tuple[int, ...], nbytes: int) -> str:
    """Why a tensor of so many elements is not walked."""
    return f"it declares {prod(shape):,} elements, shape {list(shape)}, over {nbytes:,} stored bytes"


def bytes_tensor(span: Span) -> TensorRef:
    """Bytes that nobody asked to interpret, as a uint8 vector."""
    source = span.region.source(span.offset, span.nbytes, 1, (span.nbytes,), None, False)
    return TensorRef("", "uint8", (span.nbytes,), source)


def unreadable(dtype: Any, size: Any, why: str) -> TensorRef:
    """A tensor that is there and cannot be read; a size that makes no sense is left out."""
    try:
        shape = geometry(tuple(islice(size, MAX_NDIM + 1)), None).shape
    except (ValueError, TypeError):
        shape = ()
    return TensorRef("", dtype_name(dtype), shape, Unreadable(why))


def dtype_name(dtype: Any) -> str:
    """A dtype's project-wide name; torch's own where numpy has none like it."""
    if isinstance(dtype, str):
        return dtype
    if isinstance(dtype, DType):
        return dtype.dtype or dtype.name.rpartition(".")[2]
    return "unknown"


def rebuild_tensor(loading: Loading, args: tuple[Any, ...]) -> TensorRef:
    """`_rebuild_tensor(storage, offset, size, strides)`."""
    storage, offset, size, strides = args[:4]
    if not isinstance(storage, Storage):
        raise loading.malformed("a tensor without a storage")
    return view(loading, storage, offset, size, strides)


def rebuild_tensor_v2(loading: Loading, args: tuple[Any, ...]) -> TensorRef:
    """`…, requires_grad, backward_hooks, metadata=None`; the metadata are the conjugate and negative bits."""
    return _with_metadata(rebuild_tensor(loading, args), args[6] if len(args) > 6 else None)


def rebuild_tensor_v3(loading: Loading, args: tuple[Any, ...]) -> TensorRef:
    """`…, requires_grad, backward_hooks, dtype, metadata=None`: an untyped storage and a dtype of its own."""
    storage, offset, size, strides, _, _, dtype = args[:7]
    if not isinstance(storage, Storage) or not isinstance(dtype, DType):
        raise loading.malformed("a tensor without a storage or a dtype")
    ref = view(loading, storage, offset, size, strides, dtype_name(dtype))
    return _with_metadata(ref, args[7] if len(args) > 7 else None)


def _with_metadata(ref: TensorRef, metadata: Any) -> TensorRef:
    if not metadata:
        return ref
    bits = " and ".join(str(bit) for bit, is_set in metadata.items() if is_set) if type(metadata) is dict else "unknown"
    if not bits:
        return ref
    calls = "".join(f".resolve_{bit}()" for bit in ("conj", "neg") if bit in bits.split(" and "))
    way_out = f": save it with {calls}" if calls else ""
    return ref.with_(source=Unreadable(f"the tensor's values wait for its {bits} bit{way_out}"))


def rebuild_parameter(loading: Loading, args: tuple[Any, ...]) -> Any:
    """A parameter is its data; what was set on it as attributes is left out and noted."""
    if len(args) > 3 and args[3]:
        loading.note("attributes set on a parameter are left out")
    return args[0]


def rebuild_from_type(loading: Loading, args: tuple[Any, ...]) -> Any:
    """`_rebuild_from_type_v2(function, class, args, state)`: a subclass we do not know keeps its shape only."""
    function, cls, inner, state = args
    if not isinstance(function, Symbol) or isinstance(function, Stranger) or type(inner) is not tuple:
        raise loading.malformed("a tensor subclass without its function")
    ref = function.call(loading, inner)
    if isinstance(cls, InertClass) and cls.name in (DTENSOR, NESTED, SHARDED):
        return _kept(loading, cls.name, inner, ref, state)
    if isinstance(cls, TensorClass):
        if state:
            loading.note("attributes set on a tensor are left out")
        return ref
    if not isinstance(ref, TensorRef) or not isinstance(cls, Symbol):
        raise loading.malformed("a tensor subclass that is no tensor")
    _excuse(cls)
    return ref if not ref.is_readable else ref.with_(source=Unreadable(f"tensor subclass `{cls.name}`"))


def _kept(loading: Loading, name: str, inner: tuple[Any, ...], ref: Any, state: Any) -> dict[str, Any]:
    """A DTensor's local shard with the spec that says where it belongs; a ShardedTensor's shards, each with its place;
    a jagged tensor's values and offsets.
    """
    if name == NESTED:
        return {"__class__": name, "state": ref if type(ref) is dict else {}}
    if name == SHARDED and isinstance(ref, TensorRef):
        return {"__class__": name, "shape": ref.shape, "dtype": ref.dtype, "shards": state[0] if state else None}
    if type(state) is tuple and len(state) == 2:
        # A class with slots: (attributes, slots).
        state = state[1]
    if type(state) is not dict or not isinstance(ref, TensorRef):
        raise loading.malformed("a DTensor without its local tensor")
    spec = state.get("_spec")
    return {"__class__": name, "shape": ref.shape, "local": state.get("_local_tensor"), "spec": spec}


def place_text(key: Any) -> Any:
    """The `MetadataIndex` by which a distributed checkpoint finds a piece, as text: the tensor's name and where the
    piece begins. What else is given comes back as it is.
    """
    state = key.get("state") if isinstance(key, dict) and key.get("__class__") == _INDEX else None
    if type(state) is not dict or type(state.get("fqn")) is not str:
        return key
    return text_of_place(state["fqn"], state.get("offset"))


def text_of_place(name: str, start: Any) -> str:
    """The key of a piece that `storage_data` has it under."""
    return f"{name}\0{','.join(map(str, start)) if isinstance(start, tuple) else ''}"


def rebuild_njt(loading: Loading, args: tuple[Any, ...]) -> Any:
    """`_rebuild_njt(arguments)`: a jagged NestedTensor is its values, end to end, and the offsets between them."""
    arguments = args[0] if args else None
    if type(arguments) is not dict:
        raise loading.malformed("a jagged tensor without its arguments")
    return {key: arguments.get(key) for key in ("values", "offsets", "lengths", "_ragged_idx")}


def rebuild_wrapper_subclass(loading: Loading, args: tuple[Any, ...]) -> TensorRef:
    cls, dtype, size = args[:3]
    _excuse(cls)
    return unreadable(dtype, size, f"tensor subclass `{cls!r}` keeps its data elsewhere")


def _excuse(cls: Any) -> None:
    if isinstance(cls, Stranger):
        cls.excused = True


def rebuild_meta(loading: Loading, args: tuple[Any, ...]) -> TensorRef:
    return unreadable(args[0], args[1], "a tensor on the meta device has no data")


def rebuild_sparse(loading: Loading, args: tuple[Any, ...]) -> TensorRef:
    layout, data = args[:2]
    values = data[1] if str(layout) == "torch.sparse_coo" else data[2]
    size = data[2] if str(layout) == "torch.sparse_coo" else data[3]
    return unreadable(values.dtype, size, f"a sparse tensor ({layout})")


def rebuild_quantised(loading: Loading, args: tuple[Any, ...]) -> TensorRef:
    storage = args[0]
    dtype = storage.dtype if isinstance(storage, Storage) else "unknown"
    return unreadable(dtype, args[2], "a quantised tensor")


def rebuild_nested(loading: Loading, args: tuple[Any, ...]) -> TensorRef:
    values = args[0]
    return unreadable(values.dtype if isinstance(values, TensorRef) else "unknown", (), "a nested tensor")


def rebuild_from_device(loading: Loading, args: tuple[Any, ...]) -> Any:
    """A tensor of a device without storages: saved as a CPU tensor or array, and its dtype."""
    data, dtype = args[:2]
    if isinstance(data, TensorRef) and data.dtype != dtype_name(dtype):
        return data.with_(source=Unreadable(f"saved as {data.dtype}, to be read as {dtype_name(dtype)}"))
    return data


def load_from_bytes(loading: Loading, args: tuple[Any, ...]) -> Any:
    """`torch.storage._load_from_bytes(bytes)`: a whole torch file inside the pickle, read where it lies."""
    (data,) = args
    if isinstance(data, ShortBytes):
        data = data.span
    elif type(data) is bytes:
        data = Span(loading.region.in_memory(data), 0, len(data))
    if not isinstance(data, Span):
        raise loading.malformed("a nested torch file that is not bytes")
    key = (id(data.region.memory), data.offset, data.nbytes)
    if key not in loading.nested:
        assert loading.torch_stream is not None
        inner = loading.inside(data.region.part(data.offset, data.nbytes))
        # The data rides along: an id is only unique while its object lives.
        loading.nested[key] = (loading.torch_stream(inner), data)
    return loading.nested[key][0]
