"""Numbers that are said of each micro-batch (a loss, a count of tokens), where two runs cut a step's samples into other
micro-batches: held against each other as what they come to for the step, where both come to one number.

A number faces its own samples where both runs have these in one micro-batch each, whatever its number and rank. Else
the parts of either run are added up, or their mean is taken, each as often as it has tokens or once; which of these a
number is of nobody says, so that only what makes both runs' one is taken, and what no way makes one is left alone.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

from replay_core import naming, pages
from replay_core.compare.pairing.micro_batch_pair import MicroBatchPair, Side
from replay_core.compare.pairing.ranks import OF_ALL_SAMPLES, Astray, Together, named
from replay_core.errors import DumpError
from replay_core.records import Inline, Record, RecordKey, TensorRef

_LOSS, _MASKS = "loss", ("response_mask", "loss_mask")
#: What the numbers of copies of one micro-batch may differ by; and what two runs' may come to, of what they are and
#: beside it (a loss is a sum that cancels).
_COPIES, _ALIKE, _FLOOR = 1e-5, 1e-3, 1e-6
#: How far the factors of one rank's numbers may be from each other, and how far they are from others at least.
_ONE_FACTOR, _OTHER_FACTOR = 1e-4, 1e-2

Place = tuple[str, str]


class _OfMicroBatch(Struct):
    """What one micro-batch says of some samples. weights: by what it may count: its tokens, its samples."""

    value: float
    samples: frozenset[bytes] | None
    ranks: list[int | None]
    micro: int | None
    weights: dict[str, int] = field(default_factory=dict)


def of_steps(micro_pairs: list[MicroBatchPair], alone: set[Any]) -> list[MicroBatchPair]:
    """Of the pairs of a step, all loaded: the numbers that come to one in both runs, each taken out of its
    micro-batches. alone: the steps and roles whose losses were looked at, and are no one's of the kind.
    """
    groups: dict[Any, list[MicroBatchPair]] = defaultdict(list)
    trained: dict[Any, set[str]] = defaultdict(set)
    for one in micro_pairs:
        at = one.key.step, one.key.role
        if one.key.micro is not None:
            groups[at].append(one)
        for which, side in (("a", one.a), ("b", one.b)):
            if any(stage == "gradient" and name.startswith("grad.") for name, stage in side.tensors):
                trained[at].add(which)
    made: list[MicroBatchPair] = []
    for at, group in groups.items():
        sides = _sides(group)
        if not all(sides) or _are_cut_alike(sides):
            continue
        for place in _places(sides):
            if not (at in alone and place[0] == _LOSS):
                made += _of_place(group[0].key, place, sides, are_trained=len(trained[at]) == 2)
    return made


def _sides(group: Sequence[MicroBatchPair]) -> list[list[Side]]:
    return [list({id(side): side for one in group if (side := getattr(one, run)).records}.values()) for run in "ab"]


def _key(side: Side) -> RecordKey:
    return side.records[0].key


def _samples(side: Side) -> frozenset[bytes] | None:
    """Whatever their padding, and whether they lie in rows or end to end; None where the micro-batch does not tell."""
    digests = (side.main.digests if side.main is not None and side.main.layout is not None else None) or []
    return frozenset(digests) if digests and len(set(digests)) == len(digests) else None


def _are_cut_alike(sides: Sequence[Sequence[Side]]) -> bool:
    """Whether every micro-batch of one run faces one of the other: that of the same number has its samples, on however
    many ranks, or some of the same rank.
    """
    by_rank: list[dict[int | None, list[frozenset[bytes] | None]]] = [defaultdict(list), defaultdict(list)]
    by_micro: list[dict[int | None, set[bytes]]] = [defaultdict(set), defaultdict(set)]
    for of_run, of_rank, known in zip(sides, by_rank, by_micro, strict=True):
        for side in of_run:
            samples = _samples(side)
            of_rank[_key(side).rank].append(samples)
            known[_key(side).micro] |= samples or set()
    if by_rank[0].keys() == by_rank[1].keys() and all(
        None not in own and Counter(own) == Counter(by_rank[1][rank]) for rank, own in by_rank[0].items()
    ):
        return True
    if by_micro[0].keys() != by_micro[1].keys():
        return False
    every = [set().union(*known.values()) for known in by_micro]
    # Of ranks that have some tokens of each sample nothing else is known.
    return every[0] != every[1] or by_micro[0] == by_micro[1]


def _places(sides: Sequence[Sequence[Side]]) -> list[Place]:
    """What both runs say in one number of micro-batches."""
    found: list[dict[Place, None]] = []
    for of_run in sides:
        refs: dict[Place, list[TensorRef]] = defaultdict(list)
        for side in of_run:
            for place, (_, ref) in side.tensors.items():
                refs[place].append(ref)
        found.append({place: None for place, held in refs.items() if all(map(_is_number, held))})
    return [
        place for place in found[0]
        if place in found[1] and place[1] not in OF_ALL_SAMPLES and naming.meaning(place[0]).kind != "note"
    ]  # fmt: skip


def _is_number(ref: TensorRef) -> bool:
    return ref.shape in ((), (1,)) and not ref.is_text and ref.is_readable and not ref.dtype.startswith("complex")


def _of_place(
    key: RecordKey, place: Place, sides: Sequence[Sequence[Side]], *, are_trained: bool
) -> list[MicroBatchPair]:
    having = [[side for side in of_run if place in side.tensors] for of_run in sides]
    try:
        read = [_parts(of_run, place) for of_run in having]
    except DumpError:
        return []
    parts = [one for one in read if one is not None]
    if len(parts) < 2 or not _are_several(parts):
        return []
    held = [of_run[0].tensors[place] for of_run in having]
    pair = _one_by_one(key, held, parts)
    if pair is None and are_trained:
        pair = _as_one(key, held, parts)
    if pair is None:
        return []
    for of_run in having:
        for side in of_run:
            side.tensors = {name: one for name, one in side.tensors.items() if name != place}
    return [pair]


def _are_several(parts: Sequence[Sequence[_OfMicroBatch]]) -> bool:
    """Whether micro-batches say numbers of their own, and not one again and again (a temperature), which is no part."""
    several = [{one.value for one in of_run} for of_run in parts if len(of_run) > 1]
    return bool(several) and min(map(len, several)) > 1


def _parts(sides: Sequence[Side], place: Place) -> list[_OfMicroBatch] | None:
    """What a run's micro-batches say, those that ranks have in common once; None where copies are not one."""
    found: list[_OfMicroBatch] = []
    for side in sides:
        at, own = _key(side), _samples(side)
        value = float(pages.array(side.tensors[place][1]).reshape(-1)[0])
        if not np.isfinite(value):
            return None
        made = _OfMicroBatch(value, own, [at.rank], at.micro, _weights(side, own))
        same = (one for one in found if one.micro == at.micro and abs(one.value - value) <= _COPIES * abs(value))
        if (copy := next(same, None)) is not None:
            copy.ranks.append(at.rank)
            if own is not None and copy.samples is not None and not own <= copy.samples:
                copy.samples |= own  # each has some tokens of the samples, and was told what all have
                copy.weights = {
                    name: number + made.weights[name] for name, number in copy.weights.items() if name in made.weights
                }
            continue
        if own is not None and any(one.samples is not None and one.samples & own for one in found):
            return None
        found.append(made)
    return found


