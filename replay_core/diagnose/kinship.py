"""What a tensor of log-probabilities is, where it is not what its name says: another one, put through a known mistake.

Rollout, old, policy and reference say nearly the same of the same tokens. Where one does not, a closed family of
transforms of the others is searched: zeros, probabilities, another base or sign, sums, means, a shift, another row, a
bound. A transform is believed where it makes the numbers of nearly all tokens that tell it from the plain tensor.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.columns import Column
from replay_core.diagnose.flat import Array
from replay_core.diagnose.passes import before_any_update_N
from replay_core.diagnose.places import is_of_its_tokens

#: Two forwards of one model differ by less in most tokens: nats, and a share of the log-probability (bf16).
ROUNDING, RELATIVE = 0.03, 0.03
#: Mean distance below which two tensors are one; tokens that tell, and the share of them that a transform makes.
ALIKE, FEWEST, SHARE = 0.03, 12, 0.9
#: Log-probabilities in which a factor and a temperature differ: a temperature leaves p = 1/2 where it is.
MIDDLE = (-1.5, -0.2)
#: Places that a row may be shifted by.
SHIFTS = (1, -1, 2, -2, 3, -3)
#: Tokens of a response that tell it from another; samples that tell rows exchanged from one that is odd, and the most
#: that each is held against each other; how near another's values are, in shares of what its own are apart.
TOKENS, SAMPLES, MOST, NEARER = 3, 4, 512, 0.2
#: And the most where each of four tensors is held against each other.
ROWS = 160
#: Of two rows the first tokens are held against each other before all of them: how many, and how far apart at most.
HEAD, HEAD_APART = 16, 4 * ALIKE
#: Nats that tokens of another place are apart on average: less may be noise, whose order tells nothing.
REORDERED = 0.3
_NAMES = ("rollout_logprobs", "old_logprobs", "policy_logprobs", "ref_logprobs")


class Kin(Struct, frozen=True):
    """`suspect` is what a transform makes of `model`. `share`: of the tokens that tell, those it makes."""

    suspect: Column
    model: Column
    what: str
    """What it is, as the rest of a sentence."""
    cause: str
    share: float
    tokens: int
    at: int
    """The first flat token that tells."""
    by: int = 0
    """Places it is shifted by, where it is."""
    is_told: bool = False
    """Whether a third one, or the tokens themselves, say that it is the odd one of the two."""


class _Transform(Struct, frozen=True):
    what: str
    cause: str
    values_K: Array
    """What the suspect should be, NaN where it says nothing."""
    tells_K: Array | None = None
    """Tokens that tell, where the distance alone does not say it."""
    by: int = 0


def whose(batch: StepBatch, these: Column, those: Column, least: float = 0.6) -> Array | None:
    """The sample [B] whose values in `those` each sample's values in `these` are, where `least` of those that can
    be told (4 and more) are another's; -1 where it cannot be told. None where rows are not exchanged.
    """
    inside_N = batch.response_N if batch.response_N is not None else batch.trained_N
    if inside_N is None or not SAMPLES <= len(batch) <= MOST:
        return None
    spans = batch.flat.spans
    # The first token of rows that are recorded without their prompts has no number in either.
    inside_N = inside_N & ~_behind_the_last_N(batch) & (these.said_N | those.said_N)
    these_N, those_N = np.nan_to_num(these.values_N), np.nan_to_num(those.values_N)
    theirs = [these_N[at][inside_N[at]] for at in spans]
    ours = [those_N[at][inside_N[at]] for at in spans]
    ours_BH = np.full((len(batch), HEAD), np.nan)
    for sample, mine in enumerate(ours):
        ours_BH[sample, : min(len(mine), HEAD)] = mine[:HEAD]
    found_B = np.full(len(batch), -1)
    told = 0
    for sample, values in enumerate(theirs):
        if len(values) < TOKENS or len(ours[sample]) < TOKENS:
            continue
        told += 1
        own = np.abs(values - ours[sample]).mean()
        if own <= ALIKE:
            continue
        # Zeros stand where the other sample has ended, or was given its tokens (tool output): they tell nothing.
        told_T = values != 0
        head = np.where(told_T, values, np.nan)[:HEAD]
        heads_BH = np.abs(ours_BH[:, : len(head)] - head)
        counted_B = np.isfinite(heads_BH).sum(axis=1)
        near_B = (counted_B >= TOKENS) & (np.nansum(heads_BH, axis=1) <= HEAD_APART * counted_B)
        apart = np.full(len(batch), np.inf)
        for other in np.flatnonzero(near_B):
            # A row that is longer than the sample it stands for is filled up with zeros.
            mine = ours[other]
            held = min(len(values), len(mine))
            at = told_T[:held]
            if not told_T[held:].any() and at.sum() >= TOKENS:
                apart[other] = np.abs(values[:held] - mine[:held])[at].mean()
        best = int(apart.argmin())
        # A later pass over a sample is a row of its own, of the same tokens: that is no other sample.
        if (
            best != sample
            and apart[best] < min(NEARER * own, ALIKE)
            and not _are_one(batch, spans[best], spans[sample])
        ):
            found_B[sample] = best
    moved = int((found_B >= 0).sum())
    return found_B if moved >= SAMPLES and moved >= least * told else None


def _behind_the_last_N(batch: StepBatch) -> Array:
    """Tokens [N] behind the last of their row that counts: padding, where rows are recorded without their tokens."""
    if batch.trained_N is None or not batch.trained_N.any():
        return np.zeros(batch.flat.sample_N.size, dtype=bool)
    last_B = np.zeros(len(batch), dtype=np.int64)
    np.maximum.at(last_B, batch.flat.sample_N, np.where(batch.trained_N, batch.flat.position_N, 0))
    found_N: Array = batch.flat.position_N > last_B[batch.flat.sample_N]
    return found_N


def _are_one(batch: StepBatch, a: slice, b: slice) -> bool:
    """Whether two rows hold the same tokens."""
    return batch.tokens_N is not None and bool(np.array_equal(batch.tokens_N[a], batch.tokens_N[b]))


def odd_one(batch: StepBatch) -> Kin | None:
    """The log-probabilities of the batch that are another quantity; None where none is, or it cannot be told."""
    if "odd_one" not in batch.columns.worked_out:
        batch.columns.worked_out["odd_one"] = _odd_one(batch)
    found: Kin | None = batch.columns.worked_out["odd_one"]
    return found


def _odd_one(batch: StepBatch) -> Kin | None:
    columns = {name: column for name in _NAMES if (column := batch.columns.of(name)) is not None}
    sure_N = before_any_update_N(batch) if "policy_logprobs" in columns else None
    inside_N = batch.response_N if batch.response_N is not None else batch.trained_N
    if inside_N is None or len(columns) < 2:
        return None
    if batch.trained_N is not None:
        # Tool output and prompts within a response have no log-probability of the engine.
        inside_N = inside_N & batch.trained_N if batch.trained_N.any() else inside_N
    known: dict[str, Array] = {}
    for name, column in columns.items():
        here_N = inside_N & column.said_N & np.isfinite(column.values_N)
        if name == "policy_logprobs" and sure_N is not None:
            here_N = here_N & sure_N
        known[name] = here_N

    def apart(a: str, b: str) -> float:
        both_N = known[a] & known[b]
        each = np.abs(columns[a].values_N[both_N] - columns[b].values_N[both_N])
        return float(each.mean()) if len(each) >= FEWEST else np.inf

    if (copied := _copied(columns, known)) is not None:
        return copied
    best: tuple[bool, float] = (False, 0.0)
    odd: Kin | None = None
    for name, suspect in columns.items():
        for other, model in columns.items():
            if name == other:
                continue
            found = _kin(batch, suspect, model, np.flatnonzero(known[name] & known[other]))
            if found is None:
                continue
            # Of two that differ the odd one is that which a third does not agree with.
            thirds = [third for third in columns if third not in (name, other)]
            voted = any(apart(other, third) < 0.5 * apart(name, third) for third in thirds)
            if found.by and not voted and any(apart(name, third) < 0.5 * apart(other, third) for third in thirds):
                # What is shifted against the odd one is shifted back: few tokens may tell it one way alone.
                found, voted = _turned_round(found), True
            if not voted and found.by:
                # Of two that are shifted against each other, the odd one is not of the tokens at its places.
                told = is_of_its_tokens(batch, suspect.values_N, known[name])
                voted = told is False or (
                    told is None and is_of_its_tokens(batch, model.values_N, known[other]) is True
                )
            if not voted and any(apart(name, third) < 0.5 * apart(other, third) for third in thirds):
                continue  # the third agrees with this one: what made the other of it was not found
            if (voted, found.share) > best:
                best, odd = (voted, found.share), replace(found, is_told=voted)
    return odd


def _turned_round(kin: Kin) -> Kin:
    """The same shift, told of the other of the two."""
    return replace(kin, suspect=kin.model, model=kin.suspect, what=_shifted_by(-kin.by), by=-kin.by)


def _shifted_by(by: int) -> str:
    return f"shifted by {by:+d} token{'s' * (abs(by) > 1)}"


#: What stands in another's place is the same to the last bit: two forwards of one model are not.
_PLACES = (
    ("ref_logprobs", "rollout_logprobs", "the engine's", "old_logprobs"),
    ("ref_logprobs", "rollout_logprobs", "the engine's", "policy_logprobs"),
)


def _copied(columns: dict[str, Column], known: dict[str, Array]) -> Kin | None:
    """A reference that is the rollout to the last bit, while the trainer's own forwards differ from both."""
    for name, other, words, third in _PLACES:
        if not {name, other, third} <= columns.keys():
            continue
        at_K = np.flatnonzero(known[name] & known[other] & known[third])
        x_K, y_K, z_K = (columns[each].values_N[at_K] for each in (name, other, third))
        if len(at_K) < FEWEST or not np.ptp(x_K) > 0:
            continue
        tells_K = y_K != z_K
        # Before the first update the engine's weights are the reference's: a forward of the trainer's agrees as well.
        beside = [columns[each].values_N[at_K] for each in ("old_logprobs", "policy_logprobs") if each in columns]
        if any(float((x_K == one_K)[tells_K].mean()) > 0.99 for one_K in beside if tells_K.any()):
            continue
        if tells_K.mean() > 0.5 and float((x_K == y_K)[tells_K].mean()) > 0.99:
            return Kin(
                columns[name], columns[other], f"{words}, to the last bit",
                "another tensor stands in its place (a key, an index, a default): what is measured is no distance to "
                "the reference",
                1.0, int(tells_K.sum()), int(at_K[np.flatnonzero(tells_K)[0]]),
            )  # fmt: skip
    return None


