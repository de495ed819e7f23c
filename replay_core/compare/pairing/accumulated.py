"""Micro-batches whose gradients accumulate, laid together where one run computes a step in more of them than the other
and its ranks share the step otherwise: what every rank has of all its micro-batches, as if it were of one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from replay_core import naming, pages
from replay_core.compare.pairing.micro_batch_pair import MicroBatchPair, Side
from replay_core.compare.pairing.ranks import OF_ALL_SAMPLES, Which, ids_of, named, same_values
from replay_core.errors import DumpError
from replay_core.records import Inline, Parts, Record, RecordKey, TensorRef

#: A sum or mean of numbers is that of the other run where it is off by this part at most.
_NEAR = 1e-3
_RUNS: tuple[Which, Which] = ("a", "b")

Place = tuple[str, str]
#: Of one run and step: rank -> micro-batch -> what it recorded of it.
Sides = dict[int | None, dict[int, Side]]


class _Laid(NamedTuple):
    """What ranks have of all their micro-batches; a number of which nobody said how it is added up has no place."""

    tensors: dict[Place, tuple[Record, TensorRef]]
    numbers: dict[Place, list[float]]


def laid_together(micro_pairs: list[MicroBatchPair]) -> list[MicroBatchPair]:
    """The pairs of a step; where two runs of different ranks have the same samples in other micro-batches, one of each
    rank. Every side is loaded.
    """
    groups: dict[tuple[Any, ...], list[MicroBatchPair]] = defaultdict(list)
    for micro_pair in micro_pairs:
        groups[micro_pair.key.step, micro_pair.key.role, micro_pair.key.micro is None].append(micro_pair)
    found: list[MicroBatchPair] = []
    for (_, _, is_of_all), group in groups.items():
        found += group if is_of_all else _laid(group) or group
    return found


def _laid(group: list[MicroBatchPair]) -> list[MicroBatchPair] | None:
    sides: dict[Which, Sides] = {"a": defaultdict(dict), "b": defaultdict(dict)}
    for micro_pair in group:
        for which, side in zip(_RUNS, (micro_pair.a, micro_pair.b), strict=True):
            if side.records:
                sides[which][side.records[0].key.rank][micro_pair.key.micro or 0] = side
    of_a, of_b = sides["a"], sides["b"]
    if not of_a or not of_b or _are_rank_by_rank(of_a, of_b) or not _are_other_micro_batches(of_a, of_b):
        return None
    for of_run in sides.values():
        _order_by_tokens(of_run)
    laid = {which: {rank: _of_rank(own) for rank, own in ranks.items()} for which, ranks in sides.items()}
    if any(one is None for ranks in laid.values() for one in ranks.values()):
        return None
    whole = {which: {rank: one for rank, one in ranks.items() if one is not None} for which, ranks in laid.items()}
    lost = _add_up(whole["a"], whole["b"])
    lost |= _leave_out(whole["a"], of_b, whole["b"]) | _leave_out(whole["b"], of_a, whole["a"])
    key = group[0].key
    made: list[MicroBatchPair] = []
    ranks = sorted({*of_a, *of_b}, key=lambda rank: -1 if rank is None else rank)
    for rank in ranks:
        own = {which: _side(whole[which][rank].tensors) if rank in whole[which] else Side() for which in _RUNS}
        made.append(MicroBatchPair(RecordKey(key.step, key.micro, rank, key.role), own["a"], own["b"]))
    many: Which = "a" if _most(of_a) > _most(of_b) else "b"
    micros = sorted({micro for own in sides[many].values() for micro in own})
    said = (
        f"{made[0].where}: micro-batches {named(micros)} of {many} are put together, and held against the samples of "
        f"{'b' if many == 'a' else 'a'}'s"
    )
    made[0].notes.append(said)
    if lost:
        names = ", ".join(sorted(lost)[:4]) + (", ..." if len(lost) > 4 else "")
        made[0].notes.append(
            f"{made[0].where}: not compared, for nobody says what they are of several micro-batches: {names}"
        )
    return made


def _leave_out(laid: dict[int | None, _Laid], there: Sides, others: dict[int | None, _Laid]) -> set[str]:
    """Take away what faces tensors of the other run that could not be laid together; their names."""
    recorded = {place for own in there.values() for side in own.values() for place in side.tensors}
    gone = recorded - {place for one in others.values() for place in one.tensors}
    lost = {place for one in laid.values() for place in one.tensors} & gone
    for one in laid.values():
        for place in lost:
            one.tensors.pop(place, None)
    return {name for name, _ in lost}


def _order_by_tokens(sides: Sides) -> None:
    """Let a rank's micro-batches stand in the turn of an earlier one's that has the same, each of these by its tokens:
    a stage of a pipeline that took them up in another turn.
    """
    seen: list[list[TensorRef]] = []
    for rank, own in sides.items():
        micros = sorted(own)
        ids = [ids_of(own[micro]) for micro in micros]
        known = [one for one in ids if one is not None]
        if len(known) < len(ids) or len(ids) < 2:
            continue
        for before in seen:
            turn = [next((at for at, one in enumerate(known) if same_values(one, ref)), -1) for ref in before]
            if sorted(turn) == list(range(len(known))):
                sides[rank] = {micro: own[micros[at]] for micro, at in zip(micros, turn, strict=True)}
                break
        else:
            seen.append(known)


def _most(sides: Sides) -> int:
    return max(map(len, sides.values()))


def _are_rank_by_rank(a: Sides, b: Sides) -> bool:
    """Whether the ranks of the two are the same numbers, and each has the same tokens in both."""
    if a.keys() != b.keys():
        return False
    return all(
        {row for micro in a[rank] for row in _rows({0: a[rank]}, micro) or ()}
        == {row for micro in b[rank] for row in _rows({0: b[rank]}, micro) or ()}
        for rank in a
    )


def _are_other_micro_batches(a: Sides, b: Sides) -> bool:
    """Whether the two have the same tokens, in other micro-batches."""
    if max(_most(a), _most(b)) < 2 or any(len({*map(tuple, one.values())}) > 1 for one in (a, b)):
        return False
    rows = [[_rows(sides, micro) for micro in next(iter(sides.values()))] for sides in (a, b)]
    if any(one is None for of_run in rows for one in of_run):
        return False
    known = [[one for one in of_run if one is not None] for of_run in rows]
    whole = [{row for one in of_run for row in one} for of_run in known]
    if {len(row) for row in whole[0]} == {len(row) for row in whole[1]}:
        # Rows of one length: each is in both, and not all in the micro-batch of the same number.
        return whole[0] == whole[1] and known[0] != known[1]
    return len(known[0]) != len(known[1]) and sum(map(len, whole[0])) == sum(map(len, whole[1]))


def _rows(sides: Sides, micro: int) -> set[bytes] | None:
    """The rows of tokens that the ranks have in a micro-batch; None where they are not laid as rows."""
    found: set[bytes] = set()
    for own in sides.values():
        ids = ids_of(own[micro])
        if ids is None:
            continue  # a later stage of a pipeline
        if len(ids.shape) != 2 or not ids.is_readable:
            return None
        try:
            found |= {row.astype(np.int64).tobytes() for row in pages.array(ids)}
        except DumpError:
            return None
    return found or None


def _of_rank(own: dict[int, Side]) -> _Laid | None:
    """What a rank has of its micro-batches; None where their rows are not as long as each other."""
    micros = [own[micro] for micro in sorted(own)]
    if len(micros) == 1:
        numbers = {
            place: [value] for place, (_, ref) in micros[0].tensors.items()
            if not ref.shape and not ref.is_text and (value := _number(ref)) is not None
        }  # fmt: skip
        return _Laid(dict(micros[0].tensors), numbers)
    ids = [ids_of(side) for side in micros]
    shapes = [one.shape for one in ids if one is not None]
    if shapes and (len(shapes) < len(micros) or len({shape[1:] for shape in shapes}) > 1):
        return None
    laid = _Laid({}, {})
    for place in dict.fromkeys(place for side in micros for place in side.tensors):
        held = [side.tensors[place] for side in micros if place in side.tensors]
        refs = [ref for _, ref in held]
        if naming.is_routed(place[0]):
            continue  # an expert's rows stand in the turn of the ranks that sent them, micro-batch by micro-batch
        if len(refs) < len(micros) or (place[1] in OF_ALL_SAMPLES and naming.meaning(place[0]).region == "all"):
            continue
        if all(not ref.shape and not ref.is_text for ref in refs):
            said = [number for ref in refs if (number := _number(ref)) is not None]
            if len(said) == len(refs):
                laid.numbers[place] = said
                laid.tensors[place] = held[0]
            continue
        if (axis := _axis_of_samples(refs, shapes)) is not None:
            length = sum(ref.shape[axis] for ref in refs)
            shape = (*refs[0].shape[:axis], length, *refs[0].shape[axis + 1 :])
            laid.tensors[place] = (
                held[0][0], refs[0].with_(shape=shape, source=Parts(tuple(refs), axis), digest=None, copies=()),
            )  # fmt: skip
    return laid


def _axis_of_samples(refs: Sequence[TensorRef], shapes: Sequence[tuple[int, ...]]) -> int | None:
    """The axis along which micro-batches lie one behind the other: of samples, or of all their tokens."""
    if any(ref.is_text or ref.rows is not None or not ref.is_readable or not ref.shape for ref in refs):
        return None
    if len({ref.dtype for ref in refs}) > 1 or len({len(ref.shape) for ref in refs}) > 1:
        return None
    counts = [shape[0] for shape in shapes] or [ref.shape[0] for ref in refs]
    for axis in range(min(2, len(refs[0].shape))):
        if [ref.shape[axis] for ref in refs] == counts and len({_without(ref.shape, axis) for ref in refs}) == 1:
            return axis
    are_tokens = all(ref.shape[0] % count == 0 for ref, count in zip(refs, counts, strict=True) if count)
    return 0 if are_tokens and len({ref.shape[1:] for ref in refs}) == 1 and len(refs[0].shape) < 3 else None


def _number(ref: TensorRef) -> float | None:
    """The value of a tensor of one number; None where it cannot be read."""
    try:
        return float(pages.array(ref).reshape(-1)[0]) if ref.is_readable else None
    except DumpError:
        return None


def _without(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return shape[:axis] + shape[axis + 1 :]


def _add_up(a: dict[int | None, _Laid], b: dict[int | None, _Laid]) -> set[str]:
    """Let a number of several micro-batches be their sum or their mean, whichever makes the other run's of all ranks;
    the names of those of which neither does.
    """
    lost: set[str] = set()
    places = {place for side in (a, b) for one in side.values() for place, values in one.numbers.items()
              if len(values) > 1}  # fmt: skip
    for place in places:
        values = [[one.numbers[place] for one in side.values() if place in one.numbers] for side in (a, b)]
        ways: list[tuple[float, tuple[str, ...]]] = []
        for how in product(("sum", "mean"), repeat=2):
            totals = [_totals([_made(one, way) for one in of]) for of, way in zip(values, how, strict=True)]
            off = [abs(one - other) / (abs(one) or 1.0) for one in totals[0] for other in totals[1]]
            ways.append((min(off, default=0.0), how))
        best = min(ways, key=lambda way: way[0])
        for side, way in zip((a, b), best[1], strict=True):
            for one in side.values():
                if place in one.numbers and place in one.tensors:
                    record, ref = one.tensors[place]
                    made = np.float64(_made(one.numbers[place], way)).tobytes()
                    if len(one.numbers[place]) > 1:
                        one.tensors[place] = record, ref.with_(dtype="float64", source=Inline(made), digest=None)
                    if best[0] > _NEAR:
                        del one.tensors[place]
                        lost.add(place[0])
    return lost


def _made(values: Sequence[float], how: str) -> float:
    return sum(values) / (len(values) if how == "mean" else 1)


def _totals(values: list[float]) -> list[float]:
    """What numbers of several ranks may be of them all: each rank's, the sum of all or of those that differ, a mean."""
    different = list({f"{value:.6g}": value for value in values}.values())
    every = [*values, sum(values), sum(different)]
    return [*every, sum(values) / len(values)] if values else []


def _side(tensors: dict[Place, tuple[Record, TensorRef]]) -> Side:
    by_stage: dict[tuple[str, str], list[tuple[Record, TensorRef]]] = defaultdict(list)
    for (_, stage), (record, ref) in tensors.items():
        by_stage[stage, str(record.path.name)].append((record, ref))
    # What has several files in one stage (a rank's micro-batches) lies in those of the first.
    records = []
    for held in by_stage.values():
        refs = [ref for _, ref in held]
        first = held[0][0]
        records.append(Record(first.key, first.path, lambda refs=refs: refs))  # type: ignore[misc]
    found = Side(records)
    found.load()
    return found
