"""What a block that equals nothing known comes near to: part of the update, a factor, a grid, some rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from replay_core import dtypes
from replay_core.measure.equality import unequal
from replay_core.weight_sync.state import Values
from replay_core.weight_sync.suspects import cast

if TYPE_CHECKING:
    from replay_core.documents.weights import Arrival

Found: TypeAlias = "tuple[Arrival, str]"
Wide = NDArray[np.float64]

#: Levels of a symmetric integer grid: int8, int4.
_LEVELS = {"int8": 127, "int4": 7}
#: The largest number of a dtype.
_FP8 = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
#: Columns that share a scale where it is neither the row's nor the tensor's (DeepSeek's blocks, GPTQ's groups).
_GROUPS = (128, 64, 32)
#: A square of so many rows and columns shares a scale in DeepSeek's weights.
_SQUARE = 128
#: How far a scale may be off what it is computed to be here: float32, a division and a product.
_OF_SCALE = 2.0**-20
#: How unlikely it has to be that numbers of no grid lie on one (the logarithm).
_BY_CHANCE = float(np.log(1e-6))


def fit(got: Values, sent: Values, before: Values | None) -> Found | None:
    """The nearest explanation of a block that holds neither what was sent nor any other known values."""
    y, x = got.astype(np.float64), sent.astype(np.float64)
    if not np.isfinite(y).all():
        return "differs", f"{int((~np.isfinite(y)).sum()):,} of {y.size:,} values are not finite"
    if before is not None and (found := _update(y, x, before.astype(np.float64), str(got.dtype))):
        return found
    held = None if before is None else cast(before, str(got.dtype))
    return _partly(got, sent, held) or _factor(y, x, str(got.dtype)) or _grid(y, x, str(got.dtype))


def rel_l2(got: Values, sent: Values) -> float:
    """|got - sent| / |sent|, over all values."""
    y, x = got.astype(np.float64).ravel(), sent.astype(np.float64).ravel()
    return float(np.linalg.norm(y - x) / max(np.linalg.norm(x), np.finfo(np.float64).tiny))


def _rounding(x: Wide, dtype: str) -> float:
    """The norm of what rounding x to a dtype leaves: half a step at most, uniform: |x| eps / sqrt(12) or less."""
    eps = dtypes.EPS[dtypes.family(dtype)]
    return float(np.linalg.norm(x) * eps / np.sqrt(12.0))


def _update(y: Wide, x: Wide, before: Wide, dtype: str) -> Found | None:
    """The update applied another number of times than once: least squares of y - before against x - before."""
    if before.shape != x.shape:
        return None
    step = x - before
    size = float((step * step).sum())
    if size == 0.0:
        return None
    times = float(((y - before) * step).sum()) / size
    left = float(np.linalg.norm(y - before - times * step))
    nearest = round(times)
    # Three roundings lie in it: of what was there, of what was sent, of the sum.
    if left > 3.0 * _rounding(x, dtype) + 0.02 * abs(times) * np.sqrt(size) or abs(times - nearest) > 0.05:
        return None
    if nearest in (0, 1):
        return None
    return "update", f"the update was applied {nearest} times (fitted {times:.3f})"


def _partly(got: Values, sent: Values, before: Values | None) -> Found | None:
    """Some rows arrived and some did not. `sent` and `before` are as the engine's dtype has them."""
    if got.ndim == 0 or len(got) < 2:
        return None
    apart = unequal(got, sent)
    rows = apart.reshape(len(got), -1).any(axis=1)
    wrong = np.flatnonzero(rows)
    if len(wrong) == len(got):
        return None
    span = f"rows {wrong[0]}..{wrong[-1]}" if len(wrong) == wrong[-1] - wrong[0] + 1 else f"{len(wrong):,} rows"
    held = ""
    if before is not None and before.shape == got.shape and not unequal(got[rows], before[rows]).any():
        held = "; they hold what was there before the push"
    elif not got[rows].astype(np.float64).any():
        held = "; they are zero"
    what = f"{span} of {len(got):,} are not what was sent{held}"
    if len(wrong) == 1 or got.ndim == 1:
        what += f" ({int(apart.sum()):,} values)"
    return "partly", what