def _weights(side: Side, samples: frozenset[bytes] | None) -> dict[str, int]:
    if samples is None or side.main is None:
        return {}
    found = {"tokens": int(np.sum(side.main.lengths)), "samples": len(samples)}
    mask = next((ref for name in _MASKS if (ref := side.find(name)) is not None and ref.is_readable), None)
    if mask is not None:
        found["tokens that count"] = int((pages.array(mask) != 0).sum())
    return found


def _ranks(parts: Sequence[_OfMicroBatch]) -> int:
    """On how many ranks, or groups of them with one number, a micro-batch is."""
    by_micro: dict[int | None, int] = defaultdict(int)
    for one in parts:
        by_micro[one.micro] += 1
    return max(by_micro.values())


def _one_by_one(
    key: RecordKey, held: Sequence[tuple[Record, TensorRef]], parts: Sequence[Sequence[_OfMicroBatch]]
) -> MicroBatchPair | None:
    """Where both runs have the same samples in one micro-batch each: their numbers, in the turn of a's."""
    of_a, of_b = parts
    there = {one.samples: one for one in of_b}
    if None in there or there.keys() != {one.samples for one in of_a} or len(of_a) < 2:
        return None
    turn = [there[one.samples] for one in of_a]
    a, b = (np.array([one.value for one in of_run]) for of_run in (of_a, turn))
    # A rank's number may be made larger by how many there are, where the mean over these is taken of gradients.
    times = {1.0, 1.0 / _ranks(of_b), float(_ranks(of_a)), _ranks(of_a) / _ranks(of_b)}
    in_turn = sorted(times, key=lambda one: abs(np.log(one)))
    for factor in in_turn:
        if np.linalg.norm(b * factor - a) <= _ALIKE * np.linalg.norm(a):
            more = "" if factor == 1 else f", b's times {factor:.4g} for the ranks"
            pair = _pair(key, held, (a, b * factor), f"compared by the samples that each is of{more}")
            pair.averaged = factor if held[0][1].name == _LOSS else 1.0
            return pair
    for factor in in_turn:
        astray = _scaled(held[0][1].name, a, b * factor, turn)
        if astray is not None:
            made = _pair(key, held, (a, b * factor), "compared by the samples that each is of")
            ranks = tuple(sorted({rank for one in of_b for rank in one.ranks if rank is not None}))
            made.together = Together("b", ranks, "samples", {}, astray, key.step, len(ranks), len(ranks))
            return made
    return None


