"""Two tensors under the glass: how their differences are spread, and where along rows or channels (tier 2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from replay_core.compare.pairing.align import (
    MicroBatchPair,
    Rowwise,
    ShapesDifferError,
    TensorPair,
    pair_micro_batches,
    pair_tensors,
)
from replay_core.errors import RequestError
from replay_core.measure.distribution import spread
from replay_core.records import Record, TensorRef

if TYPE_CHECKING:
    from replay_core.documents.difference import StripEntry, StripPlace, TokenPlace

AXES = ("row", "channel")


def difference(
    records_a: Sequence[Record], records_b: Sequence[Record], a: TensorRef, b: TensorRef, *, axis: str, cells: int
) -> StripEntry:
    """Distribution and strip of the differences between two tensors of paired records, JSON-able but for NaN.

    A row is a token where the layout tells, and its cell then names (sample, position).

    Args:
        axis: `row` (token) or `channel` (the last axis).
        cells: how many cells the strip has at most.

    Raises:
        RequestError: no such axis, the two do not face each other, or their elements do not.
        DumpError: the bytes of one cannot be read.
    """
    if axis not in AXES:
        raise RequestError(f"there is no axis {axis!r}", expected=" or ".join(AXES), found=axis)
    if cells < 1:
        raise RequestError("a strip has at least one cell", expected="1 or more", found=str(cells))
    _, micro_pair = _micro_pair(records_a, records_b, a, b)
    try:
        rows = Rowwise(a, b, micro_pair)
    except ShapesDifferError as error:
        raise RequestError(f"the two cannot be laid over each other: {error}", tensor=a.name) from None
    first = next(rows.counted(), None)
    if first is None or not first[0].size:
        raise RequestError("no element of the two counts", tensor=a.name)
    width = first[0].shape[1]
    count = rows.rows_a.size if rows.rows_a is not None else -(-a.numel // width)
    found, strip = spread(rows.counted(), width if axis == "channel" else count, cells, by_column=axis == "channel")

    def token(row: int) -> TokenPlace | None:
        at = rows.token(row) if axis == "row" else None
        return None if at is None else {"sample": at[0], "position": at[1]}

    def place(at: int) -> StripPlace:
        raw_a, raw_b = rows.index(*((at, 0) if axis == "row" else (0, at)))
        return {"token": token(at), "raw_a": list(raw_a), "raw_b": list(raw_b)}

    return {
        "axis": "row" if axis == "row" else "channel",
        **found.to_mapping(),
        "strip": [
            {
                "start": cell.start,
                "end": cell.end,
                "token": token(cell.start),
                "max_abs": cell.max_abs,
                "rel_l2": cell.rel_l2,
                "at": place(cell.at),
            }
            for cell in strip
        ],
    }


def _micro_pair(
    records_a: Sequence[Record], records_b: Sequence[Record], a: TensorRef, b: TensorRef
) -> tuple[TensorPair, MicroBatchPair]:
    micro_pairs, _ = pair_micro_batches(list(records_a), list(records_b))
    for micro_pair in micro_pairs:
        micro_pair.a.load()
        micro_pair.b.load()
        for pair in pair_tensors(micro_pair):
            if pair.a is not None and pair.b is not None and pair.a[1] == a and pair.b[1] == b:
                return pair, micro_pair
    raise RequestError(
        "the two tensors are not a pair",
        tensor=a.name,
        expected="the same meaning in the same micro-batch of two runs",
        found=f"{a.canonical or a.name} and {b.canonical or b.name}",
    )
