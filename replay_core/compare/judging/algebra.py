"""What ranks hold of a tensor, by its values: the whole, a slice, a part of a sum; and which fault of a parallel step explains
what they hold instead.

Held against what one process computed, the values alone tell: parts that add up were not summed, a slice that is another
rank's stands in the wrong place, a factor of the number of ranks is a sum too many. One pass over a tensor that diverges makes
the inner products of all that is held; every explanation is arithmetic on these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from replay_core import pages
from replay_core.compare.pairing.ranks import Held, Together, named, narrowed
from replay_core.records import TensorRef

Array = NDArray[np.float64]

#: How far, of a norm, an explanation may be off; and what part of the difference it may leave unexplained.
_NEAR, _LEFT = 0.01, 0.1
#: Ranks alike to this part of their norm are one value; a rank agrees where it is off by so little, or by so small a
#: part of what the worst one is off.
_ALIKE, _AGREES = 1e-4, 0.03
#: More ranks than this are not held each against each.
_EACH = 16
#: Fewer elements add up, and have zeros at the same places, by chance.
_FEWEST = 8
#: Shares of zeros between which a pattern of them is one that was drawn.
_DRAWN = (0.02, 0.98)


@dataclass(frozen=True, slots=True)
class Fault:
    """What went wrong between ranks. factor: of a value that is a multiple of what it should be."""

    kind: str
    ranks: tuple[int, ...]
    sentence: str
    factor: float | None = None


@dataclass(slots=True)
class Ranked:
    """What the ranks of one run hold of a tensor.

    relation: "all" where each holds the whole, "slices" where it is cut along `axis`, "one" where a single rank has it,
    "parts" where the ranks' sum is the whole, "mean" where their mean is. parted: ranks whose values are not the other run's.
    factors: of ranks that hold a multiple of what they should, which.
    """

    which: str
    relation: str
    ranks: tuple[int, ...]
    axis: int | None = None
    parted: tuple[int, ...] = ()
    fault: Fault | None = None
    factors: dict[int, float] = field(default_factory=dict)

    @property
    def is_legal(self) -> bool:
        """Whether the ranks together hold what the other run has, though none does alone."""
        return self.relation in ("parts", "mean") and self.fault is None


def ranked(together: Together, held: Held) -> Ranked:
    """What the shapes tell."""
    relation = "one" if len(held.ranks) == 1 else "slices" if held.is_cut else "all"
    return Ranked(together.which, relation, held.ranks, held.axis)


def explain(name: str, whole: TensorRef, together: Together, held: Held) -> Ranked:
    """What the ranks' values are to the whole's, of a tensor in which the two runs part.

    Raises:
        DumpError: the bytes of one cannot be read.
    """
    found = ranked(together, held)
    if len(held.ranks) == 1 or not all(ref.is_readable for ref in (*held.parts, whole)):
        found.parted = held.ranks
        return found
    what = _called(name)
    if held.is_cut:
        _slices(found, what, whole, held)
    elif all(ref.shape == whole.shape for ref in held.parts):
        _wholes(found, what, whole, held)
    return found


def _called(name: str) -> str:
    """A tensor in words: `layers.0.norm.weight's gradient`."""
    return f"{name.removeprefix('grad.')}'s gradient" if name.startswith("grad.") else name.removeprefix("param.")


def whose(ranks: Sequence[int]) -> str:
    """`rank 1`, `ranks 0 and 1`."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {named(ranks)}"


# ---- tensors that every rank holds whole


