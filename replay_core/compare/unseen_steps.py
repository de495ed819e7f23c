"""Records that begin in the middle of a run: what the steps before them, which nobody kept, made of a bias that the
loss does not see.

A bias whose gradient is what rounding leaves of zero (`bias_noise.py`) is taken by an Adam by up to a whole rate a
step, in either run another way. Where both runs are recorded from step n on, n steps are behind them, and what the
module puts out in the first recorded step is off by the difference c of two walks, one constant for each channel and
the same in every row. Steps of noise are as long as rates and point nowhere, so

    |c|  <=  rate min(2 n, 4 sqrt(2 n)),

the first where all point one way, the second four standard deviations of a sum of 2 n that do not. The weight itself is
recorded as the step ends, and says whether it was so: it is off by c and this step's own difference, two rates at most,

    |(w'_b - w'_a) - c|  <=  2 rate + rounding.

A bias that was scaled, shifted, lost or decayed is off along itself or one constant (but where all of it is no more
than such a walk, so that it began at 0); another's is off by more than such walks. Which rate, the steps between
records tell; of one record alone, what moved the weights apart since c.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replay_core import pages
from replay_core.compare.bias_noise import left_beside
from replay_core.compare.chance import ERRORS, is_along
from replay_core.compare.judging.verdict import Context
from replay_core.compare.pairing.align import MicroBatchPair, Rowwise
from replay_core.dtypes import EPS, coarsest, family
from replay_core.measure.statistics import as_reals
from replay_core.records import TensorRef

#: Roundings of a weight: before and after a step, of both runs.
_ROUNDINGS = 4

F64 = NDArray[np.float64]
Both = tuple[TensorRef, TensorRef]


def drift(steps: int) -> float:
    """By how many rates two runs' weights may be apart after so many steps of noise."""
    return min(2.0 * steps, ERRORS * math.sqrt(2.0 * steps))


def moved_before(
    outputs: Both, after: Both, is_noise_C: NDArray[np.bool_], rate: float, steps: int, context: Context | None,
    micro_pair: MicroBatchPair, *, is_least: bool = False,
) -> tuple[str, float] | None:  # fmt: skip
    """Why what a module put out in the first recorded step is off by no more than its bias was by then, and the rate
    that this takes; None where it is off by something else.

    after: its bias as the step ended, [C]; is_noise_C: where the bias' gradient is nothing but rounding. rate: of the
    optimizer, which may be more where is_least (nobody recorded two steps one after the other). steps: how many are
    behind the records.

    Raises:
        DumpError: the bytes of one cannot be read.
    """
    dtype = family(coarsest(outputs[0].dtype, outputs[1].dtype)) if context is None else context.row
    of_weight = family(coarsest(after[0].dtype, after[1].dtype))
    is_plain = all(ref.is_readable and ref.shape == is_noise_C.shape for ref in after)
    if not is_plain or dtype not in EPS or of_weight not in EPS or not is_noise_C.any():
        return None
    found = _mean_off(outputs, is_noise_C.size, micro_pair, EPS[dtype] / 2)
    if found is None:
        return None
    mean_C, error_C = found
    w_a, w_b = (np.asarray(pages.array(ref), np.float64) for ref in after)
    if not np.isfinite(w_a).all() or not np.isfinite(w_b).all():
        return None
    rounding_C = _ROUNDINGS * EPS[of_weight] / 2 * np.maximum(np.abs(w_a), np.abs(w_b)) + error_C
    since_C = np.abs(w_b - w_a - mean_C)[is_noise_C]
    if is_least or not rate:
        rate = max(rate, float(since_C.max()))
    elif bool((since_C > 2 * rate + rounding_C[is_noise_C]).any()):
        return None
    moved_C = np.where(is_noise_C, mean_C, 0.0)
    if bool((np.abs(moved_C) > drift(steps) * rate + error_C).any()):
        return None
    walked, weight = moved_C[is_noise_C], ((w_a + w_b) / 2)[is_noise_C]
    # A bias that began at 0 is nothing but such a walk itself, longer in one run than in the other.
    is_walk = max(float(np.abs(one[is_noise_C]).max()) for one in (w_a, w_b)) <= drift(steps + 1) * rate
    if is_along(walked, np.ones_like(weight)) or (not is_walk and is_along(walked, weight)):
        return None
    left = left_beside(outputs, moved_C, context, dtype, micro_pair)
    if left is None:
        return None
    greatest = float(np.abs(moved_C).max())
    return (
        f"off in every row by one constant for each channel, {greatest:.2g} at most, where the gradient of its bias is "
        f"nothing but rounding: no more than {steps} unrecorded steps of up to {rate:.3g} make of that, and what the "
        f"bias itself is off by as this step ends; beside that {left}"
    ), rate


def _mean_off(outputs: Both, channels: int, micro_pair: MicroBatchPair, unit: float) -> tuple[F64, F64] | None:
    """What b's rows are off by on the average, [C], and how well rows that are rounded tell it."""
    total, squares, size, rows = np.zeros(channels), np.zeros(channels), np.zeros(channels), 0
    for chunk in Rowwise(*outputs, micro_pair).counted():
        a_RC, b_RC = as_reals(*chunk)
        if a_RC.shape != b_RC.shape or a_RC.ndim != 2 or a_RC.shape[1] != channels:
            return None
        off: Any = b_RC - a_RC
        total += off.sum(axis=0)
        squares += np.square(off).sum(axis=0)
        size += np.abs(a_RC).sum(axis=0)
        rows += a_RC.shape[0]
    if not rows or not np.isfinite(squares).all():
        return None
    mean = total / rows
    spread = np.sqrt(np.maximum(0.0, squares / rows - np.square(mean)))
    return mean, ERRORS * spread / math.sqrt(rows) + unit * size / rows
