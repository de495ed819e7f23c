"""What several ranks hold of one replicated tensor: a pair says nothing of a run whose ranks hold different ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from replay_core import pages
from replay_core.records import TensorRef

#: Of the norm: as far as a sum may be off, and as far as each part alone must be. Fewer elements add up by chance.
_SUMMED, _ALONE, _FEWEST = 0.01, 0.1, 8
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


def unsummed(a: TensorRef, b: TensorRef) -> str | None:
    """Of two that diverge: in which run the ranks hold parts whose sum is what the other run holds, in a sentence.

    That is what a gradient looks like whose sum over the ranks was not made. None where the copies of a run are alike,
    where one of them alone is as near, and where their sum is farther from the other's than rounding and 1 %.

    Raises:
        DumpError: the bytes of a copy cannot be read.
    """
    for which, parts, other, whole in (("b", b, "a", a), ("a", a, "b", b)):
        ranks = (parts, *parts.copies)
        if not {parts.dtype, whole.dtype} <= _FLOATS:
            continue
        alike = [one.shape == whole.shape and one.dtype == parts.dtype for one in ranks]
        if len(ranks) < 2 or not all(alike) or whole.numel < _FEWEST or _apart(parts) is None or _apart(whole):
            continue
        off, alone, size = _distances(whole, ranks)
        if size > 0 and off <= _SUMMED * size and alone > _ALONE * size:
            return (
                f"the copies of {which}'s {len(ranks)} ranks add up to {other}'s (to {off / size:.1g} of its norm), "
                "and none is near it alone: their sum was not made"
            )
    return None


def _distances(whole: TensorRef, ranks: Sequence[TensorRef]) -> tuple[float, float, float]:
    """How far the ranks' sum is from the whole, how far the nearest rank alone is, and the whole's own norm."""
    off, size, alone = 0.0, 0.0, [0.0] * len(ranks)
    chunks = [pages.flat_chunks(one) for one in (whole, *ranks)]
    with np.errstate(invalid="ignore", over="ignore"):  # a NaN is near nothing
        for pieces in zip(*chunks, strict=True):
            held, *shares = (piece.astype(np.float64) for _, piece in pieces)
            off += float(np.square(np.sum(shares, axis=0) - held).sum())
            size += float(np.square(held).sum())
            alone = [far + float(np.square(share - held).sum()) for far, share in zip(alone, shares, strict=True)]
    return off**0.5, min(alone) ** 0.5, size**0.5


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
