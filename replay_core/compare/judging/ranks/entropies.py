"""What the logits say of entropies that are off: those that were recorded, or what a head's weight makes of the last
output before it.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
from msgspec import Struct

from replay_core import naming, pages
from replay_core.compare.judging import own_entropy
from replay_core.compare.judging.faults import Fault, is_open
from replay_core.compare.judging.ranks.row import RowOfRanks, say_first
from replay_core.compare.judging.ranks.tensors_before import and_then
from replay_core.compare.pairing.ranks import standing_for
from replay_core.records import TensorRef


class _Unexplained(Struct, frozen=True):
    """Entropies that are off, and the outputs of their tokens before them that are the other run's."""

    of: RowOfRanks
    outputs: list[TensorRef]


class Entropies:
    """Entropies of a step that are off and that no logits explain, until a head's weight does."""

    def __init__(self) -> None:
        self._outputs: dict[Any, list[TensorRef]] = defaultdict(list)
        self._left: list[_Unexplained] = []

    def begin_step(self) -> None:
        self._outputs.clear()
        self._left.clear()

    def note(self, of: RowOfRanks) -> None:
        """Keep what a module put out, of which a head may have made logits."""
        is_output = naming.is_module_tensor(of.name) and not of.is_gradient and not of.row.verdict.diverges
        if is_output and len(of.whole.shape) >= 2 and of.whole.is_readable:
            self._outputs[of.micro_batch] = and_then(self._outputs[of.micro_batch], of.whole)

    def of_logits(self, of: RowOfRanks, fault: Fault | None) -> Fault | None:
        """Whether entropies are made of a rank's own words, where the logits are recorded."""
        if naming.canonical(of.name) != "entropy" or not is_open(fault):
            return fault
        for (name, stage), (_, ref) in of.other.tensors.items():
            if not naming.makes_logits(name) or name.startswith("grad.") or ref.shape[:-1] != of.whole.shape:
                continue
            if not ref.is_readable or ref.numel > own_entropy.MOST:
                continue
            mine = of.side.tensors.get((name, stage))
            held = of.together.held.get(id(mine[1])) if mine is not None else None
            cut = held if held is not None and held.axis == len(ref.shape) - 1 else None
            logits_NV = pages.array(ref).astype(np.float64).reshape(-1, ref.shape[-1])
            found = own_entropy.explain(of.name, of.whole, of.held, logits_NV, cut, of.together.ranks)
            if found is not None:
                return found
        tokens = [one for one in self._outputs[of.micro_batch] if one.shape[:-1] == of.whole.shape]
        self._left.append(_Unexplained(of, tokens))
        return fault

    def explain(self, weight: RowOfRanks) -> None:
        """Whether this weight, of words that are cut among ranks, makes the logits that entropies are to be made of."""
        held = weight.held
        if not self._left or held.axis != 0 or len(weight.whole.shape) != 2 or weight.row.verdict.diverges:
            return
        laid = standing_for(held)
        if not laid.is_readable or laid.numel > own_entropy.MOST:
            return
        words_VH = pages.array(laid).astype(np.float64)
        for one in [*self._left]:
            for output in reversed(one.outputs):
                if output.shape[-1] != words_VH.shape[1] or output.numel // output.shape[-1] * len(words_VH) > (
                    own_entropy.MOST
                ):
                    continue
                logits_NV = pages.array(output).astype(np.float64).reshape(-1, output.shape[-1]) @ words_VH.T
                of = one.of
                fault = own_entropy.explain(of.name, of.whole, of.held, logits_NV, held, of.together.ranks)
                if fault is not None:
                    say_first(of.row, fault)
                    self._left.remove(one)
                    break
