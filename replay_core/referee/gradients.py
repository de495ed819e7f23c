"""Gradients of a linear's weight, each against fp64 of what it is made of: the gradient of the output, the input."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from replay_core import pages
from replay_core.errors import RldbgError
from replay_core.records import TensorRef
from replay_core.referee import limits
from replay_core.referee.arithmetic import SIGNIFICAND, Noise
from replay_core.referee.figures import Yardstick
from replay_core.referee.recorded import Recorded
from replay_core.referee.shadow import Claim, Shadow


def gradient_claims(shadow: Shadow, recorded: Recorded) -> Iterator[tuple[Claim, Yardstick]]:
    """Every recorded gradient of a linear's weight whose recorded input and gradient of the output have as many rows.

    In the order of a backward, the last module first. dW = dY^T X [outputs, inputs], summed in float32 and rounded
    once, to the half precision of the product where the gradient is kept in float32 behind autocast. Gradients add up
    over the micro-batches of a step: only the first has its own.
    """
    if recorded.is_later:
        return
    for module, names in reversed(shadow.modules):
        if not isinstance(module, torch.nn.Linear):
            continue
        refs = next((found for name in names if (found := _refs(recorded, name)) is not None), None)
        values = None if refs is None else [_read(one) for one in refs]
        if values is None or any(one is None for one in values):
            continue
        x_NC, dy_NO, recorded_OC = values
        assert x_NC is not None and dy_NO is not None and recorded_OC is not None  # noqa: PT018
        x_NC, dy_NO = x_NC.flatten(0, -2), dy_NO.flatten(0, -2)
        if len(x_NC) != len(dy_NO) or recorded_OC.shape != (dy_NO.shape[1], x_NC.shape[1]):
            continue
        dtype = getattr(torch, refs[2].dtype) if refs is not None else torch.float32
        if shadow.autocast is not None:
            x_NC = x_NC.to(shadow.autocast).double()
            dtype = shadow.autocast
        truth, squares = dy_NO.T @ x_NC, dy_NO.square().T @ x_NC.square()
        noises = []
        for number in range(limits.RUNS):
            noise = Noise(number, limits.ACCUMULATION)
            noises.append(noise("", truth + noise.of_sum(squares), dtype) - truth)
        name = f"grad.{names[0]}.weight"
        claim = Claim(name, names[0], False, "gradient", dtype, recorded_OC, truth, dtype != torch.float32)
        yield claim, Yardstick(claim, noises)


def _refs(recorded: Recorded, name: str) -> tuple[TensorRef, TensorRef, TensorRef] | None:
    found = (recorded.modules.get(f"{name}.inputs.0"), *recorded.find_all(f"grad.{name}.output", f"grad.{name}.weight"))
    if any(one is None or one.dtype not in _DTYPES for one in found):
        return None
    return found  # type: ignore[return-value]


_DTYPES = {str(one).removeprefix("torch.") for one in SIGNIFICAND}


def _read(ref: TensorRef) -> Any:
    try:
        return torch.from_numpy(pages.array(ref).astype("float64"))
    except RldbgError:
        return None
