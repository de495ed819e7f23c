"""What one cell computed, and whether looking at it changed it."""

from __future__ import annotations

from typing import Any

import torch
from msgspec import Struct

from replay_core.replay.capture import Tensors
from replay_core.replay.frontier import Hashed


class Computed(Struct):
    """What one cell computed. `final_hidden` is None where it ran the trainer's own code; a critic's `logprobs` are
    its values.

    observer: how the hooked pass stands to the plain one ({"bitwise", "worst_token"}); None without hooks.
    capture: what was looked at inside (level, modules, forecast_mib, mib); `hashes` where no tensors were kept.
    """

    tensors: Tensors
    final_hidden: str | None
    logprobs: torch.Tensor
    entropy: torch.Tensor | None
    attention: str
    steady_s: float
    compile_s: float | None
    peak_mib: float
    forecast_mib: float
    compile: dict[str, Any] | None = None
    observer: dict[str, Any] | None = None
    capture: dict[str, Any] | None = None
    hashes: list[Hashed] | None = None


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are bitwise equal; NaN equals NaN: looking did not put it there."""
    return bool(torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)))


def observer_effect(hooked: torch.Tensor, plain: torch.Tensor) -> dict[str, Any]:
    """Whether looking changed the answer: bitwise, and the worst token's relative L2."""
    if hooked.shape == plain.shape and hooked.dtype == plain.dtype and same_bits(hooked, plain):
        return {"bitwise": True, "worst_token": 0.0}
    a, b = plain.double(), hooked.double()
    distance, norm = (b - a).norm(dim=-1), a.norm(dim=-1)
    relative = torch.where(distance == 0, torch.zeros_like(distance), distance / norm)
    return {"bitwise": False, "worst_token": float(relative.max())}
