"""Layers whose experts are each on some of the ranks, and what their experts put out."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from replay_core import naming
from replay_core.compare.judging.ranks.row import RowOfRanks
from replay_core.records import TensorRef
from replay_core.regexes import regex

_NUMBER = regex(r"\d{1,9}")
_OF_EXPERT = regex(r"\.experts?\.")
#: One of a list of modules within a layer, whatever it is called: an expert, where ranks have other ones of it each.
_ONE_OF_LIST = regex(r"(?<=\.)\w+\.\d{1,9}\.output$")


class ExpertsOfLayers:
    """Of a micro-batch, by the output of such a layer: what its experts put out, and whose they are."""

    def __init__(self) -> None:
        self._outputs: dict[Any, dict[str, list[tuple[int, TensorRef]]]] = defaultdict(dict)

    def note(self, of: RowOfRanks) -> None:
        name, held, together = of.name, of.held, of.together
        if not naming.is_module_tensor(name) or of.is_gradient:
            return
        outputs = self._outputs[of.micro_batch]
        if (found := _OF_EXPERT.search(name)) is not None and len(held.ranks) < len(together.ranks):
            outputs.setdefault(f"{name[: found.start()]}.output", [])
        is_of_some = len(held.ranks) == 1 < len(together.ranks) and held.parts[0].is_readable
        if is_of_some and (found := _ONE_OF_LIST.search(name)) is not None:
            around = name[: found.start() - 1]
            if _OF_EXPERT.search(name) or (_NUMBER.search(around) and len(held.parts[0].shape) == 2):
                outputs.setdefault(f"{around}.output", []).append((held.ranks[0], held.parts[0]))

    def of(self, layer: RowOfRanks) -> list[tuple[int, TensorRef]] | None:
        """What the experts of a layer put out, by its output; None where its experts are not apart."""
        return self._outputs[layer.micro_batch].get(layer.name)
