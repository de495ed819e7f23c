"""Rows that are there to fill the world size: verl's and ROLL's pad_dataproto_to_divisor, the TransferQueue's padding.

The padded batch is cut among the ranks like any other, and nothing in it says which rows are real, unless the
queue's tags do. Ids that come twice are not enough to say so: a group's rows share theirs, and a batch that is
balanced among ranks scatters them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from replay_core.file_spans import regular
from replay_core.records import FileBytes, Inline, TensorRef

_MAX_ROWS = 1 << 16


def repeated_rows(fields: Sequence[TensorRef]) -> list[str]:
    """What is to be said of rows that fill the world size; nothing where none do."""
    by_name = {ref.canonical: ref for ref in reversed(fields)}
    marks = _list(by_name.get("tags.is_padding"))
    if marks is not None and (count := sum(mark == 1 for mark in marks)):
        return [f"{count} rows are marked is_padding: one-token samples that fill the world size"]
    tokens = by_name.get("input_ids")
    for name in ("sample_id", "group_id"):
        ids = _list(by_name.get(name))
        if ids is not None and tokens is not None:
            copies = _copies(list(map(str, ids)), tokens)
            if copies:
                return [f"the last {copies} rows are copies of the first: they fill the world size"]
    return []


def _list(ref: TensorRef | None) -> list[object] | None:
    value = ref.source.value if ref is not None and isinstance(ref.source, Inline) else None
    return value if isinstance(value, list) else None


def _copies(ids: list[str], tokens: TensorRef) -> int:
    """How many rows at the end repeat the first ones: their ids are there once too often, and their tokens the same."""
    held = Counter(ids)
    counts = Counter(held.values())
    if len(counts) < 2 or len(ids) > _MAX_ROWS:
        return 0
    found = 0
    for copies in range(1, len(ids)):
        real = len(ids) - copies
        count = held[ids[real]]
        held[ids[real]] -= 1
        counts[count] -= 1
        if not counts[count]:
            del counts[count]
        if count > 1:
            counts[count - 1] += 1
        if (
            len(counts) == 1
            and all(ids[real + number] == ids[number % real] for number in range(copies))
            and all(_row(tokens, real + number) == _row(tokens, number % real) for number in range(min(copies, real)))
        ):
            found = copies  # the most rows that repeat: a batch of two rows fills a world of five with three
    return found if found and _row(tokens, 0) is not None else 0


def _row(ref: TensorRef, row: int) -> bytes | None:
    """The bytes of one row; None where they do not lie end to end."""
    if not ref.numel:
        return None
    size = ref.nbytes // ref.numel
    if ref.rows is None:
        width = ref.numel // ref.shape[0] * size
        start = row * width
    else:
        start, width = sum(ref.rows[:row]) * size, ref.rows[row] * size
    source = ref.source
    if isinstance(source, Inline) and isinstance(source.value, bytes):
        return source.value[start : start + width]
    if not isinstance(source, FileBytes) or source.strides is not None:
        return None
    with regular(source.path) as file:
        file.seek(source.offset + start)
        return file.read(width)
