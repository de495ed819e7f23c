"""DataProto, the batch class of verl and ROLL, as their pickles hold it: its tensors, its columns, its facts.

verl's state is (bytes of torch.save(TensorDict) | (batch size, device, {name: (dtype, shape, bytes)}),
non_tensor_batch, meta_info); ROLL's is (a BytesIO of torch.save(TensorDict), non_tensor_batch, remote, meta_info).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from replay_core.dtypes import ITEMSIZE
from replay_core.dumps.columns import columns
from replay_core.dumps.containers import read_nested
from replay_core.dumps.fields import flatten, join
from replay_core.dumps.instances import plain
from replay_core.dumps.peeking import class_of
from replay_core.errors import DumpError
from replay_core.records import FileBytes, Inline, TensorRef, Unreadable

VERL = "verl.protocol.DataProto"
ROLL = "roll.distributed.scheduler.protocol.DataProto"


def facts_of(tree: Any) -> dict[str, Any]:
    """meta_info of a DataProto, without its tensors being looked at."""
    state = tree.get("state") if isinstance(tree, dict) else None
    last = state[-1] if isinstance(state, (tuple, list)) and state else None
    return last if isinstance(last, dict) else {}


def fields_of(tree: Any, path: Path) -> list[TensorRef]:
    """Tensors, then the columns that are no tensors, then meta_info.

    Raises:
        DumpError: it is not a DataProto's state, or the batch inside it is damaged.
    """
    state = tree.get("state") if isinstance(tree, dict) else None
    if not isinstance(state, (tuple, list)) or len(state) < 3:
        raise DumpError("not a DataProto", file=str(path), expected="(batch, non_tensor_batch, …, meta_info)")
    batch, beside, facts = state[0], state[1], state[-1]
    fields = tensor_fields(_batch(batch, path))
    if isinstance(beside, dict):
        for name, value in beside.items():
            if isinstance(value, TensorRef):
                said = "sample" if len(value.shape) == 1 else None
                fields.append(value.with_(name=str(name), alignment=said))
            else:
                fields += columns({str(name): _column(value)})
    if isinstance(facts, dict):
        fields += flatten({"meta_info": facts}) if facts else []
    return fields


def _column(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return list(value)
    return [value]


def _batch(batch: Any, path: Path) -> dict[str, Any]:
    if batch is None:
        return {}
    if isinstance(batch, TensorRef):
        inside = read_nested(batch).tree
        return {} if inside is None else tensor_dict(inside, path)
    if isinstance(batch, (tuple, list)) and len(batch) == 3 and isinstance(batch[2], dict):
        return {str(name): _numpy_tensor(entry) for name, entry in batch[2].items()}
    if class_of(batch):
        return tensor_dict(batch, path)
    raise DumpError("a DataProto whose batch is in no form that is known", file=str(path), found=type(batch).__name__)


def tensor_dict(tree: Any, path: Path) -> dict[str, Any]:
    """{name: tensor} of a TensorDict's tree; a nested one keeps its names under its own.

    Raises:
        DumpError: it is no TensorDict.
    """
    state = plain(tree)
    if isinstance(state, list) and all(isinstance(row, dict) for row in state):
        names = dict.fromkeys(name for row in state for name in row)
        state = {name: [row.get(name) for row in state] for name in names}  # a lazy stack: a row per sample
    if not isinstance(state, dict):
        raise DumpError("not a TensorDict", file=str(path), found=type(state).__name__)
    return {str(name): value for name, value in state.items()}


def tensor_fields(batch: dict[str, Any], prefix: str = "", depth: int = 0) -> list[TensorRef]:
    """The fields of {name: tensor | nested | list | other}."""
    fields: list[TensorRef] = []
    for field, wrapped in batch.items():
        value = plain(wrapped)
        if isinstance(value, TensorRef):
            fields.append(value.with_(name=f"{prefix}{field}"))
        elif isinstance(value, list):
            fields += columns({f"{prefix}{field}": value})
        elif value is not wrapped and isinstance(value, dict) and depth < 8:
            fields += tensor_fields({str(name): inner for name, inner in value.items()}, f"{prefix}{field}.", depth + 1)
        else:
            fields += flatten({f"{prefix}{field}": value})
    return fields


def _numpy_tensor(entry: Any) -> Any:
    """(dtype, shape, bytes) of VERL_DATAPROTO_SERIALIZATION_METHOD=numpy; (layout, [such]) of a nested tensor."""
    if isinstance(entry, (tuple, list)) and len(entry) == 2 and isinstance(entry[1], list):
        return join("", [_numpy_tensor(part) for part in entry[1]]) or list(entry[1])
    if not isinstance(entry, (tuple, list)) or len(entry) != 3:
        return entry
    dtype, shape, data = entry
    return cast(data, dtype, shape)


def cast(data: Any, dtype: Any, shape: Any) -> TensorRef:
    """Raw bytes as the tensor they are: a little-endian one of `dtype` and `shape`, in C order."""
    text = str(dtype).removeprefix("torch.")
    size = tuple(shape) if isinstance(shape, (tuple, list)) else (-1,)
    if text not in ITEMSIZE or not all(type(length) is int and 0 <= length < 1 << 40 for length in size):
        return TensorRef("", text, (), Unreadable(f"bytes said to be {text} of shape {size}"))
    ref = TensorRef("", text, size, Inline(b""))
    if isinstance(data, TensorRef) and data.dtype == "uint8" and isinstance(data.source, (FileBytes, Inline)):
        held = data.nbytes
        source: FileBytes | Inline | None = data.source
        if isinstance(source, FileBytes) and source.strides is not None:
            source = None
    elif isinstance(data, (bytes, bytearray)):
        held, source = len(data), Inline(bytes(data))
    else:
        held, source = -1, None
    if source is None or held != ref.nbytes:
        return ref.with_(source=Unreadable(f"{ref.nbytes} bytes declared, {max(held, 0)} found"))
    return ref.with_(source=source)
