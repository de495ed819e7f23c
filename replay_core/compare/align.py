"""Which record faces which, which tensor faces which, and which rows of them are the same tokens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from replay_core import naming, pages
from replay_core.errors import RldbgError
from replay_core.layout import Ints, TokenAxes, TokenLayout
from replay_core.measure.pair import Rows
from replay_core.records import Problem, Record, RecordKey, TensorRef

#: Elements of one chunk that is gathered and measured.
CHUNK = pages.CHUNK

_LAYOUT_NAMES = ("attention_mask", "cu_seqlens")


@dataclass(slots=True)
class Side:
    """One run's part of a computation: the records of one (step, micro, rank, role), their tensors and layout."""

    records: list[Record] = field(default_factory=list)
    #: (canonical name, stage) -> (record, tensor), in file order
    tensors: dict[tuple[str, str], tuple[Record, TensorRef]] = field(default_factory=dict)
    layout: TokenLayout | None = None
    problems: list[Problem] = field(default_factory=list)
    unreadable: int = 0

    def load(self) -> None:
        for record in self.records:
            try:
                tensors = record.tensors()
            except RldbgError as error:
                self.problems.append(Problem(str(record.path), error.message))
                self.unreadable += 1
                continue
            # Of two fields with one meaning (`sequences` beside `input_ids`) the one called so has the name.
            for ref in sorted(tensors, key=lambda ref: ref.name != (ref.canonical or ref.name)):
                self._take(record, ref)
        try:
            self.layout = self._layout()
        except (ValueError, RldbgError) as error:
            where = str(self.records[0].path) if self.records else ""
            self.problems.append(Problem(where, f"no token layout: {error}"))

    def _take(self, record: Record, ref: TensorRef) -> None:
        stage = record.key.stage
        for name in (ref.canonical or ref.name, ref.name, f"{ref.name} of {record.path.name}"):
            if (name, stage) not in self.tensors:
                self.tensors[name, stage] = (record, ref)
                return
        self.problems.append(Problem(str(record.path), f"{ref.name} is there more than twice; not compared"))
        self.unreadable += 1

    def find(self, name: str) -> TensorRef | None:
        return next((ref for (known, _), (_, ref) in self.tensors.items() if known == name), None)

    def _layout(self) -> TokenLayout | None:
        mask, bounds = self.find("attention_mask"), self.find("cu_seqlens")
        ids, response = self.find("input_ids"), self.find("response_mask")
        response_values = pages.array(response) if response is not None and not response.is_text else None
        if bounds is not None:
            total = ids.shape[-1] if ids is not None else None
            flat = response_values if response_values is not None and response_values.size == total else None
            return TokenLayout.packed(pages.array(bounds), total, flat)
        if mask is None or len(mask.shape) != 2:
            return None
        fits = response is not None and len(response.shape) == 2 and response.shape[0] == mask.shape[0]
        if response is None or response_values is None or not fits:
            response_values = None
        elif response.alignment == "next" and response.shape == mask.shape:
            # Said of the token after: one column to the right it stands under the token itself.
            response_values = np.pad(response_values[:, :-1], ((0, 0), (1, 0)))
        return TokenLayout.padded(pages.array(mask), response_values)


@dataclass(slots=True)
class Facing:
    """Two sides of one computation."""

    key: RecordKey
    a: Side
    b: Side


@dataclass(frozen=True, slots=True)
class TensorPair:
    """Two tensors that should agree; one is None when the other side lacks it."""

    name: str
    a: tuple[Record, TensorRef] | None
    b: tuple[Record, TensorRef] | None

    @property
    def one(self) -> tuple[Record, TensorRef]:
        present = self.a or self.b
        assert present is not None
        return present


