"""Two weights after an Adam's first step, whose moments were nothing: each run's rate and their eps, read off them.

From nothing a step is lr g / (|g| + eps) (Kingma & Ba 2015, algorithm 1, t = 1), so that from equal weights

    w_b - w_a  =  lr_a g_a / (|g_a| + eps) - lr_b g_b / (|g_b| + eps)

Three numbers for as many elements as there are: where gradients are all noise, and no two elements of the runs alike,
nothing else fits. A gradient that was clipped since is the same with another eps.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

F64 = NDArray[np.float64]

#: Fewer elements, and fewer that are off by so many roundings (times the inverse), are no witnesses for three numbers.
_FEWEST, _WITNESSES, _ROUNDING = 8, 6, 0.1
#: Part of its difference that each may be left with, beside its rounding; the greatest condition of the fit.
_LEFT, _CONDITION = 0.05, 30.0
#: Elements that are asked, decades around the typical gradient that eps is looked for in, and how often in between.
_ASKED, _DECADES, _BETWEEN, _HALVINGS = 4096, 4, 8, 40


class FirstAdam(Struct, frozen=True):
    """rate_a, rate_b: of either run; eps: of both, in the gradients' unit."""

    rate_a: float
    rate_b: float
    eps: float

    def step(self, gradient: F64, rate: float) -> F64:
        """What a run's gradient makes of its weight, to be taken off it."""
        return rate * _direction(gradient, self.eps)

    @classmethod
    def of(cls, off: F64, gradient_a: F64, gradient_b: F64, rounding: F64, *, is_one: bool = False) -> FirstAdam | None:
        """off: b's weights less a's; rounding: what it may be off by. All [N]. is_one: whether both runs have one rate;
        where they may have two, gradients must be noise to tell these apart. None where no such step fits.
        """
        some = slice(_ASKED)
        off, a, b, rounding = off[some], gradient_a[some], gradient_b[some], rounding[some]
        if off.size < _FEWEST or np.count_nonzero(np.abs(off) * _ROUNDING > rounding) < _WITNESSES:
            return None  # what few elements say, three numbers fit
        #: Each element says as much as its rounding and its own size let it.
        allowed = rounding + _LEFT * np.abs(off)
        weight = np.divide(1.0, allowed, out=np.zeros_like(allowed), where=allowed > 0)
        usual = float(np.median(np.abs(np.concatenate((a, b)))))
        if not usual:
            return None
        grid = np.linspace(-_DECADES, _DECADES, 2 * _DECADES * _BETWEEN + 1)

        def left(decade: float) -> float:
            return _fit(off, a, b, usual * 10.0**decade, weight, is_one=is_one)[0]

        best = int(np.argmin([left(one) for one in grid]))
        low, high = grid[max(0, best - 1)], grid[min(grid.size - 1, best + 1)]
        for _ in range(_HALVINGS):
            third = (high - low) / 3
            if left(low + third) <= left(high - third):
                high -= third
            else:
                low += third
        eps = usual * 10.0 ** ((low + high) / 2)
        rest, rates = _fit(off, a, b, eps, weight, is_one=is_one)
        if rates is None or rest > 1:
            return None
        return cls(*rates, eps)


def _direction(gradient: F64, eps: float) -> F64:
    return gradient / (np.abs(gradient) + eps)


def _fit(
    off: F64, a: F64, b: F64, eps: float, weight: F64, *, is_one: bool
) -> tuple[float, tuple[float, float] | None]:
    """The greatest of what is left with this eps, weighted; and the two rates, where the elements tell them."""
    sides = np.stack([_direction(a, eps), -_direction(b, eps)], axis=1)
    sides = sides.sum(axis=1, keepdims=True) if is_one else sides
    rates, _, rank, singular = np.linalg.lstsq(sides * weight[:, None], off * weight, rcond=None)
    left = float((np.abs(off - sides @ rates) * weight).max())
    if rank < sides.shape[1] or singular[0] > _CONDITION * singular[-1]:
        return left, None
    return left, (float(rates[0]), float(rates[-1]))