def _wholes(found: Ranked, what: str, whole: TensorRef, held: Held) -> None:
    ranks, count = held.ranks, len(held.ranks)
    products = _products([whole, *held.parts])
    size = products.norm({0: 1})
    off = [products.norm({0: -1, number: 1}) for number in range(1, count + 1)]
    worst = max(off)
    is_good = [one <= max(_ALIKE * size, _AGREES * worst) for one in off]
    found.parted = tuple(rank for rank, good in zip(ranks, is_good, strict=True) if not good)
    found.factors = {
        rank: factor for number, rank in enumerate(ranks, 1)
        if not is_good[number - 1] and (factor := products.factor({number: 1}, 0)) is not None
    }  # fmt: skip
    if not size:
        return
    classes = _classes(products, count)
    everyone = {number: 1.0 for number in range(1, count + 1)}
    nearest = min(off)
    if len(classes) == 1:
        factor = found.factors.get(ranks[0])
        found.fault = _multiple(what, ranks, len(ranks), factor) if factor is not None else None
        return
    if (masks := _masks(what, held)) is not None:
        found.fault = masks
        return
    if any(is_good):
        found.fault = _apart(what, found, held, products)
        return
    first_of = {members[0]: 1.0 for members in classes}
    enough = whole.numel >= _FEWEST
    for weights, times in ((everyone, 1), (everyone, count), (first_of, 1)):
        wanted = {**weights, 0: -float(times)}
        left = products.norm(wanted) / times
        if not (left <= _NEAR * size and left <= _LEFT * nearest):
            continue
        found.relation = "mean" if times > 1 else "parts"
        if not enough:
            return
        if weights is first_of and len(classes) < count:
            groups = "; ".join(named(ranks[number - 1] for number in members) for members in classes)
            sentence = f"{what} is summed only within groups of ranks ({groups}): their sums add up to the whole"
            found.fault = Fault("summed in groups", ranks, sentence)
        elif times > 1:
            sentence = f"{what} is not averaged over ranks {named(ranks)}: each holds its own, and their mean is the whole"
            found.fault = Fault("not averaged", ranks, f"{sentence} (to {left / size:.1g})")
        else:
            sentence = f"{what} is not summed over ranks {named(ranks)}: each holds a part, and the parts add up to the whole"
            found.fault = Fault("not summed", ranks, f"{sentence} (to {left / size:.1g} of its norm)")
        return


def _classes(products: _Products, count: int) -> list[list[int]]:
    """Ranks that hold one value, as numbers from 1."""
    found: list[list[int]] = []
    for number in range(1, count + 1):
        size = products.norm({number: 1})
        for members in found:
            if products.norm({members[0]: -1, number: 1}) <= _ALIKE * max(size, products.norm({members[0]: 1})):
                members.append(number)
                break
        else:
            found.append([number])
    return found


def _multiple(what: str, ranks: tuple[int, ...], count: int, factor: float) -> Fault | None:
    """ranks: that hold the multiple, of `count`."""
    on = f"on {whose(ranks)}"
    if abs(factor) < 1e-6:
        return Fault("zeros", ranks, f"{what} is 0 {on}", 0.0)
    for times, words in (
        (count, f"summed over the {count} ranks once too often, or a sum where their mean is due"),
        (count * count, f"summed over the {count} ranks twice too often"),
        (1 / count, f"a mean over the {count} ranks where their sum is due, or the share of one rank alone"),
        (1 / count / count, f"divided by the {count} ranks twice too often"),
    ):
        if abs(factor - times) <= _NEAR * times:
            kind = "too much" if times > 1 else "too little"
            return Fault(kind, ranks, f"{what} is {factor:.4g} x the whole {on}: {words}", factor)
    return None


def _apart(what: str, found: Ranked, held: Held, products: _Products) -> Fault:
    """Some ranks hold what they should, the others do not."""
    good = [rank for rank in held.ranks if rank not in found.parted]
    more = ""
    if len(found.parted) == 1:
        number = held.ranks.index(found.parted[0]) + 1
        factor = found.factors.get(found.parted[0])
        if not products.norm({number: 1}):
            more = ": it holds zeros"
        elif factor is not None:
            more = f": it holds {factor:.4g} x that"
    parts, holds = (f"{whose(those)} {verb}{'s' if len(those) == 1 else ''}" for those, verb in ((found.parted, "part"), (good, "hold")))
    sentence = f"{what}: {parts}, {holds} what the other run has{more}"
    return Fault("apart", found.parted, sentence)


# ---- tensors that are cut among the ranks


