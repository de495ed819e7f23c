"""Weights after a first step of an optimizer that orthogonalises a matrix' update (Muon, Jordan et al. 2024), which
each rank made of its own slice of the matrix.

The step is -c O(G), where O brings all singular values of a matrix near 1 by five turns or so of

    X  <-  a X + (b X X' + c (X X')^2) X        from G / |G|

or to 1, where it is made so exactly.

O of the slices, laid together, is not O of the whole. From equal weights and gradients the runs are then off by
c O(G) - c' [O(G_1), O(G_2), ...], two numbers for all elements of a matrix. So it is with every other function of a
whole matrix: second moments that are factored into those of rows and columns (Adafactor), or a norm that the step is
divided by (LARS, LAMB's trust ratio). Where O(G) is made of the whole and only scaled by the slice's shape, one number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
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
#: How far apart the factors of matrices are that one factor of all makes: of the norm that all are clipped by.
_ONE = 0.01
#: How nearly along the gradient itself what is off may lie; and how far apart slices' factors are.
_ALONG, _APART = 0.99, 0.02
#: And how near nothing the least of them is, where a slice is right.
_UNMOVED = 1e-3
_TRUST = "scaling"


class _Off(Struct):
    """A matrix that is off after its step: its row, and the other run's gradients that it may have stepped by."""

    row: TensorVerdict
    off: F64
    gradients: list[TensorRef]
    held: HeldByRanks


class _SteppedBy(Struct):
    """What makes a difference: a function of a matrix, how it is cut (not at all: ""), and what that leaves."""

    how: str
    words: str
    left: float


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
            if _is_one_factor(every):
                continue
            for one in every:
                if (cut := self._made_of_slices(one)) is not None:
                    explained.append((one.row, cut))
                elif not explained:
                    break  # the first matrix says what is asked of all
            if len(explained) < max(_FEWEST, _MOSTLY * len(every)):
                continue
            ranks, (row, made) = self._every, explained[0]
            kind = "orthogonalised apart" if made.words else "step scaled"
            fault = Fault(kind, ranks, _said(row, ranks, made, len(explained), len(every)))
            found.append((row, fault, self._matrices[role]))
        self._off.clear()
        self._matrices.clear()
        return found

    def _made_of_slices(self, one: _Off) -> _SteppedBy | None:
        """How a matrix is cut whose slices' own steps make the difference, and what that leaves."""
        size = float(np.linalg.norm(one.off))
        for ref in one.gradients:
            gradient = pages.array(ref).astype(np.float64)
            if not np.isfinite(gradient).all() or not gradient.any() or not size:
                continue
            off_N = one.off.reshape(-1)
            for (how, way), (words, axis, cuts) in product(_WAYS, self._cuts(one, gradient.shape)):
                whole = way(gradient)
                sliced = np.concatenate([way(np.take(gradient, at, axis)) for at in cuts], axis)
                made = np.empty_like(sliced)
                order = np.concatenate(cuts)
                made[(slice(None),) * axis + (order,)] = sliced
                sides = np.stack([whole.reshape(-1), -made.reshape(-1)], axis=1)
                times, *_ = np.linalg.lstsq(sides, off_N, rcond=None)
                left = float(np.linalg.norm(off_N - sides @ times)) / size
                if left <= _LEFT and times.min() > 0:
                    return _SteppedBy(how, words, left)
            for how, way in _WAYS[: len(_TURNS) + 1]:
                whole_N = way(gradient).reshape(-1)
                times_1 = float(whole_N @ off_N / (whole_N @ whole_N))
                left = float(np.linalg.norm(off_N - times_1 * whole_N)) / size
                # What is off along the gradient itself has other causes.
                if left <= _LEFT and abs(float(gradient.reshape(-1) @ off_N)) < _ALONG * size * np.linalg.norm(
                    gradient
                ):
                    return _SteppedBy(how, "", left)
            if (apart := self._by_own_factors(one, gradient, size)) is not None:
                return apart
        return None

    def _by_own_factors(self, one: _Off, gradient: F64, size: float) -> _SteppedBy | None:
        """Whether each slice is off along Adam's first step (the gradient's signs) by a factor of its own."""
        signs = np.sign(gradient)
        for words, axis, cuts in self._cuts(one, gradient.shape):
            left, factors = 0.0, []
            for at in cuts:
                own, off = np.take(signs, at, axis).reshape(-1), np.take(one.off, at, axis).reshape(-1)
                factors.append(float(own @ off / max(float(own @ own), 1.0)))
                left += float(np.square(off - factors[-1] * own).sum())
            if min(map(abs, factors)) <= _UNMOVED * max(map(abs, factors)):
                continue  # a slice that is not off at all is stepped as due, and others may be not at all
            # One factor on all is another learning rate.
            if left**0.5 <= _LEFT * size and np.ptp(factors) > _APART * max(map(abs, factors)):
                return _SteppedBy(_TRUST, words, left**0.5 / size)
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


