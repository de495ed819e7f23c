"""What ranks hold of a tensor, by its values: the whole, a slice, a part of a sum; and which fault of a parallel step
explains what they hold instead.

HeldByRanks against what one process computed, the values alone tell: parts that add up were not summed, a slice that is
another rank's stands in the wrong place, a factor of the number of ranks is a sum too many. One pass over a tensor that
diverges makes the inner products of all that is held; every explanation is arithmetic on these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

from replay_core import pages
from replay_core.compare.judging.faults import Fault, whose
from replay_core.compare.judging.products import NEAR, InnerProducts, products_of
from replay_core.compare.pairing.ranks import HeldByRanks, Together, Which, named, narrowed, standing_for
from replay_core.dtypes import EPS, coarsest, family
from replay_core.naming import is_module_tensor
from replay_core.records import Inline, TensorRef

#: What part of a difference an explanation may leave.
_LEFT = 0.1
#: What ranks hold that is summed in part only is this near the whole, of its norm, and their mean this much nearer.
_SHARED = 0.9
#: What rounding leaves of a sum of parts that are stored in two bytes, each made of values that are.
_NEAR_IN_TWO_BYTES = 0.05
#: A slice that is another rank's is off that by so small a part of it at most: one or two of its own steps.
_STEPPED = 0.3
#: Ranks alike to this part of their norm are one value; a rank agrees where it is off by so little, or by so small a
#: part of what the worst one is off.
_ALIKE, _AGREES = 1e-4, 0.03
#: What rounding leaves of a weight, of its norm, and of the steps it took.
_ROUNDED = 1e-5
#: And of one that is stored in few digits, in units of these.
_OF_UNITS = 4.0
#: Of numbers (a loss), which may well be near each other and be of other samples each: copies are equal.
_EQUAL = 1e-6
#: More tokens are not held each against each.
_MOST_TOKENS = 4096
#: More ranks than this are not held each against each.
_EACH = 16
#: What rounding leaves of the gradient of a key's bias, times eps of its row of the weight's (`bias_noise.py`).
_CANCELS = 1e3
#: To so little of its size a few numbers' sum is another number by no chance.
_SURELY = 1e-5
#: Fewer elements add up, and have zeros at the same places, by chance.
_FEWEST = 8
#: How far one product of halves may be from that of float32, of its norm.
_OF_HALVES = {"bfloat16": 2e-2, "float16": 2.5e-3}
#: Shares of zeros between which a pattern of them is one that was drawn.
_DRAWN = (0.02, 0.98)


class Ranked(Struct):
    """What the ranks of one run hold of a tensor.

    relation: "all" where each holds the whole, "slices" where it is cut along `axis`, "one" where a single rank has it,
    "parts" where the ranks' sum is the whole, "mean" where their mean is. parted: whose values are not the other run's.
    factors: of ranks that hold a multiple of what they should, which.
    """

    which: Which
    relation: Literal["all", "slices", "parts", "mean", "one"]
    ranks: tuple[int, ...]
    axis: int | None = None
    parted: tuple[int, ...] = ()
    fault: Fault | None = None
    factors: dict[int, float] = field(default_factory=dict)
    #: Which of the ranks' parts make the sum, as numbers from 0: one of each group whose ranks hold the same.
    summands: tuple[int, ...] = ()
    #: What their sum is divided by.
    times: int = 1
    #: Of a weight: by rank, by how much an element is off, and the factor that is nearest (`off_by_rank`).
    off: dict[int, tuple[float, float]] = field(default_factory=dict)
    #: Why it is no value of its own, where what it says is compared elsewhere.
    restates: str | None = None


def ranked(together: Together, held: HeldByRanks) -> Ranked:
    """What the shapes tell."""
    relation: Literal["one", "slices", "all"] = "one" if len(held.ranks) == 1 else "slices" if held.is_cut else "all"
    return Ranked(together.which, relation, held.ranks, held.axis)


def explain(name: str, whole: TensorRef, together: Together, held: HeldByRanks) -> Ranked:
    """What the ranks' values are to the whole's, of a tensor in which the two runs part.

    Raises:
        DumpError: the bytes of one cannot be read.
    """
    found = ranked(together, held)
    if len(held.ranks) == 1 or not all(ref.is_readable for ref in (*held.parts, whole)):
        found.parted = held.ranks
        if name.startswith("grad.") and len(held.ranks) == 1 and held.parts[0].shape == whole.shape:
            _of_one(found, _called(name), whole, held, len(together.ranks))
        return found
    if held.is_cut:
        _slices(found, name, whole, held)
    elif all(ref.shape == whole.shape for ref in held.parts):
        _wholes(found, name, whole, held, together.samples)
        if name.startswith("grad.") and found.fault is None and found.parted == held.ranks and are_alike(held.parts):
            found.factors = _of_shards(whole, held) or found.factors
    return found


def is_rounded(whole: TensorRef, held: HeldByRanks) -> bool:
    """Whether all ranks hold the other run's float32 values, rounded to bfloat16 on the way."""
    refs = (whole, *held.parts)
    if any(ref.dtype != "float32" or not ref.is_readable or not _FEWEST <= ref.numel <= 1 << 24 for ref in refs):
        return False
    is_short = [not (np.ascontiguousarray(pages.array(ref)).view(np.uint32) & 0xFFFF).any() for ref in refs]
    if is_short[0] or not all(is_short[1:]):
        return False
    made = standing_for(held)
    return made.shape == whole.shape and is_near(whole, made)


