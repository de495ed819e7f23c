"""Biases that the loss does not see: a gradient that is what rounding leaves of zero, and what follows from it.

A bias is a column of its module's weight whose input is always 1: of y_t = W x_t + b,

    dL/dW_ij = sum_t dy_ti x_tj,        dL/db_i = sum_t dy_ti

over the same tokens. Both sums round alike, as their terms do and not as what is left of them. Where the terms cancel
(softmax does not see what all keys have in common, so a key's bias that no rotation follows has no gradient at all;
nor has one in front of a norm over the same channels) nothing is left but the rounding, in both runs another one: its
relative difference says nothing. It is held to what the row of the weight's gradient, which agrees, is off by.

That row grows with x, and the bias' sum does not: of inputs of rms 30 a row may be off by as much as a whole bias that
cancels nothing. So both runs' must be next to nothing too, beside the column that rounding is a part of; or, where
only a part of it cancels, off by little of itself. A gradient that is 0 in one run alone was not made there.

Such a bias goes where its optimizer's noise takes it. What the module puts out, x W^T + b, is then off by the
difference of the biases in every row, and by no more than any other output beside that.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replay_core import pages
from replay_core.compare.facing import Copies, FacingTensors, of_rank
from replay_core.compare.judging import limits
from replay_core.compare.judging.verdict import Context
from replay_core.compare.pairing.align import MicroBatchPair, Rowwise
from replay_core.dtypes import EPS, coarsest, family
from replay_core.measure.statistics import as_reals
from replay_core.records import TensorRef

#: Times the rms of what its row of the weight's gradient is off by that a bias' gradient may be off, no bias of 38
#: healthy pairs whose gradient cancels was past 2.5 (docs/evidence.md, "biases").
_TIMES = 4.0
#: What rounding leaves of a sum, in a column of its weight's gradient times eps. The greatest of 268 healthy gradients
#: of keys' biases was 60 in float32, whose sums are rounded in these digits (all but one model's below 11), of 82 in
#: bfloat16 0.6. Mean-free inputs of rms 40 make 3 of a bfloat16 sum that cancels nothing: past that nobody can tell.
_LEFT = {"float64": 1e3, "float32": 1e3, "float16": 3.0, "bfloat16": 3.0, "float8": 3.0}
#: Times the table's limit that a bias' gradient which is more than that may be off.
_PARTLY = 3.0
#: One factor is no noise: it explains so much of the difference, and leaves more than next to nothing.
_FACTOR_SHARE, _FACTOR_LEAVES = 0.95, 0.2
#: Fewer inputs do not tell what a row is off by.
_FEWEST_INPUTS = 8

F64 = NDArray[np.float64]


def noise_beside_its_weight(
    name: str, stage: str, own: FacingTensors, micro_pair: MicroBatchPair, computed: str = "float64"
) -> str | None:
    """Why the gradient of a bias (canonical `name`) is no further off than its weight's lets it be; None where it is,
    or nobody knows. computed: the dtype that its terms were rounded to, which may be coarser than the stored one.

    Raises:
        DumpError: the bytes of one cannot be read.
    """
    module = name.removesuffix(".bias")
    weight = FacingTensors.named(f"{module}.weight", stage, micro_pair) if module != name else None
    if weight is None:
        return None
    of_weight, said = weight.copies(), None
    for rank, pair in own.copies().items():
        beside = of_rank(of_weight, rank)
        if beside is None or (found := _is_noise(pair, beside, computed)) is None:
            return None
        said = said or found
    return said


def _is_noise(bias: tuple[TensorRef, TensorRef], weight: tuple[TensorRef, TensorRef], computed: str) -> str | None:
    dtype = family(coarsest(bias[0].dtype, bias[1].dtype, weight[0].dtype, weight[1].dtype, computed))
    of_bias, of_weight = bias[0].shape, weight[0].shape
    if dtype not in EPS or len(of_bias) != 1 or of_bias != bias[1].shape or of_weight != weight[1].shape:
        return None
    if len(of_weight) != 2 or of_bias[0] not in of_weight or _inputs(of_weight, of_bias[0]) < _FEWEST_INPUTS:
        return None
    if not all(ref.is_readable for ref in (*bias, *weight)):
        return None
    a, b = (np.asarray(pages.array(ref), np.float64) for ref in bias)
    off_2, size_2 = np.zeros(of_bias[0]), np.zeros(of_bias[0])
    for start in range(0, of_bias[0], rows := max(1, (1 << 20) // _inputs(of_weight, of_bias[0]))):
        w_a, w_b = (_of_outputs(ref, of_bias[0], slice(start, start + rows)) for ref in weight)
        off_2[start : start + rows] = np.square(w_b - w_a).mean(axis=1)
        size_2[start : start + rows] = np.square(w_a).mean(axis=1)
    if not all(np.isfinite(one).all() for one in (a, b, off_2, size_2)):
        return None
    if not size_2.any() or off_2.sum() > limits.REL_L2["gradient"][dtype] ** 2 * size_2.sum():
        return None  # the weight's own is another
    off = b - a
    unit = np.sqrt(np.maximum(off_2, (EPS[dtype] / 2) ** 2 * size_2))
    if not bool((np.abs(off) <= _TIMES * unit).all()) or _is_factor(a, off):
        return None
    column = math.sqrt(float(size_2.sum()))
    of_a, of_b, apart = (float(np.linalg.norm(one)) / column for one in (a, b, off))
    if not of_a or not of_b:
        return None
    as_rows = f"no more than {_TIMES:g} times what the rows of its weight's gradient, which agrees, are off by"
    if max(of_a, of_b) <= _LEFT[dtype] * EPS[dtype]:
        return (
            f"what rounding leaves of a sum that cancels: the bias' gradient is {of_a:.2g} and {of_b:.2g} of a column "
            f"of its weight's (a bias is a column whose input is 1), and off by {apart:.2g} of one, {as_rows}"
        )
    if apart > _PARTLY * limits.REL_L2["gradient"][dtype] * min(of_a, of_b):
        return None
    return (
        f"a sum that cancels in part: the bias' gradient is {of_a:.2g} of a column of its weight's (a bias is a column "
        f"whose input is 1), and off by {apart / of_a:.2g} of itself, {as_rows}"
    )


def rounding_alone(
    bias: tuple[TensorRef, TensorRef], weight: tuple[TensorRef, TensorRef], computed: str = "float64"
) -> NDArray[np.bool_] | None:
    """Of each element of a bias whether its gradient is what rounding leaves of a sum that cancels, in both runs, [O];
    None where nobody knows. bias, weight: the gradients of a module's; computed: what their terms were rounded to.

    Raises:
        DumpError: the bytes of one cannot be read.
    """
    dtype = family(coarsest(bias[0].dtype, bias[1].dtype, weight[0].dtype, weight[1].dtype, computed))
    (rows,) = bias[0].shape if len(bias[0].shape) == 1 else (0,)
    is_one = bias[0].shape == bias[1].shape and weight[0].shape == weight[1].shape
    if dtype not in EPS or not is_one or len(weight[0].shape) != 2 or rows not in weight[0].shape or not rows:
        return None
    inputs = _inputs(weight[0].shape, rows)
    if inputs < _FEWEST_INPUTS or not all(ref.is_readable for ref in (*bias, *weight)):
        return None
    a, b = (np.asarray(pages.array(ref), np.float64) for ref in bias)
    size_2 = np.zeros(rows)
    for start in range(0, rows, step := max(1, (1 << 20) // inputs)):
        here = slice(start, start + step)
        both = (_of_outputs(ref, rows, here) for ref in weight)
        size_2[here] = np.min([np.square(one).mean(axis=1) for one in both], axis=0)
    found: NDArray[np.bool_] = np.maximum(np.abs(a), np.abs(b)) <= _LEFT[dtype] * EPS[dtype] * np.sqrt(size_2)
    found &= size_2 > 0
    # What rounding leaves of one element may be 0; of all of them it is not, and such a gradient was never made.
    return found if a[found].any() and b[found].any() else np.zeros_like(found)


def _inputs(shape: tuple[int, ...], outputs: int) -> int:
    return shape[1] if shape[0] == outputs else shape[0]


def _of_outputs(weight: TensorRef, outputs: int, which: slice) -> F64:
    """Rows [output, input] of a weight's gradient, which may be stored the other way round (GPT-2's)."""
    values = pages.array(weight)
    return np.asarray(values[which] if weight.shape[0] == outputs else values[:, which].T, np.float64)


def _is_factor(a: F64, off: F64) -> bool:
    """Whether one gradient is a multiple of the other: twice, half, the other way."""
    along, size, apart = float(a @ off), float(a @ a), float(off @ off)
    if a.size < limits.NARROW_ROW or not size or not apart:
        return False
    return along**2 >= _FACTOR_SHARE * size * apart and abs(1 + along / size) > _FACTOR_LEAVES


def moved_by_its_bias(own: Copies, biases: Copies, context: Context | None, micro_pair: MicroBatchPair) -> str | None:
    """Why what a module puts out is off by no more than its bias is; None where it is off by something else.

    biases: of the weights it was computed with.

    Raises:
        DumpError: the bytes of one cannot be read.
    """
    pair, both = biases.get(None), own.get(None)
    if pair is None or both is None or len(biases) > 1 or len(own) > 1 or pair[0].shape != pair[1].shape:
        return None
    dtype = family(coarsest(both[0].dtype, both[1].dtype)) if context is None else context.row
    if not all(ref.is_readable and len(ref.shape) == 1 for ref in pair) or dtype not in EPS:
        return None
    shift_C = np.asarray(pages.array(pair[1]), np.float64) - np.asarray(pages.array(pair[0]), np.float64)
    left = left_beside(both, shift_C, context, str(dtype), micro_pair)
    if left is None:
        return None
    return f"off in every row by what its bias is, whose steps are explained; beside that {left}"


def left_beside(
    outputs: tuple[TensorRef, TensorRef], shift_C: F64, context: Context | None, dtype: str, micro_pair: MicroBatchPair
) -> str | None:
    """How far b's rows are off a's beside one constant for each channel [C]; None where the table does not allow it.

    Raises:
        DumpError: the bytes of one cannot be read.
    """
    left_2, size_2, worst = 0.0, 0.0, 0.0
    for chunk in Rowwise(*outputs, micro_pair).counted():
        a_RC, b_RC = as_reals(*chunk)
        if a_RC.shape[1] != shift_C.size or a_RC.shape != b_RC.shape:
            return None
        rest: Any = np.square(b_RC - a_RC - shift_C).sum(axis=1)
        of_a: Any = np.square(a_RC).sum(axis=1)
        left_2, size_2 = left_2 + float(rest.sum()), size_2 + float(of_a.sum())
        each = np.divide(rest, of_a, out=np.where(rest > 0, np.inf, 0.0), where=of_a > 0)
        worst = max(worst, float(each.max(initial=0.0)))
    column = "end-to-end" if context is None else context.column
    limit, worst_limit = limits.REL_L2[column][dtype], limits.WORST_ROW[column][dtype]
    if context is not None:
        limit, worst_limit = context.widened("rel_l2", limit), context.widened("worst_row", worst_limit)
    if not size_2 or not math.isfinite(left_2) or left_2 > limit**2 * size_2 or worst > worst_limit**2:
        return None
    return f"relative L2 {math.sqrt(left_2 / size_2):.2g} (up to {limit:.3g} allowed)"
