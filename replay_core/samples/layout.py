"""How a tensor's token axis maps to (sample, position): padded, packed, response slice, next-token shifted.

Every alignment goes through a TokenLayout. Two layouts of the same samples give, for each token that
counts, the slot it has in either tensor; padded and packed hidden states then compare token by token.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


#: A token is one rising number: its sample, then its position in these bits.
POSITION_BITS = 40


def token_numbers(samples: Any, positions: Any) -> Ints:
    """Tokens as rising numbers, (sample, position) in one."""
    numbers: Ints = (np.asarray(samples, np.int64) << POSITION_BITS) + np.asarray(positions, np.int64)
    return numbers


def samples_of(tokens: Ints) -> Ints:
    """The sample of every token number."""
    samples: Ints = tokens >> POSITION_BITS
    return samples


def positions_of(tokens: Ints) -> Ints:
    """The position of every token number within its sample."""
    positions: Ints = tokens & ((1 << POSITION_BITS) - 1)
    return positions


class TokenLayout(Struct, frozen=True):
    """Which token of which sample stands in every slot of a [B, S] or packed [1, T] token axis.

    shape: the token axes, (B, S); a pack is (1, T).
    sample_BS: sample number, -1 where the slot holds no token (padding).
    position_BS: position of the token within its sample, 0..L-1; -1 in padding.
    response_BS: whether the token was generated (None: not known).
    response_width: A of tensors [B, A] that hold the last A slots (OpenRLHF's action suffix), or None.
    """

    shape: tuple[int, int]
    sample_BS: Ints
    position_BS: Ints
    response_BS: Bools | None = None
    response_width: int | None = None

    @classmethod
    def padded(cls, attention_mask_BS: Any, response_mask: Any = None) -> TokenLayout:
        """Layout of a padded batch. `response_mask` may be [B, S] or a suffix [B, A].

        Raises:
            ValueError: the mask is not 2-D, or the response mask fits neither form.
        """
        valid_BS = np.asarray(attention_mask_BS).astype(bool)
        if valid_BS.ndim != 2:
            raise ValueError(f"attention_mask has {valid_BS.ndim} dimensions, expected 2 ([B, S])")
        batch, width = valid_BS.shape
        sample_BS = np.where(valid_BS, np.arange(batch)[:, None], -1)
        position_BS = np.where(valid_BS, np.cumsum(valid_BS, axis=1) - 1, -1)
        response_BS, response_width = None, None
        if response_mask is not None:
            mask = np.asarray(response_mask).astype(bool)
            if mask.ndim != 2 or mask.shape[0] != batch or mask.shape[1] > width:
                raise ValueError(f"response_mask {mask.shape} does not fit a batch of {valid_BS.shape}")
            response_width = mask.shape[1]
            response_BS = np.zeros_like(valid_BS)
            response_BS[:, width - response_width :] = mask
            response_BS &= valid_BS
        return cls((batch, width), sample_BS, position_BS, response_BS, response_width)

    @classmethod
    def packed(cls, cu_seqlens: Any, total: int | None = None, response_mask_T: Any = None) -> TokenLayout:
        """Layout of sequences laid end to end in one row: cu_seqlens [n+1], starts at 0, never falls.

        Slots past the last boundary (`total` may exceed it) are padding.

        Raises:
            ValueError: cu_seqlens does not start at 0, falls, or passes `total`.
        """
        bounds = np.asarray(cu_seqlens, dtype=np.int64).reshape(-1)
        if bounds.size < 2 or bounds[0] != 0 or (np.diff(bounds) < 0).any():
            raise ValueError(f"cu_seqlens must start at 0 and never fall, found {bounds[:8].tolist()}")
        width = int(bounds[-1]) if total is None else int(total)
        if bounds[-1] > width:
            raise ValueError(f"cu_seqlens ends at {int(bounds[-1])}, past the {width} tokens of the pack")
        lengths = np.diff(bounds)
        sample_T = np.full(width, -1, dtype=np.int64)
        position_T = np.full(width, -1, dtype=np.int64)
        sample_T[: bounds[-1]] = np.repeat(np.arange(lengths.size), lengths)
        position_T[: bounds[-1]] = np.arange(bounds[-1]) - np.repeat(bounds[:-1], lengths)
        response = None if response_mask_T is None else np.asarray(response_mask_T).astype(bool).reshape(1, -1)
        return cls((1, width), sample_T[None], position_T[None], response)

    @classmethod
    def of_packs(cls, numbers_BS: Ints) -> TokenLayout:
        """Layout of rows that hold several samples each, numbered from 1 in every row; 0 is padding."""
        valid_BS = numbers_BS > 0
        most_B = numbers_BS.max(axis=1, initial=0)
        before_B = np.cumsum(most_B) - most_B
        sample_BS = np.where(valid_BS, numbers_BS - 1 + before_B[:, None], -1)
        slots = np.arange(numbers_BS.shape[1])
        begins_BS = np.diff(numbers_BS, axis=1, prepend=0) != 0
        first_BS = np.maximum.accumulate(np.where(begins_BS, slots, 0), axis=1)
        return cls((numbers_BS.shape[0], numbers_BS.shape[1]), sample_BS, np.where(valid_BS, slots - first_BS, -1))

    @classmethod
    def end_to_end(cls, lengths_B: Ints, mask_T: Any = None) -> TokenLayout:
        """Layout of ragged rows stored one after the other; slots where `mask_T` is 0 hold no token."""
        bounds = np.concatenate(([0], np.cumsum(lengths_B))).astype(np.int64)
        layout = cls.packed(bounds if bounds.size > 1 else [0, 0])
        if mask_T is None:
            return layout
        valid_T = np.asarray(mask_T).astype(bool)
        before_T = np.cumsum(valid_T) - valid_T
        position_T = before_T - np.repeat(np.append(before_T, 0)[bounds[:-1]], lengths_B)
        sample_BS = np.where(valid_T, layout.sample_BS, -1)
        return cls(layout.shape, sample_BS, np.where(valid_T, position_T, -1)[None])

    def reordered(self, order: Ints) -> TokenLayout:
        """The layout of a pack whose i-th sample is sample `order[i]`."""
        return replace(self, sample_BS=np.where(self.sample_BS >= 0, order[self.sample_BS], -1))

    def with_response(self, generated_N: Bools | None) -> TokenLayout:
        """The layout, with whether each token was generated, sample by sample (None: not known)."""
        if generated_N is None:
            return self
        response_BS = np.zeros(self.shape, dtype=bool)
        response_BS.reshape(-1)[self.slots()] = generated_N
        return replace(self, response_BS=response_BS)

    @property
    def samples(self) -> int:
        return int(self.sample_BS.max(initial=-1)) + 1

    @property
    def lengths(self) -> Ints:
        """Tokens of each sample."""
        valid = self.sample_BS[self.sample_BS >= 0]
        lengths: Ints = np.bincount(valid, minlength=self.samples).astype(np.int64)
        return lengths

    def slots(self, alignment: str = "full", region: str = "valid") -> Ints:
        """Flat slots (into B*S) of the tokens that count, ordered by (sample, position).

        alignment "full": index t is about token t. "next": index t is about token t + 1, so the last
        token of each sample has none, and a response region means the token *predicted* is a response token.
        region: "valid" | "response" (falls back to valid where no response mask is known).
        """
        sample = self.sample_BS.reshape(-1)
        position = self.position_BS.reshape(-1)
        flat: Ints = np.flatnonzero(sample >= 0)
        flat = flat[np.lexsort((position[flat], sample[flat]))]
        response = None if self.response_BS is None else self.response_BS.reshape(-1)
        if alignment == "next":
            has_next = sample[flat][1:] == sample[flat][:-1]
            if region == "response" and response is not None:
                has_next &= response[flat][1:]
            flat = flat[:-1][has_next]
            return flat
        if region == "response" and response is not None:
            return flat[response[flat]]
        return flat

    def said(self, alignment: str = "full") -> Said:
        """What a tensor of that alignment says of each token, in the order of the tokens spoken about."""
        sample, position = self.sample_BS.reshape(-1), self.position_BS.reshape(-1)
        slots = self.slots(alignment)
        # The token after slot t in its sample need not be slot t + 1: holes in a mask hold nobody.
        every = self.slots("full")
        about = every[
            np.searchsorted(
                token_numbers(sample[every], position[every]),
                token_numbers(sample[slots], position[slots] + (alignment == "next")),
            )
        ]
        return Said(token_numbers(sample[about], position[about]), slots)

    def at(self, slot: int) -> tuple[int, int]:
        """(sample, position) of a flat slot; (-1, -1) in padding."""
        return int(self.sample_BS.reshape(-1)[slot]), int(self.position_BS.reshape(-1)[slot])

    def token_axes(self, shape: tuple[int, ...]) -> TokenAxes | None:
        """How a tensor of `shape` carries this layout's tokens, or None when it does not."""
        batch, width = self.shape
        if len(shape) >= 2 and shape[:2] == (batch, width):
            return TokenAxes(2, 0, width)
        if len(shape) >= 2 and width > 1 and shape[:2] == (batch, width - 1):
            return TokenAxes(2, 0, width - 1)
        if len(shape) >= 3 and shape[:2] == (width, batch):
            return TokenAxes(2, 0, width, across=1, along=batch)  # Megatron's [S, B, H]
        if len(shape) == 4 and (shape[0], shape[2]) == (batch, width):
            return TokenAxes(3, 0, width, across=shape[1] * width, heads=shape[1])  # [B, H, S, D], as attention has it
        if len(shape) >= 3 and width > 1 and shape[:2] == (1, width):
            return TokenAxes(2, 0, width, across=0)  # positions that all samples share: rope's tables
        if len(shape) >= 1 and shape[0] == batch * width and (batch == 1 or len(shape) == 2):
            return TokenAxes(1, 0, width)
        if self.response_width and len(shape) == 2 and shape == (batch, self.response_width):
            return TokenAxes(2, width - self.response_width, self.response_width)
        return None


class Said(Struct, frozen=True):
    """tokens: the token spoken about, (sample, position) as one rising number; slots: where it is said."""

    tokens: Ints
    slots: Ints


class TokenAxes(Struct, frozen=True):
    """The leading `axes` of a tensor are tokens: `width` slots of each row from `offset` on.

    across, along: how far apart rows and columns of the layout lie in the tensor's own flattened token axes; `across`
    is None where rows follow each other.
    heads: of a tensor that has heads between samples and positions, how many; a token is then `heads` rows.
    """

    axes: int
    offset: int
    width: int
    across: int | None = None
    along: int = 1
    heads: int = 1

    def rows(self, slots: Ints, layout: TokenLayout) -> Ints:
        """Where the layout's flat slots lie in the tensor's own flattened token axes; -1 where they do not."""
        batch_width = layout.shape[1]
        row, column = slots // batch_width, slots % batch_width - self.offset
        inside = (column >= 0) & (column < self.width)
        across = self.width if self.across is None else self.across
        return np.where(inside, row * across + column * self.along, -1)
