"""Whether what is left of a difference is chance: added up along what a fault is along, noise points nowhere."""

from __future__ import annotations

import math

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

#: Standard errors that chance leaves of a sum over elements, and the part of the step by which gradients that agree
#: may scale it.
ERRORS, SCALED = 4.0, 0.02
#: Part of what a sum would be if every element were off alike, past which few elements are not off by chance.
_COHERENT = 0.75
#: Standard errors past which a number that is fitted to values is not 0 by chance, of the many that are fitted.
_FITTED = 4.5
#: Of so few elements a number that is fitted to them, and chance, explain whatever they are off.
FEW = 16

F64 = NDArray[np.float64]


def errors(count: int) -> float:
    """Standard errors that chance leaves of a sum over so many elements.

    |sum x| <= sqrt(count) sqrt(sum x^2), so that a sum of few could not be past a limit that is the same for all.
    """
    return min(ERRORS, _COHERENT * math.sqrt(count))


def fewest(of: int) -> float:
    """Elements below which those that say something are few among so many."""
    return min(FEW, of / 2)


class SumAlong(Struct):
    """What a pass over the elements adds up."""

    count: int = 0
    along: float = 0.0
    square: float = 0.0
    size: float = 0.0

    def take(self, along: F64) -> None:
        self.count += along.size
        self.along += float(along.sum())
        self.square += float(np.square(along).sum())

    def is_chance(self, of: int) -> bool:
        """of: how many elements there are; of few among many that say nothing, no sum tells."""
        if self.count < fewest(of):
            return True
        return abs(self.along) <= errors(self.count) * math.sqrt(self.square) + SCALED * self.size


def is_along(values: F64, line: F64) -> bool:
    """Whether few values [N] are a multiple of a line, and noise beside that: Student's t of the one number fitted.

    A t of n degrees of freedom is as rare as a normal z where t^2 = n (exp(z^2 / n) - 1), nearly.
    """
    free, size = values.size - 1, float(line @ line)
    if free < 1 or not size:
        return False
    times = float(values @ line) / size
    rest = float(np.square(values - times * line).sum()) / free
    limit = free * math.expm1(min(50.0, _FITTED**2 / free))
    return times * times * size > limit * rest


class Directions:
    """Sums of what is left of a difference along the weight, its signs and a constant: of all, per row and per column.

    A weight that is scaled, cut off instead of rounded, or shifted is off along one of these everywhere; rounding is
    along none.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._count = math.prod(shape)
        self._width = self._count // shape[0] if len(shape) > 1 else self._count
        lines = {"all": 1, "row": self._count // self._width, "column": self._width if len(shape) > 1 else 1}
        self._lines = {what: count for what, count in lines.items() if what == "all" or count > 1}
        #: [direction, 2 (sum, sum of squares), line]
        self._sums = {what: np.zeros((3, 2, count)) for what, count in self._lines.items()}

    def take(self, start: int, left: F64, weight: F64) -> None:
        """left, weight: [n], from element `start` on."""
        at = np.arange(start, start + left.size)
        places = {"all": np.zeros(left.size, np.intp), "row": at // self._width, "column": at % self._width}
        for number, along in enumerate((left * weight, left * np.sign(weight), left)):
            for what, sums in self._sums.items():
                for power, values in enumerate((along, np.square(along))):
                    sums[number, power] += np.bincount(places[what], values, sums.shape[-1])

    def are_chance(self, *, of_lines: bool) -> bool:
        """of_lines: lines were seen to be off each by a factor or a constant; those of few elements cannot deny it."""
        for what, sums in self._sums.items():
            lines = self._lines[what]
            each = self._count // lines
            # Of so many sums the greatest is further off (Hoeffding: signs by chance pass t with 2 exp(-t^2 / 2)).
            most = errors(each) if what == "all" else math.sqrt(ERRORS**2 + 2 * math.log(lines))
            if each <= most**2:
                if of_lines:
                    return False
            elif bool((np.abs(sums[:, 0]) > most * np.sqrt(sums[:, 1])).any()):
                return False
        return True
