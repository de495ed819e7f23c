"""What ranks of context parallelism made of keys and values, told by making attention again from what went into it.

Queries, keys and values that ranks hold alike with the other run, laid together, are all of attention but its
positions and its mask (`attention_made`). The other run's output says how heads are cut and turned: what does not make
it again says nothing. Then the same is made with the keys that a rank would see, or the positions it would count, if
one thing went wrong; only what makes the rank's own output is said.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from msgspec.structs import replace

from replay_core import pages
from replay_core.compare.judging.attention_made import (
    CLEARLY,
    LEFT,
    MOST,
    Bools,
    CutHeads,
    How,
    IntoAttention,
    Ints,
    Merged,
    channels_of,
    fitted,
    made,
    normal,
    scores,
    short,
    straight,
)
from replay_core.compare.judging.faults import Fault, whose
from replay_core.compare.judging.products import Array
from replay_core.compare.judging.solving import solved
from replay_core.compare.pairing.ranks import HeldByRanks
from replay_core.records import TensorRef

#: What leaves more of the difference of a few rows, those that are furthest off, is not asked of all of a rank's.
_FEW, _LITTLE = 4, 0.9
#: How the outputs of chunks of keys may be merged instead, and what is said of it.
_MERGED: dict[Merged, str] = {
    "mean": "averaged, without the sums of exponentials that weigh them",
    "sum": "added, without the sums of exponentials that weigh them",
    "maxima": "weighed by exp of their largest score alone, where log-sum-exp is to weigh them",
    "sums": "weighed by sums of exponentials that were not brought to a common largest score",
    "reversed": "weighed by exp(-log-sum-exp): the wrong sign, or each by the other's",
    "powers of two": "weighed by powers of two of their log-sum-exp, which is one of base e",
    "sums below": "divided by sums of exponentials that were not brought to a common largest score",
    "sums above": "not brought to a common largest score, as the sums that divide them are",
    "not rescaled": "added one after the other, what was there not rescaled where a larger score came",
}
#: Samples whose attention is tried to be made again: of one with padding it is not.
_MOST_SAMPLES = 2


def of_seen_keys(
    what: str, whole: TensorRef, held: HeldByRanks, slices: Sequence[HeldByRanks], parted: Sequence[int],
    through: tuple[Array, Array] | None, earlier: Sequence[HeldByRanks] = (),
) -> Fault | None:  # fmt: skip
    """Which keys the ranks whose tokens are off saw instead of those they should, or which positions they counted.

    held: attention's output [sample, position, hidden], or what its projection makes of it `through` a weight
    [out, hidden] and a bias [out], of which each rank has some positions; whole: the other run's. slices: what ranks
    held alike with the other run just before; earlier: what went into attention of layers before. parted: the ranks
    whose tokens are off.

    Raises:
        DumpError: the bytes of one cannot be read.
    """
    if held.axis != 1 or len(whole.shape) != 3 or len(set(held.stretches)) < len(held.ranks):
        return None
    length = whole.shape[1]
    own = [np.concatenate([np.arange(at, at + long) for at, long in one]) for one in held.stretches]
    if sorted(np.concatenate(own).tolist()) != list(range(length)) or not whole.shape[0]:
        return None
    most_left = LEFT[bool({"bfloat16", "float16"} & {whole.dtype, held.parts[0].dtype})]
    there_BSO = pages.array(whole).astype(np.float64)
    off_BSO = {
        rank: pages.array(part).astype(np.float64) - there_BSO[:, rows]
        for rank, rows, part in zip(held.ranks, own, held.parts, strict=True) if rank in parted
    }  # fmt: skip
    if not off_BSO or not np.isfinite(there_BSO).all() or not all(np.isfinite(off).all() for off in off_BSO.values()):
        return None
    # A sample that is right on a rank says nothing of it.
    least_B = np.min([np.linalg.norm(off, axis=(1, 2)) for off in off_BSO.values()], axis=0)
    some = channels_of(np.concatenate(list(off_BSO.values()), 1))
    of_tokens = [one for one in slices if one.stretches == held.stretches]
    given = IntoAttention(what, held, of_tokens, (len(there_BSO), length), through, some, whole.shape[2])
    for sample in np.argsort(-least_B, kind="stable")[:_MOST_SAMPLES].tolist():
        cuts = (one for one in given.cuts(sample, length) if one.q.shape[1] * length * length <= MOST)
        fit = fitted(given.target(there_BSO[sample], length), cuts) if given.are_known and least_B[sample] else None
        if fit is not None:
            break
    else:
        return None
    cut, pattern = fit
    of_tokens = [one for one in earlier if one.stretches == held.stretches and one.ranks == held.ranks]
    before = list(given.of_layers_before(of_tokens, sample, cut))
    asked = {
        rank: _OfRank(cut, rows, normal(cut, rows, pattern.starts), off_BSO[rank][sample][:, some], pattern.begin)
        for rank, rows in zip(held.ranks, own, strict=True) if rank in off_BSO
    }  # fmt: skip
    #: By kind: what each rank's tokens say of it.
    found: dict[str, dict[int, tuple[float, str]]] = {}
    for number, (rank, of_rank) in enumerate(asked.items()):
        if not of_rank.is_off:
            continue
        for kind, said, wrong in (
            *_tried(cut, held, own, of_rank.rows, of_rank.usual),
            *_of_stale(before, held, own, of_rank.rows, of_rank.usual),
            *_own_documents(cut, own, of_rank.rows, of_rank.usual, pattern.starts),
        ):
            if kind not in found and number:
                continue  # nothing that every rank has
            left = of_rank.left(wrong, CLEARLY * most_left)
            if left < found.setdefault(kind, {}).get(rank, (CLEARLY * most_left, ""))[0]:
                found[kind][rank] = left, said
        found = {kind: by for kind, by in found.items() if rank in by}
        if not found:
            target_SC = given.target(there_BSO[sample], length)
            return _of_a_rank_turned_otherwise(what, cut, held.ranks, own, asked, target_SC, most_left)
    # Another kind may explain it nearly as well, of a few ranks' tokens: then neither is said.
    worst = sorted((max(left for left, _ in by.values()), kind) for kind, by in found.items())
    if not worst or worst[0][0] > most_left or (len(worst) > 1 and worst[1][0] < CLEARLY * worst[0][0]):
        return None
    kind = worst[0][1]
    said_of = {rank: said for rank, (_, said) in found[kind].items()}
    those = tuple(said_of)
    each = dict.fromkeys(said_of.values())
    said = next(iter(each)) if len(each) == 1 else "; ".join(f"rank {rank}: {one}" for rank, one in said_of.items())
    return Fault(
        kind, those,
        f"{what} on {whose(those)} is what attention makes of the recorded queries, keys and values {said} (made again "
        "from them; with all that they should see it makes the other run's)",
    )  # fmt: skip


def cut_straight(
    what: str, whole: TensorRef, held: HeldByRanks, fused: HeldByRanks, weights: HeldByRanks
) -> Fault | None:
    """Whether ranks hold slices in turn of queries, keys and values in one, and each took its own slice for a share of
    all three.

    held: the projection's output [sample, position, hidden], whole on every rank; whole: the other run's. fused: what
    the three in one put out, a slice in turn on every rank. weights: [hidden, a rank's features] of the projection.

    Raises:
        DumpError: the bytes of one cannot be read.
    """
    ranks = held.ranks
    if not fused.ranks == weights.ranks == ranks or len(ranks) < 2 or held.is_cut or weights.axis != 1:
        return None
    refs = (whole, *held.parts, *fused.parts, *weights.parts)
    if len(whole.shape) != 3 or len(fused.parts[0].shape) != 3 or fused.axis != 2 or not whole.shape[0]:
        return None
    if any(len(one) != 1 for one in (*fused.stretches, *weights.stretches)):
        return None
    if not all(ref.is_readable and ref.numel <= MOST for ref in refs):
        return None
    if any(ref.shape != whole.shape for ref in held.parts) or any(
        ref.shape[:2] != whole.shape[:2] for ref in fused.parts
    ):
        return None
    there_SO, *here = (pages.array(ref)[0].astype(np.float64) for ref in (whole, *held.parts))
    own = [pages.array(ref)[0].astype(np.float64) for ref in fused.parts]
    parts = [pages.array(ref).astype(np.float64) for ref in weights.parts]
    every, weight = (
        np.concatenate([values[number] for _, number in sorted(
            (stretches[0][0], number) for number, stretches in enumerate(of.stretches))], 1)
        for values, of in ((own, fused), (parts, weights))
    )  # fmt: skip
    most_left = LEFT[bool({"bfloat16", "float16"} & {whole.dtype, held.parts[0].dtype})]
    fit = fitted(there_SO, straight(every, weight))
    if fit is None or not all(np.isfinite(one).all() for one in here):
        return None
    cut, pattern = fit
    rows, width = np.arange(len(there_SO)), cut.q.shape[2]
    usual, wrong = normal(cut, rows, pattern.starts), np.zeros(there_SO.shape)
    for values, part in zip(own, parts, strict=True):
        mine = next((one for one in straight(values, part) if one.q.shape[2] == width), None)
        if mine is None:
            return None
        wrong += made(mine, rows, mine.heads, usual)
    right = made(cut, rows, cut.heads, usual)
    if not all(
        np.linalg.norm(one - there_SO - (wrong - right)) <= most_left * np.linalg.norm(one - there_SO) for one in here
    ):
        return None
    (start, length), *_ = fused.stretches[0]
    layer = fused.parts[0].name.removesuffix(".output")
    return Fault(
        "order", ranks,
        f"{layer} is cut among {whose(ranks)} in turn (rank {ranks[0]} has rows {start} to {start + length - 1}), and "
        f"is queries, keys and values in turn: {what} is what attention makes of each rank's own slice taken "
        "for these, and the other run's is of the whole's; each rank is to have a share of all three",
    )  # fmt: skip


class _LeftUnexplained:
    """What part of the difference of some rows is left where something went wrong for them."""

    def __init__(self, cut: CutHeads, rows: Ints, usual: How, some: Ints, off_QC: Array) -> None:
        """some: which of the rows of `usual`, and of what went wrong, these are."""
        self._cut, self._rows, self._some, self._off_QC = cut, rows, some, off_QC
        own = replace(usual, sees_QS=usual.sees_QS[some])
        self._at, self._scores_HQS = usual.at_q, scores(cut, rows, cut.heads, own)
        self._right_QC = made(cut, rows, cut.heads, own, self._scores_HQS)

    def __call__(self, wrong: How) -> float:
        is_as_before = wrong.at_q is self._at and wrong.times == 1 and wrong.instead is None and wrong.bases is None
        known = self._scores_HQS if is_as_before else None
        own = replace(wrong, sees_QS=wrong.sees_QS[self._some])
        again_QC = made(self._cut, self._rows, self._cut.heads, own, known)
        left = np.linalg.norm(self._off_QC - (again_QC - self._right_QC))
        return float(left / np.linalg.norm(self._off_QC))


class _OfRank:
    """A rank's tokens, what attention makes of them as it should, and what is left of their difference by what went
    wrong: asked of a few before it is asked of all.
    """

    def __init__(self, cut: CutHeads, rows: Ints, usual: How, off_QC: Array, begin: int) -> None:
        """begin: the first token that sees itself alone; those before it are padding."""
        self.rows, self.usual, self._off_QC, self._begin = rows, usual, off_QC, begin
        every = np.flatnonzero(rows >= begin)
        self._of: tuple[_LeftUnexplained, _LeftUnexplained] | None = None
        if every.size and off_QC[every].any():
            few = np.sort(every[np.argsort(-np.linalg.norm(off_QC[every], axis=1), kind="stable")[:_FEW]])
            of_few, of_every = (
                _LeftUnexplained(cut, rows[those], usual, those, off_QC[those]) for those in (few, every)
            )
            self._of = of_few, of_every

    @property
    def is_off(self) -> bool:
        return self._of is not None

    def of_base(self, cut: CutHeads, base: float) -> _OfRank:
        """The same tokens where all are turned by this base as they should."""
        return _OfRank(
            replace(cut, base=base), self.rows, replace(self.usual, base=base), self._off_QC, self._begin
        )  # fmt: skip

    def left(self, wrong: How, most: float) -> float:
        """What is left of all, where a few leave little; of these otherwise, which is more than `most`."""
        assert self._of is not None
        of_few, of_every = self._of
        left = of_few(wrong)
        return np.inf if left > min(2 * most, _LITTLE) else of_every(wrong)


def _tried(
    cut: CutHeads, held: HeldByRanks, own: Sequence[Ints], rows: Ints, usual: How
) -> Iterator[tuple[str, str, How]]:
    """What may have gone wrong for the tokens of these rows: a kind, and words."""
    causal_QS = usual.sees_QS
    length = causal_QS.shape[1]
    every = np.arange(length)

    def within(places: Ints) -> Bools:
        return np.isin(every, places)

    def seeing(sees_QS: Bools) -> How:
        return replace(usual, sees_QS=sees_QS)

    alone_QS = causal_QS & within(rows)
    yield "own keys", "where each token sees the keys of its rank's own stretch alone", seeing(alone_QS)
    pieces: list[tuple[str, Ints]] = []
    for rank, places, stretches in zip(held.ranks, own, held.stretches, strict=True):
        whole = _of_stretches(stretches)
        pieces.append((f"rank {rank} ({whole})", places))
        if len(stretches) > 1:
            pieces += [
                (f"rank {rank}'s chunk {at} to {at + long - 1}", np.arange(at, at + long)) for at, long in stretches
            ]
    for words, places in pieces:
        less_QS = causal_QS & ~within(places)
        if (less_QS == causal_QS).all() or (less_QS == alone_QS).all() or not less_QS.any(1).all():
            continue
        yield "missing keys", f"without the keys of {words}: they never came, or were left out", seeing(less_QS)
    for words, places in pieces:
        more_QS = causal_QS | within(places)
        if (more_QS == causal_QS).all() or places.max() < rows.min():  # earlier ones are another document's
            continue
        yield (
            "later keys",
            f"where the keys of {words} are seen by all of its tokens, later ones too",
            seeing(more_QS),
        )
    yield from _windows_elsewhere(own, rows, usual)
    everything = np.ones_like(causal_QS)
    yield "later keys", "where every token sees all keys, later ones too", seeing(everything)
    for (words, places), (others, instead) in ((one, other) for one in pieces for other in pieces):
        if places.size != instead.size or places is instead or not causal_QS[:, places].any():
            continue
        keys = every.copy()
        keys[places] = instead
        yield "stale keys", f"with the keys and values of {others} in the place of those of {words}", (
            replace(usual, keys=keys)
        )  # fmt: skip
    for kind, words, at in counted(own, length):
        turned = replace(usual, at_q=at, at_k=at)
        if cut.knows_positions:
            yield kind, f"turned by {words}", turned
        hidden_QS = at[rows][:, None] >= at[None]
        if not (hidden_QS == causal_QS).all():
            yield "own mask" if kind == "own positions" else kind, f"hidden by {words}", seeing(hidden_QS)
            if cut.knows_positions:
                yield kind, f"turned and hidden by {words}", replace(turned, sees_QS=hidden_QS)
    for words, places in pieces:
        if causal_QS[:, places].any() and (causal_QS & ~within(places)).any():
            yield "keys twice", f"where the keys of {words} count twice", replace(usual, twice=places)
    width = cut.q.shape[2]
    for words, times in (("not scaled by 1/sqrt(d)", width**0.5), ("scaled by 1/sqrt(d) twice", width**-0.5),
                         ("scaled by twice what is due", 2.0), ("scaled by half of what is due", 0.5)):  # fmt: skip
        yield "scale", f"with scores {words}", replace(usual, times=times)
    for words, heads in _turned_heads(cut.q.shape[1], len(set(held.stretches))):
        yield "heads", f"with its heads in another order ({words})", replace(usual, order=heads)
    mine = held.ranks.index(next(rank for rank, one in zip(held.ranks, own, strict=True) if one is rows))
    in_ring = [own[(mine - by) % len(own)] for by in range(len(own))]
    for words, chunks in (
        ("ranks'", in_ring),
        ("chunks'", [places for _, places in pieces if places.size < rows.size]),
    ):
        for merged, weighed in _MERGED.items() if chunks else ():
            yield "merged", f"where the {words} outputs are {weighed}", replace(usual, chunks=chunks, merged=merged)


def _windows_elsewhere(own: Sequence[Ints], rows: Ints, usual: How) -> Iterator[tuple[str, str, How]]:
    """A window that is counted along the keys as they lie, gathered in the turn of the ranks or on each rank, where it
    is to be counted along the sequence.
    """
    length = usual.sees_QS.shape[1]
    wide = int(usual.sees_QS.sum(1).max())
    every = np.arange(length)
    in_window_QS = (every <= rows[:, None]) & (every > rows[:, None] - wide)
    if not 1 < wide < length or not (usual.sees_QS == in_window_QS).all():
        return
    gathered, local = np.zeros(length, np.int64), np.zeros(length, np.int64)
    gathered[np.concatenate(own)] = every
    for places in own:
        local[places] = np.arange(places.size)
    for words, at in (("where they lie in the turn of the ranks", gathered), ("from 0 on each rank", local)):
        behind_QS = at[rows][:, None] - at
        for seen_QS in (np.abs(behind_QS) < wide, behind_QS < wide, (behind_QS < wide) & (behind_QS >= 0)):
            sees_QS = (every <= rows[:, None]) & seen_QS
            if (sees_QS == usual.sees_QS).all() or not sees_QS.any(1).all():
                continue
            yield "window", f"in a window of {wide} keys that is counted {words}, and not along the sequence", (
                replace(usual, sees_QS=sees_QS)
            )  # fmt: skip


def _own_documents(
    cut: CutHeads, own: Sequence[Ints], rows: Ints, usual: How, starts: Ints
) -> Iterator[tuple[str, str, How]]:
    """A packed row's documents that are kept apart among a rank's own keys alone, so that it sees all of the others';
    or numbered on each rank by itself, so that one number stands for several.
    """
    every = np.arange(usual.sees_QS.shape[1])
    at = (every - starts).astype(float)  # within each document nobody can tell the two apart
    of_others_QS = usual.sees_QS | ((every <= rows[:, None]) & ~np.isin(every, rows))
    told = [("where the documents of a packed row are kept apart among the rank's own keys alone", of_others_QS)]
    for numbers in _numbered_apart(own, starts):
        sees_QS = (every <= rows[:, None]) & (numbers[rows][:, None] == numbers)
        told.append(
            (
                "where the documents of a packed row are numbered on each rank by itself: a token sees those keys of "
                "other ranks whose number there is its own here",
                sees_QS,
            )
        )
    for words, sees_QS in told:
        if (sees_QS == usual.sees_QS).all() or not sees_QS.any(1).all():
            continue
        yield "own documents", words, replace(usual, sees_QS=sees_QS)
        if cut.knows_positions:
            yield "own documents", words, replace(usual, sees_QS=sees_QS, at_q=at, at_k=at)


def _numbered_apart(own: Sequence[Ints], starts: Ints) -> Iterator[Ints]:
    """Of each token, which of its rank's documents it is in: of those that begin there, and with the one that was
    begun on another rank.
    """
    is_first = starts == np.arange(starts.size)
    if is_first.sum() < 2:
        return
    begun, all_there = np.zeros(starts.size, np.int64), np.zeros(starts.size, np.int64)
    for places in own:
        begun[places] = np.cumsum(is_first[places])
        changes = np.r_[True, starts[places][1:] != starts[places][:-1]]
        all_there[places] = np.cumsum(changes)
    yield begun
    yield all_there


def _of_a_rank_turned_otherwise(
    what: str, cut: CutHeads, ranks: Sequence[int], own: Sequence[Ints], asked: Mapping[int, _OfRank],
    there_SC: Array, most_left: float,
) -> Fault | None:  # fmt: skip
    """The rank whose queries and keys are turned by another base than those of all others, as where it scales RoPE by
    the length of its own tokens: all ranks' tokens that see its keys are off by that.

    there_SC: what the other run's heads come to.
    """
    all_off = [one for one in asked.values() if one.is_off]
    if cut.base is None or not all_off:
        return None

    def off_there(log: float) -> float:
        usual = (replace(one.usual, base=math.exp(log)) for one in all_off)
        again = (made(cut, one.rows, cut.heads, how) for one, how in zip(all_off, usual, strict=True))
        return float(sum(np.linalg.norm(a_QC - there_SC[one.rows]) for one, a_QC in zip(all_off, again, strict=True)))

    # The other run's is known to what tells it from a few bases; here each rank's is solved for beside it.
    right = math.exp(solved(off_there, math.log(cut.base) + np.linspace(-1, 1, 9))[0])
    those = [one.of_base(cut, right) for one in all_off]
    found = []
    for rank, places in zip(ranks, own, strict=True):

        def bases(base: float, places: Ints = places) -> Array:
            of_tokens = np.full(len(cut.q), right)
            of_tokens[places] = base
            return of_tokens

        def left(log: float, bases: Callable[[float], Array] = bases) -> float:
            return max(one.left(replace(one.usual, bases=bases(math.exp(log))), np.inf) for one in those)

        log, rest = solved(left, np.linspace(2, 18, 33))
        found.append((rest, rank, math.exp(log)))
    found.sort()
    rest, rank, base = found[0]
    if rest > most_left or abs(base / right - 1) < 0.01 or (len(found) > 1 and found[1][0] < CLEARLY * rest):
        return None
    return Fault(
        "attention's RoPE", (rank,),
        f"{what} on {whose(list(asked))} is what attention makes of the recorded queries, keys and values where those "
        f"of rank {rank}'s tokens are turned by RoPE of base {short(base)}, and all others' by {short(right)} as in "
        f"the other run: rank {rank} scales RoPE by itself (made again from them)",
    )  # fmt: skip


def _of_stale(
    before: Sequence[tuple[str, Array, Array]], held: HeldByRanks, own: Sequence[Ints], rows: Ints, usual: How
) -> Iterator[tuple[str, str, How]]:
    """Keys and values of an earlier layer in the place of those that other ranks should have sent."""
    for rank, places in zip(held.ranks, own, strict=True):
        if places is rows or not usual.sees_QS[:, places].any():
            continue
        for layer, k_SHD, v_SHD in before:
            words = (
                f"with the keys and values of {layer} in the place of those of rank {rank}: stale, of a layer before"
            )
            yield "stale keys", words, replace(usual, instead=(places, k_SHD[places], v_SHD[places]))


def _turned_heads(heads: int, ranks: int) -> Iterator[tuple[str, Ints]]:
    """Other orders of heads, of which each rank has some that follow each other, or every so-manieth."""
    if heads % ranks or ranks < 2:
        return
    by_rank = np.arange(heads).reshape(ranks, -1)
    for by in range(1, ranks):
        yield f"those of rank r stand where rank r + {by}'s belong", np.roll(by_rank, by, 0).reshape(-1)
    if ranks > 2:
        yield "those of the last rank first", by_rank[::-1].reshape(-1)
    if heads > ranks:
        yield "one of each rank in turn, where each rank's follow each other", by_rank.T.reshape(-1)
        in_turn = np.arange(heads).reshape(-1, ranks).T.reshape(-1)
        yield "each rank's behind each other, where one of each rank stands in turn", in_turn


def counted_positions(what: str, held: HeldByRanks) -> Fault | None:
    """Whether ranks count positions [sample, position] of a cut sequence by another turn than the one they hold it in.

    Raises:
        DumpError: the bytes of one cannot be read.
    """
    if held.axis != 1 or any(len(ref.shape) != 2 for ref in held.parts):
        return None
    own = [np.concatenate([np.arange(at, at + long) for at, long in one]) for one in held.stretches]
    every = np.unique(np.concatenate(own))
    if len(set(held.stretches)) < 2 or every.tolist() != list(range(every.size)):
        return None
    distinct = list(dict(zip(held.stretches, own, strict=True)).values())
    for kind, words, at in counted(distinct, every.size):
        if all((pages.array(ref) == at[places]).all() for ref, places in zip(held.parts, own, strict=True)):
            off = [rank for rank, places in zip(held.ranks, own, strict=True) if (at[places] != places).any()]
            return Fault(kind, tuple(off), f"{what} of {whose(off)} are {words}")
    return None


def counted(own: Sequence[Ints], length: int) -> Iterator[tuple[str, str, Ints]]:
    """Positions that ranks may have counted for their tokens, other than these are."""
    local, straight = np.zeros(length, np.int64), np.zeros(length, np.int64)
    before = 0
    for places in own:
        local[places] = np.arange(places.size)
        straight[places] = before + np.arange(places.size)
        before += places.size
    yield "own positions", "positions that begin at 0 on each rank", local
    if (straight != np.arange(length)).any():
        yield "order", "positions as if the ranks held the sequence in turn, which they hold in zigzag", straight
    elif all(places.size % 2 == 0 for places in own) and len({places.size for places in own}) == 1:
        chunk, ranks = own[0].size // 2, len(own)
        zigzag = np.zeros(length, np.int64)
        for number, places in enumerate(own):
            last = 2 * ranks - 1 - number
            zigzag[places] = np.concatenate(
                [np.arange(number * chunk, (number + 1) * chunk), np.arange(last * chunk, (last + 1) * chunk)]
            )
        yield "order", "positions as if the ranks held the sequence in zigzag, which they hold in turn", zigzag


def _of_stretches(stretches: Sequence[tuple[int, int]]) -> str:
    """`tokens 0 to 3, 12 to 15`."""
    return "tokens " + ", ".join(f"{at} to {at + long - 1}" for at, long in stretches)
