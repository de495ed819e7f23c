"""Two weights after an Adam's first step, whose moments were nothing: each run's rate and their eps, read off them.

From nothing a step is lr g / (|g| + eps) (Kingma & Ba 2015, algorithm 1, t = 1), so that from equal weights

    w_b - w_a  =  lr_a g_a / (|g_a| + eps) - lr_b g_b / (|g_b| + eps)

Three numbers for as many elements as there are: where gradients are all noise, and no two elements of the runs alike,
nothing else fits. A gradient that was clipped since is the same with another eps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]

#: Fewer elements whose gradient is noise are no witnesses for three numbers.
_FEWEST = 8
#: Part of the difference that may be left; part of it that rounding may be; the greatest condition of the fit.
_LEFT, _ROUNDING, _CONDITION = 0.03, 0.1, 30.0
#: As many elements as the difference must be spread over.
_WEIGHTY = 6.0
#: Elements that are asked, decades around the typical gradient that eps is looked for in, and how often in between.
_ASKED, _DECADES, _BETWEEN, _HALVINGS = 4096, 4, 8, 40


@dataclass(frozen=True, slots=True)
class FirstAdam:
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
        squares = np.square(off)
        size = float(squares.mean()) if off.size else 0.0
        if off.size < _FEWEST or not size or float(np.square(rounding).mean()) > _ROUNDING**2 * size:
            return None
        if float(squares.sum()) ** 2 < _WEIGHTY * float(np.square(squares).sum()):
            return None  # what few elements say, two numbers fit
        usual = float(np.median(np.abs(np.concatenate((a, b)))))
        if not usual:
            return None
        grid = np.linspace(-_DECADES, _DECADES, 2 * _DECADES * _BETWEEN + 1)

        def left(decade: float) -> float:
            return _fit(off, a, b, usual * 10.0**decade, is_one=is_one)[0]

        best = int(np.argmin([left(one) for one in grid]))
        low, high = grid[max(0, best - 1)], grid[min(grid.size - 1, best + 1)]
        for _ in range(_HALVINGS):
            third = (high - low) / 3
            if left(low + third) <= left(high - third):
                high -= third
            else:
                low += third
        eps = usual * 10.0 ** ((low + high) / 2)
        rest, rates = _fit(off, a, b, eps, is_one=is_one)
        if rates is None or rest > _LEFT**2 * size * off.size + float(np.square(rounding).sum()):
            return None
        return cls(*rates, eps)


def _direction(gradient: F64, eps: float) -> F64:
    return gradient / (np.abs(gradient) + eps)


def _fit(off: F64, a: F64, b: F64, eps: float, *, is_one: bool) -> tuple[float, tuple[float, float] | None]:
    """The sum of squares that is left with this eps, and the two rates; none where the elements do not tell them."""
    sides = np.stack([_direction(a, eps), -_direction(b, eps)], axis=1)
    if is_one:
        both = sides.sum(axis=1)
        size = float(both @ both)
        rate = float(both @ off) / size if size else 0.0
        return float(np.square(off - rate * both).sum()), (rate, rate)
    rates, _, rank, singular = np.linalg.lstsq(sides, off, rcond=None)
    left = float(np.square(off - sides @ rates).sum())
    if rank < 2 or singular[0] > _CONDITION * singular[1]:
        return left, None
    return left, (float(rates[0]), float(rates[1]))
