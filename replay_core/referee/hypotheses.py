"""What may have been done instead: a change of one module, under which its inputs give its outputs.

A hypothesis is a change of the running module (its weight, a setting, a buffer, what attention sees). The module is run
again on its recorded inputs with the change in place; how far the truth moves is held against the error, in sigma: the
matched filter alpha = <z, G>/<G, G>, z = error/sigma, G = move/sigma. A hypothesis explains the error if noise is left
and alpha is 1, for all tokens or for those that it was done to. Of several the one that leaves least is said, never the
one that points the right way most: a wrong one points there too when the error is large.

Some changes have a size (a part that was left out, added twice, or by a factor; an adapter): alpha is that size. Some
have a value to be found (a scaling): by Newton's steps. Some move nothing and only round more: the noise is drawn
again with them.

Some are kernels' own and harmless: sums over ranks rounded between, rotary frequencies kept in the model's dtype. They
are recipes: what they explain is no bug, and is said.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from msgspec import Struct

from replay_core.referee import limits
from replay_core.referee.arithmetic import SIGNIFICAND, Noise, Rounding, exactly, nearest
from replay_core.referee.figures import ErrorFigures, Yardstick
from replay_core.referee.shadow import Claim, Shadow

#: A harmless recipe changes a tensor by at most so much of its size.
_HARMLESS = 0.02
#: How far alpha may be from what a hypothesis says, and how many of its own deviations it must be from 0.
_ALPHA, _SURE = 0.1, 8.0
#: Newton's steps towards a value.
_STEPS = 4


class Hypothesis(Struct, frozen=True):
    """A change of a module: `change(module)` makes it for as long as it is open.

    harmless: a kernel's own way. sized: alpha -> what a change of that size is called; None where it is done or not.
    value: the change made as much as x says, x = 0 none: found so that noise is left; `name` has {value} for 1 + x.
    coarse: it moves nothing, its operations round to this dtype.
    """

    name: str
    change: Callable[[Any], Any]
    harmless: bool = False
    sized: Callable[[float], str] | None = None
    value: Callable[[float], Callable[[Any], Any]] | None = None
    coarse: torch.dtype | None = None


class Tried(Struct, frozen=True):
    """A hypothesis, what it is called with its size, what it leaves of the error, and whether it explains it."""

    name: str
    hypothesis: Hypothesis
    before: ErrorFigures
    after: ErrorFigures
    explains: bool


def harmless(claim: Claim) -> float:
    """How much of a tensor's size a harmless recipe may change. A rotary table is stored in the claim's dtype whatever
    its frequencies were: what moves it by no more than a unit of the last place there is a rounding. Beyond it is a
    fault of precision that grows with the position: whole radians at token 1000.
    """
    return 2.0 ** (1 - SIGNIFICAND[claim.dtype][0]) if claim.kind == "rope" else _HARMLESS


def tried(
    shadow: Shadow,
    claim: Claim,
    yard: Yardstick,
    before: ErrorFigures,
    hypotheses: Iterable[Hypothesis],
) -> list[Tried]:
    """Hypotheses of the claim's owner: those that explain first, of these the one that leaves least."""
    module = shadow.changed(claim)
    found = []
    for one in hypotheses:
        if one.coarse is not None:
            made = _coarse(shadow, claim, module, one, before)
        elif one.value is not None:
            made = _valued(shadow, claim, module, yard, one, before)
        else:
            moved = _moved(shadow, claim, module, one.change)
            made = None if moved is None else held(one, yard, before, moved[yard.rows])
        if made is not None:
            found.append(made)
    return sorted(found, key=lambda one: (not one.explains, one.after.left))


def _moved(
    shadow: Shadow, claim: Claim, module: Any, change: Callable[[Any], Any], rounding: Rounding = exactly
) -> torch.Tensor | None:
    """How far the truth moves under a change; None where the module's own code does not run with it."""
    try:
        moved = shadow.again(claim, change(module), rounding)
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError, KeyError):
        return None
    is_usable = moved is not None and moved.shape == claim.truth.shape and bool(moved.isfinite().all())
    return moved if is_usable else None


def is_quietly(yard: Yardstick, moved: torch.Tensor) -> bool:
    """Whether an error that is no larger than noise has a hypothesis in it: alpha is 1, and surely not 0.

    Noise in the direction of a move has alpha 0 with a deviation of 1/|G|.
    """
    toward = moved[yard.rows].double() / yard.sigma
    power = float(toward.square().sum())
    sure = _SURE * (1 if yard.claim.dtype != torch.float32 else limits.FLOAT32)
    if power < sure * sure:
        return False
    alpha = float((yard.error / yard.sigma * toward).sum()) / power
    return abs(alpha - 1) < _ALPHA and alpha * power**0.5 > sure


