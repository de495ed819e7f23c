"""A list of samples becomes columns: one field per key, its rows laid end to end, never copied.

[{"tokens": tensor[38], "reward": 0.5}, {"tokens": tensor[31], "reward": 1.0}]
    ->  tokens  [69], rows (38, 31)        reward  [2]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from replay_core.budget import spend_values
from replay_core.dumps.fields import MAX_FIELDS, NULL, end_to_end, flatten, join, prose
from replay_core.dumps.instances import plain
from replay_core.errors import DumpError
from replay_core.records import Inline, TensorRef


def table(samples: Sequence[dict[Any, Any]], prefix: str = "") -> list[TensorRef]:
    """Columns of a list of dicts, in order of first appearance. A key no sample has a value for is no field.

    Raises:
        DumpError: more columns than any record has.
    """
    keys = list(dict.fromkeys(key for sample in samples for key in sample))
    spend_values(len(keys) * len(samples), f"the {len(samples):,} rows of {len(keys):,} columns")
    if len(keys) > MAX_FIELDS:
        raise DumpError("the file holds too many fields", expected=f"at most {MAX_FIELDS:,}", found=f"{len(keys):,}")
    return columns({f"{prefix}{key}": [sample.get(key) for sample in samples] for key in keys})


def columns(values: dict[str, Sequence[Any]], depth: int = 0) -> list[TensorRef]:
    """Columns by name, each a value per sample (None: the sample has none)."""
    found: list[TensorRef] = []
    for name, wrapped in values.items():
        column = [plain(value) for value in wrapped]
        present = [value for value in column if value is not None]
        if not present:
            continue
        if depth < 8 and all(isinstance(value, dict) and "__class__" not in value for value in present):
            inner = list(dict.fromkeys(key for value in present for key in value))
            spend_values(len(inner) * len(column), f"the {len(column):,} rows of {len(inner):,} columns")
            found += columns(
                {f"{name}.{key}": [None if v is None else v.get(key) for v in column] for key in inner}, depth + 1
            )
        elif any(isinstance(value, TensorRef) for value in present) and (joined := join(name, column)) is not None:
            found.append(joined)
        elif len(present) < len(column) and all(isinstance(value, (list, tuple)) for value in present):
            # A sample without the list has no tokens of it: its row is empty, and row i stays sample i.
            found += flatten({name: [[] if value is None else value for value in column]})
        elif (texts := prose(name, column)) is not None:
            found.append(texts)
        elif len(present) < len(column) and all(type(value) in (int, float, bool) for value in present):
            numbers = [math.nan if value is None else float(value) for value in column]
            found.append(TensorRef(name, "float64", (len(numbers),), Inline(numbers), sentinel=NULL))
        else:
            found += flatten({name: list(column)})
    return [_said(ref, values) for ref in found]


def _said(ref: TensorRef, values: dict[str, Sequence[Any]]) -> TensorRef:
    """One value per sample is said of the sample."""
    column = values.get(ref.name)
    is_vector = column is not None and ref.shape == (len(column),) and ref.rows is None
    return ref.with_(alignment="sample") if is_vector else ref


def blocks_of_rows(name: str, blocks: Sequence[TensorRef]) -> TensorRef | None:
    """Blocks [n, L] of different widths as one ragged column of rows; a matrix when all are equally wide."""
    if len({(block.dtype, block.shape[2:]) for block in blocks}) != 1 or any(len(block.shape) < 2 for block in blocks):
        return None
    rows = tuple(block.shape[1] for block in blocks for _ in range(block.shape[0]))
    tail = blocks[0].shape[2:]
    if len({block.shape[1] for block in blocks}) == 1:
        return end_to_end(name, blocks[0], blocks, (len(rows), blocks[0].shape[1], *tail))
    return end_to_end(name, blocks[0], blocks, (sum(rows), *tail)).with_(rows=rows)
