"""One record's samples without padding, and any of its tensors placed on their tokens.

Beside each value stands whether the tensor *says* something of the token at all: a NaN that was computed and
a token nobody spoke about are two different things to a diagnosis.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replay_core import pages
from replay_core.naming import meaning
from replay_core.records import Record, TensorRef
from replay_core.samples.rows import split

Array = NDArray[Any]

#: Names under which a record says how many samples it has, where nothing has a token axis.
_PER_SAMPLE = ("reward", "token_scores", "token_rewards", "normalised_reward", "group_id", "advantages", "prompt_text")


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor by sample: element t of a row is about token t. `said` is False where it says nothing."""

    values: list[Array]
    said: list[Array]


@dataclass(slots=True)
class Rows:
    """The samples of one record.

    tokens: each sample's ids without padding; None where the record holds none.
    slots: each sample's columns in the padded tensors; None for ragged rows.
    width: S of the padded tensors. `response_start`: each sample's first response token, None if not known.
    pack: which pack each sample lay in; None where nothing was packed.
    """

    record: Record
    lengths: list[int]
    tokens: list[Array] | None = None
    slots: list[Array] | None = None
    width: int | None = None
    response_start: list[int] | None = None
    pad_id: int | None = None
    padding_known: bool = True
    pack: list[int] | None = None
    keep: list[Array] | None = None
    """Of ragged rows that are padded to the longest of their group: which entries hold a token."""
    after: list[int | None] | None = None
    """The id in the column after each sample's last token, None at the edge: an end that the mask left out."""
    unheard: list[bool] | None = None
    """Whether ids that no mask attends to fill the columns after the sample to the last: a response that was
    masked out whole, cut off at the limit."""
    siblings: list[Record] = field(default_factory=list)
    """Records of the same micro-batch whose rows are these samples: its losses."""

    def __len__(self) -> int:
        return len(self.lengths)

    def fields(self) -> list[TensorRef]:
        """What the record and its siblings hold."""
        return [ref for record in (self.record, *self.siblings) for ref in record.tensors()]

    def find(self, *names: str) -> TensorRef | None:
        """The first readable numeric field of one of these canonical names."""
        return find(self.fields(), *names)

    def per_sample(self, ref: TensorRef) -> Array | None:
        """One value per sample, or None where the tensor has another shape."""
        if ref.rows is None and ref.shape[:1] == (len(self),) and ref.numel == len(self):
            return np.asarray(pages.array(ref)).reshape(-1)
        return None

    def place(self, ref: TensorRef) -> Placed | None:
        """The tensor's values on the samples' tokens; None where it has no token axis or does not fit."""
        if ref.is_text or not ref.shape:
            return None
        if self.pack is not None and ref.rows is not None:
            return self._place_packed(ref)
        rows = split(ref)
        if len(rows) != len(self) or any(row.ndim != 1 for row in rows):
            return None
        if ref.rows is None and self.slots is not None and self.width is not None:
            return self._place_padded(ref, rows)
        if self.keep is not None and all(row.size == keep.size for row, keep in zip(rows, self.keep, strict=True)):
            rows = [row[keep] for row, keep in zip(rows, self.keep, strict=True)]
        return self._place_ragged(ref, rows)

    def outside(self, ref: TensorRef) -> tuple[int, int] | None:
        """Entries of a padded mask that are set where the batch holds no token, and the first one's row."""
        if self.keep is not None and ref.rows is not None and len(ref.rows) == len(self):
            each = [
                int((row[~keep] != 0).sum()) if row.size == keep.size else 0
                for row, keep in zip(split(ref), self.keep, strict=True)
            ]
            return (sum(each), int(np.flatnonzero(each)[0])) if any(each) else None
        if self.slots is None or self.width is None or ref.rows is not None or len(ref.shape) != 2:
            return None
        shift = self._shift(ref)
        if shift is None:
            return None
        set_BT = pages.array(ref) != 0
        # A full-width mask of the next token has a last column that is about no token at all.
        held_BS = np.zeros((len(self), max(self.width, shift + ref.shape[1])), dtype=bool)
        for row, columns in enumerate(self.slots):
            held_BS[row, columns] = True
        strays = np.argwhere(set_BT & ~held_BS[:, shift : shift + ref.shape[1]])
        return (len(strays), int(strays[0][0])) if strays.size else None

    def _shift(self, ref: TensorRef) -> int | None:
        """The column of the batch that the tensor's first column is about."""
        width, columns = self.width, ref.shape[1]
        if width is None or columns > width:
            return None
        if columns == width:
            return 1 if ref.alignment == "next" else 0
        return width - columns

    def index_of(self, ref: TensorRef, sample: int, position: int | None = None) -> list[int] | None:
        """The raw index of a sample's token in a tensor, or of where the sample begins; None where it has none."""
        if not ref.shape or not 0 <= sample < len(self):
            return None
        rest = [0] * (len(ref.shape) - 1)
        if ref.rows is not None:
            return [self._ragged_place(ref, sample, position), *rest]
        if ref.shape[0] != len(self):
            return None
        if position is None or len(ref.shape) < 2 or self.slots is None or self.width is None:
            return [sample, *rest]
        shift = self._shift(ref) if len(ref.shape) == 2 else 0
        if shift is None or not 0 <= position < len(self.slots[sample]):
            return [sample, *rest]
        column = int(self.slots[sample][position]) - shift
        return [sample, min(max(0, column), ref.shape[1] - 1), *rest[1:]]

    def _ragged_place(self, ref: TensorRef, sample: int, position: int | None) -> int:
        """Where a token lies among the entries of all rows one after the other."""
        assert ref.rows is not None
        length = self.lengths[sample]
        if self.pack is not None:
            return sum(self.lengths[:sample]) + min(max(0, position or 0), length - 1)
        sizes = [int(size) for size in ref.rows]
        held = np.arange(sizes[sample])
        if self.keep is not None and self.keep[sample].size == sizes[sample]:
            held = np.flatnonzero(self.keep[sample])
        if position is None or not held.size:
            return sum(sizes[:sample])
        before = 1 if ref.alignment == "next" and held.size == length else length - held.size
        return sum(sizes[:sample]) + int(held[min(max(0, position - before), held.size - 1)])

    def _place_padded(self, ref: TensorRef, rows: Sequence[Array]) -> Placed | None:
        shift = self._shift(ref)
        if shift is None or self.slots is None:
            return None
        values, said = [], []
        for row, columns in zip(rows, self.slots, strict=True):
            at = columns - shift
            inside = (at >= 0) & (at < row.size)
            values.append(np.where(inside, _real(row)[np.where(inside, at, 0)], np.nan) if row.size else _none(at))
            said.append(inside)
        return Placed(values, said)

    def _place_ragged(self, ref: TensorRef, rows: Sequence[Array]) -> Placed | None:
        values, said = [], []
        for number, (row, length) in enumerate(zip(rows, self.lengths, strict=True)):
            size = row.size
            if ref.rows is None and self.response_start is not None and size > length - self.response_start[number]:
                # A padded response slice beside ragged tokens: its first entries are the response.
                row, start = row[: length - self.response_start[number]], self.response_start[number]
            elif ref.alignment == "next" and size in (length, length - 1):
                row, start = row[: length - 1], 1
            elif size == length - 1 or size < length:
                start = length - size
            elif size == length:
                start = 0
            else:
                return None
            whole, there = np.full(length, np.nan), np.zeros(length, dtype=bool)
            whole[start : start + row.size] = _real(row)
            there[start : start + row.size] = True
            values.append(whole)
            said.append(there)
        return Placed(values, said)

    def _place_packed(self, ref: TensorRef) -> Placed | None:
        if ref.shape[0] != sum(self.lengths):
            return None
        parts = np.split(_real(pages.array(ref).reshape(-1)), np.cumsum(self.lengths)[:-1])
        return Placed(list(parts), [np.ones(part.size, dtype=bool) for part in parts])


