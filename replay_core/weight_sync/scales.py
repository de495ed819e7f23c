"""Parameters an engine keeps in fp8 or int8 with a scale beside them (`weight_scale`, `weight_scale_inv`)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from replay_core import dtypes
from replay_core.weight_sync.blocks import Block
from replay_core.weight_sync.state import Values, WeightState

_SCALES = ("_scale_inv", "_scale")
Wide = NDArray[np.float64]


def dequantised(state: WeightState, name: str) -> tuple[Wide, Wide] | None:
    """(values, scale of each element), both of the parameter's shape; None where it has no scale that fits."""
    ref = state.tensors[name]
    scale = next((f"{name}{end}" for end in _SCALES if state.has(f"{name}{end}")), None)
    if scale is None or not (ref.dtype.startswith("float8") or ref.dtype == "int8"):
        return None
    values = state.values(name).astype(np.float64)
    each = _spread(state.values(scale).astype(np.float64), values.shape)
    return None if each is None else (values * each, each)


def _spread(scale: Wide, shape: tuple[int, ...]) -> Wide | None:
    """One scale an element: from a scalar, one per row, or one per block of rows and columns."""
    if scale.size == 1:
        return np.full(shape, float(scale.reshape(-1)[0]))
    if scale.ndim == 1:
        scale = scale[:, None]
    if scale.ndim != len(shape) or any(length % count for length, count in zip(shape, scale.shape, strict=True)):
        return None
    for axis, (length, count) in enumerate(zip(shape, scale.shape, strict=True)):
        scale = np.repeat(scale, length // count, axis=axis)
    return scale


def on_its_grid(dtype: str, scaled: tuple[Wide, Wide], block: Block, sent: Values) -> bool:
    """Whether every value is within half a step of what was sent: the nearest the engine's dtype could hold."""
    values, scale = (block.inside(one) for one in scaled)
    if values.shape != sent.shape:
        return False
    wanted = sent.astype(np.float64)
    known = dtypes.DTYPES[dtype]
    # Of fp8 half a step of its own magnitude, and at least of the smallest; of int8 half a step.
    if known.eps is None:
        step = scale
    else:
        step = np.maximum(np.abs(wanted) * known.eps, scale * (known.smallest_normal or 0.0) * known.eps)
    # The division by the scale and the product with it round, too.
    return bool((np.abs(values - wanted) <= step * 0.5 * (1 + 2.0**-7)).all())
