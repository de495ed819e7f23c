"""Losses that each rank made of its own part of a sum: a function that is no line, taken before the parts were added.

Where the ranks' parts x_r [B] of some tensor make the other run's x together, and the other run's loss is the mean of
f(k x) with one number k, each rank's own loss must be that of f(k x_r), which chance does not make of several ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from replay_core.compare.judging.faults import Fault, whose

F64 = NDArray[np.float64]

#: How near, of their size, the parts are to make the sum, and a loss what is made again.
_SUM, _NEAR = 1e-4, 2e-4
#: A rank's loss is another than the other run's by so much of it at least.
_OTHER = 5e-3
#: What values may be multiplied by before a function is taken, and how often it is halved to find which.
_SCALES, _HALVINGS = np.geomspace(1e-2, 1e2, 81), 50
#: Elements beyond which a loss is of tokens, and no longer of samples.
_MOST = 1 << 16


def _minus_log_sigmoid(x: F64) -> F64:
    return np.logaddexp(0.0, -x)


#: What losses are made of sums: words, the function, and whether values are multiplied by a number first.
_FUNCTIONS: tuple[tuple[str, Callable[[F64], F64], bool], ...] = (
    ("-log sigmoid(x)", _minus_log_sigmoid, True),
    ("-sigmoid(x)", lambda x: -1 / (1 + np.exp(-x)), True),
    ("max(0, 1 - x)", lambda x: np.maximum(0.0, 1 - x), True),
    ("exp(x)", np.exp, True),
    ("-exp(x)", lambda x: -np.exp(x), True),
    ("x^2", np.square, False),
    ("(1 - x)^2", lambda x: np.square(1 - x), True),
    ("|x|", np.abs, False),
)


def of_own_parts(
    what: str, ranks: Sequence[int], whole: float, losses: Sequence[float], name: str, x: F64, parts: Sequence[F64]
) -> Fault | None:
    """Whether each rank's loss is a function of its own part of `name`. whole, x: of the other run; losses, parts: of
    each rank.
    """
    if len(parts) < 2 or x.size > _MOST or not all(np.isfinite(one).all() for one in (x, *parts)):
        return None
    if any(abs(one - whole) <= _OTHER * abs(whole) for one in losses) or not _make(x, parts):
        return None
    for words, function, is_scaled in _FUNCTIONS:
        for scale in _scales(function, x, whole) if is_scaled else (_one(function, x, whole)):
            again = [float(function(scale * part).mean()) for part in parts]
            if all(abs(one - made) <= _NEAR * max(abs(one), 1e-6) for one, made in zip(losses, again, strict=True)):
                times = "" if abs(scale - 1) < 1e-3 else f", x times {scale:.4g}"
                return Fault(
                    "before its sum", tuple(ranks),
                    f"{what} of {whose(ranks)} is made of each rank's own part of {name}: the mean of {words}{times}, "
                    f"x being what the rank has of it ({', '.join(f'{one:.4g}' for one in losses)}), where the other "
                    f"run's is that of the sum of all parts ({whole:.4g}): the parts are not summed over the ranks "
                    "before the function is taken, which is no line",
                )  # fmt: skip
    return None


def _make(x: F64, parts: Sequence[F64]) -> bool:
    """Whether the parts make the sum, of which none is it by itself."""
    size = float(np.linalg.norm(x))
    different = list({part.tobytes(): part for part in parts}.values())
    if len(different) < 2 or not size or any(np.linalg.norm(part - x) <= _OTHER * size for part in parts):
        return False
    return float(np.linalg.norm(sum(different) - x)) <= _SUM * sum(float(np.linalg.norm(part)) for part in different)


def _one(function: Callable[[F64], F64], x: F64, whole: float) -> tuple[float, ...]:
    return (1.0,) if abs(float(function(x).mean()) - whole) <= _NEAR * abs(whole) else ()


def _scales(function: Callable[[F64], F64], x: F64, whole: float) -> Iterator[float]:
    """The numbers that x may be times where the function of it makes the other run's loss."""
    yield from _one(function, x, whole)
    off = [float(function(scale * x).mean()) - whole for scale in _SCALES]
    for low, high, one, other in zip(_SCALES, _SCALES[1:], off, off[1:], strict=False):
        if not np.isfinite(other) or (one < 0) == (other < 0):
            continue
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            is_low = (float(function(middle * x).mean()) - whole < 0) == (one < 0)
            low, high = (middle, high) if is_low else (low, middle)
        yield float(low)
