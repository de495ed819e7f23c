"""Code of a factory's own beside a model that is asked in a finer dtype than it was built in: tensors that a hook holds
on to (an adapter's, a steering vector) stay in theirs, and torch multiplies no two dtypes.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from replay_core.replay.references import FACTORY


class _Widening(TorchFunctionMode):  # type: ignore[misc]
    """Where torch refuses floats of two dtypes, the narrower are widened, by which they lose nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            floats = [one.dtype for one in (*args, *kwargs.values()) if _is_float(one)]
            is_of_dtypes = "dtype" in str(error) or "scalar type" in str(error)
            if len(set(floats)) < 2 or not is_of_dtypes:
                raise
            widest = max(floats, key=lambda dtype: dtype.itemsize)
            wide = [one.to(widest) if _is_float(one) else one for one in args]
            return func(*wide, **{name: one.to(widest) if _is_float(one) else one for name, one in kwargs.items()})


def widened(reference: str, *, is_cast: bool) -> contextlib.AbstractContextManager[Any]:
    """For the passes of a model of this reference; `is_cast`: in another dtype than it was built in. Its own is left
    alone: what fails there fails the trainer as well.
    """
    return _Widening() if is_cast and reference.startswith(FACTORY) else contextlib.nullcontext()


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()
