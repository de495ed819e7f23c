"""Micro-batches whose gradients accumulate, laid together where one run computes a step in more of them than the other
and its ranks share the step otherwise: what every rank has of all its micro-batches, as if it were of one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from replay_core import naming, pages
from replay_core.compare.pairing.micro_batch_pair import CUT_OTHERWISE, MicroBatchPair, Side
from replay_core.compare.pairing.own_rows import Sides, in_rows_of_one_width
from replay_core.compare.pairing.ranks import OF_ALL_SAMPLES, Which, ids_of, named, same_values
from replay_core.errors import DumpError
from replay_core.records import Parts, Record, RecordKey, TensorRef, Unreadable

_RUNS: tuple[Which, Which] = ("a", "b")

Place = tuple[str, str]


class _Laid(NamedTuple):
    """What a rank has of all its micro-batches; numbers: what each of them says."""

    tensors: dict[Place, tuple[Record, TensorRef]]
    numbers: dict[Place, list[float]]
    #: What cannot be laid together, and says so in the place of its values.
    unread: dict[Place, tuple[Record, TensorRef]]


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
    if not sides["a"] or not sides["b"]:
        return None
    wide = in_rows_of_one_width(sides)
    sides = wide or sides
    of_a, of_b = sides["a"], sides["b"]
    if _are_rank_by_rank(of_a, of_b) or (wide is None and not _are_other_micro_batches(of_a, of_b)):
        return None
    for of_run in sides.values():
        _order_by_tokens(of_run)
    laid = {which: {rank: _of_rank(own) for rank, own in ranks.items()} for which, ranks in sides.items()}
    if any(one is None for ranks in laid.values() for one in ranks.values()):
        return None
    whole = {which: {rank: one for rank, one in ranks.items() if one is not None} for which, ranks in laid.items()}
    _settle_numbers(whole)
    _skip_the_rest(whole, sides)
    key = group[0].key
    made: list[MicroBatchPair] = []
    ranks = sorted({*of_a, *of_b}, key=lambda rank: -1 if rank is None else rank)
    for rank in ranks:
        own = {
            which: _side(whole[which][rank], sides[which][rank]) if rank in whole[which] else Side() for which in _RUNS
        }
        made.append(MicroBatchPair(RecordKey(key.step, key.micro, rank, key.role), own["a"], own["b"]))
    many: Which = "a" if _most(of_a) > _most(of_b) else "b"
    micros = sorted({micro for own in sides[many].values() for micro in own})
    said = (
        f"{made[0].where}: micro-batches {named(micros)} of {many} are put together, and held against the samples of "
        f"{'b' if many == 'a' else 'a'}'s"
    )
    if wide is not None:
        laid_so = "samples lie otherwise in the two (trimmed to the longest of a micro-batch, or end to end in packs)"
        made[0].notes.append(f"{made[0].where}: {laid_so}, and each is held in a row of its own, without its padding")
    if max(_most(of_a), _most(of_b)) > 1:
        made[0].notes.append(said)
    return made


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
    """Whether the ranks of the two are the same numbers, and each has the same tokens in both, which say in which
    micro-batches its samples are: a later stage of a pipeline, that has none, is no such rank where these are others.
    """
    if a.keys() != b.keys():
        return False
    are_staged = any(ids_of(side) is None for sides in (a, b) for own in sides.values() for side in own.values())
    if are_staged and any(len(a[rank]) != len(b[rank]) for rank in a):
        return False
    return all(
        {row for micro in a[rank] for row in _rows({0: a[rank]}, micro) or ()}
        == {row for micro in b[rank] for row in _rows({0: b[rank]}, micro) or ()}
        for rank in a
    )


def _are_other_micro_batches(a: Sides, b: Sides) -> bool:
    """Whether the two have the same tokens, in other micro-batches."""
    if max(_most(a), _most(b)) < 2:
        return False
    rows = [[_rows(sides, micro) for micro in sorted({*chain(*sides.values())})] for sides in (a, b)]
    if any(one is None for of_run in rows for one in of_run):
        return False
    known = [[one for one in of_run if one is not None] for of_run in rows]
    whole = [{row for one in of_run for row in one} for of_run in known]
    if {len(row) for row in whole[0]} == {len(row) for row in whole[1]}:
        # Rows of one length: each is in both, and not all in the micro-batch of the same number.
        return whole[0] == whole[1] and known[0] != known[1]
    if any(_is_packed(side) for sides in (a, b) for own in sides.values() for side in own.values()):
        return False  # a row holds several samples, which are found one by one
    if len(known[0]) == len(known[1]):
        return False
    sizes = [sum(map(len, rows)) for rows in whole]
    fewer = int(sizes[0] > sizes[1])
    return sizes[0] == sizes[1] or abs(sizes[0] - sizes[1]) in _hidden((a, b)[fewer])


def _hidden(sides: Sides) -> set[int]:
    """How much rows may be that are as another is: of padding alone, as a rank has that shares short sequences."""
    found: dict[int, int] = defaultdict(int)
    for own in sides.values():
        for side in own.values():
            ids, mask = ids_of(side), side.find("attention_mask")
            if ids is not None and mask is not None and mask.shape == ids.shape and len(ids.shape) == 2:
                found[ids.shape[1] * 8] += int((pages.array(mask) == 0).all(1).sum()) if mask.is_readable else 0
    return {size * many for size, count in found.items() for many in range(1, count)}


def _is_packed(side: Side) -> bool:
    return any(side.find(name) is not None for name in ("cu_seqlens", "cu_seqlens_q"))


def _rows(sides: Sides, micro: int) -> set[bytes] | None:
    """The rows of tokens that the ranks have in a micro-batch; None where they are not laid as rows."""
    found: set[bytes] = set()
    for own in sides.values():
        ids = ids_of(own[micro]) if micro in own else None
        if ids is None:
            continue  # a later stage of a pipeline, or a rank whose samples made fewer micro-batches
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
        return _Laid(dict(micros[0].tensors), numbers, {})
    ids = [ids_of(side) for side in micros]
    shapes = [one.shape for one in ids if one is not None]
    if shapes and (len(shapes) < len(micros) or len({shape[1:] for shape in shapes}) > 1):
        return None
    laid = _Laid({}, {}, {})
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


def _settle_numbers(laid: dict[Which, dict[int | None, _Laid]]) -> None:
    """Let a number of several micro-batches be their one value, and none where they say several, or each counts its own
    part: whether such a one is a sum or a mean nobody says, and the other run's value must not tell.
    """
    for place in {place for ranks in laid.values() for one in ranks.values() for place in one.numbers}:
        said = {
            which: [one.numbers[place] for one in ranks.values() if place in one.numbers]
            for which, ranks in laid.items()
        }
        are_several = [
            max(map(len, own), default=0) > 1 and len({np.float64(value).tobytes() for one in own for value in one}) > 1
            for own in said.values()
        ]
        dtypes = {one.tensors[place][1].dtype for ranks in laid.values() for one in ranks.values()
                  if place in one.tensors}  # fmt: skip
        are_counts = all("int" in dtype for dtype in dtypes) and _add_up_alike(*said.values())
        if any(are_several) or are_counts:
            for ranks in laid.values():
                for one in ranks.values():
                    one.tensors.pop(place, None)


def _add_up_alike(a: Sequence[Sequence[float]], b: Sequence[Sequence[float]]) -> bool:
    """Whether values that differ make the same sum over a rank's micro-batches, or over those of all ranks."""
    if not a or not b or a[0][0] == b[0][0]:
        return False
    return sum(a[0]) == sum(b[0]) or sum(map(sum, a)) == sum(map(sum, b))


