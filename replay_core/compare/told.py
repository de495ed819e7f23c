"""Two passes over dumps of many ranks: digests first, which their indexes tell; values only of tensors whose digests
differ.

The digest was taken of the values in the trainer's memory. That two are equal says that the two trainers computed the
same bytes; what lies on the disk since is not looked at, and the comparison says so (`tensors_by_digest`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from replay_core import naming
from replay_core.measure.digests import is_digest
from replay_core.records import Fields, Record, RecordKey, TensorRef, Unreadable

#: Why a value of a pair was not read.
EQUAL_DIGESTS = "not read: both sides recorded the same digest"
_SPARED = Unreadable(EQUAL_DIGESTS)
#: What is no field of a module, and is compared by its digest as well.
_OF_PARAMETERS = ("gradient", "param", "optimizer")


def by_digests(records_a: Sequence[Record], records_b: Sequence[Record]) -> tuple[list[Record], list[Record]]:
    """The records of both runs; of those that face each other under one key, tensors of one digest are not read.

    Tokens, masks and whatever else lays samples out is read as ever: samples are paired by it.
    """
    facing = [_only(records) for records in (records_a, records_b)]
    found = [
        [_sparing(record, other[record.key]) if record.key in other else record for record in records]
        for records, other in ((records_a, facing[1]), (records_b, facing[0]))
    ]
    return found[0], found[1]


def _only(records: Sequence[Record]) -> dict[RecordKey, Record]:
    counted = Counter(record.key for record in records)
    return {record.key: record for record in records if counted[record.key] == 1 and record.told is not None}


def _sparing(record: Record, other: Record) -> Record:
    if record.told is None or other.told is None:
        return record
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
        if is_digest(ref.digest) and known.get(ref.name) == _said(ref) and _is_computed(record, ref)
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


def _is_computed(record: Record, ref: TensorRef) -> bool:
    return record.key.stage in _OF_PARAMETERS or naming.is_module_tensor(ref.canonical or ref.name)
