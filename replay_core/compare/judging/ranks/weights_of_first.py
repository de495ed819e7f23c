"""What the weight that put out a step's first activation that is off explains of it."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from replay_core import pages
from replay_core.compare.judging import (
    algebra,
    at_boundaries,
    attention_again,
    first_tokens,
    key_order,
    row_parallel,
    row_parallel_otherwise,
    same_at_every_token,
    subspaces,
    vocabulary,
)
from replay_core.compare.judging.faults import Fault, is_open
from replay_core.compare.judging.ranks.attention_in_time import AttentionInTime
from replay_core.compare.judging.ranks.first_activation import FirstActivation, MadeOf
from replay_core.compare.judging.ranks.fused_weights import is_fused
from replay_core.compare.judging.ranks.row import MOST, RowOfRanks
from replay_core.compare.pairing.ranks import HeldByRanks, standing_for
from replay_core.records import TensorRef

if TYPE_CHECKING:
    from replay_core.compare.judging.tensors import TensorVerdict

#: An output is off by no more than its weight where it is by this times as large a part of itself.
_AS_MUCH = 3.0


class WeightsOfFirst:
    """Asks every weight of a step, in turn, for the step's first activation that is off."""

    def __init__(self, first: FirstActivation, attention: AttentionInTime) -> None:
        self._first, self._attention = first, attention

    def explain_sum(self, weight: RowOfRanks) -> None:
        """Whether the step's first activation that is off is the output of this weight, and not the sum it should be
        of what its slices make.
        """
        first = self._first.row(weight.step)
        name = _module_of(weight)
        if first is None or first.ranks is None or first.name != f"{name.removesuffix('.bias')}.output":
            return
        made_of = self._first.made_of(weight.step)
        bias = _bias_beside(weight)
        if not weight.held.is_cut:
            fault = _of_whole_weight(first, made_of, weight, bias)
        elif weight.held.axis == 0:
            fault = _of_lookup(first, made_of, weight, self._first.off(weight.step))
        else:
            fault = _of_row_parallel(first, made_of, weight, bias)
        fault = fault or _at_every_token(first, made_of, weight)
        if fault is not None:
            self._first.explained(weight.step, fault)

    def explain_made_of(self, weight: RowOfRanks) -> None:
        """Whether the step's first activation that is off is made of another attention, or another part."""
        first, held = self._first.row(weight.step), weight.held
        is_its_output = first is not None and first.name == f"{_module_of(weight)}.output"
        if first is None or first.ranks is None or not is_its_output or weight.name.endswith(".bias"):
            return
        laid = standing_for(held) if held.is_cut else held.parts[0]
        is_matrix = len(laid.shape) == 2 and laid.is_readable and laid.numel <= MOST >> 2
        if not _is_open(first.ranks.fault) or not is_matrix or _is_off_alike(first, weight.row):
            return
        made_of = self._first.made_of(weight.step)
        output, whole = made_of.held, made_of.whole
        into = [one for one in made_of.attended if set(one.ranks) <= set(held.ranks)]
        width = whole.shape[-1] if whole.shape else 0
        if width not in laid.shape:
            return
        bias = _bias_beside(weight)
        values = pages.array(laid).astype(np.float64)
        if width != laid.shape[0]:
            values = np.ascontiguousarray(values.T)  # as Conv1D keeps it: [in, out]
        added = _added(bias if bias is not None and bias.is_readable else None, values)
        fault, parted = None, first.ranks.parted
        if into:
            shares = _shares(held, width, laid.shape)
            fault = self._attention.otherwise(first.name, whole, output, into, parted, (values, added), shares)
        fault = fault or row_parallel_otherwise.of_parts(first.name, whole, output, made_of.slices, values, added)
        fault = fault or first_tokens.of_values(first.name, whole, output, made_of.slices, parted, values, added)
        if fault is not None:
            self._first.explained(weight.step, fault)

    def explain_slice(self, weight: RowOfRanks) -> None:
        """Whether what is off in the step's first activation came through a rank's slice of this weight."""
        first, off_NH, held = self._first.row(weight.step), self._first.off(weight.step), weight.held
        if first is None or first.ranks is None or off_NH is None:
            return
        # A gathered shard is all ranks'; where every rank has the weight, a rank that alone is off has another copy.
        is_of_some = not held.is_cut and 0 < len(first.ranks.parted) < len(held.ranks)
        fault = None
        known = first.ranks.fault
        if known is not None and known.kind == same_at_every_token.CONSTANT and held.is_cut:
            return  # what is off by one vector came through no slice
        if first.name == f"{_module_of(weight)}.output" and not is_of_some:
            fault = subspaces.of_a_slices_channels(first.name, off_NH, weight.name, held)
        are_factors = known is not None and known.kind == same_at_every_token.CHANNELS
        if fault is None and not weight.row.verdict.diverges and not are_factors:
            through = subspaces.through_a_slice if held.is_cut else subspaces.added_by_each
            fault = through(first.name, off_NH, weight.name, held)
        if fault is not None:
            self._first.explained(weight.step, fault)


