"""The first activation of a step that is off, and what its tokens alone say of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from replay_core import naming, pages
from replay_core.compare.judging import (
    added_again,
    algebra,
    at_boundaries,
    attention_again,
    contributions,
    experts_returned,
    experts_spread,
    key_order,
    own_rows,
    own_share_norm,
    same_at_every_token,
    subspaces,
)
from replay_core.compare.judging.faults import Fault, is_open
from replay_core.compare.judging.joined_heads import joined
from replay_core.compare.judging.ranks import other_numbers
from replay_core.compare.judging.ranks.attention_in_time import AttentionInTime
from replay_core.compare.judging.ranks.experts_of_layers import ExpertsOfLayers
from replay_core.compare.judging.ranks.output_dtypes import OutputDtypes
from replay_core.compare.judging.ranks.row import RowOfRanks, say_first
from replay_core.compare.judging.ranks.tensors_before import TensorsBefore
from replay_core.compare.judging.solved_projection import solved_projection
from replay_core.compare.pairing.ranks import HeldByRanks
from replay_core.records import TensorRef

if TYPE_CHECKING:
    from replay_core.compare.judging.tensors import TensorVerdict

_MOST = 1 << 22


class MadeOf(Struct, frozen=True):
    """What a first activation was made of, for its weight to explain it by.

    held, whole: what the ranks and the other run have of it. slices, attended: what stands before it in its
    micro-batch, and is the other run's: slices of features, and what went into attention.
    """

    held: HeldByRanks
    whole: TensorRef
    slices: Sequence[HeldByRanks]
    attended: Sequence[HeldByRanks]
    ids: TensorRef | None


class FirstActivation:
    """Of every step, the first activation that is off, and by how much at each token, until a weight explains it."""

    def __init__(
        self, before: TensorsBefore, experts: ExpertsOfLayers, dtypes: OutputDtypes, attention: AttentionInTime
    ) -> None:
        self._before, self._experts, self._dtypes, self._attention = before, experts, dtypes, attention
        self._off: dict[int | None, tuple[TensorVerdict, NDArray[np.float64] | None]] = {}
        self._made_of: dict[int | None, MadeOf] = {}

    def row(self, step: int | None) -> TensorVerdict | None:
        row, _ = self._off.get(step, (None, None))
        return row

    def off(self, step: int | None) -> NDArray[np.float64] | None:
        """By how much it is off [token, channel]; None once that is explained, or where it is not known."""
        _, off_NH = self._off.get(step, (None, None))
        return off_NH

    def made_of(self, step: int | None) -> MadeOf:
        return self._made_of[step]

    def explained(self, step: int | None, fault: Fault) -> None:
        """Say of it what a weight explained."""
        row, _ = self._off[step]
        known = row.ranks.fault if row.ranks is not None else None
        if known is not None:  # what it was called before says less
            row.reason = row.reason.removeprefix(f"{known.sentence}; ")
        say_first(row, fault)
        self._off[step] = row, None

    def note(self, of: RowOfRanks, recorded: RowOfRanks) -> None:
        """Keep the first activation of a step that is off, and say of it what its tokens alone tell.

        recorded: the row as its ranks recorded it, where `of` is laid in sections.
        """
        row, held, whole, laid = of.row, of.held, recorded.whole, recorded.laid
        if not naming.is_module_tensor(row.name):
            return
        known = self.row(of.step)
        # What was off when it was judged may have been explained since, by the weights it was computed with.
        if known is not None and known.verdict.diverges and not _is_before(row, known):
            return
        off_NH = None
        ids = of.micro_pair.a.find("input_ids") or of.micro_pair.b.find("input_ids")
        slices, attended = self._before.slices(of), self._before.into_attention(of)
        self._made_of[of.step] = MadeOf(held, whole, slices, attended, ids)
        if row.ranks is not None and is_open(row.ranks.fault):
            fault = self._of_tokens(of, whole, laid, row.ranks.parted)
            is_at_every = fault is not None and same_at_every_token.is_of_values(fault)
            if fault is not None:
                say_first(row, fault)
                if at_boundaries.is_of_places(fault):  # what was put together since is off on all ranks alike
                    row.ranks.parted = fault.ranks
            # Which bias a constant is may be said by what every rank has whole; and factors of the channels that one
            # rank's slice of a weight makes, by that weight.
            if (
                (fault is None or is_at_every)
                and whole.shape == laid.shape
                and len(whole.shape) >= 2
                and whole.numel <= _MOST
            ):
                off = pages.array(laid).astype(np.float64) - pages.array(whole).astype(np.float64)
                off_NH = off.reshape(-1, whole.shape[-1]) if np.isfinite(off).all() else None
                if off_NH is not None and fault is None and held.axis in (None, 0, 1):
                    there_NH = pages.array(whole).astype(np.float64).reshape(off_NH.shape)
                    fault = subspaces.of_other_shards(row.name, there_NH + off_NH, there_NH, held.ranks)
                    if fault is not None:
                        off_NH = None
                        say_first(row, fault)
        self._off[of.step] = row, off_NH

    def _of_tokens(self, of: RowOfRanks, whole: TensorRef, laid: TensorRef, parted: tuple[int, ...]) -> Fault | None:
        held, slices, attended = of.held, self._before.slices(of), self._before.into_attention(of)
        fault = self._of_own_tokens(of, whole, laid, parted) if held.is_cut else None
        fault = fault or contributions.of_gathered(of.name, whole, held, parted, slices)
        cast = self._dtypes.of_step(of.step)
        fault = fault or (cast if cast is not None and set(parted) <= set(cast.ranks) else None)
        fault = fault or algebra.not_dropped(of.name, whole, held)
        fault = fault or own_share_norm.of_own_shares(of.name, whole, held, slices, of.together.ranks)
        if fault is None:
            all_heads, of_ranks = joined(whole, held, attended)
            fault = self._attention.otherwise(of.name, all_heads, of_ranks, attended, parted, None)
        if fault is None:
            before = [*reversed(slices), *self._before.whole(of)]
            fault = experts_spread.explain(of.name, whole, laid, of.together.ranks, before)
            every = of.together.ranks
            fault = fault or added_again.explain(of.name, whole, laid, every, parted, of.other)
        fault = fault or own_rows.of_rows(of.name, whole, held, parted)
        fault = fault or at_boundaries.explain(of.name, whole, held, _tokens(of, whole, held))
        return fault or same_at_every_token.explain(of.name, whole, held, parted)

    def _of_own_tokens(
        self, of: RowOfRanks, whole: TensorRef, laid: TensorRef, parted: tuple[int, ...]
    ) -> Fault | None:
        """What the tokens that are off say of the first activation that is, of which ranks have some each."""
        held = of.held
        if (fault := key_order.of_keys(of.name, whole, laid, held)) is not None:
            return fault
        if (experts := self._experts.of(of)) is not None:
            # Tokens that one rank's experts turned away are 0 as well, also on that rank.
            fault = (
                contributions.weighed_otherwise(of.name, whole, laid, experts)
                or contributions.of_own_experts(of.name, whole, held)
                or experts_returned.of_returned(of.name, whole, laid, held, experts)
            )
            if fault is not None:
                return fault
        slices, attended = self._before.slices(of), self._before.into_attention(of)
        whole, held = joined(whole, held, attended)
        found = (key_order.of_one_key(of.name, held, one, parted) for one in reversed(slices))
        first = next((fault for fault in found if fault is not None), None)
        # What the first token of a stretch sees alone says nothing of the others, where these can be made again.
        again = attention_again.of_seen_keys(of.name, whole, held, slices, parted, None, attended)
        if again is None and first is None:
            # Where the projection's weight is recorded, it is asked for once that comes.
            is_recorded = of.other.find(f"param.{of.name.removesuffix('.output')}.weight") is not None
            through = None if is_recorded else solved_projection(of.name, whole, held, slices)
            if through is not None:
                again = attention_again.of_seen_keys(of.name, whole, held, slices, parted, through, attended)
        return again if again is not None and (first is None or again.kind == "window") else first


def _tokens(of: RowOfRanks, whole: TensorRef, held: HeldByRanks) -> int:
    """The axis of tokens: that which is cut, where it is as long as a sequence; else the one behind the samples'."""
    ids = of.micro_pair.a.find("input_ids") or of.micro_pair.b.find("input_ids")
    if held.axis and (ids is None or len(ids.shape) < 2 or whole.shape[held.axis] == ids.shape[1]):
        return held.axis
    return 1


def _is_before(row: TensorVerdict, first: TensorVerdict) -> bool:
    """Whether what a model returned of its first layers is off, where what it returned in the end is the first that
    nothing explains.
    """
    is_returned = first.name == "forward.output.logits" and first.place == row.place
    return (
        is_returned
        and first.ranks is not None
        and is_open(first.ranks.fault)
        and row.name.startswith("forward.output.")
        and other_numbers.is_returned(row.name)
    )
