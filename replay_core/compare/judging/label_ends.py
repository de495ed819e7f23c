"""What is said of each token's next one and is off just where a rank's stretch of the sequence ends: labels that were
shifted by a token after the sequence was cut, within each rank's own tokens, where the whole is to be shifted.

The last token of a stretch is then held against the first of another of the rank's stretches (zigzag), or against none,
and no other token is.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from replay_core import pages
from replay_core.compare.judging import dealt
from replay_core.compare.judging.faults import Fault, whose
from replay_core.compare.pairing.dims import Stretch
from replay_core.compare.pairing.ranks import HeldByRanks, standing_for
from replay_core.records import TensorRef

#: A token is right where it is off by this part of what the worst one is off.
_RIGHT = 0.03
#: So many tokens are right for each stretch's end.
_RIGHT_ONES = 2
_MOST = 1 << 24


def explain(what: str, whole: TensorRef, held: HeldByRanks, every: Sequence[int]) -> Fault | None:
    """what, [sample, token], is about the next token each; every: all ranks, of which some may share a sequence.

    Raises:
        DumpError: the bytes of one cannot be read.
    """
    laid = standing_for(held) if held.is_cut else held.parts[0]
    if len(whole.shape) != 2 or whole.numel > _MOST or laid.shape != whole.shape or len(every) < 2:
        return None
    if not whole.is_readable or not laid.is_readable:
        return None
    off_BS = np.abs(pages.array(laid).astype(np.float64) - pages.array(whole).astype(np.float64))
    if not np.isfinite(off_BS).all() or not off_BS.any():
        return None
    off_S = off_BS.max(0)
    is_off_S = off_S > _RIGHT * off_S.max()
    count = off_S.size
    # Where the first token's is nothing, each token's stands at itself, not at the one before, which it is made at.
    at_itself = not any(pages.array(ref)[:, 0].any() for ref in (whole, laid))
    for tokens in (count,) if at_itself else (count, count + 1):
        if held.is_cut and held.axis == 1:
            ways = [held.stretches] if tokens == count else []
        else:
            ways = list(dealt.ways(len(every), tokens))
        for way in ways:
            ends = {at for own in way for at in _ends(own) if at < tokens - 1}
            is_end_S = np.isin(np.arange(count) - at_itself, [*ends])
            # What the sequence's last token is held against says nothing.
            asked_S = np.arange(count) < tokens - 1 + at_itself
            of_ends = is_off_S & is_end_S
            if not of_ends.any() or (is_off_S & ~is_end_S & asked_S).any():
                continue
            if 2 * of_ends.sum() < len(ends) or (~is_off_S & asked_S).sum() < _RIGHT_ONES * len(ends):
                continue
            places = [int(at) - at_itself for at in np.flatnonzero(of_ends)]
            ranks = tuple(
                rank for rank, own in zip(held.ranks, way, strict=False) if {*_ends(own)} & {*places}
            ) or held.ranks  # fmt: skip
            recorded = ", recorded at the token after it" if at_itself else ""
            return Fault(
                "boundary label", ranks,
                f"{what} is off at the last token of a rank's stretch of the sequence alone (position"
                f"{'s' * (len(places) > 1)} {', '.join(map(str, places[:6]))}, on {whose(ranks)}{recorded}), and right "
                "at all others: what comes next to that token stands in another stretch, and the label there is "
                "another token, or none: labels were shifted after the sequence was cut, within each rank's own tokens "
                "(context parallelism), where the whole is to be shifted",
            )  # fmt: skip
    return None


def _ends(stretches: Sequence[Stretch]) -> list[int]:
    """Where a rank's tokens end that follow each other."""
    begun = {start for start, _ in stretches}
    return [start + length - 1 for start, length in stretches if start + length not in begun]