def _of_whole_weight(first: TensorVerdict, made_of: MadeOf, weight: RowOfRanks, bias: TensorRef | None) -> Fault | None:
    """Of a weight that every rank has whole: what its inputs were otherwise, or how often its bias was added."""
    assert first.ranks is not None
    row, held, output, whole, fault = weight.row, weight.held, made_of.held, made_of.whole, None
    # A weight that is off itself explains as much; after its step it is, by what the output made of it.
    if len(held.parts[0].shape) == 2 and output.axis == 1 and not _is_off_alike(first, row):
        values = pages.array(held.parts[0]).astype(np.float64)
        through = values, _added(bias, values)
        of_one = (
            key_order.of_one_key(first.name, output, one, first.ranks.parted, through)
            for one in reversed(made_of.slices)
            if not row.verdict.diverges
        )
        fault = next((one for one in of_one if one is not None), None)
        if _is_open(first.ranks.fault):
            again = attention_again.of_seen_keys(
                first.name, whole, output, made_of.slices, first.ranks.parted, through, made_of.attended
            )
            # What the first token of a stretch sees alone says nothing of the others, where these are made again.
            fault = again if again is not None and (fault is None or again.kind == "window") else fault
    is_asked = first.ranks.fault is None or first.ranks.fault.kind == same_at_every_token.CONSTANT
    if row.name.endswith(".bias") and is_asked and not row.verdict.diverges:
        of_groups = [
            row_parallel.beside_its_bias(first.name, slice_, own, held.parts[0])
            for slice_, own in algebra.in_groups(whole, output)
        ]
        kinds = {one and one.kind for one in of_groups}
        if len(kinds) == 1 and (fault := of_groups[0]) is not None:
            fault = replace(fault, ranks=output.ranks)  # of every group
    return fault


def _at_every_token(first: TensorVerdict, made_of: MadeOf, weight: RowOfRanks) -> Fault | None:
    """Of an output that is off by the same at every token: what was done with the bias, or each channel's weight."""
    if first.ranks is None or first.ranks.fault is None:
        return None
    output, whole, parted, kind = made_of.held, made_of.whole, first.ranks.parted, first.ranks.fault.kind
    if kind == same_at_every_token.CONSTANT and weight.name.endswith(".bias"):
        return same_at_every_token.by_bias(first.name, whole, output, parted, weight.held)
    if kind != same_at_every_token.CHANNELS or weight.name.endswith(".bias") or len(weight.whole.shape) != 1:
        return None
    weight_H = pages.array(weight.whole).astype(np.float64) if weight.whole.is_readable else np.zeros(0)
    return same_at_every_token.by_weight(first.name, whole, output, parted, weight_H)


def _of_lookup(
    first: TensorVerdict, made_of: MadeOf, weight: RowOfRanks, off_NH: NDArray[np.float64] | None
) -> Fault | None:
    """Of a weight whose rows are cut among the ranks: whether it looks words up, and which words are off."""
    ids, held = made_of.ids, weight.held
    # What the weight itself is off by explains as much; it may have been recorded after its step.
    if _is_off_alike(first, weight.row) or ids is None or off_NH is None:
        return None
    if not ids.is_readable or ids.numel != len(off_NH):
        return None
    ids_N = pages.array(ids).reshape(-1).astype(np.int64)
    there_NH = pages.array(made_of.whole).astype(np.float64).reshape(off_NH.shape)
    if not vocabulary.is_lookup(there_NH, ids_N, held):
        return None
    size_N = np.abs(off_NH).max(1)
    off_N = size_N > 1e-3 * size_N.max()
    return vocabulary.looked_up_unmasked(first.name, off_NH, ids_N, held) or vocabulary.of_words(
        first.name, off_N, ids_N, held
    )


def _of_row_parallel(first: TensorVerdict, made_of: MadeOf, weight: RowOfRanks, bias: TensorRef | None) -> Fault | None:
    """Of a weight whose inputs are cut among the ranks: which parts are missing in the sum, or made of other ones."""
    held, output = weight.held, made_of.held
    of_parts = (
        row_parallel.of_parts(first.name, output, inputs, held, bias)
        for inputs in (*reversed(made_of.slices), *row_parallel.gated(made_of.slices))
    )
    straight = (
        told(first.name, made_of.whole, output, fused, held)
        for fused in reversed(made_of.slices) if is_fused(fused.parts[0].name)
        for told in (row_parallel.cut_straight, attention_again.cut_straight)
    )  # fmt: skip
    return next((fault for fault in chain(of_parts, straight) if fault is not None), None)


def _is_open(fault: Fault | None) -> bool:
    """Whether a cause is still looked for: of tokens at a boundary attention that is made again says more."""
    return is_open(fault) or (fault is not None and at_boundaries.is_of_places(fault))


def _module_of(weight: RowOfRanks) -> str:
    return weight.name.removeprefix("param.").removesuffix(".weight")


def _shares(held: HeldByRanks, width: int, shape: tuple[int, ...]) -> list[list[int]]:
    """Of each share of what a projection takes in, the ranks that have it, in turn; nothing where it is not cut so."""
    if not held.is_cut or held.axis != (1 if shape[0] == width else 0):
        return []
    return [
        [rank for rank, own in zip(held.ranks, held.stretches, strict=True) if own == place]
        for place in sorted(set(held.stretches))
    ]


def _bias_beside(weight: RowOfRanks) -> TensorRef | None:
    return next((ref for _, ref in weight.side.named(f"param.{_module_of(weight)}.bias")), None)


def _added(bias: TensorRef | None, values_OI: NDArray[Any]) -> NDArray[Any]:
    """What a layer adds to its output: its bias, if it has one of its shape."""
    if bias is None or bias.shape != values_OI.shape[:1]:
        return np.zeros(len(values_OI))
    return pages.array(bias).astype(np.float64)


def _is_off_alike(output: TensorVerdict, weight: TensorVerdict) -> bool:
    """Whether a weight is off by as large a part of itself as its output is, or nearly."""
    if not weight.verdict.diverges or weight.figures is None or output.figures is None:
        return weight.verdict.diverges
    return output.figures.total.rel_l2 <= _AS_MUCH * weight.figures.total.rel_l2
