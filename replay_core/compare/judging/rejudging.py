"""Judges a comparison again with other tolerances, from the figures it kept: nothing is read."""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING

from msgspec.structs import replace

from replay_core.compare.judging.judgement import judge
from replay_core.compare.judging.tensors import TensorVerdict, say
from replay_core.compare.judging.tolerance import Tolerances
from replay_core.compare.tally import Tally

if TYPE_CHECKING:
    from replay_core.compare.comparison import Comparison


def rejudge(comparison: Comparison, tolerances: Tolerances, *, exact: bool = False) -> Comparison:
    """The comparison as it reads under other tolerances, or with `exact` bitwise. The one given stays as it is.

    Exact for every limit of the table and of a rule. For an atol and rtol that were not counted while reading, what
    the figures leave open stays a DIFF that says so (`elementwise.beyond`). The place shown is the one found before.
    """
    rows = [rejudged(row, tolerances, exact=exact) for row in comparison.tensors]
    return replace(comparison, tensors=rows, tally=Tally())


def rejudged(row: TensorVerdict, tolerances: Tolerances, *, exact: bool = False) -> TensorVerdict:
    """One row under other tolerances; a copy, or the row itself where none could change it."""
    if row.context is None or row.figures is None:
        return row
    context = replace(row.context, bitwise_only=True) if exact else row.context
    found = judge(row.figures, row.unmasked, context, tolerances)
    again = copy(row)
    say(again, found)
    return again
