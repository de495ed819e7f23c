"""Attention at the first token of a sequence, which sees itself alone: what comes out is its own value, whatever
queries, keys, positions and the scale are. So the layer behind says of the values what no other token does.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from replay_core import pages
from replay_core.compare.judging.faults import Fault, whose
from replay_core.compare.judging.products import Array
from replay_core.compare.pairing.ranks import HeldByRanks, standing_for
from replay_core.measure.precision import as_bfloat16
from replay_core.records import TensorRef

#: How far, of its norm, the layer's output may be from what it makes of the values (its weight may have been recorded
#: after its step); and what part of the difference may be left.
_NEAR, _LEFT = 0.05, 0.1
_MOST = 1 << 24
#: Numbers that are compared, at least.
_FEWEST = 32


def of_values(
    what: str, whole: TensorRef, output: HeldByRanks, slices: Sequence[HeldByRanks], parted: Sequence[int],
    weight_HD: Array, bias_H: Array,
) -> Fault | None:  # fmt: skip
    """Whether values that are right were rounded to a half precision before attention had them.

    whole, output: of the layer behind attention [sample, position, H], of the other run and of the ranks. slices: what
    ranks held of the tokens just before, the values among them.
    """
    if len(whole.shape) != 3 or whole.dtype != "float32" or output.axis not in (None, 1) or whole.numel > _MOST:
        return None
    laid = standing_for(output) if output.is_cut else output.parts[0]
    if laid.shape != whole.shape or not all(ref.is_readable for ref in (whole, laid)):
        return None
    there_BH, here_BH = (pages.array(ref)[:, 0].astype(np.float64) for ref in (whole, laid))
    off_BH = here_BH - there_BH
    off = float(np.linalg.norm(off_BH))
    if not off or not np.isfinite(off) or off_BH.size < _FEWEST:
        return None
    width = weight_HD.shape[1]
    for held in reversed(slices):
        values = standing_for(held)
        if values.shape[:-1] != whole.shape[:-1] or values.dtype != "float32" or width % values.shape[-1]:
            continue
        first = pages.array(values)[:, 0]
        for head in _heads(values.shape[-1], width):
            made_BH = _spread(first, head, width) @ weight_HD.T + bias_H
            if np.linalg.norm(made_BH - there_BH) > _NEAR * np.linalg.norm(there_BH):
                continue
            for dtype, made in (("bfloat16", as_bfloat16(first)), ("float16", first.astype(np.float16))):
                less = made.astype(np.float64) - first.astype(np.float64)
                if np.linalg.norm(_spread(less, head, width) @ weight_HD.T - off_BH) <= _LEFT * off:
                    return Fault(
                        "rounded", tuple(parted),
                        f"{what} of {whose(parted)} is off, and at the first token of each sequence, which attends to "
                        f"itself alone, by just what rounding {held.parts[0].name} to {dtype} makes: the values (and "
                        f"the keys that go with them) are handed over in {dtype} (half precision)",
                    )  # fmt: skip
    return None


def _heads(own: int, width: int) -> list[int]:
    """How wide a head may be, where several queries share one of the values."""
    return [own] if own == width else [size for size in range(1, own + 1) if own % size == 0]


def _spread(values_BD: Array, head: int, width: int) -> Array:
    count, own = values_BD.shape
    heads = values_BD.astype(np.float64).reshape(count, own // head, head)
    return np.repeat(heads, width // own, axis=1).reshape(count, width)
