"""Padding that no mask names, told by what stands in the rows. `Batch.with_mask` then knows it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from replay_core import naming, pages
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


def around_parts(batch: Batch, pad: int | None = None) -> Batch | None:
    """The batch without the padding of prompts and responses that stand side by side without a mask: of prompts in
    front, of responses behind.

    pad: the id that is stated to be padding. Where none is, it is one that fills two slots and more at both ends. None
    where no row has any, where a prompt or a response would be empty, or where values that the record has of the
    responses' tokens (log-probabilities) are no zeros there.
    """
    ids_BS, layout = batch.ids_BS, batch.layout
    if batch.padding_known or batch.held.ids is not None or ids_BS is None or layout is None:
        return None
    if batch.width is None or not layout.response_width:
        return None
    begin = batch.width - layout.response_width
    asked_BP, said_BR = ids_BS[:, :begin], ids_BS[:, begin:]
    if pad is None:
        if min(asked_BP.shape[1], said_BR.shape[1]) < 2:
            return None
        first = set(asked_BP[asked_BP[:, 0] == asked_BP[:, 1], 0].tolist())
        last = set(said_BR[said_BR[:, -1] == said_BR[:, -2], -1].tolist())
        shared = first & last
        if len(shared) != 1:
            return None
        pad = int(shared.pop())
    # What stands behind the first other token of a prompt, and before the last one of a response, is a token.
    there_BP: Bools = np.maximum.accumulate(asked_BP != pad, axis=1)
    there_BR: Bools = np.maximum.accumulate((said_BR != pad)[:, ::-1], axis=1)[:, ::-1]
    if (there_BP.all() and there_BR.all()) or not (there_BP.any(1).all() and there_BR.any(1).all()):
        return None
    for ref in batch.held.fields():
        is_of_tokens = naming.meaning(ref.canonical or ref.name).kind == "logprob" and ref.rows is None
        if is_of_tokens and ref.is_readable and ref.shape == said_BR.shape and pages.array(ref)[~there_BR].any():
            return None
    return batch.with_mask(np.concatenate([there_BP, there_BR], axis=1))


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
