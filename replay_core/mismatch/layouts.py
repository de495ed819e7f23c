"""How tokens lie before the model where a side got that wrong: padding that is seen, positions that are others. numpy.

Each is an arrangement of the replay's own kind, so that the same forward runs it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from replay_core.mismatch.figures import Array
from replay_core.mismatch.setting import Layout
from replay_core.replay.packing import Arrangement, Forward
from replay_core.samples.layout import TokenLayout


def arranged(rows: Sequence[Array], prompts: Sequence[int], pads: Sequence[int], pad_id: int, layout: Layout,
             packs: Sequence[Sequence[int]]) -> Arrangement:  # fmt: skip
    """The samples `rows` in a wrong layout.

    Args:
        prompts: tokens before each response. pads: slots of padding each sample has, before it or after its prompt.
        packs: the samples of every pack, in order; used by `packs that leak` alone.
    """
    if layout == "packs that leak":
        return _end_to_end([np.concatenate([rows[at] for at in pack]) for pack in packs], rows,
                           [np.concatenate([np.arange(rows[at].size) for at in pack]) for pack in packs])  # fmt: skip
    if layout in ("positions anew", "positions from 1", "prompt unseen"):
        given = []
        for row, head in zip(rows, prompts, strict=True):
            counted = np.arange(row.size)
            given.append(
                counted + 1 if layout == "positions from 1" else np.where(counted < head, counted, counted - head)
            )
        return _end_to_end(rows, rows, given, is_cut=layout == "prompt unseen")
    if layout == "first token unseen":
        rows_seen = [np.arange(row.size) > 0 for row in rows]
        return _end_to_end(rows, rows, [np.maximum(np.arange(row.size) - 1, 0) for row in rows], rows_seen)
    if layout == "first token twice":
        pads = [1] * len(rows)
    before = [0 if layout == "padding after the prompt" else pad for pad in pads]
    within = [pad if layout == "padding after the prompt" else 0 for pad in pads]
    width = max(row.size + pad for row, pad in zip(rows, pads, strict=True))
    valid_BS = np.zeros((len(rows), width), bool)
    ids_BS = np.full(valid_BS.shape, pad_id, np.int64)
    real_BS = np.zeros(valid_BS.shape, bool)
    for at, row in enumerate(rows):
        slots = np.arange(row.size) + before[at] + np.where(np.arange(row.size) >= prompts[at], within[at], 0)
        valid_BS[at, slots], ids_BS[at, slots] = True, row
        if layout == "first token twice":
            ids_BS[at, 0] = row[0]
        # What lies behind a sample no token of it can see: causal.
        real_BS[at, : row.size + pads[at]] = True
    mask_BS = valid_BS if layout == "left padding counted" else real_BS
    positions_BS = np.broadcast_to(np.arange(width), valid_BS.shape)
    forward = Forward(ids_BS, positions_BS.astype(np.int64), mask_BS.astype(np.int64), valid=valid_BS)
    return Arrangement([forward], TokenLayout.padded(valid_BS), 0, None, layout)


def _end_to_end(calls: Sequence[Array], rows: Sequence[Array], positions: Sequence[Array],
                seen: Sequence[Array] | None = None, *, is_cut: bool = False) -> Arrangement:  # fmt: skip
    """A forward per call, with a mask of ones (or of what is `seen`): the library then takes each for one sequence,
    whatever its positions. is_cut: without a mask, so that it takes positions that begin anew for another sequence."""
    forwards = []
    for at, (ids, place) in enumerate(zip(calls, positions, strict=True)):
        mask = None if is_cut else (np.ones(ids.size) if seen is None else seen[at])[None].astype(np.int64)
        forwards.append(Forward(ids[None], place[None].astype(np.int64), mask, segments=2 if is_cut else 1))
    bounds = np.concatenate(([0], np.cumsum([row.size for row in rows])))
    return Arrangement(forwards, TokenLayout.packed(bounds), 1, bounds, "as given")
