"""Weights that are several in one (q, k and v), of each of which every rank has a share: laid one after the other."""

from __future__ import annotations

import re

from msgspec.structs import replace

from replay_core import naming
from replay_core.compare.judging import algebra
from replay_core.compare.judging.faults import Fault
from replay_core.compare.judging.ranks.row import RowOfRanks
from replay_core.compare.pairing.ranks import HeldByRanks, in_sections, laid_of, sections, standing_for
from replay_core.records import Parts, TensorRef
from replay_core.regexes import regex

#: Names of weights that are several in one.
_FUSED = regex(r"qkv|query_key_value|c_attn|in_proj|gate_up|up_gate|fc1|w1\d|kv_proj|gate_and_up", re.IGNORECASE)
_NUMBER = regex(r"\d{1,9}")


def is_fused(name: str) -> bool:
    return _FUSED.search(name) is not None


class FusedWeights:
    """How the weights that are several in one were found to be cut, and what they put out with them."""

    def __init__(self) -> None:
        #: Tensors with their numbers left out -> the sections of which every rank has its share.
        self._sections: dict[str, tuple[int, ...]] = {}
        #: Modules (see `_module`) whose slices in turn were found to be the other run's.
        self._in_turn: set[str] = set()

    def in_sections(self, of: RowOfRanks) -> RowOfRanks | None:
        """Slices of a weight that is several in one, of each of which a rank has a share, and the other run's, which
        may be laid together of slices too; None where neither is laid so.
        """
        held, whole = of.held, of.whole
        pattern = _NUMBER.sub("#", of.name.removeprefix("grad.").removeprefix("param."))
        if not is_fused(of.name) or not all(ref.is_readable for ref in (whole, *held.parts)):
            return None
        inner = _slices_within(held)
        if inner is not None:
            of_groups = _in_sections_of_groups(whole, held, inner)
            if of_groups is None:
                return None
            # The weight and its gradient are cut as what it puts out is, which few digits of these may not tell.
            laid, sizes = of_groups
            self._sections[pattern] = self._sections[_module(of.name, inner[0])] = sizes
            return of.holding(laid, whole)
        # Samples may be dealt to ranks whose other run has slices of the features of each.
        source = whole.source if isinstance(whole.source, Parts) else None
        is_across = source is not None and held.is_cut and len(whole.shape) == len(source.parts[0].shape) > 2 and (
            source.axis == len(whole.shape) - 1 != held.axis
        )  # fmt: skip
        is_cut = held.is_cut and not is_across
        there = laid_of(whole, None if is_across else held.axis)
        cut = held if is_cut else there
        if cut is None:
            return None
        module = _module(of.name, cut)
        known = self._sections.get(pattern) or self._sections.get(module)
        for sizes in (known,) if known is not None else sections(cut):
            again = in_sections(held, sizes) if is_cut else held
            other = in_sections(there, sizes) if there is not None else None
            if again is None or (there is not None and other is None):
                continue
            made = whole if other is None else standing_for(other).with_(name=whole.name, canonical=whole.canonical)
            own, in_turn = standing_for(again), whole if other is not None else standing_for(held)
            if known is not None or algebra.is_near(made, own) or (
                algebra.is_nearer(made, own, in_turn) if other is None else algebra.is_nearer(own, made, in_turn)
            ):  # fmt: skip
                self._sections[pattern] = self._sections[module] = sizes
                return of.holding(again, made)
        return None

    def note_in_turn(self, of: RowOfRanks) -> None:
        """Keep of which modules the ranks' slices, one rank after the other, are the other run's."""
        held = of.held
        is_in_turn = held.is_cut and not of.row.verdict.diverges and len(held.stretches[0]) == 1
        is_of_rows = not naming.is_module_tensor(of.name) or held.axis == len(of.whole.shape) - 1
        if is_in_turn and is_of_rows and is_fused(of.name):
            self._in_turn.add(_module(of.name, held, of_all_layers=False))

    def of_bias(self, of: RowOfRanks, fault: Fault | None) -> Fault | None:
        """Whether a bias is cut across the several that it is, where its weight is cut in turn."""
        if fault is not None or not of.is_gradient or not of.name.endswith(".bias") or not is_fused(of.name):
            return fault
        weight = f"{of.name.removesuffix('.bias')}.weight"
        beside = next((ref for _, ref in of.other.named(weight)), None)
        if not of.held.is_cut or _module(of.name, of.held, of_all_layers=False) not in self._in_turn:
            return None
        module = of.name.removeprefix("grad.").removesuffix(".bias")
        return algebra.cut_across(module, of.held, of.whole, beside)


def _module(name: str, cut: HeldByRanks, *, of_all_layers: bool = True) -> str:
    """A module that is several in one, whatever its layer: its weight, its bias and what they put out are cut alike,
    which gradients of few digits alone do not tell.
    """
    pattern = name.removeprefix("grad.").removeprefix("param.")
    pattern = _NUMBER.sub("#", pattern) if of_all_layers else pattern
    total = sum(long for stretches in set(cut.stretches) for _, long in stretches)
    return f"{naming.module_of(pattern).removesuffix('.weight').removesuffix('.bias')} of {total}"


def _in_sections_of_groups(
    whole: TensorRef, held: HeldByRanks, inner: list[HeldByRanks]
) -> tuple[HeldByRanks, tuple[int, ...]] | None:
    """The parts of several groups of ranks, of each of which the slices are shares of several in one (q, k and v), and
    the sizes of these. None where they are not.
    """
    for sizes in sections(inner[0]):
        made = [in_sections(one, sizes) for one in inner]
        parts = tuple(standing_for(one) for one in made if one is not None)
        if len(parts) < len(inner):
            continue
        again = replace(held, parts=parts)
        if algebra.is_near(whole, standing_for(again)):
            return again, sizes
    return None


def _slices_within(held: HeldByRanks) -> list[HeldByRanks] | None:
    """Of parts that are of samples or tokens each, the slices that each was laid together of along its last axis; None
    where they were not.
    """
    axes = {len(part.shape) - 1 for part in held.parts}
    if not held.is_cut or len(axes) != 1 or held.axis in axes:
        return None
    found = [laid_of(part, *axes) for part in held.parts]
    return [one for one in found if one is not None] if all(found) else None