def rounded_on_some(what: str, whole: TensorRef, held: HeldByRanks) -> Fault | None:
    """Whether some ranks' float32 values are all ones of a half precision, and near the other run's, which are not, as
    those of other ranks are not.
    """
    refs = (whole, *held.parts)
    if any(ref.dtype != "float32" or not ref.is_readable or not _FEWEST <= ref.numel <= 1 << 24 for ref in refs):
        return None
    there = pages.array(whole)
    blocks = [
        there if held.axis is None else pages.array(_block(whole, held.axis, own)) for own in held.stretches
    ] or [there] * len(held.ranks)  # fmt: skip
    parts = [pages.array(ref) for ref in held.parts]
    if any(own.shape != block.shape for own, block in zip(parts, blocks, strict=True)):
        return None
    for dtype, is_short in (("bfloat16", _is_bfloat16), ("float16", _is_float16)):
        those = [number for number, own in enumerate(parts) if is_short(own)]
        ranks = tuple(held.ranks[number] for number in those)
        if not ranks or len(ranks) == len(held.ranks) or any(map(is_short, blocks)):
            continue
        off = [np.linalg.norm(parts[number].astype(np.float64) - blocks[number]) for number in those]
        if any(one > _OF_HALVES[dtype] * np.linalg.norm(blocks[at]) for one, at in zip(off, those, strict=True)):
            return None
        return Fault(
            "rounded", ranks,
            f"{what} is float32 and on {whose(ranks)} every value is one of {dtype}, which those of other ranks and of "
            f"the other run are not: it is computed in {dtype} there (half precision)",
        )  # fmt: skip
    return None