def find(fields: Sequence[TensorRef], *names: str) -> TensorRef | None:
    """The first readable numeric field of one of these canonical names."""
    for name in names:
        for ref in fields:
            if (ref.canonical or ref.name) == name and not ref.is_text and ref.is_readable:
                return ref
    return None


def rows_of(record: Record) -> Rows | None:
    """The samples of a record, or None where it holds none (scalars, modules, gradients).

    Raises:
        DumpError: the record cannot be read.
    """
    fields = record.tensors()
    rows = _with_ids(record, fields) or _from_parts(record, fields) or _without_tokens(record, fields)
    if rows is not None and rows.response_start is None:
        rows.response_start = _response_starts(rows, fields)
    return rows


def _with_ids(record: Record, fields: Sequence[TensorRef]) -> Rows | None:
    ids = find(fields, "input_ids")
    if ids is None or ids.dtype in ("float32", "float64"):
        return None
    if ids.rows is not None:
        return _ragged_ids(record, ids, fields)
    if len(ids.shape) != 2:
        return None
    ids_BS = pages.array(ids)
    batch, width = ids.shape
    mask, lengths = find(fields, "attention_mask"), find(fields, "sample_lengths")
    known, pad_id = True, None
    if mask is not None and mask.shape == ids.shape and mask.rows is None:
        held_BS = pages.array(mask) != 0
    elif lengths is not None and lengths.numel == batch:
        counts = pages.array(lengths).reshape(-1, 1)
        held_BS = np.arange(width)[None, :] < counts
    else:
        held_BS, known = np.ones(ids.shape, dtype=bool), False
    empty = ids_BS[~held_BS]
    if empty.size:
        pad_id = _most_common(empty)
    slots = [np.flatnonzero(row) for row in held_BS]
    tokens = [row[at] for row, at in zip(ids_BS, slots, strict=True)]
    found = Rows(record, [at.size for at in slots], tokens, slots, width, pad_id=pad_id, padding_known=known)
    ends = [int(at[-1]) + 1 if at.size else width for at in slots]
    found.after = [int(row[end]) if end < width else None for row, end in zip(ids_BS, ends, strict=True)]
    found.unheard = [_is_written(row[end:]) for row, end in zip(ids_BS, ends, strict=True)]
    prompts, responses = find(fields, "prompt_ids"), find(fields, "response_ids")
    if prompts is None or responses is None or len(prompts.shape) != 2 or len(responses.shape) != 2:
        return found
    begin = prompts.shape[1]
    # Some frameworks shift a sample left after joining: then the columns no longer tell.
    if begin + responses.shape[1] == width and np.array_equal(ids_BS[:, begin:], pages.array(responses)):
        found.response_start = [int(np.searchsorted(at, begin)) for at in slots]
    return found


