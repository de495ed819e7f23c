"""Whether gradients that differ are rounded otherwise and nothing more: a finer dtype tells how far each is off.

A gradient is a sum over tokens that may cancel to next to nothing (of keys most of all: a softmax does not feel what
moves all its scores), and what is left of it is as far off as its terms rounded. So no table says how far two right
ones may be apart; the same gradient in a finer dtype does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replay_core import pages
from replay_core.records import Run, TensorRef
from replay_core.replay.causes import MOST, WORST

Floats = NDArray[np.float64]


@dataclass(slots=True)
class Rounded:
    """How far the gradient `name` of each row alone and of a cell is from that in the finer dtype, relative L2."""

    name: str
    reference: float
    cell: float
    is_rounding: bool


def of_gradients(truth: Run, reference: Run, cell: Run, names: Iterable[str]) -> list[Rounded]:
    """The named gradients of three dumps held to one another. A cell's is rounded if it is at most `MOST` times as far
    from the truth as each row alone's, and no row of it more than `WORST` times as far as that row, or the typical one;
    one that a dump does not hold in that shape is not.
    """
    refs = [_gradients(run) for run in (truth, reference, cell)]
    found = []
    for name in names:
        shapes = {one[name].shape if name in one else None for one in refs}
        if len(shapes) != 1 or None in shapes:
            found.append(Rounded(name, float("nan"), float("nan"), False))
            continue
        true, alone, own = (_matrix(one[name]) for one in refs)
        off_alone, off_own = _by_row(alone - true), _by_row(own - true)
        typical = float(np.sqrt((off_alone**2).mean()))
        whole = float(np.linalg.norm(off_own)) <= MOST * float(np.linalg.norm(off_alone))
        rows = bool((off_own <= WORST * np.maximum(off_alone, typical)).all())
        size = float(np.linalg.norm(true)) or float("inf")
        found.append(
            Rounded(
                name, float(np.linalg.norm(off_alone)) / size, float(np.linalg.norm(off_own)) / size, whole and rows
            )
        )
    return found


def _gradients(run: Run) -> dict[str, TensorRef]:
    return {ref.canonical or ref.name: ref for record in run.records for ref in record.tensors()}


def _matrix(ref: TensorRef) -> Floats:
    values: NDArray[Any] = np.asarray(pages.array(ref)).astype(np.float64)
    return values.reshape(values.shape[0], -1) if values.ndim > 1 else values.reshape(1, -1)


def _by_row(values: Floats) -> Floats:
    return np.asarray(np.linalg.norm(values, axis=1))