def _kin(batch: StepBatch, suspect: Column, model: Column, at_K: Array) -> Kin | None:
    x_K, y_K = suspect.values_N[at_K], model.values_N[at_K]
    if len(at_K) < FEWEST or float(np.abs(x_K - y_K).mean()) <= ALIKE or not np.ptp(y_K) > 0:
        return None
    for one in _transforms(batch, suspect, model, at_K):
        f_K = one.values_K
        known_K = np.isfinite(f_K)
        tolerance_K = ROUNDING + RELATIVE * np.abs(np.where(known_K, f_K, 0.0))
        tells_K = one.tells_K
        if tells_K is None:
            tells_K = known_K & ((np.abs(x_K - y_K) > tolerance_K) | (np.abs(f_K - y_K) > tolerance_K))
        if tells_K.sum() < max(FEWEST, 0.02 * len(at_K)) or known_K.sum() < 0.5 * len(at_K):
            continue
        share = float((np.abs(x_K - f_K) <= tolerance_K)[tells_K].mean())
        if share >= SHARE:
            first = int(at_K[np.flatnonzero(tells_K)[0]])
            return Kin(suspect, model, one.what, one.cause, share, int(tells_K.sum()), first, one.by)
    return None


def _transforms(batch: StepBatch, suspect: Column, model: Column, at_K: Array) -> Iterator[_Transform]:
    """Every known way that log-probabilities become something else, the simplest first."""
    x_K, y_K = suspect.values_N[at_K], model.values_N[at_K]
    every = np.ones(len(at_K), dtype=bool)
    if not x_K.any():
        yield _Transform(
            f"exactly 0 on all {len(at_K)} tokens: a probability of 1",
            "the engine did not return them and zeros stand in for them (a placeholder, an option that is off), or it "
            "samples the best token alone (temperature 0)"
            if suspect.name == "rollout_logprobs"
            else "the tensor was allocated and never filled, or holds a difference (log_probs - log_probs.detach())",
            np.zeros(len(at_K)),
            every,
        )
        return
    if not np.ptp(x_K) > 1e-6:
        yield _Transform(
            f"one number on all {len(at_K)} tokens ({x_K[0]:.4g})",
            "a placeholder or a mean over the whole batch stands in for them",
            x_K,
            every,
        )
        return
    if float(x_K.max()) > 1e-3:
        yield _Transform(
            "probabilities, not their logarithms: they lie between 0 and 1",
            "the logarithm is missing (softmax for log_softmax, or an exp too many)",
            np.exp(y_K),
        )
        yield _Transform(
            "negated: they are positive",
            "negative log-likelihoods (a cross entropy) are taken for log-probabilities: the sign is missing",
            -y_K,
        )
    rows = batch.flat.sample_N[at_K]
    yield from _scaled(x_K, y_K)
    for what, cause, summed_K in (
        (
            "added up along the response: each has the sum of all before it",
            "a cumulative sum over the response is taken for the tokens' own",
            _cumulated(y_K, rows),
        ),
        (
            "added up from the end of the response: each has the sum of all behind it",
            "a sum over what follows is taken for the tokens' own",
            _cumulated(y_K[::-1], rows[::-1])[::-1],
        ),
        (
            "one number for each response: the mean over its tokens",
            "the response's mean is spread over its tokens: what is of a sequence is taken for what is of a token",
            _spread(y_K, rows, mean=True),
        ),
        (
            "one number for each response: the sum over its tokens",
            "the response's sum is spread over its tokens: what is of a sequence is taken for what is of a token",
            _spread(y_K, rows, mean=False),
        ),
    ):
        longer = np.bincount(rows)[rows] > 1
        yield _Transform(what, cause, np.where(longer, summed_K, np.nan))
    low_K, high_K = (_extreme(x_K, rows, pick) for pick in (np.minimum, np.maximum))
    if np.ptp(x_K) > 1e-3 and float((high_K - low_K).max()) <= 1e-6:
        yield _Transform(
            "one number for each response",
            "what is of a sequence (a mean, a sum) is spread over its tokens and taken for what is of a token",
            np.where(np.bincount(rows)[rows] > 1, x_K, np.nan),
        )
    for by in SHIFTS:
        yield _Transform(
            _shifted_by(by),
            "one side is about the token at its index, the other about one beside it: a roll or a slice is off",
            _shifted(y_K, rows, by),
            by=by,
        )
    yield from _bounded(x_K, y_K)
    entropy = batch.columns.of("entropy")
    if entropy is not None and entropy.said_N[at_K].all():
        yield _Transform(
            "the negative entropy of each place",
            "the sum of p log p over the vocabulary is taken instead of the sampled token's log p",
            -entropy.values_N[at_K],
        )
    # Every row against every other: the rollout's beside the trainer's are looked at in larger batches, too (D79).
    found_B = whose(batch, suspect, model) if len(batch) <= ROWS else None
    if found_B is not None:
        yield _Transform(*of_rows(found_B), _other_rows(batch, model, at_K, found_B))
    # The same numbers in any order are those of a shift as well.
    yield from _reordered(x_K, y_K, rows)


