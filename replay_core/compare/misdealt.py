"""Which ranks were given other samples than the other run's step has: told by the token ids alone, before any model."""

from __future__ import annotations

from collections import Counter

import numpy as np
from msgspec import Struct

from replay_core import pages
from replay_core.compare.judging.faults import Fault, whose
from replay_core.compare.pairing.micro_batch_pair import Side
from replay_core.errors import DumpError
from replay_core.records import Record

#: Token ids that are read of a run, at most.
_MOST = 1 << 24
#: Steps of a whose samples are asked for: the step itself, and those before it.
_STEPS = 8


class _DealtRow(Struct, frozen=True):
    """A sample as a rank was given it."""

    step: int
    rank: int
    micro: int
    tokens: bytes
    #: How long it is with its padding, where no mask says which tokens these are.
    padded_to: int | None


def misdealt(records_a: list[Record], records_b: list[Record], step: int, role: str | None = None) -> Fault | None:
    """The ranks of b that were given samples which a's step has on no rank, or fewer times; None where none were, and
    where samples are no rows of a and b alike (packs, slices of sequences, padding that nothing marks).

    records_a: of earlier steps too, whose samples may have come again (of the last few). role: whose samples are asked.
    """
    records_a, records_b = ([one for one in records if one.key.role == role] for records in (records_a, records_b))
    near = sorted({one.key.step for one in records_a if one.key.step is not None and one.key.step <= step})[-_STEPS:]
    records_a = [one for one in records_a if one.key.step in near]
    every, given = _rows(records_a), _rows([one for one in records_b if one.key.step == step])
    if every is None or not given:
        return None
    due = [one for one in every if one.step == step]
    # What a did not record it may have been given; and padding that is not known to be some is as good as a token.
    if len({one.tokens for one in given}) > len({one.tokens for one in due}):
        return None
    if len({one.padded_to for one in (*due, *given)}) > 1:
        return None
    there, here = Counter(one.tokens for one in due), Counter(one.tokens for one in given)
    by_rank: dict[int, list[_DealtRow]] = {}
    for one in given:
        by_rank.setdefault(one.rank, []).append(one)
    same_tokens = Counter(tuple(one.tokens for one in rows) for rows in by_rank.values())
    if (twice := _in_place_of_others(by_rank, there, here, step)) is not None:
        return twice
    if (apart := _drawn_apart(by_rank, there, here, step)) is not None:
        return apart
    if not due or there == here or max(same_tokens.values()) > 1 or not any(one.tokens in there for one in given):
        return None
    own = Counter((one.rank, one.tokens) for one in due)
    is_faced = {one.rank for one in due} == set(by_rank) and len(by_rank) > 1
    those: dict[int, list[_DealtRow]] = {}
    for rank, rows in by_rank.items():
        # Of what comes too often, what the rank has oftener than its own of a; or, of one process, what it has twice.
        mine = Counter(one.tokens for one in rows)
        odd = [
            one for one in rows
            if here[one.tokens] > there[one.tokens]
            and (one.tokens not in there or mine[one.tokens] > (own[rank, one.tokens] if is_faced else 1))
        ]  # fmt: skip
        if odd:
            those[rank] = odd
    if not those:
        return _fewer(by_rank, there, here, step)
    ranks = tuple(sorted(those))
    rows = [one for rank in ranks for one in those[rank]]
    total = sum(len(by_rank[rank]) for rank in ranks)
    return Fault("other samples", ranks, f"{whose(ranks)} of b {_said(rows, total, every, there, step)}")


def _in_place_of_others(
    by_rank: dict[int, list[_DealtRow]], there: Counter[bytes], here: Counter[bytes], step: int
) -> Fault | None:
    """The ranks of b that were given all that ranks before them were, where as many samples of a are on no rank: two
    ranks that share the work of a sample leave none out.
    """
    first: dict[tuple[bytes, ...], int] = {}
    twice: dict[int, int] = {}
    for rank, rows in sorted(by_rank.items()):
        before = first.setdefault(tuple(one.tokens for one in rows), rank)
        if before != rank:
            twice[rank] = before
    lost = there - here
    if not twice or not lost or there.total() != here.total() or set(here) - set(there) or max(there.values()) > 1:
        return None
    ranks, others = tuple(twice), tuple(sorted(set(twice.values())))
    verb = "was" if len(ranks) == 1 else "were"
    return Fault(
        "samples twice", ranks,
        f"{whose(ranks)} of b {verb} given in step {step} the samples of {whose(others)} once more (input_ids are the "
        f"same), while {lost.total()} of a's {there.total()} samples of the step are on no rank: samples are dealt by "
        "a rank and a size that are not those of all data-parallel ranks (the place within a group: of shards, of a "
        "node, of a replica)",
    )  # fmt: skip


