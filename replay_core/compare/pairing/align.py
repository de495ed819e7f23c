"""Which tensor faces which, and which of their rows are about the same token of the same sample."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator

import numpy as np
from msgspec import Struct

from replay_core import naming, pages
from replay_core.compare.pairing.chunks import row_width, rows_of_a_chunk
from replay_core.compare.pairing.micro_batch_pair import MicroBatchPair, Pairing, Side, pair_micro_batches
from replay_core.compare.pairing.shapes import explain_shapes, padding_between
from replay_core.measure.from_files import Facing
from replay_core.measure.pair import Rows
from replay_core.records import Record, TensorRef
from replay_core.samples.batch import Batch, Placed
from replay_core.samples.layout import Bools, Ints, positions_of, samples_of, token_numbers

__all__ = [
    "MicroBatchPair",
    "Rowwise",
    "ShapesDifferError",
    "Side",
    "TensorPair",
    "is_layout_only",
    "lays_out",
    "pair_micro_batches",
    "pair_tensors",
]  # fmt: skip

_LAYOUT_NAMES = ("attention_mask", "cu_seqlens")


class TensorPair(Struct):
    """Two tensors that should agree; one is None when the other side lacks it."""

    name: str
    a: tuple[Record, TensorRef] | None
    b: tuple[Record, TensorRef] | None

    @property
    def one(self) -> tuple[Record, TensorRef]:
        present = self.a or self.b
        assert present is not None
        return present


def pair_tensors(micro_pair: MicroBatchPair) -> Iterator[TensorPair]:
    """Pairs of one computation: same name and stage, then same name across stages; then what is one-sided."""
    a, b = dict(micro_pair.a.tensors), dict(micro_pair.b.tensors)
    for key in list(a):
        if key in b:
            yield TensorPair(key[0], a.pop(key), b.pop(key))
    if not a and not b:
        return
    for meant in (_name, _param, _output):
        in_a, in_b = _by_meaning(a, meant), _by_meaning(b, meant)
        for word, keys in in_a.items():
            others = in_b.get(word, [])
            if len(keys) == len(others) == 1:
                yield TensorPair(keys[0][0], a.pop(keys[0]), b.pop(others[0]))
    # A name whose twin in another stage was compared already adds nothing.
    for (name, _), present in a.items():
        yield TensorPair(name, present, None)
    for (name, _), present in b.items():
        yield TensorPair(name, None, present)


def _by_meaning(
    tensors: Iterable[tuple[str, str]], meant: Callable[[str, str], Hashable | None]
) -> dict[Hashable, list[tuple[str, str]]]:
    found: dict[Hashable, list[tuple[str, str]]] = {}
    for name, stage in tensors:
        word = meant(name, stage)
        if word is not None:
            found.setdefault(word, []).append((name, stage))
    return found


def _name(name: str, _stage: str) -> Hashable | None:
    return name


def _param(name: str, stage: str) -> Hashable | None:
    """Weights in a file of no known layout face those of a model's own directory."""
    if stage not in ("param", "tensors"):
        return None
    return naming.canonical(f"param.{name.removeprefix('param.')}")


def _output(name: str, stage: str) -> Hashable | None:
    """A module that returns its tensor beside another (attention weights) still returns it first."""
    return (name.removesuffix(".0"), stage) if name.endswith((".output", ".output.0")) else None


def is_layout_only(pair: TensorPair, micro_pair: MicroBatchPair) -> bool:
    """A one-sided tensor that only says how its side lays the same tokens out, or says them again: none is missing.

    So does a module's mask on both sides, where their tokens lie otherwise or one adds and the other chooses.
    """
    if not _same_tokens(micro_pair):
        return False
    if pair.a is not None and pair.b is not None:
        return _lies_otherwise(pair.name, pair.a[1], pair.b[1], micro_pair)
    if pair.name in (*_LAYOUT_NAMES, "sample_lengths", "prompt_mask"):
        return True
    if naming.is_module_tensor(pair.name):
        return naming.meaning(pair.name).kind == "mask"
    side = micro_pair.a if pair.a is not None else micro_pair.b
    return _restates(pair.one[1], side.batch(pair.one[1]), micro_pair)


