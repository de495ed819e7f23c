"""Numbers of tokens that several ranks have alike (tensor parallelism), and hold differently, with a mean that is the
other run's: a term of them is taken over each rank's own part of something, and was not reduced.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from replay_core import naming, pages
from replay_core.compare.judging import algebra
from replay_core.compare.judging.faults import Fault
from replay_core.compare.judging.products import NEAR, Array, products_of
from replay_core.compare.judging.ranks.row import MOST, RowOfRanks
from replay_core.compare.pairing.dims import Stretch
from replay_core.compare.pairing.ranks import HeldByRanks, named
from replay_core.records import TensorRef

#: Kinds of what is said of tokens, of which no rank has a part by right that is as large as the whole.
_KINDS = ("value", "loss", "logprob")
#: Fewer numbers have a mean that is the other run's by chance.
_FEWEST = 8
#: What part of a difference may be left of what explains it.
_LEFT = 0.05


def explain(of: RowOfRanks) -> Fault | None:
    """What is held otherwise than the layout says, of numbers of tokens [sample, token]."""
    held, whole = of.held, of.whole
    if of.kind not in _KINDS or of.is_gradient or naming.is_module_tensor(of.name) or len(whole.shape) < 2:
        return None
    if whole.numel < _FEWEST or not all(ref.is_readable and ref.numel <= MOST for ref in (whole, *held.parts)):
        return None
    groups = list(algebra.in_groups(whole, held))
    odd = [(there, own) for there, own in groups if _differ(there, own)]
    if not odd or not all(_have_its_mean(there, own) for there, own in odd):
        return None
    ranks = tuple(sorted(rank for _, own in odd for rank in own.ranks))
    term = _of_vocabulary(of, odd)
    said = "; ".join(named(own.ranks) for _, own in odd[:4])
    return Fault(
        "held otherwise", ranks,
        f"{of.name} is held differently by ranks that have the same tokens and are to hold the same ({said}), and the "
        f"mean of what they hold is the other run's: {term}",
    )  # fmt: skip


def _differ(there: TensorRef, own: HeldByRanks) -> bool:
    same = len(own.ranks) > 1 and all(ref.shape == there.shape for ref in own.parts)
    return same and not algebra.are_alike(own.parts)


def _have_its_mean(there: TensorRef, own: HeldByRanks) -> bool:
    count = len(own.parts)
    products = products_of([there, *own.parts])
    if not all(products.finite):
        return False
    left = products.norm({0: -float(count), **dict.fromkeys(range(1, count + 1), 1.0)}) / count
    nearest = min(products.norm({0: -1, number: 1}) for number in range(1, count + 1))
    # Of parts that are mostly 0, as of words of a rank's own, the mean is next to nothing.
    return left <= NEAR * products.norm({0: 1}) and left <= 0.1 * nearest


def _of_vocabulary(of: RowOfRanks, odd: Sequence[tuple[TensorRef, HeldByRanks]]) -> str:
    """Of which term: a mean of logits over a rank's own words, where the logits are cut and say so."""
    usual = (
        "a term of it is taken over each rank's own part (of the vocabulary, as a mean log-probability of label "
        "smoothing) and is not reduced over the ranks"
    )
    for (name, stage), (_, ref) in of.side.tensors.items():
        cut, facing = of.together.held.get(id(ref)), of.other.tensors.get((name, stage))
        if cut is None or facing is None or not naming.makes_logits(name) or name.startswith("grad."):
            continue
        if facing[1].shape[:-1] != of.whole.shape or facing[1].numel > MOST:
            continue
        logits = pages.array(facing[1]).astype(np.float64)
        if len(odd) != 1 or not np.isfinite(logits).all():
            return usual
        own = odd[0][1]
        words = _words(own.ranks, cut, logits.shape[-1])
        factors = [_factor(one, ref, logits, of.whole) for one, ref in zip(words, own.parts, strict=False)]
        known = [one for one in factors if one is not None]
        if len(known) == len(own.parts) and np.ptp(known) <= _LEFT * abs(known[0]):
            return (
                f"each is off by {abs(known[0]):.3g} times what the mean logit over the rank's own words is off that "
                "over all: a mean over the vocabulary (label smoothing) is taken over the local part of it and not "
                "reduced over the ranks"
            )
    return usual


def _words(ranks: Sequence[int], cut: HeldByRanks, count: int) -> list[list[Stretch]]:
    """Of every rank, its words: as the logits are cut, or, where these were gathered, an even share in turn."""
    if cut.axis is not None and set(ranks) <= set(cut.ranks):
        return [list(cut.stretches[cut.ranks.index(rank)]) for rank in ranks]
    each = count // len(ranks)
    return [[(number * each, each)] for number in range(len(ranks))] if each * len(ranks) == count else []


def _factor(words: Sequence[Stretch], ref: TensorRef, logits: Array, whole: TensorRef) -> float | None:
    own = np.concatenate([logits[..., start : start + length] for start, length in words], -1)
    term = own.mean(-1) - logits.mean(-1)
    off = pages.array(ref).astype(np.float64) - pages.array(whole).astype(np.float64)
    counts = off != 0
    if not counts.any() or not term[counts].any():
        return None
    factor = float((off * term)[counts].sum() / np.square(term[counts]).sum())
    return factor if np.linalg.norm(off[counts] - factor * term[counts]) <= _LEFT * np.linalg.norm(off) else None
