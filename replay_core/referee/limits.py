"""Where noise ends: how much more than this module's own noise an error may have of every statistic of `figures`.

The noise runs are the model's own eager code with an independent rounding error at every operation. A harmless kernel
rounds at other places, sums in another order, and its errors are not independent; what that adds was measured
(docs/referee.md) and stands here. A limit is `slack` times the most that
any noise run had, and never less than `least`.
"""

from __future__ import annotations

import torch

#: Noise runs of one module.
RUNS = 6
#: And of the whole model, for the floor of its log-probabilities.
FLOOR_RUNS = 4
#: c of acc^2 = (2^-24)^2/3 c sum (w x)^2: what float32 sums leave, whatever their order.
ACCUMULATION = 16.0

#: statistic -> (slack over the most that noise had, least limit).
_LIMITS = {
    "size": (1.5, 1.5),
    "token": (2.0, 2.5),
    "channel": (2.0, 2.5),
    "gain": (3.0, 10.0),
    "tokens_gain": (2.0, 2.5),
    "channels_gain": (2.0, 2.5),
    "heads_gain": (1.6, 2.5),
    "bias": (2.0, 2.5),
    "rank": (1.7, 2.0),
}
#: Sums in float32 are where its errors come from, and their order is the kernel's own.
FLOAT32 = 3.0
#: Sums in float32 lean one way, all of them; a gain below this part is no gain.
LEAST_GAIN = 2.0**-22
#: What an explanation may leave beside noise: so many sigma and so much of the error's square; or so little of that.
LITTLE, MOST_LEFT, SURELY = 2.0, 0.3, 0.01
#: Of a right recipe at most this share of elements is not bitwise what was recorded, a fifth of what any other leaves.
UNEQUAL, RUNNER_UP = 0.03, 5.0
#: A softmax in half precision leaves an attention's error below so many roundings.
COARSE = 8.0
#: How many of what the tokens' noise leaves of a loss or KL may be noise.
SCALAR = 6.0
#: What is SUSPECT before it is a BUG: this part of the limit.
SUSPECT = 0.85


def most(statistic: str, kind: str, dtype: torch.dtype, noise: float, shape: torch.Size) -> float:
    """The most an error may have of a statistic and still be noise."""
    slack, least = _LIMITS[statistic]
    wide = FLOAT32 if dtype == torch.float32 else 1.0
    return wide * max(slack * noise, least)


def hard(elements: int) -> float:
    """How many of so many elements may lie past half a unit of the last place: 1 in 2000, and 3."""
    return max(3.0, elements / 2000)
