"""Whether modules of some ranks are called more often than the other run's, just before what parts first: a layer that
is computed once more, of what it put out itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from replay_core.compare.judging.faults import UNEXPECTED, Fault, whose
from replay_core.compare.judging.verdict import Verdict
from replay_core.compare.pairing.ranks import same_values
from replay_core.regexes import regex

if TYPE_CHECKING:
    from replay_core.compare.judging.tensors import TensorVerdict

#: The output of a module that was called once more.
_AGAIN = regex(r"^(.+)\[1\]\.output$")


def is_again(row: TensorVerdict) -> bool:
    """Whether one run alone has this output of a module that both have."""
    return row.verdict is Verdict.MISSING and row.ranks is None and _AGAIN.search(row.name) is not None


def called_again(
    rows: Sequence[TensorVerdict], again: Sequence[TensorVerdict]
) -> tuple[Fault, TensorVerdict, int] | None:
    """The outermost module that one run has once more, before its step's first activation that is off, with other
    values: one that a checkpoint computes again puts out what it did.

    again: outputs that one run alone has (`is_again`).
    """
    first = next((row for row in rows if row.verdict.diverges), None)
    if first is None or first.ranks is None or first.name.startswith(("grad.", "param.")):
        return None
    by_name = {row.name: row for row in rows if row.place == first.place}
    more: list[tuple[str, TensorVerdict]] = []
    for row in again:
        found = _AGAIN.search(row.name) if row.place == first.place else None
        if found is not None and f"{found[1]}.output" in by_name:
            more.append((found[1], row))
    outer = min(more, key=lambda one: (len(one[0].split(".")), one[0]), default=None)
    if outer is None:
        return None
    name, row = outer
    once = by_name[f"{name}.output"]
    is_of_ranks = (row.b is not None) == (first.ranks.which == "b")
    second, own = (row.b, once.b) if row.b is not None else (row.a, once.a)
    if once.ranks is None or once.verdict.diverges or second is None or own is None:
        return None
    try:
        if same_values(second[1], own[1]):
            return None
    except UNEXPECTED:
        return None
    ranks = first.ranks.parted or once.ranks.ranks
    those = [other for other, _ in more if other == name or other.startswith(f"{name}.")]
    return (
        Fault(
            "called again", ranks,
            f"{name} on {whose(ranks)} is called {'twice where the other run calls it once' if is_of_ranks else 'once'}"
            f"{'' if is_of_ranks else ' where the other run calls it twice'}, with other values the second time; its "
            f"first output agrees, and {first.name}, which comes after, is the first that parts",
        ),
        row, len(those),
    )  # fmt: skip
