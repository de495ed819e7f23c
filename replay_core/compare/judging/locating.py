"""Where to look in a pair: the element shown, and the token furthest off."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from replay_core import naming, pages
from replay_core.compare.judging.verdict import EXACT_KINDS, Verdict
from replay_core.compare.pairing.align import Rowwise

if TYPE_CHECKING:
    from replay_core.compare.judging.tensors import TensorVerdict


def locate(row: TensorVerdict, rows: Rowwise, row_limit: float | None) -> None:
    """Where to look: what is not finite, else the first mismatch of exact kinds, else the first token past its
    limit, else the largest difference."""
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
        row.raw_a, row.raw_b = rows.index(*at)
        row.token = rows.token(*at)
        row.value_a = pages.element(rows.a, row.raw_a)
        row.value_b = pages.element(rows.b, row.raw_b)


def _largest_in_row(rows: Rowwise, row: int, fallback: tuple[int, int] | None) -> tuple[int, int] | None:
    for chunk_a, chunk_b in rows.counted(row):
        with np.errstate(invalid="ignore", over="ignore"):
            x, y = chunk_a[0], chunk_b[0]
            wide = np.complex128 if np.iscomplexobj(x) or np.iscomplexobj(y) else np.float64
            gap = np.abs(y.astype(wide) - x.astype(wide))
        return (row, int(np.nanargmax(gap))) if not np.isnan(gap).all() else fallback
    return fallback
