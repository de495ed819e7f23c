"""Which rows of a long list are shown, and in which order, found between two keys: in slices, never all at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from heapq import merge
from itertools import islice
from typing import TYPE_CHECKING

from tui_debugger.tensor_list import TensorList
from tui_debugger.tensor_rows import ROW_CAP, SORTS, Places, TensorRow, comparison_rows, matching, order_key

if TYPE_CHECKING:
    from replay_core.documents.comparison import ComparisonDocument

#: Rows looked at between two keys: some milliseconds.
SLICE = 2_000
#: Rows made between two keys.
AT_ONCE = 1_000


async def listed(
    tensors: TensorList, document: ComparisonDocument, told: Callable[[], None]
) -> tuple[list[TensorRow], list[int], Places]:
    """A comparison's rows, those of them to be shown, and what tells their records apart.

    `told` is called with every slice; what is typed meanwhile counts.
    """
    rows: list[TensorRow] = []
    coming = comparison_rows(document.get("tensors") or [], document.get("first_divergence"))
    places = Places()
    while fresh := list(islice(coming, AT_ONCE)):
        rows += fresh
        places.add(fresh)
        told()
        await asyncio.sleep(0)
    asked: tuple[str, str] | None = None
    ready: list[int] = []
    while asked != (tensors.filter, tensors.sort):
        asked = tensors.filter, tensors.sort
        wanted = tensors.wanted()
        ready = await shown(rows, wanted if tensors.filter else None, tensors.sort)
    return rows, ready, places


async def shown(rows: Sequence[TensorRow], wanted: Callable[[str], object] | None, sort: str) -> list[int]:
    """The indexes that the filter lets through (None: all), in one of the SORTS; equals in the order of computation."""
    hits: list[int] = []
    if wanted is None:
        hits = list(range(len(rows)))
    else:
        for start in range(0, len(rows), SLICE):
            hits += matching(rows, wanted, start, start + SLICE)
            await asyncio.sleep(0)
    if sort == SORTS[0]:
        return hits[:ROW_CAP]
    key = order_key(sort)
    runs = []
    for start in range(0, len(hits), SLICE):
        runs.append(sorted((key(rows[index]), index) for index in hits[start : start + SLICE]))
        await asyncio.sleep(0)
    found: list[int] = []
    in_order: Iterator[int] = (index for _, index in merge(*runs))
    while len(found) < ROW_CAP and (some := list(islice(in_order, SLICE))):
        found += some
        await asyncio.sleep(0)
    return found[:ROW_CAP]