def _drawn_apart(
    by_rank: dict[int, list[_DealtRow]], there: Counter[bytes], here: Counter[bytes], step: int
) -> Fault | None:
    """Ranks of b that have each sample of theirs once, and some of another rank's, while as many of a's are on none:
    each dealt itself its share of an order of its own.
    """
    lost, twice = there - here, here - there
    if not lost or lost.total() != twice.total() or set(here) - set(there) or max(there.values()) > 1:
        return None
    if any(max(Counter(one.tokens for one in rows).values()) > 1 for rows in by_rank.values()):
        return None
    ranks = tuple(sorted(rank for rank, rows in by_rank.items() if any(one.tokens in twice for one in rows)))
    if len(ranks) < 2:
        return None
    return Fault(
        "samples twice", ranks,
        f"{whose(ranks)} of b share samples in step {step}, where each should have its own: {len(twice)} of a's "
        f"{there.total()} are on more than one rank (input_ids are the same), and {lost.total()} on none, though each "
        "rank has no sample twice: each takes its share of an order of its own (another seed of the sampler or the "
        "shuffle on each rank, or another epoch)",
    )  # fmt: skip


def _fewer(by_rank: dict[int, list[_DealtRow]], there: Counter[bytes], here: Counter[bytes], step: int) -> Fault | None:
    """The ranks of b that have fewer samples than its others, where some of a's are on no rank of it."""
    most = max(map(len, by_rank.values()))
    short = {rank: rows for rank, rows in by_rank.items() if len(rows) < most}
    lost = there - here
    if not short or here - there or lost.total() != sum(most - len(rows) for rows in short.values()):
        return None
    every = {one.micro for rows in by_rank.values() for one in rows}
    micros = sorted({micro for rows in short.values() for micro in every - {one.micro for one in rows}})
    where = f" (its micro-batch {', '.join(map(str, micros))} is missing)" if micros and len(short) == 1 else ""
    ranks, fewest = tuple(sorted(short)), min(map(len, short.values()))
    verb = "was" if len(ranks) == 1 else "were"
    return Fault(
        "lost samples", ranks,
        f"{whose(ranks)} of b {verb} given {fewest} sample{'s' * (fewest != 1)} in step {step}{where}, where its other "
        f"ranks have {most} each: {lost.total()} of a's samples are on no rank",
    )  # fmt: skip


def _said(rows: list[_DealtRow], total: int, every: list[_DealtRow], there: Counter[bytes], step: int) -> str:
    verb = f"{'was' if len({one.rank for one in rows}) == 1 else 'were'} given"
    again = [one for one in rows if one.tokens in there]
    if len(again) == len(rows):
        micros = sorted({one.micro for one in every if one.step == step and one.tokens in {row.tokens for row in rows}})
        where = f" (a has them in micro-batch {', '.join(map(str, micros))})" if len(micros) == 1 else ""
        return f"{verb} {len(rows)} of {total} samples more often than a has them in step {step}{where}"
    before = {one.tokens: one.step for one in every if one.step != step}
    steps = {before[one.tokens] for one in rows if one.tokens in before}
    if len(steps) == 1 and all(one.tokens in before for one in rows if one.tokens not in there):
        return f"{verb} {len(rows)} of {total} samples of step {steps.pop()} in step {step}: a batch that is stale"
    return f"{verb} {len(rows)} of {total} samples that a has on no rank in step {step}"


def _rows(records: list[Record]) -> list[_DealtRow] | None:
    """None where some record's ids are no rows, or cannot be read."""
    found, count = [], 0
    seen: set[tuple[object, ...]] = set()
    for record in records:
        # A sample is recorded as it was sampled, and once more as it was trained on.
        key = record.key
        if (key.step, key.rank, key.micro) in seen:
            continue
        if record.key.stage in ("gradient", "param", "optimizer", "modules", "loss"):
            continue
        side = Side([record])
        side.load()
        batch = side.main
        ids = batch.held.ids if batch is not None else None
        if ids is None:
            continue
        mask = side.find("attention_mask")
        count += ids.numel
        if len(ids.shape) != 2 or count > _MOST or not ids.is_readable or side.find("cu_seqlens") is not None:
            return None
        try:
            ids_BT = pages.array(ids).astype(np.int64)
            is_there_BT = pages.array(mask) != 0 if mask is not None and mask.shape == ids.shape else ids_BT >= 0
        except DumpError:
            return None
        seen.add((key.step, key.rank, key.micro))
        padded_to = ids.shape[1] if mask is None or mask.shape != ids.shape else None
        for row, is_there in zip(ids_BT, is_there_BT, strict=True):
            found.append(_DealtRow(key.step or 0, key.rank or 0, key.micro or 0, row[is_there].tobytes(), padded_to))
    return found
