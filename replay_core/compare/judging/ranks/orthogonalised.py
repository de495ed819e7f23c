"""Weights after a first step of an optimizer that orthogonalises a matrix' update (Muon, Jordan et al. 2024), which
each rank made of its own slice of the matrix.

The step is -c O(G), where O brings all singular values of a matrix near 1 by five turns or so of

    X  <-  a X + (b X X' + c (X X')^2) X        from G / |G|

or to 1, where it is made so exactly.

O of the slices, laid together, is not O of the whole. From equal weights and gradients the runs are then off by
c O(G) - c' [O(G_1), O(G_2), ...], two numbers for all elements of a matrix.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from replay_core import pages
from replay_core.compare.judging.faults import Fault, whose
from replay_core.compare.judging.ranks.row import RowOfRanks
from replay_core.compare.pairing.ranks import HeldByRanks
from replay_core.records import TensorRef

if TYPE_CHECKING:
    from replay_core.compare.judging.tensors import TensorVerdict

F64 = NDArray[np.float64]

#: Of the iteration: its factors, and how often it is made.
_FACTORS, _TURNS = (3.4445, -4.7750, 2.0315), (5, 6)
#: What part of a difference may be left, which halves in the iteration leave; and fewer matrices say so by chance.
_LEFT, _FEWEST = 0.1, 2
#: Elements of a matrix, matrices that are asked, and what part of all that are off is to be explained.
_MOST, _ASKED, _MOSTLY = 1 << 20, 12, 0.8


class _Off(Struct):
    """A matrix that is off after its step: its row, and the other run's gradients that it may have stepped by."""

    row: TensorVerdict
    off: F64
    gradients: list[TensorRef]
    held: HeldByRanks


class Orthogonalised:
    """Asks of the first step whose weights are off though their gradients agree."""

    def __init__(self) -> None:
        #: By role and name: the other run's gradients of this step and the one before, those that agree. Weights that
        #: are recorded before their step were made of the earlier one.
        self._gradients: dict[tuple[str | None, str], list[tuple[int, TensorRef]]] = {}
        self._off: dict[str | None, list[_Off]] = {}
        #: All matrices that are off, those too that are not asked.
        self._matrices: dict[str | None, list[TensorVerdict]] = {}
        self._asked: set[str | None] = set()
        self._every: tuple[int, ...] = ()

    def note(self, of: RowOfRanks) -> None:
        """Take the next row of a step that was judged."""
        role, name, row = of.row.key.role, of.name.partition(".")[2], of.row
        if role in self._asked or not (of.is_gradient or of.is_weight) or of.step is None:
            return
        if of.is_gradient:
            if not row.verdict.diverges:
                self._gradients[role, name] = [*self._gradients.get((role, name), [])[-1:], (of.step, of.whole)]
            return
        if not row.verdict.diverges or row.skipped is not None or len(of.whole.shape) != 2:
            return
        self._matrices.setdefault(role, []).append(row)
        self._every = of.together.ranks
        known = self._gradients.get((role, name))
        if not known or of.whole.numel > _MOST or len(self._off.get(role, ())) >= _ASKED:
            return
        if of.laid.shape != of.whole.shape or any(ref.shape != of.whole.shape for _, ref in known):
            return
        off = pages.array(of.laid).astype(np.float64) - pages.array(of.whole).astype(np.float64)
        near = [ref for step, ref in known[::-1] if step >= of.step - 1]
        self._off.setdefault(role, []).append(_Off(row, off, near, of.held))

    def finish(self) -> list[tuple[TensorVerdict, Fault, list[TensorVerdict]]]:
        """Of each role whose weights were first off in this step: the first row that is explained, what is said of it,
        and all rows of matrices that are off.
        """
        found = []
        for role, every in self._off.items():
            self._asked.add(role)
            explained = []
            for one in every:
                if (cut := self._made_of_slices(one)) is not None:
                    explained.append((one.row, cut))
                elif not explained:
                    break  # the first matrix says what is asked of all
            if len(explained) < max(_FEWEST, _MOSTLY * len(every)):
                continue
            ranks, (row, (words, left)) = self._every, explained[0]
            found.append((row, Fault(
                "orthogonalised apart", ranks,
                f"{row.name.removeprefix('param.')} on {whose(ranks)} moved by what orthogonalising (Newton-Schulz, as "
                f"Muon does) each rank's slice of its gradient by itself makes ({words}), where the other run's moved "
                f"by that of the whole matrix; the gradients agree (made again from them, to {left:.1g} of the "
                f"difference; {len(explained)} of {len(every)} matrices asked): the slices are not gathered before it",
            ), self._matrices[role]))  # fmt: skip
        self._off.clear()
        self._matrices.clear()
        return found

    def _made_of_slices(self, one: _Off) -> tuple[str, float] | None:
        """How a matrix is cut whose slices' own steps make the difference, and what that leaves."""
        size = float(np.linalg.norm(one.off))
        for ref in one.gradients:
            gradient = pages.array(ref).astype(np.float64)
            if not np.isfinite(gradient).all() or not gradient.any() or not size:
                continue
            for turns, (words, axis, cuts) in product((*_TURNS, None), self._cuts(one, gradient.shape)):
                whole = _orthogonalised(gradient, turns)
                sliced = np.concatenate([_orthogonalised(np.take(gradient, at, axis), turns) for at in cuts], axis)
                made = np.empty_like(sliced)
                order = np.concatenate(cuts)
                made[(slice(None),) * axis + (order,)] = sliced
                sides = np.stack([whole.reshape(-1), -made.reshape(-1)], axis=1)
                times, *_ = np.linalg.lstsq(sides, one.off.reshape(-1), rcond=None)
                left = float(np.linalg.norm(one.off.reshape(-1) - sides @ times)) / size
                if left <= _LEFT and times.min() > 0:
                    return words, left
        return None

    def _cuts(self, one: _Off, shape: tuple[int, ...]) -> Iterator[tuple[str, int, list[NDArray[np.int64]]]]:
        """The ways in which the matrix may be cut: as its ranks hold it; or evenly, of what they recorded gathered."""
        lines = ("rows", "columns")
        if one.held.is_cut and one.held.axis is not None:
            places = sorted(set(one.held.stretches))
            cuts = [np.concatenate([np.arange(at, at + long) for at, long in place]) for place in places]
            yield f"{len(places)} slices of its {lines[one.held.axis]}", one.held.axis, cuts
            return
        count = len(self._every)
        for axis in (0, 1):
            for many in (count, *(n for n in range(2, count) if count % n == 0)):
                if shape[axis] % many == 0 and shape[axis] > many > 1:
                    yield f"{many} slices of its {lines[axis]}", axis, np.split(np.arange(shape[axis]), many)


def _orthogonalised(gradient: F64, turns: int | None) -> F64:
    """turns: how often the iteration is made; None: exactly."""
    if turns is None:
        left, _, right = np.linalg.svd(gradient, full_matrices=False)
        return np.asarray(left @ right)
    size = float(np.linalg.norm(gradient))
    if not size:
        return gradient
    x = gradient / size
    is_tall = x.shape[0] > x.shape[1]
    x = x.T if is_tall else x
    one, two, three = _FACTORS
    for _ in range(turns):
        square = x @ x.T
        x = one * x + (two * square + three * square @ square) @ x
    return x.T if is_tall else x