def _slices(found: Ranked, what: str, whole: TensorRef, held: Held) -> None:
    assert held.axis is not None
    ranks = held.ranks
    blocks = [_block(whole, held.axis, stretches) for stretches in held.stretches]
    size = _products([whole]).norm({0: 1}) / len(ranks) ** 0.5
    pairs = [_products([block, part]) for block, part in zip(blocks, held.parts, strict=True)]
    off = [one.norm({0: -1, 1: 1}) for one in pairs]
    worst = max(off)
    is_good = [one <= max(_ALIKE * size, _AGREES * worst) for one in off]
    odd = [number for number, good in enumerate(is_good) if not good]
    found.parted = tuple(ranks[number] for number in odd)
    found.factors = {
        ranks[number]: factor for number in odd if (factor := pairs[number].factor({1: 1}, 0)) is not None
    }
    if not odd:
        return
    empty = [number for number in odd if not pairs[number].norm({1: 1}) and pairs[number].norm({0: 1})]
    if empty:
        those = tuple(ranks[number] for number in empty)
        sentence = f"{what} is 0 in the slice of {whose(those)}, and is not in the other run: nothing of it was counted"
        found.fault = Fault("zeros", those, sentence, 0.0)
        return
    if (elsewhere := _elsewhere(what, held, blocks, odd, size)) is not None:
        found.fault = elsewhere
        return
    if len(found.factors) == len(odd):
        factors = list(found.factors.values())
        if max(factors) - min(factors) <= _NEAR * abs(max(factors)):
            found.fault = _multiple(what, found.parted, len(ranks), factors[0])
        if found.fault is not None or len(odd) == len(ranks):
            return
    if (moved := _moved(what, whole, held, odd)) is not None:
        found.fault = moved
        return
    if _same_zeros(held.parts, blocks):
        found.fault = Fault(
            "masks alike", ranks,
            f"{what} has zeros at the same places of the slices of ranks {named(ranks)}, and other places in the other run: the ranks "
            "dropped out by the same random numbers where each should draw its own",
        )  # fmt: skip
    elif len(odd) < len(ranks):
        good = [rank for rank in ranks if rank not in found.parted]
        parts = "the slice of {} parts" if len(odd) == 1 else "the slices of {} part"
        others = f"that of {whose(good)} is" if len(good) == 1 else f"those of {whose(good)} are"
        sentence = f"{what}: {parts.format(whose(found.parted))}, {others} the other run's"
        found.fault = Fault("apart", found.parted, sentence)


def _block(whole: TensorRef, axis: int, stretches: Sequence[tuple[int, int]]) -> TensorRef:
    """A rank's slice of the whole."""
    from replay_core.records import Inline

    if len(stretches) == 1:
        return narrowed(whole, axis, *stretches[0])
    pieces = [pages.array(narrowed(whole, axis, *stretch)) for stretch in stretches]
    made = np.concatenate(pieces, axis)
    return whole.with_(shape=made.shape, source=Inline(np.ascontiguousarray(made).tobytes()), digest=None)


def _elsewhere(what: str, held: Held, blocks: list[TensorRef], odd: list[int], size: float) -> Fault | None:
    """Slices that are another rank's: in another order, or one of them twice."""
    ranks = held.ranks
    if len(ranks) > _EACH or not size:
        return None
    stands: dict[int, int] = {}
    for number in odd:
        for other, block in enumerate(blocks):
            if other == number or block.shape != held.parts[number].shape or held.stretches[other] == held.stretches[number]:
                continue
            pair = _products([block, held.parts[number]])
            if pair.norm({0: -1, 1: 1}) <= _NEAR * pair.norm({0: 1}):
                stands[number] = other
                break
    if len(stands) < len(odd):
        return None
    said = ", ".join(f"rank {ranks[number]} holds rank {ranks[other]}'s" for number, other in stands.items())
    those = tuple(ranks[number] for number in odd)
    if sorted(stands.values()) == sorted(odd):
        return Fault("order", those, f"{what}: the slices stand in another order: {said}")
    twice = sorted({ranks[number] for number in odd} | {ranks[other] for other in stands.values()})
    lost = named(those)
    sentence = f"{what}: ranks {named(twice)} hold one slice ({said}): what is rank {lost}'s is on no rank"
    return Fault("held twice", tuple(twice), sentence)


def _moved(what: str, whole: TensorRef, held: Held, odd: list[int]) -> Fault | None:
    """Slices that begin a place or two too early or too late."""
    assert held.axis is not None
    said = []
    for number in odd:
        stretches, part = held.stretches[number], held.parts[number]
        if len(stretches) != 1:
            return None
        start, length = stretches[0]
        for step in (-1, 1, -2, 2):
            # What both have of it, apart from the ends.
            first, last = max(0, start + step), min(whole.shape[held.axis], start + step + length)
            if last - first < 2:
                continue
            there = narrowed(whole, held.axis, first, last - first)
            mine = narrowed(part, held.axis, first - start - step, last - first)
            pair = _products([there, mine])
            if pair.norm({0: 1}) and pair.norm({0: -1, 1: 1}) <= _NEAR * pair.norm({0: 1}):
                early = "early" if step < 0 else "late"
                said.append((held.ranks[number], f"rank {held.ranks[number]}'s begins {abs(step)} too {early}"))
                break
        else:
            return None
    if not said:
        return None
    return Fault("boundary", tuple(rank for rank, _ in said), f"{what} is cut at other places: {', '.join(one for _, one in said)}")


