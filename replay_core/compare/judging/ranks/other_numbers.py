"""Tensors that are, by their values, those of another number: another layer's, expert's or stage's."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from replay_core import pages
from replay_core.compare.judging import algebra, contributions, subspaces
from replay_core.compare.judging.faults import Fault, whose
from replay_core.compare.judging.ranks.row import MOST, RowOfRanks
from replay_core.compare.judging.ranks.stand_ins import take
from replay_core.compare.pairing.own_copies import is_same
from replay_core.records import TensorRef
from replay_core.regexes import regex

#: A weight is another's where it is off that one by this part of what it is off its own; and of so many elements.
_NEARER, _FEWEST_NEAR = 0.1, 64
_NUMBER = regex(r"\d{1,9}")
#: The number of an expert in a weight's name.
_EXPERT = regex(r"(?<=\.)(?:\w*expert\w*)\.\d{1,9}(?=\.)|(?<=expert)s?_?\d{1,9}(?=\.)", re.IGNORECASE)
#: What a model returned, as one of several that are numbered.
_RETURNED = regex(r"^(forward\.output\..*\.)(\d{1,9})$")


def is_returned(name: str) -> bool:
    """Whether it is one of several that a model returned."""
    return _RETURNED.search(name) is not None


def judged_as_later(of: RowOfRanks) -> bool:
    """Whether what a rank alone returns is, by its values, what the other run returns under a later number (its hidden
    states): a stage of a pipeline counts its own from 0. Judged so, if it is.
    """
    row, held, mine = of.row, of.held, of.ours
    place = _RETURNED.search(row.name)
    if place is None or len(held.ranks) > 1 or held.ranks == of.together.ranks[:1]:
        return False
    for (name, stage), theirs in of.other.tensors.items():
        head, _, number = name.rpartition(".")
        if stage != row.key.stage or f"{head}." != place[1] or not number.isdigit() or int(number) <= int(place[2]):
            continue
        if theirs[1].shape != mine[1].shape or not theirs[1].is_readable or not algebra.is_near(theirs[1], mine[1]):
            continue
        take(row, of.judge(of.facing(mine, theirs), of.micro_pair))
        row.reason = f"as {name} of the other run, for a stage of a pipeline counts its own from 0: {row.reason}"
        return True
    return False


def of_other_tokens(of: RowOfRanks) -> Fault | None:
    """Whether an expert's gradient is made of the tokens of another expert."""
    if of.held.is_cut or not _EXPERT.search(of.name):
        return None
    pattern, in_layer = _NUMBER.sub("#", of.name), _EXPERT.sub("#", of.name)

    def others() -> Iterator[tuple[str, TensorRef, tuple[int, ...]]]:
        for (name, _), (_, ref) in of.other.tensors.items():
            if name != of.name and _NUMBER.sub("#", name) == pattern and _EXPERT.sub("#", name) == in_layer:
                mine = next((of.together.held.get(id(one)) for _, one in of.side.named(name)), None)
                yield name, ref, mine.ranks if mine is not None else ()

    own = (of.laid, of.whole)
    if (fault := contributions.with_another(of.what, own, others(), of.held.ranks)) is not None:
        return fault
    return subspaces.other_tokens(of.what, own, others(), of.held.ranks)


def of_another(of: RowOfRanks) -> Fault | None:
    """Whether a weight is the other run's weight of another number: an expert that belongs to another rank."""
    held, laid = of.held, of.laid
    pattern = _NUMBER.sub("#", of.name)
    for (name, _), (_, ref) in of.other.tensors.items():
        if name == of.name or ref.shape != laid.shape or _NUMBER.sub("#", name) != pattern:
            continue
        if is_same(laid, ref) or _is_nearer(laid, ref, of.whole):
            what, another = of.name.removeprefix("param."), name.removeprefix("param.")
            theirs = f"{what} on {whose(held.ranks)} is the other run's {another}"
            own = next((of.together.held.get(id(ref)) for _, ref in of.side.named(name)), None)
            ranks = tuple(sorted({*held.ranks, *(own.ranks if own else ())}))
            more = f", which is {whose(own.ranks)}'s" if own is not None and own.ranks != held.ranks else ""
            return Fault("another's", ranks, theirs + more)
    return None


def _is_nearer(one: TensorRef, other: TensorRef, own: TensorRef) -> bool:
    """Whether a weight is another's but for a step or two of its own, and nothing of what it should be."""
    if one.numel > MOST or one.numel < _FEWEST_NEAR or not all(ref.is_readable for ref in (one, other, own)):
        return False
    values, theirs, right = (pages.array(ref).astype(np.float64) for ref in (one, other, own))
    return float(np.linalg.norm(values - theirs)) <= _NEARER * float(np.linalg.norm(values - right))