def face(records_a: Iterable[Record], records_b: Iterable[Record]) -> tuple[list[Facing], list[Problem]]:
    """Pair computations by (step, micro, rank, role). A part that is None on one side pairs with a single value."""
    sides_a, sides_b = _sides(records_a), _sides(records_b)
    problems: list[Problem] = []
    paired: list[tuple[tuple[Any, ...], tuple[Any, ...]]] = [(key, key) for key in sides_a if key in sides_b]
    left_a = [key for key in sides_a if key not in sides_b]
    left_b = [key for key in sides_b if key not in sides_a]
    for key in list(left_a):
        matches = [other for other in left_b if _compatible(key, other)]
        rivals = [other for other in left_a if matches and _compatible(other, matches[0])]
        if len(matches) == 1 and len(rivals) == 1:
            paired.append((key, matches[0]))
            left_a.remove(key)
            left_b.remove(matches[0])
        elif matches:
            where = str(sides_a[key].records[0].path)
            problems.append(Problem(where, f"could face any of {len(matches)} records of the other run; faces none"))
    facings = [Facing(_key(key_a), sides_a[key_a], sides_b[key_b]) for key_a, key_b in paired]
    facings += [Facing(_key(key), sides_a[key], Side()) for key in left_a]
    facings += [Facing(_key(key), Side(), sides_b[key]) for key in left_b]
    return sorted(facings, key=lambda facing: facing.key.order), problems


def _sides(records: Iterable[Record]) -> dict[tuple[Any, ...], Side]:
    sides: dict[tuple[Any, ...], Side] = defaultdict(Side)
    for record in records:
        key = record.key
        sides[(key.step, key.micro, key.rank, key.role)].records.append(record)
    return dict(sides)


def _key(parts: tuple[Any, ...]) -> RecordKey:
    step, micro, rank, role = parts
    return RecordKey(step, micro, rank, role)