def is_bitwise(shadow: Shadow, yard: Yardstick, before: ErrorFigures, change: Callable[[Any], Any]) -> bool:
    """Whether what was recorded is, bit for bit, what the module's code rounds to with a change, and without it is not:
    every operation rounded to the nearest, or once at its end."""
    claim = yard.claim
    for rounding in (nearest, exactly):
        moved = _moved(shadow, claim, shadow.changed(claim), change, rounding)
        if moved is None:
            return False
        unequal = yard.unequal(moved[yard.rows])
        if unequal <= limits.UNEQUAL and unequal * limits.RUNNER_UP <= before.unequal:
            return True
    return False


def held(one: Hypothesis, yard: Yardstick, before: ErrorFigures, moved: torch.Tensor) -> Tried | None:
    """A hypothesis that moves the truth by `moved` [rows, C] against the error; None where it moves nothing."""
    z, toward = yard.error / yard.sigma, moved / yard.sigma
    power = float(toward.square().sum())
    if power == 0:
        return None
    alpha = float((z * toward).sum()) / power
    if one.sized is not None:
        part = alpha if abs(alpha - round(alpha)) > _ALPHA or round(alpha) == 0 else float(round(alpha))
        after = yard.figures(part * moved)
        explains = before.is_explained_by(after, is_fitted=part != round(part)) and abs(alpha) * power**0.5 > _SURE
        return Tried(one.sized(part), one, before, after, explains)
    after = yard.figures(moved)
    if (
        one.harmless
        and after.unequal_once <= limits.UNEQUAL
        and after.unequal_once * limits.RUNNER_UP <= before.unequal_once
    ):
        # A partial sum beside a half is rounded up by one kernel and down by another: rare, and never far.
        return Tried(one.name, one, before, after, after.largest <= 2.0)
    if abs(alpha - 1) < _ALPHA or one.harmless:
        is_sure = after.excess < 0.5 * before.excess or (abs(alpha - 1) < _ALPHA and alpha * power**0.5 > _SURE)
        fits = after.excess < 1 if one.harmless else before.is_explained_by(after)
        return Tried(one.name, one, before, after, fits and is_sure)
    # Done to some tokens only: to those that are nearer to it.
    taken = (z - toward).square().sum(1) < z.square().sum(1)
    count = int(taken.sum())
    if not 0 < count < len(taken):
        return Tried(one.name, one, before, after, False)
    some = torch.where(taken[:, None], moved, 0.0)
    share = torch.where(taken[:, None], toward, 0.0)
    alpha = float((z * share).sum()) / float(share.square().sum())
    after = yard.figures(some)
    explains = before.is_explained_by(after) and abs(alpha - 1) < _ALPHA and alpha * float(share.norm()) > _SURE
    return Tried(f"{one.name}, for {count} of {len(taken)} tokens", one, before, after, explains)


def _valued(
    shadow: Shadow, claim: Claim, module: Any, yard: Yardstick, one: Hypothesis, before: ErrorFigures
) -> Tried | None:
    assert one.value is not None
    x, step, moved = 0.0, 1e-3, torch.zeros_like(yard.error)
    for _ in range(_STEPS):
        beyond = _moved(shadow, claim, module, one.value(x + step))
        if beyond is None:
            return None
        slope = (beyond[yard.rows] - moved) / step / yard.sigma
        power = float(slope.square().sum())
        if power == 0:
            return None
        x = min(max(x + float(((yard.error - moved) / yard.sigma * slope).sum()) / power, 0.3 * x - 0.7), 3 * x + 2)
        there = _moved(shadow, claim, module, one.value(x))
        if there is None:
            return None
        moved = there[yard.rows]
    after = yard.figures(moved)
    is_sure = float((moved / yard.sigma).norm()) > _SURE
    return Tried(one.name.format(value=1 + x), one, before, after, before.is_explained_by(after) and is_sure)


def _coarse(shadow: Shadow, claim: Claim, module: Any, one: Hypothesis, before: ErrorFigures) -> Tried | None:
    runs = []
    for number in range(limits.RUNS):
        moved = _moved(shadow, claim, module, one.change, Noise(number, limits.ACCUMULATION, within=one.coarse))
        if moved is None:
            return None
        runs.append(moved)
    after = Yardstick(claim, runs).figures()
    # Noise that is far too large hides everything and explains nothing.
    return Tried(one.name, one, before, after, after.excess < 1 and after.statistics["size"][0] > 0.5)
