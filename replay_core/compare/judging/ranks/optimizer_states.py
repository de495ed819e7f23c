"""Moments after a step whose gradients agree: what the optimizer had of them before it, as it was loaded at a resume.

Adam's first moment is m' = b m + (1 - b) g. Of slices i and j of all weights laid end to end, that a sharded optimizer
keeps on a rank each, of which one rank holds what is the other's,

    m'_b[i] - m'_a[j]  =  (1 - b) (g[i] - g[j])

one number for all elements of the slices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from replay_core import pages
from replay_core.compare.judging.faults import Fault, is_open, whose
from replay_core.compare.judging.ranks.row import RowOfRanks
from replay_core.records import FileBytes, TensorRef
from replay_core.regexes import regex

if TYPE_CHECKING:
    from replay_core.compare.judging.tensors import TensorVerdict

F64 = NDArray[np.float64]

_MOMENT = regex(r"(?:^|\.)(exp_avg|exp_avg_sq|momentum_buffer|momentum)(?:\.|$)")
#: What part of a slice's moments one number may leave; elements that are laid end to end; the fewest of a slice.
_LEFT, _MOST, _FEWEST = 1e-3, 1 << 26, 16


class _Moment(Struct, frozen=True):
    """A weight's first moment after the step."""

    name: str
    whole: TensorRef
    laid: TensorRef
    is_off: bool


class OptimizerStates:
    """The moments of the first step that has any, and the gradients that it took."""

    def __init__(self) -> None:
        self._step: int | None = None
        self._first: TensorVerdict | None = None
        self._moments: dict[str, _Moment] = {}
        self._gradients: dict[str, tuple[TensorRef, bool]] = {}
        self._ranks: tuple[int, ...] = ()
        self._is_asked = False

    def note(self, of: RowOfRanks) -> None:
        """Take the next row of a step that was judged."""
        row = of.row
        if self._is_asked or of.step is None or row.skipped is not None:
            return
        if of.is_gradient:
            self._gradients[of.name.removeprefix("grad.")] = of.whole, row.verdict.diverges
        elif of.is_weight:
            if row.verdict.diverges and self._first is None:
                self._first = row
        elif row.key.stage == "optimizer" and (found := _MOMENT.search(of.name)) is not None:
            self._step, self._ranks = of.step, of.together.ranks
            if found[1] != "exp_avg_sq":
                name = (of.name[: found.start()] + "." + of.name[found.end() :]).strip(".")
                self._moments[name] = _Moment(name, of.whole, of.laid, row.verdict.diverges)

    def finish(self) -> tuple[TensorVerdict, Fault] | None:
        """What the weights of the first step with moments are off by, and its first row."""
        moments, gradients, first = list(self._moments.values()), dict(self._gradients), self._first
        self._is_asked = self._is_asked or bool(moments)
        self._moments.clear()
        self._gradients.clear()
        self._first = None
        off = [one for one in moments if one.is_off]
        if not off or first is None or first.ranks is None or not is_open(first.ranks.fault):
            return None
        if any(gradients.get(one.name, (None, True))[1] for one in moments):
            return None  # a gradient that is off, or is not recorded, makes them so
        how = _exchanged(moments, {name: ref for name, (ref, _) in gradients.items()}, self._ranks)
        return first, Fault(
            "optimizer's state", self._ranks if how is None else how[0],
            f"the moments of {len(off)} of {len(moments)} weights (first {off[0].name}) after step {self._step} are "
            f"others on {whose(self._ranks)}, and so are the weights, though the gradients of the step agree: what the "
            "optimizer held of the weights before the step is not the other run's (its state, as it was loaded or "
            f"sharded anew at a resume){'' if how is None else how[1]}",
        )  # fmt: skip


def _exchanged(
    moments: Sequence[_Moment], gradients: dict[str, TensorRef], ranks: tuple[int, ...]
) -> tuple[tuple[int, ...], str] | None:
    """Whose slices of all moments hold those of another rank's slice, and a sentence of which."""
    ordered = sorted(moments, key=_place)
    if len(ranks) < 2 or sum(one.whole.numel for one in ordered) > _MOST:
        return None
    if any(one.whole.shape != one.laid.shape or gradients[one.name].shape != one.whole.shape for one in ordered):
        return None
    there, here, gradient = (
        np.concatenate([pages.array(ref).astype(np.float64).reshape(-1) for ref in refs])
        for refs in (
            [one.whole for one in ordered], [one.laid for one in ordered], [gradients[one.name] for one in ordered],
        )
    )  # fmt: skip
    long = -(-there.size // len(ranks))
    if long < _FEWEST:
        return None
    cuts = [slice(at * long, min((at + 1) * long, there.size)) for at in range(len(ranks))]
    off = [at for at, cut in enumerate(cuts) if not _is_of(here[cut], there[cut], np.zeros(1))]
    found = {}
    for at in off:
        for other, cut in enumerate(cuts):
            size = min(cuts[at].stop - cuts[at].start, cut.stop - cut.start)
            own, from_ = slice(cuts[at].start, cuts[at].start + size), slice(cut.start, cut.start + size)
            if other != at and _is_of(here[own], there[from_], gradient[own] - gradient[from_]):
                found[at] = other
                break
    if not found or len(found) < len(off):
        return None
    said = ", ".join(f"rank {ranks[other]}'s where rank {ranks[at]}'s is due" for at, other in [*found.items()][:4])
    return tuple(ranks[at] for at in found), f": of all moments laid end to end, a slice to each rank, {said}"


def _is_of(here: F64, there: F64, along: F64) -> bool:
    """Whether the one is the other plus a multiple of what lies along the gradient."""
    rest, size = here - there, float(np.square(along).sum())
    if size:
        rest = rest - float(rest @ along) / size * along
    return float(np.linalg.norm(rest)) <= _LEFT * float(np.linalg.norm(there))


def _place(one: _Moment) -> tuple[str, int]:
    source = one.laid.source
    return (str(source.path), source.offset) if isinstance(source, FileBytes) else ("", 0)
