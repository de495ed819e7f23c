"""What ranks of context parallelism made of keys and values, told by making attention again from what went into it.

Queries, keys and values that ranks hold alike with the other run, laid together, are all of attention but its
positions and its mask:

    y_i  =  sum_j softmax_j(R_i q_i . R_j k_j / sqrt(d)) v_j        over the j that i sees

(Vaswani et al. 2017; R_i turns a head by its position, Su et al. 2021). The other run's output says how heads are cut
and turned: what does not make it again says nothing. Then the same is made with the keys that a rank would see, or the
positions it would count, if one thing went wrong; only what makes the rank's own output is said.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from replay_core import pages
from replay_core.compare.judging.faults import Fault, whose
from replay_core.compare.judging.products import Array
from replay_core.compare.pairing.ranks import HeldByRanks, standing_for
from replay_core.records import TensorRef

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]

#: How far what is made again may be from the other run's output, of its norm: weights may have been recorded after
#: their step, which is in both of two that are made again, and not in what these differ by.
_NEAR = 0.05
#: What part of the difference between the runs may be left: of float32, of halves; and by how many times another
#: explanation leaves more.
_LEFT, _CLEARLY = (0.05, 0.2), 3.0
#: What leaves more of the difference of a few rows, those that are furthest off, is not asked of all of a rank's.
_FEW, _LITTLE = 4, 0.9
#: Elements of one sample's scores of all heads, and of its tokens' outputs.
_MOST = 1 << 23
#: Samples whose attention is tried to be made again: of one with padding it is not.
_MOST_SAMPLES = 2
#: Bases of rotary positions.
_BASES = (1e4, 5e5, 1e6, 1e5, 1e7)
_WIDTHS = (256, 192, 128, 96, 80, 64, 48, 40, 32, 24, 16, 12, 8, 6, 4)
_QUERIES, _KEYS, _VALUES = (
    ("q_norm.output", "q_proj.output"), ("k_norm.output", "k_proj.output"), ("v_proj.output",)
)  # fmt: skip
#: Dimensions of what a sample has, and which of them is its tokens: [B, S, all], [B, S, head, d], [B, head, S, d].
_LAID = ((3, 1), (4, 1), (4, 2))
_TOGETHER = ("qkv_proj.output", "query_key_value.output", "c_attn.output", "linear_qkv.output")


class _Attention(Struct, frozen=True):
    """One sample's queries [S, head, d], keys and values [S, head of keys, d], and what is made of its heads."""

    q: Array
    k: Array
    v: Array
    #: The base of rotary positions, None where there are none; whether pairs that turn are neighbours.
    base: float | None
    in_pairs: bool
    through: tuple[Array, Array] | None

    def __call__(
        self, rows: Ints, sees_QS: Bools, at: Ints | None = None, keys: Ints | None = None,
        chunks: Sequence[Ints] | None = None, heads: Ints | None = None, scores_HQS: Array | None = None,
    ) -> Array:  # fmt: skip
        """What the tokens of these rows get, [Q, hidden]. sees_QS: which keys each sees. at: the positions that every
        token is turned by, its own if None; keys: which key and value stands in the place of each. chunks: keys whose
        outputs are made apart and averaged. heads: which head stands in the place of each. scores_HQS: of these rows at
        these positions, where they are known.
        """
        scores_HQS = self.scores(rows, at) if scores_HQS is None else scores_HQS
        if keys is not None:
            scores_HQS = scores_HQS[:, :, keys]
        weights_HQS: Array = np.zeros(scores_HQS.shape)
        number_Q = np.zeros(len(rows))
        for chunk in chunks or (np.arange(len(self.k)),):
            seen_QS = sees_QS[:, chunk]
            some_Q: Bools = np.asarray(seen_QS.any(1))
            own_HQS = np.where(seen_QS, scores_HQS[:, :, chunk], -np.inf)
            own_HQS -= np.where(some_Q[:, None], own_HQS.max(2, keepdims=True), 0.0)
            own_HQS = np.exp(own_HQS)
            own_HQS /= np.maximum(own_HQS.sum(2, keepdims=True), 1e-300)
            weights_HQS[:, :, chunk] += own_HQS
            number_Q += some_Q
        if keys is not None:
            # What a key stands in the place of is looked at in its place.
            here = np.flatnonzero(keys != np.arange(len(keys)))
            moved_HQS, weights_HQS[:, :, here] = weights_HQS[:, :, here], 0.0
            weights_HQS[:, :, keys[here]] += moved_HQS
        count, _, length = weights_HQS.shape
        made_GND = weights_HQS.reshape(self.v.shape[1], -1, length) @ self.v.transpose(1, 0, 2)
        made_QHD = made_GND.reshape(count, len(rows), -1).transpose(1, 0, 2)
        made_QHD = made_QHD if heads is None else made_QHD[:, heads]
        flat = made_QHD.reshape(len(rows), -1) / np.maximum(number_Q, 1)[:, None]
        return flat if self.through is None else np.asarray(flat @ self.through[0].T + self.through[1])

    def scores(self, rows: Ints, at: Ints | None = None) -> Array:
        """How much the tokens of these rows look at each key, [head, Q, S]."""
        at = np.arange(len(self.q)) if at is None else at
        q_HQD, k_GSD = self._turned(self.q, at)[rows].transpose(1, 0, 2), self._turned(self.k, at).transpose(1, 0, 2)
        heads, _, width = q_HQD.shape
        scores_GNS = q_HQD.reshape(len(k_GSD), -1, width) @ k_GSD.transpose(0, 2, 1)
        return np.asarray(scores_GNS).reshape(heads, len(rows), -1) / math.sqrt(width)

    def _turned(self, x_SHD: Array, at: Ints) -> Array:
        if self.base is None:
            return x_SHD
        width = x_SHD.shape[2]
        turn = at[:, None] * self.base ** (-np.arange(0, width, 2) / width)
        cos, sin = np.cos(turn)[:, None], np.sin(turn)[:, None]
        half = width // 2
        first, second = (slice(0, None, 2), slice(1, None, 2)) if self.in_pairs else (slice(0, half), slice(half, None))
        made = np.empty_like(x_SHD)
        made[..., first] = x_SHD[..., first] * cos - x_SHD[..., second] * sin
        made[..., second] = x_SHD[..., second] * cos + x_SHD[..., first] * sin
        return made


