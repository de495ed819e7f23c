"""How strongly a token is coloured by one of its numbers; every level has a sign of its own beside the colour."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from replay_core.documents.parts import Number
    from replay_core.documents.samples import SampleColumn

#: The strongest; 0 is a number that is nothing, None is no number.
STRONGEST = 4


def levels(column: SampleColumn, begin: int = 0) -> tuple[list[int | None], str]:
    """A level for each token from `begin` on, and what the strongest stands for.

    A ratio counts by its distance from 1, versions of the weights by their order, all others by their distance from 0:
    a quarter of the largest for each level.
    """
    values = column["values"][begin:]
    if column["name"] == "weight_version":
        known = sorted({value for value in values if isinstance(value, (int, float))})
        last = max(1, len(known) - 1)
        of = {value: math.ceil(STRONGEST * place / last) for place, value in enumerate(known)}
        newest = f"the newest of {len(known)}" if known else "none"
        return [of[value] if isinstance(value, (int, float)) else None for value in values], newest
    sizes = [_size(column["name"], value) for value in values]
    most = max((size for size in sizes if size is not None and math.isfinite(size)), default=0.0)
    is_signed = any(isinstance(value, (int, float)) and value < 0 for value in values)
    said = f"{most:.4g}" + (" from 1" if column["name"] == "ratio" else " from 0" if is_signed else "")
    return [None if size is None else _level(size, most) for size in sizes], said


def _size(name: str, value: Number | None) -> float | None:
    if value is None:
        return None
    if isinstance(value, str):  # nan, inf and -inf stand in a document as text
        return math.inf
    return abs(value - 1) if name == "ratio" else abs(value)


def _level(size: float, most: float) -> int:
    if not math.isfinite(size):
        return STRONGEST
    return math.ceil(STRONGEST * min(1.0, size / most)) if most and size else 0
