"""Two passes over dumps of many ranks: digests first; values only of tensors whose digests differ.

Where an index tells them, the digest was taken of the values in the trainer's memory: that two are equal says that the
two trainers computed the same bytes; what lies on the disk since is not looked at. Where none does, they are taken of
the files, once (`taken.py`). Either way the comparison says how many it rests on (`tensors_by_digest`).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path

from replay_core.compare.taken import RunDigests, is_computed
from replay_core.errors import RldbgError
from replay_core.jobs import OnEvent, Progress, ignore
from replay_core.measure.digests import is_digest
from replay_core.records import Fields, Record, RecordKey, Run, TensorRef, Unreadable

#: Why a value of a pair was not read.
EQUAL_DIGESTS = "not read: both sides have the same digest"
_SPARED = Unreadable(EQUAL_DIGESTS)
_MOST_THREADS = 8

Facing = tuple[Record, Record]


def by_digests(
    runs: tuple[Run, Run],
    records_a: Sequence[Record],
    records_b: Sequence[Record],
    *,
    keep: Path | None = None,
    on_event: OnEvent = ignore,
) -> tuple[list[Record], list[Record], list[str]]:
    """The records of both runs, and what is to be said; of records that face each other under one key, tensors of
    one digest are not read.

    Tokens, masks and whatever else lays samples out is read as ever: samples are paired by it.

    keep: the folder in which digests that were taken now are kept.
    """
    facing = _facing(records_a, records_b)
    made: dict[int, Record] = {}
    untold: list[Facing] = []
    for a, b in facing:
        if _tells(a) and _tells(b):
            made[id(a)], made[id(b)] = _sparing(a, b), _sparing(b, a)
        else:
            untold.append((a, b))
    kept = [RunDigests(run.path, keep) for run in runs]
    for number, ((a, b), equal) in enumerate(zip(untold, _in_threads(kept, untold), strict=True)):
        on_event(Progress(number, len(untold), f"digests of {a.key}"))
        if equal:
            made[id(a)], made[id(b)] = _without(a, equal), _without(b, equal)
    notes = [said for which, one in zip("ab", kept, strict=True) if (said := _said_of(which, one, keep)) is not None]
    found_a, found_b = ([made.get(id(record), record) for record in records] for records in (records_a, records_b))
    return found_a, found_b, notes


def _facing(records_a: Sequence[Record], records_b: Sequence[Record]) -> list[Facing]:
    """Records that are the only ones of their key, on either side; a record is not held against itself."""
    alone = [_only(records) for records in (records_a, records_b)]
    return [(a, alone[1][key]) for key, a in alone[0].items() if key in alone[1] and alone[1][key] is not a]


def _only(records: Sequence[Record]) -> dict[RecordKey, Record]:
    counted = Counter(record.key for record in records)
    return {record.key: record for record in records if counted[record.key] == 1}


def _tells(record: Record) -> bool:
    """Whether the index tells digests of the record's fields."""
    told = record.told() if record.told is not None else None
    return told is not None and any(is_digest(ref.digest) for ref in told)


def _in_threads(kept: list[RunDigests], untold: list[Facing]) -> Iterable[dict[str, str]]:
    """Of records that face each other, the tensors of one digest; few of them at a time, in their order.

    Reading and hashing leave the interpreter to others, so threads are as good as processes, and share one memory.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = min(_MOST_THREADS, cores)
    coming = iter(untold)
    with ThreadPoolExecutor(threads, thread_name_prefix="digests") as pool:
        under_way = [pool.submit(_equal, kept, *pair) for pair in islice(coming, 2 * threads)]
        while under_way:
            yield under_way.pop(0).result()
            under_way += [pool.submit(_equal, kept, *pair) for pair in islice(coming, 1)]


def _equal(kept: list[RunDigests], a: Record, b: Record) -> dict[str, str]:
    """Name -> digest, of what two records hold alike."""
    found: list[dict[str, tuple[str, tuple[int, ...], str]]] = []
    for record, of_run in zip((a, b), kept, strict=True):
        was_read = record.is_read
        try:
            told = record.told() if _tells(record) and record.told is not None else None
            refs = record.tensors() if told is None else told
        except RldbgError:
            return {}  # said when it is compared
        digests = of_run.of(record, refs)
        twice = {name for name, count in Counter(ref.name for ref in refs).items() if count > 1}
        found.append({ref.name: (ref.dtype, ref.shape, digests[ref.name]) for ref in refs
                      if ref.name in digests and ref.name not in twice})  # fmt: skip
        if not was_read:
            record.release()
    return {name: one[2] for name, one in found[0].items() if found[1].get(name) == one}


def _without(record: Record, equal: dict[str, str]) -> Record:
    """The record, whose tensors of these names are not read."""

    def load() -> Sequence[TensorRef]:
        fields = [
            ref.with_(source=_SPARED, digest=equal[ref.name]) if ref.name in equal else ref for ref in record.tensors()
        ]
        problems = record.problems
        record.release()
        return Fields(fields, problems)

    return Record(record.key, record.path, load, record.names)


def _said_of(which: str, kept: RunDigests, keep: Path | None) -> str | None:
    counted = kept.counted
    if not counted.taken:
        return None
    before = f"; {counted.known:,} were known before" if counted.known else ""
    said = f"digests of {counted.taken:,} tensors of {which} were taken now ({counted.nbytes:,} bytes read){before}"
    if keep is None or counted.not_kept == counted.taken:
        return f"{said}; they are not kept" + ("" if keep is None else ": the files were written a moment ago")
    return f"{said}; the next comparison reads these no more while the files stay as they are"


def _sparing(record: Record, other: Record) -> Record:
    assert record.told is not None
    assert other.told is not None
    made = Record(record.key, record.path, partial(_fields, record, record.told, other.told), record.names)
    made.told = record.told
    return made


def _fields(
    record: Record,
    told: Callable[[], Sequence[TensorRef] | None],
    told_by_other: Callable[[], Sequence[TensorRef] | None],
) -> Sequence[TensorRef]:
    mine, theirs = told(), told_by_other()
    if mine is None or theirs is None:
        return record.tensors()
    known = {ref.name: _said(ref) for ref in theirs}
    spared = {
        ref.name: ref.with_(source=_SPARED, digest=known[ref.name][2])
        for ref in mine
        if is_digest(ref.digest) and known.get(ref.name) == _said(ref) and is_computed(record, ref)
    }
    if len(spared) == len(mine):
        return list(spared.values())
    fields = record.tensors()
    made = [spared.get(ref.name, ref) for ref in fields]
    problems = record.problems
    record.release()
    return Fields(made, problems)


def _said(ref: TensorRef) -> tuple[object, ...]:
    return ref.dtype, ref.shape, ref.digest