def of_seen_keys(
    what: str, whole: TensorRef, held: HeldByRanks, slices: Sequence[HeldByRanks], parted: Sequence[int],
    through: tuple[Array, Array] | None,
) -> Fault | None:  # fmt: skip
    """Which keys the ranks whose tokens are off saw instead of those they should, or which positions they counted.

    held: attention's output [sample, position, hidden], or what its projection makes of it `through` a weight
    [out, hidden] and a bias [out], of which each rank has some positions; whole: the other run's. slices: what ranks
    held alike with the other run just before. parted: the ranks whose tokens are off.

    Raises:
        DumpError: the bytes of one cannot be read.
    """
    if held.axis != 1 or len(whole.shape) != 3 or len(set(held.stretches)) < len(held.ranks):
        return None
    length = whole.shape[1]
    own = [np.concatenate([np.arange(at, at + long) for at, long in one]) for one in held.stretches]
    if sorted(np.concatenate(own).tolist()) != list(range(length)) or not whole.shape[0]:
        return None
    most_left = _LEFT[bool({"bfloat16", "float16"} & {whole.dtype, held.parts[0].dtype})]
    there_BSO = pages.array(whole).astype(np.float64)
    off_BSO = {
        rank: pages.array(part).astype(np.float64) - there_BSO[:, rows]
        for rank, rows, part in zip(held.ranks, own, held.parts, strict=True) if rank in parted
    }  # fmt: skip
    if not off_BSO or not np.isfinite(there_BSO).all() or not all(np.isfinite(off).all() for off in off_BSO.values()):
        return None
    # A sample that is right on a rank says nothing of it.
    least_B = np.min([np.linalg.norm(off, axis=(1, 2)) for off in off_BSO.values()], axis=0)
    for sample in np.argsort(-least_B, kind="stable")[:_MOST_SAMPLES].tolist():
        parts = _parts(slices, held, through, sample) if least_B[sample] else None
        made = _found(there_BSO[sample], parts, through) if parts is not None else None
        if made is not None:
            break
    else:
        return None
    #: By kind: what each rank's tokens say of it.
    found: dict[str, dict[int, tuple[float, str]]] = {}
    asked: list[int] = []
    for rank, rows in zip(held.ranks, own, strict=True):
        if rank not in off_BSO:
            continue
        causal_QS = rows[:, None] >= np.arange(length)
        off_QO = off_BSO[rank][sample]
        asked.append(rank)
        few = np.sort(np.argsort(-np.linalg.norm(off_QO, axis=1), kind="stable")[:_FEW])
        left_of = [
            _LeftUnexplained(made, rows[some], causal_QS[some], off_QO[some]) for some in (few, np.arange(len(rows)))
        ]
        for kind, said, wrong in _tried(made, held, own, rows, causal_QS):
            if kind not in found and len(asked) > 1:
                continue  # nothing that every rank has
            if left_of[0](wrong, few) > min(2 * _CLEARLY * most_left, _LITTLE):
                continue
            left = left_of[1](wrong, np.arange(len(rows)))
            if left < found.setdefault(kind, {}).get(rank, (_CLEARLY * most_left, ""))[0]:
                found[kind][rank] = left, said
        found = {kind: by for kind, by in found.items() if rank in by}
        if not found:
            return None
    # Another kind may explain it nearly as well, of a few ranks' tokens: then neither is said.
    worst = sorted((max(left for left, _ in by.values()), kind) for kind, by in found.items())
    if worst[0][0] > most_left or (len(worst) > 1 and worst[1][0] < _CLEARLY * worst[0][0]):
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
    if not all(ref.is_readable and ref.numel <= _MOST for ref in refs):
        return None
    if any(ref.shape != whole.shape for ref in held.parts) or any(
        ref.shape[:2] != whole.shape[:2] for ref in fused.parts
    ):
        return None
    there_SO, *here = (pages.array(ref)[0].astype(np.float64) for ref in (whole, *held.parts))
    own = [pages.array(ref)[0].astype(np.float64) for ref in fused.parts]
    cut = [pages.array(ref).astype(np.float64) for ref in weights.parts]
    every, weight = (
        np.concatenate([values[number] for _, number in sorted(
            (stretches[0][0], number) for number, stretches in enumerate(of.stretches))], 1)
        for values, of in ((own, fused), (cut, weights))
    )  # fmt: skip
    most_left = _LEFT[bool({"bfloat16", "float16"} & {whole.dtype, held.parts[0].dtype})]
    parts = _split(every, weight.shape[1])
    made = _found(there_SO, parts, (weight, np.zeros(len(weight)))) if parts is not None else None
    if made is None or not all(np.isfinite(one).all() for one in here):
        return None
    rows = np.arange(len(there_SO))
    causal = rows[:, None] >= rows
    width = made.q.shape[2]
    wrong = np.zeros(there_SO.shape)
    for values, part in zip(own, cut, strict=True):
        mine = _split(values, part.shape[1])
        if mine is None or any(one.shape[2] % width for one in mine):
            return None
        q, k, v = (one.reshape(len(rows), -1, width) for one in mine)
        if q.shape[1] % k.shape[1]:
            return None
        wrong += _Attention(q, k, v, made.base, made.in_pairs, (part, np.zeros(len(part))))(rows, causal)
    right = made(rows, causal)
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


