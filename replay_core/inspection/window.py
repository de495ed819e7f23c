"""Some values of a tensor, or of two side by side, around a place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from replay_core import pages
from replay_core.errors import RequestError
from replay_core.records import TensorRef

if TYPE_CHECKING:
    from replay_core.documents.parts import Value
    from replay_core.documents.tensor import ValuesWindow

Place = tuple[int, ...]


def inside(at: list[int], ref: TensorRef) -> bool:
    return len(at) == len(ref.shape) and all(0 <= i < n for i, n in zip(at, ref.shape, strict=True))


def of_row(at: list[int], ref: TensorRef) -> list[int]:
    """A place that is named by its row, of ragged rows stored one after the other; others are what they are."""
    if ref.rows is None or len(at) != len(ref.shape) + 1 or not 0 <= at[0] < len(ref.rows):
        return at
    row, place, *rest = at
    return [sum(ref.rows[:row]) + place, *rest] if 0 <= place < ref.rows[row] else at


def starts(
    a: TensorRef, b: TensorRef | None, at: list[int] | None, known: tuple[Place, Place | None] | None = None
) -> tuple[Place, Place | None]:
    """Where the window begins on either side; None where which element of b belongs beside a's is not known.

    Args:
        at: a place of both; the first element where nobody names one.
        known: a place of either side, where somebody knows that the two belong together.

    Raises:
        RequestError: `at` lies outside a.
    """
    # Another shape is another layout: the same raw index there is another token.
    same = b is not None and b.shape == a.shape
    if at is None and known is not None:
        return known[0], known[1] if known[1] is not None else (known[0] if same else None)
    at = None if at is None else of_row(at, a)
    if at is not None and not inside(at, a):
        raise RequestError(
            "the index lies outside the tensor",
            tensor=a.name,
            expected=f"an index into {list(a.shape)}"
            + ("" if a.rows is None else f", or a row (0 to {len(a.rows) - 1}) and a place in it"),
            found=str(at),
        )
    place = (0,) * len(a.shape) if at is None else tuple(at)
    return place, place if same else None


def window(a: TensorRef, b: TensorRef | None, start_a: Place, start_b: Place | None, count: int) -> ValuesWindow:
    """Up to `count` values of the last axis around the start, both sides, and their difference b - a.

    Only a's where its place in b is not known. Only the place itself where the last axis is laid out otherwise in b:
    the elements after it need not be the same tokens.
    """
    if start_b is not None and b is not None and not _share_last_axis(a, b):
        count = min(count, 1)
    if a.is_text or not a.is_readable:
        return {"index": [], "a": [], "b": None, "d": None}
    first_a, values_a = _row(a, start_a, count)
    prefix = list(start_a[:-1])
    index = [[*prefix, first_a + i] for i in range(len(values_a))] if a.shape else [[]]
    if b is None or start_b is None or b.is_text or not b.is_readable:
        return {"index": index, "a": values_a, "b": None, "d": None}
    _, values_b = _row(b, start_b, count, first_a if b.shape and a.shape and b.shape[-1] == a.shape[-1] else None)
    size = min(len(values_a), len(values_b))
    with np.errstate(invalid="ignore", over="ignore"):
        kind = np.complex128 if any(ref.dtype.startswith("complex") for ref in (a, b)) else np.float64
        d = np.asarray(values_b[:size], dtype=kind) - np.asarray(values_a[:size], dtype=kind)
    both = zip(values_a[:size], values_b[:size], strict=True)
    # Integers are subtracted as such: doubles do not tell those of 64 bits apart.
    gaps = [y - x if type(x) is int and type(y) is int else gap for (x, y), gap in zip(both, d.tolist(), strict=True)]
    return {"index": index, "a": values_a, "b": values_b, "d": gaps}


def _share_last_axis(a: TensorRef, b: TensorRef) -> bool:
    """Whether the last axis means the same on both sides: it is the channels', or the shapes are equal altogether."""
    return a.shape == b.shape or (min(len(a.shape), len(b.shape)) > 2 and a.shape[-1] == b.shape[-1])


def _row(ref: TensorRef, start: Place, count: int, first: int | None = None) -> tuple[int, list[Value]]:
    if not ref.shape:
        return 0, [pages.array(ref).item()]
    width = ref.shape[-1]
    if first is None:
        # A quarter of the window before the place, so that it is seen among its neighbours.
        first = max(0, min(start[-1] - count // 4, width - count))
    if not ref.numel:
        return first, []
    spans: list[Any] = [*((place, place + 1) for place in start[:-1]), (first, max(first, min(first + count, width)))]
    return first, pages.part(ref, spans).reshape(-1).tolist()
