"""Where to look in a pair: the element shown, the one furthest off, and the token furthest off."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct

from replay_core import naming, pages
from replay_core.compare.judging.verdict import EXACT_KINDS, Verdict
from replay_core.compare.pairing.align import Rowwise
from replay_core.measure.integers import exact_difference

if TYPE_CHECKING:
    from replay_core.compare.judging.tensors import TensorVerdict


class FurthestElement(Struct):
    """The element of a pair with the greatest difference: where it is, as of a `TensorVerdict`, and both values."""

    raw_a: tuple[int, ...]
    raw_b: tuple[int, ...]
    value_a: Any
    value_b: Any
    token: tuple[int, int] | None = None
    sample_b: int | None = None


def locate(row: TensorVerdict, rows: Rowwise, row_limit: float | None) -> None:
    """Where to look: what is not finite, else the first mismatch of exact kinds, else the first token past its
    limit, else the largest difference; and where that is, where something else is shown."""
    counted = row.figures
    assert counted is not None
    must_be_equal = naming.meaning(row.name).kind in EXACT_KINDS | {"positions"}
    shown = counted.nonfinite or (counted.first if must_be_equal else None) or counted.greatest or counted.first
    at = shown.at if shown else None
    if shown is counted.greatest and row.verdict is Verdict.DIFF and row_limit is not None and rows.slots_a is not None:
        past = np.flatnonzero(counted.rows.rel > row_limit)
        at = _largest_in_row(rows, int(past[0]), at) if past.size else at
    worst = counted.rows.worst
    if worst is not None and (token := rows.token(worst[0])) is not None:
        row.worst_token = (*token, worst[1])
    if at is not None:
        show_element(row, rows, at)


def show_element(row: TensorVerdict, rows: Rowwise, at: tuple[int, int]) -> None:
    """Let a row show the element at (row, column) of the rows compared, and the furthest where that is another."""
    row.raw_a, row.raw_b, row.value_a, row.value_b, row.token = _element(rows, at)
    greatest = None if row.figures is None else row.figures.greatest
    if row.figures is not None and greatest is not None and greatest.at != at:
        row.figures.kept["furthest"] = FurthestElement(*_element(rows, greatest.at))


def furthest(row: TensorVerdict) -> FurthestElement | None:
    """Where the difference is greatest, where the element shown is another."""
    return None if row.figures is None else row.figures.kept.get("furthest")


def _element(
    rows: Rowwise, at: tuple[int, int]
) -> tuple[tuple[int, ...], tuple[int, ...], Any, Any, tuple[int, int] | None]:
    raw_a, raw_b = rows.index(*at)
    return raw_a, raw_b, pages.element(rows.a, raw_a), pages.element(rows.b, raw_b), rows.token(*at)


def _largest_in_row(rows: Rowwise, row: int, fallback: tuple[int, int] | None) -> tuple[int, int] | None:
    for chunk_a, chunk_b in rows.counted(row):
        with np.errstate(invalid="ignore", over="ignore"):
            x, y = chunk_a[0], chunk_b[0]
            wide = np.complex128 if np.iscomplexobj(x) or np.iscomplexobj(y) else np.float64
            whole = exact_difference(x, y)
            gap = np.abs(y.astype(wide) - x.astype(wide) if whole is None else whole)
        return (row, int(np.nanargmax(gap))) if not np.isnan(gap).all() else fallback
    return fallback