def _scaled(name: str, a: NDArray[np.float64], b: NDArray[np.float64], parts: Sequence[_OfMicroBatch]) -> Astray | None:
    """Ranks of b whose numbers are a's of the same samples times one factor, where those of other ranks are a's."""
    by_ranks: dict[tuple[int, ...], list[float]] = defaultdict(list)
    for one, other, part in zip(a, b, parts, strict=True):
        ranks = tuple(sorted(rank for rank in part.ranks if rank is not None))
        if not ranks or not one:
            return None
        by_ranks[ranks].append(float(other / one))
    middle = {ranks: float(np.median(own)) for ranks, own in by_ranks.items()}
    if any(max(own) - min(own) > _ONE_FACTOR * abs(middle[ranks]) for ranks, own in by_ranks.items()):
        return None
    off = {ranks: factor for ranks, factor in middle.items() if abs(factor - 1) > _OTHER_FACTOR}
    if not off or len(off) == len(middle) or len(set(map(len, by_ranks.values()))) > 1:
        return None
    if any(abs(factor - 1) > _ONE_FACTOR for ranks, factor in middle.items() if ranks not in off):
        return None
    if min(len(by_ranks[ranks]) for ranks in off) < 2:
        return None  # of one micro-batch each it may be what its tokens are to another's
    ranks = tuple(sorted(rank for own in off for rank in own))
    said = " and ".join(f"{factor:.4g} times" for factor in sorted(set(off.values())))[:80]
    those = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {named(ranks)}"
    return Astray(
        "loss scaled", ranks,
        f"the {name} of {those} is {said} what the other run has of the same samples, in every micro-batch, and that "
        "of the other ranks is the other run's: what it adds to the gradients is times that",
        name,
    )  # fmt: skip


def _as_one(
    key: RecordKey, held: Sequence[tuple[Record, TensorRef]], parts: Sequence[Sequence[_OfMicroBatch]]
) -> MicroBatchPair | None:
    """The two runs' numbers as one of the step each, where some way makes them one. Asked where both have gradients,
    which are held to the factor that ways differ by.
    """
    ways = [_ways(of_run) for of_run in parts]
    tried = [
        (abs(x - y), one != other and "" not in (one, other), one, other, x, y)
        for one, x in ways[0].items() for other, y in ways[1].items()
    ]  # fmt: skip
    fits = [one for one in tried if one[0] <= max(_FLOOR, _ALIKE * max(abs(one[4]), abs(one[5])))]
    if not fits:
        return None
    least = min(one[0] for one in fits)
    near = [one for one in fits if one[0] <= 2 * least + _FLOOR * max(abs(one[4]), abs(one[5]))]
    _, _, of_a, of_b, x, y = min(near, key=lambda one: one[1])
    said = [_said(way, len(of_run)) for way, of_run in zip((of_a, of_b), parts, strict=True)]
    return _pair(key, held, (np.array(x), np.array(y)), f"compared as one of the step: {said[0]} in a, {said[1]} in b")


def _ways(parts: Sequence[_OfMicroBatch]) -> dict[str, float]:
    """What a run's parts may come to for the step."""
    values = np.array([one.value for one in parts])
    if len(parts) == 1:
        return {"": float(values[0])}
    made = {"sum": float(values.sum())}
    if (ranks := _ranks(parts)) > 1:
        made["ranks"] = float(values.sum()) / ranks
    made["mean"] = float(values.mean())
    for name in ("tokens that count", "tokens", "samples"):
        if all(one.weights.get(name) for one in parts):
            weights = np.array([one.weights[name] for one in parts], np.float64)
            made[name] = float((values * weights).sum() / weights.sum())
    return made


def _said(way: str, number: int) -> str:
    if not way:
        return "the one that is said"
    if way in ("sum", "mean"):
        return f"the {way} of {number}"
    if way == "ranks":
        return f"the sum of {number} divided by the ranks"
    return f"the mean of {number}, weighted by their {way}"


def _pair(
    key: RecordKey, held: Sequence[tuple[Record, TensorRef]], values: Iterable[NDArray[np.float64]], how: str
) -> MicroBatchPair:
    sides = []
    for (record, ref), value in zip(held, values, strict=True):
        dtype = "float32" if value.shape else "float64"
        source = Inline(np.ascontiguousarray(value, dtype).tobytes())
        made = ref.with_(dtype=dtype, shape=value.shape, source=source, digest=None, copies=())
        of_step = RecordKey(key.step, None, record.key.rank, record.key.role, record.key.stage)
        side = Side([Record(of_step, record.path, lambda made=made: [made])])  # type: ignore[misc]
        side.load()
        sides.append(side)
    pair = MicroBatchPair(RecordKey(key.step, None, key.rank, key.role), sides[0], sides[1])
    pair.notes.append(f"{pair.where}: the two cut the batch otherwise, and {held[0][1].name} is {how}")
    return pair
