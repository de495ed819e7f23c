"""Deliberate mistakes, one per way a batch goes wrong, for learning what each looks like and for tests. numpy only.

    boundary       every inner boundary of the pack one token late: an off-by-one in cu_seqlens
    early          every inner boundary of the pack one token early
    foreign_key    every sample after the first sees one key of the sample before it
    no_positions   the pack is given no position_ids: the library counts through it
    run_on         positions count through the pack, and samples are kept apart
    padded_mask    the padded batch's mask calls every slot a token
    padded_zeros   the same, with position 0 in padding, where `padded_mask` has 1
    from_one       the padded batch's tokens are at cumsum(mask), with nothing taken off
    other_side     the padded batch's mask, and positions that count tokens, are of padding on the other side
    response_anew  positions of the response begin at 0 again
    response_wide  positions of the response go on from the longest prompt's length
    state_unmasked what carries a state is handed no mask of the padding
    half_softmax   logits go to bfloat16 before their log-softmax, in which it is taken
    half_head      the head is taken in bfloat16 as well
    raise, abort, hang    the model raises, its process aborts in C, it never returns

The missing mask between packed samples is the flag `block_mask=off`.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from replay_core.replay.flags import Flags
from replay_core.samples.layout import Bools, Ints

if TYPE_CHECKING:
    from replay_core.replay.packing import Forward

#: Seconds a hanging model sleeps between two looks at the signals.
_NAP_S = 0.2


def spoil(forward: Forward, flags: Flags) -> Forward:
    """The forward's inputs with the mistake the flags name; unchanged where it cannot be made."""
    if flags.fault in ("padded_mask", "padded_zeros") and forward.attention_mask is not None and not flags.packing:
        full, positions_BS = np.ones_like(forward.attention_mask), forward.position_ids
        if flags.fault == "padded_zeros" and positions_BS is not None:
            positions_BS = np.where(forward.attention_mask == 0, 0, positions_BS)
        return replace(forward, attention_mask=full, position_ids=positions_BS)
    if flags.fault == "from_one" and forward.attention_mask is not None and not flags.packing:
        mask_BS = forward.attention_mask
        return replace(forward, position_ids=np.where(mask_BS == 1, np.cumsum(mask_BS, axis=1), 1))
    if flags.fault == "other_side" and forward.attention_mask is not None and not flags.packing:
        return _masked_as_on_the_other_side(forward, flags)
    if forward.segments < 2 or forward.valid is None:
        return forward
    lengths: Ints = np.asarray(forward.valid, dtype=np.int64)
    starts = np.cumsum(lengths) - lengths
    if flags.fault == "no_positions":
        return replace(forward, position_ids=None)
    if flags.fault in ("boundary", "early"):
        moved = starts + (starts > 0) * (1 if flags.fault == "boundary" else -1)
        spans = np.diff(np.append(moved, lengths.sum()))
        return replace(forward, position_ids=(np.arange(lengths.sum()) - np.repeat(moved, spans))[None])
    if flags.fault == "run_on":
        return replace(forward, position_ids=np.arange(lengths.sum())[None], allowed_TT=_apart(lengths))
    if flags.fault == "foreign_key":
        return replace(forward, allowed_TT=_with_a_foreign_key(lengths, starts))
    return forward


def positions_of_response(positions_BS: Ints, valid_BS: Bools, response_BS: Bools | None, fault: str) -> Ints:
    """Positions of which those of the response are counted otherwise, where the fault says so."""
    if fault not in ("response_anew", "response_wide") or response_BS is None:
        return positions_BS
    prompt_B = (valid_BS & (np.cumsum(response_BS & valid_BS, axis=1) == 0)).sum(axis=1)
    by_B = -prompt_B if fault == "response_anew" else prompt_B.max(initial=0) - prompt_B
    is_behind_BS = valid_BS & (np.cumsum(valid_BS, axis=1) > prompt_B[:, None])
    found: Ints = np.where(is_behind_BS, positions_BS + by_B[:, None], positions_BS)
    return found


def _masked_as_on_the_other_side(forward: Forward, flags: Flags) -> Forward:
    assert forward.attention_mask is not None
    mask_BS: Ints = np.ascontiguousarray(forward.attention_mask[:, ::-1])
    counted_BS: Ints = np.where(mask_BS == 1, np.cumsum(mask_BS, axis=1) - 1, 1)
    positions_BS = forward.position_ids if flags.positions == "arange" else counted_BS
    return replace(forward, attention_mask=mask_BS, position_ids=positions_BS)


def _apart(lengths: Ints) -> Bools:
    """Which token may look at which: the earlier ones of its own sample, and itself."""
    sample_T = np.repeat(np.arange(lengths.size), lengths)
    order_T = np.arange(sample_T.size)
    allowed_TT: Bools = (sample_T[:, None] == sample_T) & (order_T[:, None] >= order_T)
    return allowed_TT


def _with_a_foreign_key(lengths: Ints, starts: Ints) -> Bools:
    sample_T = np.repeat(np.arange(lengths.size), lengths)
    allowed_TT = _apart(lengths)
    for sample in range(1, lengths.size):
        allowed_TT[sample_T == sample, starts[sample] - 1] = True
    return allowed_TT


def strike(flags: Flags) -> None:
    """End as the flags ask: with an exception, an abort in C, or not at all.

    Raises:
        RuntimeError: fault=raise.
    """
    if flags.fault == "raise":
        raise RuntimeError("a deliberate failure (fault=raise)")
    if flags.fault == "abort":
        os.abort()
    while flags.fault == "hang":
        time.sleep(_NAP_S)
