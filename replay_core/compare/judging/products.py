"""Inner products of tensors, made in one pass: the norm of every sum and difference of them follows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from replay_core import pages
from replay_core.records import TensorRef

Array = NDArray[np.float64]

#: How far, of a norm, what explains a difference may be from it.
NEAR = 0.01


class InnerProducts:
    """Inner products of some vectors, from which the norm of every combination of them follows."""

    def __init__(self, gram: Array, off: Array, finite: tuple[bool, ...]) -> None:
        """off: of every vector, the square of its distance from the first, as it is added up: of two that are nearly
        alike too little is left of their inner products. These tell distances between others to 1e-6 of their norms.
        """
        self._gram, self._off = gram, off
        #: Of every vector, whether all of it is finite; what is not counts as 0.
        self.finite = finite

    def norm(self, weights: dict[int, float]) -> float:
        """Of the sum of the vectors with these weights."""
        places = list(weights)
        if len(places) == 2 and 0 in weights and sorted(weights.values()) == [-1, 1]:
            return float(self._off[max(places)] ** 0.5)
        vector = np.array([weights[place] for place in places])
        return float(max(0.0, vector @ self._gram[np.ix_(places, places)] @ vector) ** 0.5)

    def factor(self, weights: dict[int, float], of: int) -> float | None:
        """What multiple of one vector another is; None where it is none, or is off by no factor."""
        ((place, weight),) = weights.items()
        factor = self.multiple(place, of)
        return weight * factor if factor is not None and abs(weight * factor - 1) > 2 * NEAR else None

    def multiple(self, place: int, of: int) -> float | None:
        """What multiple of one vector another is, 1 as well; None where it is none."""
        if not self._gram[of, of]:
            return None
        factor = float(self._gram[place, of] / self._gram[of, of])
        left = self._gram[place, place] - factor * factor * self._gram[of, of]
        return factor if left <= (NEAR * NEAR) * max(self._gram[place, place], 1e-300) else None


def products_of(refs: Sequence[TensorRef]) -> InnerProducts:
    count = len(refs)
    gram = np.zeros((count, count))
    off = np.zeros(count)
    finite = np.ones(count, bool)
    for chunk in _chunks(refs):
        known = np.isfinite(chunk)
        if not known.all():
            finite &= known.all(1)
            chunk[~known] = 0
        gram += chunk @ chunk.T
        chunk -= chunk[0].copy()
        off += np.einsum("ij,ij->i", chunk, chunk)
    return InnerProducts(gram, off, tuple(finite.tolist()))


def _chunks(refs: Sequence[TensorRef]) -> Iterator[Array]:
    """The values of tensors of one shape side by side [tensor, element], some at a time."""
    elements = max(1024, pages.CHUNK // len(refs))
    for pieces in zip(*(pages.flat_chunks(ref, elements) for ref in refs), strict=True):
        yield np.stack([piece.astype(np.float64) for _, piece in pieces])
