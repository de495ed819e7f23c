"""Numbers of tokens that several ranks have alike (tensor parallelism), and hold differently, with a mean that is the
other run's: a term of them is taken over each rank's own part of something, and was not reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
    if not _are_asked(of):
        return None
    groups = list(algebra.in_groups(of.whole, of.held))
    odd = [(there, own) for there, own in groups if _differ(there, own)]
    if not odd or not all(_have_its_mean(there, own) for there, own in odd):
        return None
    ranks = tuple(sorted(rank for _, own in odd for rank in own.ranks))
    term = _of_vocabulary(of, odd) or (
        "a term of it is taken over each rank's own part (of the vocabulary, as a mean log-probability of label "
        "smoothing) and is not reduced over the ranks"
    )
    said = "; ".join(named(own.ranks) for _, own in odd[:4])
    return Fault(
        "held otherwise", ranks,
        f"{of.name} is held differently by ranks that have the same tokens and are to hold the same ({said}), and the "
        f"mean of what they hold is the other run's: {term}",
    )  # fmt: skip


def _are_asked(of: RowOfRanks) -> bool:
    held, whole = of.held, of.whole
    if of.kind not in _KINDS or of.is_gradient or naming.is_module_tensor(of.name) or len(whole.shape) < 2:
        return False
    return whole.numel >= _FEWEST and all(ref.is_readable and ref.numel <= MOST for ref in (whole, *held.parts))


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


def of_own_words(of: RowOfRanks, *, is_first: bool) -> Fault | None:
    """Of numbers of tokens that are another on each of several ranks with the same tokens, and whose mean is none of
    the other run's: which term of the logits is taken over the rank's own words.

    is_first: whether all that they are made of agrees, as far as it was recorded.
    """
    if not _are_asked(of):
        return None
    odd = [(there, own) for there, own in algebra.in_groups(of.whole, of.held) if _differ(there, own)]
    ranks = tuple(sorted(rank for _, own in odd for rank in own.ranks))
    if not odd or set(ranks) != set(of.found.parted):
        return None
    term = _of_vocabulary(of, odd)
    if term is None and not is_first:
        return None
    said = "; ".join(named(own.ranks) for _, own in odd[:4])
    term = term or (
        "it is made of each rank's own part of something (its words of the vocabulary, its channels), and is not "
        "reduced over the ranks"
    )
    return Fault(
        "held otherwise", ranks,
        f"{of.name} is held differently by ranks that have the same tokens and are to hold the same ({said}), and by "
        f"none as by the other run: {term}",
    )  # fmt: skip


def _of_vocabulary(of: RowOfRanks, odd: Sequence[tuple[TensorRef, HeldByRanks]]) -> str | None:
    """Which term of the logits is taken over a rank's own words, where the logits were recorded and say so."""
    for (name, stage), (_, ref) in of.side.tensors.items():
        cut, facing = of.together.held.get(id(ref)), of.other.tensors.get((name, stage))
        if cut is None or facing is None or not naming.makes_logits(name) or name.startswith("grad."):
            continue
        if facing[1].shape[:-1] != of.whole.shape or facing[1].numel > MOST or not facing[1].is_readable:
            continue
        logits, own = pages.array(facing[1]).astype(np.float64), odd[0][1]
        words = _words(own.ranks, cut, logits.shape[-1])
        if len(odd) != 1 or not np.isfinite(logits).all() or len(words) != len(own.parts):
            return None
        for called, term in _TERMS.items():
            right = term(logits)
            factors = [
                _factor(term(_of_words(logits, mine)) - right, part, of.whole)
                for mine, part in zip(words, own.parts, strict=True)
            ]
            known = [one for one in factors if one is not None]
            if len(known) == len(factors) and np.ptp(known) <= _LEFT * abs(known[0]):
                return (
                    f"each is off by {abs(known[0]):.3g} times what {called} over the rank's own words is off that "
                    "over all: it is taken over the local part of the vocabulary and not reduced over the ranks"
                )
    return None


def _words(ranks: Sequence[int], cut: HeldByRanks, count: int) -> list[list[Stretch]]:
    """Of every rank, its words: as the logits are cut, or, where these were gathered, an even share in turn."""
    if cut.axis is not None and set(ranks) <= set(cut.ranks):
        return [list(cut.stretches[cut.ranks.index(rank)]) for rank in ranks]
    each = count // len(ranks)
    return [[(number * each, each)] for number in range(len(ranks))] if each * len(ranks) == count else []


def _of_words(logits: Array, words: Sequence[Stretch]) -> Array:
    return np.concatenate([logits[..., start : start + length] for start, length in words], -1)


def _log_sum_exp(logits: Array) -> Array:
    most = logits.max(-1, keepdims=True)
    return np.asarray((most + np.log(np.exp(logits - most).sum(-1, keepdims=True)))[..., 0])


def _entropy(logits: Array) -> Array:
    logs = logits - _log_sum_exp(logits)[..., None]
    return np.asarray(-(np.exp(logs) * logs).sum(-1))


#: What a loss of a token may hold of all words.
_TERMS: dict[str, Callable[[Array], Array]] = {
    "the mean logit (label smoothing)": lambda logits: np.asarray(logits.mean(-1)),
    "the squared log-sum-exp (a z-loss)": lambda logits: np.square(_log_sum_exp(logits)),
    "the log-sum-exp (of a softmax)": _log_sum_exp,
    "the entropy": _entropy,
    "the largest logit": lambda logits: np.asarray(logits.max(-1)),
    "the mean squared logit": lambda logits: np.asarray(np.square(logits).mean(-1)),
}


def _factor(term: Array, ref: TensorRef, whole: TensorRef) -> float | None:
    """How many times a term is in what a rank is off by; None where that is something else."""
    off = pages.array(ref).astype(np.float64) - pages.array(whole).astype(np.float64)
    counts = off != 0
    if not counts.any() or not term[counts].any():
        return None
    factor = float((off * term)[counts].sum() / np.square(term[counts]).sum())
    return factor if np.linalg.norm(off[counts] - factor * term[counts]) <= _LEFT * np.linalg.norm(off) else None
