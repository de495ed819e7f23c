"""Context-parallel slices put back in the order of their tokens, as slime and miles cut them.

A sequence of T tokens is cut into 2n chunks of ceil(T / 2n); rank i of n holds chunks i and 2n - 1 - i. Where the
sequences of a batch are padded (qkv_format bshd), T is the padded length and the padding belongs to nobody. What is
said of a token stands with the logits before it, so the response of a prompt of P tokens reaches from logit P - 1 to
T - 2 (cp_utils.get_logits_and_tokens_offset_with_cp of both). A rank's tensor is its two stretches end to end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from replay_core.dtypes import ITEMSIZE
from replay_core.records import FileBytes, Inline, Parts, TensorRef

MAX_RANKS = 64


class Lengths(Struct, frozen=True):
    """Tokens of one sample; `padded` is what its row was padded to before it was cut."""

    total: int
    response: int
    padded: int | None = None


def stretches(lengths: Lengths, rank: int, ranks: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """First and last-plus-one response token of the rank's two chunks; (0, 0) where a chunk has none."""
    chunk = -(-(lengths.total if lengths.padded is None else lengths.padded) // (2 * ranks))
    prompt = lengths.total - lengths.response
    found = []
    for number in (rank, 2 * ranks - 1 - rank):
        first = max(number * chunk, prompt - 1)
        last = min((number + 1) * chunk, lengths.total - 1)
        found.append((first - prompt + 1, last - prompt + 1) if first < last else (0, 0))
    return found[0], found[1]


def is_sliced(rows: Sequence[int], samples: Sequence[Lengths]) -> bool:
    """Whether rows of these lengths are not the samples' responses."""
    return len(rows) == len(samples) and any(row != one.response for row, one in zip(rows, samples, strict=True))


def fits(rows: Sequence[int], samples: Sequence[Lengths], rank: int, ranks: int) -> bool:
    """Whether rows of these lengths are the slices of that rank."""
    return len(rows) == len(samples) and all(
        row == sum(last - first for first, last in stretches(one, rank, ranks))
        for row, one in zip(rows, samples, strict=True)
    )


def put_together(name: str, slices: Mapping[int, Sequence[Any]], samples: Sequence[Lengths]) -> TensorRef | None:
    """One column from every rank's rows; None where a rank's rows are no slices of the samples.

    Args:
        slices: rank of the context-parallel group -> its rows, 1-d tensors or lists of numbers.
    """
    ranks = len(slices)
    if sorted(slices) != list(range(ranks)):
        return None
    rows = {rank: [_ref(row) for row in column] for rank, column in slices.items()}
    for rank, column in rows.items():
        if any(row is None for row in column) or not fits([row.numel for row in column if row], samples, rank, ranks):
            return None
    parts: list[TensorRef] = []
    for number, one in enumerate(samples):
        for chunk in range(2 * ranks):
            rank = chunk if chunk < ranks else 2 * ranks - 1 - chunk
            before, after = stretches(one, rank, ranks)
            first, last = before if chunk < ranks else after
            start = 0 if chunk < ranks else before[1] - before[0]
            row = rows[rank][number]
            if row is not None and last > first:
                parts.append(_slice(row, start, last - first))
    if not parts or len({part.dtype for part in parts}) > 1:
        return None
    lengths = tuple(one.response for one in samples)
    shape = (len(lengths), lengths[0]) if len(set(lengths)) == 1 else (sum(lengths),)
    return TensorRef(name, parts[0].dtype, shape, Parts(tuple(parts)), rows=None if len(shape) == 2 else lengths)


def _ref(row: Any) -> TensorRef | None:
    """A row whose elements lie one after the other; None where it is none."""
    if isinstance(row, list) and all(isinstance(value, (int, float)) for value in row):
        return TensorRef("", "float64", (len(row),), Inline(row))
    if not isinstance(row, TensorRef) or len(row.shape) != 1 or row.dtype not in ITEMSIZE:
        return None
    source = row.source
    return row if isinstance(source, Inline) or (isinstance(source, FileBytes) and source.strides is None) else None


def _slice(row: TensorRef, start: int, count: int) -> TensorRef:
    source, size = row.source, ITEMSIZE[row.dtype]
    if isinstance(source, FileBytes):
        cut: FileBytes | Inline = FileBytes(
            source.path, source.offset + start * size, count * size, None, source.big_endian
        )
    elif isinstance(source, Inline) and isinstance(source.value, bytes):
        cut = Inline(source.value[start * size : (start + count) * size])
    else:
        cut = Inline(source.value[start : start + count] if isinstance(source, Inline) else [])
    return TensorRef("", row.dtype, (count,), cut)