def _reordered(x_K: Array, y_K: Array, rows: Array) -> Iterator[_Transform]:
    """The same numbers of a response, in another order: turned round, else any."""
    if float(np.abs(x_K - y_K).mean()) < REORDERED:
        return
    at = np.arange(len(rows))
    first = np.flatnonzero(np.diff(rows, prepend=rows[0] - 1))
    ends = np.array([*first[1:], len(rows)])
    sizes = ends - first
    begin_K, end_K = np.repeat(first, sizes), np.repeat(ends, sizes)
    long_K = np.repeat(sizes >= TOKENS, sizes)
    yield _Transform(
        "in reversed order along the response: each token has the number of the one as far from the other end",
        "a flip of the response (a return computed backwards, a reversed list) is not undone: the numbers are the "
        "right ones, on other tokens",
        np.where(long_K, y_K[begin_K + end_K - 1 - at], np.nan),
    )
    # The numbers of a rank in one are held against those of that rank in the other.
    by_x, by_y = np.lexsort((x_K, rows)), np.lexsort((y_K, rows))
    ranked_K = np.empty(len(y_K))
    ranked_K[by_x] = y_K[by_y]
    yield _Transform(
        "in another order along the response: the same numbers, on other tokens",
        "the tokens of a response were put in another order (a sort, a permutation, a scatter by wrong indices) and "
        "these were not, or the other way round",
        np.where(long_K, ranked_K, np.nan),
    )


