"""The samples of one record: which tokens each has, who it is, and which token a row of a tensor speaks of.

Padded left or right, packed end to end, ragged rows, prompt and response apart, a response slice, values said of
the next token: whatever the layout, a token is (sample, position), and `place` says where a tensor speaks of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replay_core import naming, pages
from replay_core.errors import DumpError
from replay_core.records import Record, TensorRef
from replay_core.samples.layout import Bools, Ints, Said, TokenAxes, TokenLayout

#: A token is one rising number: its sample, then its position in these bits.
POSITION_BITS = 40

#: Fields that together name a sample across runs, the stablest first: a group's id may be new in every run.
IDENTITIES = (("task_id", "sample_id"), ("group_id", "sample_id"), ("sample_id",), ("uid",))

#: What a sample says where a record holds its texts and no tokens.
_TEXTS = ("prompt_text", "prompt", "raw_prompt", "response_text", "response")

#: Stages whose tensors are not laid out by sample, whatever their first axis happens to be.
_NOT_BY_SAMPLE = frozenset({"modules", "gradient", "param", "optimizer", "training_metrics", "loss"})


def token_numbers(samples: Any, positions: Any) -> Ints:
    """Tokens as rising numbers, (sample, position) in one."""
    numbers: Ints = (np.asarray(samples, np.int64) << POSITION_BITS) + np.asarray(positions, np.int64)
    return numbers


def samples_of(tokens: Ints) -> Ints:
    """The sample of every token number."""
    samples: Ints = tokens >> POSITION_BITS
    return samples


def positions_of(tokens: Ints) -> Ints:
    """The position of every token number within its sample."""
    positions: Ints = tokens & ((1 << POSITION_BITS) - 1)
    return positions


@dataclass(frozen=True, slots=True)
class Placed:
    """Where a tensor speaks of which token.

    tokens: the tokens spoken about, as rising numbers; rows: the row that does, its leading `axes` flattened.
    by_token: False where a row is about a whole sample (its position is then 0).
    """

    tokens: Ints
    rows: Ints
    axes: int
    by_token: bool = True


class Batch:
    """The samples of one record, as far as its fields tell.

    layout: the token axis of `input_ids`; ragged rows are one row laid end to end. None where no tokens are known.
    rows: the lengths of the ragged rows, padding included; None of a dense or packed batch.
    """

    def __init__(self, record: Record, fields: Sequence[TensorRef]) -> None:
        self.record = record
        self._fields = [ref for ref in fields if ref.is_readable]
        self._known: dict[str, Said] = {}
        self.ids = self._find("input_ids")
        self.rows = self.ids.rows if self.ids is not None else None
        #: Nothing says which tokens are padding: every one counts, until `trimmed` finds runs of one id.
        self.is_unmasked = False
        self.layout = self._layout()
        self.count = self._count()

    def _find(self, name: str) -> TensorRef | None:
        return next((ref for ref in self._fields if (ref.canonical or ref.name) == name), None)

    def _layout(self) -> TokenLayout | None:
        ids, mask, bounds = self.ids, self._numbers("attention_mask"), self._find("cu_seqlens")
        response = self._find("response_mask")
        if bounds is not None and bounds.rows is None:
            total = ids.shape[-1] if ids is not None and ids.shape else None
            return TokenLayout.packed(pages.array(bounds), total)
        if ids is not None and ids.rows is not None:
            return _ragged_layout(ids, self._sample_lengths(ids), mask)
        if mask is None and ids is not None and len(ids.shape) in (1, 2) and ids.numel:
            mask = self._mask_of(ids)
            if isinstance(mask, TokenLayout):
                return mask
        if mask is None or mask.ndim != 2:
            return self._apart() if ids is None and mask is None else None
        layout = TokenLayout.padded(mask)
        batch, width = layout.shape
        fits = response is not None and len(response.shape) == 2 and response.shape[0] == batch
        if response is not None and fits and response.shape[1] < width - 1:
            layout = replace(layout, response_width=response.shape[1])
        return layout

    def _numbers(self, name: str) -> NDArray[Any] | None:
        ref = self._find(name)
        return None if ref is None or ref.is_text else pages.array(ref)

    def _sample_lengths(self, ids: TensorRef) -> Ints:
        """Lengths of the samples in ragged rows: a row is a sample, or a pack of several whose lengths are known."""
        lengths = self._numbers("sample_lengths")
        rows = np.asarray(ids.rows, np.int64)
        if lengths is not None and lengths.size > rows.size and int(lengths.sum()) == ids.numel:
            self.rows = None
            return lengths.reshape(-1).astype(np.int64)
        return rows

    def _mask_of(self, ids: TensorRef) -> Any:
        """A mask, or a whole layout, for dense ids that came without one."""
        shape = ids.shape if len(ids.shape) == 2 else (1, *ids.shape)
        lengths = self._numbers("sample_lengths")
        if lengths is not None and lengths.size == shape[0]:
            return np.arange(shape[1]) < lengths.reshape(-1, 1)
        positions = self._numbers("position_ids")
        if positions is not None and shape[0] == 1 and positions.size == shape[1]:
            flat = positions.reshape(-1)
            if flat[0] == 0 and (np.diff(flat)[flat[1:] != 0] == 1).all():
                return TokenLayout.from_position_resets(flat)
        self.is_unmasked = True
        return np.ones(shape, dtype=bool)

    def _apart(self) -> TokenLayout | None:
        """Prompt and response that were never joined: side by side, as a trainer would join them."""
        prompts, responses = self._find("prompt_ids"), self._find("response_ids")
        if prompts is None or responses is None or prompts.is_text or responses.is_text:
            return None
        if len(prompts.shape) != 2 or len(responses.shape) != 2 or prompts.shape[0] != responses.shape[0]:
            return None
        masks = []
        for ref, name in ((prompts, "prompt_mask"), (responses, "response_mask")):
            mask = self._numbers(name)
            masks.append(mask if mask is not None and mask.shape == ref.shape else np.ones(ref.shape, bool))
        layout = TokenLayout.padded(np.concatenate([mask.astype(bool) for mask in masks], axis=1))
        return replace(layout, response_width=responses.shape[1])

    def _count(self) -> int:
        if self.layout is not None:
            if self.rows is not None:
                return len(self.rows)
            return self.layout.samples if self.layout.shape[0] == 1 else self.layout.shape[0]
        sizes = {ref.shape[0] for ref in self._fields if ref.alignment == "sample" and ref.shape}
        return sizes.pop() if len(sizes) == 1 else 0

    @cached_property
    def lengths(self) -> Ints:
        """Tokens of each sample; zeros where the record holds none."""
        lengths = np.zeros(self.count, np.int64)
        if self.layout is not None:
            known = self.layout.lengths
            lengths[: known.size] = known
        return lengths

    @cached_property
    def contents(self) -> list[NDArray[np.int64]] | None:
        """The token ids of every sample, without padding; None where the record holds none."""
        if self.layout is None:
            return None
        values = self._id_values()
        if values is None or values.size != self.layout.sample_BS.size:
            return None
        slots = self.layout.slots()
        if not self.count:
            return []
        content = list(np.split(values.reshape(-1)[slots].astype(np.int64), np.cumsum(self.lengths)[:-1]))
        last = self._last_targets()
        return content if last is None else [np.append(row, one) for row, one in zip(content, last, strict=True)]

    def _id_values(self) -> NDArray[Any] | None:
        if self.ids is not None:
            return None if self.ids.is_text else pages.array(self.ids)
        apart = [self._numbers(name) for name in ("prompt_ids", "response_ids")]
        if apart[0] is None or apart[1] is None or apart[0].ndim != 2:
            return None
        return np.concatenate([part for part in apart if part is not None], axis=1)

    def _last_targets(self) -> Ints | None:
        """The last target of each row: inputs that lack their last token, which the targets have."""
        targets = self._find("target_ids")
        if targets is None or self.rows is None or targets.rows != self.rows or 0 in self.rows:
            return None
        return np.asarray(pages.array(targets)[np.cumsum(self.rows) - 1], np.int64)

    @cached_property
    def digests(self) -> list[bytes] | None:
        """A digest of what each sample says: its tokens, or its texts where there are none."""
        if self.contents is not None:
            return [hashlib.blake2b(row.tobytes(), digest_size=16).digest() for row in self.contents]
        texts = [self._texts(name) for name in _TEXTS]
        columns = [column for column in texts if column is not None]
        if not columns or not self.count:
            return None
        said = ("\x1f".join(map(repr, row)) for row in zip(*columns, strict=True))
        return [hashlib.blake2b(row.encode("utf-8", "replace"), digest_size=16).digest() for row in said]

    def _texts(self, name: str) -> list[Any] | None:
        ref = self._find(name)
        if ref is None or not ref.is_text or ref.shape != (self.count,):
            return None
        return list(pages.array(ref).tolist())

    @cached_property
    def computed(self) -> dict[str, TensorRef]:
        """What was computed of each sample, by canonical name: one number per sample or token."""
        kinds = ("logprob", "value", "loss")
        numbers = (ref for ref in self._fields if not ref.is_text and len(ref.shape) in (1, 2))
        named = ((ref.canonical or ref.name, ref) for ref in numbers)
        return {name: ref for name, ref in named if naming.meaning(name).kind in kinds and self.place(ref) is not None}

    def of_sample(self, name: str, sample: int) -> bytes:
        """The sample's values of one of the `computed`, as the bytes of doubles."""
        ref = self.computed[name]
        placed = self.place(ref)
        assert placed is not None
        rows = placed.rows[samples_of(placed.tokens) == sample]
        values: bytes = pages.array(ref).reshape(-1)[rows].astype(np.float64).tobytes()
        return values

    def identity(self, names: Sequence[str]) -> list[tuple[Any, ...]] | None:
        """Each sample's values of these fields; None where the record lacks one."""
        columns = []
        for name in names:
            ref = self._find(name)
            if ref is None or ref.shape != (self.count,):
                return None
            columns.append([str(value) for value in pages.array(ref).tolist()])
        return list(zip(*columns, strict=True))

    @cached_property
    def response(self) -> tuple[Ints, Bools] | None:
        """Tokens as rising numbers, and whether each was generated; None where no mask says so."""
        ref = self._find("response_mask")
        placed = None if ref is None or ref.is_text else self.place(ref)
        if ref is None or placed is None or not placed.by_token:
            return None
        return placed.tokens, pages.array(ref).reshape(-1)[placed.rows].astype(bool)

    def is_response(self, tokens: Ints) -> Bools | None:
        """Whether each of the tokens was generated; None where that is not known."""
        if self.response is None:
            return None
        known, flags = self.response
        if not known.size:
            return np.zeros(tokens.size, bool)
        at = np.minimum(np.searchsorted(known, tokens), known.size - 1)
        return np.asarray((known[at] == tokens) & flags[at])

    def place(self, ref: TensorRef, *, by_shape: bool = False) -> Placed | None:
        """Which token each row of the tensor speaks of; None where it is not laid out by token or sample.

        `by_shape`: take a tensor that nothing is known of for what its shape looks like.
        """
        meaning = naming.meaning(ref.canonical or ref.name)
        alignment = ref.alignment if ref.alignment not in (None, "packed") else meaning.alignment
        if alignment == "sample" or ref.is_text:
            return self._by_sample(ref)
        if ref.rows is not None:
            return self._ragged(ref, alignment)
        by_token = alignment in ("full", "next", "response", "prompt") or meaning.region != "all"
        if self.layout is not None and (by_token or by_shape):
            axes = self._axes(ref, alignment)
            if axes is not None and not (by_shape and not by_token and not _is_batched(ref, self.layout)):
                said = self._says(_said(alignment, axes, self.layout))
                rows = axes.rows(said.slots, self.layout)
                inside = rows >= 0
                return Placed(said.tokens[inside], rows[inside], axes.axes)
        return self._by_sample(ref) if by_shape and self.record.key.stage not in _NOT_BY_SAMPLE else None

    def _says(self, alignment: str) -> Said:
        """What a tensor of the layout's own shape says of each token: the same for every tensor of an alignment."""
        if alignment not in self._known:
            assert self.layout is not None
            self._known[alignment] = self.layout.said(alignment)
        return self._known[alignment]

    def _axes(self, ref: TensorRef, alignment: str) -> TokenAxes | None:
        assert self.layout is not None
        batch, width = self.layout.shape
        shape = ref.shape
        if alignment in ("response", "prompt") and len(shape) >= 2 and shape[0] == batch and shape[1] <= width:
            return TokenAxes(2, width - shape[1] if alignment == "response" else 0, shape[1])
        return self.layout.token_axes(shape)

    def _by_sample(self, ref: TensorRef) -> Placed | None:
        if not ref.shape or ref.shape[0] != self.count or ref.rows is not None:
            return None
        every = np.arange(self.count)
        return Placed(token_numbers(every, 0), every, 1, by_token=False)

    def _ragged(self, ref: TensorRef, alignment: str) -> Placed | None:
        rows = np.asarray(ref.rows, np.int64)
        if self.layout is None:
            return None
        if ref.rows == self.rows and alignment != "response" and (self.layout.sample_BS < 0).any():
            said = self._says("next" if alignment == "next" else "full")
            return Placed(said.tokens, said.slots, 1)
        if rows.size != self.count:
            return None
        start = self.lengths - rows if alignment == "response" else np.full(rows.size, int(alignment == "next"))
        sample = np.repeat(np.arange(rows.size), rows)
        position = np.arange(int(rows.sum())) - np.repeat(np.cumsum(rows) - rows, rows) + start[sample]
        # The last value about a next token is about one the inputs lack, where the targets have it.
        end = self.lengths + (self._last_targets() is not None and alignment == "next")
        if (start < 0).any():
            return None
        inside = np.flatnonzero(position < end[sample])
        return Placed(token_numbers(sample[inside], position[inside]), inside, 1)

    def trimmed(self) -> Batch | None:
        """The batch without its runs of one id at either end, where no mask said that they are padding.

        Only where the response mask ends before such a run in every row, and the id is the same in all of them.
        """
        if not self.is_unmasked or self.layout is None or self.response is None or self.ids is None:
            return None
        ids_BS = pages.array(self.ids).reshape(self.layout.shape)
        pads = self._padding(ids_BS)
        if pads is None:
            return None
        other = Batch.__new__(Batch)
        # What was worked out from the old layout is worked out again.
        kept = {name: value for name, value in vars(self).items() if not hasattr(getattr(Batch, name, None), "func")}
        vars(other).update(kept)
        other.layout = replace(TokenLayout.padded(~pads), response_width=self.layout.response_width)
        other._known = {}
        other.is_unmasked = False
        return other

    def _padding(self, ids_BS: NDArray[Any]) -> Bools | None:
        assert self.response is not None
        tokens, flags = self.response
        pads: Bools = np.zeros(ids_BS.shape, bool)
        found: set[int] = set()
        for row, ids in enumerate(ids_BS):
            own = tokens[(samples_of(tokens) == row) & flags]
            end = int(positions_of(own).max()) + 1 if own.size else ids.size
            found.update(int(value) for value in ids[end:])
            pads[row, end:] = True
        if len(found) != 1:
            return None
        pad = found.pop()
        for row, ids in enumerate(ids_BS):
            real = np.flatnonzero(ids != pad)
            pads[row, : int(real[0]) if real.size else 0] = True
        return pads


