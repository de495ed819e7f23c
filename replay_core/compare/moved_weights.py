"""What a module puts out whose weights are apart by what an optimizer's steps before left of noise.

Of inputs that agree, y = W x + c is off by (W_b - W_a) x, whatever it is computed with. Where a weight's steps went
another way at a few elements, for their gradients pointed nowhere, the channels of these stand out among all others.
What is left beside it is held to the limits of one that is computed of equal inputs.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replay_core import pages
from replay_core.compare.judging import limits
from replay_core.compare.judging.verdict import Context
from replay_core.compare.pairing.align import MicroBatchPair, Rowwise, ShapesDifferError
from replay_core.dtypes import EPS, coarsest, family
from replay_core.errors import DumpError
from replay_core.measure.statistics import as_reals
from replay_core.records import TensorRef

F64 = NDArray[np.float64]
Both = tuple[TensorRef, TensorRef]

#: Elements that are multiplied in memory; and fewer rows than these do not tell a view.
_MOST, _FEWEST = 1 << 24, 16
#: Times the typical column's that one may be off beside what the weights make.
_TYPICAL = limits.STANDING_OUT
#: Roundings by which a pair of channels that was turned is off what it was: its own, its angle's, a product's.
_ROUNDINGS = 4.0


def moved_by_its_weight(
    outputs: Both, inputs: Both, weight: Both, context: Context | None, micro_pair: MicroBatchPair
) -> str | None:
    """Why a module's output is off by what its weights are, [O, I] or [I, O]; None where it is off by something else.

    Raises:
        DumpError: the bytes of one cannot be read.
    """
    dtype = str(family(coarsest(outputs[0].dtype, outputs[1].dtype))) if context is None else context.row
    shape = weight[0].shape
    if dtype not in EPS or len(shape) != 2 or weight[1].shape != shape or not all(ref.is_readable for ref in weight):
        return None
    x, y = _rows(inputs, micro_pair), _rows(outputs, micro_pair)
    if x is None or y is None or len(x[0]) != len(y[0]):
        return None
    off_OI = np.asarray(pages.array(weight[1]), np.float64) - np.asarray(pages.array(weight[0]), np.float64)
    if off_OI.shape == (x[0].shape[1], y[0].shape[1]) != off_OI.shape[::-1]:
        off_OI = off_OI.T
    if off_OI.shape != (y[0].shape[1], x[0].shape[1]) or not np.isfinite(off_OI).all() or not off_OI.any():
        return None
    made_NO = x[0] @ off_OI.T
    left_NO, apart_NO = y[1] - y[0] - made_NO, y[1] - y[0]
    size = float(np.linalg.norm(y[0]))
    left, apart = float(np.linalg.norm(left_NO)), float(np.linalg.norm(apart_NO))
    worst = np.linalg.norm(left_NO, axis=1) > limits.WORST_ROW["local"][dtype] * np.linalg.norm(y[0], axis=1)
    limit = limits.PROJECTION.get(dtype, (limits.REL_L2["local"][dtype],))[0]
    if not size or left > limit * size or left >= apart or bool(worst.any()):
        return None
    columns = np.linalg.norm(left_NO, axis=0) / np.maximum(np.linalg.norm(y[0], axis=0), 1e-300)
    floor = limits.STANDING_OUT_FLOOR * limits.GAIN_FLOOR[dtype] / _TYPICAL
    if float(columns.max()) > _TYPICAL * max(float(np.median(columns)), floor):
        return None
    moved = int(np.count_nonzero(off_OI))
    return (
        f"off by what its weights are, which the steps before left apart at {moved} of {off_OI.size} elements; beside "
        f"that relative L2 {left / size:.2g} (up to {limit:.3g} allowed)"
    )


def is_view(own: Both, of: Both, micro_pair: MicroBatchPair) -> bool:
    """Whether a tensor has some channels of another, value by value and in both runs: a view of it, or a part; or some
    heads of it that were turned by their positions (RoPE), in b by the angles of a.

    Raises:
        DumpError: the bytes of one cannot be read.
    """
    mine, theirs = _rows(own, micro_pair), _rows(of, micro_pair)
    if mine is None or theirs is None or len(mine[0]) != len(theirs[0]) or len(mine[0]) < _FEWEST:
        return False
    for here, there in zip(mine, theirs, strict=True):
        known = {column.tobytes() for column in np.ascontiguousarray(there.T)}
        if any(column.tobytes() not in known for column in np.ascontiguousarray(here.T)):
            return _are_turned_alike(own[0].shape[-1], mine, theirs, EPS[str(family(coarsest(own[0].dtype)))])
    return True


def _are_turned_alike(head: int, mine: tuple[F64, F64], theirs: tuple[F64, F64], unit: float) -> bool:
    """Whether every head is some head of the others whose pairs of channels were turned, in b as in a, to a few of
    their roundings.
    """
    if head % 2 or any(one.shape[1] % head for one in (*mine, *theirs)):
        return False
    for pairs in (_halves, _neighbours):
        here, there = ([pairs(one.reshape(len(one), -1, head)) for one in both] for both in (mine, theirs))
        found = []
        for number in range(here[0].shape[1]):
            turned, size = here[0][:, number], np.abs(here[0][:, number])
            off = [float(np.linalg.norm(np.abs(there[0][:, one]) - size)) for one in range(there[0].shape[1])]
            nearest = int(np.argmin(off))
            if off[nearest] > _ROUNDINGS * unit * float(np.linalg.norm(size)):
                break
            before = there[0][:, nearest]
            angle = np.divide(turned, before, out=np.ones_like(turned), where=np.abs(before) > 0)
            angle /= np.maximum(np.abs(angle), 1e-300)
            left = here[1][:, number] - angle * there[1][:, nearest]
            found.append(bool((np.abs(left) <= _ROUNDINGS * unit * np.abs(there[1][:, nearest]) + 1e-30).all()))
        if len(found) == here[0].shape[1]:
            return all(found)
    return False


def _halves(heads_NHD: F64) -> NDArray[np.complex128]:
    half = heads_NHD.shape[-1] // 2
    return heads_NHD[..., :half] + 1j * heads_NHD[..., half:]


def _neighbours(heads_NHD: F64) -> NDArray[np.complex128]:
    return heads_NHD[..., ::2] + 1j * heads_NHD[..., 1::2]


def _rows(both: Both, micro_pair: MicroBatchPair) -> tuple[F64, F64] | None:
    """Every token's channels [N, C], of a and of b."""
    if not all(ref.is_readable and 0 < ref.numel <= _MOST and len(ref.shape) > 1 for ref in both):
        return None
    try:
        chunks: list[Any] = [as_reals(*chunk) for chunk in Rowwise(*both, micro_pair).counted()]
    except (ShapesDifferError, DumpError):
        return None
    if not chunks or any(one.ndim < 2 or one.shape != other.shape for one, other in chunks):
        return None
    rows = tuple(
        np.concatenate([np.asarray(chunk[of], np.float64).reshape(len(chunk[of]), -1) for chunk in chunks])
        for of in (0, 1)
    )
    is_finite = all(np.isfinite(one).all() for one in rows) and not math.isnan(float(rows[0].sum()))
    return (rows[0], rows[1]) if is_finite else None