def _factor(y: Wide, x: Wide, dtype: str) -> Found | None:
    size = float((x * x).sum())
    if size == 0.0:
        return None
    factor = float((x * y).sum()) / size
    left = float(np.linalg.norm(y - factor * x))
    if abs(factor - 1.0) < 1e-4 or left > 2.0 * abs(factor) * _rounding(x, dtype) + 1e-12:
        return None
    return "scaled", f"the values times {factor:.6g}"


def _grid(y: Wide, x: Wide, dtype: str) -> Found | None:
    """Values of a low-precision grid: each within half a step of what was sent, and each one of the grid's own."""
    if y.ndim == 0 or not x.any():
        return None
    slack = dtypes.EPS[dtypes.family(dtype)] + _OF_SCALE
    for name, levels in _LEVELS.items():
        for scope, scale in _scales(x):
            step = np.where(scale > 0, scale / levels, 1)
            near = np.abs(y - x) <= step * 0.5 + slack * np.abs(x) + 1e-30
            if near.all() and _lies_on(np.abs(y) / step, np.ones(y.shape), slack):
                return "quantised", f"the values on an {name} grid, a scale per {scope}"
    for name, top in _FP8.items():
        for scope, scale in _fp8_scales(x, top):
            size = np.abs(y) / scale
            step = _fp8_step(size * (1 + slack), name)  # a power of two may be stored a rounding below it
            # What is larger than the largest becomes the largest.
            near = (np.abs(y - x) <= step * scale * 0.5 + slack * np.abs(x)) | (np.abs(x) > top * scale)
            if near.all() and (size <= top * (1 + slack)).all() and _lies_on(size, step, slack):
                return "quantised", f"the values on a grid of {name}, {scope}"
    return None


def _lies_on(size: Wide, step: Wide, slack: float) -> bool:
    """Whether numbers are whole steps, up to the rounding of their dtype, and would not be by chance: a number of no
    grid is with the share of a step that the rounding takes. Where that is all of it (bfloat16 on 127 levels, near
    the largest) numbers tell nothing, and those that lie on one level tell it once.
    """
    level = np.rint(size / step) * step
    allowed = slack * size + 1e-6 * step
    if not (np.abs(size - level) <= allowed).all():
        return False
    at = np.unique(level, return_index=True)[1]
    return float(np.log(np.minimum(2.0 * allowed.ravel()[at] / step.ravel()[at], 1.0)).sum()) <= _BY_CHANCE


def _fp8_step(size: Wide, name: str) -> Wide:
    """What lies between a number of such a size and the next."""
    known = dtypes.DTYPES[name]
    return np.exp2(np.floor(np.log2(np.maximum(size, known.smallest_normal or 0.0)))) * (known.eps or 0.0)


def _fp8_scales(x: Wide, top: float) -> list[tuple[str, Wide]]:
    """How large the grid's 1 is: the largest value is the dtype's own, or lies below it by less than a power of two
    (MX formats, DeepSeek); of a plain cast it is 1.
    """
    found = []
    for scope, scale in _scales(x):
        exact = np.where(scale > 0, scale / top, 1.0)
        found += [(f"a scale per {scope}", exact), (f"a scale per {scope}", np.exp2(np.ceil(np.log2(exact))))]
    return [*found, ("no scale", np.ones(x.shape))]


def _scales(x: Wide) -> list[tuple[str, Wide]]:
    """The largest magnitude, per row, tensor, group of columns: as the shape of x."""
    size = np.abs(x)
    found = [("tensor", np.full(x.shape, size.max()))]
    if x.ndim == 2:
        found.insert(0, ("row", np.broadcast_to(size.max(axis=1, keepdims=True), x.shape)))
        for width in _GROUPS:
            if x.shape[1] % width == 0 and x.shape[1] > width:
                grouped = size.reshape(len(x), -1, width).max(axis=2)
                found.append((f"{width} columns", np.repeat(grouped, width, axis=1)))
        if max(x.shape) > _SQUARE:
            starts = [np.arange(0, length, _SQUARE) for length in x.shape]
            largest = np.maximum.reduceat(np.maximum.reduceat(size, starts[0], axis=0), starts[1], axis=1)
            whole = np.repeat(np.repeat(largest, _SQUARE, axis=0), _SQUARE, axis=1)[: x.shape[0], : x.shape[1]]
            found.append((f"{_SQUARE} x {_SQUARE} block", whole))
    return found
