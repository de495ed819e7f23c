"""The samples of one record: which tokens each has, who it is, and which token every row of a tensor speaks of.

Padded on either side, packed end to end, ragged rows, prompt and response apart, a response slice, values said of the
next token: whatever the layout, a token is (sample, position). `place` says where a tensor speaks of which token, and
`values` what it says, flat over all tokens of all samples (`_N`).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from replay_core import naming, pages
from replay_core.errors import DumpError
from replay_core.records import Record, TensorRef
from replay_core.samples.held import Held
from replay_core.samples.layout import (
    Bools,
    Ints,
    Said,
    TokenAxes,
    TokenLayout,
    positions_of,
    samples_of,
    token_numbers,
)

Array = NDArray[Any]

#: Fields that together name a sample across runs, the stablest first: a group's id may be new in every run.
IDENTITIES = (("task_id", "sample_id"), ("group_id", "sample_id"), ("sample_id",), ("uid",))

#: What a sample says where a record holds its texts and no tokens.
_TEXTS = ("prompt_text", "prompt", "raw_prompt", "response_text", "response")

#: Names under which a record says how many samples it has, where nothing has a token axis.
_PER_SAMPLE = ("reward", "token_scores", "token_rewards", "normalised_reward", "group_id", "advantages", "prompt_text")

#: Stages whose tensors are not laid out by sample, whatever their first axis happens to be.
_NOT_BY_SAMPLE = frozenset({"modules", "gradient", "param", "optimizer", "training_metrics", "loss"})

#: Of which part of a sample a tensor speaks, where only its name says so.
_PART = {"prompt_ids": "prompt", "prompt_mask": "prompt", "response_ids": "response"}

#: What says which tokens were generated, the surest first; of labels, those that are none (IGNORED) were not.
_GENERATED = ("response_mask", "loss_mask", "labels")
#: What says which columns hold what an engine sampled, where its rows hold answers alone.
SAMPLED_MASKS = ("output_mask", "output_masks", "output_token_mask", "sampled_mask", "generated_mask", "engine_mask")
#: Samples whose first slots tell that nothing stands there, and the part of all slots that sure tokens may fill.
_FEWEST_FIRSTS, _SURE = 2, 0.05
#: Nats above which a token is sure.
_SURE_NATS = -1e-3
#: The label of a token that is not trained on: torch's `ignore_index`.
IGNORED = -100


#: Masks of what counts that a trainer may shift with all it says of tokens, and samples that are no chance.
_ROLLED = ("response_mask", "loss_mask")
_FEWEST_ROLLED = 4


class Placed(Struct, frozen=True):
    """Where a tensor speaks of which token.

    tokens: the tokens spoken about, as rising numbers; rows: the row that does, its leading `axes` flattened.
    by_token: False where a row is about a whole sample (its position is then 0).
    heads, apart: how many rows speak of a token, and how far they lie from each other; `rows` are the first of them.
    keys: of attention weights, the column of every position of a sample [sample, position]; -1 where it has none.
    """

    tokens: Ints
    rows: Ints
    axes: int
    by_token: bool = True
    heads: int = 1
    apart: int = 0
    keys: Ints | None = None


class TokenValues(Struct, frozen=True):
    """What a tensor says of a batch's tokens [N]: float64, NaN where it says nothing, and whether it says something.

    A NaN that was computed is said; a token nobody spoke of is not.
    """

    values_N: Array
    said_N: Bools


class Batch:
    """The samples of one record, as far as its fields tell.

    held: its fields, and those of records of the same micro-batch that speak of the same samples.
    layout: the slots of the token ids; rows end to end are one row. None where neither tokens nor a mask are known.
    count: how many samples there are, empty ones included. 0 where the fields know of none.
    rows: the lengths of ragged rows, padding included; None of a dense or packed batch.
    packs: which pack each sample lies in; None where nothing is packed.
    padding_known: False where nothing says which tokens are padding: then every slot counts as a token.
    problem: what the record says of its own layout, and what cannot be true.
    """

    def __init__(self, record: Record, fields: Sequence[TensorRef], *, by_shape: bool = False) -> None:
        """`by_shape`: where no tokens and no mask are known, let the shape of values per token tell the samples."""
        self.held = Held(record, fields)
        self._known: dict[str, Said] = {}
        self.rows: tuple[int, ...] | None = None
        self.packs: list[int] | None = None
        self.padding_known = True
        self.problem: str | None = None
        self.count = 0
        self.layout = self._layout()
        if self.layout is None and by_shape:
            self.layout = self._by_shape()
        if self.layout is None and not self.count:
            self.count = self._count_by_sample(by_shape)
            if by_shape and self.count:
                # Texts and one number of each: a sample is then one slot, of which its numbers speak.
                self.layout = TokenLayout.end_to_end(np.ones(self.count, np.int64))

    def __len__(self) -> int:
        return self.count

    # ---- the layout

    def _layout(self) -> TokenLayout | None:
        ids, bounds = self.held.ids, self._bounds()
        if bounds is not None:
            total = None if ids is None else ids.numel
            try:
                return self._packed(TokenLayout.packed(bounds, total), bounds.size - 1)
            except ValueError as error:
                self.problem = str(error)
        if ids is not None and ids.rows is not None:
            return self._ragged_ids(ids)
        mask = self.held.numbers("attention_mask")
        if ids is not None and len(ids.shape) in (1, 2) and ids.numel:
            shape = ids.shape if len(ids.shape) == 2 else (1, *ids.shape)
            if mask is not None and mask.shape not in (ids.shape, shape):
                if mask.ndim == 2:
                    self.problem = f"attention_mask {list(mask.shape)} does not fit input_ids {list(ids.shape)}"
                mask = None
            if (numbered := self._numbered(mask, shape)) is not None:
                return numbered
            if shape[0] == 1:
                used = np.ones(shape[1], bool) if mask is None else mask.reshape(-1) != 0
                packed = self._one_row(used, is_known=mask is not None)
                if packed is not None:
                    return packed
            return self._grid((self._by_lengths(shape) if mask is None else mask).reshape(shape))
        if ids is None and mask is not None and mask.ndim == 2:
            return self._grid(mask)
        return self._apart() if ids is None and mask is None else None

    def _bounds(self) -> Array | None:
        """cu_seqlens, where they can be about the ids: one row, or no ids at all."""
        ref, ids = self.held.find("cu_seqlens"), self.held.ids
        if ref is None or (ref.rows is not None and len(ref.rows) > 1):
            return None
        rows = 1 if ids is None else ids.numel // max(1, ids.shape[-1]) if ids.rows is None else len(ids.rows)
        return pages.array(ref).reshape(-1) if rows == 1 else None

    def _numbered(self, mask: Array | None, shape: tuple[int, ...]) -> TokenLayout | None:
        """Packs whose mask numbers their samples 1, 2, 3 ... in each row, with 0 behind them (open-instruct's
        attention_masks, the multipack masks of supervised trainers); None of a mask of zeros and ones.
        """
        if mask is None or mask.max(initial=0) < 2 or not np.isfinite(mask).all() or (mask != np.rint(mask)).any():
            return None
        numbers_BS = mask.reshape(shape).astype(np.int64)
        rises_BS = np.diff(np.where(numbers_BS > 0, numbers_BS, np.maximum.accumulate(numbers_BS, axis=1)), axis=1)
        is_behind_BS = np.minimum.accumulate(numbers_BS > 0, axis=1) == (numbers_BS > 0)
        if (numbers_BS[:, 0] > 1).any() or not np.isin(rises_BS, (0, 1)).all() or not is_behind_BS.all():
            return None
        layout = TokenLayout.of_packs(numbers_BS)
        self.packs = np.repeat(np.arange(shape[0]), numbers_BS.max(axis=1)).tolist()
        self.count = len(self.packs)
        return layout

    def _packed(self, layout: TokenLayout, count: int) -> TokenLayout:
        self.count, self.packs = count, [0] * count
        order = self.held.numbers("sample_order")
        return layout if order is None or order.size != count else layout.reordered(order.reshape(-1).astype(np.int64))

    def _grid(self, mask_BS: Array) -> TokenLayout:
        layout = TokenLayout.padded(mask_BS)
        self.count, width = layout.shape
        for name in ("response_mask", "response_ids"):
            ref = self.held.find(name)
            if ref is not None and len(ref.shape) == 2 and ref.shape[0] == self.count and ref.shape[1] < width - 1:
                return replace(layout, response_width=ref.shape[1])
        return layout

    def _by_lengths(self, shape: tuple[int, ...]) -> Array:
        """The mask of dense ids that came without one: by the samples' lengths, else every slot."""
        lengths = self.held.numbers("sample_lengths")
        if lengths is None:
            lengths = self._lengths_of_parts(shape)
        if lengths is None:
            lengths = self._lengths_by_answers(shape)
        if lengths is not None and lengths.size == shape[0]:
            by_lengths: Array = np.arange(shape[1]) < lengths.reshape(-1, 1)
            return by_lengths if self.held.ids is None else self._behind_pads(by_lengths)
        self.padding_known = False
        return np.ones(shape, dtype=bool)

    def _behind_pads(self, by_lengths_BS: Array) -> Array:
        """The mask of samples whose lengths are known and which begin behind pads of their rows.

        Told only where right padding is not what the ids show: tokens stand behind the lengths, and one id, the same in
        all rows, fills whatever is outside of them once each row begins behind its run of it.
        """
        assert self.held.ids is not None
        ids_BS = pages.array(self.held.ids).reshape(by_lengths_BS.shape)
        outside = ids_BS[~by_lengths_BS]
        if not (outside != outside[:1]).any():
            return by_lengths_BS
        width, lengths_B = by_lengths_BS.shape[1], by_lengths_BS.sum(axis=1)
        # The row in which a token stands behind the length begins with a pad.
        for pad in np.unique(ids_BS[lengths_B < width, 0]):
            leading_B = np.cumprod(ids_BS == pad, axis=1).sum(axis=1)
            starts_B = np.minimum(leading_B, width - lengths_B)[:, None]
            slots = np.arange(width)
            mask_BS: Array = (slots >= starts_B) & (slots < starts_B + lengths_B[:, None])
            if (ids_BS[~mask_BS] == pad).all():
                return mask_BS
        if self._are_of_parts(lengths_B):
            self.padding_known = False
            return np.ones_like(by_lengths_BS)
        return by_lengths_BS

    def _are_of_parts(self, lengths_B: Ints) -> bool:
        """Whether lengths behind which tokens stand are those of prompts or of responses: in half of the samples as
        many tokens count in the loss as that, or more.
        """
        mask = self.held.numbers("response_mask", "loss_mask")
        if mask is None or mask.ndim != 2 or len(mask) != lengths_B.size:
            return False
        return bool(2 * ((mask != 0).sum(axis=1) >= lengths_B).sum() >= lengths_B.size)

    def _lengths_of_parts(self, shape: tuple[int, ...]) -> Array | None:
        """Lengths as prompt and response, where what stands behind them is one id: the padding is on the right."""
        parts = [self.held.numbers(f"{part}_length", f"{part}_lengths") for part in ("prompt", "response")]
        if self.held.ids is None or any(part is None or part.size != shape[0] for part in parts):
            return None
        lengths: Array = np.sum([part.reshape(-1) for part in parts if part is not None], axis=0)
        behind_BS = np.arange(shape[1]) >= lengths[:, None]
        # One slot behind every sample may be the end of what was padded on the left.
        fits = lengths.size > 0 and 0 <= lengths.min() <= shape[1] - 2 and lengths.max() <= shape[1]
        return lengths if fits and np.unique(pages.array(self.held.ids).reshape(shape)[behind_BS]).size <= 1 else None

    def _lengths_by_answers(self, shape: tuple[int, ...]) -> Array | None:
        """Lengths of rows that begin with their prompts, by where the answers that are recorded beside them end: one id
        fills what is behind. None where answers all stand in the last columns, or a row has two places for its own.
        """
        ids, answers, mask = self.held.ids, self.held.find("response_ids"), self.held.find("response_mask")
        if ids is None or answers is None or mask is None or mask.rows is not None or answers.rows is not None:
            return None
        if len(answers.shape) != 2 or answers.shape != mask.shape or answers.shape[0] != shape[0]:
            return None
        if answers.shape[1] >= shape[1]:
            return None
        ids_BS, answers_BA = pages.array(ids).reshape(shape), pages.array(answers)
        counted_BA = _without_holes(pages.array(mask) != 0)
        sizes_B = counted_BA.sum(axis=1)
        if not sizes_B.all() or (counted_BA != (np.arange(answers.shape[1]) < sizes_B[:, None])).any():
            return None
        pads = np.unique(answers_BA[~counted_BA])
        if pads.size != 1 or (ids_BS[:, 0] == pads[0]).any():
            return None
        ends = []
        for row, answer, size in zip(ids_BS, answers_BA, sizes_B, strict=True):
            last = shape[1] - 1 - int((row[::-1] != pads[0]).argmax())
            # An answer may end in the id that fills the rows up.
            behind = range(max(last + 1, int(size)), shape[1] + 1)
            fits = [end for end in behind if np.array_equal(row[end - size : end], answer[:size])]
            if len(fits) != 1:
                return None
            ends.append(fits[0])
        lengths: Array = np.array(ends)
        return lengths if (lengths - sizes_B != shape[1] - answers.shape[1]).any() else None

    def _one_row(self, used_T: Bools, is_known: bool) -> TokenLayout | None:
        """A pack known by its samples' lengths, or by position ids that rise by one and begin again with every sample.

        used_T: the slots that hold tokens. `is_known`: a mask says so; one sample is then a row, not a pack.
        """
        tokens = int(used_T.sum())
        lengths, positions = self.held.numbers("sample_lengths"), self.held.numbers("position_ids")
        if not tokens or not used_T[:tokens].all():
            return None
        if lengths is not None and lengths.size > 1 and (lengths >= 0).all() and int(lengths.sum()) == tokens:
            bounds = np.concatenate(([0], np.cumsum(lengths.reshape(-1).astype(np.int64))))
            return self._packed(TokenLayout.packed(bounds, used_T.size), lengths.size)
        if positions is None or positions.size != used_T.size:
            return None
        flat = positions.reshape(-1)[:tokens]
        if flat[0] != 0 or not (np.diff(flat)[flat[1:] != 0] == 1).all() or (is_known and (flat[1:] != 0).all()):
            return None
        bounds = np.append(np.flatnonzero(flat == 0), tokens)
        return self._packed(TokenLayout.packed(bounds, used_T.size), bounds.size - 1)

    def _ragged_ids(self, ids: TensorRef) -> TokenLayout:
        """Rows end to end: a row is a sample, or a pack of several whose lengths are known."""
        counts, lengths = np.asarray(ids.rows, np.int64), self.held.numbers("sample_lengths")
        if lengths is not None and lengths.size > counts.size:
            each = lengths.reshape(-1).astype(np.int64)
            if (each >= 0).all() and int(each.sum()) == ids.numel:
                self.packs = np.searchsorted(np.cumsum(counts), np.cumsum(each) - each, side="right").tolist()
                self.count = each.size
                return TokenLayout.end_to_end(each)
        self.rows, self.count = ids.rows, counts.size
        if self._targets() is not None:
            # Inputs without their last token beside targets without their first: the sample is both.
            return TokenLayout.end_to_end(counts + (counts > 0))
        mask = self.held.numbers("attention_mask")
        fits = mask is not None and mask.size == ids.numel and mask.ndim == 1
        return TokenLayout.end_to_end(counts, mask if fits else None)

    def _targets(self) -> TensorRef | None:
        targets = self.held.find("target_ids")
        return targets if targets is not None and self.rows is not None and targets.rows == self.rows else None

    def _apart(self) -> TokenLayout | None:
        """Prompt and response that were never joined: side by side, as a trainer would join them."""
        prompts, responses = self.held.find("prompt_ids"), self.held.find("response_ids")
        if prompts is None or responses is None:
            return None
        if (joined := self._joined) is not None:
            self.count = joined[0].size
            return TokenLayout.end_to_end(np.add(*joined))
        if prompts.rows is not None or responses.rows is not None:
            return None
        if len(prompts.shape) != 2 or len(responses.shape) != 2 or prompts.shape[0] != responses.shape[0]:
            return None
        masks = []
        for ref, name in ((prompts, "prompt_mask"), (responses, "response_mask")):
            mask = self.held.numbers(name)
            fits = mask is not None and mask.shape == ref.shape
            self.padding_known &= fits
            masks.append(mask != 0 if mask is not None and fits else np.ones(ref.shape, bool))
        masks[1] = _with_left_out(_without_holes(masks[1]), responses)
        self.count = prompts.shape[0]
        layout = TokenLayout.padded(np.concatenate(masks, axis=1))
        return replace(layout, response_width=responses.shape[1])

    def _by_shape(self) -> TokenLayout | None:
        """Samples known by values alone: a slot is then called a token. A mask and log-probabilities along one axis are
        of a single sample (prime-rl's loss sees them so).
        """
        mask = self.held.find(*_ROLLED)
        if mask is not None and len(mask.shape) == 1 and mask.rows is None:
            alike = (naming.meaning(ref.canonical or ref.name).kind == "logprob" and ref.shape == mask.shape
                     for ref in self.held.fields())  # fmt: skip
            if any(alike):
                self.padding_known, self.count = False, 1
                return TokenLayout.padded(np.ones((1, mask.shape[0]), bool))
        for ref in self.held.fields():
            known = naming.meaning(ref.canonical or ref.name).alignment in ("next", "full")
            if ref.is_text or not known or (ref.rows is None and len(ref.shape) != 2):
                continue
            self.padding_known = False
            if ref.rows is not None:
                self.rows, self.count = ref.rows, len(ref.rows)
                return TokenLayout.end_to_end(np.asarray(ref.rows, np.int64))
            self.count = ref.shape[0]
            return TokenLayout.padded(np.ones(ref.shape, bool))
        return None

    def _count_by_sample(self, by_shape: bool) -> int:
        if by_shape:
            self.padding_known = False
            named = (ref for ref in self.held.fields() if (ref.canonical or ref.name) in _PER_SAMPLE)
            return next((ref.shape[0] for ref in named if len(ref.shape) == 1 and ref.rows is None), 0)
        sizes = {ref.shape[0] for ref in self.held.fields() if ref.alignment == "sample" and ref.shape}
        return sizes.pop() if len(sizes) == 1 else 0

    @property
    def width(self) -> int | None:
        """S of rows [B, S] that are a sample each; None of packs and of rows end to end."""
        layout = self.layout
        is_grid = layout is not None and self.packs is None and layout.shape[0] == self.count
        return (
            layout.shape[1] if layout is not None and is_grid and self.rows is None and self._joined is None else None
        )

    @cached_property
    def _joined(self) -> tuple[Ints, Ints] | None:
        """How long each prompt and each response is, where they lie apart and one or both are ragged rows, which a
        sample's are joined to (one ragged sample has the shape of a grid of one row); None of all else.

        Rows that happen to be of one length are a matrix: beside ragged ones every column of it is a token.
        """
        if self.held.ids is not None:
            return None
        prompts, responses = self.held.find("prompt_ids"), self.held.find("response_ids")
        if prompts is None or responses is None or (prompts.rows is None and responses.rows is None):
            return None
        mask = self.held.numbers("prompt_mask") if prompts.rows is None else None
        if mask is not None and not mask.all():
            return None
        lengths: list[Ints] = []
        for ref in (prompts, responses):
            if ref.rows is None and len(ref.shape) != 2:
                return None
            rows = ref.rows if ref.rows is not None else (ref.shape[1],) * ref.shape[0]
            lengths.append(np.asarray(rows, np.int64))
        return (lengths[0], lengths[1]) if lengths[0].size == lengths[1].size else None

    # ---- tokens

    @cached_property
    def lengths(self) -> Ints:
        """Tokens of each sample [B]; zeros where the record holds none."""
        lengths = np.zeros(self.count, np.int64)
        if self.layout is not None:
            known = self.layout.lengths
            lengths[: known.size] = known
        return lengths

    @cached_property
    def starts(self) -> Ints:
        """Where each sample's tokens begin in what is flat over all tokens [B]."""
        starts: Ints = np.cumsum(self.lengths) - self.lengths
        return starts

    def flat(self, tokens: Ints) -> Ints:
        """Where tokens stand in what is flat over all tokens."""
        return np.asarray(self.starts[samples_of(tokens)] + positions_of(tokens))

    @property
    def has_tokens(self) -> bool:
        return self.contents is not None

    @cached_property
    def _ids_of_slots(self) -> Array | None:
        """The id in every slot of the layout, padding included."""
        ids = self.held.ids
        if self.layout is None:
            return None
        if ids is None:
            parts = [self.held.find(name) for name in ("prompt_ids", "response_ids")]
            read = [pages.array(ref) for ref in parts if ref is not None]
            if len(read) < 2 or self.held.find("attention_mask", "cu_seqlens") is not None:
                return None
            if self._joined is not None:
                return _alternating(read, self._joined)
            return np.concatenate(read, axis=1).reshape(-1) if all(part.ndim == 2 for part in read) else None
        flat = pages.array(ids).reshape(-1)
        if not np.issubdtype(flat.dtype, np.integer):
            whole = flat == np.rint(flat)
            if not whole.all():
                self.problem = f"input_ids holds {flat[~whole][0]}: token ids are whole numbers"
                return None
        targets = self._targets()
        if targets is not None and self.rows is not None:
            first = np.asarray(self.rows) > 0
            begins = flat[(np.cumsum(self.rows) - self.rows)[first]]
            flat = _alternating([begins, pages.array(targets)], [first.astype(np.int64), np.asarray(self.rows)])
        return flat if flat.size == self.layout.sample_BS.size else None

    @property
    def ids_BS(self) -> Array | None:
        """The id in every slot of the layout [B, S]; None where the record holds none."""
        ids, layout = self._ids_of_slots, self.layout
        return None if ids is None or layout is None else ids.reshape(layout.shape)

    @cached_property
    def position_N(self) -> Ints:
        """The place of every token in its sample."""
        position_N: Ints = np.arange(int(self.lengths.sum())) - np.repeat(self.starts, self.lengths)
        return position_N

    @cached_property
    def tokens_N(self) -> Ints | None:
        """The token ids of all samples, one after the other; None where the record holds none."""
        if self._ids_of_slots is None or self.layout is None:
            return None
        tokens_N: Ints = self._ids_of_slots[self.layout.slots()].astype(np.int64)
        return tokens_N

    @cached_property
    def contents(self) -> list[Ints] | None:
        """The token ids of every sample, without padding; None where the record holds none."""
        if self.tokens_N is None:
            return None
        return list(np.split(self.tokens_N, self.starts[1:])) if self.count else []

    # ---- who a sample is

    @cached_property
    def digests(self) -> list[bytes] | None:
        """A digest of what each sample says: its tokens, or its texts where there are none."""
        if self.contents is not None:
            return [hashlib.blake2b(row.tobytes(), digest_size=16).digest() for row in self.contents]
        columns = [column for column in map(self._texts, _TEXTS) if column is not None]
        if not columns or not self.count:
            return None
        said = ("\x1f".join(map(repr, row)) for row in zip(*columns, strict=True))
        return [hashlib.blake2b(row.encode("utf-8", "replace"), digest_size=16).digest() for row in said]

    def _texts(self, name: str) -> list[Any] | None:
        ref = self.held.named(name)
        if ref is None or not ref.is_text or ref.shape != (self.count,):
            return None
        return list(pages.array(ref).tolist())

    # ---- what was generated

    @cached_property
    def response(self) -> tuple[Ints, Bools] | None:
        """Tokens as rising numbers, and whether each was generated; None where no mask says so."""
        ref = self.held.find("response_mask")
        placed = None if ref is None else self.place(ref)
        if ref is None or placed is None or not placed.by_token:
            return None
        return placed.tokens, pages.array(ref).reshape(-1)[placed.rows].astype(bool)

    @cached_property
    def response_starts(self) -> Ints | None:
        """The first response token of each sample [B], by what lies apart from the prompts; None where nothing does."""
        prompts, responses = self.held.find("prompt_ids"), self.held.find("response_ids")
        layout, ids = self.layout, self._ids_of_slots
        if prompts is not None and responses is not None and layout is not None and ids is not None:
            if self._joined is not None:
                return self._joined[0]
            if self.width is not None and len(prompts.shape) == 2 and len(responses.shape) == 2:
                begin, grid_BS = prompts.shape[1], ids.reshape(layout.shape)
                # Some frameworks shift a sample left after joining: then the columns no longer tell.
                whole = begin + responses.shape[1] == self.width
                if whole and np.array_equal(grid_BS[:, begin:], pages.array(responses)):
                    before: Ints = (layout.sample_BS[:, :begin] >= 0).sum(axis=1)
                    return before
        counts = self.held.find("response_length")
        if counts is not None and counts.numel == self.count and counts.rows is None:
            each = pages.array(counts).reshape(-1).astype(np.int64)
            stated: Ints = np.maximum(0, self.lengths - each)
            return stated
        return self._starts_by_rows(self.held.find(*_GENERATED)) if self.width is None else None

    def _starts_by_rows(self, mask: TensorRef | None) -> Ints | None:
        """Of rows that hold responses alone, each as long as its response."""
        if mask is None or mask.rows is None or self.packs is not None or len(mask.rows) != self.count:
            return None
        if mask.alignment not in ("response", "packed", None):
            return None
        starts: Ints = self.lengths - np.asarray(mask.rows)
        return starts if starts.any() and (starts >= 0).all() else None

    @property
    def generated_N(self) -> Bools | None:
        """Whether each token was generated: by the recorded mask, else by where responses begin; None if not known."""
        for name in _GENERATED:
            ref = self.held.find(name)
            marks = None if ref is None else self.values(ref)
            if marks is not None:
                least = IGNORED if name == "labels" else 0
                generated: Bools = marks.said_N & (np.nan_to_num(marks.values_N) > least)
                return generated
        if self.response_starts is None:
            return None
        responses = self.held.find("response_ids")
        if responses is None:
            return None
        from_start: Bools = self.position_N >= np.repeat(self.response_starts, self.lengths)
        return from_start

    # ---- which token a tensor speaks of

    def place(self, ref: TensorRef, *, by_shape: bool = False, by_mask: bool = True) -> Placed | None:
        """Which token each row of the tensor speaks of; None where it is not laid out by token or sample.

        `by_shape`: take a tensor that nothing is known of for what its shape looks like. `by_mask`: what fills the
        response mask stands where that does, wherever log-probabilities may.
        """
        name = ref.canonical or ref.name
        meaning = naming.meaning(name)
        stated = ref.alignment if ref.alignment not in (None, "packed") else _PART.get(name)
        alignment = stated or meaning.alignment
        if alignment == "sample" or ref.is_text:
            return self._by_sample(ref)
        if ref.rows is not None:
            return self._ragged(ref, alignment, stated)
        if meaning.kind == "logprob" and stated is None and (placed := self._by_own_mask(ref)) is not None:
            return placed
        by_token = alignment in ("full", "next", "response", "prompt") or meaning.region != "all"
        if self.layout is not None and (by_token or by_shape):
            axes = self._axes(ref, alignment, meaning)
            if axes is None or (axes.offset and (not stated or (stated == "response" and self._has_answers(ref)))):
                # Rows [B, A] that speak of responses: the last columns of a grid, unless its own masks say otherwise.
                starts = self._slice_starts(ref) if by_token else None
                if starts is not None:
                    return self._slice(ref, starts)
            if axes is not None and not (by_shape and not by_token and not _is_batched(ref, self.layout)):
                side = _said(alignment, stated, axes, self.layout)
                if side == "next" and not stated and self._is_as_wide(ref) and meaning.region == "response":
                    fills = by_mask and not self._is_rolled and fills_the_mask(self.held, ref)
                    side = "full" if fills or self._is_at_own_index(ref) else "next"
                elif name in _ROLLED and not stated and self._is_rolled and self._is_as_wide(ref):
                    side = "next"
                said = self._says(side)
                rows = axes.rows(said.slots, self.layout)
                inside = rows >= 0
                # What attention returns beside its output is [B, H, S, S]: its last axis is tokens, too.
                is_weights = axes.axes == 3 and ref.shape[3] == axes.width and name.endswith(".output.1")
                keys = self._columns() if is_weights else None
                return Placed(said.tokens[inside], rows[inside], axes.axes, True, axes.heads, axes.width, keys)
        return self._by_sample(ref) if by_shape and self.held.record.key.stage not in _NOT_BY_SAMPLE else None

    def _is_at_own_index(self, ref: TensorRef) -> bool:
        """Whether log-probabilities as wide as the tokens stand at the token that they are about.

        Where no alignment is said, index t is about token t + 1, as shifted logits are. What a tensor leaves open, the
        record's log-probabilities tell: advantages stand where those do.
        """
        if self._are_answers_alone(ref):
            return True
        own = self._own_index.get(ref.name)
        told = self._own_index.values()
        return own if own is not None else True in told and False not in told

    def _are_answers_alone(self, ref: TensorRef) -> bool:
        """Whether the rows are those of the answers' ids, and no prompt is beside them. The first column is about the
        first token of the answer then, which has a log-probability, and the answer's mask and ids stand so, too.
        """
        answers = self.held.find("response_ids")
        is_alone = self.held.ids is None and self.held.find("prompt_ids", "attention_mask", "cu_seqlens") is None
        return is_alone and answers is not None and answers.rows is None and answers.shape == ref.shape

    @cached_property
    def _own_index(self) -> dict[str, bool | None]:
        """Of each tensor of log-probabilities that is as wide as the tokens: whether it stands at its own index.

        What has none is filled, with 0 or more, or with what is no number. At its own index the slots before a sample's
        first generated token are, and not that of its last; else the other way round: most samples decide, as a sure
        token's may be 0 as well. So it is where its first slot is empty and that of its last is not. Where that does
        not tell, it is at its own index if every sample's first slot is filled, or the first column, and next to
        nothing else; and not if nothing is. None where nothing tells. Where nobody says which tokens are generated, all
        but each sample's first are taken.
        """
        layout, found = self.layout, dict[str, bool | None]()
        wide = [ref for ref in (() if layout is None else self.held.fields()) if self._may_be_at_own_index(ref)]
        if layout is None or not wide:
            return found
        own_N, next_N = self._slots_of("full"), self._slots_of("next")
        asked = np.flatnonzero(self.position_N > 0 if self.generated_N is None else self.generated_N)
        sample, firsts = np.repeat(np.arange(self.count), self.lengths)[asked], own_N[self.position_N == 0]
        _, begins = np.unique(sample, return_index=True)
        first, last = asked[begins], asked[np.append(begins[1:], asked.size) - 1] if asked.size else asked
        inside = (next_N[first] >= 0) & (own_N[last] >= 0)
        first, last = first[inside], last[inside]
        has_prior, start = self.position_N[first] >= 2, first - self.position_N[first]
        values = {ref.name: pages.array(ref).reshape(-1) for ref in wide}
        filled = {name: ~(one_N < 0) | np.isneginf(one_N) for name, one_N in values.items()}
        whole = [values[name] for name, empty_N in filled.items() if not empty_N.any()]
        #: Where others, of which nothing is filled, know a sure token.
        is_sure_N = np.any([one_N > _SURE_NATS for one_N in whole], axis=0) if whole else np.zeros(own_N.size, bool)
        for name, empty_N in filled.items():
            before, behind = empty_N[next_N[first]], empty_N[own_N[last]]
            prior = empty_N[own_N[np.where(has_prior, first - 2, first)]]
            own = int((before & ~behind & (prior | ~has_prior)).sum())
            other = int((behind & ~before & ((prior & has_prior) | ~empty_N[own_N[start]])).sum())
            # Where the mask leaves out the first sampled token, too, the prompt is empty and the last token is not.
            ended = int((~behind & ~before & empty_N[own_N[start]]).sum())
            if 2 * max(own, other) > first.size:
                found[name] = own > other
            elif 2 * ended > first.size:
                found[name] = True
            elif is_sure_N.size == empty_N.size and empty_N.any() and is_sure_N[empty_N].all():
                found[name] = False
            else:
                found[name] = _fills_alone(empty_N, firsts, own_N, layout.shape)
        return found

    @cached_property
    def _is_rolled(self) -> bool:
        """Whether the mask that is as wide as the tokens was shifted with the log-probabilities (AReaL rolls both
        before its update): index t of all of them is about token t + 1.

        Read at its own index such a mask begins in all samples at one and the same token, the last of the template, and
        leaves out the last token of each, for which nobody has a log-probability, the engine neither.
        """
        mask, ids, layout = self.held.find(*_ROLLED), self.held.ids, self.layout
        if layout is None or mask is None or ids is None or mask.alignment not in (None, "packed"):
            return False
        wide = [ref for ref in self.held.fields() if self._may_be_at_own_index(ref)]
        if not wide or not self._is_as_wide(mask) or not self._is_as_wide(ids):
            return False
        own_N, marked_N = self._slots_of("full"), pages.array(mask).reshape(-1) != 0
        marked_N, token_N = marked_N[own_N], pages.array(ids).reshape(-1)[own_N]
        ends = np.cumsum(self.lengths) - 1
        counts = np.add.reduceat(marked_N, ends - self.lengths + 1) if self.lengths.all() else np.zeros(1)
        has = counts > 0
        if has.sum() < _FEWEST_ROLLED or marked_N[ends].any() or not marked_N[ends[has] - 1].all():
            return False
        firsts = [int(np.flatnonzero(marked_N[start:])[0]) + start for start in (ends - self.lengths + 1)[has]]
        if np.unique(token_N[firsts]).size > 1:
            return False
        for ref in wide:
            filled_N = pages.array(ref).reshape(-1)[own_N] < 0
            if (filled_N & ~marked_N).any() or 2 * filled_N.sum() < marked_N.sum():
                return False
        return True

    def _may_be_at_own_index(self, ref: TensorRef) -> bool:
        is_logprob = naming.meaning(ref.canonical or ref.name).kind == "logprob"
        is_vector = ref.rows is None or len(ref.shape) == 1
        return is_logprob and is_vector and ref.alignment in (None, "packed") and self._is_as_wide(ref)

    def _slots_of(self, alignment: str) -> Ints:
        """The slot of the layout that is about each token [N]; -1 where none is."""
        said, slots = self._says(alignment), np.full(int(self.lengths.sum()), -1, np.int64)
        slots[self.flat(said.tokens)] = said.slots
        return slots

    def _is_as_wide(self, ref: TensorRef) -> bool:
        """Whether a tensor has a number for every slot of the layout, and in its order."""
        layout = self.layout
        if layout is None:
            return False
        if ref.rows is not None:
            return layout.shape == (1, ref.shape[0]) and (self.packs is not None or ref.rows == self.rows)
        return ref.shape == layout.shape or (layout.shape[0] == 1 and ref.shape == layout.shape[1:])

    def _says(self, alignment: str) -> Said:
        """What a tensor of the layout's own shape says of each token: the same for every tensor of an alignment."""
        if alignment not in self._known:
            assert self.layout is not None
            self._known[alignment] = self.layout.said(alignment)
        return self._known[alignment]

    def _columns(self) -> Ints:
        """The column of the layout in which each position of each sample stands [sample, position]; -1 past its end."""
        assert self.layout is not None
        said = self._says("full")
        columns = np.full((self.count, int(self.lengths.max(initial=0))), -1, np.int64)
        columns[samples_of(said.tokens), positions_of(said.tokens)] = said.slots % self.layout.shape[1]
        return columns

    def _axes(self, ref: TensorRef, alignment: str, meaning: naming.Meaning) -> TokenAxes | None:
        assert self.layout is not None
        batch, width = self.layout.shape
        shape = ref.shape
        fits = len(shape) >= 2 and shape[0] == batch and shape[1] <= width and self.packs is None
        if alignment in ("response", "prompt") and fits:
            return TokenAxes(2, width - shape[1] if alignment == "response" else 0, shape[1])
        if meaning.region == "response" and fits and len(shape) == 2 and shape[1] < width - 1:
            return TokenAxes(2, width - shape[1], shape[1])
        return self.layout.token_axes(shape)

    def _has_answers(self, ref: TensorRef) -> bool:
        """Whether the answers' ids stand in rows as wide as these beside the tokens, and so tell where they begin."""
        answers = self.held.find("response_ids")
        return self.held.ids is not None and answers is not None and answers.shape == ref.shape

    def _slice_starts(self, ref: TensorRef) -> Ints | None:
        """The token that the first column of rows [B, A] is about [B], where they begin with the response itself; None
        where they do not.
        """
        layout, mask = self.layout, self.held.find("response_mask")
        if layout is None or len(ref.shape) != 2 or ref.shape[0] != self.count:
            return None
        if self.width is None or ref.shape[1] > self.width:
            return self.response_starts if self.width is None else None
        apart = self.held.find("response_ids")
        # Of what was joined here, the answers are the last columns; of rows that hold them besides, their ids tell.
        are_joined_here = self.held.ids is None and apart is not None and apart.shape == ref.shape
        if mask is None or mask.rows is not None or are_joined_here:
            return None
        if mask.shape == ref.shape:
            marked_BA = pages.array(mask).astype(bool)
            in_tail = not (marked_BA & (layout.sample_BS[:, self.width - ref.shape[1] :] < 0)).any()
            counts = marked_BA.sum(axis=1)
            from_first = np.array_equal(marked_BA, np.arange(ref.shape[1]) < counts[:, None])
            starts: Ints = self.lengths - counts
            # Prompts that are padded on the left all end where the responses' columns begin, whatever a mask counts.
            is_left_padded = bool((layout.sample_BS[:, 0] < 0).any())
            fits = from_first and not in_tail and not is_left_padded
            return starts if fits and (starts >= 0).all() else None
        if mask.shape != layout.shape or self.response is None:
            return None
        tokens, flags = self.response
        marked = tokens[flags]
        sample, first, counts = np.unique(samples_of(marked), return_index=True, return_counts=True)
        starts = self.lengths.copy()
        starts[sample] = positions_of(marked[first])
        tail_BA = (slice(None), slice(self.width - ref.shape[1], None))
        reached = np.isin(marked, token_numbers(layout.sample_BS[tail_BA], layout.position_BS[tail_BA]))
        return starts if not reached.all() and (counts <= ref.shape[1]).all() else None

    def _by_own_mask(self, ref: TensorRef) -> Placed | None:
        """Rows of what an engine sampled, beside a mask of their own shape: what that marks speaks of what the response
        mask marks, one after the other, whatever tools wrote between. Rows that mark another number say nothing.
        """
        mask = next((each for name in SAMPLED_MASKS if (each := self.held.named(name)) is not None), None)
        if mask is None or mask.is_text or len(ref.shape) != 2 or mask.shape != ref.shape or self._is_as_wide(ref):
            return None
        if ref.shape[0] != self.count or self.response is None:
            return None
        marked_BA = pages.array(mask).astype(bool)
        tokens, flags = self.response
        sampled = tokens[flags]
        counts_B = np.bincount(samples_of(sampled), minlength=self.count)
        same_B = counts_B == marked_BA.sum(axis=1)
        if not same_B.any():
            return None
        kept = same_B[samples_of(sampled)]
        return Placed(sampled[kept], np.flatnonzero(marked_BA & same_B[:, None]), 2)

    def _slice(self, ref: TensorRef, starts: Ints) -> Placed:
        counts = np.minimum(self.lengths - starts, ref.shape[1])
        sample = np.repeat(np.arange(self.count), counts)
        column = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        return Placed(token_numbers(sample, starts[sample] + column), sample * ref.shape[1] + column, 2)

    def _by_sample(self, ref: TensorRef) -> Placed | None:
        if not ref.shape or ref.shape[0] != self.count or ref.rows is not None:
            return None
        every = np.arange(self.count)
        return Placed(token_numbers(every, 0), every, 1, by_token=False)

    def _ragged(self, ref: TensorRef, alignment: str, stated: str | None) -> Placed | None:
        rows = np.asarray(ref.rows, np.int64)
        layout = self.layout
        if layout is None:
            return None
        if self._is_as_wide(ref) and alignment != "response":
            is_next = alignment == "next" and (stated == "next" or not self._is_at_own_index(ref))
            said = self._says("next" if is_next else "full")
            return Placed(said.tokens, said.slots, 1)
        if rows.size != self.count:
            return None
        starts = self._row_starts(rows, alignment, stated)
        # A first token that nobody sampled (a forced call of a tool) counts in no mask: numbers stay where they are.
        are_ids = ref.dtype.startswith("int") and ref is not self.held.find("response_mask")
        if are_ids and alignment != "prompt":
            starts = self._begun_with_answers(starts)
        if (starts < 0).any():
            return None
        sample = np.repeat(np.arange(rows.size), rows)
        position = np.arange(int(rows.sum())) - np.repeat(np.cumsum(rows) - rows, rows) + starts[sample]
        inside = np.flatnonzero(position < self.lengths[sample])
        return Placed(token_numbers(sample[inside], position[inside]), inside, 1)

    def _begun_with_answers(self, starts: Ints) -> Ints:
        """Where rows begin, if most of them are as long as their answers: then the others begin with theirs, too, and
        an answer that was encoded anew is longer, or shorter, than what was sampled.
        """
        if self.response is None:
            return starts
        tokens, flags = self.response
        sample, first = np.unique(samples_of(tokens[flags]), return_index=True)
        begun = starts.copy()
        begun[sample] = positions_of(tokens[flags][first])
        return begun if 2 * int((begun[sample] == starts[sample]).sum()) > sample.size else starts

    def _row_starts(self, rows: Ints, alignment: str, stated: str | None) -> Ints:
        """The token that the first entry of each row is about: rows shorter than their samples end where those do."""
        lacking = self.lengths - rows
        if alignment == "prompt" or stated == "full":
            return np.zeros_like(rows)
        if alignment == "next" and ((lacking == 0) | (lacking == 1)).all():
            return np.ones_like(rows)
        return lacking

    def values(self, ref: TensorRef) -> TokenValues | None:
        """What the tensor says of every token; one value per sample is said of all its tokens.

        None where the tensor has more axes than tokens or samples, is a text, or does not fit the samples.
        """
        placed = None if ref.is_text else self.place(ref, by_shape=True)
        if placed is None or placed.axes != len(ref.shape):
            return self._spread(ref)
        if not placed.by_token:
            return self._spread(ref)
        values_N, said_N = np.full(int(self.lengths.sum()), np.nan), np.zeros(int(self.lengths.sum()), bool)
        at = self.flat(placed.tokens)
        values_N[at] = pages.array(ref).reshape(-1)[placed.rows]
        said_N[at] = True
        return TokenValues(values_N, said_N)

    def _spread(self, ref: TensorRef) -> TokenValues | None:
        each = self.per_sample(ref)
        if each is None:
            return None
        return TokenValues(np.repeat(each.astype(np.float64), self.lengths), np.ones(int(self.lengths.sum()), bool))

    def per_sample(self, ref: TensorRef) -> Array | None:
        """One value per sample [B], or None where the tensor has another shape, or holds texts."""
        if ref.is_text or ref.rows is not None or ref.shape[:1] != (self.count,) or ref.numel != self.count:
            return None
        return np.asarray(pages.array(ref)).reshape(-1)

    def index_of(self, ref: TensorRef, sample: int, position: int | None = None) -> list[int] | None:
        """The raw index of a sample's token in a tensor, or of where the sample begins; None where it has none.

        A token that the tensor does not speak of leads to the nearest one of its sample that it does.
        """
        if not ref.shape or not 0 <= sample < self.count:
            return None
        placed = self.place(ref, by_shape=True)
        mine = np.zeros(0, np.int64) if placed is None else np.flatnonzero(samples_of(placed.tokens) == sample)
        is_there = position is not None and 0 <= position < self.lengths[sample]
        if placed is None or not placed.by_token or (ref.rows is None and not is_there and self.width is not None):
            return [sample, *[0] * (len(ref.shape) - 1)] if ref.shape[0] == self.count and ref.rows is None else None
        if not mine.size:
            return None
        wanted = position if position is not None and is_there else 0
        row = int(placed.rows[mine[np.abs(positions_of(placed.tokens[mine]) - wanted).argmin()]])
        return [*map(int, np.unravel_index(row, ref.shape[: placed.axes])), *[0] * (len(ref.shape) - placed.axes)]

    # ---- padding that no mask names

    def with_mask(self, mask_BS: Bools) -> Batch:
        """The batch whose padding is now known: its rows hold tokens where `mask_BS` says so."""
        assert self.layout is not None
        other = Batch.__new__(Batch)
        # What was worked out from the old layout is worked out again.
        kept = {name: value for name, value in vars(self).items() if not hasattr(getattr(Batch, name, None), "func")}
        vars(other).update(kept)
        other.layout = replace(TokenLayout.padded(mask_BS), response_width=self.layout.response_width)
        other._known = {}
        other.padding_known = True
        return other


