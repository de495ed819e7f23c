"""Whether what experts made of some tokens came back to others: rows of another rank's tokens, or in another order.

A layer of experts puts out, of each token, its rows of the experts it was sent to, each by its gate. Where the rows
are right and stand at other tokens, what a token is off by is its gate times the difference of two of one rank's rows,
or its output is two other rows, each by a gate.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from replay_core import pages
from replay_core.compare.judging.faults import Fault, whose
from replay_core.compare.judging.products import Array
from replay_core.compare.pairing.ranks import HeldByRanks
from replay_core.records import TensorRef

#: Rows among which each two are tried, and tokens that are asked.
_ROWS, _TOKENS = 1536, 48
#: What part of a token's squares may be left: more than rounding makes of a sum of few products (a gate in bfloat16:
#: 4e-6), and far less than the best two of so many rows leave by chance in so many channels.
_LEFT, _FEWEST_CHANNELS = 1e-5, 16
#: A token is off by this part of what the worst is.
_APART = 1e-3
#: Tokens that must be explained, and what part of those that are asked.
_FEWEST, _MOST_PART = 3, 0.5


def of_returned(
    what: str, whole: TensorRef, laid: TensorRef, held: HeldByRanks, experts: Sequence[tuple[int, TensorRef]]
) -> Fault | None:
    """Which rank's experts' rows stand at other tokens than those they were made of.

    whole, laid: the layer's output [..., hidden] of the other run, and what the ranks hold of it put together. experts:
    of all ranks, what each expert put out [its tokens, hidden], which is right.

    Raises:
        DumpError: the bytes of one cannot be read.
    """
    width = whole.shape[-1]
    if whole.shape != laid.shape or width < _FEWEST_CHANNELS or any(ref.shape[-1] != width for _, ref in experts):
        return None
    there_ND, here_ND = (pages.array(ref).astype(np.float64).reshape(-1, width) for ref in (whole, laid))
    every = [(rank, pages.array(ref).astype(np.float64).reshape(-1, width)) for rank, ref in experts]
    rows_RD = np.concatenate([rows for _, rows in every])
    rank_R = np.concatenate([np.full(len(rows), rank) for rank, rows in every])
    is_row_R = rows_RD.any(1)
    rows_RD, rank_R = rows_RD[is_row_R], rank_R[is_row_R]
    if not 2 <= len(rows_RD) <= _ROWS or not all(np.isfinite(one).all() for one in (there_ND, here_ND, rows_RD)):
        return None
    size_N = np.linalg.norm(here_ND - there_ND, axis=1)
    off = np.flatnonzero(size_N > _APART * size_N.max(initial=0.0))
    if off.size < _FEWEST:
        return None
    off = off[np.unique(np.linspace(0, off.size - 1, min(off.size, _TOKENS)).astype(int))]
    rows = _ExpertRows(rows_RD, rank_R)
    belongs: dict[int, int] = {}
    stands: list[tuple[int, int]] = []
    explained = 0
    for token in off.tolist():
        of_there, of_here = rows.two(there_ND[token]), rows.two(here_ND[token])
        if of_there and of_here:
            # The same rows are weighed otherwise, and stand where they belong.
            right, wrong = of_there - of_here, of_here - of_there
        elif (pair := rows.difference(here_ND[token] - there_ND[token])) is not None:
            right, wrong = {pair[0]}, {pair[1]}
        else:
            continue
        if not wrong:
            continue
        explained += 1
        belongs.update(dict.fromkeys(right, token))
        stands += [(row, token) for row in wrong]
    if explained < max(_FEWEST, _MOST_PART * off.size):
        return None
    made_by = tuple(sorted({int(rank_R[row]) for row, _ in stands}))
    rank_of = _ranks_of_tokens(held, whole)
    of_tokens = {rank_of[token] for _, token in stands} if rank_of else set()
    # What one rank alone has wrong of all ranks' rows it put there itself.
    ranks = tuple(of_tokens) if len(of_tokens) == 1 and len(made_by) > 1 else made_by
    known = [rank_of[belongs[row]] != rank_of[token] for row, token in stands if row in belongs] if rank_of else []
    said = "they were sent or put back in another order, or to another rank"
    if len(known) >= _FEWEST and all(known):
        said = "they went to another rank than the tokens came from"
    elif len(known) >= _FEWEST and not any(known):
        said = "they came back to the tokens' rank in another order than these were sent, or were put back in another"
    where = f" on {whose(tuple(sorted(of_tokens)))}" if of_tokens and of_tokens != set(held.ranks) else ""
    return Fault(
        "returned", ranks,
        f"{what}: what the experts of {whose(made_by)} made of some tokens stands at others{where} (at {explained} of "
        f"{off.size} tokens that were asked; the rows themselves are right): {said}",
    )  # fmt: skip


class _ExpertRows:
    """All experts' rows, and which of them a vector is made of."""

    def __init__(self, rows_RD: Array, rank_R: NDArray[np.int64]) -> None:
        self._rows_RD = rows_RD
        self._gram_RR = rows_RD @ rows_RD.T
        square_R = np.diag(self._gram_RR)
        self._apart_RR = square_R[:, None] + square_R[None] - 2 * self._gram_RR
        is_none_RR = (rank_R[:, None] != rank_R[None]) | (self._apart_RR <= 1e-9 * square_R.max())
        self._apart_RR[is_none_RR] = np.inf
        self._volume_RR = square_R[:, None] * square_R[None] - np.square(self._gram_RR)
        self._volume_RR[self._volume_RR <= 1e-9 * square_R[:, None] * square_R[None]] = np.inf
        self._square_R = square_R

    def difference(self, off_D: Array) -> tuple[int, int] | None:
        """Of one rank's rows the two whose difference, second less first, makes it by a positive factor."""
        along_R = self._rows_RD @ off_D
        ahead_RR = np.maximum(along_R[None] - along_R[:, None], 0)
        explained_RR = np.square(ahead_RR) / self._apart_RR
        first, second = divmod(int(np.argmax(explained_RR)), len(along_R))
        whole = float(off_D @ off_D)
        return (first, second) if whole - explained_RR[first, second] <= _LEFT * whole else None

    def two(self, output_D: Array) -> set[int]:
        """The one or two rows that make it; none: no two do, or it is 0."""
        along_R, whole = self._rows_RD @ output_D, float(output_D @ output_D)
        if not whole:
            return set()
        alone_R = np.square(along_R) / self._square_R
        if whole - float(alone_R.max()) <= _LEFT * whole:
            return {int(np.argmax(alone_R))}
        c_RR = along_R[:, None] * along_R[None] * self._gram_RR
        explained_RR = np.square(along_R)[:, None] * self._square_R[None]
        explained_RR = (explained_RR + explained_RR.T - 2 * c_RR) / self._volume_RR
        first, second = divmod(int(np.argmax(explained_RR)), len(along_R))
        return {first, second} if whole - explained_RR[first, second] <= _LEFT * whole else set()


def _ranks_of_tokens(held: HeldByRanks, whole: TensorRef) -> list[int]:
    """Whose each token of an output that is cut by samples or along the sequence is; empty: it is not cut so."""
    if held.axis is None or held.axis >= len(whole.shape) - 1:
        return []
    shape = whole.shape[:-1]
    rank_of = np.full(shape, -1)
    for rank, stretches in zip(held.ranks, held.stretches, strict=True):
        for start, long in stretches:
            rank_of[(slice(None),) * held.axis + (slice(start, start + long),)] = rank
    return [int(one) for one in rank_of.reshape(-1)]