def off_by_rank(whole: TensorRef, held: HeldByRanks) -> dict[int, tuple[float, float]]:
    """Of a weight that is off: by how much an element of what each rank has is, and by what factor that is nearest to
    the other run's. Of one that every rank has whole alike (gathered shards), of the rows that would be each rank's.
    """
    if not all(ref.is_readable and ref.numel <= 1 << 24 for ref in (whole, *held.parts)) or not whole.shape:
        return {}
    there, parts = pages.array(whole).astype(np.float64), [pages.array(ref).astype(np.float64) for ref in held.parts]
    if held.axis is not None:
        blocks = [pages.array(_block(whole, held.axis, own)).astype(np.float64) for own in held.stretches]
    elif are_alike(held.parts):
        rows = -(-len(there) // len(parts))
        blocks, parts = ([of[at * rows : (at + 1) * rows] for at in range(len(parts))] for of in (there, parts[0]))
    else:
        blocks = [there] * len(parts)
    found = {}
    for rank, own, block in zip(held.ranks, parts, blocks, strict=True):
        if own.shape == block.shape and own.size and block.any() and np.isfinite(own).all():
            rms = float(np.linalg.norm(own - block)) / own.size**0.5
            found[rank] = rms, float((own * block).sum() / np.square(block).sum())
    return found


def of_a_share(what: str, whole: TensorRef, held: HeldByRanks) -> Fault | None:
    """Whether of a weight that every rank recorded whole, gathered of shares (DTensor: FSDP, tensor parallelism), the
    shares of some ranks are other values and those of all others the other run's.
    """
    count = len(held.ranks)
    if held.is_cut or count < 2 or whole.numel > 1 << 24 or not all(ref.is_readable for ref in (whole, *held.parts)):
        return None
    if any(ref.shape != whole.shape for ref in held.parts) or not are_alike(held.parts):
        return None
    there, here = (pages.array(ref).astype(np.float64) for ref in (whole, held.parts[0]))
    for axis in range(min(2, there.ndim)):
        each = -(-there.shape[axis] // count)
        shares = [
            (np.take(here, rows, axis), np.take(there, rows, axis))
            for at in range(count) if (rows := np.arange(at * each, min((at + 1) * each, there.shape[axis]))).size
        ]  # fmt: skip
        if len(shares) < count or min(one.size for one, _ in shares) < _FEWEST:
            continue
        off = [float(np.linalg.norm(own - block)) / (float(np.linalg.norm(block)) or 1.0) for own, block in shares]
        odd = [at for at, one in enumerate(off) if one > _AGREES * max(off)]
        if not 0 < len(odd) < count or max(off) <= NEAR:
            continue
        # A few rows of a share that are off are no share that is another.
        lines = [np.linalg.norm(np.moveaxis(own - block, axis, 0).reshape(own.shape[axis], -1), axis=1)
                 for own, block in (shares[at] for at in odd)]  # fmt: skip
        if any(rows.min() <= _AGREES * rows.max() for rows in lines):
            continue
        ranks = tuple(held.ranks[at] for at in odd)
        factors = [float((own * block).sum() / np.square(block).sum()) for own, block in (shares[at] for at in odd)]
        are_scaled = all(
            np.linalg.norm(own - factor * block) <= NEAR * np.linalg.norm(own - block)
            for factor, (own, block) in zip(factors, (shares[at] for at in odd), strict=True)
        ) and max(factors) - min(factors) <= NEAR * abs(factors[0])  # fmt: skip
        more = f"{factors[0]:.4g} x the other run's" if are_scaled else "other values (a stale or wrong shard)"
        lie = "rows" if axis == 0 else "columns"
        return Fault(
            "share apart", ranks,
            f"{what}, gathered of the ranks' shares: the share of {whose(ranks)} ({lie} {odd[0] * each} to "
            f"{min((odd[-1] + 1) * each, there.shape[axis]) - 1}) is {more}, those of all others are the other run's",
            factors[0] if are_scaled else None,
        )  # fmt: skip
    return None


def _is_bfloat16(values: NDArray[Any]) -> bool:
    return not (np.ascontiguousarray(values).view(np.uint32) & 0xFFFF).any()


def _is_float16(values: NDArray[Any]) -> bool:
    with np.errstate(over="ignore"):
        return bool((values.astype(np.float16).astype(np.float32) == values).all()) and not _is_bfloat16(values)


def are_alike(refs: Sequence[TensorRef]) -> bool:
    """Whether ranks hold one value of a tensor, but for noise."""
    products = products_of(refs)
    size = products.norm({0: 1})
    return all(products.norm({0: -1, number: 1}) <= _ALIKE * size for number in range(1, len(refs)))


def is_near(whole: TensorRef, made: TensorRef) -> bool:
    """Whether what was made of ranks' values is the whole, but for noise."""
    products = products_of([whole, made])
    return all(products.finite) and products.norm({0: -1, 1: 1}) <= NEAR * products.norm({0: 1})


def is_nearer(whole: TensorRef, made: TensorRef, than: TensorRef) -> bool:
    """Whether what was made of ranks' values of two bytes is the whole but for noise, which it is not as it was."""
    if not {whole.dtype, made.dtype} & {"bfloat16", "float16"} or not whole.shape == made.shape == than.shape:
        return False
    products = products_of([whole, made, than])
    off, before = products.norm({0: -1, 1: 1}), products.norm({0: -1, 2: 1})
    return all(products.finite) and off <= _LEFT * min(before, products.norm({0: 1}))


def _called(name: str) -> str:
    """A tensor in words: `layers.0.norm.weight's gradient`."""
    return f"{name.removeprefix('grad.')}'s gradient" if name.startswith("grad.") else name.removeprefix("param.")


def _of_one(found: Ranked, what: str, whole: TensorRef, held: HeldByRanks, count: int) -> None:
    """What a rank alone has, a stage of a pipeline or an expert: whether it is counted too often or too seldom."""
    refs = (whole, held.parts[0])
    if whole.numel < _FEWEST or not all(ref.is_readable for ref in refs):
        return
    products = products_of(refs)
    if all(products.finite) and products.norm({0: 1}) and not products.norm({1: 1}):
        found.fault = Fault(
            "zeros", held.ranks,
            f"{what} is 0 on {whose(held.ranks)}, which alone has it, and is not in the other run: nothing of what it "
            "made was counted (its output is lost or zeros, or is cut off from the loss)",
        )  # fmt: skip
        return
    factor = products.factor({1: 1}, 0) if all(products.finite) else None
    if factor is None:
        return
    found.factors = {held.ranks[0]: factor}
    for times, words in (
        (count, "once too often, or summed where a mean is due"),
        (1 / count, "divided once too often"),
    ):
        if abs(factor - times) <= NEAR * times:
            found.fault = Fault(
                "too much" if times > 1 else "too little", held.ranks,
                f"{what} is {factor:.4g} x the other run's on {whose(held.ranks)}, which alone has it: counted for the "
                f"{count} ranks, or as many micro-batches, {words}" if times > 1 else
                f"{what} is {factor:.4g} x the other run's on {whose(held.ranks)}, which alone has it: {words} by the "
                f"{count} ranks, whose parts it is the sum of already",
                factor,
            )  # fmt: skip


def by_micros(name: str, found: Ranked, micros: int) -> Fault | None:
    """Whether all ranks hold a gradient as many times too large, or too small, as there are micro-batches."""
    factors = list(found.factors.values())
    if micros < 2 or not found.parted or found.factors.keys() < set(found.ranks):
        return None
    for times, kind, words in (
        (float(micros), "too much", "a sum over the {} micro-batches where their mean is due, or counted for each"),
        (1 / micros, "too little", "as if divided by the {} micro-batches once too often"),
    ):
        if all(abs(factor - times) <= NEAR * times for factor in factors):
            return Fault(
                kind, found.ranks,
                f"{_called(name)} is {factors[0]:.4g} x the other run's on {whose(found.ranks)}: "
                f"{words.format(micros)}",
                factors[0],
            )  # fmt: skip
    return None


# ---- tensors that every rank holds whole


def _agree(name: str, off: Sequence[float], size: float, unit: float, *, are_few: bool = False) -> list[bool]:
    """Which ranks hold the other run's values, so far off it as they are. Weights after a step are off by what a rank's
    own step is, and steps are small: of two that went astray one is not right for the other is further off.

    size: the norm of what a rank holds; unit: half the distance from 1 to the next number; are_few: of few elements
    none is near by what another is off.
    """
    if name.startswith("param."):
        return [one <= max(_ROUNDED, _OF_UNITS * unit) * size for one in off]
    return [one <= max(_ALIKE * size, 0.0 if are_few else _AGREES * max(off)) for one in off]


def _unit(whole: TensorRef, held: HeldByRanks) -> float:
    """Of what is stored in the fewest digits."""
    return max(EPS.get(str(family(ref.dtype)), 0.0) / 2 for ref in (whole, *held.parts))


def _wholes(found: Ranked, name: str, whole: TensorRef, held: HeldByRanks, samples: int) -> None:
    """samples: how many groups of ranks have samples of their own."""
    what, is_gradient = _called(name), name.startswith("grad.")
    ranks, count = held.ranks, len(held.ranks)
    products = products_of([whole, *held.parts])
    if len(set(products.finite)) > 1:
        _not_finite(found, what, [products.finite[0]] * count, products.finite[1:])
        return
    size = products.norm({0: 1})
    off = [products.norm({0: -1, number: 1}) for number in range(1, count + 1)]
    worst = max(off)
    enough = whole.numel >= _FEWEST
    is_good = _agree(name, off, size, _unit(whole, held), are_few=not enough)
    found.parted = tuple(rank for rank, good in zip(ranks, is_good, strict=True) if not good)
    found.factors = {
        rank: factor for number, rank in enumerate(ranks, 1)
        if enough and not is_good[number - 1] and (factor := products.factor({number: 1}, 0)) is not None
    }  # fmt: skip
    if not size:
        return
    classes = _classes(products, count, _ALIKE if enough else _EQUAL)
    everyone = dict.fromkeys(range(1, count + 1), 1.0)
    nearest = min(off)
    if len(classes) == 1:
        factor = found.factors.get(ranks[0])
        found.fault = _multiple(what, ranks, len(ranks), factor) if factor is not None else None
        return
    if (masks := _masks(what, held)) is not None:
        found.fault = masks
        return
    if any(is_good) and (enough or len(classes) < count):
        found.fault = _apart(what, found, held, products)
        return
    first_of = {members[0]: 1.0 for members in classes}
    # Of two ranks a part each is what is said first.
    if enough and len(classes) == 2 < count and (kept := _kept_own(what, found, classes, products)) is not None:
        found.fault = kept
        return
    tried = [(everyone, 1), (everyone, count), (first_of, 1)]
    if 1 < samples < len(first_of):
        tried.append((first_of, samples))  # a sum over the tokens of each group, and a mean over the groups
    is_short = {ref.dtype for ref in (whole, *held.parts)} <= {"bfloat16", "float16"}
    near = _NEAR_IN_TWO_BYTES if is_short and enough else NEAR
    for weights, times in tried:
        wanted = {**weights, 0: -float(times)}
        left = products.norm(wanted) / times
        is_near = left <= near * size and left <= _LEFT * nearest
        if not is_near and not (not enough and left <= _ALIKE * size and left <= _LEFT * worst):
            continue  # one of several numbers may be near by chance
        found.relation = "mean" if times > 1 else "parts"
        found.summands, found.times = tuple(number - 1 for number in weights), times
        # Of a loss each rank may have a part by right; a parameter's gradient is to be one.
        if not enough and (is_short or not is_gradient or left > _SURELY * size or left > _LEFT * nearest):
            return
        if weights is first_of and times == 1 and len(classes) < count:
            groups = "; ".join(named(ranks[number - 1] for number in members) for members in classes)
            sentence = (
                f"{what} is not summed over ranks {named(ranks)}, only within groups of them ({groups}): their "
                "sums add up to the whole"
            )
            found.fault = Fault("summed in groups", ranks, sentence)
        elif times > 1 and len(classes) < count:
            groups = "; ".join(named(ranks[number - 1] for number in members) for members in classes)
            sentence = (
                f"{what} is not averaged over ranks {named(ranks)}, only within groups of them ({groups}): the mean of "
                f"what these hold is the whole (to {left / size:.1g})"
            )
            found.fault = Fault("not averaged", ranks, sentence)
        elif times > 1:
            sentence = (
                f"{what} is not averaged over ranks {named(ranks)}: each holds its own, and their mean is the whole"
            )
            found.fault = Fault("not averaged", ranks, f"{sentence} (to {left / size:.1g})")
        else:
            sentence = (
                f"{what} is not summed over ranks {named(ranks)}: each holds a part, and the parts add up to the whole"
            )
            found.fault = Fault("not summed", ranks, f"{sentence} (to {left / size:.1g} of its norm)")
        return
    if enough and len(classes) == 2:
        found.fault = _kept_own(what, found, classes, products)


def summed_in_part(what: str, whole: TensorRef, held: HeldByRanks, samples: int) -> Fault | None:
    """Whether each rank's gradient is a part that all have and a part of its own: near the whole, and nearer together.

    samples: how many groups of ranks have samples of their own.
    """
    count = len(held.parts)
    if held.is_cut or count < 2 or whole.numel < _FEWEST or {ref.shape for ref in held.parts} != {whole.shape}:
        return None
    products = products_of([whole, *held.parts])
    if not all(products.finite) or len(_classes(products, count)) < count:
        return None
    off = [products.norm({0: -1, number: 1}) for number in range(1, count + 1)]
    mean = products.norm({**dict.fromkeys(range(1, count + 1), 1.0), 0: -float(count)}) / count
    if max(off) > _SHARED * products.norm({0: 1}) or mean > _SHARED * min(off):
        return None
    more = (
        ": what flows back through one of the layers behind it whose weights they share is not summed, and the rest is"
        if samples == 1 else ""
    )  # fmt: skip
    return Fault(
        "summed in part", held.ranks,
        f"{what} is another on each of {whose(held.ranks)}, which are to hold the same, and neither the sum nor the "
        f"mean of what they hold is the whole{more}",
    )  # fmt: skip


def _kept_own(what: str, found: Ranked, classes: list[list[int]], products: InnerProducts) -> Fault | None:
    """Whether a rank holds its own part, which is missing from the sum or mean that all others hold."""
    count = len(found.ranks)
    odd = [members[0] for members in classes if len(members) == 1]
    for one in odd:
        others = next(members for members in classes if members[0] != one)
        for share in (1.0, 1 / count):
            left = products.norm({0: -1, others[0]: 1, one: share})
            if left <= NEAR * products.norm({0: 1}) and left <= _LEFT * products.norm({0: -1, others[0]: 1}):
                rank, rest = found.ranks[one - 1], tuple(found.ranks[number - 1] for number in others)
                sentence = (
                    f"rank {rank}'s contribution is missing from {what} on {whose(rest)}: rank {rank} holds it itself"
                )
                return Fault("missing", (rank,), sentence)
    return None


def _not_finite(found: Ranked, what: str, whole: Sequence[bool], parts: Sequence[bool]) -> None:
    """Say which ranks hold NaN or infinities where the other run does not."""
    those = zip(found.ranks, whole, parts, strict=True)
    found.parted = tuple(rank for rank, should, is_finite in those if should and not is_finite)
    if found.parted:
        verb = "holds" if len(found.parted) == 1 else "hold"
        found.fault = Fault(
            "apart",
            found.parted,
            f"{what}: {whose(found.parted)} {verb} NaN or infinities, the other run holds none there",
        )


def _of_shards(whole: TensorRef, held: HeldByRanks) -> dict[int, float] | None:
    """By rank, what multiple of the other run's its rows are, of a tensor that every rank recorded whole, gathered of
    rows that `torch.chunk` hands out (as FSDP does); None where they are none, or all the same.
    """
    count, rows = len(held.ranks), whole.shape[0] if whole.shape else 0
    each = -(-rows // count)
    if rows <= each * (count - 1) or 2 * whole.numel < _FEWEST * count:
        return None
    found: dict[int, float] = {}
    for number, rank in enumerate(held.ranks):
        length = min(each, rows - number * each)
        pair = products_of([narrowed(ref, 0, number * each, length) for ref in (whole, held.parts[number])])
        factor = pair.multiple(1, 0) if all(pair.finite) else None
        if factor is None:
            return None
        found[rank] = factor
    return found if max(found.values()) - min(found.values()) > _ALIKE * abs(max(found.values())) else None


def _classes(products: InnerProducts, count: int, alike: float = _ALIKE) -> list[list[int]]:
    """Ranks that hold one value (to this part of it), as numbers from 1."""
    found: list[list[int]] = []
    for number in range(1, count + 1):
        size = products.norm({number: 1})
        for members in found:
            if products.norm({members[0]: -1, number: 1}) <= alike * max(size, products.norm({members[0]: 1})):
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
    made = [
        (count * count, f"summed over the {count} ranks twice too often"),
        (1 / count / count, f"divided by the {count} ranks twice too often"),
    ]
    for some in range(count, 1, -1):
        if count % some == 0:
            whom = f"the {count} ranks" if some == count else f"{some} of the {count} ranks"
            made.append((some, f"summed over {whom} once too often, or a sum where their mean is due"))
            made.append((1 / some, f"a mean over {whom} where their sum is due, or the share of one rank alone"))
    for times, words in made:
        if abs(factor - times) <= NEAR * times:
            kind = "too much" if times > 1 else "too little"
            return Fault(kind, ranks, f"{what} is {factor:.4g} x the whole {on}: {words}", factor)
    return None


def _apart(what: str, found: Ranked, held: HeldByRanks, products: InnerProducts) -> Fault:
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
    parts, holds = (
        f"{whose(those)} {verb}{'s' if len(those) == 1 else ''}"
        for those, verb in ((found.parted, "part"), (good, "hold"))
    )
    sentence = f"{what}: {parts}, {holds} what the other run has{more}"
    return Fault("apart", found.parted, sentence)


# ---- tensors that are cut among the ranks


def _slices(found: Ranked, name: str, whole: TensorRef, held: HeldByRanks) -> None:
    assert held.axis is not None
    ranks, what = held.ranks, _called(name)
    blocks = [_block(whole, held.axis, stretches) for stretches in held.stretches]
    size = products_of([whole]).norm({0: 1}) / len(ranks) ** 0.5
    pairs = [products_of([block, part]) for block, part in zip(blocks, held.parts, strict=True)]
    # What is not finite in both (an expert that is masked out) is alike.
    if not all(len(set(one.finite)) == 1 for one in pairs):
        _not_finite(found, what, [one.finite[0] for one in pairs], [one.finite[1] for one in pairs])
        return
    off = [one.norm({0: -1, 1: 1}) for one in pairs]
    is_good = _agree(name, off, size, _unit(whole, held))
    odd = [number for number, good in enumerate(is_good) if not good]
    found.parted = tuple(ranks[number] for number in odd)
    found.factors = {ranks[number]: factor for number in odd if (factor := pairs[number].factor({1: 1}, 0)) is not None}
    if not odd:
        return
    empty = [number for number in odd if not pairs[number].norm({1: 1}) and pairs[number].norm({0: 1})]
    if empty:
        those = tuple(ranks[number] for number in empty)
        sentence = f"{what} is 0 in the slice of {whose(those)}, and is not in the other run: nothing of it was counted"
        found.fault = Fault("zeros", those, sentence, 0.0)
        return
    if (kept := _copies_not_summed(what, held, blocks)) is not None:
        found.fault = kept
        return
    if (elsewhere := _elsewhere(what, held, blocks, odd, size)) is not None:
        found.fault = elsewhere
        return
    is_gradient = name.startswith("grad.")
    # Multiples of what each is to hold add up to one of the sum, too.
    if (
        not _are_one_multiple(found, odd)
        and (is_gradient or is_module_tensor(name))
        and (mixed := _slices_summed(what, held, blocks, is_weight=not is_module_tensor(name))) is not None
    ):
        found.fault = mixed
        return
    if len(found.factors) == len(odd):
        factors = list(found.factors.values())
        if _are_one_multiple(found, odd):
            found.fault = _multiple_of_slices(what, found.parted, held, factors[0]) or _multiple(
                what, found.parted, len(ranks), factors[0]
            )
        if found.fault is not None or len(odd) == len(ranks):
            return
    if (moved := _moved(what, whole, held, odd)) is not None:
        found.fault = moved
        return
    if _same_zeros(held.parts, blocks):
        found.fault = Fault(
            "masks alike", ranks,
            f"{what} has zeros at the same places of the slices of ranks {named(ranks)}, and other places in the "
            "other run: the ranks "
            "dropped out by the same random numbers where each should draw its own",
        )  # fmt: skip
    elif len(odd) < len(ranks):
        good = [rank for rank in ranks if rank not in found.parted]
        parts = "the slice of {} parts" if len(odd) == 1 else "the slices of {} part"
        others = f"that of {whose(good)} is" if len(good) == 1 else f"those of {whose(good)} are"
        sentence = f"{what}: {parts.format(whose(found.parted))}, {others} the other run's"
        found.fault = Fault("apart", found.parted, sentence)


def _are_one_multiple(found: Ranked, odd: Sequence[int]) -> bool:
    """Whether all ranks that are off hold one multiple of what they should."""
    factors = list(found.factors.values())
    return len(factors) == len(odd) > 0 and max(factors) - min(factors) <= NEAR * abs(max(factors))


def _multiple_of_slices(what: str, ranks: tuple[int, ...], held: HeldByRanks, factor: float) -> Fault | None:
    """Slices of which several ranks have equal copies, all one multiple of the other run's: they were reduced, and then
    scaled for ranks over which there was nothing to reduce, or not for all.
    """
    by_place: dict[object, list[TensorRef]] = {}
    for ref, stretches in zip(held.parts, held.stretches, strict=True):
        by_place.setdefault(stretches, []).append(ref)
    copies = {len(members) for members in by_place.values()}
    if set(ranks) != set(held.ranks) or len(copies) != 1 or len(by_place) < 2:
        return None
    (count,) = copies
    if count < 2 or not all(are_alike(members) for members in by_place.values()):
        return None
    slices = len(by_place)
    over = (f"the {slices} ranks that share it, a slice each (tensor or expert parallelism)", slices)
    beside = (f"the {count} that hold one slice", count)
    said = [(words, kind, many) for words, many in (over, beside) for kind in ("too little", "too much")
            if abs(factor - (times := 1 / many if kind == "too little" else float(many))) <= NEAR * times]  # fmt: skip
    if not said:
        return None
    kind = said[0][1]
    once = "divided once too often by" if kind == "too little" else "multiplied by, or summed once too often over,"
    return Fault(
        kind, ranks,
        f"{what} is {factor:.4g} x the other run's on {whose(ranks)}, and the same on those that hold one slice (it is "
        f"reduced over these): {once} {', or by '.join(words for words, _, _ in said)}",
        factor,
    )  # fmt: skip


def _block(whole: TensorRef, axis: int, stretches: Sequence[tuple[int, int]]) -> TensorRef:
    """A rank's slice of the whole."""
    if len(stretches) == 1:
        return narrowed(whole, axis, *stretches[0])
    pieces = [pages.array(narrowed(whole, axis, *stretch)) for stretch in stretches]
    made = np.concatenate(pieces, axis)
    return whole.with_(shape=made.shape, source=Inline(np.ascontiguousarray(made).tobytes()), digest=None)


def in_groups(whole: TensorRef, held: HeldByRanks) -> Iterator[tuple[TensorRef, HeldByRanks]]:
    """What is held in the groups of ranks that have one slice each, as if each group's slice were the whole: the other
    run's of it, and the ranks'; of what is not cut, that of all.
    """
    if held.axis is None:
        yield whole, held
        return
    for stretches in dict.fromkeys(held.stretches):
        members = [number for number, own in enumerate(held.stretches) if own == stretches]
        own = HeldByRanks(tuple(held.ranks[one] for one in members), tuple(held.parts[one] for one in members))
        yield _block(whole, held.axis, stretches), own


def of_groups(
    whole: TensorRef, held: HeldByRanks, inputs: HeldByRanks
) -> Iterator[tuple[TensorRef, HeldByRanks, HeldByRanks]]:
    """What is held in the groups of ranks that have one slice each, as if each group's slice were the whole: the other
    run's of it, the ranks', and what these ranks have of what went into the layer.
    """
    if not held.is_cut or held.axis is None:
        yield whole, held, inputs
        return
    by_place: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for number, stretches in enumerate(held.stretches):
        by_place.setdefault(stretches, []).append(number)
    at = {rank: number for number, rank in enumerate(inputs.ranks)}
    for stretches, members in by_place.items():
        ranks = tuple(held.ranks[number] for number in members)
        if len(members) < 2 or not at.keys() >= set(ranks) or not inputs.is_cut:
            continue
        own = HeldByRanks(ranks, tuple(held.parts[number] for number in members))
        places = [at[rank] for rank in ranks]
        into = HeldByRanks(
            ranks, tuple(inputs.parts[place] for place in places), inputs.axis,
            tuple(inputs.stretches[place] for place in places),
        )  # fmt: skip
        yield _block(whole, held.axis, stretches), own, into


def _copies_not_summed(what: str, held: HeldByRanks, blocks: list[TensorRef]) -> Fault | None:
    """Slices of which several ranks have one each, whose sum or mean over these is the other run's: replicas that kept
    their own.
    """
    by_place: dict[object, list[int]] = {}
    for number, stretches in enumerate(held.stretches):
        by_place.setdefault(stretches, []).append(number)
    if len(by_place) == len(held.parts) or min(map(len, by_place.values())) < 2:
        return None
    count = len(next(iter(by_place.values())))
    left = {1: 0.0, count: 0.0}
    apart: list[list[int]] = []
    for members in by_place.values():
        products = products_of([blocks[members[0]], *(held.parts[number] for number in members)])
        size = products.norm({0: 1})
        off = [products.norm({0: -1, place: 1}) for place in range(1, len(members) + 1)]
        if not all(products.finite) or not size or len(members) != count:
            return None
        if len(_classes(products, count)) == 1 and min(off) > NEAR * size:
            return None  # equal copies are reduced: of equal halves the sum is the whole, too
        if max(off) <= NEAR * size:
            continue  # these are summed
        if min(off) <= NEAR * size:
            return None
        apart.append(members)
        for times in left:
            less = products.norm({0: -float(times), **dict.fromkeys(range(1, count + 1), 1.0)}) / times
            left[times] = max(left[times], less / size, less / min(off) * NEAR / _LEFT)
    if not apart:
        return None
    times = min(left, key=left.__getitem__)
    if left[times] > NEAR:
        return None
    groups = "; ".join(named(held.ranks[number] for number in members) for members in apart)
    done, is_whole = ("averaged", "mean") if times > 1 else ("summed", "sum")
    return Fault(
        f"not {done}", tuple(sorted(held.ranks[number] for members in apart for number in members)),
        f"{what} is not {done} over the ranks that hold one slice ({groups}): each holds its own, and their {is_whole} "
        "is the other run's",
    )  # fmt: skip


def _slices_summed(what: str, held: HeldByRanks, blocks: list[TensorRef], *, is_weight: bool) -> Fault | None:
    """Slices that are all the same on ranks that have another each, and add up over such groups to the sum of the other
    run's slices: summed over the ranks that share a tensor, not over those that have the same slice.
    """
    places = list(dict.fromkeys(held.stretches))
    count = len(held.parts)
    if len(places) < 2 or count > _EACH or len({ref.shape for ref in (*held.parts, *blocks)}) > 1:
        return None
    products = products_of([*held.parts, *(blocks[held.stretches.index(place)] for place in places)])
    groups: list[list[int]] = []
    for number in range(count):
        for members in groups:
            if products.norm({members[0]: -1, number: 1}) <= _ALIKE * products.norm({number: 1}):
                members.append(number)
                break
        else:
            groups.append([number])
    # Which slice is whose cannot be told by what is the same: only that each group has as many ranks as there are.
    if len(groups) > 1 and any(len(members) != len(places) for members in groups):
        return None
    total = {count + number: 1.0 for number in range(len(places))}
    nearest = min(
        products.norm({number: 1, count + places.index(place): -1}) for number, place in enumerate(held.stretches)
    )
    size = products.norm(total)
    words = None
    for times, said_of in _of_sums(count, len(places)):
        left = products.norm({**dict.fromkeys(total, -times), **{one[0]: 1.0 for one in groups}})
        if all(products.finite) and left <= NEAR * times * size and left <= _LEFT * nearest:
            words = said_of
            break
    if words is None:
        return None
    said = "; ".join(named(held.ranks[number] for number in members) for members in groups)
    shares = "slice" if is_weight else "samples or tokens"
    over = (
        f"over the ranks that share the tensor, where those that have the same {shares} are to be" if len(groups) > 1
        else f"over all of {whose(held.ranks)}, where those alone are to be that have the same {shares}"
    )  # fmt: skip
    return Fault(
        "wrong group", held.ranks,
        f"{what} is the same on ranks that have {'another slice' if is_weight else 'other samples or tokens'} each "
        f"({said}), and adds up to {words}: it is summed {over}",
    )  # fmt: skip


def _of_sums(count: int, places: int) -> list[tuple[float, str]]:
    """What multiple of the sum of all slices the ranks of a wrong group may hold together, and words for it."""
    found = [(1.0, "the sum of all slices"), (1 / places, f"the sum of all slices divided by the {places} of them")]
    if count > places:
        found.append((count / places, f"{count // places} times the sum of all slices"))
    return found


def _elsewhere(what: str, held: HeldByRanks, blocks: list[TensorRef], odd: list[int], size: float) -> Fault | None:
    """Slices that are another rank's: in another order, or one of them twice."""
    ranks = held.ranks
    if len(ranks) > _EACH or not size:
        return None
    stands: dict[int, int] = {}
    for number in odd:
        own = products_of([blocks[number], held.parts[number]])
        off = own.norm({0: -1, 1: 1})
        if off <= NEAR * own.norm({0: 1}):
            return None  # its own, a little off: slices may be alike (positions of other samples)
        # Of ranks with one slice, one that has not its own is said to have lost it to this one.
        for other in sorted(range(len(blocks)), key=lambda one: one not in odd):
            block = blocks[other]
            if (
                other == number
                or block.shape != held.parts[number].shape
                or held.stretches[other] == held.stretches[number]
            ):
                continue
            pair = products_of([block, held.parts[number]])
            # Weights may have been recorded after a step of their own; far off its own alone says nothing.
            there = pair.norm({0: 1})
            if pair.norm({0: -1, 1: 1}) <= max(NEAR * there, min(_LEFT * off, _STEPPED * there)):
                stands[number] = other
                break
    if len(stands) < len(odd):
        return None
    said = ", ".join(f"rank {ranks[number]} holds rank {ranks[other]}'s" for number, other in stands.items())
    those = tuple(ranks[number] for number in odd)
    if sorted(held.stretches[other] for other in stands.values()) == sorted(held.stretches[number] for number in odd):
        return Fault("order", those, f"{what}: the slices stand in another order: {said}")
    twice = sorted({ranks[number] for number in odd} | {ranks[other] for other in stands.values()})
    lost = named(those)
    sentence = f"{what}: ranks {named(twice)} hold one slice ({said}): what is rank {lost}'s is on no rank"
    return Fault("held twice", tuple(twice), sentence)


def _moved(what: str, whole: TensorRef, held: HeldByRanks, odd: list[int]) -> Fault | None:
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
            pair = products_of([there, mine])
            if pair.norm({0: 1}) and pair.norm({0: -1, 1: 1}) <= NEAR * pair.norm({0: 1}):
                early = "early" if step < 0 else "late"
                said.append((held.ranks[number], f"rank {held.ranks[number]}'s begins {abs(step)} too {early}"))
                break
        else:
            return None
    if not said:
        return None
    return Fault(
        "boundary",
        tuple(rank for rank, _ in said),
        f"{what} is cut at other places: {', '.join(one for _, one in said)}",
    )


def other_samples(what: str, whole: TensorRef, held: HeldByRanks) -> Fault | None:
    """Of what one rank of several has, a stage of a pipeline: whether some samples' values are those that the other run
    has of other samples.
    """
    ours = held.parts[0]
    if len(held.ranks) != 1 or ours.shape != whole.shape or len(whole.shape) < 3 or not 1 < whole.shape[0] <= _EACH:
        return None
    if whole.numel > 1 << 24 or not all(ref.is_readable for ref in (whole, ours)):
        return None
    there, here = (pages.array(ref).astype(np.float64).reshape(whole.shape[0], -1) for ref in (whole, ours))
    off = np.linalg.norm(there[:, None] - here[None], axis=2) / (np.linalg.norm(here, axis=1)[None] + 1e-300)
    of = [(number, int(off[:, number].argmin())) for number in range(len(here)) if off[number, number] > NEAR]
    if not of or any(off[other, number] > 1e-3 for number, other in of):
        return None
    rank = held.ranks[0]
    said = ", ".join(f"sample {number} has sample {other}'s" for number, other in of)
    return Fault(
        "other samples", held.ranks,
        f"{what} on rank {rank} is that of other samples ({said}): the stage was handed a micro-batch that is not the "
        "one whose tokens it has",
    )  # fmt: skip


def tokens_in_another_order(what: str, whole: TensorRef, held: HeldByRanks) -> Fault | None:
    """Whether what every rank has of all tokens (keys and values gathered over context parallelism) is the other run's,
    token by token, in another order.
    """
    if held.is_cut or len(whole.shape) < 3 or whole.numel > 1 << 24 or len(held.ranks) < 2:
        return None
    if any(ref.shape != whole.shape for ref in held.parts) or not all(ref.is_readable for ref in (whole, *held.parts)):
        return None
    if not are_alike(held.parts):
        return None
    there, here = (pages.array(ref).astype(np.float64) for ref in (whole, held.parts[0]))
    for axis in (1, 2, 0):
        count = whole.shape[axis]
        if not _FEWEST <= count <= _MOST_TOKENS:
            continue
        rows = [np.moveaxis(values, axis, 0).reshape(count, -1) for values in (there, here)]
        if not all(np.isfinite(one).all() for one in rows) or not rows[0].any():
            continue
        # ||x||^2 - 2 x.y + ||y||^2, of all pairs of tokens.
        size = [np.square(one).sum(1) for one in rows]
        off = size[1][:, None] - 2 * rows[1] @ rows[0].T + size[0][None]
        place = off.argmin(1)
        nearest = np.linalg.norm(rows[1] - rows[0][place], axis=1)
        if bool((nearest <= 1e-4 * np.sqrt(size[1])).all()) and np.array_equal(np.sort(place), np.arange(count)):
            moved = [at for at in range(count) if place[at] != at]
            breaks = [0, *(np.flatnonzero(np.diff(place) != 1) + 1).tolist(), count]
            said = ", ".join(f"{place[at]} to {place[end - 1]}" for at, end in pairwise(breaks[:6]))
            return Fault(
                "token order", held.ranks,
                f"{what} on {whose(held.ranks)} has the other run's tokens in another order ({len(moved)} of {count} "
                f"elsewhere; they stand as {said}{', ...' if len(breaks) > 6 else ''}): the ranks' shares were put "
                "together in another turn than those of what it is used with",
            )  # fmt: skip
    return None


def own_positions(what: str, held: HeldByRanks) -> Fault | None:
    """Whether positions of a cut sequence begin at 0 on every rank."""
    if not held.is_cut or held.axis != 1 or len(held.parts[0].shape) != 2:
        return None
    if not all(np.array_equal(row, np.arange(row.size)) for ref in held.parts for row in pages.array(ref)):
        return None
    return Fault(
        "own positions",
        held.ranks,
        f"{what} begin at 0 on each of {whose(held.ranks)}: each rank counts its own tokens, not those of the sequence",
    )


def cut_across(what: str, held: HeldByRanks, bias: TensorRef, weight: TensorRef | None) -> Fault | None:
    """Whether ranks hold a weight that is queries, keys and values in one as slices in turn, where each is to hold a
    share of all three. Keys' rows are told by the gradient of the bias: softmax does not see what all keys have in
    common, so of them it is what rounding leaves of zero beside their rows of the weight's.

    held: the ranks' slices of the bias' gradient; bias, weight: the gradients of the other run.

    Raises:
        DumpError: the bytes of one cannot be read.
    """
    if (
        held.axis != 0
        or weight is None
        or len(weight.shape) != 2
        or weight.shape[:1] != bias.shape
        or len(held.ranks) < 2
    ):
        return None
    if any(len(stretches) != 1 for stretches in held.stretches) or not weight.is_readable or weight.numel > 1 << 24:
        return None
    unit = EPS.get(str(family(coarsest(bias.dtype, weight.dtype))))
    if unit is None:
        return None
    size = np.sqrt(np.square(pages.array(weight).astype(np.float64)).mean(1))
    is_noise = np.abs(pages.array(bias).astype(np.float64)) <= _CANCELS * unit * size
    keys = np.flatnonzero(is_noise)
    total = is_noise.size
    if not keys.size or keys[-1] - keys[0] + 1 != keys.size or keys[0] + 2 * keys.size != total or not size.all():
        return None
    ((start, length), *_), first, last = held.stretches[0], int(keys[0]), int(keys[-1])
    return Fault(
        "order", held.ranks,
        f"{what} is cut among {whose(held.ranks)} in turn (rank {held.ranks[0]} has rows {start} to "
        f"{start + length - 1}), and is queries, keys and values one after the other (rows {first} to {last} are keys, "
        "whose bias has no gradient): each rank is to have a share of all three",
    )  # fmt: skip


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


def not_dropped(what: str, whole: TensorRef, held: HeldByRanks) -> Fault | None:
    """Ranks whose slices have every value where the other run's have zeros, and elsewhere are these but for one factor:
    what it keeps of p is 1 / (1 - p) times what goes in.
    """
    if not held.is_cut or whole.numel > 1 << 24 or not all(ref.is_readable for ref in (whole, *held.parts)):
        return None
    those, shares = [], []
    for rank, ref, stretches in zip(held.ranks, held.parts, held.stretches, strict=True):
        block = _block(whole, held.axis or 0, stretches)
        if block.shape != ref.shape:
            return None
        there, here = (pages.array(one).astype(np.float64) for one in (block, ref))
        lost = (there == 0) & (here != 0)
        kept = there != 0
        share = float(lost.mean()) if lost.size else 0.0
        if not 0.01 < share < 0.95 or bool(((here == 0) & kept).any()):
            continue
        factor = float((here[kept] * there[kept]).sum() / np.square(there[kept]).sum())
        if np.abs(here[kept] - factor * there[kept]).max() <= NEAR * np.abs(here[kept]).max() and factor < 1:
            those.append(rank)
            shares.append(1 - factor)
    if not those or len(those) == len(held.ranks):
        return None
    return Fault(
        "not dropped", tuple(those),
        f"{what} of {whose(those)} has no zeros, where that of the other run has and is {1 / (1 - shares[0]):.4g} "
        f"times as large: {whose(those)} {'does' if len(those) == 1 else 'do'} not drop out (p = {shares[0]:.2g}), "
        "as in evaluation",
    )  # fmt: skip


def _masks(what: str, held: HeldByRanks) -> Fault | None:
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
        f"{what} has zeros at other places on {whose(held.ranks)}, and where none has one they are alike: each "
        "dropped out by "
        "its own random numbers where all should draw the same",
    )  # fmt: skip
