"""Arrangement: how a batch's samples are laid out for the model. numpy only; the rules: docs/evidence.md#packing.

padded: the recorded rows; positions cumsum(mask) - 1 with 1 in padding (OpenRLHF's Actor); the mask is given.
packed: samples end to end in one row; positions restart at 0; no mask, so the library itself keeps samples apart.
rows alone: each sample by itself, positions 0..L-1, no mask. The reference.
`positions` has others given in their place: 0..S-1 with padding counted, or those that were recorded.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from replay_core.errors import UnavailableError
from replay_core.replay import faults
from replay_core.replay.batch import MicroBatch
from replay_core.replay.flags import Flags
from replay_core.samples.layout import Bools, Ints, TokenLayout

_CUMSUM, _ARANGE = "cumsum(attention_mask) - 1, 1 in padding", "0..S-1 in each row, padding counted"
_RECORDED = "as recorded"


class Forward(Struct, frozen=True):
    """The inputs of one call of the model, each [b, s]. `segments` samples lie in a packed row.

    position_ids None: not given, so that the library counts 0..s-1.
    allowed_TT: which token may look at which, in place of the library's own mask.
    valid: which slots really hold tokens (padded) or how long each sample of the pack really is (packed).
    """

    input_ids: Ints
    position_ids: Ints | None
    attention_mask: Ints | None
    segments: int = 1
    allowed_TT: Bools | None = None
    valid: Bools | Ints | None = None

    @property
    def positions(self) -> Ints:
        """[b, s]: the position ids the model computes with."""
        if self.position_ids is not None:
            return self.position_ids
        counted: Ints = np.broadcast_to(np.arange(self.input_ids.shape[1]), self.input_ids.shape).copy()
        return counted


class Arrangement(Struct, frozen=True):
    """Every forward of a cell and how their tensors join: along axis 0 (padded, [B, S]) or 1 (flat, [1, T])."""

    forwards: list[Forward]
    layout: TokenLayout
    axis: int
    cu_seqlens: Ints | None
    position_rule: str

    @property
    def slots(self) -> int:
        """Token slots of all forwards together, padding included."""
        return sum(int(forward.input_ids.size) for forward in self.forwards)

    @property
    def input_ids(self) -> Ints:
        return np.concatenate([forward.input_ids for forward in self.forwards], axis=self.axis)

    @property
    def position_ids(self) -> Ints:
        return np.concatenate([forward.positions for forward in self.forwards], axis=self.axis)

    @property
    def attention_mask(self) -> Ints | None:
        """[B, S] of the slots that hold tokens when padded; a flat row has no padding to mask."""
        if self.cu_seqlens is not None:
            return None
        masks: Ints = (self.layout.sample_BS >= 0).astype(np.int64)
        return masks

    @property
    def response_mask(self) -> Bools | None:
        """None as well where it marks no token at all: then every token counts."""
        mask = self.layout.response_BS
        return mask if mask is not None and bool(mask.any()) else None

    def without_positions(self) -> Arrangement:
        """The padded batch as a trainer gives it that names no positions; a flat row keeps them, or would leak."""
        if self.cu_seqlens is not None:
            return self
        forwards = [replace(forward, position_ids=None) for forward in self.forwards]
        return replace(self, forwards=forwards, position_rule="not given, as the trainer gave none: 0..S-1")

    def next_tokens(self) -> tuple[Ints, Ints]:
        """(flat slots that predict a next token, ids of those next tokens), by sample and position.

        The order is the same in every arrangement of one batch, so the head sees the same chunks in each.
        """
        slots = self.layout.slots()
        sample = self.layout.sample_BS.reshape(-1)[slots]
        follows = sample[1:] == sample[:-1]
        return slots[:-1][follows], self.input_ids.reshape(-1)[slots[1:][follows]]


def arrange(batch: MicroBatch, flags: Flags) -> Arrangement:
    """Lay the batch out as the flags say."""
    if flags.padding != "recorded" and flags.idle("padding") is None:
        batch = batch.padded_on(flags.padding)
    arrangement = _flat(batch, flags) if flags.packing or flags.is_reference else _padded(batch, flags)
    return replace(arrangement, forwards=[faults.spoil(forward, flags) for forward in arrangement.forwards])


def _padded(batch: MicroBatch, flags: Flags) -> Arrangement:
    mask_BS = batch.valid_BS.astype(np.int64)
    positions_BS, rule = np.where(batch.valid_BS, np.cumsum(mask_BS, axis=1) - 1, 1), _CUMSUM
    if flags.positions == "arange":
        positions_BS, rule = np.broadcast_to(np.arange(mask_BS.shape[1]), mask_BS.shape).copy(), _ARANGE
    elif flags.positions == "recorded":
        positions_BS, rule = np.where(batch.valid_BS, _recorded(batch), 1), f"{_RECORDED}, 1 in padding"
    positions_BS = faults.positions_of_response(positions_BS, batch.valid_BS, batch.response_BS, flags.fault)
    forwards = [
        Forward(batch.ids_BS[rows], positions_BS[rows], mask_BS[rows], valid=batch.valid_BS[rows])
        for rows in _row_groups(batch.rows, flags)
    ]
    return Arrangement(forwards, batch.layout(), 0, None, rule)


def _flat(batch: MicroBatch, flags: Flags) -> Arrangement:
    forwards = []
    # Each row alone is what everything is held to, whatever was recorded.
    recorded_BS = _recorded(batch) if flags.positions == "recorded" and not flags.is_reference else None
    for rows in _row_groups(batch.rows, flags):
        lengths = batch.valid_BS[rows].sum(axis=1)
        ids_T = batch.ids_BS[rows][batch.valid_BS[rows]]
        if not ids_T.size:
            continue
        starts_T = np.repeat(np.cumsum(lengths) - lengths, lengths)
        positions_T = np.arange(ids_T.size) - starts_T
        if recorded_BS is not None:
            positions_T = recorded_BS[rows][batch.valid_BS[rows]]
        segments = int((lengths > 0).sum())
        # An all-ones mask says "one sequence" to the library, which then looks no further at the positions.
        leaks = segments > 1 and not flags.block_mask
        mask = np.ones((1, ids_T.size), dtype=np.int64) if leaks else None
        forwards.append(Forward(ids_T[None], positions_T[None], mask, segments, valid=lengths[lengths > 0]))
    lengths = batch.valid_BS.sum(axis=1)
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    response_T = None if batch.response_BS is None else batch.response_BS[batch.valid_BS]
    layout = TokenLayout.packed(cu_seqlens, response_mask_T=response_T)
    return Arrangement(forwards, layout, 1, cu_seqlens, "0..L-1 in each sample" if recorded_BS is None else _RECORDED)


def _recorded(batch: MicroBatch) -> Ints:
    """The recorded position ids.

    Raises:
        UnavailableError: not every token has one, or one is below 0.
    """
    positions_BS = batch.positions_BS
    if positions_BS is None or int(positions_BS.min(initial=0)) < 0:
        found = "no whole number for every token" if positions_BS is None else f"{positions_BS.min()}"
        raise UnavailableError(
            "positions=recorded: the record holds no position_ids to replay", tensor="position_ids",
            expected="a number from 0 for every token, beside input_ids", found=found,
            hint="positions=cumsum counts each row's tokens",
        )  # fmt: skip
    return positions_BS


def _row_groups(rows: int, flags: Flags) -> list[slice]:
    size = flags.rows_per_forward or rows
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]
