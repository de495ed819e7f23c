"""Why two shapes differ, in words: which side is longer, and which padding would explain it."""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec import Struct

from replay_core import pages
from replay_core.errors import DumpError
from replay_core.records import TensorRef

#: A tensor is looked at for padding up to this size.
MOST_LOOKED_AT = 1 << 24


class Padding(Struct, frozen=True):
    """What one side has beyond the other on axis 1: `count` columns at one end that hold a single value."""

    longer: str
    at: str
    count: int
    value: Any


def explain_shapes(a: TensorRef, b: TensorRef) -> str:
    """One sentence on two tensors whose elements do not face each other."""
    if a.rows is not None and b.rows is not None:
        row = next((i for i, (x, y) in enumerate(zip(a.rows, b.rows, strict=False)) if x != y), None)
        if row is not None:
            return f"row {row} has {a.rows[row]} elements in a and {b.rows[row]} in b"
        return f"a has {len(a.rows)} rows, b has {len(b.rows)}"
    if len(a.shape) != len(b.shape) or a.shape == b.shape:
        return f"shape {list(a.shape)} against {list(b.shape)}"
    axis = next(i for i, (x, y) in enumerate(zip(a.shape, b.shape, strict=True)) if x != y)
    longer = "a" if a.shape[axis] > b.shape[axis] else "b"
    gap = abs(a.shape[axis] - b.shape[axis])
    said = f"shape {list(a.shape)} against {list(b.shape)}: {longer} is longer on axis {axis}, by {gap}"
    padding = padding_between(a, b)
    if padding is None:
        return said
    return f"{said}; its {padding.at} {padding.count} columns are all {padding.value}, as padding would be"


def padding_between(a: TensorRef, b: TensorRef) -> Padding | None:
    """The padding that would make two [B, S, ...] tensors of different S the same shape; None where none would."""
    same = len(a.shape) == len(b.shape) >= 2 and a.shape[0] == b.shape[0] and a.shape[2:] == b.shape[2:]
    if not same or a.shape[1] == b.shape[1] or a.rows is not None or b.rows is not None:
        return None
    longer, ref = ("a", a) if a.shape[1] > b.shape[1] else ("b", b)
    if ref.numel > MOST_LOOKED_AT or ref.is_text or not ref.is_readable or not min(a.numel, b.numel):
        return None
    try:
        values = pages.array(ref)
    except DumpError:
        return None
    count = abs(a.shape[1] - b.shape[1])
    for at, extra in (("last", values[:, -count:]), ("first", values[:, :count])):
        first = extra.reshape(-1)[0]
        if bool(np.all(extra == first)):
            return Padding(longer, at, count, first.item())
    return None
