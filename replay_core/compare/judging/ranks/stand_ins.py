"""What is judged in a row's place: each rank's copy, the ranks' sum, or a multiple of either."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from replay_core import pages
from replay_core.compare.judging.ranks.row import MOST, RowOfRanks
from replay_core.compare.judging.verdict import Verdict
from replay_core.compare.pairing.own_copies import other_copies
from replay_core.compare.pairing.ranks import HeldByRanks
from replay_core.records import Inline, TensorRef

if TYPE_CHECKING:
    from replay_core.compare.judging.tensors import TensorVerdict

_WORST = (Verdict.SAME, Verdict.PADDING, Verdict.CLOSE, Verdict.DIFF, Verdict.NAN, Verdict.SHAPE)


def judge_as(of: RowOfRanks, parts: Sequence[TensorRef], times: float, said: str) -> None:
    """Judge the ranks' sum, times a number, in the place of what each holds."""
    row = of.row
    if parts[0].numel > MOST:
        row.skipped = f"{said} would be judged, and it is too large to be made: {parts[0].numel:,} elements"
        return
    take(row, of.judge(of.facing((of.ours[0], multiple(parts, times))), of.micro_pair))
    row.reason = f"{said}: {row.reason}"


def judge_copies(of: RowOfRanks, times: float = 1.0) -> None:
    """Let the row be what the rank that is furthest off comes to, where ranks hold different bytes.

    times: what each copy is multiplied by before it is judged.
    """
    row, (record, laid) = of.row, of.ours
    parted: list[int] = []
    for rank, ref in other_copies(of.held):
        copy = ref if times == 1 else multiple((ref,), times)
        mine = (record, copy.with_(name=laid.name, canonical=laid.canonical))
        other = of.judge(of.facing(mine), of.micro_pair)
        if other.skipped is not None:
            row.skipped, row.damaged = other.skipped, other.damaged
            return
        if other.verdict.diverges:
            parted.append(rank)
        if _WORST.index(other.verdict) > _WORST.index(row.verdict):
            before = row.verdict
            take(row, other)
            row.note = f"as rank {rank} holds it; rank {of.held.ranks[0]}'s is {before.value}"
    if row.ranks is not None:
        row.ranks.parted = tuple(parted)


def judge_multiple(of: RowOfRanks, times: float, said: str) -> None:
    """Judge what the ranks hold, and every copy that is a rank's own, times a factor that is known of them."""
    row, found = of.row, of.found
    found.fault, found.parted = None, ()
    judge_as(of, (of.laid,), times, said)
    if row.skipped is None:
        judge_copies(of, times)
        row.reason = row.reason if row.reason.startswith(said) else f"{said}: {row.reason}"


def summed(refs: Sequence[TensorRef]) -> NDArray[np.float64]:
    """The sum of tensors of one shape, one after the other: of all ranks at once it would be as many times as large."""
    made = np.zeros(refs[0].shape)
    for ref in refs:
        made += pages.array(ref).astype(np.float64)
    return made


def multiple(refs: Sequence[TensorRef], times: float) -> TensorRef:
    """The sum of tensors of one shape, times a number, as the first of them: in float32, as such a sum is made."""
    made = summed(refs)
    made *= times
    return refs[0].with_(dtype="float32", source=Inline(made.astype("float32").tobytes()), digest=None)


def summed_in_groups(held: HeldByRanks, laid: TensorRef) -> TensorRef | None:
    """Slices that several ranks have, each a part of them, added up; None where that is too much to be made."""
    if held.axis is None or laid.numel > MOST:
        return None
    made = np.zeros(laid.shape)
    for ref, stretches in zip(held.parts, held.stretches, strict=True):
        own, before = pages.array(ref).astype(np.float64), 0
        for start, length in stretches:
            before_it = (slice(None),) * held.axis
            there, here = (*before_it, slice(start, start + length)), (*before_it, slice(before, before + length))
            made[there] += own[here]
            before += length
    return laid.with_(dtype="float64", source=Inline(made.tobytes()), digest=None)


def take(row: TensorVerdict, other: TensorVerdict) -> None:
    """Let a row say what another said of the same pair, and of which values: those around them are read of these."""
    row.a, row.b = other.a, other.b
    row.verdict, row.reason, row.rule, row.suspect, row.context = (
        other.verdict,
        other.reason,
        other.rule,
        other.suspect,
        None,
    )
    row.figures, row.unmasked, row.worst_token = other.figures, other.unmasked, other.worst_token
    row.raw_a, row.raw_b, row.value_a, row.value_b = other.raw_a, other.raw_b, other.value_a, other.value_b
    row.token, row.skipped, row.damaged = other.token, other.skipped, other.damaged
