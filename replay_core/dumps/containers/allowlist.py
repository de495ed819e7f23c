"""The globals a pickle may name, each with what it turns into here. Everything else is a stranger.

A new line must hold for any arguments a hostile file can give: these functions run on them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from replay_core.dtypes import ITEMSIZE
from replay_core.dumps.containers import numpy_rebuild as numpy_
from replay_core.dumps.containers import plain_values
from replay_core.dumps.containers import tensordict_rebuild as tensordict_
from replay_core.dumps.containers import torch_rebuild as torch_
from replay_core.dumps.containers.loading import (
    DType,
    InertClass,
    Loading,
    Span,
    StorageClass,
    Stranger,
    Symbol,
    TensorClass,
)

_STORAGES = {
    "Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64",
    "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool",
    "ComplexFloat": "complex64", "ComplexDouble": "complex128",
    "QInt8": "qint8", "QUInt8": "quint8", "QInt32": "qint32", "QUInt4x2": "quint4x2", "QUInt2x4": "quint2x4",
}  # fmt: skip
_STORED_SIZE = {"qint8": 1, "quint8": 1, "qint32": 4, "quint4x2": 1, "quint2x4": 1}
_TORCH_DTYPES = {
    "double": "float64", "float": "float32", "half": "float16", "long": "int64", "int": "int32", "short": "int16",
    "cfloat": "complex64", "cdouble": "complex128",
}  # fmt: skip
_OTHER_DTYPES = (
    "complex32", "chalf", "float4_e2m1fn_x2", "qint8", "quint8", "qint32", "quint4x2", "quint2x4", "bit", "bits8",
    "bits16", "bits1x8", "bits2x4", "bits4x2", *(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)),
)  # fmt: skip
_LAYOUTS = ("strided", "sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc", "jagged")
_QSCHEMES = ("per_tensor_affine", "per_channel_affine", "per_tensor_symmetric", "per_channel_symmetric",
             "per_channel_affine_float_qparams")  # fmt: skip

#: Record classes of the frameworks whose dumps rldbg reads; their dialects interpret the state.
_INERT = (
    "verl.protocol.DataProto",
    "roll.distributed.scheduler.protocol.DataProto",
    "skyrl.backends.skyrl_train.training_batch.TrainingInputBatch",
    # The module's name while the trainer was a package of its own.
    "skyrl_train.training_batch.TrainingInputBatch",
    "tensordict._td.TensorDict",
    "tensordict.TensorDict",
    "tensordict.tensorclass.NonTensorData",
    "tensordict.tensorclass.NonTensorStack",
    "tensordict._lazy.LazyStackedTensorDict",
    "torch._dynamo.decorators._DimRange",
    "types.SimpleNamespace",
    "argparse.Namespace",  # the arguments in a Megatron checkpoint
    "uuid.UUID",
    torch_.NESTED,
)
#: A distributed tensor's placement, a checkpoint's metadata: never interpreted, so any class below these names is
#: kept inert.
_INERT_PREFIXES = ("torch.distributed.tensor.", "torch.distributed._tensor.", "torch.distributed.device_mesh.",
                   "torch.distributed._mesh_layout.", "torch.distributed._shard.", "torch.distributed.remote_device.",
                   "torch.distributed.checkpoint.")  # fmt: skip


def _ordered_dict(loading: Loading, args: tuple[Any, ...]) -> dict[Any, Any]:
    pairs = args[-1] if args else ()
    if type(pairs) is dict:
        return dict(pairs)
    if isinstance(pairs, (list, tuple)) and all(type(p) in (list, tuple) and len(p) == 2 for p in pairs):
        if any(type(key) not in (str, int, float, bool, type(None)) for key, _ in pairs):
            raise loading.malformed("an ordered dictionary whose keys are neither text nor numbers")
        return dict(pairs)
    return {}


def _list(loading: Loading, args: tuple[Any, ...]) -> list[Any]:
    return list(args[0]) if args and type(args[0]) in (list, tuple) else []


def _set(loading: Loading, args: tuple[Any, ...]) -> Any:
    items = _list(loading, args)
    if items and all(type(item) is dict and "__class__" in item for item in items):
        # Instances that are kept as dictionaries cannot stand in a set.
        return items
    if any(type(item) not in (str, int, float, bool, type(None)) for item in items):
        raise loading.malformed("a set of things that are neither text nor numbers")
    return set(items)


def _frozenset(loading: Loading, args: tuple[Any, ...]) -> frozenset[Any]:
    items = _set(loading, args)
    return frozenset(items) if isinstance(items, set) else frozenset()


def _bytes(loading: Loading, args: tuple[Any, ...]) -> Any:
    data = args[0] if args else b""
    if not isinstance(data, (bytes, Span)):
        if type(data) is str and args[1:2] and args[1] in ("latin-1", "latin1"):
            return data.encode("latin-1")
        raise loading.malformed(f"bytes made from a {type(data).__name__}")
    return data


def _encode(loading: Loading, args: tuple[Any, ...]) -> bytes:
    """`_codecs.encode(text, "latin1")`: how protocol 2 keeps bytes."""
    if len(args) != 2 or type(args[0]) is not str or args[1] not in ("latin1", "latin-1"):
        raise loading.malformed("bytes in an encoding that is not latin-1")
    return args[0].encode("latin-1")


def _complex(loading: Loading, args: tuple[Any, ...]) -> complex:
    if not all(type(part) in (int, float) for part in args[:2]):
        raise loading.malformed("a complex number of things that are not numbers")
    return complex(*args[:2])


def _slice(loading: Loading, args: tuple[Any, ...]) -> slice:
    if len(args) != 3 or not all(part is None or type(part) is int for part in args):
        raise loading.malformed("a slice of things that are not numbers")
    return slice(*args)


def _attribute(loading: Loading, args: tuple[Any, ...]) -> Symbol:
    """`getattr(class, name)`, how a class within a class is named: of one that is kept inert, another inert one."""
    if len(args) != 2 or not isinstance(args[0], InertClass) or type(args[1]) is not str or not args[1].isidentifier():
        raise Stranger("builtins.getattr").refusal(str(loading.region.path))
    return InertClass(f"{args[0].name}.{args[1]}")


def _device(loading: Loading, args: tuple[Any, ...]) -> str:
    return ":".join(str(part) for part in args[:2] if type(part) in (str, int))


def _path(loading: Loading, args: tuple[Any, ...]) -> str:
    return "/".join(part for part in args if type(part) is str).replace("//", "/")


def _tensor_batch(loading: Loading, args: tuple[Any, ...]) -> dict[str, Any]:
    """skyrl's `_rebuild_tensor_batch(class, state)`."""
    cls, state = args
    return {"__class__": repr(cls), "state": state}


