"""Gradients that one run recorded before they were clipped and the other behind a clipping of its trainer's own.

A recorder sees torch's `clip_grad_norm_` and keeps what was there before it, with the norm after it beside
(`clipped_grad_norm`). A trainer that clips by a function of its own (Megatron's, one over mesh groups) has clipped by
the time its optimizer steps. All its gradients are then off by the factor that the other run's norms say.
"""

from __future__ import annotations

import numpy as np

from replay_core import pages
from replay_core.compare.pairing.micro_batch_pair import MicroBatchPair, Side
from replay_core.errors import DumpError
from replay_core.records import TensorRef

#: How near a factor is to the one that the norms say, and to 1 where nothing is clipped.
_NEAR = 1e-3
#: Gradients that are asked, and the elements that one of them has at most.
_ASKED, _MOST = 3, 1 << 20


def clipped_alone(micro_pair: MicroBatchPair) -> tuple[str, float] | None:
    """Which run's gradients are clipped as they were recorded, and what they were multiplied by; None: neither's, or
    both runs say how they clip, or what is between them is another factor.
    """
    sides = {"a": micro_pair.a, "b": micro_pair.b}
    said = {which: _factor(side) for which, side in sides.items()}
    told = [which for which, one in said.items() if one is not None]
    if len(told) != 1 or (factor := said[told[0]]) is None or factor > 1 - 2 * _NEAR:
        return None
    before, (which,) = sides[told[0]], [one for one in sides if one != told[0]]
    found = []
    for (name, stage), (_, ref) in before.tensors.items():
        if not name.startswith("grad.") or stage != "gradient" or ref.numel > _MOST or ref.numel < 2:
            continue
        other = sides[which].tensors.get((name, stage))
        if other is not None and other[1].shape == ref.shape and (between := _between(ref, other[1])) is not None:
            found.append(between)
        if len(found) == _ASKED:
            break
    if not found or any(abs(one - factor) > _NEAR * factor for one in found):
        return None
    return which, factor


def _factor(side: Side) -> float | None:
    """What clipping multiplied a run's gradients by, as its norms say."""
    norms = []
    for name in ("clipped_grad_norm", "grad_norm"):
        ref = side.find(name)
        if ref is None or not ref.is_readable or ref.numel != 1:
            return None
        norms.append(float(pages.array(ref).reshape(())))
    return norms[0] / norms[1] if norms[1] > 0 and np.isfinite(norms).all() else None


def _between(before: TensorRef, after: TensorRef) -> float | None:
    try:
        x, y = (pages.array(ref).astype(np.float64).reshape(-1) for ref in (before, after))
    except DumpError:
        return None
    square = float(x @ x)
    if not square or not np.isfinite(square):
        return None
    factor = float(x @ y) / square
    return factor if np.linalg.norm(y - factor * x) <= 0.05 * abs(factor) * square**0.5 else None
