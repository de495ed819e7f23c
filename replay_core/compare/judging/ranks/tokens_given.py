"""Which tokens every rank was given in a step."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from replay_core.compare.judging import token_rows
from replay_core.compare.pairing.ranks import Together

if TYPE_CHECKING:
    from replay_core.compare.judging.tensors import TensorVerdict


class TokensGiven:
    """Of every step, the token ids of each rank and micro-batch."""

    def __init__(self) -> None:
        self._of_steps: dict[int | None, list[token_rows.Given]] = defaultdict(list)
        #: What ranks hold together, by its id, whose tokens were noted.
        self._seen: set[int] = set()

    def note(self, together: Together, row: TensorVerdict) -> None:
        if together.ids is None or id(together) in self._seen:
            return
        self._seen.add(id(together))
        for rank, ref in zip(together.ranks, together.ids, strict=True):
            micros = together.micros.get(rank) or (row.key.micro or 0,)
            self._of_steps[row.key.step] += token_rows.in_micros(ref, rank, micros)

    def of_step(self, step: int | None) -> list[token_rows.Given]:
        return self._of_steps[step]

    def micros(self, step: int | None) -> int:
        """In how many micro-batches the ranks were given tokens."""
        return len({given.micro for given in self._of_steps[step]})

    def shares(self, step: int | None) -> int:
        """Among how many groups of ranks a step's tokens are shared, each with its own."""
        by_rank: dict[int, list[bytes]] = defaultdict(list)
        for one in self._of_steps[step]:
            by_rank[one.rank].append(one.ids.tobytes())
        return len(set(map(tuple, by_rank.values())))
