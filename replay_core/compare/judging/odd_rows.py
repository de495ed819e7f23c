"""Of a gradient whose slice on some ranks is partly right: which rows of the weight are off there, and what they hold.

A row of a weight's gradient is what one channel of the layer learned. Rows that are 0, a multiple of the other run's,
or other rows of it say what became of a part of the slice: heads of keys that nobody counted, a chunk that was averaged
once too often, a chunk that is another rank's.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from replay_core import pages
from replay_core.compare.judging.faults import Fault, whose
from replay_core.compare.judging.products import NEAR, Array
from replay_core.compare.pairing.ranks import HeldByRanks
from replay_core.records import TensorRef

#: A row is right that is off by this part of itself, and another that is off by more than that (noise lies between).
_RIGHT, _OFF = 0.05, 0.3
#: What rows may be from what they are said to be, of their norm: of float32, of halves.
_SAID = (NEAR, 0.04)
_MOST, _MOST_ROWS = 1 << 22, 1 << 11

Ints = NDArray[np.int64]


class _RankRows(Struct):
    """The rows of a rank's slice that are off: their places in the whole; what they hold and should."""

    rank: int
    places: Ints
    here: Array
    there: Array


def of_rows(what: str, whole: TensorRef, held: HeldByRanks, parted: tuple[int, ...]) -> Fault | None:
    """What the rows hold that are off, of ranks whose others are right; None where it is nothing that has a name.

    Raises:
        DumpError: the bytes of one cannot be read.
    """
    if not 1 <= len(whole.shape) <= 2 or whole.numel > _MOST or (held.is_cut and held.axis != 0) or not parted:
        return None
    there = pages.array(whole).astype(np.float64)
    if not there.size or not np.isfinite(there).all():
        return None
    there = there.reshape(whole.shape[0], -1)
    found: list[_RankRows] = []
    some_are_right = len(parted) < len(held.ranks)
    for number, rank in enumerate(held.ranks):
        if rank not in parted:
            continue
        stretches = held.stretches[number] if held.is_cut else ((0, whole.shape[0]),)
        if not sum(long for _, long in stretches):
            continue
        at = np.concatenate([np.arange(start, start + long) for start, long in stretches])
        here = pages.array(held.parts[number]).astype(np.float64)
        if here.size != at.size * there.shape[1] or not np.isfinite(here).all():
            return None
        here = here.reshape(at.size, -1)
        should = there[at]
        size = np.maximum(np.linalg.norm(should, axis=1), 1e-6 * (np.linalg.norm(should) or 1.0))
        off = np.linalg.norm(here - should, axis=1) / size
        is_off = off > _OFF
        if not is_off.any() or (off[~is_off] > _RIGHT).any():
            return None
        some_are_right |= bool((~is_off).any())
        found.append(_RankRows(rank, at[is_off], here[is_off], should[is_off]))
    if not found or not some_are_right:
        return None
    is_half = whole.dtype in ("bfloat16", "float16") or held.parts[0].dtype in ("bfloat16", "float16")
    near = _SAID[is_half]
    return _empty(what, found) or _times(what, found, len(held.ranks), near) or _others(what, found, there, held, near)


def _empty(what: str, found: list[_RankRows]) -> Fault | None:
    if any(one.here.any() for one in found) or not all(one.there.any(1).all() for one in found):
        return None
    ranks = tuple(one.rank for one in found)
    return Fault(
        "zeros", ranks,
        f"{what} is 0 in rows of {_said(found)}, and is not in the other run: nothing of these was counted; all other "
        "rows are the other run's",
        0.0,
    )  # fmt: skip


def _times(what: str, found: list[_RankRows], count: int, near: float) -> Fault | None:
    """Whether the rows are one multiple of the other run's, by the number of ranks or a divisor of it."""
    here, there = np.concatenate([one.here for one in found]), np.concatenate([one.there for one in found])
    if not there.any():
        return None
    factor = float((here * there).sum() / np.square(there).sum())
    some = [number for number in range(2, count + 1) if count % number == 0]
    times = next((one for number in some for one in (number, 1 / number) if abs(factor - one) <= NEAR * one), None)
    if times is None or np.linalg.norm(here - factor * there) > near * np.linalg.norm(here):
        return None
    ranks = tuple(one.rank for one in found)
    number = round(max(times, 1 / times))
    words = f"summed over {number} ranks once too often" if times > 1 else f"divided by {number} ranks once too often"
    return Fault(
        "too much" if times > 1 else "too little", ranks,
        f"{what} is {factor:.4g} x the other run's in rows of {_said(found)}, and right in all others: these rows are "
        f"{words}",
        factor,
    )  # fmt: skip


def _others(what: str, found: list[_RankRows], there: Array, held: HeldByRanks, near: float) -> Fault | None:
    """Whether the rows are other rows of the other run's, a stretch of them each."""
    if sum(one.places.size for one in found) > _MOST_ROWS or there.shape[1] < 2:
        return None
    size = np.linalg.norm(there, axis=1)
    said = []
    for one in found:
        own = np.linalg.norm(one.here, axis=1)
        if not own.all():
            return None
        like = (one.here @ there.T) / np.maximum(own[:, None] * size[None], 1e-300)
        best = like.argmax(1)
        if np.linalg.norm(one.here - there[best]) > near * np.linalg.norm(one.here) or (best == one.places).any():
            return None
        for (first, last), (other, end) in _together(one.places, best):
            said.append(f"rows {first} to {last} on rank {one.rank} are the other run's {other} to {end}")
    if not said or len(said) > 8:
        return None
    ranks = tuple(one.rank for one in found)
    return Fault("order", ranks, f"{what} has rows of another place ({'; '.join(said)}), and all others are right")


def _together(places: Ints, others: Ints) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Stretches in which both run on."""
    begun = 0
    for at in range(1, places.size + 1):
        if at == places.size or places[at] != places[at - 1] + 1 or others[at] != others[at - 1] + 1:
            yield (int(places[begun]), int(places[at - 1])), (int(others[begun]), int(others[at - 1]))
            begun = at


def _said(found: list[_RankRows]) -> str:
    """`rank 1 (40 to 47)`."""
    each = []
    for one in found:
        runs = [f"{first} to {last}" for (first, last), _ in _together(one.places, one.places)]
        more = f", and {len(runs) - 3} stretches more" if len(runs) > 3 else ""
        each.append(f"{whose((one.rank,))} ({', '.join(runs[:3])}{more})")
    return "; ".join(each)
