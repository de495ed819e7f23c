"""What a head was given, of which its gradient tells the weights of its tokens."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from replay_core import naming
from replay_core.compare.judging import token_weights
from replay_core.compare.judging.ranks.row import RowOfRanks
from replay_core.compare.judging.ranks.tensors_before import and_then
from replay_core.records import TensorRef


class HeadsOfStep:
    """Of a step and a role: what its micro-batches gave a head whose logits agree."""

    def __init__(self) -> None:
        self._given: dict[tuple[int | None, str | None], list[token_weights.GivenToHead]] = defaultdict(list)
        #: Of a micro-batch: its last outputs.
        self._last: dict[Any, list[TensorRef]] = defaultdict(list)

    def begin_step(self) -> None:
        self._given.clear()
        self._last.clear()

    def note(self, of: RowOfRanks) -> None:
        """Keep what a head was given, whose gradient may be asked for the weights of its tokens."""
        row, whole, together, place = of.row, of.whole, of.together, of.micro_batch
        if not naming.is_module_tensor(of.name) or of.is_gradient or not whole.is_readable:
            return
        if not naming.makes_logits(of.name) or row.verdict.diverges or row.skipped is not None or len(whole.shape) < 2:
            self._last[place] = and_then(self._last[place], whole)
            return
        fed = next((one for one in reversed(self._last[place]) if one.shape[:-1] == whole.shape[:-1]), None)
        targets = tuple(token_weights.targets(of.other, whole.shape[:-1]))
        if fed is not None and targets:
            head = token_weights.GivenToHead(
                row.key.micro or 0, whole, fed, targets, together.ranks, together.cuts, together.micros
            )
            self._given[of.step, row.key.role].append(head)
            del self._last[place]  # the model returns these logits once more

    def given(self, of: RowOfRanks) -> list[token_weights.GivenToHead]:
        return self._given[of.step, of.row.key.role]
