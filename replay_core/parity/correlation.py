"""How two critics' values stand to each other, over one set of tokens: correlations, and what they cannot see.

All figures are of b against a, the baseline: d = b - a. A correlation needs two quantities that vary; where one
does not, it is None and `undefined` says why. It is never NaN.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from replay_core.compare.correlation import pearson

if TYPE_CHECKING:
    from replay_core.documents.parity import MeasuresEntry

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

#: ROLL's parity test: two values nearer than this are "nearly identical".
NEARLY_IDENTICAL = 0.1
#: ROLL's parity test: what is added to |a| before dividing by it.
RELATIVE_EPSILON = 1e-8
#: A range this small beside the magnitude is rounding of one number, in units of float32's epsilon.
_CONSTANT = 4 * float(np.finfo(np.float32).eps)


class Measures(Struct, frozen=True):
    """One table column. Values, differences, `offset` and ranges are in the values' own unit.

    n counts tokens where both are finite, nonfinite the others. nearly_identical is a percentage.
    slope, offset: least squares b = slope * a + offset. residual_rms is what the line leaves.
    """

    n: int
    nonfinite: int
    pearson: float | None
    spearman: float | None
    undefined: str | None
    nearly_identical: float | None
    max_abs: float | None
    mean_abs: float | None
    max_rel: float | None
    mean_rel: float | None
    mean_signed: float | None
    slope: float | None
    offset: float | None
    residual_rms: float | None
    range_a: tuple[float, float] | None
    range_b: tuple[float, float] | None
    mean_a: float | None
    mean_b: float | None
    std_a: float | None
    std_b: float | None
    std_ratio: float | None

    def to_mapping(self) -> MeasuresEntry:
        return cast("MeasuresEntry", {name: getattr(self, name) for name in self.__struct_fields__})


def measure(a: Any, b: Any, mask: Any = None, *, threshold: float = NEARLY_IDENTICAL) -> Measures:
    """Measures of two arrays of one shape, over the elements where `mask` is true (all where it is None).

    Raises:
        ValueError: the shapes differ.
    """
    flat_a, flat_b = np.asarray(a, np.float64).reshape(-1), np.asarray(b, np.float64).reshape(-1)
    if np.shape(a) != np.shape(b):
        raise ValueError(f"values of shape {np.shape(a)} and {np.shape(b)} cannot be held against each other")
    if mask is not None:
        chosen = np.asarray(mask, bool).reshape(-1)
        flat_a, flat_b = flat_a[chosen], flat_b[chosen]
    finite = np.isfinite(flat_a) & np.isfinite(flat_b)
    nonfinite = int(finite.size - finite.sum())
    flat_a, flat_b = flat_a[finite], flat_b[finite]
    n = int(flat_a.size)
    if n == 0:
        why = (
            "no token is left to compare"
            if nonfinite == 0
            else f"none of the {nonfinite} tokens is finite on both sides"
        )
        return Measures(0, nonfinite, None, None, why, *[None] * 16)
    d = flat_b - flat_a
    size = np.abs(d)
    relative = size / (np.abs(flat_a) + RELATIVE_EPSILON)
    undefined = why_undefined(flat_a, flat_b)
    slope, offset = line(flat_a, flat_b)
    residual = (
        None if slope is None or offset is None else float(np.sqrt(np.mean((flat_b - slope * flat_a - offset) ** 2)))
    )
    std_a, std_b = float(flat_a.std()), float(flat_b.std())
    return Measures(
        n=n,
        nonfinite=nonfinite,
        pearson=None if undefined else _within_1(pearson(flat_a, flat_b)),
        spearman=None if undefined else _spearman(flat_a, flat_b),
        undefined=undefined,
        nearly_identical=100.0 * float((size < threshold).mean()),
        max_abs=float(size.max()),
        mean_abs=float(size.mean()),
        max_rel=float(relative.max()),
        mean_rel=float(relative.mean()),
        mean_signed=float(d.mean()),
        slope=slope,
        offset=offset,
        residual_rms=residual,
        range_a=(float(flat_a.min()), float(flat_a.max())),
        range_b=(float(flat_b.min()), float(flat_b.max())),
        mean_a=float(flat_a.mean()),
        mean_b=float(flat_b.mean()),
        std_a=std_a,
        std_b=std_b,
        std_ratio=std_b / std_a if not is_constant(flat_a) else None,
    )


def why_undefined(a: Floats, b: Floats) -> str | None:
    """Why there is no correlation, or None where there is one."""
    if a.size < 2:
        return f"a correlation needs two tokens, there is {a.size}"
    constant = [
        f"{side} is {values[0]:.6g} at all {a.size} tokens"
        for side, values in (("A", a), ("B", b))
        if is_constant(values)
    ]
    return "; ".join(constant) + ": a constant correlates with nothing" if constant else None


def is_constant(values: Floats) -> bool:
    """Whether the values do not vary beyond the rounding of one number in float32."""
    return bool(values.max() - values.min() <= _CONSTANT * np.abs(values).max())


def _spearman(a: Floats, b: Floats) -> float | None:
    from scipy.stats import rankdata  # 0.8 s

    return _within_1(pearson(np.asarray(rankdata(a), np.float64), np.asarray(rankdata(b), np.float64)))


def _within_1(r: float | None) -> float | None:
    """A correlation without the last bit that rounding puts past 1."""
    return None if r is None else min(1.0, max(-1.0, r))


def line(a: Floats, b: Floats) -> tuple[float | None, float | None]:
    """(slope, offset) of the least squares line b = slope a + offset; (None, None) where a does not vary."""
    if a.size < 2 or is_constant(a):
        return None, None
    centred = a - a.mean()
    slope = float(centred @ (b - b.mean()) / (centred @ centred))
    return slope, float(b.mean() - slope * a.mean())
