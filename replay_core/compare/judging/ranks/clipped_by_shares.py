"""Weights after a step whose gradients agree, each rank's scaled by the norm of what that rank holds.

Of gradients that are clipped by one norm N to the most c, a rate l makes the step -l c g / N; a rank r that takes the
norm n_r of the gradients it owns makes it -l c g / n_r. Its weights are then off by

    -l c (1 / n_r - 1 / N) g

along their own gradient, and all ranks by one number l c times what their norms tell.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct, field

from replay_core import pages
from replay_core.compare.judging.algebra import in_groups
from replay_core.compare.judging.faults import Fault, whose
from replay_core.compare.judging.products import Array
from replay_core.compare.judging.ranks.row import MOST, RowOfRanks
from replay_core.compare.pairing.ranks import HeldByRanks, named
from replay_core.records import TensorRef

if TYPE_CHECKING:
    from replay_core.compare.judging.tensors import TensorVerdict

#: What part of a weight's difference may be across its gradient, and of the greatest number what each is off by.
_ACROSS, _OFF = 0.05, 0.02
#: Fewer weights are scaled so by chance, and norms that are nearer to each other tell no ranks apart.
_FEWEST, _APART = 3, 0.02
#: How far what ranks' norms tell is apart, in what is left to chance.
_MORE = 4.0


class _OfRole(Struct):
    """The gradients of a step that agree, and what its weights are off along them."""

    gradients: dict[str, tuple[TensorRef, HeldByRanks]] = field(default_factory=dict)
    #: By rank, the squares of all that it holds; and those of all gradients, each once.
    squares: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    total: float = 0.0
    along: list[tuple[int, float]] = field(default_factory=list)
    rows: list[TensorVerdict] = field(default_factory=list)
    is_other: bool = False


class ClippedByShares:
    """Asks of a step's gradients and weights, of which each rank owns some."""

    def __init__(self) -> None:
        self._of_roles: dict[str | None, _OfRole] = defaultdict(_OfRole)
        #: Roles whose weights were off in an earlier step: what they are off later is of that.
        self._asked: set[str | None] = set()

    def note(self, of: RowOfRanks) -> None:
        """Take the next row of a step that was judged."""
        role, row = of.row.key.role, of.row
        if role in self._asked or not (of.is_gradient or of.is_weight):
            return
        known = self._of_roles[role]
        if of.is_gradient:
            known.is_other |= row.verdict.diverges or row.skipped is not None
            if known.is_other or not of.name.endswith((".weight", ".bias")) or not of.whole.is_readable:
                return
            known.is_other |= of.whole.numel > MOST
            known.gradients[of.name.removeprefix("grad.")] = of.whole, of.held
            return
        if known.is_other or row.skipped is not None:
            return
        known.rows += [row] if row.verdict.diverges else []
        gradient = known.gradients.get(of.name.removeprefix("param."))
        if gradient is None or gradient[0].shape != of.whole.shape or of.laid.shape != of.whole.shape:
            return
        for places, ranks, block in _blocks(*gradient):
            square = float(np.square(block).sum())
            known.total += square
            for rank in ranks:
                known.squares[rank] += square
            if not square or not row.verdict.diverges:
                continue
            for rank, own in _off(of, places, ranks):
                size, times = float(np.linalg.norm(own)), float((own * block).sum()) / square
                if size and float(np.linalg.norm(own - times * block)) > _ACROSS * size:
                    known.is_other = True
                    return
                known.along += [(rank, times)] * bool(size)

    def finish(self) -> list[tuple[TensorVerdict, Fault, list[TensorVerdict]]]:
        """Of each role whose weights were off along their gradients as clipping by each rank's own norm makes them: the
        first such row, what is said of it, and all rows that are explained by it.
        """
        found = []
        for role, known in self._of_roles.items():
            if known.rows:
                self._asked.add(role)
                if not known.is_other and (fault := _fault(known)) is not None:
                    found.append((known.rows[0], fault, known.rows))
        self._of_roles.clear()
        return found


def _blocks(whole: TensorRef, held: HeldByRanks) -> Iterator[tuple[tuple[Any, ...], tuple[int, ...], Array]]:
    """The slices of a gradient: where each lies, on which ranks, and the other run's values of it."""
    for block, own in in_groups(whole, held):
        stretches = held.stretches[held.ranks.index(own.ranks[0])] if held.axis is not None else ()
        places: tuple[Any, ...] = ()
        if held.axis is not None:
            at = np.concatenate([np.arange(start, start + long) for start, long in stretches])
            places = (*(slice(None),) * held.axis, at)
        yield places, own.ranks, pages.array(block).astype(np.float64)


def _off(of: RowOfRanks, places: tuple[Any, ...], ranks: tuple[int, ...]) -> Iterator[tuple[int, Array]]:
    """What a slice of a weight is off by, of the first rank that has the slice's gradient and steps it; of a weight
    whose gradient the ranks have whole as well, each's.
    """
    there = pages.array(of.whole).astype(np.float64)
    if of.held.is_cut or set(ranks) != set(of.held.ranks):
        yield ranks[0], (pages.array(of.laid).astype(np.float64) - there)[places]
        return
    for rank, ref in zip(of.held.ranks, of.held.parts, strict=True):
        if ref.shape == of.whole.shape and ref.is_readable:
            yield rank, pages.array(ref).astype(np.float64) - there


def _fault(known: _OfRole) -> Fault | None:
    total = known.total
    if len(known.squares) < 2 or len(known.along) < _FEWEST or not all(known.squares.values()):
        return None
    norms = {rank: square**0.5 for rank, square in known.squares.items()}
    if max(norms.values()) < (1 + _APART) * min(norms.values()):
        return None
    asked = {norms[rank] for rank, _ in known.along}
    told = np.array([1 / norms[rank] - total**-0.5 for rank, _ in known.along])
    if told.max() - told.min() < _MORE * _OFF * np.abs(told).max():
        return None  # another rate makes the same of ranks whose norms are near each other
    times = np.array([one for _, one in known.along])
    rate = -float(times @ told) / float(told @ told)
    if len(asked) < 2 or rate <= 0 or np.abs(times + rate * told).max() > _OFF * np.abs(times).max():
        return None
    ranks = tuple(sorted(norms))
    alike: dict[str, list[int]] = {}
    for rank in ranks:
        alike.setdefault(f"{norms[rank]:.4g}", []).append(rank)
    said = ", ".join(f"{norm} on {named(members)}" for norm, members in alike.items())
    return Fault(
        "clipped apart", ranks,
        f"the weights of {whose(ranks)} moved further along their gradients, which agree, each rank's by as much as a "
        f"clipping by the norm of the gradients it holds makes ({said}; of all {total**0.5:.4g}): the norm is not "
        f"summed over the ranks before it clips (to {np.abs(times + rate * told).max() / np.abs(times).max():.1g})",
    )  # fmt: skip
