"""Whether gradients that differ are rounded otherwise and nothing more: a finer dtype tells how far each is off.

A gradient is a sum over tokens that may cancel to next to nothing (of keys most of all: a softmax does not feel what
moves all its scores), and what is left of it is as far off as its terms rounded. So no table says how far two right
ones may be apart; the same gradient in a finer dtype does.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from replay_core import naming, pages
from replay_core.compare.judging.limits import NARROW_ROW
from replay_core.records import Run, TensorRef
from replay_core.replay.causes import WORST

Floats = NDArray[np.float64]
#: The last place of bfloat16, and what adding up leaves of float32's.
_HALF, _SINGLE = 2.0**-8, 2.0**-18


#: A cell's gradient may be this many times as far from the truth as each row alone's and is rounded otherwise: healthy
#: ones are 1.1 times as far. One of few numbers may hit the truth by luck.
_MOST, _MOST_OF_FEW, _FEW = 1.5, 3.0, 256
#: It may be the truth times a factor that is off by so much, by so many times what each row alone's is, or by so much
#: of its distance: noise has no direction, and of many numbers next to nothing along any one.
_FACTOR, _TIMES, _ALONG = 0.016, 3.0, 0.25
#: What is summed over tokens in a half dtype and kept in one (torch's LayerNorm on CPUs sums a bias so) may be so far
#: off, and a gradient that another kernel rounds this many times as far as each row alone's, with its rows so many
#: times as far as its typical one (on a GPU, of queries and keys: 7 and 6.4 times), if no more of that than so much is
#: left where the same cell computes in the finer dtype. Of float32 float64 leaves more: its norms are in float32, too.
#: A mixture sends a token that is near a tie elsewhere, and a row of its gradient with it: where each row alone has
#: such a row, the cell may have one that stands out twice as far.
_SUMMED, _OTHER_KERNEL, _ROWS = 0.125, 8.0, 8.0
_LEFT, _LEFT_OF_SINGLE = 0.02, 0.25
_TWICE = 2.0
#: Numbers that are held to the truth at once.
_AT_ONCE = 1 << 22


class HeldGradient(Struct):
    """How far the gradient `name` of each row alone and of a cell is from that in the finer dtype, relative L2; of one
    that is further off, and may yet be rounded, also how far the cell in the finer dtype is.
    """

    name: str
    reference: float
    cell: float
    is_rounding: bool
    may_be_rounding: bool = False
    finer: float | None = None


def of_gradients(truth: Run, reference: Run, cell: Run, names: Iterable[str], *, half: bool) -> list[HeldGradient]:
    """The named gradients, or losses, of three dumps held to one another; `half`: the latter two are of a half dtype.

    A cell's is rounded if it is about as far from the truth as each row alone's is, if no more of that is a factor, if
    no row of it is more than `WORST` times as far as that row or the typical one, and if what is zero in both others (a
    row of an embedding that no token used) is zero in it and nothing else is. What a dump does not hold in that shape
    is not rounded.
    """
    refs = [_gradients(run) for run in (truth, reference, cell)]
    found = []
    for name in names:
        shapes = {one[name].shape if name in one else None for one in refs}
        if len(shapes) != 1 or None in shapes:
            found.append(HeldGradient(name, float("nan"), float("nan"), False))
            continue
        held = _held(name, [_matrix(one[name]) for one in refs], _HALF if half else _SINGLE)
        is_vector = len(refs[0][name].shape) == 1 and naming.meaning(name).kind == "gradient"
        held.may_be_rounding |= half and not held.is_rounding and is_vector and 0 < held.cell <= _SUMMED
        found.append(held)
    return found


def of_the_cell(truth: Run, finer: Run, found: Iterable[HeldGradient], *, half: bool) -> None:
    """Decide those that `may_be_rounding`: by the same cell's gradients in the finer dtype."""
    refs = [_gradients(run) for run in (truth, finer)]
    for one in found:
        if one.may_be_rounding and one.name in refs[1]:
            true, own = (_matrix(side[one.name]).astype(np.float64) for side in refs)
            if true.shape == own.shape:
                one.finer = float(np.linalg.norm(own - true) / np.linalg.norm(true))
                one.is_rounding = one.finer <= (_LEFT if half else _LEFT_OF_SINGLE) * one.cell


