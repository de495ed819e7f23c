"""Which computation of one run faces which of the other, and which of their samples are the same.

First by key: (step, micro, rank, role). Then, within a step, by the samples themselves: shuffled, regrouped into
other micro-batches or ranks, in one whole batch on one side. Reads token ids, and those only where the bytes of
two sides differ.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from replay_core import pages
from replay_core.compare.batch import Batch, Placed, batch_of
from replay_core.compare.matching import Pool, match
from replay_core.errors import RldbgError
from replay_core.layout import Ints, TokenLayout
from replay_core.records import Problem, Record, RecordKey, TensorRef

#: (step, micro, rank, role)
Parts = tuple[Any, ...]


@dataclass(slots=True)
class Side:
    """One run's part of a computation: the records of one (step, micro, rank, role), their tensors and samples."""

    records: list[Record] = field(default_factory=list)
    #: (canonical name, stage) -> (record, tensor), in file order
    tensors: dict[tuple[str, str], tuple[Record, TensorRef]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    unreadable: int = 0
    #: The samples of every record that knows of some, in file order.
    batches: list[Batch] = field(default_factory=list)
    _of: dict[int, Batch] = field(default_factory=dict)
    is_loaded: bool = False

    def load(self) -> None:
        if self.is_loaded:
            return
        self.is_loaded = True
        for record in self.records:
            try:
                tensors = record.tensors()
            except RldbgError as error:
                self.problems.append(Problem(str(record.path), error.message))
                self.unreadable += 1
                continue
            # Of two fields with one meaning (`sequences` beside `input_ids`) the one called so has the name.
            ordered = sorted(tensors, key=lambda ref: ref.name != (ref.canonical or ref.name))
            for ref in ordered:
                self._take(record, ref)
            self._group(record, ordered)

    def _take(self, record: Record, ref: TensorRef) -> None:
        stage = record.key.stage
        for name in (ref.canonical or ref.name, ref.name, f"{ref.name} of {record.path.name}"):
            if (name, stage) not in self.tensors:
                self.tensors[name, stage] = (record, ref)
                return
        self.problems.append(Problem(str(record.path), f"{ref.name} is there more than twice; not compared"))
        self.unreadable += 1

    def _group(self, record: Record, tensors: list[TensorRef]) -> None:
        try:
            batch, why = batch_of(record, tensors)
        except RldbgError as error:
            batch, why = None, error.message
        if why is not None:
            self.problems.append(Problem(str(record.path), why))
        if batch is not None:
            self.batches.append(batch)
            self._of.update((id(ref), batch) for ref in tensors)

    def relay(self, old: Batch, new: Batch) -> None:
        """Let a batch stand where another stood."""
        self.batches = [new if batch is old else batch for batch in self.batches]
        self._of = {ref: new if batch is old else batch for ref, batch in self._of.items()}

    def batch(self, ref: TensorRef) -> Batch | None:
        """The samples a tensor is laid out by: its own record's, else the first of the side with a layout for it."""
        own = self._of.get(id(ref))
        if own is not None and (own.layout is not None or own.place(ref) is not None):
            return own
        lent = next((batch for batch in self.batches if batch.layout is not None), None)
        return lent or own

    def owns(self, ref: TensorRef) -> bool:
        """Whether the tensor's own record says which samples there are."""
        return id(ref) in self._of

    @property
    def main(self) -> Batch | None:
        """The samples this side is known by: the first record that holds tokens, else the first that holds any."""
        known = [batch for batch in self.batches if batch.layout is not None]
        return (known or self.batches or [None])[0]  # type: ignore[list-item]

    @property
    def layout(self) -> TokenLayout | None:
        return self.main.layout if self.main is not None else None

    def find(self, name: str) -> TensorRef | None:
        return next((ref for (known, _), (_, ref) in self.tensors.items() if known == name), None)


@dataclass
class Pairing:
    """The samples of two batches that are the same: `to_a[sample of b]` is its number in a, -1 where a has none;
    `to_b` the other way round."""

    to_a: Ints
    to_b: Ints

    @cached_property
    def in_order(self) -> bool:
        return self.to_a.size == self.to_b.size and bool((self.to_a == np.arange(self.to_a.size)).all())


@dataclass
class Facing:
    """Two sides of one computation.

    partial: only some samples of either face each other, so that what is said of a whole micro-batch does not.
    """

    key: RecordKey
    a: Side
    b: Side
    partial: bool = False
    notes: list[str] = field(default_factory=list)
    _pairings: dict[tuple[int, int], Pairing] = field(default_factory=dict)

    @property
    def where(self) -> str:
        """`step 0 rank 1 micro 2`, without a stage: a facing has several."""
        return str(self.key).rpartition(" ")[0] or str(self.key)

    def settle(self, a: Batch, b: Batch, pairing: Pairing) -> None:
        """Keep what a look at the whole step has found."""
        self._pairings[id(a), id(b)] = pairing

    def pairing(self, a: Batch, b: Batch) -> Pairing:
        """Which samples of two records are the same."""
        key = (id(a), id(b))
        if key not in self._pairings:
            self._pairings[key] = in_order(a, b) or self._matched(a, b)
        return self._pairings[key]

    def _matched(self, a: Batch, b: Batch) -> Pairing:
        found = match(Pool([a]), Pool([b]), lambda _a, _b: True)
        self.notes += found.notes
        return _pairing(a, b, found.pairs)

    def batches(self, a: TensorRef, b: TensorRef) -> tuple[Batch, Batch] | None:
        """The samples either tensor is laid out by; None where one side knows of none."""
        of_a, of_b = self.a.batch(a), self.b.batch(b)
        return None if of_a is None or of_b is None else (of_a, of_b)

    def placed(self, a: TensorRef, b: TensorRef) -> tuple[Placed, Placed, Pairing] | None:
        """Where the two speak of which token or sample; None where they do not, or not of the same kind of thing.

        A tensor nothing is known of is taken for what its shape looks like, but only where its own record holds the
        samples, and only where one order and one shape do not make the two face each other without a guess.
        """
        both = self.batches(a, b)
        if both is None:
            return None
        pairing = self.pairing(*both)
        guess = (not pairing.in_order or a.shape != b.shape) and self.a.owns(a) and self.b.owns(b)
        placed_a, placed_b = both[0].place(a, by_shape=guess), both[1].place(b, by_shape=guess)
        if placed_a is None or placed_b is None or placed_a.by_token != placed_b.by_token:
            return None
        if a.shape[placed_a.axes :] != b.shape[placed_b.axes :]:
            return None
        return placed_a, placed_b, pairing

    def in_order(self, a: TensorRef, b: TensorRef) -> bool:
        """Whether element i of one faces element i of the other, as far as their samples tell."""
        both = self.batches(a, b)
        return both is None or self.pairing(*both).in_order or self.placed(a, b) is None


def _pairing(a: Batch, b: Batch, pairs: Iterable[tuple[int, int]]) -> Pairing:
    to_a, to_b = np.full(b.count, -1, np.int64), np.full(a.count, -1, np.int64)
    for one, other in pairs:
        to_a[other], to_b[one] = one, other
    return Pairing(to_a, to_b)


def in_order(a: Batch, b: Batch) -> Pairing | None:
    """The pairing of batches whose samples are the same one by one; None where some are not."""
    if not _same_in_order(a, b):
        return None
    shared = np.arange(min(a.count, b.count))
    return _pairing(a, b, zip(shared, shared, strict=True))


def _same_in_order(a: Batch, b: Batch) -> bool:
    tail = (a if a.count > b.count else b).lengths[min(a.count, b.count) :]
    if a.layout is None or b.layout is None:
        return a.count == b.count and a.digests == b.digests
    if tail.any():
        return False
    if a.ids is not None and b.ids is not None and a.ids.rows == b.ids.rows and pages.same_bytes(a.ids, b.ids):
        return bool(np.array_equal(a.lengths, b.lengths))
    if a.contents is None or b.contents is None:
        return bool(np.array_equal(a.lengths[: b.count], b.lengths[: a.count]))
    pairs = zip(a.contents, b.contents, strict=False)
    return all(np.array_equal(one, other) for one, other in pairs)


def face(
    records_a: Iterable[Record], records_b: Iterable[Record], steps: dict[int | None, int | None] | None = None
) -> tuple[list[Facing], list[Problem]]:
    """Pair computations by (step, micro, rank, role). A part that is None on one side pairs with a single value.

    `steps`: what a calls the steps of b, where they count differently.
    """
    sides_a, sides_b = _sides(records_a, {}), _sides(records_b, steps or {})
    problems: list[Problem] = []
    paired: list[tuple[Parts, Parts]] = [(key, key) for key in sides_a if key in sides_b]
    left_a = [key for key in sides_a if key not in sides_b]
    left_b = [key for key in sides_b if key not in sides_a]
    for key in list(left_a):
        matches = [other for other in left_b if _compatible(key, other)]
        rivals = [other for other in left_a if matches and _compatible(other, matches[0])]
        if len(matches) == 1 and len(rivals) == 1:
            paired.append((key, matches[0]))
            left_a.remove(key)
            left_b.remove(matches[0])
        elif matches:
            where = str(sides_a[key].records[0].path)
            problems.append(Problem(where, f"could face any of {len(matches)} records of the other run; faces none"))
    facings = [Facing(_key(key_a), sides_a[key_a], sides_b[key_b]) for key_a, key_b in paired]
    facings += [Facing(_key(key), sides_a[key], Side()) for key in left_a]
    facings += [Facing(_key(key), Side(), sides_b[key]) for key in left_b]
    return sorted(facings, key=lambda facing: facing.key.order), problems


def _sides(records: Iterable[Record], steps: dict[int | None, int | None]) -> dict[Parts, Side]:
    sides: dict[Parts, Side] = defaultdict(Side)
    for record in records:
        key = record.key
        sides[(steps.get(key.step, key.step), key.micro, key.rank, key.role)].records.append(record)
    return dict(sides)


def _key(parts: Parts) -> RecordKey:
    step, micro, rank, role = parts
    return RecordKey(step, micro, rank, role)


def _compatible(a: Parts, b: Parts) -> bool:
    return all(x is None or y is None or x == y for x, y in zip(a, b, strict=True))


@dataclass(slots=True)
class Alone:
    """Samples of one side that the other run does not have."""

    key: RecordKey
    side: Side
    batch: Batch
    samples: list[int]
    which: str


def by_samples(facings: list[Facing]) -> tuple[list[Facing], list[Alone]]:
    """The facings of one step, paired anew where their samples are grouped differently; and the samples left alone.

    Loads every side. Facings whose samples are the same one by one stay as they are.
    """
    for facing in facings:
        facing.a.load()
        facing.b.load()
    settled = [facing for facing in facings if not _is_open(facing)]
    alone: list[Alone] = []
    for group in _groups([facing for facing in facings if _is_open(facing)]):
        again, left = _again(group)
        settled += again
        alone += left
    return settled, alone


def _is_open(facing: Facing) -> bool:
    """Whether the samples of the two sides are not known to be the same, one by one."""
    a, b = facing.a.main, facing.b.main
    if a is None or b is None:
        return (a is not None or b is not None) and not (facing.a.records and facing.b.records)
    settled = in_order(a, b)
    if settled is None:
        return True
    facing.settle(a, b, settled)
    return False


def _groups(facings: list[Facing]) -> Iterator[list[Facing]]:
    """Facings whose samples may stand in each other: one role, and micro-batches apart from whole steps where
    both runs have both."""
    groups: dict[Any, list[Facing]] = defaultdict(list)
    for facing in facings:
        groups[facing.key.role].append(facing)
    for group in groups.values():
        kinds: dict[bool, list[Facing]] = defaultdict(list)
        for facing in group:
            kinds[facing.key.micro is None].append(facing)
        if all(any(f.a.records for f in kind) and any(f.b.records for f in kind) for kind in kinds.values()):
            yield from kinds.values()
        else:
            yield group


def _again(group: list[Facing]) -> tuple[list[Facing], list[Alone]]:
    left = [facing for facing in group if facing.a.main is not None]
    right = [facing for facing in group if facing.b.main is not None]
    if not left or not right:
        return group, []
    _trim([facing.a for facing in left], [facing.b for facing in right])
    pool_a = Pool([facing.a.main for facing in left])  # type: ignore[misc]
    pool_b = Pool([facing.b.main for facing in right])  # type: ignore[misc]
    found = match(pool_a, pool_b, lambda i, j: left[i] is right[j])
    shared: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for one, other in found.pairs:
        (i, sample_a), (j, sample_b) = pool_a.places[one], pool_b.places[other]
        shared[i, j].append((sample_a, sample_b))
    again = [_facing(left[i], right[j], (i, j), shared) for i, j in sorted(shared)]
    if again:
        again[0].notes += found.notes
    # Sides none of whose samples are in the other run stay one-sided, or face what knows of no samples.
    used = {i for i, _ in shared}, {j for _, j in shared}
    lone_a = [facing for i, facing in enumerate(left) if i not in used[0]]
    lone_b = [facing for j, facing in enumerate(right) if j not in used[1]]
    again += [facing if facing.b.main is None else Facing(facing.key, facing.a, Side()) for facing in lone_a]
    again += [facing if facing.a.main is None else Facing(facing.key, Side(), facing.b) for facing in lone_b]
    seen = {pair for pairs in shared.items() for pair in ((pairs[0][0], sample) for sample, _ in pairs[1])}
    seen_b = {pair for pairs in shared.items() for pair in ((pairs[0][1], sample) for _, sample in pairs[1])}
    alone = [one for i, f in enumerate(left) if i in used[0] for one in _alone(f, f.a, i, seen, "a")]
    alone += [one for j, f in enumerate(right) if j in used[1] for one in _alone(f, f.b, j, seen_b, "b")]
    return again, alone


def _facing(
    left: Facing, right: Facing, place: tuple[int, int], shared: dict[tuple[int, int], list[tuple[int, int]]]
) -> Facing:
    i, j = place
    elsewhere = any((one == i) != (other == j) for one, other in shared)
    stays = left is right and not elsewhere
    facing = left if stays else Facing(left.key, left.a, right.b, partial=elsewhere)
    a, b = left.a.main, right.b.main
    assert a is not None
    assert b is not None
    facing.settle(a, b, _pairing(a, b, shared[place]))
    if left is not right:
        whose = f"{len(shared[place])} of its {a.count} samples are" if elsewhere else "its samples are"
        facing.notes.append(f"{facing.where}: {whose} those of {right.b.records[0].key} in b")
    elif elsewhere:
        facing.notes.append(f"{facing.where}: {len(shared[place])} of its {a.count} samples are in the same place of b")
    elif not facing.pairing(a, b).in_order:
        facing.notes.append(f"{facing.where}: the samples stand in another order; they are paired one by one")
    return facing


def _alone(facing: Facing, side: Side, number: int, seen: set[tuple[int, int]], which: str) -> Iterator[Alone]:
    batch = side.main
    assert batch is not None
    lost = [s for s in range(batch.count) if (number, s) not in seen and (batch.layout is None or batch.lengths[s])]
    if lost:
        yield Alone(facing.key, side, batch, lost, which)


def _trim(left: list[Side], right: list[Side]) -> None:
    """Leave out runs of padding that no mask names, where more samples are then the same."""
    both = [*left, *right]
    mains = [side.main for side in both]
    trimmed = [batch.trimmed() if batch is not None else None for batch in mains]
    if not any(trimmed):
        return
    tried = [new or old for new, old in zip(trimmed, mains, strict=True)]

    def shared(batches: list[Batch | None]) -> int:
        said = [[digest for batch in part if batch is not None for digest in batch.digests or ()]
                for part in (batches[: len(left)], batches[len(left) :])]  # fmt: skip
        return len(set(said[0]) & set(said[1]))

    if shared(tried) <= shared(mains):
        return
    for side, old, new in zip(both, mains, trimmed, strict=True):
        if old is not None and new is not None:
            side.relay(old, new)


def called_alike(a: list[Record], b: list[Record]) -> tuple[dict[int | None, int | None], str | None]:
    """What a calls the steps of b, where the two have no step in common; and what to say of it.

    Only where the samples say so: one step of either, or as many on both sides whose first hold the same samples.
    Weights without samples are taken for each other when either run has one step.
    """
    steps_a, steps_b = (sorted({r.key.step for r in one if r.key.step is not None}) for one in (a, b))
    if not steps_a or not steps_b or set(steps_a) & set(steps_b) or len(steps_a) != len(steps_b):
        return {}, None
    first_a, first_b = ([r for r in one if r.key.step == step] for one, step in ((a, steps_a[0]), (b, steps_b[0])))
    weights = len(steps_a) == 1 and all(r.key.stage == "param" for r in [*first_a, *first_b])
    if not weights and not (_digests(first_a) & _digests(first_b)):
        return {}, None
    why = "either has one, of parameters" if weights else "they hold the same samples"
    named = (", ".join(map(str, steps[:4])) + (", ..." if len(steps) > 4 else "") for steps in (steps_a, steps_b))
    return dict(zip(steps_b, steps_a, strict=True)), "step {} of a faces step {} of b: {}".format(*named, why)


def _digests(records: list[Record]) -> set[bytes]:
    found: set[bytes] = set()
    for record in records:
        try:
            batch, _ = batch_of(record, record.tensors())
            found |= set(batch.digests or ()) if batch is not None and batch.layout is not None else set()
        except RldbgError:
            continue
    return found
