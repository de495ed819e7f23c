"""The entropy of a token's distribution over a vocabulary that is cut among ranks, made of a rank's own words alone.

    H  =  log sum_v exp(z_v)  -  sum_v p_v z_v          over all words v

Of logits z that make the other run's entropy: the same over the words of one rank (its own softmax), or what ranks made
so each of their own, added up or averaged. (What each rank's words add to the whole is a part of a sum like any other.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from replay_core import pages
from replay_core.compare.judging.attention_made import Ints
from replay_core.compare.judging.faults import Fault, whose
from replay_core.compare.judging.products import Array
from replay_core.compare.pairing.ranks import HeldByRanks
from replay_core.records import TensorRef

#: How near entropies are to what logits make, of the largest; and what part of a difference may be left.
_NEAR, _LEFT = 1e-3, 0.02
#: Elements of logits that are read; of fewer tokens nothing is said.
MOST, _FEWEST = 1 << 25, 8
_RANKS = (2, 4, 8, 16)


def explain(
    what: str, whole: TensorRef, held: HeldByRanks, logits_NV: Array, cut: HeldByRanks | None, every: Sequence[int]
) -> Fault | None:
    """What is wrong with entropies of tokens [...], which ranks hold all of or some tokens each.

    logits_NV: the other run's, of all tokens. cut: the words of each rank, where these are known.

    Raises:
        DumpError: the bytes of one cannot be read.
    """
    if not whole.is_readable or not all(ref.is_readable for ref in held.parts) or whole.numel != len(logits_NV):
        return None
    a_N = pages.array(whole).astype(np.float64).reshape(-1)
    # A recorder may leave nothing of tokens that do not count.
    counts_N = a_N != 0
    if counts_N.sum() < _FEWEST or not np.isfinite(logits_NV).all():
        return None
    made_N = _entropy(logits_NV)
    if np.abs(made_N - a_N)[counts_N].max() > _NEAR * np.abs(a_N).max():
        return None
    grid = np.arange(a_N.size).reshape(whole.shape)
    of_ranks = []
    for number, ref in enumerate(held.parts):
        own = grid
        if held.axis is not None:
            places = np.concatenate([np.arange(at, at + long) for at, long in held.stretches[number]])
            own = np.take(grid, places, held.axis)
        if own.shape != ref.shape:
            return None
        rows = own.reshape(-1)
        said = pages.array(ref).astype(np.float64).reshape(-1)
        of_ranks.append((rows[counts_N[rows]], said[counts_N[rows]]))
    for shares in _shares(cut, logits_NV.shape[1]):
        for words, candidates in _wrong(logits_NV, shares):
            if all(_is_one_of(candidates, rows, said, a_N) for rows, said in of_ranks if rows.size):
                ranks = tuple(every) if len(shares) * len(held.ranks) == len(every) else held.ranks
                return Fault(
                    "own vocabulary", ranks,
                    f"{what} on {whose(ranks)} is {words}, of {len(shares)} slices of the vocabulary, where the other "
                    "run's is of all words: it is not reduced over the ranks that hold them (made again from the "
                    "logits)",
                )  # fmt: skip
    return None


def _is_one_of(candidates: Sequence[Array], rows: Ints, said: Array, a_N: Array) -> bool:
    most = _LEFT * float(np.linalg.norm(said - a_N[rows]))
    return any(np.linalg.norm(said - one_N[rows]) <= most for one_N in candidates)


def _entropy(logits_NV: Array) -> Array:
    below_NV = logits_NV - logits_NV.max(1, keepdims=True)
    weights_NV = np.exp(below_NV)
    sums_N = weights_NV.sum(1)
    return np.asarray(np.log(sums_N) - (weights_NV * below_NV).sum(1) / sums_N)


def _shares(cut: HeldByRanks | None, words: int) -> Iterator[list[Ints]]:
    """The words of each rank: as they are known, or of so many ranks as there may be."""
    if cut is not None:
        yield [np.concatenate([np.arange(at, at + long) for at, long in one]) for one in dict.fromkeys(cut.stretches)]
        return
    for ranks in _RANKS:
        if words % ranks == 0 and words > ranks:
            yield np.split(np.arange(words), ranks)


def _wrong(logits_NV: Array, shares: Sequence[Ints]) -> Iterator[tuple[str, Sequence[Array]]]:
    """What a rank may have in its place: words, and what that is of each share."""
    if len(shares) < 2:
        return
    own = [_entropy(logits_NV[:, share]) for share in shares]
    yield "the entropy of a softmax over the rank's own words", own
    yield "the sum of entropies that ranks make each of a softmax over their own words", [np.sum(own, 0)]
    yield "the mean of entropies that ranks make each of a softmax over their own words", [np.mean(own, 0)]
