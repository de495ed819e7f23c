"""Which sample of one run is which sample of the other: by who they are, then by what they say, then by likeness.

Names come first while they tell the truth: where samples that share a name mostly differ, and the same samples
stand elsewhere, the names are only places in a batch and what the samples say decides.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

from replay_core import naming, pages
from replay_core.records import TensorRef
from replay_core.samples.batch import IDENTITIES, Batch, Placed
from replay_core.samples.layout import samples_of

#: Two samples that share this part of their tokens, place by place, are one that changed.
LIKENESS = 0.5

#: Samples compared each with each for likeness; more than these are paired by their place.
MAX_LIKENESS = 256

#: (number of the batch, number of the sample in it)
Place = tuple[int, int]


#: Kinds of numbers that tell copies of a sample apart.
_COMPUTED = ("logprob", "value", "loss")


class Pool(Struct):
    """The samples of several batches of one run, as one list."""

    batches: Sequence[Batch]
    places: list[Place] = field(default_factory=list)
    _computed: dict[int, dict[str, tuple[TensorRef, Placed]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.places = [(number, sample) for number, batch in enumerate(self.batches) for sample in range(batch.count)]

    def digests(self) -> list[Hashable]:
        return [digest for batch in self.batches for digest in batch.digests or [None] * batch.count]  # type: ignore[list-item]

    def identities(self, names: Sequence[str]) -> list[Hashable] | None:
        every = [_identity(batch, names) for batch in self.batches]
        if any(one is None for one in every):
            return None
        found: list[Hashable] = [value for values in every for value in values or ()]
        return found if len(set(found)) == len(found) else None

    def computed(self, number: int) -> dict[str, tuple[TensorRef, Placed]]:
        """What was computed of each sample of a batch, by canonical name, and where: a number per sample or token."""
        if number not in self._computed:
            batch, found = self.batches[number], self._computed.setdefault(number, {})
            for ref in batch.held.fields():
                name = ref.canonical or ref.name
                if not ref.is_text and len(ref.shape) in (1, 2) and naming.meaning(name).kind in _COMPUTED:
                    placed = batch.place(ref)
                    if placed is not None:
                        found[name] = ref, placed
        return self._computed[number]

    def content(self, index: int) -> NDArray[np.int64] | None:
        batch, sample = self.places[index]
        contents = self.batches[batch].contents
        return None if contents is None else contents[sample]


class Matching(Struct):
    """Pairs of samples, as indices into either pool, and what decided."""

    pairs: list[tuple[int, int]]
    notes: list[str] = field(default_factory=list)


def match(a: Pool, b: Pool, same_place: Callable[[int, int], bool] = lambda _a, _b: False) -> Matching:
    """Pair the samples of two pools; what stays alone is in no pair.

    `same_place(batch of a, batch of b)`: whether the two hold the same place of their runs. Samples that nothing else
    tells apart (copies of each other) are paired by it, then in order.
    """
    said_a, said_b = a.digests(), b.digests()
    result = Matching([])
    state = _State(a, b, same_place)
    named = _named(a, b, said_a, said_b, result)
    if named is not None:
        state.by(list(zip(named[0], said_a, strict=True)), list(zip(named[1], said_b, strict=True)))
        state.by(*named)
    state.by(said_a, said_b)
    # A few that changed are found by likeness; where most did, a place in the batch says more than a common prompt.
    changed = 2 * max(len(state.left_a), len(state.left_b)) > max(len(a.places), len(b.places))
    for step in (state.by_place, state.by_likeness) if changed else (state.by_likeness, state.by_place):
        step()
    state.the_last()
    result.pairs = sorted(state.pairs)
    return result


def _named(
    a: Pool, b: Pool, said_a: Sequence[Hashable], said_b: Sequence[Hashable], result: Matching
) -> tuple[list[Hashable], list[Hashable]] | None:
    """Names both runs give their samples, each only once, and some of them in common."""
    for names in IDENTITIES:
        in_a, in_b = a.identities(names), b.identities(names)
        if in_a is None or in_b is None or not set(in_a) & set(in_b):
            continue
        where = {name: index for index, name in enumerate(in_b)}
        truthful = sum(said_b[where[name]] == said_a[index] for index, name in enumerate(in_a) if name in where)
        shared = len(set(said_a) & set(said_b) - {None})
        if 2 * truthful < shared:
            result.notes.append(
                f"{' and '.join(names)} name other samples in either run ({truthful} agree, {shared} samples are "
                "in both): paired by their tokens"
            )
            return None
        return in_a, in_b
    return None


class _State:
    """What is paired so far."""

    def __init__(self, a: Pool, b: Pool, same_place: Callable[[int, int], bool]) -> None:
        self.a, self.b, self._same_place = a, b, same_place
        self.pairs: list[tuple[int, int]] = []
        self.left_a = dict.fromkeys(range(len(a.places)))
        self.left_b = dict.fromkeys(range(len(b.places)))

    def take(self, pairs: Iterable[tuple[int, int]]) -> None:
        for one, other in pairs:
            if one in self.left_a and other in self.left_b:
                del self.left_a[one], self.left_b[other]
                self.pairs.append((one, other))

    def by(self, keys_a: Sequence[Hashable], keys_b: Sequence[Hashable]) -> None:
        """Pair what has one key; of copies those first that hold one place, then the same values, then in order."""
        groups: dict[Hashable, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
        for index in self.left_a:
            groups[keys_a[index]][0].append(index)
        for index in self.left_b:
            groups[keys_b[index]][1].append(index)
        for key, (in_a, in_b) in groups.items():
            if key is None or not in_a or not in_b:
                continue
            if len(in_a) > 1 or len(in_b) > 1:
                self._copies(in_a, in_b)
            both = (in_a, self.left_a), (in_b, self.left_b)
            rest_a, rest_b = ([index for index in group if index in left] for group, left in both)
            self.take(zip(rest_a, rest_b, strict=False))

    def _copies(self, in_a: list[int], in_b: list[int]) -> None:
        values_a, values_b = _values(self.a, self.b, in_a, in_b)
        same = [(i, j) for i in in_a for j in in_b if values_a[i] == values_b[j]]
        self.take(sorted(same, key=lambda pair: not self._one_place(*pair)))
        self.take((i, j) for i in in_a for j in in_b if self._one_place(i, j))

    def _one_place(self, one: int, other: int) -> bool:
        (batch_a, sample_a), (batch_b, sample_b) = self.a.places[one], self.b.places[other]
        return sample_a == sample_b and self._same_place(batch_a, batch_b)

    def by_likeness(self) -> None:
        """Pair samples that changed: those most alike first."""
        if not self.left_a or not self.left_b or max(len(self.left_a), len(self.left_b)) > MAX_LIKENESS:
            return
        alike = []
        for one in self.left_a:
            for other in self.left_b:
                likeness = _likeness(self.a.content(one), self.b.content(other))
                if likeness >= LIKENESS:
                    alike.append((-likeness, not self._one_place(one, other), one, other))
        self.take((one, other) for _, _, one, other in sorted(alike))

    def by_place(self) -> None:
        """Pair what holds one place in either run."""
        there = {self.b.places[other]: other for other in self.left_b}
        for one in list(self.left_a):
            number, sample = self.a.places[one]
            same_place = (other for other in range(len(self.b.batches)) if self._same_place(number, other))
            self.take((one, there[other, sample]) for other in same_place if (other, sample) in there)

    def the_last(self) -> None:
        """Pair the only two that are left."""
        if len(self.left_a) == 1 and len(self.left_b) == 1:
            self.take([(next(iter(self.left_a)), next(iter(self.left_b)))])


def _likeness(a: NDArray[np.int64] | None, b: NDArray[np.int64] | None) -> float:
    if a is None or b is None or not a.size or not b.size:
        return 0.0
    size = min(a.size, b.size)
    return float((a[:size] == b[:size]).sum()) / max(a.size, b.size)


def _values(a: Pool, b: Pool, in_a: list[int], in_b: list[int]) -> tuple[dict[int, bytes], dict[int, bytes]]:
    """The numbers of copies, in the fields both runs have, as bytes: copies differ in what was computed of them."""
    computed = [set(a.computed(number)) for number in {a.places[i][0] for i in in_a}]
    computed += [set(b.computed(number)) for number in {b.places[j][0] for j in in_b}]
    names = sorted(set.intersection(*computed)) if computed else []
    return (
        {index: _value(a, index, names) for index in in_a},
        {index: _value(b, index, names) for index in in_b},
    )


def _value(pool: Pool, index: int, names: list[str]) -> bytes:
    number, sample = pool.places[index]
    return b"".join(_of_sample(*pool.computed(number)[name], sample) for name in names)


def _identity(batch: Batch, names: Sequence[str]) -> list[tuple[Any, ...]] | None:
    """Each sample's values of these fields; None where the record lacks one."""
    columns = []
    for name in names:
        ref = batch.held.named(name)
        if ref is None or ref.shape != (batch.count,):
            return None
        columns.append([str(value) for value in pages.array(ref).tolist()])
    return list(zip(*columns, strict=True))


def _of_sample(ref: TensorRef, placed: Placed, sample: int) -> bytes:
    """A sample's values, as the bytes of doubles."""
    rows = placed.rows[samples_of(placed.tokens) == sample]
    values: bytes = pages.array(ref).reshape(-1)[rows].astype(np.float64).tobytes()
    return values
