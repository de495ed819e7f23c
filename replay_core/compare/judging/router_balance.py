"""Whether ranks balanced a router over their own tokens alone: told by its gradient, with no loss recorded.

The balancing loss of a layer of experts (Fedus et al. 2021, eq. 4) is  c E sum_e f_e P_e,  f_e the share of all tokens
that expert e was given, P_e the mean of the router's probabilities p_te. Only P has a gradient, so where each rank r
counts f^r over its own tokens, the router's weight W (scores W x_t) is off by

    dW  =  c sum_r n_r sum_t [ (diag(p_t) - p_t p_t^T) (f^r - f) ] x_t^T / N_r

(n_r: the rank's part of the tokens). All but c is recorded: one number against E x H.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from replay_core import pages
from replay_core.compare.judging.faults import Fault, whose
from replay_core.compare.judging.products import Array
from replay_core.compare.pairing.ranks import HeldByRanks
from replay_core.records import TensorRef

#: What part of the difference c may leave, of float32 and of halves; how many experts a token may be sent to.
_LEFT, _MOST_CHOSEN = (0.02, 0.1), 8
_MOST = 1 << 22


def of_own_tokens(
    what: str, whole: TensorRef, held: HeldByRanks, scores: HeldByRanks, inputs: Sequence[HeldByRanks]
) -> Fault | None:
    """held: the gradient of a router's weight [expert, hidden], one and the same on all ranks; whole: the other run's.
    scores: what the router said of each rank's tokens [..., expert]; inputs: what may have gone into it.

    Raises:
        DumpError: the bytes of one cannot be read.
    """
    ours = held.parts[0]
    if (
        held.is_cut
        or len(whole.shape) != 2
        or ours.shape != whole.shape
        or max(whole.numel, scores.parts[0].numel) > _MOST
    ):
        return None
    experts, hidden = whole.shape
    if len(scores.parts) < 2 or any(ref.shape[-1] != experts or not ref.is_readable for ref in scores.parts):
        return None
    off = pages.array(ours).astype(np.float64) - pages.array(whole).astype(np.float64)
    size = float(np.linalg.norm(off))
    by_place = {stretches: number for number, stretches in reversed(list(enumerate(scores.stretches)))}
    # A rank that was given no tokens counts none.
    own = sorted(number for number in by_place.values() if scores.parts[number].numel)
    said = [pages.array(scores.parts[number]).astype(np.float64).reshape(-1, experts) for number in own]
    if not size or not np.isfinite(size) or len(own) < 2 or not all(np.isfinite(one).all() for one in said):
        return None
    is_half = {"bfloat16", "float16"} & {ref.dtype for ref in (whole, ours, *scores.parts)}
    for given in inputs:
        if given.ranks != scores.ranks or given.parts[0].shape[-1] != hidden or given.parts[0].numel > _MOST:
            continue
        rows = [pages.array(given.parts[number]).astype(np.float64).reshape(-1, hidden) for number in own]
        if [len(one) for one in rows] != [len(one) for one in said] or not all(np.isfinite(one).all() for one in rows):
            continue
        for chosen in range(1, min(_MOST_CHOSEN, experts - 1) + 1):
            made = _off_by(said, rows, chosen)
            square = float(np.square(made).sum())
            factor = float((made * off).sum()) / square if square else 0.0
            if factor > 0 and np.linalg.norm(off - factor * made) <= _LEFT[bool(is_half)] * size:
                return Fault(
                    "own balance", scores.ranks,
                    f"{what} is off by what balancing its experts over each rank's own tokens makes of it, in the "
                    f"place of all tokens' (made again from the router's scores, {chosen} experts a token, to "
                    f"{float(np.linalg.norm(off - factor * made)) / size:.1g} of it): {whose(scores.ranks)} count the "
                    "tokens of each expert (the auxiliary loss) alone",
                )  # fmt: skip
    return None


def _off_by(said: Sequence[Array], rows: Sequence[Array], chosen: int) -> Array:
    """By what the gradient is off, [expert, hidden], but for c."""
    tokens = sum(map(len, said))
    shares = [_given(one, chosen) for one in said]
    every = np.sum([share * len(one) for share, one in zip(shares, said, strict=True)], axis=0) / tokens
    made = np.zeros((said[0].shape[1], rows[0].shape[1]))
    for one, x, share in zip(said, rows, shares, strict=True):
        p = np.exp(one - one.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        more = share - every
        made += (p * (more - (p @ more)[:, None])).T @ x / tokens
    return made


def _given(scores_TE: Array, chosen: int) -> Array:
    """The part of the tokens that each expert is given."""
    best = np.argsort(-scores_TE, axis=1, kind="stable")[:, :chosen]
    return np.bincount(best.reshape(-1), minlength=scores_TE.shape[1]) / len(scores_TE)
