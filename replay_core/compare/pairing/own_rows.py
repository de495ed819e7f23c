"""The samples of two runs, each in a row of its own and all rows of one width: where one run trims its micro-batches to
their longest sample, or lays samples end to end in packs, and ranks hold slices of these that have to be put together.

A layout says where the tokens of a sample lie; what a tensor says of them is that stretch of it, with zeros behind it.
Only tokens and masks are read. Padding that a run computed is left out: no comparison counts it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from replay_core.compare.pairing.micro_batch_pair import Side
from replay_core.compare.pairing.ranks import OF_ALL_SAMPLES, Which, ids_of, narrowed, same_values
from replay_core.dtypes import ITEMSIZE
from replay_core.errors import DumpError
from replay_core.records import Inline, Parts, Record, TensorRef
from replay_core.samples.batch import Batch

#: Of one run and step: rank -> micro-batch -> what it recorded of it.
Sides = dict[int | None, dict[int, Side]]

_BOUNDS = ("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k", "sample_lengths", "seq_lens", "max_seqlen")


class _Row(NamedTuple):
    """Where the tokens of a sample lie: in which row of the layout, from where on, how many."""

    row: int
    start: int
    length: int


def in_rows_of_one_width(runs: dict[Which, Sides]) -> dict[Which, Sides] | None:
    """What either run recorded, every sample in a row of its own; None where both lay their samples out alike already,
    no ranks have the same tokens (then samples are paired one by one), or their samples are not the same.

    Every side is loaded.
    """
    every = [side for ranks in runs.values() for own in ranks.values() for side in own.values()]
    if not any(map(_share_tokens, runs.values())) or not _lie_otherwise(every):
        return None
    try:
        rows = {id(side): _rows_of(side) for side in every}
        if any(one is None for one in rows.values()) or not _are_of_one_batch(runs):
            return None
        width = max(row.length for one in rows.values() for row in one or ())
        return {
            which: {
                rank: {micro: _laid(side, rows[id(side)] or [], width) for micro, side in own.items()}
                for rank, own in ranks.items()
            }
            for which, ranks in runs.items()
        }
    except DumpError:
        return None  # said where it is compared


def _share_tokens(ranks: Sides) -> bool:
    """Whether two ranks have the same tokens in a micro-batch: slices of one model."""
    firsts: dict[int, list[TensorRef]] = defaultdict(list)
    for own in ranks.values():
        for micro, side in own.items():
            ids = ids_of(side)
            if ids is not None and any(same_values(ids, one) for one in firsts[micro]):
                return True
            if ids is not None:
                firsts[micro].append(ids)
    return False


def _lie_otherwise(sides: list[Side]) -> bool:
    mains = [side.main for side in sides]
    shapes = {ids.shape[1:] if len(ids.shape) > 1 else () for side in sides if (ids := ids_of(side)) is not None}
    return len(shapes) > 1 or any(main is not None and main.packs is not None for main in mains)


def _are_of_one_batch(runs: dict[Which, Sides]) -> bool:
    """Whether the two runs have the same samples, each as often, ranks with the same tokens counted once."""
    found = []
    for ranks in runs.values():
        seen: set[tuple[bytes, ...]] = set()
        for own in ranks.values():
            for side in own.values():
                main = side.main
                digests = main.digests if main is not None else None
                if digests is None:
                    return False
                seen.add(tuple(digests))
        found.append(Counter(digest for one in seen for digest in one))
    return found[0] == found[1] and max(found[0].values(), default=2) == 1


def _rows_of(side: Side) -> list[_Row] | None:
    """Where each sample lies; None where one is not in one stretch, or nobody knows which tokens are padding."""
    main = side.main
    if main is None or main.layout is None or main.held.ids is None or not main.padding_known or main.rows is not None:
        return None
    layout, found = main.layout, []
    if layout.shape != (main.held.ids.shape if len(main.held.ids.shape) == 2 else (1, main.held.ids.numel)):
        return None
    for sample in range(main.count):
        rows, columns = np.nonzero(layout.sample_BS == sample)
        if not rows.size or rows[0] != rows[-1] or columns[-1] - columns[0] + 1 != columns.size:
            return None
        if not np.array_equal(layout.position_BS[rows[0], columns], np.arange(columns.size)):
            return None
        found.append(_Row(int(rows[0]), int(columns[0]), int(columns.size)))
    return found or None


def _laid(side: Side, rows: list[_Row], width: int) -> Side:
    main = side.main
    assert main is not None
    assert main.layout is not None
    by_record: dict[tuple[str, str], tuple[Record, list[TensorRef]]] = {}
    for (name, stage), (record, ref) in side.tensors.items():
        if name in _BOUNDS:
            continue  # of the layout that is left
        made = ref if stage in OF_ALL_SAMPLES else _of_tokens(name, ref, main, rows, width)
        by_record.setdefault((stage, record.path.name), (record, []))[1].append(made)
    masked = {name for name, _ in side.tensors}
    ids = main.held.ids
    if "attention_mask" not in masked and ids is not None:
        record = main.held.record
        mask = TensorRef("attention_mask", "int64", (len(rows), width), _mask(rows, width), canonical="attention_mask")
        by_record[record.key.stage, record.path.name][1].append(mask)
    records = [Record(first.key, first.path, lambda refs=refs: refs) for first, refs in by_record.values()]  # type: ignore[misc]
    found = Side(records)
    found.load()
    found.problems[:0] = side.problems
    found.unreadable += side.unreadable
    return found


def _of_tokens(name: str, ref: TensorRef, main: Batch, rows: list[_Row], width: int) -> TensorRef:
    """A tensor's stretches of the samples, each with zeros behind it; as it is where it has none."""
    assert main.layout is not None
    ids, (batch, long) = main.held.ids, main.layout.shape
    if ref is ids:
        assert main.contents is not None
        values = np.zeros((len(rows), width), np.int64)
        for number, content in enumerate(main.contents):
            values[number, : len(content)] = content
        return ref.with_(dtype="int64", shape=values.shape, source=Inline(values.tobytes()), digest=None, rows=None)
    if name == "attention_mask":
        return ref.with_(dtype="int64", shape=(len(rows), width), source=_mask(rows, width), digest=None)
    if ref.is_text or ref.rows is not None or not ref.is_readable or not ref.shape or ref.dtype not in ITEMSIZE:
        return ref
    # [batch, long, ...]; flat [batch x long, ...]; said of all tokens of a row but its last: [batch, long - 1, ...].
    shift, lead = 0, (len(rows), width)
    if ref.shape[:2] == (batch, long):
        inner = ref.shape[2:]
    elif ref.shape[:2] == (batch, long - 1) and main.packs is None:
        inner, lead, shift = ref.shape[2:], (len(rows), width - 1), 1
    elif ref.shape[0] == batch * long:
        inner = ref.shape[1:]
    else:
        return ref
    each = int(np.prod(inner))
    if not each or not ref.numel:
        return ref
    flat, across = ref.with_(shape=(ref.numel // each, *inner)), long - shift
    parts: list[TensorRef] = []
    for row in rows:
        length = row.length - shift
        if length:
            parts.append(narrowed(flat, 0, row.row * across + row.start, length))
        if width - row.length:
            parts.append(_zeros(ref, (width - row.length, *inner)))
    is_flat = ref.shape[0] == batch * long and ref.shape[:2] != (batch, long) and main.packs is None
    shape = (lead[0] * lead[1], *inner) if is_flat else (*lead, *inner)
    return ref.with_(shape=shape, source=Parts(tuple(parts)), digest=None, copies=(), alignment=None)


def _mask(rows: list[_Row], width: int) -> Inline:
    return Inline((np.arange(width)[None] < np.array([[row.length] for row in rows])).astype(np.int64).tobytes())


def _zeros(ref: TensorRef, shape: tuple[int, ...]) -> TensorRef:
    size = int(np.prod(shape)) * ITEMSIZE[ref.dtype]
    return ref.with_(shape=shape, source=Inline(_zero_bytes(size)), digest=None, copies=())


@lru_cache(maxsize=256)
def _zero_bytes(size: int) -> bytes:
    """One of each size, however many tensors have so much padding."""
    return bytes(size)
