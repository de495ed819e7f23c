"""What attention puts out head by head, as the projection behind it takes it: all heads of a token one after the other.

A core of attention that is a module of its own returns [sample, position, head, width], or [sample, head, position,
width] where it puts heads first.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from replay_core import pages
from replay_core.compare.pairing.ranks import HeldByRanks, standing_for
from replay_core.records import Inline, Parts, TensorRef

#: Elements that are turned in memory, where heads stand before positions.
_MOST = 1 << 23


def joined(whole: TensorRef, held: HeldByRanks, given: Sequence[HeldByRanks]) -> tuple[TensorRef, HeldByRanks]:
    """Both with the heads of a token joined [sample, position, head x width]; as they are where they have no heads, or
    where these are not told from positions.

    given: what went into attention, [sample, position, ...].
    """
    one = given[-1] if given else None
    if one is None or len(whole.shape) != 4 or any(len(ref.shape) != 4 for ref in held.parts):
        return whole, held
    tokens = standing_for(one).shape[:2]
    laid = standing_for(held)
    if not (laid.shape == whole.shape and laid.is_readable and whole.is_readable) or whole.numel > _MOST:
        return whole, held
    firsts = [place for place in (1, 2) if (whole.shape[0], whole.shape[place]) == tokens]
    if one.axis == 1 and held.axis in firsts:
        firsts = [held.axis]  # cut as its tokens are
    if not firsts:
        return whole, held
    at = firsts[0]
    parts = tuple(_joined(ref, at) for ref in held.parts)
    if held.axis in (None, 0, at):
        return _joined(whole, at), HeldByRanks(held.ranks, parts, 1 if held.axis == at else held.axis, held.stretches)
    if held.axis == 3:
        return whole, held
    # Every rank has some of the heads: what stands for all is whole on each.
    return _joined(whole, at), HeldByRanks(held.ranks, (_joined(laid, at),) * len(held.ranks))


def _joined(ref: TensorRef, at: int) -> TensorRef:
    """at: the axis of positions, 1 or 2."""
    heads, tokens = ref.shape[3 - at], ref.shape[at]
    shape = (ref.shape[0], tokens, heads * ref.shape[3])
    if at == 1:
        return ref.with_(shape=shape, source=Parts((ref,)), digest=None)
    turned = np.ascontiguousarray(pages.array(ref).transpose(0, 2, 1, 3))
    return ref.with_(shape=shape, source=Inline(turned.tobytes()), digest=None)