# ---- zeros that were drawn


def _zeros(ref: TensorRef) -> NDArray[np.bool_] | None:
    if ref.numel < 64 or ref.numel > 1 << 24:
        return None
    pattern = np.asarray(pages.array(ref) == 0)
    return pattern if _DRAWN[0] <= pattern.mean() <= _DRAWN[1] else None


def _same_zeros(parts: Sequence[TensorRef], blocks: Sequence[TensorRef]) -> bool:
    """Whether slices of different values have their zeros at the same places, and the whole's have not."""
    if len({ref.shape for ref in parts}) != 1:
        return False
    own = [_zeros(ref) for ref in parts]
    there = [_zeros(ref) for ref in blocks]
    if any(one is None for one in [*own, *there]):
        return False
    alike = all(np.array_equal(own[0], one) for one in own[1:])  # type: ignore[arg-type]
    return alike and any(not np.array_equal(there[0], one) for one in there[1:])  # type: ignore[arg-type]


def _masks(what: str, held: Held) -> Fault | None:
    """Whether copies differ just in where they are 0."""
    parts = held.parts
    own = [_zeros(ref) for ref in parts]
    if any(one is None for one in own) or all(np.array_equal(own[0], one) for one in own[1:]):  # type: ignore[arg-type]
        return None
    first = pages.array(parts[0]).astype(np.float64)
    for ref, zeros in zip(parts[1:], own[1:], strict=True):
        both = ~(own[0] | zeros)  # type: ignore[operator]
        other = pages.array(ref).astype(np.float64)
        if not both.any() or np.abs(first[both] - other[both]).max() > _ALIKE * np.abs(first[both]).max():
            return None
    return Fault(
        "masks differ", held.ranks,
        f"{what} has zeros at other places on {whose(held.ranks)}, and where none has one they are alike: each dropped out by "
        "its own random numbers where all should draw the same",
    )  # fmt: skip


# ---- what was added to what


def not_summed_into(what: str, whole: TensorRef, held: Held, before: TensorRef, called: str) -> Fault | None:
    """Whether each rank added its own part to what all hold alike (a residual stream), where the sum of the parts was due."""
    count = len(held.parts)
    if {ref.shape for ref in held.parts} != {whole.shape} or before.shape != whole.shape:
        return None
    products = _products([whole, *held.parts, before])
    left = products.norm({0: -1, **dict.fromkeys(range(1, count + 1), 1.0), count + 1: 1.0 - count})
    if left > _NEAR * products.norm({0: 1, count + 1: -1}):
        return None
    return Fault(
        "not summed", held.ranks,
        f"what goes into {what} is not summed over ranks {named(held.ranks)}: each adds a part to {called}, and the parts add up to what "
        "the other run adds",
    )  # fmt: skip


def missing_from(what: str, whole: TensorRef, laid: TensorRef, held: Held, parts: Held, called: str) -> Fault | None:
    """Whose part of a sum, recorded as parts, is missing from what was computed with the sum, or is in it twice.

    laid: what the ranks hold, their slices put together.
    """
    ranks = parts.ranks
    if {ref.shape for ref in parts.parts} != {whole.shape} or laid.shape != whole.shape or len(ranks) > _EACH:
        return None
    has = (laid,) if held.is_cut else held.parts
    products = _products([whole, *has, *parts.parts])
    first = 1 + len(has)
    each = dict.fromkeys(range(first, first + len(ranks)), 1.0)

    def is_off_by(number: int, sign: float, which: dict[int, float]) -> bool:
        off = {0: 1.0, number: -1.0}
        return products.norm({**off, **{place: -sign for place in which}}) <= _NEAR * products.norm({0: 1, number: -1})

    if len(has) == len(ranks):
        alone = [{place: 1.0 for place in each if place != first + number} for number in range(len(ranks))]
        if all(is_off_by(1 + number, 1, alone[number]) for number in range(len(ranks))):
            return Fault(
                "not summed", ranks,
                f"what goes into {what} is not summed over {whose(ranks)}: each has only its own part of {called}",
            )  # fmt: skip
    for sign, kind, words in ((1.0, "missing", "is missing from"), (-1.0, "twice", "is twice in")):
        for place, rank in zip(each, ranks, strict=True):
            if is_off_by(1, sign, {place: 1.0}):
                return Fault(kind, (rank,), f"rank {rank}'s contribution {words} {what}: its part is {called} on rank {rank}")
    if is_off_by(1, -1.0, each):
        return Fault("twice", ranks, f"the sum over {whose(ranks)} is twice in {what}: its parts are {called}")
    return None


