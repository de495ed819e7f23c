"""The one loss of a step, where two runs cut its samples into other micro-batches and each says a loss of each.

What such a number is of, nobody says: the mean over the micro-batch's own tokens, or its part of the mean over all of
the step's. A run's own log-probabilities tell: the loss is minus their sum, divided by something, and that divisor is
either the number of the micro-batch's tokens or one number for the whole step. So each run alone says what its step
comes to; the two are then held against each other, and no number of one tells what another's is.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
from msgspec import Struct

from replay_core import pages
from replay_core.compare.pairing.micro_batch_pair import MicroBatchPair, Side
from replay_core.compare.pairing.ranks import ids_of
from replay_core.dtypes import EPS, coarsest, family
from replay_core.errors import DumpError
from replay_core.records import Inline, Record, RecordKey, TensorRef

_LOSS, _LOGPROBS, _MASKS = "loss", "policy_logprobs", ("response_mask", "loss_mask")
#: What two divisors that are one may differ by, beside the roundings of the dtype.
_ALIKE, _ROUNDINGS = 1e-5, 4

#: Where a recorder puts what the loss left at the logits; how far it may be from a cross entropy's, of its norm; and
#: of how many elements it is read.
_LEFT, _ALIKE_LEFT, _MOST = "loss_gradient", 1e-3, 1 << 26

Held = tuple[Record, TensorRef]


class _Part(Struct, frozen=True):
    """What was computed of some samples: minus the sum of their log-probabilities, of how many tokens, and the loss.

    rows: the samples' digests. unit: what a number of this kind may be off by its own rounding, relative.
    """

    rows: frozenset[bytes]
    loss: float
    total: float
    tokens: int
    unit: float

    @property
    def divisor(self) -> float:
        return self.total / self.loss

    def divides_by(self, number: float) -> bool:
        return abs(self.divisor - number) <= self.unit * number


class _OfStep(Struct, frozen=True):
    """times: by how many ranks the losses were divided."""

    value: float
    said: str
    times: int = 1


def of_steps(micro_pairs: list[MicroBatchPair]) -> tuple[list[MicroBatchPair], set[Any]]:
    """Of the pairs of a step, all loaded: their losses as one of the step, each taken out of its micro-batch; none
    where both runs cut the step alike, or one does not tell what its losses are of. And the steps and roles where that
    is so of one run alone: its log-probabilities do not make its losses as the other's make those.
    """
    groups: dict[Any, list[MicroBatchPair]] = defaultdict(list)
    for micro_pair in micro_pairs:
        if micro_pair.key.micro is not None:
            groups[micro_pair.key.step, micro_pair.key.role].append(micro_pair)
    made: list[MicroBatchPair] = []
    contradicted: set[Any] = set()
    for at, group in groups.items():
        found = _of_group(group)
        if isinstance(found, MicroBatchPair):
            made.append(found)
        elif found:
            contradicted.add(at)
    return made, contradicted


def _of_group(group: list[MicroBatchPair]) -> MicroBatchPair | bool:
    """The losses of a step as one; where there is none, whether those of one run alone tell what they are of."""
    sides = [
        {id(side): side for side in (getattr(one, which) for one in group) if side.records}.values() for which in "ab"
    ]
    places = {place for of_run in sides for side in of_run for place in side.tensors if place[0] == _LOSS}
    if len(places) != 1:
        return False
    (place,) = places
    having = [[side for side in of_run if place in side.tensors] for of_run in sides]
    if not all(having) or not any(_are_several(of_run) for of_run in having):
        return False
    parts = [_parts(of_run, place) for of_run in having]
    if parts[0] is None or parts[1] is None or parts[0].keys() == parts[1].keys():
        return False
    if set().union(*parts[0]) != set().union(*parts[1]):
        return False
    found = [_of_step(list(one.values()), of_run) for one, of_run in zip(parts, having, strict=True) if one is not None]
    if any(one is None for one in found):
        return any(one is not None for one in found)
    key, made = group[0].key, []
    for one, of_run in zip(found, having, strict=True):
        assert one is not None
        made.append(_side(key, of_run[0].tensors[place], one.value))
    for of_run in having:
        for side in of_run:
            side.tensors = {name: held for name, held in side.tensors.items() if name != place}
    pair = MicroBatchPair(RecordKey(key.step, None, key.rank, key.role), made[0], made[1])
    said, times = [one.said for one in found if one is not None], [one.times for one in found if one is not None]
    pair.averaged = times[0] / times[1]
    pair.notes.append(
        f"{pair.where}: the two cut the batch otherwise, and {_LOSS} is compared as one of the step: {said[0]} in a, "
        f"{said[1]} in b, as each run's own log-probabilities tell"
    )
    return pair


def _are_several(sides: list[Side]) -> bool:
    """Whether a rank has more than one micro-batch."""
    ranks = [side.records[0].key.rank for side in sides]
    return len(set(ranks)) < len(ranks)


def _parts(sides: list[Side], place: tuple[str, str]) -> dict[frozenset[bytes], _Part] | None:
    """By their samples, what each part of a run says; ranks of the same samples count once. None where one does not
    tell, or two of the same samples say different things.
    """
    found: dict[frozenset[bytes], _Part] = {}
    for side in sides:
        part = _part(side, place)
        if part is None:
            return None
        known = found.setdefault(part.rows, part)
        if abs(known.loss - part.loss) > part.unit * abs(known.loss) or known.tokens != part.tokens:
            return None
    rows = [row for one in found for row in one]
    return found if len(rows) == len(set(rows)) else None  # parts of one sample are no samples of their own


def _part(side: Side, place: tuple[str, str]) -> _Part | None:
    ids, loss, logprobs = ids_of(side), side.tensors[place][1], side.find(_LOGPROBS)
    if ids is None or loss.shape not in ((), (1,)):
        return None
    if logprobs is None:
        logprobs = _of_logits(side)
    if logprobs is None or logprobs.rows is not None:
        return None
    if not ids.numel or logprobs.is_text or len(logprobs.shape) not in (1, 2):
        return None
    mask = next((ref for name in _MASKS if (ref := side.find(name)) is not None), None)
    if mask is not None and mask.shape != logprobs.shape:
        return None
    if not all(ref.is_readable and family(ref.dtype) in EPS for ref in (loss, logprobs)):
        return None
    try:
        values_BT = pages.array(logprobs).astype(np.float64)
        counted_BT = values_BT != 0 if mask is None else pages.array(mask) != 0
        said = float(pages.array(loss).reshape(-1)[0])
        # Whatever their padding, and whether they lie in rows or end to end.
        samples = (side.main.digests if side.main is not None else None) or []
    except DumpError:
        return None
    total, tokens = -float(values_BT[counted_BT].sum()), int(counted_BT.sum())
    if not said or not np.isfinite([said, total]).all() or not tokens or len({*samples}) < max(1, len(samples)):
        return None
    unit = _ALIKE + _ROUNDINGS * EPS[str(family(coarsest(loss.dtype, logprobs.dtype)))]
    return _Part(frozenset(samples), said, total, tokens, unit)


def _of_logits(side: Side) -> TensorRef | None:
    """The log-probabilities [B, T] of the loss's targets, 0 where it has none, by what it left at the logits [B, T, V]:
    of a cross entropy that is a weight times (softmax - 1 at the target). None where it is anything else.
    """
    left = next((ref for (_, stage), (_, ref) in side.tensors.items() if stage == _LEFT and len(ref.shape) == 3), None)
    logits = side.find(left.name.removeprefix("grad.")) if left is not None else None
    if left is None or logits is None or logits.shape != left.shape or not 0 < left.numel <= _MOST:
        return None
    if any(ref.rows is not None or not ref.is_readable or family(ref.dtype) not in EPS for ref in (left, logits)):
        return None
    try:
        left_BTV, logits_BTV = (pages.array(ref).astype(np.float64) for ref in (left, logits))
    except DumpError:
        return None
    if not np.isfinite(left_BTV).all() or not np.isfinite(logits_BTV).all():
        return None
    logits_BTV -= logits_BTV.max(-1, keepdims=True)
    logprobs_BTV = logits_BTV - np.log(np.exp(logits_BTV).sum(-1, keepdims=True))
    target_BT1 = left_BTV.argmin(-1)[..., None]
    made_BTV = np.exp(logprobs_BTV)
    np.put_along_axis(made_BTV, target_BT1, np.take_along_axis(made_BTV, target_BT1, -1) - 1, -1)
    weight_BT1 = (left_BTV * made_BTV).sum(-1, keepdims=True) / np.square(made_BTV).sum(-1, keepdims=True)
    off = np.linalg.norm(left_BTV - weight_BT1 * made_BTV)
    if not off <= _ALIKE_LEFT * np.linalg.norm(left_BTV):
        return None
    counted_BT = left_BTV.any(-1)
    values_BT = np.where(counted_BT, np.take_along_axis(logprobs_BTV, target_BT1, -1)[..., 0], 0.0)
    return logits.with_(dtype="float64", shape=values_BT.shape, source=Inline(values_BT.tobytes()), digest=None)


def _of_step(parts: list[_Part], sides: list[Side]) -> _OfStep | None:
    """What a run's parts make of the step; None where they are neither means of their own nor parts of one."""
    every = sum(one.tokens for one in parts)
    of_own = all(one.divides_by(one.tokens) for one in parts)
    if of_own:
        value = sum(one.loss * one.tokens for one in parts) / every
        return _OfStep(value, f"the mean over {every} tokens" if len(parts) == 1 else (
            f"{len(parts)} means over their own tokens, weighted by these ({every})"
        ))  # fmt: skip
    # A rank's loss is made larger by the number of ranks where the mean over these is taken of gradients.
    ranks = {side.records[0].key.rank for side in sides}
    for times in sorted({1, len(ranks)}):
        if all(one.divides_by(every / times) for one in parts):
            made = f"the sum of {len(parts)} parts of the mean over {every} tokens"
            more = f", divided by {times} ranks" if times > 1 else ""
            return _OfStep(sum(one.loss for one in parts) / times, made + more, times)
    return None


def _side(key: RecordKey, held: Held, value: float) -> Side:
    record, ref = held
    made = ref.with_(dtype="float64", shape=(), source=Inline(np.float64(value).tobytes()), digest=None, copies=())
    of_step = RecordKey(key.step, None, record.key.rank, record.key.role, record.key.stage)
    side = Side([Record(of_step, record.path, lambda: [made])])
    side.load()
    return side