def batch_of(record: Record, fields: Sequence[TensorRef]) -> tuple[Batch | None, str | None]:
    """The record's samples, or why they cannot be told. (None, None) where the record knows of none."""
    try:
        batch = Batch(record, fields)
    except (ValueError, DumpError) as error:
        return None, f"no token layout: {error.message if isinstance(error, DumpError) else error}"
    return (batch if batch.count else None), None


def _ragged_layout(ids: TensorRef, lengths: Ints, mask: NDArray[Any] | None) -> TokenLayout:
    layout = TokenLayout.packed(np.concatenate(([0], np.cumsum(lengths))) if lengths.size else [0, 0], ids.numel)
    if mask is None or mask.size != ids.numel or mask.ndim != 1 or mask.astype(bool).all():
        return layout
    valid = mask.astype(bool)[None]
    sample_BS = np.where(valid, layout.sample_BS, -1)
    before = np.cumsum(valid, axis=1) - valid
    starts = np.concatenate(([0], np.cumsum(lengths)))[:-1]
    offset = before[0][np.minimum(starts, ids.numel - 1)] if ids.numel else starts
    position_BS = np.where(valid, before - offset[layout.sample_BS], -1)
    return TokenLayout(layout.shape, sample_BS, position_BS)


def _said(alignment: str, axes: TokenAxes, layout: TokenLayout) -> str:
    """full or next. A slice [B, A] says in column j what is about its own token j, whatever its kind; a tensor
    one shorter than its tokens says something of the next one."""
    if axes.offset or alignment in ("response", "prompt"):
        return "full"
    return "next" if alignment == "next" or axes.width == layout.shape[1] - 1 else "full"


def _is_batched(ref: TensorRef, layout: TokenLayout) -> bool:
    """Whether the shape alone says [B, S, ...]: both axes, and more than one token."""
    return len(ref.shape) >= 2 and ref.shape[:2] == layout.shape and layout.shape[1] > 1