def _without_holes(mask_BR: Bools) -> Bools:
    """Which slots of responses hold a token, by a mask of what counts: padding stands before or behind what does, and
    what stands between (tool output, an environment's words) is tokens.
    """
    begun_BR = np.maximum.accumulate(mask_BR, axis=1)
    goes_on_BR = np.maximum.accumulate(mask_BR[:, ::-1], axis=1)[:, ::-1]
    return np.asarray(begun_BR & goes_on_BR)


def _with_left_out(mask_BR: Bools, responses: TensorRef) -> Bools:
    """Which slots of responses hold a token, where the masks of some are emptied (TRL, `mask_truncated_completions`):
    such a response ends before what other rows are padded with.
    """
    empty_B: Bools = np.asarray(~mask_BR.any(1))
    if not empty_B.any() or empty_B.all() or not responses.is_readable:
        return mask_BR
    ids_BR = pages.array(responses)
    padding = ids_BR[~empty_B][~mask_BR[~empty_B]]
    if padding.size and (padding != padding[0]).any():
        return mask_BR
    there_BR = np.ones(mask_BR.shape, bool)
    if padding.size:
        np.not_equal(ids_BR, padding[0], out=there_BR)
    else:  # a row of one number fills up the batch
        there_BR &= (ids_BR != ids_BR[:, :1]).any(1, keepdims=True)
    # What a row holds before its last token is a token, whatever its number.
    there_BR = np.maximum.accumulate(there_BR[:, ::-1], axis=1)[:, ::-1]
    return np.asarray(np.where(empty_B[:, None], there_BR, mask_BR))


