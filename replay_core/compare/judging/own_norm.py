"""Gradient norms that each rank took of what it holds alone: said of other tensors than the other run's, which are
compared themselves.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from replay_core import pages
from replay_core.compare.judging.faults import Fault, whose
from replay_core.compare.pairing.align import MicroBatchPair, Side, TensorPair
from replay_core.compare.pairing.ranks import HeldByRanks, Together, standing_for
from replay_core.errors import DumpError
from replay_core.records import Parts, TensorRef

_NAMES = ("grad_norm", "clipped_grad_norm")
#: How near a norm is to what was recorded: in float32, as a rule.
_NEAR = 1e-3
_EXACT = 1e-5
#: How near what is counted again must tell the norm, of what it adds.
_COUNTED = 5e-3
#: What is said of such norms.
OF_PARTS = "each rank's is the norm of the gradients it holds, which are not all; these are compared themselves"
OF_OTHERS = "either run's is the norm of the gradients that its rank holds, and these are not the same ones"


def _called(held: HeldByRanks) -> str:
    return held.parts[0].canonical or held.parts[0].name


def is_of_parts(name: str, together: Together) -> bool:
    """Whether the norm that each rank recorded, in either run, is that of its own gradients, which are not all of them
    whole.
    """
    if name not in _NAMES:
        return False
    held = next((one for one in together.held.values() if one.parts[0].name == name), None)
    if together.whole_of is not None and is_of_parts(name, together.whole_of):
        return True
    gradients = [one for one in together.held.values() if _called(one).startswith("grad.")]
    if held is None or not any(one.is_cut or len(one.ranks) < len(held.ranks) for one in gradients):
        return False
    squares = dict.fromkeys(held.ranks, 0.0)
    for one in gradients:
        for rank, ref in zip(one.ranks, one.parts, strict=True):
            squares[rank] += _square(ref)
    return all(_is_root(ref, squares[rank]) for rank, ref in zip(held.ranks, held.parts, strict=True))


def not_summed(name: str, whole: TensorRef, held: HeldByRanks) -> Fault | None:
    """Whether the squares of the norms that ranks recorded, of each value once, add up to that of the other run's."""
    refs = (whole, *held.parts)
    if name not in _NAMES or len(held.ranks) < 2 or any(ref.numel != 1 or not ref.is_readable for ref in refs):
        return None
    there, *norms = (float(pages.array(ref).reshape(-1)[0]) for ref in refs)
    each: list[float] = []
    for one in norms:
        if all(abs(one - other) > _NEAR * abs(one) for other in each):
            each.append(one)
    square = sum(one * one for one in each)
    if len(each) < 2 or not there or not abs(square**0.5 - there) <= _EXACT * there:
        return None
    said = ", ".join(f"{one:.4g} on {rank}" for rank, one in zip(held.ranks[:8], norms, strict=False))
    return Fault(
        "norm not summed", held.ranks,
        f"{name} is another on each of {whose(held.ranks)} ({said}), and their squares add up to that of the other "
        f"run's ({there:.4g}): the square is not summed over the ranks that hold the other gradients (of experts, "
        "stages or shards), and each rank clips by its own",
    )  # fmt: skip


def counted_again(name: str, whole: TensorRef, held: HeldByRanks, together: Together) -> Fault | None:
    """Whether the ranks' one norm is off from the other run's by exactly what gradients add that more ranks hold than
    others: whole on each rank of a group that cuts the others, or on two stages of a pipeline.
    """
    refs = (whole, *held.parts)
    if name not in _NAMES or any(ref.numel != 1 or not ref.is_readable for ref in refs):
        return None
    there, *norms = (float(pages.array(ref).reshape(-1)[0]) for ref in refs)
    if not there or any(abs(one - norms[0]) > _EXACT * abs(one) for one in norms):
        return None
    gradients = [one for one in together.held.values() if _called(one).startswith("grad.")]
    sums: dict[str, tuple[float, float]] = {}
    for one in gradients:
        numel = standing_for(one).numel
        copies = sum(map(_own_size, one.parts)) / numel if numel else 0.0
        if copies:
            square = sum(map(_square, one.parts)) / (sum(ref.numel for ref in one.parts) / numel)
            sums[_called(one).removeprefix("grad.")] = square, copies
    fewest = min((copies for _, copies in sums.values()), default=0.0)
    again = [name for name, (_, copies) in sums.items() if copies > fewest]
    once = sum(square for square, _ in sums.values())
    if not again or not once:
        return None
    told = (sum(square * copies for square, copies in sums.values()) / fewest / once) ** 0.5
    if abs(told - 1) <= _NEAR or abs(norms[0] / there - told) > _COUNTED * abs(told - 1):
        return None
    times = sorted({sums[one][1] / fewest for one in again})
    which = ", ".join(sorted(again)[:4]) + (f" and {len(again) - 4} more" if len(again) > 4 else "")
    return Fault(
        "norm counted again", held.ranks,
        f"{name} counts the gradients of {which} {' or '.join(f'{one:g}' for one in times)} times: counted so it is "
        f"{told:.6g} times the other run's, and what {whose(held.ranks)} recorded is {norms[0] / there:.6g} times it; "
        "more ranks hold these than the others (not cut, or on two stages), and their squares are summed over all "
        "ranks where each is due once: every gradient is clipped by that norm",
    )  # fmt: skip


def is_of_others(pair: TensorPair, micro_pair: MicroBatchPair) -> bool:
    """Whether the norms of two ranks that face each other are those of the gradients that each holds, and these are
    others by name: experts, of which one run has all on every rank and the other some.
    """
    if pair.name not in _NAMES or pair.a is None or pair.b is None or micro_pair.together is not None:
        return False
    a, b = (dict(_gradients(side)) for side in (micro_pair.a, micro_pair.b))
    if not a or not b or a.keys() == b.keys():
        return False
    sides = ((pair.a[1], a.values()), (pair.b[1], b.values()))
    try:
        return all(_is_root(said, sum(map(_square, refs))) for said, refs in sides)
    except DumpError:
        return False


def _gradients(side: Side) -> Iterable[tuple[str, TensorRef]]:
    return ((name, ref) for (name, _), (_, ref) in side.tensors.items() if name.startswith("grad."))


def _own_size(ref: TensorRef) -> int:
    """How many elements a rank has itself of what was laid together of its slice and others'."""
    while isinstance(ref.source, Parts) and ref.source.parts:
        ref = ref.source.parts[0]
    return ref.numel


def _square(ref: TensorRef) -> float:
    return sum(float(np.square(chunk.astype(np.float64)).sum()) for _, chunk in pages.flat_chunks(ref))


def _is_root(ref: TensorRef, square: float) -> bool:
    if ref.numel != 1 or not ref.is_readable or ref.is_text:
        return False
    said = float(pages.array(ref).reshape(-1)[0])
    return bool(abs(said - square**0.5) <= _NEAR * abs(said))
