"""Stages of a pipeline in a backward: the last stage goes first, and hands each before it what that goes on with.

Where all gradients of one stage are others, from its last layer on, and those of the stages behind it agree as the
whole forward does, the stage went back with something else than it was sent. A weight that two stages share (an
embedding that is the head too) has the sum of both in either, so that the later stage's copy is off by what the earlier
one made of it: it began nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from replay_core.compare.judging.faults import Fault, whose
from replay_core.compare.pairing.ranks import same_values

if TYPE_CHECKING:
    from replay_core.compare.judging.tensors import TensorVerdict

#: Fewer gradients of a stage, all of them off, may be so each for its own reason.
_FEWEST = 3
#: Gradients of one stage that are all off by one factor are another matter.
_ONE_FACTOR = 1e-2


def tied_copies(rows: Sequence[TensorVerdict]) -> set[int]:
    """Rows (by id) of a step's gradients that are another stage's of another name, in both runs, where nothing else of
    their own stage is off.
    """
    off = [row for row in rows if _is_of_a_stage(row) and row.verdict.diverges]
    found: set[int] = set()
    for row in off:
        others = [
            one for one in off
            if one.key.step == row.key.step and _ranks(one) != _ranks(row) and one.name != row.name
        ]  # fmt: skip
        own = [one for one in off if one.key.step == row.key.step and _ranks(one) == _ranks(row)]
        if len(own) == 1 and any(_are_one(row, one) for one in others):
            found.add(id(row))
    return found


def went_back_otherwise(rows: Sequence[TensorVerdict]) -> tuple[Fault, TensorVerdict, int] | None:
    """The stage that all is off of in the first step's backward, with its first row and how many there are.

    rows: in order of computation, those that agree too.
    """
    first = next((row for row in rows if row.verdict.diverges), None)
    if first is None or not _is_of_a_stage(first):
        return None
    own = [row for row in rows if row.key.step == first.key.step]
    if any(row.verdict.diverges and not row.name.startswith(("grad.", "param.")) for row in own):
        return None
    tied = tied_copies(own)
    gradients = [row for row in own if _is_of_a_stage(row) and id(row) not in tied and row.skipped is None]
    off = [row for row in gradients if row.verdict.diverges]
    stages = {_ranks(row) for row in off}
    if len(off) < _FEWEST or len(stages) != 1:
        return None
    (stage,) = stages
    mine = [row for row in gradients if _ranks(row) == stage]
    behind = [row for row in gradients[: gradients.index(off[0])] if _ranks(row) != stage]
    if len(mine) > len(off) or not behind:
        return None
    factors = [1 + row.figures.total.gain for row in off if row.figures is not None]
    are_scaled = all(
        row.figures is not None and row.figures.total.rel_l2 <= abs(row.figures.total.gain) * (1 + _ONE_FACTOR)
        for row in off
    )
    if are_scaled and factors and max(factors) - min(factors) <= _ONE_FACTOR * abs(max(factors, key=abs)):
        return None
    return (
        Fault(
            "went back otherwise", stage,
            f"all {len(off)} gradients of {whose(stage)}'s stage are others, from its last layer on, while its forward "
            "and the gradients of the stages behind it agree: it went back with another gradient than it was sent, or "
            "at another time (another micro-batch's, a stale one of the micro-batch or step before), or without some "
            "micro-batch's",
        ),
        off[0], len(off),
    )  # fmt: skip


def _is_of_a_stage(row: TensorVerdict) -> bool:
    return row.name.startswith("grad.") and row.key.micro is None and row.ranks is not None


def _ranks(row: TensorVerdict) -> tuple[int, ...]:
    return row.ranks.ranks if row.ranks is not None else ()


def _are_one(row: TensorVerdict, other: TensorVerdict) -> bool:
    if row.a is None or row.b is None or other.a is None or other.b is None:
        return False
    return same_values(row.a[1], other.a[1]) and same_values(row.b[1], other.b[1])