def batch_of(record: Record, fields: Sequence[TensorRef]) -> tuple[Batch | None, str | None]:
    """The record's samples, or why they cannot be told. (None, None) where the record knows of none."""
    if not any(ref.shape for ref in fields):
        return None, None  # numbers alone, as a log has ten thousand of
    try:
        batch = Batch(record, fields)
    except (ValueError, DumpError) as error:
        return None, f"no token layout: {error.message if isinstance(error, DumpError) else error}"
    if batch.problem is not None:
        return None, f"no token layout: {batch.problem}"
    return (batch if batch.count else None), None


def by_sample(batch: Batch, ref: TensorRef) -> list[Array] | None:
    """`Batch.values` as one array [L] per sample."""
    said = batch.values(ref)
    return None if said is None else list(np.split(said.values_N, batch.starts[1:]))


def places_of(keys: Iterable[Hashable], among: Iterable[Hashable]) -> list[int | None]:
    """Where each key stands among others; equal ones stand for each other in order, the last one for any further."""
    places: dict[Hashable, list[int]] = {}
    for place, key in enumerate(among):
        places.setdefault(key, []).append(place)
    used = Counter[Hashable]()
    found: list[int | None] = []
    for key in keys:
        equal = places.get(key)
        found.append(None if equal is None else equal[min(used[key], len(equal) - 1)])
        used[key] += 1
    return found