def _held(name: str, values: list[NDArray[Any]], last_place: float) -> HeldGradient:
    true = values[0]
    rows, width = true.shape
    step = max(1, _AT_ONCE // width)
    sums = [_OfRows.of(*(one[at : at + step].astype(np.float64) for one in values)) for at in range(0, rows, step)]
    off_alone, off_own = (np.concatenate([getattr(one, name) for one in sums]) for name in ("off_alone", "off_own"))
    size = float(np.sqrt(sum(one.true2 for one in sums)))
    whole_alone, whole_own = float(np.linalg.norm(off_alone)), float(np.linalg.norm(off_own))
    least = last_place * size if true.size == 1 else 0.0
    typical = max(float(np.sqrt((off_alone**2).mean())), least)
    most = _MOST if true.size >= _FEW else _MOST_OF_FEW
    is_whole = not any(one.is_lost for one in sums)
    is_rounding = (
        is_whole
        and whole_own <= most * max(whole_alone, least)
        and bool((off_own <= WORST * np.maximum(off_alone, typical)).all())
    )
    is_spread = _furthest_row(off_own) <= max(_ROWS, _TWICE * _furthest_row(off_alone))
    may_be = is_whole and is_spread and whole_own <= _OTHER_KERNEL * whole_alone
    if size and true.size >= _FEW:
        along_alone, along_own = (abs(sum(getattr(one, name) for one in sums)) / size**2
                                  for name in ("along_alone", "along_own"))  # fmt: skip
        least = max(_FACTOR, _TIMES * along_alone)
        is_rounding &= along_own <= max(least, _ALONG * whole_alone / size)
        may_be &= along_own <= max(least, _ALONG * whole_own / size)
    size = size or float("inf")
    return HeldGradient(name, whole_alone / size, whole_own / size, is_rounding, may_be and not is_rounding)


def _furthest_row(off_R: Floats) -> float:
    """How many times as far off as the typical one of the others a row is."""
    if off_R.size == 1:
        return 1.0
    others_R = np.sqrt(((off_R**2).sum() - off_R**2).clip(min=0) / (off_R.size - 1))
    far_R = np.divide(off_R, others_R, out=np.full_like(off_R, np.inf), where=others_R > 0)
    return float(np.where(off_R > 0, far_R, 0.0).max())


class _OfRows(Struct):
    """Of some rows: how far each is off the truth, what of that is along it, and whether zeros are where they must."""

    off_alone: Floats
    off_own: Floats
    true2: float
    along_alone: float
    along_own: float
    is_lost: bool

    @classmethod
    def of(cls, true: Floats, alone: Floats, own: Floats) -> _OfRows:
        zero_alone, zero_own = ~(true.any(1) | alone.any(1)), ~own.any(1)
        lost = zero_own & alone.any(1) if true.shape[1] >= NARROW_ROW else np.zeros_like(zero_own)
        alone, own = alone - true, own - true
        return cls(
            np.linalg.norm(alone, axis=1),
            np.linalg.norm(own, axis=1),
            float((true**2).sum()),
            float((alone * true).sum()),
            float((own * true).sum()),
            bool((lost | (zero_alone & ~zero_own)).any()),
        )


def _gradients(run: Run) -> dict[str, TensorRef]:
    return {ref.canonical or ref.name: ref for record in run.records for ref in record.tensors()}


def _matrix(ref: TensorRef) -> NDArray[Any]:
    values: NDArray[Any] = np.asarray(pages.array(ref))
    return values.reshape(values.shape[0], -1) if values.ndim > 1 else values.reshape(1, -1)
