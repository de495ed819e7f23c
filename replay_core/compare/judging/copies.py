"""What several ranks hold of one replicated tensor: a pair says nothing of a run whose ranks hold different ones."""

from __future__ import annotations

import numpy as np

from replay_core import pages
from replay_core.records import TensorRef


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