def rows_of(ref: TensorRef) -> list[Array]:
    """The rows of a tensor: its ragged rows, or one per index of its first axis."""
    values = pages.array(ref)
    if ref.rows is not None:
        return list(np.split(values, np.cumsum(ref.rows)[:-1])) if ref.rows else []
    return list(values) if values.ndim > 1 else [values]


def _alternating(parts: Sequence[Array], lengths: Sequence[Ints]) -> Array:
    """Ragged columns joined row by row: the first row of each, then the second."""
    rows = np.concatenate([np.repeat(np.arange(each.size), each) for each in lengths])
    joined: Array = np.concatenate([part.reshape(-1) for part in parts])[np.argsort(rows, kind="stable")]
    return joined


def _said(alignment: str, stated: str | None, axes: TokenAxes, layout: TokenLayout) -> str:
    """full or next. A slice [B, A] says in column j what is about its own token j, whatever its kind; a tensor
    one shorter than its tokens says something of the next one, where nothing is stated."""
    if axes.offset or alignment in ("response", "prompt") or stated == "full":
        return "full"
    return "next" if alignment == "next" or axes.width == layout.shape[1] - 1 else "full"


def _is_batched(ref: TensorRef, layout: TokenLayout) -> bool:
    """Whether the shape alone says [B, S, ...]: both axes, and more than one token."""
    return len(ref.shape) >= 2 and ref.shape[:2] == layout.shape and layout.shape[1] > 1