def _split(fused: Array, width: int) -> tuple[Array, Array, Array] | None:
    """Queries, keys and values [S, 1, all] of what has them one after the other."""
    rest = (fused.shape[1] - width) // 2
    if rest <= 0 or width + 2 * rest != fused.shape[1]:
        return None
    return fused[:, None, :width], fused[:, None, width : width + rest], fused[:, None, width + rest :]


class _Wrong(Struct, frozen=True):
    """What may have gone wrong: see `_Attention.__call__`. times: scores are so many times what they should be; twice:
    keys that count twice among all.
    """

    sees_QS: Bools
    at: Ints | None = None
    keys: Ints | None = None
    chunks: Sequence[Ints] | None = None
    heads: Ints | None = None
    times: float = 1.0
    twice: Ints | None = None


class _LeftUnexplained:
    """What part of the difference of some rows is left where something went wrong for them."""

    def __init__(self, made: _Attention, rows: Ints, causal_QS: Bools, off_QO: Array) -> None:
        self._made, self._rows, self._off_QO = made, rows, off_QO
        self._scores_HQS = made.scores(rows)
        self._right_QO = made(rows, causal_QS, scores_HQS=self._scores_HQS)

    def __call__(self, wrong: _Wrong, some: Ints) -> float:
        """some: which of the rows of what went wrong these are."""
        scores_HQS = self._scores_HQS if wrong.at is None else self._made.scores(self._rows, wrong.at)
        scores_HQS = scores_HQS * wrong.times
        if wrong.twice is not None:
            scores_HQS[:, :, wrong.twice] += math.log(2)
        again_QO = self._made(
            self._rows, wrong.sees_QS[some], wrong.at, wrong.keys, wrong.chunks, wrong.heads, scores_HQS
        )  # fmt: skip
        left = np.linalg.norm(self._off_QO - (again_QO - self._right_QO))
        return float(left / np.linalg.norm(self._off_QO))


