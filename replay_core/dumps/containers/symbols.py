"""What a global in a pickle turns into: a `Symbol` of ours, never the thing the file names.

A symbol has a name and, when the file may call it, a function of ours to call instead. A global that
nobody knows becomes a `Stranger`: holding one is harmless, calling it or keeping it is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from replay_core.dtypes import ITEMSIZE
from replay_core.errors import UnsafeFileError

if TYPE_CHECKING:
    from replay_core.dumps.containers.loading import Loading


class Symbol:
    """Something a pickle may name. `call(loading, args)` is what REDUCE does with it."""

    __slots__ = ("call", "name")

    def __init__(self, name: str, call: Callable[[Loading, tuple[Any, ...]], Any] | None = None) -> None:
        self.name = name
        self.call = call or self._not_callable

    def _not_callable(self, loading: Loading, args: tuple[Any, ...]) -> Any:
        raise loading.malformed(f"the pickle calls `{self.name}`, which is not a function")

    def __repr__(self) -> str:
        return self.name


class DType(Symbol):
    """A torch or ml_dtypes dtype; `dtype` is None where numpy has none like it."""

    __slots__ = ("dtype",)

    def __init__(self, name: str, dtype: str | None) -> None:
        super().__init__(name)
        self.dtype = dtype


class StorageClass(Symbol):
    """`torch.FloatStorage` and its kin; `dtype` is the name, `itemsize` 0 where numpy has none like it."""

    __slots__ = ("dtype", "is_plain", "itemsize")

    def __init__(self, name: str, dtype: str, itemsize: int) -> None:
        super().__init__(name)
        self.dtype = dtype
        self.itemsize = itemsize
        #: numpy has it, so that a tensor of it can be read.
        self.is_plain = dtype in ITEMSIZE


class TensorClass(Symbol):
    """A class that is a plain tensor to us: `torch.Tensor`, `Parameter`, `Buffer`."""

    __slots__ = ()


class InertClass(Symbol):
    """A framework's record class: an instance is kept as `{"__class__": name, "args": …, "state": …}`."""

    __slots__ = ()

    def __init__(self, name: str) -> None:
        super().__init__(name, self._instance)

    def _instance(self, loading: Loading, args: tuple[Any, ...]) -> dict[str, Any]:
        return {"__class__": self.name, "args": args} if args else {"__class__": self.name}


class Stranger(Symbol):
    """A global that is not on the allow-list. `excused` once it only names an unreadable tensor's class."""

    __slots__ = ("excused",)

    def __init__(self, name: str) -> None:
        super().__init__(name, self._refuse)
        self.excused = False

    def _refuse(self, loading: Loading, args: tuple[Any, ...]) -> Any:
        raise self.refusal(str(loading.region.path))

    def refusal(self, file: str) -> UnsafeFileError:
        return UnsafeFileError(
            f"the file asks to use `{self.name}`; nothing was run",
            file=file,
            expected="tensors, numbers, text and containers of these",
            found=f"the global `{self.name}`",
            hint="if you trust the file, load it where it was written and save plain tensors: torch.save({...})",
        )