def _lies_otherwise(name: str, a: TensorRef, b: TensorRef, micro_pair: MicroBatchPair) -> bool:
    """Whether two masks of a module, or the rows that a router sent to an expert, need not be equal: padding has a part
    in them, or the experts are computed together on one side.
    """
    is_mask = naming.is_module_tensor(name) and naming.meaning(name).kind == "mask"
    if not is_mask and not naming.is_routed(name):
        return False
    of_a, of_b = micro_pair.a.layout, micro_pair.b.layout
    is_alike = of_a is not None and of_b is not None and np.array_equal(of_a.sample_BS, of_b.sample_BS)
    if is_mask:
        return not is_alike or a.dtype != b.dtype
    return not is_alike or a.shape != b.shape or not _same_choices(name, micro_pair)


def _same_choices(name: str, micro_pair: MicroBatchPair) -> bool:
    """Whether every slot, padding too, was sent to the same experts as far as the layer of experts recorded it."""
    block = name[: name.index("experts.")]
    for (other, stage), (_, a) in micro_pair.a.tensors.items():
        if other.startswith(block) and naming.is_module_tensor(other) and a.dtype.startswith("int"):
            b = micro_pair.b.tensors.get((other, stage))
            if b is not None and not pages.same_bytes(a, b[1]):
                return False
    return True


def _restates(ref: TensorRef, batch: Batch | None, micro_pair: MicroBatchPair) -> bool:
    """Whether ids or positions hold nothing but what the batch and its layout say, and the other side's ids as well."""
    name = ref.canonical or ref.name
    if name not in ("input_ids", "prompt_ids", "response_ids", "position_ids") or batch is None:
        return False
    placed = batch.place(ref) if not ref.is_text and ref.is_readable else None
    if batch.tokens_N is None or placed is None or not placed.by_token or placed.axes < len(ref.shape):
        return False
    said = pages.array(ref).reshape(-1)[placed.rows]
    if batch.held.ids in (None, ref) and not _same_ids(batch, micro_pair):
        return False
    if name == "position_ids":
        return bool(np.array_equal(said, positions_of(placed.tokens)))
    return bool(np.array_equal(said, batch.tokens_N[batch.flat(placed.tokens)]))


def _same_ids(batch: Batch, micro_pair: MicroBatchPair) -> bool:
    """Whether the batch is one of the two that face each other, and their samples hold the same ids."""
    a, b = micro_pair.a.main, micro_pair.b.main
    if batch not in (a, b) or a is None or b is None or a.digests is None or b.digests is None:
        return False
    to_a = micro_pair.pairing(a, b).to_a
    return all(at < 0 or a.digests[at] == mine for at, mine in zip(to_a, b.digests, strict=True))


def lays_out(name: str, micro_pair: MicroBatchPair) -> bool:
    """The mask or bounds from which both sides' layouts of the same samples were read."""
    return name in _LAYOUT_NAMES and _same_tokens(micro_pair)


def _same_tokens(micro_pair: MicroBatchPair) -> bool:
    """Whether the samples that face each other have the same number of tokens, and none stands alone."""
    a, b = micro_pair.a.main, micro_pair.b.main
    if a is None or b is None or a.layout is None or b.layout is None:
        return False
    pairing = micro_pair.pairing(a, b)
    found = np.flatnonzero(pairing.to_a >= 0)
    if not np.array_equal(a.lengths[pairing.to_a[found]], b.lengths[found]):
        return False
    lone = (a.lengths[pairing.to_b < 0].any(), b.lengths[pairing.to_a < 0].any())
    return bool(found.size or not (a.lengths.any() or b.lengths.any())) and (micro_pair.partial or not any(lone))


