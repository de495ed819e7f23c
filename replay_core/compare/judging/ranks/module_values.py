"""What modules put out, and what came back to them: other samples, another order, values of half precision."""

from __future__ import annotations

from replay_core import naming
from replay_core.compare.judging import algebra, own_rows
from replay_core.compare.judging.faults import Fault, is_open, whose
from replay_core.compare.judging.ranks.first_activation import FirstActivation
from replay_core.compare.judging.ranks.row import RowOfRanks
from replay_core.regexes import regex

_ROUTER = regex(r"(?:^|\.)(?:\w*router|gate|wg)$")


def of_other_samples(of: RowOfRanks, fault: Fault | None) -> Fault | None:
    """Whether the few ranks that have a module were given other samples."""
    if fault is None and naming.is_module_tensor(of.name) and len(of.held.ranks) < len(of.together.ranks):
        fault = algebra.other_samples(of.name, of.whole, of.held)
    return fault


def of_halves(of: RowOfRanks, fault: Fault | None) -> Fault | None:
    """Whether all ranks' float32 values are ones of bfloat16."""
    is_of_ranks = of.is_gradient or (of.kind == "activation" and len(of.held.ranks) > 1)
    if is_of_ranks and fault is None and algebra.is_rounded(of.whole, of.held):
        fault = Fault(
            "rounded", of.held.ranks,
            f"{of.what} is float32 and on {whose(of.held.ranks)} every value is one "
            "of bfloat16, which the other run's are not: it was reduced or kept in bfloat16 (half precision)",
        )  # fmt: skip
    return fault


def of_order(of: RowOfRanks, fault: Fault | None) -> Fault | None:
    """Whether the tokens stand in another order."""
    if of.kind == "activation" and fault is None:
        fault = algebra.tokens_in_another_order(of.name, of.whole, of.held)
    return fault


def of_some_ranks(first: FirstActivation, of: RowOfRanks, fault: Fault | None) -> Fault | None:
    """Whether some ranks' values are rounded, or a router's are off by a constant of each expert."""
    if of.kind == "activation" and is_open(fault):
        fault = algebra.rounded_on_some(of.name, of.whole, of.held) or fault
        known = first.row(of.step)
        is_first = known is None or naming.module_of(known.name) == naming.module_of(of.name)
        # Elsewhere a constant of each channel is as often a bias that is left out, or rows that are all alike.
        if is_first and _ROUTER.search(naming.module_of(of.name)):
            fault = own_rows.own_constant(of.name, of.whole, of.held, of.found.parted) or fault
    return fault
