"""A step of many ranks, a few ranks at a time: where each faces its own of the other run and nothing else, no rank need
be in memory while another is compared.
"""

from __future__ import annotations

from replay_core.compare.divergence import are_placed
from replay_core.compare.pairing.folding import FieldFolder
from replay_core.compare.pairing.micro_batch_pair import MicroBatchPair
from replay_core.compare.pairing.regrouping import is_open

#: Tensors of both runs that are held at a time, and more only where one rank has more.
MOST_HELD = 1 << 13


class StepOpening:
    """Takes the pairs of a step, loaded, one after the other; holds as many as there is room for."""

    def __init__(self) -> None:
        self._pairs: list[MicroBatchPair] = []
        self._sizes: list[int] = []
        self._size = 0
        self._are_apart = True
        self._folder = FieldFolder()

    def make_room(self) -> None:
        """Forget the pair taken last, before the next is loaded, where all so far are apart and there are too many."""
        if self._pairs and self._are_apart and self._size > MOST_HELD:
            self._pairs[-1].release(self._folder)

    def take(self, micro_pair: MicroBatchPair) -> None:
        """Take the next pair, loaded."""
        self._pairs.append(micro_pair)
        self._sizes.append(len(micro_pair.a.tensors) + len(micro_pair.b.tensors))
        self._size += self._sizes[-1]
        self._are_apart = self._are_apart and _is_apart(micro_pair)

    def groups(self) -> list[list[MicroBatchPair]]:
        """The pairs as they are to be compared: those of a rank together, of as many ranks as there is room for; in
        one group where they are few, or where any may share samples or tensors with another.
        """
        if not self._are_apart or self._size <= MOST_HELD:
            return [self._pairs]
        if len(self._pairs) > 1:
            self._pairs[-1].release(self._folder)
        ranks: dict[int | None, list[int]] = {}
        for number, micro_pair in enumerate(self._pairs):
            ranks.setdefault(micro_pair.key.rank, []).append(number)
        groups: list[list[MicroBatchPair]] = []
        room = 0
        for numbers in ranks.values():
            size = sum(self._sizes[number] for number in numbers)
            if not groups or size > room:
                groups.append([])
                room = MOST_HELD
            groups[-1] += [self._pairs[number] for number in numbers]
            room -= size
        return groups


def _is_apart(micro_pair: MicroBatchPair) -> bool:
    """Whether a rank of one run faces the same rank of the other, with the same samples in the same order and all that
    both have in one shape; and whether names alone say in which order its parameters are used.
    """
    a, b = micro_pair.a, micro_pair.b
    if not a.records or not b.records or a.records[0].key.rank != b.records[0].key.rank:
        return False
    theirs = b.tensors
    for place, (_, ref) in a.tensors.items():
        if place in theirs and theirs[place][1].shape != ref.shape:
            return False
    refs = [ref for side in (a, b) for _, ref in side.tensors.values()]
    if any(ref.stated is not None or ref.copies for ref in refs):
        return False
    return are_placed(a) and are_placed(b) and not is_open(micro_pair)