def _reconstructor(loading: Loading, args: tuple[Any, ...]) -> Any:
    """`copyreg._reconstructor(class, object, None)`, how protocols 0 and 1 make an instance."""
    cls = args[0]
    if not isinstance(cls, Symbol):
        raise loading.malformed("an instance of something that is not a class")
    return cls.call(loading, ())


class BytesIO:
    """`io.BytesIO`, filled by BUILD with (bytes, position, attributes). Becomes its bytes."""

    __slots__ = ("ref",)

    def __init__(self) -> None:
        self.ref: Any = b""

    def build(self, loading: Loading, state: Any) -> None:
        if type(state) is not tuple or not state or not isinstance(state[0], (bytes, Span)):
            raise loading.malformed("a BytesIO without bytes")
        self.ref = state[0]


#: Protocols 0 to 2 write these modules by the names they had in Python 2.
_PYTHON_2 = {"__builtin__": "builtins", "copy_reg": "copyreg"}


def _table() -> dict[str, Symbol]:
    calls: dict[str, Callable[[Loading, tuple[Any, ...]], Any]] = {
        "torch._utils._rebuild_tensor": torch_.rebuild_tensor,
        "torch._utils._rebuild_tensor_v2": torch_.rebuild_tensor_v2,
        "torch._utils._rebuild_tensor_v3": torch_.rebuild_tensor_v3,
        "torch._utils._rebuild_parameter": torch_.rebuild_parameter,
        "torch._utils._rebuild_parameter_with_state": torch_.rebuild_parameter,
        "torch._utils._rebuild_meta_tensor_no_storage": torch_.rebuild_meta,
        "torch._utils._rebuild_sparse_tensor": torch_.rebuild_sparse,
        "torch._utils._rebuild_sparse_csr_tensor": torch_.rebuild_sparse,
        "torch._utils._rebuild_qtensor": torch_.rebuild_quantised,
        "torch._utils._rebuild_nested_tensor": torch_.rebuild_nested,
        "torch._utils._rebuild_wrapper_subclass": torch_.rebuild_wrapper_subclass,
        "torch._utils._rebuild_device_tensor_from_numpy": torch_.rebuild_from_device,
        "torch._utils._rebuild_device_tensor_from_cpu_tensor": torch_.rebuild_from_device,
        "torch._utils._rebuild_xla_tensor": torch_.rebuild_from_device,
        "torch._tensor._rebuild_from_type_v2": torch_.rebuild_from_type,
        "torch.nested._internal.nested_tensor._rebuild_njt": torch_.rebuild_njt,
        "torch.storage._load_from_bytes": torch_.load_from_bytes,
        "torch.serialization._get_layout": lambda _, args: str(args[0]) if type(args[0]) is str else "unknown",
        "torch.Size": lambda loading, args: tuple(_list(loading, args)),
        "torch.device": _device,
        "collections.OrderedDict": _ordered_dict,
        "collections.defaultdict": lambda _, args: {},
        "collections.Counter": _ordered_dict,
        "collections.deque": _list,
        "tensordict._reductions._make_td": tensordict_.make_td,
        "tensordict._reductions._rebuild_tensordict_files_consolidated": tensordict_.rebuild_consolidated,
        "datetime.datetime": plain_values.a_datetime,
        "datetime.date": plain_values.a_date,
        "datetime.time": plain_values.a_time,
        "datetime.timedelta": plain_values.a_duration,
        "datetime.timezone": plain_values.a_timezone,
        "decimal.Decimal": plain_values.a_decimal,
        "fractions.Fraction": plain_values.a_fraction,
        "builtins.getattr": _attribute,
        "builtins.range": plain_values.a_range,
        "builtins.xrange": plain_values.a_range,
        "_codecs.encode": _encode,
        "_io.BytesIO": lambda _, args: BytesIO(),
        "copyreg._reconstructor": _reconstructor,
        "skyrl.backends.skyrl_train.training_batch._rebuild_tensor_batch": _tensor_batch,
        "skyrl_train.training_batch._rebuild_tensor_batch": _tensor_batch,
    }
    calls |= {
        "builtins.set": _set, "builtins.frozenset": _frozenset, "builtins.bytearray": _bytes,
        "builtins.bytes": _bytes, "builtins.complex": _complex, "builtins.slice": _slice,
        "builtins.list": _list, "builtins.dict": _ordered_dict,
        "builtins.tuple": lambda loading, args: tuple(_list(loading, args)),
    }  # fmt: skip
    for core in ("numpy.core", "numpy._core"):
        calls |= {
            f"{core}.multiarray._reconstruct": numpy_.reconstruct,
            f"{core}.multiarray.scalar": numpy_.scalar,
            f"{core}.numeric._frombuffer": numpy_.from_buffer,
        }
    calls["numpy.dtype"] = numpy_.make_dtype
    for path in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath", "Path"):
        calls[f"pathlib.{path}"] = calls[f"pathlib._local.{path}"] = _path
    table = {name: Symbol(name, call) for name, call in calls.items()}
    names = ["numpy.ndarray", *(f"torch.{name}" for name in (*_LAYOUTS, *_QSCHEMES))]
    names += [f"builtins.{name}" for name in ("int", "float", "str", "bool", "object", "Ellipsis")]
    table |= {name: Symbol(name) for name in names}
    for name in ("torch.Tensor", "torch._tensor.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer"):
        table[name] = TensorClass(name)
    for prefix, dtype in _STORAGES.items():
        size = _STORED_SIZE.get(dtype) or ITEMSIZE[dtype]
        for module in ("torch", "torch.cuda"):
            name = f"{module}.{prefix}Storage"
            table[name] = StorageClass(name, dtype, size)
    for name in ("torch.storage.UntypedStorage", "torch.UntypedStorage", "torch.storage._UntypedStorage"):
        table[name] = StorageClass(name, "uint8", 1)
    for dtype in ITEMSIZE:
        table[f"torch.{dtype}"] = DType(f"torch.{dtype}", dtype)
        table[f"ml_dtypes.{dtype}"] = DType(f"ml_dtypes.{dtype}", dtype)
    for alias, dtype in _TORCH_DTYPES.items():
        table[f"torch.{alias}"] = DType(f"torch.{alias}", dtype)
    for other in _OTHER_DTYPES:
        table[f"torch.{other}"] = DType(f"torch.{other}", None)
    return table | {name: InertClass(name) for name in _INERT}


TABLE = _table()


def find_global(loading: Loading, module: str, name: str) -> Symbol:
    """The symbol for `module.name`; a stranger, remembered, when it is not on the list."""
    key = f"{_PYTHON_2.get(module, module)}.{name}"
    symbol = TABLE.get(key)
    if symbol is not None:
        return symbol
    if key in loading.inert or key.startswith(_INERT_PREFIXES):
        return InertClass(key)
    return loading.strangers.setdefault(key, Stranger(key))
