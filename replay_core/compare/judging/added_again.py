"""An output that is off by a multiple of what another module puts out: added once for each rank, twice, not at all, or
scaled (a shared expert inside a sum over ranks, a residual, a branch).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import numpy as np

from replay_core import naming, pages
from replay_core.compare.judging.faults import Fault, whose
from replay_core.compare.judging.products import Array
from replay_core.compare.pairing.micro_batch_pair import Side
from replay_core.records import TensorRef

#: What part of what is off may be left; rows that say so, at least; and outputs that are tried, the last first.
_LEFT, _FEWEST, _TRIED = 0.02, 8, 24
_MOST = 1 << 22
KIND = "added again"
#: How near a whole number of times is.
_NEAR = 0.02


def explain(
    what: str, whole: TensorRef, laid: TensorRef, ranks: Sequence[int], parted: Sequence[int], other: Side
) -> Fault | None:
    """Of an output [..., H]. other: all that the other run has of the micro-batch."""
    if whole.shape != laid.shape or len(whole.shape) < 2 or whole.numel > _MOST or not parted:
        return None
    if not (whole.is_readable and laid.is_readable):
        return None
    there, here = (pages.array(ref).astype(np.float64).reshape(-1, whole.shape[-1]) for ref in (whole, laid))
    off = here - there
    if not np.isfinite(off).all():
        return None
    size_N = np.linalg.norm(off, axis=1)
    is_off_N = size_N > 1e-4 * size_N.max(initial=0.0)
    if is_off_N.sum() < _FEWEST:
        return None
    off = off[is_off_N]
    for name, ref in islice(_before(what, whole, other), _TRIED):
        one = pages.array(ref).astype(np.float64).reshape(there.shape)[is_off_N]
        size = float(np.square(one).sum())
        if not size or not np.isfinite(one).all() or _is_multiple(there[is_off_N], one):
            continue
        factor = float((one * off).sum() / size)
        if np.linalg.norm(off - factor * one) <= _LEFT * np.linalg.norm(off):
            return Fault(
                KIND, tuple(parted),
                f"{what} on {whose(parted)} is off by {factor:.4g} times what {naming.module_of(name)} puts out: "
                f"{_often(1 + factor, len(ranks))}",
                1 + factor,
            )  # fmt: skip
    return None


def _is_multiple(values_NH: Array, one_NH: Array) -> bool:
    """Whether an output is nothing but another one, as what a stage is given is what the one before put out: that is
    scaled as a whole, and added to nothing.
    """
    factor = float((one_NH * values_NH).sum() / np.square(one_NH).sum())
    return bool(np.linalg.norm(values_NH - factor * one_NH) <= _LEFT * np.linalg.norm(values_NH))


def _before(what: str, whole: TensorRef, other: Side) -> list[tuple[str, TensorRef]]:
    """Outputs of the other run that are as large, and stand before, the last first."""
    found: list[tuple[str, TensorRef]] = []
    for (name, _), (_, ref) in other.tensors.items():
        if name == what:
            break
        is_output = naming.is_module_tensor(name) and not name.startswith("grad.") and not naming.is_input(name)
        if is_output and ref.shape == whole.shape and ref.is_readable:
            found.append((name, ref))
    return found[::-1]


def _often(often: float, ranks: int) -> str:
    if abs(often) <= _NEAR:
        return "it is not added there"
    if abs(often - ranks) <= _NEAR * ranks:
        return f"it is added once for each of the {ranks} ranks (inside their sum), where it is due once"
    if often > 1 and abs(often - round(often)) <= _NEAR:
        return f"it is added {round(often)} times, where it is due once"
    return f"it is in it {often:.4g} times, where it is due once"
