"""What is said of words whose weight is cut among the ranks: rows that are looked up, log-probabilities over a cut
vocabulary (Megatron-LM, `VocabParallelEmbedding` and `vocab_parallel_cross_entropy`).

A rank knows the words of its slice. Of a token that is no word of its, it adds 0 to a lookup's sum and to the sum that
is the target's logit; the largest logit and the sum of exponentials are made over all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from replay_core import pages
from replay_core.compare.judging.faults import Fault, whose
from replay_core.compare.judging.products import NEAR, Array
from replay_core.compare.pairing.ranks import HeldByRanks, named, standing_for
from replay_core.records import TensorRef

#: Of fewer tokens, those that are off are one rank's words by chance: one of a hundred times at eight.
_FEWEST_TOKENS = 16
#: What a row that was looked up may be off its weight's, which may have been recorded after its step.
_STEPPED = 0.1
_MOST = 1 << 27
#: Logits of words that count for nothing are this far below all others, of every token.
_MASKED = -1e3


def explain(
    what: str, said: Sequence[Array], logits: Array, held: HeldByRanks, targets: NDArray[np.int64]
) -> Fault | None:
    """What is wrong with log-probabilities over a cut vocabulary.

    said: of the whole and of each rank, [N]; logits: [N, V] of the whole, of which held says the slices; targets: [N].
    """
    return (
        own_vocabulary(said[0], said[1:], logits, held, targets)
        or unmasked(what, said[0], said[1:], logits, held, targets)
        or of_one_slice(what, said[0], said[1:], held, targets)
    )


def counted_padding(what: str, whole: TensorRef, held: HeldByRanks) -> Fault | None:
    """Whether the other run masks words (the rows that pad a vocabulary: one number far below all logits, of every
    token), and these ranks let them count, while all other logits agree.
    """
    if whole.numel > _MOST or len(whole.shape) < 2 or not all(ref.is_readable for ref in (whole, *held.parts)):
        return None
    laid = standing_for(held)
    if laid.shape != whole.shape:
        return None
    there_NV, here_NV = (pages.array(ref).astype(np.float64).reshape(-1, whole.shape[-1]) for ref in (whole, laid))
    is_masked_V = (there_NV <= _MASKED).all(0) & ((there_NV == there_NV[0]) | np.isneginf(there_NV)).all(0)
    is_counted_V = is_masked_V & (here_NV > _MASKED).all(0)
    rest_V = ~is_masked_V
    if len(there_NV) < _FEWEST_TOKENS or not is_counted_V.any() or not rest_V.any():
        return None
    rest, off = there_NV[:, rest_V], here_NV[:, rest_V] - there_NV[:, rest_V]
    if rest.min() <= _MASKED or not np.linalg.norm(off) <= NEAR * np.linalg.norm(rest):
        return None
    words = np.flatnonzero(is_counted_V)
    ranks = held.ranks
    if held.axis == len(whole.shape) - 1:
        ranks = tuple(
            rank for rank, stretches in zip(held.ranks, held.stretches, strict=True)
            if any(is_counted_V[at : at + long].any() for at, long in stretches)
        )  # fmt: skip
    return Fault(
        "padded words", ranks,
        f"{what}: the other run masks {words.size} words ({words[0]} to {words[-1]}, as those that pad a vocabulary), "
        f"and {whose(ranks)} let{'s' * (len(ranks) == 1)} them count in the softmax; all other logits agree",
    )  # fmt: skip


def targets_of(
    said: Array, logits: Array, candidates: Sequence[NDArray[np.int64]]
) -> tuple[NDArray[np.bool_], NDArray[np.int64], int] | None:
    """Which tokens count, and the targets whose log-probabilities by these logits, times a sign (1 or -1), are what is
    said of them; None where no candidate's are, so that the logits are others.

    said: [N], 0 where no token counts; logits: [N, V]; candidates: [N] each.
    """
    for targets in candidates:
        told = (said != 0) & (targets >= 0) & (targets < logits.shape[1])
        if not told.any():
            continue
        own = logprobs(logits[told], targets[told])
        for sign in (1, -1):
            if np.abs(own - sign * said[told]).max() <= NEAR * np.abs(own).max():
                return told, targets[told], sign
    return None


def unmasked(
    what: str, a: Array, parts: Sequence[Array], logits: Array, held: HeldByRanks, targets: NDArray[np.int64]
) -> Fault | None:
    """The rank that adds the logit of its first or last word for targets that are no words of its.

    a: [N]; parts: each rank's [N], alike; logits: [N, V]; targets: [N].
    """
    off_N = parts[0] - a
    most = float(np.abs(off_N).max(initial=0.0))
    if off_N.size < _FEWEST_TOKENS or not most or any(np.abs(one - parts[0]).max() > NEAR * most for one in parts[1:]):
        return None
    is_off_N = np.abs(off_N) > 1e-3 * most
    for rank, ((start, length), *more) in zip(held.ranks, held.stretches, strict=True):
        is_own_N = (targets >= start) & (targets < start + length)
        if more or (is_off_N & is_own_N).any() or is_off_N.sum() < 3:
            continue
        for word in (start, start + length - 1):
            if np.abs(off_N - logits[:, word])[is_off_N].max() <= NEAR * most:
                return Fault(
                    "vocabulary slice", (rank,),
                    f"{what} is off by the logit of word {word} where the target is a word of another rank: rank "
                    f"{rank}, whose words are {start} to {start + length - 1}, adds that for targets that are not its",
                )  # fmt: skip
    return None


def looked_up_unmasked(what: str, off_NH: Array, ids: NDArray[np.int64], weights: HeldByRanks) -> Fault | None:
    """The rank that adds a row of its own for tokens that are no words of its.

    off_NH: what each token's row is off; ids: [N]. weights: the slices of the weight, [words, H] each.
    """
    size_N = np.linalg.norm(off_NH, axis=1)
    is_off_N = size_N > 1e-3 * size_N.max(initial=0.0)
    if is_off_N.sum() < 3 or ids.size < _FEWEST_TOKENS or ids.size != len(off_NH):
        return None
    row_H = off_NH[is_off_N].mean(0)
    if np.linalg.norm(off_NH[is_off_N] - row_H, axis=1).max() > 1e-2 * np.linalg.norm(row_H):
        return None
    for rank, ref, ((start, length), *more) in zip(weights.ranks, weights.parts, weights.stretches, strict=True):
        is_own_N = (ids >= start) & (ids < start + length)
        if more or ref.shape != (length, row_H.size) or ref.numel > _MOST or (is_off_N & is_own_N).any():
            continue
        weight = pages.array(ref).astype(np.float64)
        for word in (0, length - 1):
            if np.linalg.norm(weight[word] - row_H) <= _STEPPED * np.linalg.norm(row_H):
                return Fault(
                    "vocabulary slice", (rank,),
                    f"{what} is off by the row of word {start + word} where the token is a word of another rank: "
                    f"rank {rank}, whose words are {start} to {start + length - 1}, adds that for tokens that are not "
                    "its",
                )  # fmt: skip
    return None


def is_lookup(output_NH: Array, ids: NDArray[np.int64], weights: HeldByRanks) -> bool:
    """Whether an output is, but for a step of the weight, its rows of the token ids."""
    if weights.axis != 0 or any(len(stretches) != 1 for stretches in weights.stretches):
        return False
    left = total = 0.0
    seen = np.zeros(ids.size, bool)
    for ref, ((start, length), *_) in zip(weights.parts, weights.stretches, strict=True):
        is_own_N = (ids >= start) & (ids < start + length) & ~seen
        if ref.shape != (length, output_NH.shape[1]) or ref.numel > _MOST:
            return False
        seen |= is_own_N
        rows = pages.array(ref)[ids[is_own_N] - start].astype(np.float64)
        left += float(np.square(rows - output_NH[is_own_N]).sum())
        total += float(np.square(rows).sum())
    return bool(seen.all()) and left <= _STEPPED**2 * total


def of_words(what: str, off: NDArray[np.bool_], ids: NDArray[np.int64], held: HeldByRanks) -> Fault | None:
    """Of an embedding whose words are cut among ranks: the rank whose words' tokens are off, and no others.

    off, ids: [N]. held: the weight's slices.
    """
    if ids.size < _FEWEST_TOKENS:
        return None
    for rank, stretches in zip(held.ranks, held.stretches, strict=True):
        ((start, length), *more) = stretches
        own = (ids >= start) & (ids < start + length)
        if not more and not own.all() and own.sum() >= 3 and not (off & ~own).any() and off.sum() >= 0.8 * own.sum():
            return Fault(
                "vocabulary slice", (rank,),
                f"{what} is off where the token is one of the words {start} to {start + length - 1}, which are rank "
                f"{rank}'s, and nowhere else: where that rank's slice begins, or which rows it looks up, is wrong",
            )  # fmt: skip
    return None


def logprobs(logits: Array, targets: NDArray[np.int64]) -> Array:
    """Of each target [N] its log-probability: logits [N, V]."""
    most = logits.max(1)
    total = most + np.log(np.exp(logits - most[:, None]).sum(1))
    return np.asarray(logits[np.arange(targets.size), targets] - total)


def of_one_slice(
    what: str, a: Array, parts: Sequence[Array], held: HeldByRanks, targets: NDArray[np.int64]
) -> Fault | None:
    """Of what is said of each token's target, over a cut vocabulary: the rank in whose slice every target lies where it
    is off, and whose targets are nearly all off.

    a: [N]; parts: each rank's [N], alike; targets: [N].
    """
    off_N = np.abs(parts[0] - a)
    most = float(off_N.max(initial=0.0))
    if (
        off_N.size < _FEWEST_TOKENS
        or not most
        or not np.isfinite(most)
        or any(np.abs(one - parts[0]).max() > NEAR * most for one in parts[1:])
    ):
        return None
    is_off_N = off_N > 1e-3 * most
    for rank, ((start, length), *more) in zip(held.ranks, held.stretches, strict=True):
        own_N = (targets >= start) & (targets < start + length)
        if more or own_N.all() or own_N.sum() < 3:
            continue
        if not (is_off_N & ~own_N).any() and (is_off_N & own_N).sum() >= 0.8 * own_N.sum():
            return Fault(
                "vocabulary slice", (rank,),
                f"{what} is off where the target is one of the words {start} to {start + length - 1}, which are rank "
                f"{rank}'s, and nowhere else: where that rank's slice begins, or what it adds for a target, is wrong",
            )  # fmt: skip
    return None


def own_vocabulary(
    a: Array, parts: Sequence[Array], logits: Array, held: HeldByRanks, targets: NDArray[np.int64]
) -> Fault | None:
    """Of log-probabilities over a cut vocabulary: whether each rank divided by the sum over its own slice, or the
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
        return bool(np.abs(made - said).max() <= NEAR * size)

    if all(fits(a + whole - of_rank, said) for of_rank, said in zip(by_rank, parts, strict=True)):
        return Fault(
            "own vocabulary", held.ranks,
            f"the log-probabilities of ranks {named(held.ranks)} are each normalised over the rank's own slice of "
            "the vocabulary: the sum "
            "of exponentials was not made over all ranks",
        )  # fmt: skip
    owner = np.zeros(targets.size, np.int64)
    for number, cut in enumerate(cuts):
        owner[(targets >= cut.start) & (targets < cut.stop)] = number
    # The logit is taken relative to its owner's maximum too, or each rank takes off its own in the end.
    made = a + whole - most[owner, np.arange(targets.size)] - np.log(sums.sum(0))
    of_each = [a + whole - top - np.log(sums.sum(0)) for top in most]
    if all(fits(made, said) for said in parts) or all(map(fits, of_each, parts)):
        return Fault(
            "own maximum", held.ranks,
            f"the log-probabilities add up exponentials that ranks {named(held.ranks)} took each relative to its "
            "own largest logit: the "
            "maximum over all ranks is missing",
        )  # fmt: skip
    return None
