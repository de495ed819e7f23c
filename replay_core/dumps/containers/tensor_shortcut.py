"""A regular expression for the thirty opcodes that `torch.save` spends on each entry of a state dict.

A state dict is the same thirty opcodes a thousand times over; taking them by columns makes listing it
some five times faster. What the opcodes put in the memo is put there, so the outcome is the loop's. Any
deviation from the pattern (an index put twice, an index read that the run itself puts) and the loop does it.
"""

from __future__ import annotations

import pickle
import re
import struct
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain, repeat
from typing import Any

from replay_core.dumps.containers.loading import Loading
from replay_core.dumps.containers.symbols import StorageClass
from replay_core.dumps.containers.torch_rebuild import Geometry, Storage, geometry, view
from replay_core.records import FileBytes, TensorRef

_GET = rb"(h.|j.{4})"
_PUT = rb"(q.|r.{4})"
_NUMBER = rb"(?:K.|M..|J.{4})"
#: An empty tuple is a singleton that picklers do not memoise.
_NUMBERS = rb"(?:(%b\x85|%b{2}\x86|%b{3}\x87|\(%b{4,64}t)%b|\))" % (_NUMBER, _NUMBER, _NUMBER, _NUMBER, _PUT)

#: Key, `_rebuild_tensor_v2`, then ((storage, class, key, location, numel), offset, size, strides, …).
_ENTRY = re.compile(
    rb"X(.)(.)\0\0([A-Za-z0-9_.:/ -]{1,400})" + _PUT + _GET + rb"\(\(" + _GET + _GET
    + rb"X(.)\0\0\0([0-9]+)" + _PUT + _GET + rb"(" + _NUMBER + rb")t" + _PUT + rb"Q"
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


#: Fewer entries are not worth the columns.
_MIN_ENTRIES = 4
_LONG_PUT = struct.Struct("<xI")
_MAX_ENTRIES = 4096
_UNUSUAL: tuple[list[Any], int] = ([], -1)


def _index(opcode: bytes) -> int:
    return opcode[1] if len(opcode) == 2 else int.from_bytes(opcode[1:], "little")


def _indices(opcodes: Sequence[bytes]) -> list[int]:
    """Short forms come first in a file's memo; what is in another order goes one by one."""
    short = (5 * len(opcodes) - len(b"".join(opcodes))) // 3
    long = b"".join(opcodes[short:])
    if len(long) != 5 * (len(opcodes) - short):
        return list(map(_index, opcodes))
    return [opcode[1] for opcode in opcodes[:short]] + [index for (index,) in _LONG_PUT.iter_unpack(long)]


def match_entries(loading: Loading, memo: dict[int, Any], buf: bytes, pos: int, rebuild: Any) -> tuple[list[Any], int]:
    """Key, tensor, key, tensor … from `pos` on, and where they end.

    Empty when there are few; when they are unusual, the end is -1 and asking again is a waste.
    """
    find_storage = loading.zip_storage
    if find_storage is None or loading.region.memory is not None:
        return _UNUSUAL
    rows: list[tuple[bytes, ...]] = []
    start, match = pos, _ENTRY.match(buf, pos)
    while match is not None and len(rows) < _MAX_ENTRIES:
        rows.append(match.groups())
        pos = match.end()
        match = _ENTRY.match(buf, pos)
    if len(rows) < _MIN_ENTRIES:
        return [], start
    (
        low, high, names, name_puts, functions, words, classes, key_lengths, keys, key_puts, locations, numels,
        id_puts, offsets, sizes, size_puts, strides, stride_puts, grads, hooks, hook_puts, args_puts, tensor_puts,
    ) = zip(*rows, strict=True)  # fmt: skip
    if any(a[0] + 256 * b[0] != len(name) for a, b, name in zip(low, high, names, strict=True)):
        return _UNUSUAL
    if any(a[0] != len(key) for a, key in zip(key_lengths, keys, strict=True)):
        return _UNUSUAL

    gets = {get: _index(get) for get in {*functions, *words, *classes, *locations, *hooks}}
    put_columns = [_indices(column) for column in (name_puts, key_puts, id_puts, hook_puts, args_puts, tensor_puts)]
    shape_puts = _indices([put for puts in (size_puts, stride_puts) for put in puts if put])
    put = {*shape_puts}.union(*put_columns)
    if len(put) != len(shape_puts) + len(put_columns) * len(rows) or not put.isdisjoint(gets.values()):
        return _UNUSUAL
    named = {get: memo.get(index) for get, index in gets.items()}
    if (
        any(named[get] is not rebuild for get in set(functions))
        or any(named[get] != "storage" for get in set(words))
        or any(type(named[get]) is not StorageClass for get in set(classes))
        or any(getattr(named[get], "name", None) != "collections.OrderedDict" for get in set(hooks))
    ):
        return _UNUSUAL

    texts, key_texts = [name.decode() for name in names], [key.decode() for key in keys]
    counts, firsts = list(map(_decoded, numels)), list(map(_decoded, offsets))
    storage_classes: list[Any] = [named[get] for get in classes]
    storages = list(map(find_storage, storage_classes, key_texts, counts))
    shapes = list(map(_size_and_strides, sizes, strides))
    tensors = [
        _tensor(loading, storage, first, shape) for storage, first, shape in zip(storages, firsts, shapes, strict=True)
    ]
    no_hooks: list[dict[str, Any]] = [{} for _ in rows]
    name_at, key_at, id_at, hooks_at, args_at, tensor_at = put_columns
    memo.update(zip(name_at, texts, strict=True))
    memo.update(zip(key_at, key_texts, strict=True))
    where = [named[get] for get in locations]
    memo.update(zip(id_at, zip(repeat("storage"), storage_classes, key_texts, where, counts), strict=True))
    memo.update(zip(hooks_at, no_hooks, strict=True))
    lengths, steps = [shape[0] for shape in shapes], [shape[1] for shape in shapes]
    needs_grad = [grad == b"\x88" for grad in grads]
    memo.update(zip(args_at, zip(storages, firsts, lengths, steps, needs_grad, no_hooks, strict=True), strict=True))
    memo.update(zip(tensor_at, tensors, strict=True))
    memo.update((_index(at), value) for at, value in zip(size_puts, lengths, strict=True) if at)
    memo.update((_index(at), value) for at, value in zip(stride_puts, steps, strict=True) if at)
    return list(chain.from_iterable(zip(texts, tensors, strict=True))), pos


def _tensor(loading: Loading, storage: Storage, first: int, shape: tuple[Any, Any, Geometry | None]) -> TensorRef:
    """`torch_rebuild.view`, its checks folded into one line; what fails them, `view` words."""
    (region, start, nbytes), dtype, itemsize, big_endian, _ = storage
    lengths, steps, found = shape
    if found is None or not itemsize or not 0 <= first <= nbytes // itemsize - found.extent:
        return view(loading, storage, first, lengths, steps)
    where = FileBytes(
        region.path, start + first * itemsize, found.extent * itemsize, found.strides, big_endian and itemsize > 1
    )
    return TensorRef("", dtype, found.shape, where)
