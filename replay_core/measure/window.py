"""A stretch of a tensor somebody asked to see: `0:4,:8` into indices, values in rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replay_core import pages
from replay_core.errors import RequestError
from replay_core.records import TensorRef

if TYPE_CHECKING:
    from replay_core.documents.tensor import SliceEntry

#: Values a person asked for at once; more belongs into a file.
MAX_VALUES = 4096


def parse_slices(text: str) -> list[list[int | None]]:
    """`0:4,:8` or `3,:` as [start, end] per axis (None: open), a single index as [i, i + 1].

    Raises:
        RequestError: it is no such text.
    """
    axes: list[list[int | None]] = []
    for part in text.split(","):
        start, colon, end = part.strip().partition(":")
        try:
            first = int(start) if start else None
            axes.append([first, int(end) if end else None] if colon else [int(start), int(start) + 1])
        except ValueError:
            raise RequestError(
                f"cannot read the slice {text!r}", expected="spans with commas between, like 0:4,:8", found=part
            ) from None
    return axes


def sliced(ref: TensorRef, axes: list[list[int | None]]) -> SliceEntry:
    """The stretch's place, shape and values; at most MAX_VALUES of them, `left_out` says how many more there are.

    For a tensor of ragged rows the first axis is the row: `2,:8` is the beginning of sample 2.

    Raises:
        RequestError: more axes than the tensor has, or nothing lies there.
    """
    if not ref.is_readable:
        raise RequestError("the tensor cannot be read", tensor=ref.name)
    if ref.rows is not None and len(axes) > 1 and axes[0][0] is not None and axes[0][1] == axes[0][0] + 1:
        return _sliced_row(ref, axes[0][0], axes[1:])
    if len(axes) > len(ref.shape):
        raise RequestError(
            "the slice has more axes than the tensor", tensor=ref.name,
            expected=f"at most {len(ref.shape)}", found=str(len(axes)),
        )  # fmt: skip
    spans = [_span(axis, size) for axis, size in zip(axes, ref.shape, strict=False)]
    values = pages.part(ref, spans)
    if not values.size:
        raise RequestError("nothing lies in the slice", tensor=ref.name, expected=f"a part of {list(ref.shape)}")
    flat = values.reshape(-1)
    return {
        "row": None,
        "start": [span[0] for span in spans] + [0] * (len(ref.shape) - len(spans)),
        "shape": list(values.shape),
        "values": flat[:MAX_VALUES].tolist(),
        "left_out": max(0, flat.size - MAX_VALUES),
    }


def _sliced_row(ref: TensorRef, row: int, axes: list[list[int | None]]) -> SliceEntry:
    rows = ref.rows or ()
    if not 0 <= row < len(rows):
        raise RequestError("there is no such row", tensor=ref.name, expected=f"0 to {len(rows) - 1}", found=str(row))
    begin = sum(rows[:row])
    start, end = _span(axes[0], rows[row])
    inner = sliced(ref, [[begin + start, begin + end], *axes[1:]])
    inner.update({"row": row, "start": [start, *inner["start"][1:]]})
    return inner


def _span(axis: list[int | None], size: int) -> tuple[int, int]:
    """The span within the axis, negative ends counted from its end."""
    start, end, _ = slice(*axis).indices(size)
    return start, max(start, end)