def fills_the_mask(held: Held, ref: TensorRef) -> bool:
    """Whether a tensor has numbers only in cells that the mask of the same shape marks, the last of a row among
    them: then it stands where the mask does, wherever log-probabilities may (`advantages = A[:, None] * mask`).
    What is of the next token has one before the first marked cell, and none in the last.
    """
    meaning = naming.meaning(ref.canonical or ref.name)
    if len(ref.shape) > 2 or meaning.region != "response" or meaning.kind == "logprob":
        return False  # of log-probabilities a sure token's is 0
    mask = held.find("response_mask")
    if mask is None or mask.alignment == "next" or mask.rows != ref.rows or mask.shape != ref.shape:
        return False
    marked_BT = np.atleast_2d(pages.array(mask) != 0)
    filled_BT = (pages.array(ref) != 0).reshape(marked_BT.shape)
    if marked_BT.all() or (filled_BT & ~marked_BT).any():
        return False
    last_B = marked_BT.shape[1] - 1 - marked_BT[:, ::-1].argmax(axis=1)
    return bool(filled_BT[np.arange(len(last_B)), last_B].any())


def _fills_alone(empty_N: Bools, firsts: Ints, own_N: Ints, shape: tuple[int, ...]) -> bool | None:
    """Whether the first slots of samples, or the first column, are filled and next to nothing else is; False where
    nothing is, None where more is. One sample's first slot may be a sure token's.
    """
    if not empty_N.any():
        return False
    for slots, among in ((firsts, own_N[own_N >= 0]), (np.arange(shape[0]) * shape[1], np.arange(empty_N.size))):
        if slots.size and empty_N[slots].all():
            rest = int(empty_N[among].sum()) - int(np.isin(slots, among).sum())
            return True if slots.size >= _FEWEST_FIRSTS and rest <= _SURE * among.size else None
    return False if empty_N[own_N[own_N >= 0]].mean() <= _SURE else None
