"""Gradients that are all multiples of the other run's: by one factor, as of another norm that they are clipped by or
another loss; or by factors that make the norm of each layer, or of each tensor, one number: clipped apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from replay_core import naming
from replay_core.compare.judging.faults import Fault, whose
from replay_core.regexes import regex

if TYPE_CHECKING:
    from replay_core.compare.judging.tensors import TensorVerdict

_LAYER = regex(r"(?:^|\.)(?:layers|layer|h|blocks|block)\.(\d{1,6})\.")
_FEWEST = 4
#: How far a gradient may be from a multiple of the other run's: of float32, of halves; what part of the squares of all
#: may be further off; and how near factors or norms that are one must be.
_LEFT, _REST, _ONE = (0.01, 0.08), 1e-3, (0.002, 0.02)


class _Multiple(Struct, frozen=True):
    row: TensorVerdict
    #: What the ranks have, of what the other run has; and the squares of their norm and of the other run's.
    factor: float
    square: float
    others: float


def scaled(rows: Sequence[TensorVerdict], every: tuple[int, ...]) -> tuple[Fault, TensorVerdict, int] | None:
    """What the factors of one step's gradients say, in which it is seen first, and in how many; None where one of them
    is no multiple of the other run's.

    rows: in order of computation.
    """
    first = next((row for row in rows if row.verdict.diverges and _is_of_a_weight(row)), None)
    if first is None:
        return None
    own = [row for row in rows if _is_of_a_weight(row) and row.key.step == first.key.step and row.figures is not None]
    is_half = any("16" in (row.a[1].dtype if row.a else "") for row in rows[:64])
    left_2 = size_2 = 0.0
    found: list[_Multiple] = []
    for row in own:
        assert row.figures is not None
        total = row.figures.total
        size_2 += total.a2
        off_2 = total.rel_l2**2 - total.gain**2
        if not off_2 <= (_LEFT[is_half] * (1 + total.gain)) ** 2 or total.gain <= -1:
            left_2 += total.a2
            continue
        of_a, of_b = total.a2, total.a2 * (1 + total.gain) ** 2
        if not of_a or not of_b:
            continue  # a gradient of zeros is a multiple of any
        factor = 1 + total.gain
        is_a = row.ranks is not None and row.ranks.which == "a"
        found.append(_Multiple(row, 1 / factor if is_a else factor, *((of_a, of_b) if is_a else (of_b, of_a))))
    if len(found) < _FEWEST or left_2 > _REST * size_2:
        return None
    near = _ONE[is_half]
    factors = [one.factor for one in found if one.square >= 1e-4 * max(each.square for each in found)]
    middle = sorted(factors)[len(factors) // 2]
    if all(abs(one - middle) <= near * middle for one in factors):
        if abs(middle - 1) <= 5 * near:
            return None
        return _one(middle, every), first, len(found)
    for words, key, call in (
        ("layer", _of_layer, "the gradients of a layer"), ("tensor", _of_tensor, "a gradient"),
    ):  # fmt: skip
        if (norm := _norm_of_each(found, key, near)) is not None:
            sentence = (
                f"the gradients of {whose(every)} are clipped {words} by {words}, each by its own norm, not all by "
                f"the norm of the whole: {call} is times one factor, of {min(factors):.3g} to {max(factors):.3g}, and "
                f"the norm of each is {norm:.4g} then"
            )
            return Fault("clipped apart", every, sentence), first, len(found)
    theirs = [_Multiple(one.row, 1 / one.factor, one.others, one.square) for one in found]
    for words, key in (("layer", _of_layer), ("tensor", _of_tensor)):
        if (norm := _norm_of_each(theirs, key, near)) is not None:
            sentence = (
                f"the gradients of the run that {whose(every)} are compared with are clipped {words} by {words}, each "
                f"to the norm {norm:.4g}, and those of {whose(every)} are not"
            )
            return Fault("clipped apart", every, sentence), first, len(found)
    return None


def _one(factor: float, every: tuple[int, ...]) -> Fault:
    fractions = ((n, m) for m in range(1, 17) for n in (m - 1, m + 1, 1) if n)
    fraction = next((f" = {n}/{m}" for n, m in fractions if abs(factor - n / m) < 2e-3 * factor), "")
    return Fault(
        "scaled", every,
        f"the gradients of {whose(every)} are all scaled by one factor ({factor:.4g}{fraction}), the same for all "
        "tensors: as of a loss that is scaled so (divided by another number of micro-batches, tokens or ranks), or as "
        "if clipped by another norm than the other run's",
        factor,
    )  # fmt: skip


def _norm_of_each(found: Sequence[_Multiple], key: Callable[[str], str], near: float) -> float | None:
    groups: dict[str, list[_Multiple]] = {}
    for one in found:
        groups.setdefault(key(one.row.name), []).append(one)
    norms = []
    for members in groups.values():
        most = max(one.square for one in members)
        if not most:
            continue  # a gradient of zeros has no norm to be clipped to
        factors = [one.factor for one in members if one.square >= 1e-4 * most]
        if max(factors) - min(factors) > 2 * near * max(factors):
            return None
        norms.append(sum(one.square for one in members) ** 0.5)
    # What is smaller than the norm it is clipped to stays.
    most = max(norms, default=0.0)
    clipped = [norm for norm in norms if abs(norm - most) <= 5 * near * most]
    return most if len(clipped) >= 2 and 2 * len(clipped) >= len(norms) else None


def _of_layer(name: str) -> str:
    found = _LAYER.search(name)
    return found[1] if found is not None else ""


def _of_tensor(name: str) -> str:
    return name


def _is_of_a_weight(row: TensorVerdict) -> bool:
    return row.name.startswith("grad.") and not naming.is_module_tensor(row.name)