def _skip_the_rest(laid: dict[Which, dict[int | None, _Laid]], sides: dict[Which, Sides]) -> None:
    """Let what some rank has recorded of its micro-batches, and what could not be laid together, stand unread in all
    that have it: its row says so.
    """
    recorded = {
        which: {
            rank: {place: held for micro in sorted(own, reverse=True) for place, held in own[micro].tensors.items()}
            for rank, own in sides[which].items()
        }
        for which in laid
    }
    lost = {
        place for which, ranks in recorded.items() for rank, places in ranks.items()
        for place in places if place not in laid[which][rank].tensors
    }  # fmt: skip
    for which, ranks in laid.items():
        for rank, one in ranks.items():
            for place in [place for place in recorded[which][rank] if place in lost]:
                record, ref = recorded[which][rank][place]
                one.tensors.pop(place, None)
                one.unread[place] = record, ref.with_(
                    dtype="none", shape=(), source=Unreadable(CUT_OTHERWISE[1]), rows=None, digest=None, copies=(),
                    alignment=None, stated=None,
                )  # fmt: skip


def _side(laid: _Laid, micros: dict[int, Side]) -> Side:
    by_stage: dict[tuple[str, str, bool], list[tuple[Record, TensorRef]]] = defaultdict(list)
    for is_read, tensors in ((True, laid.tensors), (False, laid.unread)):
        for (_, stage), (record, ref) in tensors.items():
            by_stage[stage, str(record.path.name), is_read].append((record, ref))
    # What has several files in one stage (a rank's micro-batches) lies in those of the first.
    records = []
    for held in by_stage.values():
        refs = [ref for _, ref in held]
        first = held[0][0]
        records.append(Record(first.key, first.path, lambda refs=refs: refs))  # type: ignore[misc]
    found = Side(records)
    found.load()
    found.micros = tuple(sorted(micros)) if len(micros) > 1 else ()
    return found
