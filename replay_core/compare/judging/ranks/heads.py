"""What a head was given, of which its gradient tells the weights of its tokens."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

from replay_core import naming, pages
from replay_core.compare.judging import through_head, token_weights
from replay_core.compare.judging.faults import Fault
from replay_core.compare.judging.ranks.row import RowOfRanks
from replay_core.compare.judging.ranks.tensors_before import and_then
from replay_core.records import TensorRef
from replay_core.regexes import regex

#: A head, or an embedding that is one, is in no layer with a number.
_OF_A_LAYER = regex(r"\.\d+\.")


class HeadsOfStep:
    """Of a step and a role: what its micro-batches gave a head whose logits agree."""

    def __init__(self) -> None:
        self._given: dict[tuple[int | None, str | None], list[token_weights.GivenToHead]] = defaultdict(list)
        #: Of a micro-batch: its last outputs.
        self._last: dict[Any, list[TensorRef]] = defaultdict(list)
        #: The last module of a micro-batch, whose output a head that is none may have been given.
        self._ends: dict[Any, through_head.GivenToLast] = {}

    def begin_step(self) -> None:
        self._given.clear()
        self._last.clear()
        self._ends.clear()

    def note(self, of: RowOfRanks) -> None:
        """Keep what a head was given, whose gradient may be asked for the weights of its tokens."""
        row, whole, together, place = of.row, of.whole, of.together, of.micro_batch
        if not naming.is_module_tensor(of.name) or of.is_gradient or not whole.is_readable:
            return
        if not naming.makes_logits(of.name) or row.verdict.diverges or row.skipped is not None or len(whole.shape) < 2:
            self._last[place] = and_then(self._last[place], whole)
            self._note_end(of)
            return
        fed = next((one for one in reversed(self._last[place]) if one.shape[:-1] == whole.shape[:-1]), None)
        targets = tuple(token_weights.targets(of.other, whole.shape[:-1]))
        if fed is not None and targets:
            head = token_weights.GivenToHead(
                row.key.micro or 0, whole, fed, targets, together.ranks, together.cuts, together.micros,
                tuple(token_weights.masks(of.side, of.other, whole.shape[:-1])),
            )  # fmt: skip
            self._given[of.step, row.key.role].append(head)
            del self._last[place]  # the model returns these logits once more

    def _note_end(self, of: RowOfRanks) -> None:
        row, whole, together, lead = of.row, of.whole, of.together, of.whole.shape[:-1]
        self._ends.pop(of.micro_batch, None)
        if row.verdict.diverges or row.skipped is not None or len(whole.shape) < 2:
            return
        if targets := tuple(token_weights.targets(of.other, lead)):
            given = token_weights.GivenToHead(
                row.key.micro or 0, whole, whole, targets, together.ranks, together.cuts, together.micros
            )
            self._ends[of.micro_batch] = through_head.GivenToLast(of.name, whole, of.other, given)

    def through_last_norm(self, of: RowOfRanks) -> Fault | None:
        """What the gradient of the norm that was recorded last says of the tokens in it, where no head was."""
        module, _, own = of.name.removeprefix("grad.").rpartition(".")
        ends = [one for one in self._ends.values() if one.name == f"{module}.output"]
        laid = next((ref for _, ref in of.side.named(of.name)), None)
        if not ends or own not in ("weight", "bias") or len(ends) < len(self._ends) or laid is None:
            return None
        weight, bias = (of.other.find(f"param.{module}.{one}") for one in ("weight", "bias"))
        if weight is None or weight.shape != of.whole.shape or not weight.is_readable:
            return None
        norm = pages.array(weight).astype(np.float64), np.zeros(weight.shape)
        if bias is not None and bias.shape == weight.shape and bias.is_readable:
            norm = norm[0], pages.array(bias).astype(np.float64)
        heads = [
            ref for (name, _), (_, ref) in of.other.tensors.items()
            if name.startswith("param.") and _OF_A_LAYER.search(name) is None and ref.is_readable
        ]  # fmt: skip
        told = (through_head.explain(of.what, of.name, of.whole, laid, head, norm, ends) for head in heads)
        return next((fault for fault in told if fault is not None), None)

    def given(self, of: RowOfRanks) -> list[token_weights.GivenToHead]:
        return self._given[of.step, of.row.key.role]
