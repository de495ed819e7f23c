"""Gradients that are all multiples of the other run's: by one factor, as of another norm that they are clipped by or
another loss; by one of each rank, or factors that make the norm of each layer, or of each tensor, one number: clipped
apart; or by one factor, and those of experts (or another part of the model) by another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from replay_core import naming
from replay_core.compare.judging.faults import Fault, whose
from replay_core.regexes import regex

if TYPE_CHECKING:
    from replay_core.compare.judging.tensors import TensorVerdict

_LAYER = regex(r"(?:^|\.)(?:layers|layer|h|blocks|block)\.(\d{1,6})\.")
_WORD = regex(r"[A-Za-z_]{2,64}")
_FEWEST = 4
#: How far a gradient may be from a multiple of the other run's: of float32, of halves; what part of the squares of all
#: may be further off; and how near factors or norms that are one must be.
_LEFT, _REST, _ONE = (0.01, 0.08), 1e-3, (0.002, 0.02)
#: Of factors that ranks have of their own: how many gradients are asked at least; how far those of one rank may be from
#: each other, of themselves and of what those of two ranks are; and what part of the squares may be of gradients that
#: have none: what rounding left of a key's bias.
_OF_RANKS, _ALIKE, _OF_APART, _LITTLE = 3, 0.01, 0.1, 1e-6
#: A factor of all float32 gradients that is nearer to 1 says nothing.
_SLIGHT = 5e-4
#: Factors of fewer ranks, micro-batches or accumulation steps are told as that.
_MOST_TIMES = 64


class Scaled(Struct, frozen=True):
    """A fault, the gradient in which it is seen first, and in how many. is_of_ranks: each rank has a factor of its own,
    which nothing else makes.
    """

    fault: Fault
    first: TensorVerdict
    tensors: int
    is_of_ranks: bool = False


class _Multiple(Struct, frozen=True):
    row: TensorVerdict
    #: What the ranks have, of what the other run has; and the squares of their norm and of the other run's.
    factor: float
    square: float
    others: float


def scaled(rows: Sequence[TensorVerdict], every: tuple[int, ...]) -> Iterator[Scaled]:
    """What the factors of one step's gradients say, the surest first; nothing where they are no multiples of the other
    run's.

    rows: in order of computation. every: the ranks.
    """
    for found in (_of_ranks(rows), _of_all(rows, every)):
        if found is not None:
            yield found


def _of_ranks(rows: Sequence[TensorVerdict]) -> Scaled | None:
    """Gradients that each rank has times a factor of its own, one for all of its tensors. None where one of the first
    step that is off is off by something else: norms are then off by that.
    """
    by_rank: dict[int, list[float]] = {}
    first, size_2, left_2 = None, 0.0, 0.0
    for row in rows:
        if row.ranks is None or not row.ranks.parted or not _is_of_a_weight(row):
            continue
        if first is not None and row.key.step != first.key.step:
            break
        first = first or row
        of_row = row.figures.total.a2 if row.figures is not None else 0.0
        size_2 += of_row
        left_2 += 0.0 if row.ranks.factors.keys() >= set(row.ranks.parted) else of_row
        for rank, factor in row.ranks.factors.items():
            by_rank.setdefault(rank, []).append(factor)
    if first is None or len(by_rank) < 2 or min(map(len, by_rank.values())) < _OF_RANKS or left_2 > _LITTLE * size_2:
        return None
    middle = {rank: sorted(by_rank[rank])[len(by_rank[rank]) // 2] for rank in sorted(by_rank)}
    apart = max(middle.values()) - min(middle.values())
    if not apart or any(
        abs(factor - middle[rank]) > min(_ALIKE * abs(middle[rank]), _OF_APART * apart)
        for rank, factors in by_rank.items() for factor in factors
    ):  # fmt: skip
        return None
    ranks = tuple(middle)
    said = ", ".join(f"{factor:.4g} on rank {rank}" for rank, factor in middle.items())
    fault = Fault(
        "clipped apart", ranks,
        f"the gradients of {whose(ranks)} are each scaled by a factor of the rank's own, the same for all of its "
        f"tensors ({said}): as if each clipped by the norm of what it holds, not of all ranks together",
    )  # fmt: skip
    return Scaled(fault, first, len(by_rank[ranks[0]]), is_of_ranks=True)


def _of_all(rows: Sequence[TensorVerdict], every: tuple[int, ...]) -> Scaled | None:
    """Gradients that all ranks have times one factor, or times one of each part of the model."""
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
    if len(found) < _OF_RANKS or left_2 > _REST * size_2:
        return None
    near = _ONE[is_half]
    factors = [one.factor for one in found if one.square >= 1e-4 * max(each.square for each in found)]
    middle = sorted(factors)[len(factors) // 2]
    if all(abs(one - middle) <= near * middle for one in factors):
        spread = max(abs(one - middle) for one in factors)
        if abs(middle - 1) <= (5 * near if is_half else max(5 * spread, _SLIGHT)):
            return None
        return Scaled(_one(middle, every), first, len(found))
    if len(found) < _FEWEST:
        return None
    for words, key, call in (
        ("layer", _of_layer, "the gradients of a layer"), ("tensor", _of_tensor, "a gradient"),
    ):  # fmt: skip
        if (norm := _norm_of_each(found, key, near)) is not None:
            sentence = (
                f"the gradients of {whose(every)} are clipped {words} by {words}, each by its own norm, not all by "
                f"the norm of the whole: {call} is times one factor, of {min(factors):.3g} to {max(factors):.3g}, and "
                f"the norm of each is {norm:.4g} then"
            )
            return Scaled(Fault("clipped apart", every, sentence), first, len(found))
    theirs = [_Multiple(one.row, 1 / one.factor, one.others, one.square) for one in found]
    for words, key in (("layer", _of_layer), ("tensor", _of_tensor)):
        if (norm := _norm_of_each(theirs, key, near)) is not None:
            sentence = (
                f"the gradients of the run that {whose(every)} are compared with are clipped {words} by {words}, each "
                f"to the norm {norm:.4g}, and those of {whose(every)} are not"
            )
            return Scaled(Fault("clipped apart", every, sentence), first, len(found))
    of_part = _of_a_part(found, every, near)
    return Scaled(of_part, first, len(found)) if of_part is not None else None


def _of_a_part(found: Sequence[_Multiple], every: tuple[int, ...], near: float) -> Fault | None:
    """Two factors, of which one is that of all gradients whose names have a word that no other's has (experts)."""
    largest = max(one.square for one in found)
    groups: list[list[_Multiple]] = []
    for one in sorted(found, key=lambda one: one.factor):
        if groups and one.factor - groups[-1][0].factor <= 2 * near * abs(one.factor):
            groups[-1].append(one)
        elif one.square >= 1e-6 * largest:
            groups.append([one])
    if len(groups) != 2 or min(map(len, groups)) < 2:
        return None
    words = [[set(_WORD.findall(one.row.name)) for one in group] for group in groups]
    own = [
        sorted(set.intersection(*mine) - set.union(*theirs)) for mine, theirs in (words, words[::-1])
    ]  # fmt: skip
    # Where either part has a word of its own, the smaller is the one that is said.
    part = min((number for number in (0, 1) if own[number]), key=lambda number: len(groups[number]), default=None)
    if part is None:
        return None
    middle = [sorted(one.factor for one in group)[len(group) // 2] for group in groups]
    ratio = middle[part] / middle[1 - part]
    whole = next((n for n in range(2, _MOST_TIMES + 1) if abs(max(ratio, 1 / ratio) - n) <= 2 * near * n), None)
    times, said = f"{ratio:.4g}", ""
    if whole is not None:
        of = f"the number of ranks ({whole})" if whole == len(every) else f"{whole}"
        times = f"1/{whole}" if ratio < 1 else f"{whole}"
        said = f", as if {'divided' if ratio < 1 else 'multiplied'} by {of}"
    besides = middle[1 - part]
    more = "" if abs(besides - 1) <= 5 * near else (
        f"; these are times {besides:.4g}, as clipping by the norm makes it of that"
    )  # fmt: skip
    return Fault(
        "scaled", every,
        f"the gradients of all {own[part][0]} ({len(groups[part])} tensors) of {whose(every)} are {times} times the "
        f"other run's beside those of all other weights{said}{more}",
        ratio,
    )  # fmt: skip


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
