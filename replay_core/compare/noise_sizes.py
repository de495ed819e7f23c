"""Steps of elements whose gradients are noise: they point nowhere, but are as long in one run as in the other.

An Adam divides a gradient by its own size, so that noise, too, takes steps of about a rate, whichever way. No element
tells a step of twice the rate from one of its own; the mean square over all of them does. Of n elements and the sums
q over recorded steps of their squared steps, by the delta method

    ln(mean q_b / mean q_a)  is off by  sqrt(var q_a / (n mean^2 q_a) + var q_b / (n mean^2 q_b))

by chance. Next to an eps a step is as large as its gradient, so a run whose noise is louder may step further: by no
more than its gradients are larger. And what the steps are apart is not along the weights themselves, as a decay is.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

from replay_core.compare.chance import is_along

F64 = NDArray[np.float64]

#: Standard errors past which the steps of one bias, and of several together, are of two sizes: of one healthy bias they
#: were up to 5.0 (its elements share what its first steps' noise left in the moments), of two up to 3.3 of 100 pairs.
_OF_ONE, _OF_SEVERAL = 7.0, 4.0
#: A factor between the squares below which they are of one.
_TIMES = 1.5
#: Fewer elements tell no size.
_FEWEST = 12
_APART, _WEIGHT = 4, 5


class NoiseSizes(Struct):
    """What the noise of biases was stepped by in two runs, over the steps and biases of a model."""

    #: By model, then by bias: sums over steps of the squares of a's steps, b's, a's gradients, b's; of what the steps
    #: are apart; and the weight [6, N].
    _sums: dict[Any, dict[Any, F64]] = field(default_factory=lambda: defaultdict(dict))

    def take(self, model: Any, bias: Any, steps: tuple[F64, F64], gradients: tuple[F64, F64], weight: F64) -> None:
        """steps, gradients: of a and of b, [N], where the gradient is noise and else 0; weight: before the step."""
        made = np.stack([*np.square(np.stack([*steps, *gradients])), steps[1] - steps[0], np.zeros_like(weight)])
        known = self._sums[model].get(bias)
        self._sums[model][bias] = made = made if known is None or known.shape != made.shape else known + made
        made[_WEIGHT] = weight

    def are_one(self, model: Any, bias: Any) -> bool:
        """Whether a bias' steps, and those of all biases of its model, are as long in one run as in the other."""
        every = self._sums[model]
        if not _are_one(every[bias], _OF_ONE):
            return False
        return len(every) < 2 or _are_one(np.concatenate(list(every.values()), axis=1), _OF_SEVERAL)


def _are_one(sums: F64, most: float) -> bool:
    #: An element that nothing was noise of says nothing.
    told = sums[:, sums[2:4].any(axis=0)]
    count = told.shape[1]
    means = told[:4].mean(axis=1) if count else np.zeros(4)
    if count < _FEWEST or not means.all():
        return True
    if is_along(told[_APART], told[_WEIGHT]):
        return False
    spread = (told[:2].var(axis=1, ddof=1) / np.square(means[:2])).sum() / count
    apart, louder = math.log(means[1] / means[0]), math.log(means[3] / means[2])
    past = max(apart - max(0.0, louder), min(0.0, louder) - apart)
    return past <= max(math.log(_TIMES), most * math.sqrt(spread))