def _tried(
    made: _Attention, held: HeldByRanks, own: Sequence[Ints], rows: Ints, causal_QS: Bools
) -> Iterator[tuple[str, str, _Wrong]]:
    """What may have gone wrong for the tokens of these rows: a kind, and words."""
    length = causal_QS.shape[1]
    every = np.arange(length)

    def within(places: Ints) -> Bools:
        return np.isin(every, places)

    alone_QS = causal_QS & within(rows)
    yield "own keys", "where each token sees the keys of its rank's own stretch alone", _Wrong(alone_QS)
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
        yield "missing keys", f"without the keys of {words}: they never came, or were left out", _Wrong(less_QS)
    for words, places in pieces:
        more_QS = causal_QS | within(places)
        if (more_QS == causal_QS).all():
            continue
        yield (
            "later keys",
            f"where the keys of {words} are seen by all of its tokens, later ones too",
            _Wrong(more_QS),
        )
    everything = np.ones_like(causal_QS)
    yield "later keys", "where every token sees all keys, later ones too", _Wrong(everything)
    for (words, places), (others, instead) in ((one, other) for one in pieces for other in pieces):
        if places.size != instead.size or places is instead or not causal_QS[:, places].any():
            continue
        keys = every.copy()
        keys[places] = instead
        yield "stale keys", f"with the keys and values of {others} in the place of those of {words}", (
            _Wrong(causal_QS, keys=keys)
        )  # fmt: skip
    for kind, words, at in counted(own, length):
        if made.base is not None:
            yield kind, f"turned by {words}", _Wrong(causal_QS, at)
        hidden_QS = at[rows][:, None] >= at[None]
        if not (hidden_QS == causal_QS).all():
            yield "own mask" if kind == "own positions" else kind, f"hidden by {words}", _Wrong(hidden_QS)
            if made.base is not None:
                yield kind, f"turned and hidden by {words}", _Wrong(hidden_QS, at)
    for words, places in pieces:
        if causal_QS[:, places].any() and (causal_QS & ~within(places)).any():
            yield "keys twice", f"where the keys of {words} count twice", _Wrong(causal_QS, twice=places)
    width = made.q.shape[2]
    for words, times in (("not scaled by 1/sqrt(d)", width**0.5), ("scaled by 1/sqrt(d) twice", width**-0.5),
                         ("scaled by twice what is due", 2.0), ("scaled by half of what is due", 0.5)):  # fmt: skip
        yield "scale", f"with scores {words}", _Wrong(causal_QS, times=times)
    for words, heads in _turned_heads(made.q.shape[1], len(set(held.stretches))):
        yield "heads", f"with its heads in another order ({words})", _Wrong(causal_QS, heads=heads)
    for words, chunks in (("ranks'", own), ("chunks'", [places for _, places in pieces if places.size < rows.size])):
        if chunks:
            yield "merged", (
                f"where the {words} outputs are averaged, without the sums of exponentials that weigh them"
            ), _Wrong(causal_QS, chunks=chunks)  # fmt: skip


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


