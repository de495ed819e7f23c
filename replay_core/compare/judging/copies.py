"""What several ranks hold of one replicated tensor: a pair says nothing of a run whose ranks hold different ones."""

from __future__ import annotations

import numpy as np

from replay_core import pages
from replay_core.compare.judging import algebra
from replay_core.compare.pairing.ranks import HeldByRanks, Together, Which
from replay_core.records import TensorRef

_FLOATS = {"float64", "float32", "float16", "bfloat16"}


def parted(a: TensorRef, b: TensorRef) -> str | None:
    """In which run the ranks' copies of a tensor differ, in a sentence; None where they are all alike.

    None as well where every rank of a holds what its counterpart in b holds: the two runs then agree.

    Raises:
        DumpError: the bytes of a copy cannot be read.
    """
    said = [f"{which}: {why}" for which, ref in (("a", a), ("b", b)) if (why := _apart(ref)) is not None]
    if not said:
        return None
    every = [(a, *a.copies), (b, *b.copies)]
    alike = len(every[0]) == len(every[1]) and all(_unequal(x, y) == 0 for x, y in zip(*every, strict=True))
    return None if alike else "replicated, and its copies differ in " + "; in ".join(said)


def explained(name: str, a: TensorRef, b: TensorRef) -> str | None:
    """Of two that diverge: what the ranks' copies of one run are to what the other run holds, in a sentence.

    Raises:
        DumpError: the bytes of a copy cannot be read.
    """
    sides: tuple[tuple[Which, TensorRef, TensorRef], ...] = (("b", b, a), ("a", a, b))
    for which, parts, whole in sides:
        ranks = (parts, *parts.copies)
        if not {parts.dtype, whole.dtype} <= _FLOATS or len(ranks) < 2 or _apart(parts) is None or _apart(whole):
            continue
        if any(one.shape != whole.shape or one.dtype != parts.dtype for one in ranks):
            continue
        numbers = tuple(range(len(ranks)))
        found = algebra.explain(name, whole, Together(which, numbers, "none", {}), HeldByRanks(numbers, ranks))
        if found.fault is not None:
            return f"copies of {which}, counted as ranks from 0: {found.fault.sentence}"
    return None


def _apart(ref: TensorRef) -> str | None:
    unequal = [_unequal(ref, copy) for copy in ref.copies]
    if not any(unequal):
        return None
    number, elements = sum(map(bool, unequal)), f"{max(unequal):,} of {ref.numel:,} elements"
    return f"{number} of {len(unequal)} others are not the first rank's, in up to {elements}"


def _unequal(one: TensorRef, other: TensorRef) -> int:
    """Elements whose bytes differ."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return max(one.numel, other.numel)
    if pages.same_bytes(one, other):
        return 0
    count = 0
    for (_, x), (_, y) in zip(pages.flat_chunks(one), pages.flat_chunks(other), strict=True):
        size = x.dtype.itemsize
        bytes_x, bytes_y = (np.ascontiguousarray(part).view(np.uint8).reshape(-1, size) for part in (x, y))
        count += int(np.count_nonzero((bytes_x != bytes_y).any(axis=1)))
    return count
