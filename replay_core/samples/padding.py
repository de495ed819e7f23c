"""Padding that no mask names, told by what stands in the rows. `Batch.with_mask` then knows it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from replay_core import pages
from replay_core.samples.batch import Array, Batch
from replay_core.samples.layout import Bools, Ints, positions_of, samples_of


def among(batch: Batch, known: Sequence[Ints]) -> Batch | None:
    """The batch whose rows are known samples [L], each at one end of its row and one id around it.

    None unless every row is exactly one of them, at one place.
    """
    ids_BS = batch.ids_BS
    masks = [] if ids_BS is None or batch.width is None else [_mask_of(row, known) for row in ids_BS]
    found = [mask for mask in masks if mask is not None]
    return batch.with_mask(np.stack(found)) if found and len(found) == len(masks) else None


def trimmed(batch: Batch) -> Batch | None:
    """The batch without its runs of one id at either end, where no mask said that they are padding.

    Only where the response mask ends before such a run in every row, and the id is the same in all of them.
    """
    if batch.padding_known or batch.width is None or batch.response is None or batch.held.ids is None:
        return None
    tokens, flags = batch.response
    ids_BS = pages.array(batch.held.ids).reshape(-1, batch.width)
    pads_BS: Bools = np.zeros(ids_BS.shape, bool)
    found: set[int] = set()
    for row, ids in enumerate(ids_BS):
        own = tokens[(samples_of(tokens) == row) & flags]
        end = int(positions_of(own).max()) + 1 if own.size else ids.size
        found.update(int(value) for value in ids[end:])
        pads_BS[row, end:] = True
    if len(found) != 1:
        return None
    pad = found.pop()
    for row, ids in enumerate(ids_BS):
        real = np.flatnonzero(ids != pad)
        pads_BS[row, : int(real[0]) if real.size else 0] = True
    return batch.with_mask(~pads_BS)


def _mask_of(row: Array, known: Sequence[Ints]) -> Bools | None:
    """Which slots of a row hold a token, where it is one of the known samples and one id around it."""
    places = set()
    for sample in known:
        for start in {0, row.size - sample.size} if sample.size <= row.size else set():
            around = np.concatenate([row[:start], row[start + sample.size :]])
            if np.array_equal(row[start : start + sample.size], sample) and (around == around[:1]).all():
                places.add((start, sample.size))
    if len(places) != 1:
        return None
    ((start, size),) = places
    slots = np.arange(row.size)
    return (slots >= start) & (slots < start + size)
