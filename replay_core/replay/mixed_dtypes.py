"""Code of a factory's own beside a model that is asked in a finer dtype than it was built in: tensors that a hook holds
on to (an adapter's, a steering vector) stay in theirs, and torch multiplies no two dtypes. A hook that casts to the
dtype of the model as it was built (behind a norm in float32) would round the finer pass as well.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from replay_core.replay.plan import FACTORY


class _Widening(TorchFunctionMode):  # type: ignore[misc]
    """Where torch refuses floats of two dtypes, the narrower are widened, by which they lose nothing. Casts to one of
    `built` are casts to `asked`.
    """

    #: Another model is being built meanwhile (`as_built`).
    is_idle = False

    def __init__(self, built: frozenset[torch.dtype] = frozenset(), asked: torch.dtype | None = None) -> None:
        super().__init__()
        self._built, self._asked = built, asked

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.is_idle:
            return func(*args, **kwargs)
        if self._built and (func in _CASTS or _NAMED.get(func) in self._built) and args and _is_float(args[0]):
            if func in _NAMED:
                return args[0].to(self._asked)
            args = (args[0], *map(self._instead_of, args[1:]))
            kwargs = {name: self._instead_of(one) for name, one in kwargs.items()}
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            floats = [one.dtype for one in (*args, *kwargs.values()) if _is_float(one)]
            is_of_dtypes = "dtype" in str(error) or "scalar type" in str(error)
            if len(set(floats)) < 2 or not is_of_dtypes:
                raise
            widest = max(floats, key=lambda dtype: dtype.itemsize)
            if "out" in kwargs or (_writes(func) and _is_float(args[0]) and args[0].dtype is not widest):
                raise  # what is written to a wider copy is lost
            wide = [one.to(widest) if _is_float(one) else one for one in args]
            return func(*wide, **{name: one.to(widest) if _is_float(one) else one for name, one in kwargs.items()})

    def _instead_of(self, value: Any) -> Any:
        """What a cast is asked for in place of a dtype of the model's, or of a tensor that is in one."""
        if isinstance(value, torch.dtype) and value in self._built:
            return self._asked
        is_built = _is_float(value) and value.dtype in self._built
        return value.to(self._asked) if is_built else value


_CASTS = (torch.Tensor.to, torch.Tensor.type, torch.Tensor.type_as)
_NAMED: dict[Any, torch.dtype] = {torch.Tensor.bfloat16: torch.bfloat16, torch.Tensor.half: torch.float16}


def widened(
    reference: str, *, is_cast: bool, built: frozenset[torch.dtype] = frozenset(), asked: torch.dtype | None = None
) -> contextlib.AbstractContextManager[Any]:
    """For the passes of a model of this reference; `is_cast`: in another dtype than it was built in. Its own is left
    alone: what fails there fails the trainer as well.

    built: half precisions that its weights are in, which `asked` stands for in a finer pass.
    """
    return _Widening(built, asked) if is_cast and reference.startswith(FACTORY) else contextlib.nullcontext()


@contextlib.contextmanager
def as_built() -> Iterator[None]:
    """Where another model is loaded while one is asked in a finer dtype: it comes in the dtypes of its own."""
    before, _Widening.is_idle = _Widening.is_idle, True
    try:
        yield
    finally:
        _Widening.is_idle = before


def _writes(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()
