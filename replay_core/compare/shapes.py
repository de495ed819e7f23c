"""Why two shapes differ, in words: which side is longer, and which padding would explain it."""

from __future__ import annotations

from replay_core.records import TensorRef


def explain_shapes(a: TensorRef, b: TensorRef) -> str:
    """One sentence on two tensors whose elements do not face each other."""
    if a.rows is not None and b.rows is not None:
        row = next((i for i, (x, y) in enumerate(zip(a.rows, b.rows, strict=False)) if x != y), None)
        if row is not None:
            return f"row {row} has {a.rows[row]} elements in a and {b.rows[row]} in b"
        return f"a has {len(a.rows)} rows, b has {len(b.rows)}"
    if len(a.shape) == len(b.shape) and a.shape != b.shape:
        axis = next(i for i, (x, y) in enumerate(zip(a.shape, b.shape, strict=True)) if x != y)
        longer = "a" if a.shape[axis] > b.shape[axis] else "b"
        gap = abs(a.shape[axis] - b.shape[axis])
        return f"shape {list(a.shape)} against {list(b.shape)}: {longer} is longer on axis {axis}, by {gap}"
    return f"shape {list(a.shape)} against {list(b.shape)}"
