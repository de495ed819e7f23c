"""Where the slices of equally many ranks lie along an axis, by how long they are and how long the whole is.

One after the other; over and over, where there are more ranks than slices, or each slice on ranks that follow each
other (heads of keys and values, of which a tensor-parallel group has fewer than ranks); and of a vocabulary that is
padded until the ranks can share it, the last slice with rows that are no words.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from replay_core.compare.pairing.dims import Stretch

Places = tuple[tuple[Stretch, ...], ...]

#: Tensors with an axis of the vocabulary.
_VOCABULARY = re.compile(
    r"(?:^|\.)(?:wte|lm_head|output_layer|\w*logits|\w*embed\w*|\w*vocab\w*|tok_\w+|word_\w+)(?:\.|$)"
    r"|(?:^|\.)(?:head|tok|lm_\w+)\.(?:weight|bias|output)$|^(?:grad\.|param\.)?output\.(?:weight|bias|output)$"
)


def places_of(ranks: int, length: int, total: int, name: str) -> Iterator[list[Stretch]]:
    """Which stretch each of so many ranks has, in every way that the lengths allow."""
    if length <= 0 or total <= 0:
        return
    held = ranks * length
    if total % length == 0 and held % total == 0:
        yield [(number * length % total, length) for number in range(ranks)]
        copies = held // total
        if 1 < copies < ranks:
            yield [(number // copies * length, length) for number in range(ranks)]
    elif 0 < held - total < length and _VOCABULARY.search(name):
        yield [(number * length, min(length, total - number * length)) for number in range(ranks)]


def makes_words(name: str) -> bool:
    """Whether a tensor is called as one with an axis of the vocabulary is."""
    return _VOCABULARY.search(name) is not None


def among(groups: Sequence[Sequence[int]], count: int, length: int, total: int, name: str) -> Iterator[Places]:
    """The same of groups of ranks (by number), each of which has all of it; ranks that stand anywhere among `count`."""
    (size,) = {len(members) for members in groups}
    place = {number: at for members in groups for at, number in enumerate(members)}
    for stretches in places_of(size, length, total, name):
        yield tuple((stretches[place[number]],) for number in range(count))