def tied_apart(what: str, whole: TensorRef, one: Held, other: Held) -> Fault | None:
    """Whether a tied weight's gradient is two parts, of the embedding on one rank and the head on another."""
    refs = (one.parts[0], other.parts[0])
    if {ref.shape for ref in refs} != {whole.shape}:
        return None
    products = _products([whole, *refs])
    if products.norm({0: -1, 1: 1, 2: 1}) > _NEAR * products.norm({0: 1}) or not products.norm({2: 1}):
        return None
    return Fault(
        "not summed", (*one.ranks, *(rank for rank in other.ranks if rank not in one.ranks)),
        f"{what} is not summed over its two places: {refs[0].name} on {whose(one.ranks)} and {refs[1].name} on {whose(other.ranks)} are "
        "one tied weight and hold parts that add up to the whole",
    )  # fmt: skip


# ---- what only one rank has of a sum


def without_rows(what: str, whole: TensorRef, held: Held, tokens: dict[int, NDArray[np.int64]]) -> Fault | None:
    """Of an embedding's gradient that all ranks hold alike: the rank whose own tokens have no part in it."""
    if len(whole.shape) != 2 or held.is_cut or held.parts[0].shape != whole.shape or whole.numel > 1 << 28:
        return None
    there, here = (np.abs(pages.array(ref).astype(np.float64)).sum(1) for ref in (whole, held.parts[0]))
    for rank, mine in tokens.items():
        others = np.concatenate([ids for one, ids in tokens.items() if one != rank])
        own = np.setdiff1d(mine, others)
        own = own[(own >= 0) & (own < whole.shape[0])]
        own = own[there[own] > 0]
        others = others[(others >= 0) & (others < whole.shape[0])]
        if own.size >= 3 and not here[own].any() and here[others].any():
            return Fault(
                "missing", (rank,),
                f"rank {rank}'s contribution is missing from {what}: the rows of the {own.size} tokens that rank {rank} alone was given "
                "are 0",
            )  # fmt: skip
    return None


def without_tokens(
    what: str, whole: TensorRef, held: Held, left: TensorRef, stretches: Sequence[Sequence[tuple[int, int]]], axis: int
) -> Fault | None:
    """Of the head's weight's gradient that all ranks hold alike: the rank of whose tokens nothing is in it.

    It is a sum over tokens of what the loss left at the token's logits times what went into the head. So every column of it
    is a combination of what was left at the tokens that are in it: `left` [sample, position, vocabulary], of which a rank
    has `stretches` of an axis.
    """
    ours = held.parts[0]
    if held.is_cut or ours.shape != whole.shape or len(left.shape) != 3 or left.shape[2] != whole.shape[0]:
        return None
    tokens, vocabulary = left.shape[0] * left.shape[1], left.shape[2]
    if tokens * vocabulary > 1 << 25:
        return None
    left_BSV = pages.array(left).astype(np.float64)
    columns = slice(0, 64)
    there, here = (pages.array(ref)[:, columns].astype(np.float64) for ref in (whole, ours))
    for number, rank in enumerate(held.ranks):
        others = [
            left_BSV[(slice(None),) * axis + (slice(start, start + length),)].reshape(-1, vocabulary)
            for one, mine in enumerate(stretches) if one != number for start, length in mine
        ]  # fmt: skip
        rows = np.concatenate(others)
        if rows.shape[0] >= vocabulary:
            return None
        basis = np.linalg.svd(rows, full_matrices=False)[2]
        outside = [float(np.linalg.norm(one - basis.T @ (basis @ one)) / (np.linalg.norm(one) or 1.0)) for one in (there, here)]
        if outside[1] <= 1e-3 and outside[0] > 30 * outside[1] and outside[0] > 0.02:
            return Fault(
                "missing", (rank,),
                f"rank {rank}'s contribution is missing from {what}: it is made of what the loss left at the other ranks' tokens alone",
            )  # fmt: skip
    return None