def _scaled(x_K: Array, y_K: Array) -> Iterator[_Transform]:
    """Another base of the logarithm: one factor, where a temperature normalises again."""
    inside_K = (y_K > MIDDLE[0]) & (y_K < MIDDLE[1])
    if inside_K.sum() < FEWEST:
        return
    for base in (2, 10):
        factor = 1 / float(np.log(base))
        close_K = np.abs(x_K - factor * y_K) <= 0.02 * np.abs(factor * y_K) + 0.01
        if close_K[inside_K].mean() >= SHARE:
            yield _Transform(
                f"logarithms to the base {base}, not natural ones",
                "another base of the logarithm (log2, log10)",
                factor * y_K,
                inside_K,
            )


def _bounded(x_K: Array, y_K: Array) -> Iterator[_Transform]:
    """Cut off at the smallest of them, which many tokens have."""
    floor = float(x_K.min())
    cut_K = x_K == floor
    below_K = y_K < floor - ROUNDING - RELATIVE * abs(floor)
    if cut_K.sum() >= FEWEST and below_K.sum() >= FEWEST // 2 and floor < -1e-3:
        yield _Transform(
            f"cut off below at {floor:.4g}: no token is less probable",
            "a clamp on log-probabilities (or probabilities): rare tokens, which differ most, all have one ratio",
            np.maximum(y_K, floor),
        )


