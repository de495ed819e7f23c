"""Which ranks have a copy of their own of what several ranks hold."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from msgspec.structs import replace

from replay_core import pages
from replay_core.compare.pairing.ranks import HeldByRanks, standing_for
from replay_core.records import TensorRef


def other_copies(held: HeldByRanks) -> Iterator[tuple[int, TensorRef]]:
    """Ranks whose copy is not, byte for byte, that of the first rank with the same; and the tensor as they have it."""
    first: dict[object, int] = {}
    for number, (rank, ref) in enumerate(zip(held.ranks, held.parts, strict=True)):
        at = first.setdefault(held.stretches[number] if held.is_cut else None, number)
        one = held.parts[at]
        if at == number or (ref.dtype == one.dtype and ref.shape == one.shape and is_same(one, ref)):
            continue
        parts = (*held.parts[:at], ref, *held.parts[at + 1 :])
        yield rank, standing_for(replace(held, parts=parts)) if held.is_cut else ref


def is_same(one: TensorRef, other: TensorRef) -> bool:
    """Whether two copies hold the same: texts, bytes, or numbers that are equal (NaN is NaN)."""
    if one.is_text or other.is_text:
        return one.dtype == other.dtype and getattr(one.source, "value", None) == getattr(other.source, "value", None)
    known = pages.same_bytes(one, other)
    if known is None:
        return bool(np.array_equal(pages.array(one), pages.array(other), equal_nan=one.dtype.startswith("float")))
    return known