def own_vocabulary(
    a: Array, parts: Sequence[Array], logits: Array, held: Held, targets: NDArray[np.int64]
) -> Fault | None:
    """Of log-probabilities over a vocabulary that is cut: whether each rank divided by the sum over its own slice, or the
    slices were added up each relative to its own largest logit.

    a: [N]; parts: each rank's [N]; logits: [N, V] of the whole; targets: [N].
    """
    cuts = [slice(start, start + length) for ((start, length),) in held.stretches]
    most = np.stack([logits[:, cut].max(1) for cut in cuts])
    sums = np.stack([np.exp(logits[:, cut] - top[:, None]).sum(1) for cut, top in zip(cuts, most, strict=True)])
    by_rank = most + np.log(sums)
    whole = np.logaddexp.reduce(by_rank, 0)
    size = np.abs(parts[0] - a).max()

    def fits(made: Array, said: Array) -> bool:
        return bool(np.abs(made - said).max() <= _NEAR * size)

    if all(fits(a + whole - of_rank, said) for of_rank, said in zip(by_rank, parts, strict=True)):
        return Fault(
            "own vocabulary", held.ranks,
            f"the log-probabilities of ranks {named(held.ranks)} are each normalised over the rank's own slice of the vocabulary: the sum "
            "of exponentials was not made over all ranks",
        )  # fmt: skip
    owner = np.zeros(targets.size, np.int64)
    for number, cut in enumerate(cuts):
        owner[(targets >= cut.start) & (targets < cut.stop)] = number
    made = a + whole - most[owner, np.arange(targets.size)] - np.log(sums.sum(0))
    if all(fits(made, said) for said in parts):
        return Fault(
            "own maximum", held.ranks,
            f"the log-probabilities add up exponentials that ranks {named(held.ranks)} took each relative to its own largest logit: the "
            "maximum over all ranks is missing",
        )  # fmt: skip
    return None


# ---- inner products


class _Products:
    """Inner products of some vectors, from which the norm of every combination of them follows."""

    def __init__(self, gram: Array, off: dict[tuple[int, int], float]) -> None:
        self._gram, self._off = gram, off

    def norm(self, weights: dict[int, float]) -> float:
        """Of the sum of the vectors with these weights."""
        places = list(weights)
        if len(places) == 2 and sorted(weights.values()) == [-1, 1]:
            return float(self._off[min(places), max(places)] ** 0.5)
        vector = np.array([weights[place] for place in places])
        return float(max(0.0, vector @ self._gram[np.ix_(places, places)] @ vector) ** 0.5)

    def factor(self, weights: dict[int, float], of: int) -> float | None:
        """What multiple of one vector another is; None where it is none, or is off by no factor."""
        ((place, weight),) = weights.items()
        if not self._gram[of, of]:
            return None
        factor = float(weight * self._gram[place, of] / self._gram[of, of])
        left = self._gram[place, place] * weight * weight - factor * factor * self._gram[of, of]
        is_multiple = left <= (_NEAR * _NEAR) * max(self._gram[place, place], 1e-300)
        return factor if is_multiple and abs(factor - 1) > 2 * _NEAR else None


def _products(refs: Sequence[TensorRef]) -> _Products:
    count = len(refs)
    gram = np.zeros((count, count))
    off = {(i, j): 0.0 for i in range(count) for j in range(i + 1, count)}
    for chunk in _chunks(refs):
        gram += chunk @ chunk.T
        for i, j in off:
            off[i, j] += float(np.square(chunk[i] - chunk[j]).sum())
    return _Products(gram, off)


def _chunks(refs: Sequence[TensorRef]) -> Iterator[Array]:
    """The values of tensors of one shape side by side [tensor, element], some at a time; what is not finite counts as 0."""
    elements = max(1024, pages.CHUNK // len(refs))
    for pieces in zip(*(pages.flat_chunks(ref, elements) for ref in refs), strict=True):
        chunk = np.stack([piece.astype(np.float64) for _, piece in pieces])
        yield np.nan_to_num(chunk, copy=False, nan=0.0, posinf=0.0, neginf=0.0)

