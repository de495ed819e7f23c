"""What ranks hold of a tensor, without a dump: for rules that are asked of that alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from replay_core.compare.pairing.ranks import HeldByRanks
from replay_core.records import Inline, TensorRef

Stretches = Sequence[Sequence[tuple[int, int]]]


def as_ref(values: Tensor, name: str = "x") -> TensorRef:
    content = values.contiguous().view(torch.uint8).numpy().tobytes() if values.numel() else b""
    return TensorRef(name, str(values.dtype).removeprefix("torch."), tuple(values.shape), Inline(content))


def alike(*parts: Tensor, name: str = "x") -> HeldByRanks:
    """A whole tensor on every rank."""
    return HeldByRanks(tuple(range(len(parts))), tuple(as_ref(part, name) for part in parts))


def cut(parts: Sequence[Tensor], axis: int, name: str = "x", stretches: Stretches | None = None) -> HeldByRanks:
    """A slice on every rank: one after the other, or where `stretches` say that each lies."""
    if stretches is None:
        lengths = [part.shape[axis] for part in parts]
        stretches = [((sum(lengths[:number]), length),) for number, length in enumerate(lengths)]
    places = tuple(tuple(own) for own in stretches)
    return HeldByRanks(tuple(range(len(parts))), tuple(as_ref(part, name) for part in parts), axis, places)