def _is_one_factor(every: list[_Off]) -> bool:
    """Whether all matrices are off along their gradients by one factor: another rate, or another norm that all are
    clipped by. Norms of matrices differ, and what is divided by them is off by a factor of each.
    """
    factors = []
    for one in every:
        size = float(np.linalg.norm(one.off))
        found = None
        for ref in one.gradients:
            gradient = pages.array(ref).astype(np.float64)
            square = float(np.square(gradient).sum())
            if not np.isfinite(square) or not square or not np.isfinite(size):
                continue
            times = float((gradient * one.off).sum()) / square
            if float(np.linalg.norm(one.off - times * gradient)) <= _LEFT * size:
                found = times
                break
        if found is None:
            return False
        factors.append(found)
    return len(factors) >= _FEWEST and np.ptp(factors) <= _ONE * abs(float(np.median(factors)))


def _said(row: TensorVerdict, ranks: tuple[int, ...], made: _SteppedBy, explained: int, every: int) -> str:
    name = row.name.removeprefix("param.")
    agree = (
        f"the gradients agree (made again from them, to {made.left:.1g} of the difference; {explained} of {every} "
        "matrices asked)"
    )
    if not made.words:
        return (
            f"{name} on {whose(ranks)} moved along what {made.how} the whole gradient makes, as the other run's, and "
            f"by another multiple of it; {agree}: the factor is taken of the shape of a rank's slice, or the learning "
            "rate of these matrices is another"
        )
    if made.how == _TRUST:
        return (
            f"{name} on {whose(ranks)} moved along Adam's step, each rank's slice of it by a factor of its own "
            f"({made.words}), where the other run's moved by one; {agree}: a norm that the step is scaled by (the "
            "trust ratio of LAMB and LARS, a clipped update) is taken over each rank's slice and not over the whole"
        )
    return (
        f"{name} on {whose(ranks)} moved by what {made.how} each rank's slice of its gradient by itself makes "
        f"({made.words}), where the other run's moved by that of the whole matrix; {agree}: the slices are not "
        "gathered before it"
    )


def _factored(gradient: F64) -> F64:
    """The first step of Adafactor (Shazeer & Stern 2018): second moments are the outer product of those of rows and of
    columns, and the step's root mean square is at most 1.
    """
    square = np.square(gradient) + 1e-30
    row, column = square.mean(1, keepdims=True), square.mean(0, keepdims=True)
    step = gradient / np.sqrt(row * column / row.mean())
    return np.asarray(step / max(1.0, float(np.sqrt(np.square(step).mean()))))


def _of_norm(gradient: F64) -> F64:
    return np.asarray(gradient / (float(np.linalg.norm(gradient)) or 1.0))


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


#: Functions of a whole matrix that steps are made by, and words for them; orthogonalising first.
_WAYS: tuple[tuple[str, Callable[[F64], F64]], ...] = (
    *(("orthogonalising (Newton-Schulz, as Muon does)", partial(_orthogonalised, turns=turns))
      for turns in (*_TURNS, None)),
    ("dividing by second moments of rows and columns (as Adafactor does)", _factored),
    ("dividing by the norm of (as LARS and normalised descent do)", _of_norm),
)  # fmt: skip
