"""Pairs the computations of a step anew by their samples: shuffled, cut into other micro-batches, spread over other
ranks, or counted under other steps. Reads token ids, and those only where two sides do not hold the same in order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from msgspec import Struct

from replay_core.compare.pairing.matching import Pool, match
from replay_core.compare.pairing.micro_batch_pair import MicroBatchPair, Side, in_order, pairing_of
from replay_core.errors import RldbgError
from replay_core.records import Record, RecordKey
from replay_core.samples.batch import Batch, batch_of
from replay_core.samples.padding import trimmed


class Alone(Struct):
    """Samples of one side that the other run does not have."""

    key: RecordKey
    side: Side
    batch: Batch
    samples: list[int]
    which: str


def by_samples(micro_pairs: list[MicroBatchPair]) -> tuple[list[MicroBatchPair], list[Alone]]:
    """The pairs of micro-batches of one step, anew where their samples are grouped differently; and who is left alone.

    Loads every side. Pairs whose samples are the same one by one stay as they are.
    """
    for micro_pair in micro_pairs:
        micro_pair.a.load()
        micro_pair.b.load()
    settled = [micro_pair for micro_pair in micro_pairs if not is_open(micro_pair)]
    alone: list[Alone] = []
    for group in _groups([micro_pair for micro_pair in micro_pairs if is_open(micro_pair)]):
        again, left = _again(group)
        settled += again
        alone += left
    return settled, alone


def is_open(micro_pair: MicroBatchPair) -> bool:
    """Whether the samples of the two sides are not known to be the same, one by one."""
    a, b = micro_pair.a.main, micro_pair.b.main
    if a is None or b is None:
        return (a is not None or b is not None) and not (micro_pair.a.records and micro_pair.b.records)
    settled = in_order(a, b)
    if settled is None:
        return True
    micro_pair.settle(a, b, settled)
    return False


def _groups(micro_pairs: list[MicroBatchPair]) -> Iterator[list[MicroBatchPair]]:
    """Pairs whose samples may stand in each other: one role, and micro-batches apart from whole steps where
    both runs have both."""
    groups: dict[Any, list[MicroBatchPair]] = defaultdict(list)
    for micro_pair in micro_pairs:
        groups[micro_pair.key.role].append(micro_pair)
    for group in groups.values():
        kinds: dict[bool, list[MicroBatchPair]] = defaultdict(list)
        for micro_pair in group:
            kinds[micro_pair.key.micro is None].append(micro_pair)
        if all(any(f.a.records for f in kind) and any(f.b.records for f in kind) for kind in kinds.values()):
            yield from kinds.values()
        else:
            yield group


def _again(group: list[MicroBatchPair]) -> tuple[list[MicroBatchPair], list[Alone]]:
    left = [micro_pair for micro_pair in group if micro_pair.a.main is not None]
    right = [micro_pair for micro_pair in group if micro_pair.b.main is not None]
    if not left or not right:
        return group, []
    _trim([micro_pair.a for micro_pair in left], [micro_pair.b for micro_pair in right])
    pool_a = Pool([micro_pair.a.main for micro_pair in left])  # type: ignore[misc]
    pool_b = Pool([micro_pair.b.main for micro_pair in right])  # type: ignore[misc]
    found = match(pool_a, pool_b, lambda i, j: left[i] is right[j])
    shared: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for one, other in found.pairs:
        (i, sample_a), (j, sample_b) = pool_a.places[one], pool_b.places[other]
        shared[i, j].append((sample_a, sample_b))
    again = [_micro_pair(left[i], right[j], (i, j), shared) for i, j in sorted(shared)]
    if again:
        again[0].notes += found.notes
    # Sides none of whose samples are in the other run stay one-sided, or face what knows of no samples.
    used = {i for i, _ in shared}, {j for _, j in shared}
    lone_a = [micro_pair for i, micro_pair in enumerate(left) if i not in used[0]]
    lone_b = [micro_pair for j, micro_pair in enumerate(right) if j not in used[1]]
    again += [
        micro_pair if micro_pair.b.main is None else MicroBatchPair(micro_pair.key, micro_pair.a, Side())
        for micro_pair in lone_a
    ]
    again += [
        micro_pair if micro_pair.a.main is None else MicroBatchPair(micro_pair.key, Side(), micro_pair.b)
        for micro_pair in lone_b
    ]
    seen = {pair for pairs in shared.items() for pair in ((pairs[0][0], sample) for sample, _ in pairs[1])}
    seen_b = {pair for pairs in shared.items() for pair in ((pairs[0][1], sample) for _, sample in pairs[1])}
    alone = [one for i, f in enumerate(left) if i in used[0] for one in _alone(f, f.a, i, seen, "a")]
    alone += [one for j, f in enumerate(right) if j in used[1] for one in _alone(f, f.b, j, seen_b, "b")]
    return again, alone


def _micro_pair(
    left: MicroBatchPair,
    right: MicroBatchPair,
    place: tuple[int, int],
    shared: dict[tuple[int, int], list[tuple[int, int]]],
) -> MicroBatchPair:
    i, j = place
    elsewhere = any((one == i) != (other == j) for one, other in shared)
    stays = left is right and not elsewhere
    micro_pair = left if stays else MicroBatchPair(left.key, left.a, right.b, partial=elsewhere)
    a, b = left.a.main, right.b.main
    assert a is not None
    assert b is not None
    micro_pair.settle(a, b, pairing_of(a, b, shared[place]))
    if left is not right:
        whose = f"{len(shared[place])} of its {a.count} samples are" if elsewhere else "its samples are"
        micro_pair.notes.append(f"{micro_pair.where}: {whose} those of {right.b.records[0].key} in b")
    elif elsewhere:
        micro_pair.notes.append(
            f"{micro_pair.where}: {len(shared[place])} of its {a.count} samples are in the same place of b"
        )
    elif any(later < earlier for (_, earlier), (_, later) in pairwise(shared[place])):
        micro_pair.notes.append(f"{micro_pair.where}: the samples stand in another order; they are paired one by one")
    return micro_pair


def _alone(
    micro_pair: MicroBatchPair, side: Side, number: int, seen: set[tuple[int, int]], which: str
) -> Iterator[Alone]:
    batch = side.main
    assert batch is not None
    lost = [s for s in range(batch.count) if (number, s) not in seen and (batch.layout is None or batch.lengths[s])]
    if lost:
        yield Alone(micro_pair.key, side, batch, lost, which)


def _trim(left: list[Side], right: list[Side]) -> None:
    """Leave out runs of padding that no mask names, where more samples are then the same."""
    both = [*left, *right]
    mains = [side.main for side in both]
    narrowed = [trimmed(batch) if batch is not None else None for batch in mains]
    if not any(narrowed):
        return
    tried = [new or old for new, old in zip(narrowed, mains, strict=True)]

    def shared(batches: list[Batch | None]) -> int:
        said = [[digest for batch in part if batch is not None for digest in batch.digests or ()]
                for part in (batches[: len(left)], batches[len(left) :])]  # fmt: skip
        return len(set(said[0]) & set(said[1]))

    if shared(tried) <= shared(mains):
        return
    for side, old, new in zip(both, mains, narrowed, strict=True):
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
    return dict(zip(steps_b, steps_a, strict=True)), "step {} of a is paired with step {} of b: {}".format(*named, why)


def _digests(records: list[Record]) -> set[bytes]:
    found: set[bytes] = set()
    for record in records:
        try:
            batch, _ = batch_of(record, record.tensors())
            found |= set(batch.digests or ()) if batch is not None and batch.layout is not None else set()
        except RldbgError:
            continue
    return found
