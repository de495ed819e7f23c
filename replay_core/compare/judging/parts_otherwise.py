"""What is put together otherwise of right parts: ranks' parts of a sum that are not summed, or of other rows, and
outputs of modules of which a later one is another sum than the other run's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations

import numpy as np

from replay_core import pages
from replay_core.compare.judging.faults import Fault, whose
from replay_core.compare.judging.products import NEAR, Array, products_of
from replay_core.compare.pairing.ranks import HeldByRanks
from replay_core.records import TensorRef

_MOST = 1 << 22
#: Rows that are looked for among others, at most; and of more ranks than this no elementwise rule is asked.
_MOST_ROWS, _EACH = 4096, 16

_REDUCED: tuple[tuple[str, Callable[[Array], Array]], ...] = (
    ("largest", lambda parts: parts.max(0)),
    ("smallest", lambda parts: parts.min(0)),
    ("product", lambda parts: parts.prod(0)),
    ("mean", lambda parts: parts.mean(0)),
)


def of_parts(
    what: str, whole: TensorRef, held: HeldByRanks, parts: HeldByRanks, called: str, parted: Sequence[int]
) -> Fault | None:
    """Whether what was computed with the sum of ranks' parts holds something else of them: their largest, or a rank's
    part of other rows.
    """
    refs = (whole, *held.parts, *parts.parts)
    if {ref.shape for ref in refs} != {whole.shape} or whole.numel > _MOST or not 2 <= len(parts.ranks) <= _EACH:
        return None
    if len(whole.shape) < 2 or not parted or not all(ref.is_readable for ref in refs):
        return None
    there = pages.array(whole).astype(np.float64)
    own = np.stack([pages.array(ref).astype(np.float64) for ref in parts.parts])
    total = own.sum(0)
    offs = {
        rank: pages.array(ref).astype(np.float64) - there
        for rank, ref in zip(held.ranks, held.parts, strict=True) if rank in parted
    }  # fmt: skip
    if not offs or not all(np.isfinite(off).all() and off.any() for off in offs.values()):
        return None
    for word, reduced in _REDUCED:
        made = reduced(own) - total
        if all(np.linalg.norm(off - made) <= NEAR * np.linalg.norm(off) for off in offs.values()):
            return Fault(
                "not a sum", parts.ranks,
                f"what goes into {what} on {whose(parted)} is the {word} of the parts {called} of "
                f"{whose(parts.ranks)}, value by value, where their sum is due: the reduction is another",
            )  # fmt: skip
    if len(offs) != 1:
        return None
    ((rank, off),) = offs.items()
    for number, other in enumerate(parts.ranks):
        if _are_elsewhere(off + own[number], own[number]):
            return Fault(
                "rows of another place", (rank,),
                f"what {whose((rank,))} put into {what} holds of {whose((other,))}'s part, {called}, the rows of other "
                "samples or tokens, and of all else what is due: they were written or read in another order",
            )  # fmt: skip
    return None


def _are_elsewhere(here: Array, there: Array) -> bool:
    """Whether all rows, of samples or of tokens, are rows of the other, and most not their own."""
    for axes in (1, there.ndim - 1):
        count = int(np.prod(there.shape[:axes]))
        one, other = here.reshape(count, -1), there.reshape(count, -1)
        if not 2 <= count <= _MOST_ROWS:
            continue
        size = [np.square(rows).sum(1) for rows in (one, other)]
        place = (size[0][:, None] - 2 * one @ other.T + size[1][None]).argmin(1)
        left = np.linalg.norm(one - other[place], axis=1)
        if (left <= NEAR * np.sqrt(size[0])).all() and (place != np.arange(count)).mean() > 0.5 and other.any():
            return len(np.unique(place)) > 1
    return False


def of_outputs(
    what: str, whole: TensorRef, laid: TensorRef, before: Sequence[tuple[str, TensorRef]], ranks: tuple[int, ...]
) -> Fault | None:
    """Whether what ranks put out is a sum of outputs just before, which are right, that the other run's is not."""
    known: list[tuple[str, TensorRef]] = []
    for name, ref in reversed(before):
        if ref.shape == whole.shape and ref.is_readable:
            known.append((name, ref))
    if not known or laid.shape != whole.shape or whole.numel > _MOST:
        return None
    products = products_of([whole, laid, *(ref for _, ref in known)])
    off = products.norm({0: 1, 1: -1})
    if not off or not all(products.finite):
        return None

    def is_so(weights: dict[int, float]) -> bool:
        return products.norm({1: 1, **weights}) <= NEAR * off

    def fault(words: str) -> Fault:
        return Fault("added otherwise", ranks, f"{what} on {whose(ranks)} {words}")

    for place, (name, _) in enumerate(known, start=2):
        if is_so({0: -1, place: -1}):
            return fault(f"is the other run's and {name} once more: that is added twice")
        if is_so({0: -1, place: 1}):
            return fault(f"is the other run's without {name}: that is not added")
        if is_so({place: -1}):
            return fault(f"is {name} alone, which the other run's is not: what it is added to is lost")
    for (one, (name, _)), (two, (other, _)) in combinations(enumerate(known, start=2), 2):
        if is_so({one: -1, two: -1}):
            return fault(
                f"is the sum of {other} and {name}, which the other run's is not: it is added to another residual "
                "stream, or where another was due"
            )
    return None
