"""The projection behind attention, where its weight is not recorded: solved for from what the other run's attention is
given and what its projection puts out.

Of every way in which heads may be cut and turned attention is made again, and W, b of  y = W a + b  over all tokens are
those that leave least. Tokens are twice as many as unknowns for each channel, so that what is no attention leaves much.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import numpy as np
from msgspec.structs import replace

from replay_core import pages
from replay_core.compare.judging.attention_made import BASES, CutHeads, IntoAttention, alibi, made, normal
from replay_core.compare.judging.products import Array
from replay_core.compare.pairing.ranks import HeldByRanks
from replay_core.records import TensorRef

#: What part of the output may be left; tokens for each unknown, and unknowns and tokens at most.
_LEFT, _TOKENS_EACH, _MOST_WIDE, _MOST_TOKENS = 1e-3, 2, 512, 2048
#: CPU seconds.
_SECONDS = 3.0
_PROJECTIONS = ("proj.output", "dense.output", "wo.output")


def solved_projection(
    what: str, whole: TensorRef, held: HeldByRanks, given: Sequence[HeldByRanks]
) -> tuple[Array, Array] | None:
    """The weight [out, heads x d] and the bias [out]; None where attention that is made again does not make the output.

    whole: what the other run's projection puts out [sample, position, hidden]. given: what went into attention, which
    ranks held alike with the other run.

    Raises:
        DumpError: the bytes of one cannot be read.
    """
    if not what.endswith(_PROJECTIONS) or len(whole.shape) != 3 or whole.dtype not in ("float32", "float64"):
        return None
    samples, length, hidden = whole.shape
    queries = [one for one in given if len(one.parts[0].shape) in (3, 4)]
    if not queries or not samples * length <= _MOST_TOKENS or not whole.is_readable:
        return None
    there_NO = pages.array(whole).astype(np.float64).reshape(-1, hidden)
    size = float(np.linalg.norm(there_NO - there_NO.mean(0)))
    if not np.isfinite(size) or not size:
        return None
    begun = time.thread_time()
    for width in _widths(queries, hidden):
        if samples * length < _TOKENS_EACH * (width + 1):
            continue
        through = np.eye(width), np.zeros(width)
        into = IntoAttention(what, held, given, (samples, length), through, np.arange(width), hidden)
        if not into.are_known:
            return None
        for cuts in zip(*(into.cuts(sample, length) for sample in range(samples)), strict=True):
            for one in _turned(cuts):
                if time.thread_time() - begun > _SECONDS:
                    return None
                rows, starts = np.arange(length), np.zeros(length, np.int64)
                a_NC = np.concatenate([made(cut, rows, cut.heads, normal(cut, rows, starts)) for cut in one])
                with_1_NC = np.concatenate([a_NC, np.ones((len(a_NC), 1))], 1)
                solved_CO = np.linalg.lstsq(with_1_NC, there_NO, rcond=None)[0]
                if np.linalg.norm(with_1_NC @ solved_CO - there_NO) <= _LEFT * size:
                    return np.ascontiguousarray(solved_CO[:-1].T), solved_CO[-1]
    return None


def _widths(queries: Sequence[HeldByRanks], hidden: int) -> Iterator[int]:
    """How wide all heads may be together: as the output, mostly, or as one of what goes in."""
    sizes = (int(np.prod(one.parts[0].shape[2:])) for one in queries)
    yield from (width for width in dict.fromkeys((hidden, *sizes)) if 0 < width <= _MOST_WIDE)


def _turned(cuts: Sequence[CutHeads]) -> Iterator[Sequence[CutHeads]]:
    """The same cut of every sample in each way in which heads may know of positions."""
    yield cuts
    for base in BASES:
        for in_pairs in (False, True) if cuts[0].q.shape[2] % 2 == 0 else ():
            yield [replace(cut, base=base, in_pairs=in_pairs) for cut in cuts]
    yield [replace(cut, slopes=alibi(int(cut.q.shape[1]))) for cut in cuts]
