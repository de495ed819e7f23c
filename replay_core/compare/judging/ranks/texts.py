"""Texts of ranks: each rank has those of its own samples, or all have the same."""

from __future__ import annotations

from collections import Counter
from typing import Any

from replay_core.compare.judging.faults import whose
from replay_core.compare.judging.ranks.row import RowOfRanks
from replay_core.compare.judging.ranks.stand_ins import judge_copies
from replay_core.compare.judging.verdict import Verdict
from replay_core.compare.pairing.own_copies import is_same
from replay_core.compare.pairing.ranks import HeldByRanks, Together


def judge_texts(of: RowOfRanks) -> None:
    """Let the row be what the first rank whose text differs has, and name every such rank. Where a rank holds the texts
    of its own samples, those of all ranks are the other run's: in the order of the samples, where token ids say whose
    these are, else one rank after the other; in another order nobody knows here whose text is whose, and the row is not
    compared.
    """
    row, held = of.row, of.held
    each: list[Any] = [getattr(ref.source, "value", None) for ref in held.parts]
    said = getattr(of.whole.source, "value", None)
    if isinstance(said, list) and all(isinstance(one, list) and len(one) != len(said) for one in each):
        places = _places_of(each, held, of.together, len(said))
        if places is not None and row.ranks is not None:
            strange = [
                rank for rank, own, mine in zip(held.ranks, each, places, strict=True)
                if [str(text) for text in own] != [str(said[at]) for at in mine]
            ]  # fmt: skip
            row.ranks.parted, row.verdict = tuple(strange), Verdict.DIFF if strange else Verdict.SAME
            row.reason = (
                f"of {whose(strange)}: other texts than the other run has of the same samples" if strange
                else "the texts of all ranks are the other run's of the same samples"
            )  # fmt: skip
            return
        laid = [str(text) for one in each for text in one]
        theirs, known = Counter(laid), Counter(map(str, said))
        if laid == [str(text) for text in said]:
            row.verdict, row.reason = Verdict.SAME, "the texts of all ranks together are the other run's"
        elif theirs == known:
            row.skipped = "the ranks hold the other run's texts in another order: whose text is whose is not told"
        elif theirs.total() != known.total():
            row.skipped = "each rank holds the texts of its own samples, and together they are not as many"
        elif row.ranks is not None:
            strange = [
                rank for rank, one in zip(held.ranks, each, strict=True) if any(str(text) not in known for text in one)
            ]
            row.ranks.parted, row.verdict = tuple(strange), Verdict.DIFF
            row.reason = f"texts of {whose(strange)} that the other run has not" if strange else (
                "the same texts, each another number of times"
            )  # fmt: skip
        return
    is_off = row.verdict is Verdict.DIFF
    judge_copies(of)
    if row.skipped is not None or row.verdict is not Verdict.DIFF or row.ranks is None:
        return
    first = [] if not is_off else [
        rank for rank, ref in zip(held.ranks, held.parts, strict=True) if is_same(held.parts[0], ref)
    ]  # fmt: skip
    row.ranks.parted = tuple(sorted({*first, *row.ranks.parted}))
    row.reason = f"of {whose(row.ranks.parted)}: {row.reason}"


def _places_of(each: list[Any], held: HeldByRanks, together: Together, count: int) -> list[list[int]] | None:
    """Of every rank's texts, of which of the other run's samples each is; None where the token ids do not say."""
    if together.whose is None:
        return None
    own = dict(zip(together.ranks, together.whose, strict=True))
    places = [[at for start, long in own[rank] for at in range(start, start + long)] for rank in held.ranks]
    if any(len(texts) != len(mine) for texts, mine in zip(each, places, strict=True)):
        return None
    return places if {at for mine in places for at in mine} == set(range(count)) else None
