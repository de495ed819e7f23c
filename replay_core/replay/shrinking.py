"""Less of a batch that still shows a difference: from the whole downwards, or, where that takes long, from below.

The smallest case is found by leaving out. Of a batch whose every pass takes seconds that would be most of the time; the
outputs that were held to each other already say which sample is off and from which token on, and what is tried first is
that token with a little company.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from replay_core.replay import ahead
from replay_core.replay.batch import MicroBatch
from replay_core.replay.bench import ReplayBench
from replay_core.replay.flags import Flags

#: Rows of a part, and its columns at first.
ROWS, COLUMNS = 3, 16
#: A part is no larger than this share of the batch's slots: else all of it costs little more.
_SHARE = 0.25
#: How many smaller batches are tried.
_TRIES = 40
#: Nor does a try begin after so long.
_SECONDS = 120.0


class Excerpt(Struct, frozen=True):
    """Some rows of a batch (their numbers there), the first tokens of each."""

    batch: MicroBatch
    rows: list[int]


def part_of(batch: MicroBatch, rows: list[int], columns: int) -> Excerpt:
    """The first tokens of these rows in so many columns, padded on the sides where the rows are, if by less."""
    columns = min(columns, batch.ids_BS.shape[1])
    most = max(1, columns // 4)
    taken = batch.take(rows)
    source = np.zeros((len(rows), columns), dtype=np.int64)
    valid = np.zeros((len(rows), columns), dtype=bool)
    for number, valid_S in enumerate(taken.valid_BS):
        slots, idle = np.flatnonzero(valid_S), np.flatnonzero(~valid_S)
        before = int(slots[0]) if slots.size else 0
        after = valid_S.size - 1 - int(slots[-1]) if slots.size else 0
        left, right = min(before, most), min(after, most)
        count = min(slots.size, columns - left - right)
        # What is missing to the width is padding on the side that has some; where both have, on the right.
        left = columns - count if before and not after else left
        source[number] = idle[0] if idle.size else slots[0] if slots.size else 0
        source[number, left : left + count] = slots[:count]
        valid[number, left : left + count] = True

    def cut(values_BS: NDArray[Any] | None) -> NDArray[Any] | None:
        return None if values_BS is None else np.take_along_axis(values_BS, source, axis=1)

    response = cut(taken.response_BS)
    ids = cut(taken.ids_BS)
    assert ids is not None
    return Excerpt(
        MicroBatch(
            ids, valid, None if response is None else response & valid, batch.temperature, cut(taken.positions_BS)
        ), rows,
    )  # fmt: skip


def company_of(batch: MicroBatch, sample: int, least: int = ROWS) -> list[int]:
    """A sample and those beside it, in their order."""
    first = max(0, min(sample - 1, batch.rows - least))
    return list(range(first, min(batch.rows, first + least)))


def likely(batch: MicroBatch, distance_N: NDArray[np.float64]) -> Iterator[Excerpt]:
    """Parts that should show a difference, small ones first, of how far each token is off (by sample and position)."""
    layout = batch.layout()
    slots = layout.slots()
    sample_N, position_N = layout.sample_BS.reshape(-1)[slots], layout.position_BS.reshape(-1)[slots]
    if distance_N.size != sample_N.size or not distance_N.size:
        return
    distance_N = np.where(np.isfinite(distance_N), distance_N, np.inf)
    off = distance_N >= min(distance_N.max(), np.finfo(float).max) * ahead.OFF
    # Of samples that are off alike the one that is off from an early token on: the part is smaller.
    first = int(np.flatnonzero(off)[position_N[off].argmin()])
    rows, width = company_of(batch, int(sample_N[first])), batch.ids_BS.shape[1]
    columns = max(COLUMNS, 4 * (int(position_N[first]) + 2) // 3 + 1)
    while columns <= width and len(rows) * columns <= _SHARE * batch.ids_BS.size:
        yield part_of(batch, rows, columns)
        columns *= 2
    if batch.rows > len(rows) and batch.rows * COLUMNS <= _SHARE * batch.ids_BS.size:
        yield part_of(batch, list(range(batch.rows)), COLUMNS)


def first_parts(batch: MicroBatch) -> Iterator[Excerpt]:
    """Parts to look at before anything is known: the first rows, then all of them, a few tokens of each."""
    rows = company_of(batch, 0)
    for chosen in (rows, list(range(batch.rows)))[: 2 if batch.rows > len(rows) else 1]:
        if len(chosen) * COLUMNS <= _SHARE * batch.ids_BS.size:
            yield part_of(batch, chosen, COLUMNS)


def smallest(
    bench: ReplayBench, flags: Flags, reference: Flags, batch: MicroBatch, rows_least: int = 1, width_least: int = 1
) -> MicroBatch:
    """The smallest batch that still shows the difference: rows halved, then prefixes, then single rows and tokens. What
    is found in `_SECONDS`, of a batch whose passes take long.
    """
    until = time.monotonic() + _SECONDS

    def fails(part: MicroBatch) -> bool:
        if part.rows < rows_least or part.ids_BS.shape[1] < width_least or int(part.valid_BS.sum(axis=1).min()) < 1:
            return False
        return time.monotonic() < until and bench.differs(flags, reference, part)

    tries = _TRIES
    size = batch.rows
    while size > 1 and tries > 0:
        size = (size + 1) // 2
        starts = range(0, batch.rows, size)
        for start in starts:
            rows = list(range(batch.rows))
            less = rows[start : start + size]
            tries -= 1
            if len(less) < batch.rows and fails(batch.take(less)):
                batch, size = batch.take(less), len(less)
                break
            without = [row for row in rows if row not in less]
            tries -= 1
            if without and fails(batch.take(without)):
                batch, size = batch.take(without), len(without) * 2
                break
    width = batch.ids_BS.shape[1]
    step = width // 2
    while step >= 1 and tries > 0:
        tries -= 1
        less_batch = batch.first_columns(batch.ids_BS.shape[1] - step)
        if fails(less_batch):
            batch = less_batch
            step = min(step, batch.ids_BS.shape[1] // 2)
        else:
            step //= 2
    return batch
