"""One regular expression for the thirty opcodes that `torch.save` spends on each tensor.

A state dict is the same thirty opcodes a thousand times over; taking them in one bite makes listing
it some three times faster. What the opcodes put in the memo is put there, in order, so the outcome is
the loop's; any deviation from the pattern and the loop does it.
"""

from __future__ import annotations

import pickle
import re
from functools import lru_cache
from typing import Any

from replay_core.dumps.containers.loading import Loading
from replay_core.dumps.containers.symbols import StorageClass
from replay_core.dumps.containers.torch_rebuild import Geometry, geometry, view
from replay_core.records import FileBytes, TensorRef

_GET = rb"(h.|j.{4})"
_PUT = rb"(q.|r.{4})"
_NUMBER = rb"(?:K.|M..|J.{4})"
#: An empty tuple is a singleton that picklers do not memoise.
_NUMBERS = rb"(?:(%b\x85|%b{2}\x86|%b{3}\x87|\(%b{4,64}t)%b|\))" % (_NUMBER, _NUMBER, _NUMBER, _NUMBER, _PUT)

#: After the GET of `_rebuild_tensor_v2`: ((storage, class, key, location, numel), offset, size, strides, …).
_TENSOR = re.compile(
    rb"\(\(" + _GET + _GET + rb"X(.)\0\0\0([0-9]+)" + _PUT + _GET + rb"(" + _NUMBER + rb")t" + _PUT + rb"Q"
    rb"(" + _NUMBER + rb")" + _NUMBERS + _NUMBERS + rb"([\x88\x89])" + _GET + rb"\)R" + _PUT + rb"t" + _PUT + rb"R"
    + _PUT,
    re.DOTALL,
)  # fmt: skip


@lru_cache(maxsize=4096)
def _decoded(opcodes: bytes) -> Any:
    """A number. The pattern let nothing but number opcodes through, the one thing pickle itself may decode."""
    return pickle.loads(opcodes + b".")


@lru_cache(maxsize=4096)
def _size_and_strides(size: bytes | None, strides: bytes | None) -> tuple[Any, Any, Geometry | None]:
    """The two tuples, and what they amount to; no geometry if they are no tensor's."""
    lengths = pickle.loads(size + b".") if size else ()
    steps = pickle.loads(strides + b".") if strides else ()
    try:
        return lengths, steps, geometry(lengths, steps)
    except ValueError:
        return lengths, steps, None


@lru_cache(maxsize=8192)
def _index(opcode: bytes) -> int:
    return opcode[1] if len(opcode) == 2 else int.from_bytes(opcode[1:], "little")


def match_tensor(loading: Loading, memo: dict[int, Any], buf: bytes, pos: int) -> tuple[TensorRef, int] | None:
    """The tensor whose arguments start at `pos`, and where its opcodes end; None if they are not the usual ones."""
    if loading.zip_storage is None:
        return None
    match = _TENSOR.match(buf, pos)
    if match is None:
        return None
    (
        word, cls, key_length, key, key_put, location, numel, id_put, offset, size, size_put, strides, strides_put,
        grad, hooks, hooks_put, args_put, tensor_put,
    ) = match.groups()  # fmt: skip
    storage_class = memo.get(_index(cls))
    hooks_class = memo.get(_index(hooks))
    if (
        memo.get(_index(word)) != "storage"
        or type(storage_class) is not StorageClass
        or getattr(hooks_class, "name", None) != "collections.OrderedDict"
        or key_length[0] != len(key)
    ):
        return None
    where, no_hooks = memo.get(_index(location)), {}  # type: ignore[var-annotated]
    name, count, first = key.decode(), _decoded(numel), _decoded(offset)
    lengths, steps, shape = _size_and_strides(size, strides)
    memo[_index(key_put)] = name
    storage = loading.zip_storage(storage_class, name, count)
    memo[_index(id_put)] = ("storage", storage_class, name, where, count)
    if size:
        memo[_index(size_put)] = lengths
    if strides:
        memo[_index(strides_put)] = steps
    memo[_index(hooks_put)] = no_hooks
    memo[_index(args_put)] = (storage, first, lengths, steps, grad == b"\x88", no_hooks)
    (region, start, length), dtype, itemsize, big_endian, _ = storage
    if shape is None or region.memory is not None or not itemsize or not 0 <= first <= length // itemsize - shape.extent:
        tensor = view(loading, storage, first, lengths, steps)
    else:
        source = FileBytes(
            region.path, start + first * itemsize, shape.extent * itemsize, shape.strides, big_endian and itemsize > 1
        )
        tensor = TensorRef("", dtype, shape.shape, source)
    memo[_index(tensor_put)] = tensor
    return tensor, match.end()