def _compatible(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    return all(x is None or y is None or x == y for x, y in zip(a, b, strict=True))


def pair_tensors(facing: Facing) -> Iterator[TensorPair]:
    """Pairs of one computation: same name and stage, then same name across stages; then what is one-sided."""
    a, b = dict(facing.a.tensors), dict(facing.b.tensors)
    for key in list(a):
        if key in b:
            yield TensorPair(key[0], a.pop(key), b.pop(key))
    for key in list(a):
        name = key[0]
        others = [other for other in b if other[0] == name]
        if len(others) == 1 and sum(known[0] == name for known in a) == 1:
            yield TensorPair(name, a.pop(key), b.pop(others[0]))
    # A name whose twin in another stage was compared already adds nothing.
    for (name, _), present in a.items():
        yield TensorPair(name, present, None)
    for (name, _), present in b.items():
        yield TensorPair(name, None, present)


def is_layout_only(pair: TensorPair, facing: Facing) -> bool:
    """A one-sided mask that only says how its side lays the same tokens out: no tensor is missing."""
    if pair.a is not None and pair.b is not None:
        return False
    if facing.a.layout is None or facing.b.layout is None or not same_samples(facing.a.layout, facing.b.layout):
        return False
    if pair.name in _LAYOUT_NAMES:
        return True
    return naming.is_module_tensor(pair.name) and naming.meaning(pair.name).kind == "mask"


def lays_out(name: str, facing: Facing) -> bool:
    """The mask or bounds from which both sides' layouts of the same samples were read."""
    a, b = facing.a.layout, facing.b.layout
    return name in _LAYOUT_NAMES and a is not None and b is not None and same_samples(a, b)


def same_samples(a: TokenLayout, b: TokenLayout) -> bool:
    return a.samples == b.samples and bool((a.lengths == b.lengths).all())


class ShapesDifferError(Exception):
    """Two tensors whose elements cannot face each other; its text explains which side is longer."""


class Rowwise:
    """Rows of two tensors that face each other, and what row number means.

    `counted` yields the rows that count, `whole` every element (None when the sides are laid out
    differently: their paddings do not face each other).
    """

    def __init__(self, a: TensorRef, b: TensorRef, facing: Facing) -> None:
        self.a, self.b = a, b
        self.layout_a, self.layout_b = facing.a.layout, facing.b.layout
        self.rows_a: Ints | None = None
        self.rows_b: Ints | None = None
        self.slots_a: Ints | None = None
        self.axes_a, self.axes_b = 0, 0
        self.masked = False
        self.note: str | None = None
        #: The tensor is [sample, position] by its meaning, even where no layout is known.
        self.by_sample = naming.meaning(a.canonical or a.name).region != "all" or a.alignment is not None
        self._place(facing)

    def _place(self, facing: Facing) -> None:
        meaning = naming.meaning(self.a.canonical or self.a.name)
        if self._by_tokens(meaning):
            return
        if self.a.rows is not None or self.b.rows is not None:
            if self.a.rows != self.b.rows:
                raise ShapesDifferError(_explain_shapes(self.a, self.b))
            self.rows_a = self.rows_b = np.arange(self.a.numel)
            self.axes_a = self.axes_b = 1
            return
        if self.a.shape == self.b.shape:
            self._by_own_mask(facing, meaning)
            return
        squeezed = _squeeze(self.a.shape) == _squeeze(self.b.shape)
        if not squeezed:
            raise ShapesDifferError(_explain_shapes(self.a, self.b))
        self.note = f"shapes {list(self.a.shape)} and {list(self.b.shape)} differ only in axes of length 1"

    def _by_tokens(self, meaning: naming.Meaning) -> bool:
        if self.layout_a is None or self.layout_b is None or meaning.region == "all":
            return False
        axes_a, axes_b = self.layout_a.token_axes(self.a.shape), self.layout_b.token_axes(self.b.shape)
        if axes_a is None or axes_b is None:
            return False
        inner_a, inner_b = self.a.shape[axes_a.axes :], self.b.shape[axes_b.axes :]
        if inner_a != inner_b or not same_samples(self.layout_a, self.layout_b):
            return False
        said_a = self.layout_a.said(_alignment(self.a, meaning, axes_a))
        said_b = self.layout_b.said(_alignment(self.b, meaning, axes_b))
        _, of_a, of_b = np.intersect1d(said_a.tokens, said_b.tokens, assume_unique=True, return_indices=True)
        known = [said.response[of] for said, of in ((said_a, of_a), (said_b, of_b)) if said.response is not None]
        narrowed = meaning.region == "response" and bool(known)
        if narrowed:
            # A token counts when either side says so: where the masks part, both values are looked at.
            counts = np.logical_or.reduce(known)
            of_a, of_b = of_a[counts], of_b[counts]
        rows_a = axes_a.rows(said_a.slots[of_a], self.layout_a)
        rows_b = axes_b.rows(said_b.slots[of_b], self.layout_b)
        inside = (rows_a >= 0) & (rows_b >= 0)
        if not inside.any():
            return False
        self._one_sided(rows_a[rows_b < 0], rows_b[rows_a < 0], meaning, narrowed or meaning.region == "valid")
        self.rows_a, self.rows_b, self.slots_a = rows_a[inside], rows_b[inside], said_a.slots[of_a][inside]
        self.axes_a, self.axes_b = axes_a.axes, axes_b.axes
        self.masked = True
        return True

    def _one_sided(self, only_a: Ints, only_b: Ints, meaning: naming.Meaning, sure: bool) -> None:
        """Tokens whose slot only one of the two tensors reaches. `sure`: they are known to count.

        Raises:
            ShapesDifferError: tokens that count would not be compared.
        """
        for which, ref, rows in (("a", self.a, only_a), ("b", self.b, only_b)):
            rows = rows[rows >= 0]
            if meaning.kind == "mask":
                rows = rows[pages.array(ref).reshape(-1)[rows].astype(bool)]
            if rows.size and sure:
                raise ShapesDifferError(
                    f"{_explain_shapes(self.a, self.b)}; {rows.size:,} tokens stand only in {which}"
                )
            if rows.size:
                self.note = f"{rows.size:,} tokens stand only in {which}: not compared"

    def _by_own_mask(self, facing: Facing, meaning: naming.Meaning) -> None:
        """No layout, but a response mask of the tensor's own shape narrows it (NexRL's forward_data)."""
        if meaning.region != "response":
            return
        masks = [side.find("response_mask") for side in (facing.a, facing.b)]
        present = [pages.array(ref).astype(bool) for ref in masks if ref is not None and ref.shape == self.a.shape]
        if not present:
            return
        counted = np.flatnonzero(np.logical_or.reduce(present))
        self.rows_a = self.rows_b = counted
        self.axes_a = self.axes_b = len(self.a.shape)
        self.masked = True

    @property
    def paddings_face(self) -> bool:
        """Whether the sides have one layout, so that every element faces one."""
        return self.a.shape == self.b.shape and np.array_equal(
            () if self.rows_a is None else self.rows_a, () if self.rows_b is None else self.rows_b
        )

    def counted(self) -> Iterator[tuple[Rows, Rows]]:
        if self.rows_a is None or self.rows_b is None:
            yield from self.whole()
            return
        width = _inner(self.a.shape, self.axes_a)
        rows_a, rows_b = pages.row_reader(self.a, width), pages.row_reader(self.b, width)
        step = max(1, CHUNK // max(1, width))
        for start in range(0, self.rows_a.size, step):
            yield rows_a(self.rows_a[start : start + step]), rows_b(self.rows_b[start : start + step])

    def whole(self) -> Iterator[tuple[Rows, Rows]]:
        width = self.width
        step = max(1, CHUNK // width) * width
        chunks = zip(pages.flat_chunks(self.a, step), pages.flat_chunks(self.b, step), strict=True)
        for (_, chunk_a), (_, chunk_b) in chunks:
            across = min(width, chunk_a.size)  # the end of a long vector is a shorter row
            yield chunk_a.reshape(-1, across), chunk_b.reshape(-1, across)

    @property
    def width(self) -> int:
        """Elements of a row of `whole`."""
        return _row_width(self.a.shape)

    def samples(self) -> Ints | None:
        """The sample of every row of `counted`, where the layout, the ragged rows or the shape tell."""
        if self.slots_a is not None and self.layout_a is not None:
            return self.layout_a.sample_BS.reshape(-1)[self.slots_a]
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
        flat_a = int(self.rows_a[row]) * _inner(self.a.shape, self.axes_a) + column
        flat_b = int(self.rows_b[row]) * _inner(self.b.shape, self.axes_b) + column
        return _unravel(flat_a, self.a.shape), _unravel(flat_b, self.b.shape)

    def token(self, row: int, column: int = 0) -> tuple[int, int] | None:
        """(sample, position) of a counted element, where the layout or the ragged rows tell."""
        if self.slots_a is not None and self.layout_a is not None:
            return self.layout_a.at(int(self.slots_a[row]))
        if self.a.rows is not None:
            ends = np.cumsum(self.a.rows)
            flat = row * self.width + column if self.rows_a is None else int(self.rows_a[row])
            sample = int(np.searchsorted(ends, flat, side="right"))
            return sample, flat - int(ends[sample] - self.a.rows[sample])
        if self.by_sample and len(self.a.shape) == 2:
            flat = row * self.a.shape[1] + column if self.rows_a is None else int(self.rows_a[row])
            return flat // self.a.shape[1], flat % self.a.shape[1]
        return None


def _alignment(ref: TensorRef, meaning: naming.Meaning, axes: TokenAxes) -> str:
    """full or next. A response slice [B, A] says in column j what is about response token j, whatever its kind."""
    if axes.offset:
        return "full"
    alignment = {"response": "full", None: meaning.alignment}.get(ref.alignment, ref.alignment)
    return "next" if alignment == "next" else "full"


def _inner(shape: tuple[int, ...], axes: int) -> int:
    return int(np.prod(shape[axes:], dtype=np.int64))


def _row_width(shape: tuple[int, ...]) -> int:
    """A row is the last axis; a vector is one row, as far as it fits a chunk."""
    width = max(1, shape[-1] if shape else 1)
    return min(width, CHUNK) if len(shape) == 1 else width


def _unravel(flat: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(part) for part in np.unravel_index(flat, shape)) if shape else ()


def _squeeze(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _explain_shapes(a: TensorRef, b: TensorRef) -> str:
    if a.rows is not None and b.rows is not None:
        row = next((i for i, (x, y) in enumerate(zip(a.rows, b.rows, strict=False)) if x != y), None)
        if row is not None:
            return f"row {row} has {a.rows[row]} elements in a and {b.rows[row]} in b"
        return f"a has {len(a.rows)} rows, b has {len(b.rows)}"
    if len(a.shape) == len(b.shape):
        axis = next(i for i, (x, y) in enumerate(zip(a.shape, b.shape, strict=True)) if x != y)
        longer = "a" if a.shape[axis] > b.shape[axis] else "b"
        return f"shape {list(a.shape)} against {list(b.shape)}: {longer} is longer on axis {axis}"
    return f"shape {list(a.shape)} against {list(b.shape)}"
