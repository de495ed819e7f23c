"""Changes of a running module, each for as long as it is open."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from replay_core.referee.arithmetic import TrueTensor

#: module -> what holds the change open.
Change = Callable[[Any], Any]


def parameters(values: dict[str, torch.Tensor]) -> Change:
    @contextmanager
    def change(module: Any) -> Iterator[None]:
        before = {name: module._parameters[name] for name in values}
        module._parameters.update(values)
        try:
            yield
        finally:
            module._parameters.update(before)

    return change


def buffers(values: dict[str, torch.Tensor]) -> Change:
    @contextmanager
    def change(module: Any) -> Iterator[None]:
        before = {name: module._buffers[name] for name in values}
        module._buffers.update(values)
        try:
            yield
        finally:
            module._buffers.update(before)

    return change


def attribute(name: str, value: Any) -> Change:
    @contextmanager
    def change(module: Any) -> Iterator[None]:
        before = getattr(module, name)
        setattr(module, name, value)
        try:
            yield
        finally:
            setattr(module, name, before)

    return change


def nothing() -> Change:
    @contextmanager
    def change(_module: Any) -> Iterator[None]:
        yield

    return change


def forward(run: Callable[..., Any]) -> Change:
    """`run(own, *args, **kwargs)` in place of a module's forward, `own` being that."""

    @contextmanager
    def change(module: Any) -> Iterator[None]:
        own = module.forward
        module.forward = lambda *args, **kwargs: run(own, *args, **kwargs)
        try:
            yield
        finally:
            del module.forward

    return change


def output_times(child: str, factor: float) -> Change:
    """What a child puts out, times a factor, behind the recorded tensor that stands in its place."""

    def scaled(out: Any) -> Any:
        if isinstance(out, torch.Tensor):
            return out * factor
        return type(out)([out[0] * factor, *out[1:]]) if type(out) in (tuple, list) else out

    @contextmanager
    def change(module: Any) -> Iterator[None]:
        handle = module.get_submodule(child).register_forward_hook(lambda _module, _args, out: scaled(out))
        try:
            yield
        finally:
            handle.remove()

    return change


def partial_sums(ranks: int, way: str, bias: str) -> Change:
    """A product as so many ranks compute it, each its part of the columns, every partial sum in the storage dtype.

    bias: added to the first rank's sum, with the last rounding, or after it.
    """

    @contextmanager
    def change(module: Any) -> Iterator[None]:
        def split(given: torch.Tensor) -> torch.Tensor:
            dtype = given.dtype
            x, weight = (given.true if isinstance(given, TrueTensor) else given.double()), module.weight.double()
            parts = [torch.matmul(a, w.T) for a, w in zip(x.chunk(ranks, -1), weight.chunk(ranks, -1), strict=True)]
            if module.bias is not None and bias == "first":
                parts[0] = parts[0] + module.bias.double()
            parts = [_rounded(part, dtype) for part in parts]
            if way == "in float32":
                total = sum(parts[1:], parts[0])
            elif way == "in pairs":
                while len(parts) > 1:
                    parts = [_rounded(a + b, dtype) for a, b in zip(parts[::2], parts[1::2], strict=True)]
                total = parts[0]
            else:
                total = parts[0]
                for part in parts[1:]:
                    total = _rounded(total + part, dtype)
            if module.bias is not None and bias != "first":
                total = (_rounded(total, dtype) if bias == "last" else total) + module.bias.double()
            return TrueTensor(total, dtype)

        def plainly(given: torch.Tensor) -> torch.Tensor:
            with _disable_current_modes():
                return split(given)

        module.forward = plainly
        try:
            yield
        finally:
            del module.forward

    return change


def _rounded(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return value.to(dtype).double()


def plainly(
    change: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """A tensor changed outside the arithmetic, rounded as one of its dtype, or of `dtype`."""
    with _disable_current_modes():
        value = change(x.true if isinstance(x, TrueTensor) else x.double())
        return TrueTensor(_rounded(value, dtype or x.dtype), dtype or x.dtype)