def _ragged_ids(record: Record, ids: TensorRef, fields: Sequence[TensorRef]) -> Rows:
    counts = list(ids.rows or ())
    pack: list[int] | None = None
    lengths = find(fields, "sample_lengths")
    flat = pages.array(ids).reshape(-1)
    if lengths is not None and lengths.numel > len(counts):
        each = pages.array(lengths).reshape(-1).astype(np.int64)
        if (each >= 0).all() and int(each.sum()) == flat.size:
            ends = np.cumsum(counts)
            pack = np.searchsorted(ends, np.cumsum(each) - each, side="right").tolist()
            counts = each.tolist()
    tokens = list(np.split(flat, np.cumsum(counts)[:-1])) if counts else []
    targets = find(fields, "target_ids")
    if targets is not None and targets.rows == ids.rows and pack is None:
        # Inputs without their last token beside targets without their first: the sample is both.
        tokens = [np.concatenate([a[:1], b]) for a, b in zip(tokens, split(targets), strict=True)]
        counts = [row.size for row in tokens]
    mask = find(fields, "attention_mask")
    if mask is not None and mask.rows == ids.rows and pack is None:
        keep = [row != 0 for row in split(mask)]
        empty = flat[~np.concatenate(keep)] if keep else flat[:0]
        tokens = [row[held] for row, held in zip(tokens, keep, strict=True)]
        padding = _most_common(empty) if empty.size else None
        return Rows(record, [row.size for row in tokens], tokens, keep=keep, pad_id=padding)
    return Rows(record, counts, tokens, pack=pack)