class ShapesDifferError(Exception):
    """Two tensors whose elements cannot face each other; its text explains which side is longer."""


class Rowwise:
    """Rows of two tensors that face each other, and what row number means.

    `counted` yields the rows that count, `whole` every element (None when the sides are laid out
    differently: their paddings do not face each other).

    `overlap`: compare what both have and leave the rest; `left_out` then says what that was.
    """

    def __init__(self, a: TensorRef, b: TensorRef, micro_pair: MicroBatchPair, *, overlap: bool = False) -> None:
        self.a, self.b = a, b
        self._is_partial = micro_pair.partial
        self.rows_a: Ints | None = None
        self.rows_b: Ints | None = None
        #: The tokens of the rows compared, as rising numbers of a's samples; None where no samples are known.
        self.tokens: Ints | None = None
        self.axes_a, self.axes_b = 0, 0
        #: Where columns are tokens as well: of either side, the column of every position of a's samples, -1 for none.
        self._keys: tuple[Ints, Ints] | None = None
        self.masked = False
        self.note: str | None = None
        self.left_out: list[str] = []
        #: The sides ("a", "b") of which something that may count faces nothing.
        self.lone: set[str] = set()
        self.pairing: Pairing | None = None
        self._overlap = overlap
        self._by_token = False
        #: The tensor is [sample, position] by its meaning, with or without a layout (an activation ends in hidden).
        meaning = naming.meaning(a.canonical or a.name)
        self.by_sample = (meaning.region != "all" and meaning.kind != "activation") or a.alignment is not None
        self._place(micro_pair)

    @property
    def slots_a(self) -> Ints | None:
        """Where rows are tokens: something to look a token up by."""
        return self.tokens if self._by_token else None

    def _place(self, micro_pair: MicroBatchPair) -> None:
        meaning = naming.meaning(self.a.canonical or self.a.name)
        if self._by_tokens(micro_pair, meaning):
            return
        if self.a.rows is not None or self.b.rows is not None:
            if self.a.rows != self.b.rows:
                self._differ()
                return
            self.rows_a = self.rows_b = np.arange(self.a.numel)
            self.axes_a = self.axes_b = 1
            return
        if self.a.shape == self.b.shape:
            self._by_own_mask(micro_pair, meaning)
            return
        squeezed = _squeeze(self.a.shape) == _squeeze(self.b.shape)
        if not squeezed:
            self._differ()
            return
        self.note = f"shapes {list(self.a.shape)} and {list(self.b.shape)} differ only in axes of length 1"

    def _differ(self) -> None:
        """Shapes that nothing lines up: in an overlap, what lies at the same indices of either.

        Raises:
            ShapesDifferError: no overlap was asked for, or there is none to compare.
        """
        a, b = self.a, self.b
        dense = a.rows is None and b.rows is None and len(a.shape) == len(b.shape) and len(a.shape) > 0
        if not self._overlap or not dense or a.shape[2:] != b.shape[2:]:
            raise ShapesDifferError(explain_shapes(a, b))
        axes = min(2, len(a.shape))
        shape = [min(x, y) for x, y in zip(a.shape[:axes], b.shape[:axes], strict=True)]
        shared = np.indices(shape).reshape(axes, -1)
        padding = padding_between(a, b)
        left = padding is not None and padding.at == "first"
        flat = []
        for ref in (a, b):
            # Padding on the left: what both have ends in the same column.
            from_end = np.array([[0], [ref.shape[1] - shape[1]]]) if left else 0
            flat.append(np.asarray(np.ravel_multi_index(tuple(shared + from_end), ref.shape[:axes]), np.int64))
        self.rows_a, self.rows_b = flat
        self.axes_a = self.axes_b = axes
        self.lone = {"a", "b"}
        end = "counted from the right end" if left else "at the same index"
        self.left_out.append(f"what both shapes have {end} is compared")

    def _by_tokens(self, micro_pair: MicroBatchPair, meaning: naming.Meaning) -> bool:
        placed, both = micro_pair.placed(self.a, self.b), micro_pair.batches(self.a, self.b)
        if placed is None or both is None:
            return False
        placed_a, placed_b, pairing = placed
        known = placed_a.by_token and meaning.region != "all"
        if not known and pairing.in_order and self.a.shape == self.b.shape:
            return False
        self._face(placed_a, placed_b, micro_pair, pairing, both, meaning)
        if self.rows_a is None or not self.rows_a.size:
            self.rows_a = self.rows_b = self.tokens = None
            if micro_pair.partial or not pairing.in_order:
                raise ShapesDifferError(f"{explain_shapes(self.a, self.b)}: they have no token in common")
            return False
        self.masked = placed_a.by_token
        self.pairing, self._by_token = pairing, placed_a.by_token
        return True

    def _face(
        self,
        placed_a: Placed,
        placed_b: Placed,
        micro_pair: MicroBatchPair,
        pairing: Pairing,
        batches: tuple[Batch, Batch],
        meaning: naming.Meaning,
    ) -> None:
        sample_b = pairing.to_a[samples_of(placed_b.tokens)]
        tokens_b = token_numbers(np.maximum(sample_b, 0), positions_of(placed_b.tokens))
        known_a, known_b = pairing.to_b[samples_of(placed_a.tokens)] >= 0, sample_b >= 0
        tokens_a, rows_a = placed_a.tokens[known_a], placed_a.rows[known_a]
        tokens_b, rows_b, own_b = tokens_b[known_b], placed_b.rows[known_b], placed_b.tokens[known_b]
        counts_a, counts_b = self._counts(batches, tokens_a, own_b, meaning)
        shared, of_a, of_b = np.intersect1d(tokens_a, tokens_b, assume_unique=True, return_indices=True)
        narrowed = counts_a is not None or counts_b is not None
        keep = np.ones(shared.size, bool)
        if narrowed:
            # A token counts when either side says so: where the masks part, both values are looked at.
            said = [counts[of] for counts, of in ((counts_a, of_a), (counts_b, of_b)) if counts is not None]
            keep = np.logical_or.reduce(said)
        sure = narrowed or meaning.region == "valid" or meaning.kind == "ids" or not placed_a.by_token
        for which, ref, tokens, rows, others, counts in (
            ("a", self.a, tokens_a, rows_a, tokens_b, counts_a),
            ("b", self.b, tokens_b, rows_b, tokens_a, counts_b),
        ):
            self._one_sided(which, ref, (tokens, rows, others, counts), meaning, sure)
        if placed_a.by_token and micro_pair.rerouted:
            gone = keep & micro_pair.gone_elsewhere(shared, self.a, self.a.canonical or self.a.name)
            if gone.any() and (keep & ~gone).any():
                keep &= ~gone
                self.note = (
                    f"{np.count_nonzero(gone):,} tokens are not compared: other experts, or after one with others"
                )
        self.tokens = np.repeat(shared[keep], placed_a.heads)
        self.rows_a, self.rows_b = (
            (rows[keep, None] + np.arange(placed.heads) * placed.apart).reshape(-1)
            for rows, placed in ((rows_a[of_a], placed_a), (rows_b[of_b], placed_b))
        )
        self.axes_a, self.axes_b = placed_a.axes, placed_b.axes
        if placed_a.keys is not None and placed_b.keys is not None:
            longest = min(placed_a.keys.shape[1], placed_b.keys.shape[1])
            self._keys = placed_a.keys[:, :longest], placed_b.keys[pairing.to_b, :longest]

    def _counts(
        self, batches: tuple[Batch, Batch], tokens_a: Ints, tokens_b: Ints, meaning: naming.Meaning
    ) -> tuple[Bools | None, Bools | None]:
        """Whether each token was generated, as either side's response mask says; None where it has none."""
        if meaning.region != "response":
            return None, None
        return _is_response(batches[0], tokens_a), _is_response(batches[1], tokens_b)

    def _one_sided(
        self,
        which: str,
        ref: TensorRef,
        of: tuple[Ints, Ints, Ints, Bools | None],
        meaning: naming.Meaning,
        sure: bool,
    ) -> None:
        """Tokens of paired samples that only one of the two tensors reaches. `sure`: they are known to count.

        Raises:
            ShapesDifferError: tokens that count would not be compared, and no overlap was asked for.
        """
        tokens, rows, others, counts = of
        only = ~np.isin(tokens, others, assume_unique=True)
        if counts is not None:
            only &= counts
        tokens, rows = tokens[only], rows[only]
        if meaning.kind == "mask" and tokens.size:
            says = pages.array(ref).reshape(-1)[rows].astype(bool)
            tokens, rows = tokens[says], rows[says]
        if not tokens.size:
            return
        self.lone.add(which)
        samples = np.unique(samples_of(tokens))
        where = f"sample {samples[0]}" + (f" and {samples.size - 1} more" if samples.size > 1 else "")
        text = f"{tokens.size:,} tokens stand only in {which} (of {where}, in a's order)"
        if not sure:
            self.note = f"{text}: not compared"
        elif self._overlap:
            self.left_out.append(text)
        else:
            raise ShapesDifferError(f"{explain_shapes(self.a, self.b)}; {text}")

    def _by_own_mask(self, micro_pair: MicroBatchPair, meaning: naming.Meaning) -> None:
        """No layout, but a response mask of the tensor's own shape narrows it (NexRL's forward_data)."""
        if meaning.region != "response":
            return
        masks = [side.find("response_mask") for side in (micro_pair.a, micro_pair.b)]
        present = [pages.array(ref).astype(bool) for ref in masks if ref is not None and ref.shape == self.a.shape]
        if not present:
            return
        counted = np.flatnonzero(np.logical_or.reduce(present))
        self.rows_a = self.rows_b = counted
        self.axes_a = self.axes_b = len(self.a.shape)
        self.masked = True

    @property
    def paddings_face(self) -> bool:
        """Whether the sides have one layout, so that every element faces one. What a part of their samples leaves out
        is tokens of others, and no padding.
        """
        return (
            not self._is_partial
            and self.a.shape == self.b.shape
            and np.array_equal(() if self.rows_a is None else self.rows_a, () if self.rows_b is None else self.rows_b)
        )

    def counted(self, first: int = 0) -> Iterator[tuple[Rows, Rows]]:
        """The rows that count, in chunks; of tensors laid out by tokens, from row `first` on."""
        if self.rows_a is None or self.rows_b is None:
            assert not first
            yield from self.whole()
            return
        width = _inner(self.a.shape, self.axes_a)
        if not width:
            return  # rows of nothing
        rows_a, rows_b = pages.row_reader(self.a, width), pages.row_reader(self.b, _inner(self.b.shape, self.axes_b))
        step = rows_of_a_chunk(width)
        for start in range(first, self.rows_a.size, step):
            some = slice(start, start + step)
            chunk = rows_a(self.rows_a[some]), rows_b(self.rows_b[some])
            yield chunk if self._keys is None else self._by_key(some, *chunk)

    def facing(self, *, counted: bool) -> Facing | None:
        """The same rows by their numbers; None where they are not of one width, or not as they lie."""
        if not counted or self.rows_a is None or self.rows_b is None:
            return None if self.a.numel % self.width else Facing(self.a, self.b, self.width)
        width = _inner(self.a.shape, self.axes_a)
        if self._keys is not None or width != _inner(self.b.shape, self.axes_b):
            return None
        return Facing(self.a, self.b, width, self.rows_a, self.rows_b)

    def _by_key(self, some: slice, a_RK: Rows, b_RK: Rows) -> tuple[Rows, Rows]:
        """Rows over the keys of their own sample, in its order; what lies past a sample's end is 0."""
        assert self.tokens is not None
        assert self._keys is not None
        samples = samples_of(self.tokens[some])
        taken = []
        for row, keys in zip((a_RK, b_RK), self._keys, strict=True):
            at = keys[samples]
            taken.append(np.where(at >= 0, np.take_along_axis(row, np.maximum(at, 0), axis=1), row.dtype.type(0)))
        return taken[0], taken[1]

    def whole(self) -> Iterator[tuple[Rows, Rows]]:
        width = self.width
        step = width if len(self.a.shape) < 2 else rows_of_a_chunk(width) * width
        chunks = zip(pages.flat_chunks(self.a, step), pages.flat_chunks(self.b, step), strict=True)
        for (_, chunk_a), (_, chunk_b) in chunks:
            across = min(width, chunk_a.size)  # the end of a long vector is a shorter row
            yield chunk_a.reshape(-1, across), chunk_b.reshape(-1, across)

    @property
    def width(self) -> int:
        """Elements of a row of `whole`."""
        return row_width(self.a.shape)

    def samples(self) -> Ints | None:
        """The sample of every row of `counted`, where the layout, the ragged rows or the shape tell."""
        if self.tokens is not None:
            return samples_of(self.tokens)
        if self.a.rows is not None:
            return np.repeat(np.arange(len(self.a.rows)), self.a.rows)
        if self.by_sample and len(self.a.shape) == 2:
            return np.arange(self.a.shape[0]) if self.rows_a is None else self.rows_a // self.a.shape[1]
        return None

    def index(self, row: int, column: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The element's index in either tensor, from the (row, column) of the rows that count."""
        if self.rows_a is None or self.rows_b is None:
            flat = row * self.width + column
            return _unravel(flat, self.a.shape), _unravel(flat, self.b.shape)
        column_a = column_b = column
        if self._keys is not None and self.tokens is not None:
            column_a, column_b = (int(keys[int(samples_of(self.tokens[row])), column]) for keys in self._keys)
        flat_a = int(self.rows_a[row]) * _inner(self.a.shape, self.axes_a) + max(0, column_a)
        flat_b = int(self.rows_b[row]) * _inner(self.b.shape, self.axes_b) + max(0, column_b)
        return _unravel(flat_a, self.a.shape), _unravel(flat_b, self.b.shape)

    def token(self, row: int, column: int = 0) -> tuple[int, int] | None:
        """(sample, position) of a counted element, where the layout or the ragged rows tell."""
        if self.tokens is not None:
            number = self.tokens[row]
            return int(samples_of(number)), int(positions_of(number)) if self._by_token else 0
        if self.a.rows is not None:
            ends = np.cumsum(self.a.rows)
            flat = row * self.width + column if self.rows_a is None else int(self.rows_a[row])
            sample = int(np.searchsorted(ends, flat, side="right"))
            return sample, flat - int(ends[sample] - self.a.rows[sample])
        if self.by_sample and len(self.a.shape) == 2:
            flat = row * self.a.shape[1] + column if self.rows_a is None else int(self.rows_a[row])
            return flat // self.a.shape[1], flat % self.a.shape[1]
        return None


def _inner(shape: tuple[int, ...], axes: int) -> int:
    return int(np.prod(shape[axes:], dtype=np.int64))


def _unravel(flat: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(part) for part in np.unravel_index(flat, shape)) if shape else ()


def _squeeze(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _is_response(batch: Batch, tokens: Ints) -> Bools | None:
    """Whether each of the tokens was generated; None where that is not known."""
    if batch.response is None:
        return None
    known, flags = batch.response
    if not known.size:
        return np.zeros(tokens.size, bool)
    at = np.minimum(np.searchsorted(known, tokens), known.size - 1)
    return np.asarray((known[at] == tokens) & flags[at])
