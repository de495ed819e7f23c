"""MicroBatch: the tokens, masks and temperature that a replay runs, from the samples of a record. numpy only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec import Struct

from replay_core.errors import DumpError, RequestError
from replay_core.samples.batch import Batch
from replay_core.samples.layout import Bools, Ints, TokenLayout


class MicroBatch(Struct, frozen=True):
    """A padded micro-batch: token ids and which slots hold tokens; `response_BS` says which were generated.

    positions_BS: the recorded position ids, of every slot that holds a token; None where not all of them are recorded.
    """

    ids_BS: Ints
    valid_BS: Bools
    response_BS: Bools | None = None
    temperature: float | None = None
    positions_BS: Ints | None = None

    @classmethod
    def of(cls, samples: Batch, temperature: float | None = None) -> MicroBatch:
        """The recorded grid where a row is a sample; packs, rows and prompts with responses apart are right-padded.

        Raises:
            DumpError: the record holds no token ids, or what it says of its own layout cannot be true.
        """
        tokens_N = samples.tokens_N
        if samples.problem is not None or tokens_N is None or not samples.count:
            ids = samples.held.ids
            raise DumpError(
                samples.problem or "input_ids is no batch of token ids",
                file=str(samples.held.record.path),
                tensor="input_ids",
                expected="[B, S] integers",
                found="no sample" if ids is None else f"{ids.dtype} {list(ids.shape)}",
            )
        layout, ids_BS = samples.layout, samples.ids_BS
        if samples.width is None or layout is None or ids_BS is None:
            valid_BS = np.arange(int(samples.lengths.max(initial=0))) < samples.lengths[:, None]
            ids_BS = np.zeros(valid_BS.shape, dtype=np.int64)
            ids_BS[valid_BS] = tokens_N
        else:
            valid_BS = layout.sample_BS >= 0
        mask = samples.held.find("response_mask", "loss_mask")
        if samples.generated_N is None and mask is not None:
            raise DumpError(
                "the response mask does not fit the samples", file=str(samples.held.record.path), tensor=mask.name,
                expected=str(list(ids_BS.shape)), found=str(list(mask.shape)),
            )  # fmt: skip
        response_BS = None
        if samples.generated_N is not None:
            response_BS = np.zeros(valid_BS.shape, dtype=bool)
            response_BS[valid_BS] = samples.generated_N
        positions_BS, positions_N = None, recorded_positions(samples)
        if positions_N is not None:
            positions_BS = np.zeros(valid_BS.shape, dtype=np.int64)
            positions_BS[valid_BS] = positions_N
        return cls(ids_BS.astype(np.int64), valid_BS, response_BS, temperature, positions_BS)

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

    def take(self, rows: Sequence[int]) -> MicroBatch:
        """The batch of some of its rows."""
        chosen = list(rows)
        response = None if self.response_BS is None else self.response_BS[chosen]
        positions = None if self.positions_BS is None else self.positions_BS[chosen]
        return MicroBatch(self.ids_BS[chosen], self.valid_BS[chosen], response, self.temperature, positions)

    def padded_on(self, side: str) -> MicroBatch:
        """The same rows with all of their padding on one side, `left` or `right`; padding keeps its ids."""
        # Tokens keep their order: a stable sort only moves what is padding.
        order_BS = np.argsort(self.valid_BS if side == "left" else ~self.valid_BS, axis=1, kind="stable")

        def moved(values_BS: Any) -> Any:
            return None if values_BS is None else np.take_along_axis(values_BS, order_BS, axis=1)

        return MicroBatch(
            moved(self.ids_BS), moved(self.valid_BS), moved(self.response_BS), self.temperature,
            moved(self.positions_BS),
        )  # fmt: skip

    def first_columns(self, width: int) -> MicroBatch:
        """The batch of its first slots."""
        response = None if self.response_BS is None else self.response_BS[:, :width]
        positions = None if self.positions_BS is None else self.positions_BS[:, :width]
        return MicroBatch(self.ids_BS[:, :width], self.valid_BS[:, :width], response, self.temperature, positions)

    def without_padding(self) -> MicroBatch:
        """The same rows without the columns that hold a token of none."""
        kept = self.valid_BS.any(axis=0)

        def cut(values_BS: Any) -> Any:
            return None if values_BS is None else values_BS[:, kept]

        return MicroBatch(
            self.ids_BS[:, kept], self.valid_BS[:, kept], cut(self.response_BS), self.temperature,
            cut(self.positions_BS),
        )  # fmt: skip

    def has_left_padding(self) -> bool:
        return not bool(self.valid_BS[:, 0].all())

    def wider(self, columns: int, *, behind: bool = False) -> MicroBatch:
        """The same rows with more padding, on the left where they have some there, else on the right, or `behind` all
        of them.
        """
        padding = (columns, 0) if self.has_left_padding() and not behind else (0, columns)

        def padded(values_BS: Any) -> Any:
            return None if values_BS is None else np.pad(values_BS, ((0, 0), padding))

        idle = self.ids_BS[~self.valid_BS]
        ids_BS = np.pad(self.ids_BS, ((0, 0), padding), constant_values=int(idle[0]) if idle.size else 0)
        return MicroBatch(
            ids_BS, padded(self.valid_BS), padded(self.response_BS), self.temperature, padded(self.positions_BS)
        )


def recorded_positions(samples: Batch) -> Ints | None:
    """[N]: the recorded position id of every token, by sample; None where one is missing or is no whole number."""
    ref = samples.held.find("position_ids")
    found = None if ref is None or samples.per_sample(ref) is not None else samples.values(ref)
    if found is None or not found.said_N.all() or not np.array_equal(found.values_N, np.rint(found.values_N)):
        return None
    return found.values_N.astype(np.int64)


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
