"""Numbers of samples that are made of their tokens, of which each rank has some: made of a rank's own tokens alone.

A sequence's importance ratio is exp of the mean over its tokens of log pi - log pi_old (GSPO, Zheng et al. 2025), or of
their sum. (A sum itself is one of the ranks' parts, which are added up.) Log-probabilities and masks of all tokens are
recorded: which of these makes the other run's number of every sample is asked first, and then whether the same of a
rank's own tokens makes the rank's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from msgspec import Struct

from replay_core import pages
from replay_core.compare.judging.attention_made import Bools
from replay_core.compare.judging.faults import Fault, whose
from replay_core.compare.judging.products import Array
from replay_core.compare.pairing.dims import Stretch
from replay_core.compare.pairing.micro_batch_pair import Side
from replay_core.compare.pairing.ranks import HeldByRanks
from replay_core.records import TensorRef

#: How near a number is to what tokens make, of itself; and what part of a difference may be left.
_NEAR, _LEFT = 1e-3, 0.02
_FEWEST, _MOST = 2, 1 << 22
#: Beside what log-probabilities may stand, less them.
_LESS = ("old_logprobs", "rollout_logprobs", "ref_logprobs")

Cuts = Sequence[tuple[int, tuple[tuple[Stretch, ...], ...]]]


class _OfTokens(Struct, frozen=True):
    """A number of every token [B, S], which of them count, and words."""

    values: Array
    counts: Bools
    words: str


def explain(
    what: str, whole: TensorRef, held: HeldByRanks, other: Side, ranks: Sequence[int], cuts: Cuts
) -> Fault | None:
    """What numbers of samples are on the ranks, which have some samples each and some tokens of these.

    held, whole: [sample] or [sample, 1]. other: the other run's log-probabilities and masks. ranks, cuts: who has which
    samples and tokens.

    Raises:
        DumpError: the bytes of one cannot be read.
    """
    tokens = dict(zip(ranks, next((stretches for axis, stretches in cuts if axis == 1), ()), strict=False))
    if len(set(tokens.values())) < 2 or not set(held.ranks) <= tokens.keys() or held.axis not in (None, 0):
        return None
    if not _FEWEST <= whole.numel <= _MOST or not 1 <= len(whole.shape) <= 2 or whole.numel != whole.shape[0]:
        return None
    if not all(ref.is_readable for ref in (whole, *held.parts)):
        return None
    there_B = pages.array(whole).astype(np.float64).reshape(-1)
    if not np.isfinite(there_B).all():
        return None
    for made_of in _of_tokens(other, len(there_B)):
        for words, statistic in _STATISTICS.items():
            if not _is_near(statistic(made_of.values, made_of.counts, made_of.counts), there_B, there_B):
                continue
            if (fault := _of_own(what, there_B, held, tokens, made_of, words, statistic)) is not None:
                return fault
    return None


def _of_own(
    what: str, there_B: Array, held: HeldByRanks, tokens: Mapping[int, tuple[Stretch, ...]], made_of: _OfTokens,
    words: str, statistic: _Statistic,
) -> Fault | None:  # fmt: skip
    own: dict[str, bool] = {}
    for number, (rank, ref) in enumerate(zip(held.ranks, held.parts, strict=True)):
        rows = np.arange(len(there_B)) if held.axis is None else _places(held.stretches[number])
        here_B = pages.array(ref).astype(np.float64).reshape(-1)
        if here_B.shape != rows.shape or not np.isfinite(here_B).all():
            return None
        values, counts = made_of.values[rows], made_of.counts[rows]
        mine = counts & np.isin(np.arange(counts.shape[1]), _places(tokens[rank]))
        for said, one, beside in (
            ("own tokens", mine, mine), ("own sum", mine, counts), ("own number", counts, mine),
        ):  # fmt: skip
            is_so = _is_near(statistic(values, one, beside), here_B, there_B[rows])
            own[said] = own.get(said, True) and is_so
    wrong = next((said for said, is_so in own.items() if is_so), None)
    if wrong is None:
        return None
    how = {
        "own tokens": "made of the rank's own tokens alone",
        "own sum": "made of the sum over the rank's own tokens alone, by the number of all",
        "own number": "made of the sum over all tokens by the number of the rank's own alone",
    }[wrong]
    return Fault(
        "own tokens", held.ranks,
        f"{what} on {whose(held.ranks)} is {how}: the {words} of {made_of.words} over a sample's tokens makes the "
        "other run's, and here it is not reduced over the ranks that hold the other tokens of the sample",
    )  # fmt: skip


def _places(stretches: Sequence[Stretch]) -> Array:
    return np.concatenate([np.arange(at, at + long) for at, long in stretches])


def _is_near(made_B: Array, said_B: Array, right_B: Array) -> bool:
    """Whether numbers are what is made: to float32, and to a small part of what they are off the right ones."""
    off = float(np.linalg.norm(said_B - right_B))
    line = min(_NEAR * float(np.linalg.norm(said_B)), _LEFT * off if off else np.inf)
    return bool(np.isfinite(made_B).all() and np.linalg.norm(made_B - said_B) <= line)


#: What numbers of tokens [B, S] make of those that count, by the number of others: [B].
_Statistic = Callable[[Array, Bools, Bools], Array]


def _sum(values: Array, of: Bools, by: Bools) -> Array:
    return np.asarray(np.where(of, values, 0.0).sum(1))


def _mean(values: Array, of: Bools, by: Bools) -> Array:
    return np.asarray(_sum(values, of, by) / np.maximum(by.sum(1), 1))


_STATISTICS: dict[str, _Statistic] = {
    "exp of the mean": lambda values, of, by: np.exp(_mean(values, of, by)),
    "exp of the sum": lambda values, of, by: np.exp(_sum(values, of, by)),
    "mean": _mean,
}


def _of_tokens(side: Side, samples: int) -> Iterator[_OfTokens]:
    """What numbers of samples may be made of: log-probabilities, and these less others."""
    policy = _read(side, "policy_logprobs", samples)
    if policy is None:
        return
    mask = _read(side, "response_mask", samples)
    counts = policy != 0 if mask is None or mask.shape != policy.shape else mask != 0
    yield _OfTokens(policy, counts, "log-probabilities")
    for name in _LESS:
        less = _read(side, name, samples)
        if less is not None and less.shape == policy.shape:
            words = f"log-probabilities less {name}"
            yield _OfTokens(policy - less, counts, words)


def _read(side: Side, name: str, samples: int) -> Array | None:
    ref = side.find(name)
    if ref is None or len(ref.shape) != 2 or ref.shape[0] != samples or not ref.is_readable or ref.numel > _MOST:
        return None
    values = pages.array(ref).astype(np.float64)
    return values if np.isfinite(values).all() else None