def _found(
    there_SO: Array, parts: tuple[Array, Array, Array], through: tuple[Array, Array] | None
) -> _Attention | None:
    """The attention that makes the other run's output of a sample again; None where none does."""
    q, k, v = parts
    length = len(there_SO)
    rows = np.unique(np.linspace(0, length - 1, 8).astype(np.int64))
    sees = rows[:, None] >= np.arange(length)
    size = float(np.linalg.norm(there_SO[rows]))
    widths = (
        (q.shape[2],) if q.shape[1] > 1 else [one for one in _WIDTHS if not k.shape[2] % one and not q.shape[2] % one]
    )
    best: tuple[float, _Attention] | None = None
    for width in widths:
        if any(one.shape[1] * one.shape[2] % width for one in (q, k, v)):
            continue  # values' heads may be of another width (MLA)
        cut = [one.reshape(length, -1, width) for one in (q, k, v)]
        if (
            cut[0].shape[1] % cut[1].shape[1]
            or cut[1].shape != cut[2].shape
            or cut[0].shape[1] * length * length > _MOST
        ):
            continue
        bases: list[tuple[float | None, bool]] = [(None, False)]
        bases += [(base, in_pairs) for base in _BASES for in_pairs in (False, True) if width % 2 == 0]
        for base, in_pairs in bases:
            one = _Attention(cut[0], cut[1], cut[2], base, in_pairs, through)
            again = one(rows, sees)
            if again.shape != there_SO[rows].shape:
                return None
            left = float(np.linalg.norm(again - there_SO[rows]))
            if left <= _NEAR * size and (best is None or left < best[0]):
                best = left, one
    return best[1] if best is not None else None


def _parts(
    slices: Sequence[HeldByRanks], held: HeldByRanks, through: tuple[Array, Array] | None, sample: int
) -> tuple[Array, Array, Array] | None:
    """A sample's queries, keys and values [S, heads, width], or [S, 1, all] where how heads are cut is not told."""

    def of(*endings: str) -> Array | None:
        for ending in endings:
            for one in reversed(slices):
                if not one.parts[0].name.endswith(ending) or one.ranks != held.ranks or one.stretches != held.stretches:
                    continue
                laid = standing_for(one)
                if (len(laid.shape), one.axis) not in _LAID or laid.shape[0] != held.parts[0].shape[0]:
                    continue  # tokens stand elsewhere than in the output
                if not laid.is_readable or laid.numel > _MOST:
                    return None
                own = pages.array(laid)[sample].astype(np.float64)
                if own.ndim == 3 and one.axis == 2:
                    own = own.transpose(1, 0, 2)
                return np.asarray(own[:, None] if own.ndim == 2 else own)
        return None

    q, k, v = of(*_QUERIES), of(*_KEYS), of(*_VALUES)
    if (q is None or k is None or v is None) and (fused := of(*_TOGETHER)) is not None:
        split = _split(fused[:, 0], through[0].shape[1] if through is not None else fused.shape[2] // 3)
        if split is None or fused.shape[1] != 1:
            return None
        q, k, v = split
    if q is None or k is None or v is None or len({len(one) for one in (q, k, v)}) > 1:
        return None
    if through is not None and through[0].shape[1] != q.shape[1] * q.shape[2]:
        return None
    if q.shape[1] > 1 and v.shape[1] == 1 and v.shape[2] % q.shape[2] == 0:
        v = v.reshape(len(v), -1, q.shape[2])
    return q, k, v
