"""Records of one step that hold the same samples again: another epoch, another pass, another rank's copy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

from replay_core.records import Record
from replay_core.samples.batch import Batch

Part = TypeVar("Part")
#: How often each sample occurs, by its tokens without padding.
Samples = Counter[bytes]


#: Calls of a model: an epoch, or a pass for old logprobs, goes over the same samples again.
_CALLS = ("batch_inputs", "tensors", "forward_data")


def each_sample_once(records: Sequence[Record]) -> list[Record]:
    """Of one step's rollouts those that hold each sample once: rank by rank, each in recorded order."""
    if len(records) < 2:
        return list(records)
    by_rank: dict[int | None, list[Record]] = {}
    for record in sorted(records, key=lambda r: (-1 if r.key.rank is None else r.key.rank, r.key.micro or 0)):
        by_rank.setdefault(record.key.rank, []).append(record)
    ranks = [_without_passes(mine) for mine in by_rank.values()]
    if len(ranks) > 1:
        # Ranks that share a batch (tensor parallel) each recorded it.
        ranks = each_once([(mine, samples_of(mine)) for mine in ranks])
    return [record for mine in ranks for record in mine]


def _without_passes(records: list[Record]) -> list[Record]:
    if records[0].key.stage not in _CALLS:
        return records
    epochs = [record.key.epoch for record in records if record.key.epoch is not None]
    first = [r for r in records if not epochs or r.key.epoch in (None, min(epochs))]
    return each_once([(record, samples_of([record])) for record in first]) if len(first) > 1 else first


def samples_of(records: Sequence[Record]) -> Samples:
    """The samples of records, by their tokens: what is padded or grouped otherwise is the same sample."""
    batches = (Batch(record, record.tensors()) for record in records)
    return Counter(row.tobytes() for batch in batches for row in batch.contents or ())


def each_once(parts: Sequence[tuple[Part, Samples]]) -> list[Part]:
    """The parts without those that go over the first ones' samples again.

    The first pass is the shortest stretch from the beginning that is repeated right behind it: exactly the same
    samples, whatever their order and grouping. One sample alone is no pass: groups do sample the same answer twice.
    """
    whole: Samples = Counter()
    for end in range(1, len(parts)):
        whole.update(parts[end - 1][1])
        again = _repeat(parts, end, whole) if len(whole) > 1 else None
        if again is not None:
            kept, at = [part for part, _ in parts[:end]], end
            while again is not None:
                at += again
                again = _repeat(parts, at, whole)
            return kept + [part for part, _ in parts[at:]]
    return [part for part, _ in parts]


def _repeat(parts: Sequence[tuple[Part, Samples]], start: int, whole: Samples) -> int | None:
    """How many parts from `start` hold exactly the samples `whole`; None where they do not."""
    left = Counter(whole)
    for count, (_, samples) in enumerate(parts[start:], start=1):
        left.subtract(samples)
        if any(left[sample] < 0 for sample in samples):
            return None
        if not any(left.values()):
            return count
    return None