def _cumulated(y_K: Array, rows: Array) -> Array:
    total = np.cumsum(y_K)
    first = np.flatnonzero(np.diff(rows, prepend=rows[0] - 1))
    before = np.repeat(total[first] - y_K[first], np.diff([*first, len(rows)]))
    summed: Array = total - before
    return summed


def _spread(y_K: Array, rows: Array, *, mean: bool) -> Array:
    total = np.bincount(rows, weights=y_K)
    count = np.bincount(rows)
    each: Array = (total / np.maximum(count, 1) if mean else total)[rows]
    return each


def _extreme(x_K: Array, rows: Array, pick: np.ufunc) -> Array:
    """The largest or smallest value of each token's sample."""
    first = np.flatnonzero(np.diff(rows, prepend=rows[0] - 1))
    each: Array = np.repeat(pick.reduceat(x_K, first), np.diff([*first, len(rows)]))
    return each


def _shifted(y_K: Array, rows: Array, by: int) -> Array:
    moved_K = np.full(len(y_K), np.nan)
    here, there = (slice(by, None), slice(None, -by)) if by > 0 else (slice(None, by), slice(-by, None))
    same = rows[here] == rows[there]
    moved_K[here] = np.where(same, y_K[there], np.nan)
    return moved_K


def of_rows(found_B: Array) -> tuple[str, str]:
    """What a tensor is whose rows are those of other samples (`whose`), and why."""
    moved = np.flatnonzero(found_B >= 0)
    by, counts = np.unique((moved - found_B[moved]) % len(found_B), return_counts=True)
    most = int(by[counts.argmax()])
    rolled = counts.max() >= 0.8 * len(moved)
    return (
        f"in the wrong rows: those of {len(moved)} of {len(found_B)} samples are another sample's"
        + (f", {most} rows before" if rolled and most > 1 else ", the row before" if rolled else ""),
        "rows were permuted (sorted by length, balanced over ranks, shuffled, rolled, put together in another order) "
        "and this tensor was not permuted with them",
    )


def _other_rows(batch: StepBatch, model: Column, at_K: Array, found_B: Array) -> Array:
    """The model's values of the found rows, at the same place of the response."""
    sample_K, starts_B = batch.flat.sample_N[at_K], batch.flat.starts_B
    inside_N = batch.response_N if batch.response_N is not None else batch.trained_N
    assert inside_N is not None
    heads_B = batch.flat.first(inside_N)
    place_K = batch.flat.position_N[at_K] - heads_B[sample_K]
    other_K = np.where(found_B[sample_K] >= 0, found_B[sample_K], sample_K)
    told_K = found_B[sample_K] >= 0
    there_K = heads_B[other_K] + place_K
    inside_K = told_K & (there_K < batch.flat.lengths_B[other_K])
    index_K = np.where(inside_K, starts_B[other_K] + there_K, 0)
    inside_K &= ~_behind_the_last_N(batch)[index_K]
    values_K: Array = np.where(inside_K, model.values_N[index_K], np.nan)
    return values_K
