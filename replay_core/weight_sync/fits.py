"""What a block that equals nothing known comes near to: part of the update, a factor, a grid, some rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from replay_core import dtypes
from replay_core.measure.equality import unequal
from replay_core.weight_sync.state import Values

if TYPE_CHECKING:
    from replay_core.documents.weights import Arrival

Found: TypeAlias = "tuple[Arrival, str]"
Wide = NDArray[np.float64]

#: Levels of a symmetric integer grid: int8, int4.
_LEVELS = {"int8": 127, "int4": 7}
_FP8 = ("float8_e4m3fn", "float8_e5m2")
#: Columns that share a scale where it is neither the row's nor the tensor's (DeepSeek's blocks, GPTQ's groups).
_GROUPS = (128, 64, 32)


def fit(got: Values, sent: Values, before: Values | None) -> Found | None:
    """The nearest explanation of a block that holds neither what was sent nor any other known values."""
    y, x = got.astype(np.float64), sent.astype(np.float64)
    if not np.isfinite(y).all():
        return "differs", f"{int((~np.isfinite(y)).sum()):,} of {y.size:,} values are not finite"
    if before is not None and (found := _update(y, x, before.astype(np.float64), str(got.dtype))):
        return found
    return _partly(got, sent, before) or _factor(y, x, str(got.dtype)) or _grid(y, x, str(got.dtype))


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
    """Some rows arrived and some did not."""
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
    """Values of a low-precision grid: each within half a step of what was sent."""
    if y.ndim == 0 or not x.any():
        return None
    slack = dtypes.EPS[dtypes.family(dtype)]
    for name, levels in _LEVELS.items():
        for scope, scale in _scales(x):
            step = scale / levels
            off = np.abs(y / np.where(step > 0, step, 1) - np.rint(y / np.where(step > 0, step, 1)))
            size = np.abs(y / np.where(step > 0, step, 1))
            if (np.abs(y - x) <= step * 0.5 + slack * np.abs(x) + 1e-30).all() and (off <= slack * size + 1e-3).all():
                return "quantised", f"the values on an {name} grid, a scale per {scope}"
    for name in _FP8:
        top = float(448.0 if name == "float8_e4m3fn" else 57344.0)
        eps = dtypes.EPS["float8"] if name == "float8_e5m2" else 2.0**-3
        for scope, scale in _scales(x):
            ratio = np.where(scale > 0, scale / top, 1)
            if (np.abs(y - x) <= np.maximum(np.abs(x) * eps / 2, ratio * 2.0**-9) + slack * np.abs(x)).all():
                return "quantised", f"the values on a grid of {name}, a scale per {scope}"
    return None


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
    return found
