"""From what the machine left to the finished tree: no placeholder, no cycle, no avalanche.

A pickle's containers can hold each other, so a few bytes can describe a structure that takes forever to
walk. Whoever gets the tree may recurse through it without a thought.
"""

from __future__ import annotations

from typing import Any

from replay_core.budget import spend_values
from replay_core.dumps.containers.allowlist import BytesIO
from replay_core.dumps.containers.loading import (
    DType,
    InertClass,
    Loading,
    Span,
    Storage,
    StorageClass,
    Stranger,
    Symbol,
    TensorClass,
)
from replay_core.dumps.containers.numpy_rebuild import NumpyDType, PendingArray
from replay_core.dumps.containers.torch_rebuild import bytes_tensor, view

MAX_DEPTH = 100
#: Leaves of the tree, every shared part counted as often as it is reached, that are paid for at a time.
_TRANCHE = 1 << 16

_PLACEHOLDERS = frozenset({Span, Storage, PendingArray, BytesIO, NumpyDType, Symbol, DType, StorageClass, TensorClass,
                           InertClass, Stranger})  # fmt: skip
_CONTAINERS = frozenset({list, dict, tuple})
_WORK = _PLACEHOLDERS | _CONTAINERS


def settle(loading: Loading, value: Any) -> Any:
    """The tree with its placeholders replaced.

    Raises:
        DumpError: it contains itself, or unfolds into more than a machine can walk.
    """
    return _Settling(loading).settle(value, 0)


class _Settling:
    def __init__(self, loading: Loading) -> None:
        self.loading = loading
        #: id -> (settled, leaves, the original kept alive so that its id stays its own); None while inside it.
        self.seen: dict[int, tuple[Any, int, Any] | None] = {}
        self.leaves = self.paid = 0

    def settle(self, value: Any, depth: int) -> Any:
        cls = type(value)
        if cls in _CONTAINERS:
            return self._container(value, depth)
        return self._leaf(value) if cls in _PLACEHOLDERS else value

    def _container(self, value: Any, depth: int) -> Any:
        if not value:
            return value
        known = self.seen.get(id(value), ())
        if known is None:
            raise self.loading.malformed("the file's structure contains itself")
        if known:
            self._count(known[1])
            return known[0]
        if depth >= MAX_DEPTH:
            raise self.loading.malformed(f"the file's structure is nested more than {MAX_DEPTH} deep")
        before, original = self.leaves, value
        self._count(len(value))
        items = value.values() if type(value) is dict else value
        if not _WORK.isdisjoint(map(type, items)):
            self.seen[id(value)] = None
            if type(value) is dict:
                for key in value:
                    value[key] = self.settle(value[key], depth + 1)
            elif type(value) is list:
                value[:] = [self.settle(item, depth + 1) for item in value]
            else:
                value = tuple([self.settle(item, depth + 1) for item in value])
        self.seen[id(original)] = (value, self.leaves - before, original)
        return value

    def _count(self, leaves: int) -> None:
        self.leaves += leaves
        if self.leaves - self.paid > _TRANCHE:
            spend_values(self.leaves - self.paid, "its structure, which unfolds")
            self.paid = self.leaves

    def _leaf(self, value: Any) -> Any:
        if isinstance(value, Span):
            return bytes_tensor(value)
        if isinstance(value, Storage):
            count = value.span.nbytes // max(value.itemsize, 1)
            return view(self.loading, value, 0, (count,), None)
        if isinstance(value, (PendingArray, BytesIO)):
            return self.settle(value.ref, MAX_DEPTH - 3)
        if isinstance(value, NumpyDType):
            return value.dtype or value.code
        return value.name