def _from_parts(record: Record, fields: Sequence[TensorRef]) -> Rows | None:
    """Prompt and response ids apart."""
    prompts, responses = find(fields, "prompt_ids"), find(fields, "response_ids")
    if prompts is None or responses is None:
        return None
    head, tail = _unpadded(prompts, find(fields, "prompt_mask")), _unpadded(responses, find(fields, "response_mask"))
    if len(head) != len(tail):
        return None
    tokens = [np.concatenate(pair) for pair in zip(head, tail, strict=True)]
    return Rows(record, [row.size for row in tokens], tokens, response_start=[row.size for row in head])


def _unpadded(ref: TensorRef, mask: TensorRef | None) -> list[Array]:
    rows = split(ref)
    if ref.rows is not None or mask is None or mask.shape != ref.shape:
        return rows
    return [row[keep != 0] for row, keep in zip(rows, pages.array(mask), strict=True)]


def _without_tokens(record: Record, fields: Sequence[TensorRef]) -> Rows | None:
    """Samples known by a mask or by values alone: a slot is then called a token."""
    for ref in fields:
        name = ref.canonical or ref.name
        if ref.is_text or not ref.is_readable or not ref.shape:
            continue
        known = meaning(name)
        if known.alignment in ("next", "full") and (ref.rows is not None or len(ref.shape) == 2):
            if ref.rows is not None:
                return Rows(record, list(ref.rows), padding_known=False)
            batch, width = ref.shape
            slots = [np.arange(width) for _ in range(batch)]
            return Rows(record, [width] * batch, slots=slots, width=width, padding_known=False)
    for ref in fields:
        if (ref.canonical or ref.name) in _PER_SAMPLE and len(ref.shape) == 1 and ref.rows is None and ref.shape[0]:
            return Rows(record, [0] * ref.shape[0], padding_known=False)
    return None


def _response_starts(rows: Rows, fields: Sequence[TensorRef]) -> list[int] | None:
    """Where the responses begin: from their lengths, else from a tensor that holds responses alone."""
    counts = find(fields, "response_length")
    if counts is not None and counts.numel == len(rows) and counts.rows is None:
        each = pages.array(counts).reshape(-1).astype(np.int64).tolist()
        return [max(0, length - int(count)) for length, count in zip(rows.lengths, each, strict=True)]
    mask = find(fields, "response_mask", "loss_mask")
    if mask is None or (mask.alignment not in ("response", None) and rows.width is None):
        return None
    if mask.rows is None or rows.slots is not None or rows.pack is not None or len(mask.rows) != len(rows):
        return None
    starts = [length - size for size, length in zip(mask.rows, rows.lengths, strict=True)]
    return starts if any(starts) and min(starts) >= 0 else None


def _most_common(ids: Array) -> int:
    values, counts = np.unique(ids, return_counts=True)
    return int(values[counts.argmax()])


def _is_written(tail: Array) -> bool:
    """Whether these ids are text to the last: padding repeats one id."""
    return bool(tail.size >= 2 and tail[-1] != tail[-2] and np.unique(tail).size >= 2)


def _real(values: Array) -> Array:
    return np.asarray(values, dtype=np.float64)


def _none(at: Array) -> Array:
    return np.full(at.size, np.nan)
