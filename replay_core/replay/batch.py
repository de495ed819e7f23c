"""Batch: the tokens, masks and temperature of a micro-batch, from a padded grid or a pack. numpy only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from replay_core.errors import DumpError, RequestError
from replay_core.samples.layout import Bools, Ints, TokenLayout


@dataclass(frozen=True)
class Batch:
    """A padded micro-batch: token ids and which slots hold tokens; `response_BS` says which were generated."""

    ids_BS: Ints
    valid_BS: Bools
    response_BS: Bools | None = None
    temperature: float | None = None

    @property
    def rows(self) -> int:
        return int(self.ids_BS.shape[0])

    @property
    def tokens(self) -> int:
        return int(self.valid_BS.sum())

    @property
    def largest_id(self) -> int:
        """The largest id any slot holds, padding included: the padded forward embeds those as well."""
        return int(self.ids_BS.max(initial=0))

    def layout(self) -> TokenLayout:
        return TokenLayout.padded(self.valid_BS, self.response_BS)

    def take(self, rows: Sequence[int]) -> Batch:
        """The batch of some of its rows."""
        chosen = list(rows)
        response = None if self.response_BS is None else self.response_BS[chosen]
        return Batch(self.ids_BS[chosen], self.valid_BS[chosen], response, self.temperature)


def padded_batch(
    ids: Any, mask: Any, response: Any = None, temperature: float | None = None, *, file: str | None = None
) -> Batch:
    """A batch from [B, S] ids and mask; `response` may be [B, S] or the suffix [B, A] (action j is token S-A+j).

    Raises:
        DumpError: the shapes do not fit each other.
    """
    ids_BS = np.asarray(ids)
    mask_BS = np.asarray(mask)
    if ids_BS.ndim != 2 or not np.issubdtype(ids_BS.dtype, np.number):
        raise DumpError(
            "input_ids is no batch of token ids", file=file, tensor="input_ids",
            expected="[B, S] integers", found=f"{ids_BS.dtype} {list(ids_BS.shape)}",
        )  # fmt: skip
    if not np.array_equal(ids_BS, np.rint(ids_BS)):
        raise DumpError("input_ids holds numbers that are no token ids", file=file, tensor="input_ids",
                        expected="whole numbers", found=str(ids_BS[ids_BS != np.rint(ids_BS)][0]))  # fmt: skip
    if mask_BS.shape != ids_BS.shape:
        raise DumpError(
            "the attention mask does not fit the input ids", file=file, tensor="attention_mask",
            expected=str(list(ids_BS.shape)), found=str(list(mask_BS.shape)),
        )  # fmt: skip
    try:
        layout = TokenLayout.padded(mask_BS, response)
    except ValueError as error:
        raise DumpError(str(error), file=file, tensor="response_mask") from None
    return Batch(ids_BS.astype(np.int64), mask_BS.astype(bool), layout.response_BS, temperature)


def unpacked_batch(
    ids: Any, cu_seqlens: Any, response: Any = None, temperature: float | None = None, *, file: str | None = None
) -> Batch:
    """A right-padded batch from a pack [1, T] and its cu_seqlens.

    Raises:
        DumpError: the boundaries do not fit the pack.
    """
    ids_T = np.asarray(ids).reshape(-1).astype(np.int64)
    response_T = None if response is None else np.asarray(response).reshape(-1).astype(bool)
    try:
        lengths = TokenLayout.packed(cu_seqlens, ids_T.size).lengths
    except ValueError as error:
        raise DumpError(str(error), file=file, tensor="cu_seqlens") from None
    if response_T is not None and response_T.shape != ids_T.shape:
        raise DumpError(
            "the response mask does not fit the pack", file=file, tensor="response_mask",
            expected=str(list(ids_T.shape)), found=str(list(response_T.shape)),
        )  # fmt: skip
    valid_BS = np.arange(int(lengths.max(initial=0))) < lengths[:, None]
    ids_BS = np.zeros(valid_BS.shape, dtype=np.int64)
    ids_BS[valid_BS] = ids_T[: int(lengths.sum())]
    response_BS = None
    if response_T is not None:
        response_BS = np.zeros(valid_BS.shape, dtype=bool)
        response_BS[valid_BS] = response_T[: int(lengths.sum())]
    return Batch(ids_BS, valid_BS, response_BS, temperature)


def resolve_temperature(asked: float | None, recorded: float | None) -> tuple[float, str | None]:
    """The temperature to divide logits by, and what to say about it.

    Raises:
        RequestError: the recorded temperature is not above 0.
    """
    if asked is not None:
        differs = recorded not in (None, asked)
        return asked, f"temperature {asked:g} as asked; the record says {recorded:g}" if differs else None
    if recorded is None:
        return 1.0, "the record names no temperature: 1.0 is assumed"
    if not recorded > 0:
        raise RequestError("the recorded temperature is not above 0", found=str(recorded), hint="--temperature 1.0")
    return recorded, None
