"""Instances that files hold beside plain data, as plain data: tensordicts, what they wrap, jagged tensors, namespaces.

A container leaves an instance of a known class as `{"__class__": name, "state": …}`.
"""

from __future__ import annotations

from array import array
from itertools import pairwise
from typing import Any

from replay_core.file_spans import regular
from replay_core.records import FileBytes, Inline, TensorRef, Unreadable

#: Rows of one jagged tensor: more than any batch has.
_MAX_ROWS = 1 << 24
_MAX_DEPTH = 8
_OPENED = frozenset(
    {"TensorDict", "LazyStackedTensorDict", "NonTensorData", "NonTensorStack", "NestedTensor", "Namespace",
     "SimpleNamespace"}
)  # fmt: skip


def is_instance(value: Any) -> bool:
    """Whether the value is one of the instances that `plain` opens."""
    name = value.get("__class__") if type(value) is dict else None
    return isinstance(name, str) and name.rpartition(".")[2] in _OPENED


def plain(value: Any, depth: int = 0) -> Any:
    """The value without its wrapper: {name: …} of a tensordict, a list of a stack, a `TensorRef` of a jagged tensor.

    One level: what is inside a tensordict is still as the container left it. Anything else comes back as it is.
    """
    if not is_instance(value) or depth > _MAX_DEPTH:
        return value
    state = value.get("state")
    if not isinstance(state, dict):
        return value
    if value["__class__"].endswith("NestedTensor"):
        return jagged(state)
    stacked = state.get("tensordicts", state.get("_tensordicts"))
    if isinstance(stacked, list):
        return [plain(inner, depth + 1) for inner in stacked]
    if value["__class__"].endswith("NonTensorData"):
        inner = state.get("non_tensordict", state.get("_non_tensordict", state))
        return inner.get("data") if isinstance(inner, dict) else inner
    inner = state.get("_tensordict", state)
    return inner if isinstance(inner, dict) else value


def jagged(state: dict[str, Any]) -> TensorRef:
    """A jagged NestedTensor: rows end to end along its first axis. Its offsets, a number per row, are read.

    A tensor that is ragged along another axis than the first of a row (positions [3, T] of a vision model) has
    that axis first here: its elements are where they are, the axes change places.
    """
    values, offsets = state.get("values"), state.get("offsets")
    if not isinstance(values, TensorRef) or not isinstance(offsets, TensorRef):
        return TensorRef("", "none", (), Unreadable("a nested tensor without values or offsets"))
    bounds = whole_numbers(offsets)
    lengths = None if bounds is None else tuple(after - before for before, after in pairwise(bounds))
    axis = state.get("_ragged_idx", 1)
    moved = _axis_first(values, axis - 1) if type(axis) is int and state.get("lengths") is None else None
    if moved is None or lengths is None or bounds is None or not bounds or min(lengths, default=0) < 0:
        return values.with_(source=Unreadable("a nested tensor whose rows do not lie end to end"))
    if bounds[0] != 0 or bounds[-1] != moved.shape[0]:
        return values.with_(source=Unreadable("a nested tensor whose offsets do not fit its values"))
    return moved.with_(rows=lengths)


def _axis_first(ref: TensorRef, axis: int) -> TensorRef | None:
    """The tensor with that axis before the others; None where it is not kept so that axes can change places."""
    if not 0 <= axis < len(ref.shape):
        return None
    if axis == 0 or isinstance(ref.source, Unreadable):
        return ref
    if not isinstance(ref.source, FileBytes):
        return None
    source, strides = ref.source, ref.source.strides
    if strides is None:
        steps: list[int] = []
        step = 1
        for length in reversed(ref.shape):
            steps.insert(0, step)
            step *= length
        strides = tuple(steps)
    order = [axis, *(other for other in range(len(ref.shape)) if other != axis)]
    moved = FileBytes(source.path, source.offset, source.nbytes, tuple(strides[o] for o in order), source.big_endian)
    return ref.with_(shape=tuple(ref.shape[o] for o in order), source=moved)


def whole_numbers(ref: TensorRef) -> list[int] | None:
    """The numbers of a short vector of int32 or int64; None when it is none."""
    code = {"int64": "q", "int32": "i"}.get(ref.dtype)
    source = ref.source
    if code is None or len(ref.shape) != 1 or ref.numel > _MAX_ROWS:
        return None
    if isinstance(source, Inline):
        data = source.value if isinstance(source.value, bytes) else None
        if data is None:
            return [int(number) for number in source.value]
    elif isinstance(source, FileBytes) and source.strides is None and not source.big_endian:
        with regular(source.path) as file:
            file.seek(source.offset)
            data = file.read(ref.nbytes)
    else:
        return None
    return list(array(code, data)) if len(data) == ref.nbytes else None
