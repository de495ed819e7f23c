"""Attention made again from what went into it, and the one that makes a recorded output: how heads are cut and turned,
how scores are capped, which keys a token sees.

    y_i  =  sum_j softmax_j(R_i q_i . R_j k_j / sqrt(d)) v_j        over the j that i sees

(Vaswani et al. 2017; R_i turns a head by its position, Su et al. 2021). Who asks what went wrong makes it otherwise.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from replay_core import pages
from replay_core.compare.judging.products import Array
from replay_core.compare.judging.solving import solved
from replay_core.compare.pairing.ranks import HeldByRanks, standing_for
from replay_core.regexes import regex

#: What weighs the output of each chunk of keys where all are merged, m being the largest score and l the sum of
#: exp(score - m) of a chunk (right is l exp(m), Milakov and Gimelshein 2018): nothing (their mean, or their sum),
#: exp(m), l, what it should by the wrong sign, or by powers of two; l exp(m) above or below the line alone, l there; or
#: l exp(m) against the largest m so far, what was summed before left as it was.
Merged = Literal[
    "mean", "sum", "maxima", "sums", "reversed", "powers of two", "sums below", "sums above", "not rescaled"
]

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]

#: CPU seconds in which what makes attention is looked for, of one sample: where it takes longer, nothing known does.
_SECONDS = 5.0
#: Modules that make what goes into attention: what is turned, behind a norm or before it, and all three in one.
_QUERIES = (
    r"q_?(norm|layernorm|ln)|(norm|ln)_?q|query_(norm|layernorm)",
    r"q(_?(proj|lin|linear|fc))?|(w|to|fc|lin|linear|proj)_?q|query(_proj)?|queries",
)
_KEYS = (
    r"k_?(norm|layernorm|ln)|(norm|ln)_?k|key_(norm|layernorm)",
    r"k(_?(proj|lin|linear|fc))?|(w|to|fc|lin|linear|proj)_?k|key(_proj)?|keys",
)
_VALUES = (r"v(_?(proj|lin|linear|fc))?|(w|to|fc|lin|linear|proj)_?v|value(_proj)?|values",)
_TOGETHER = (r"qkv(_?(proj|lin|linear))?|(w|to|fc|lin|linear|proj|in|c|attn)_?qkv|query_key_value|c_attn|in_proj",)
_INTO = regex(rf"(^|\.)({'|'.join(_QUERIES + _KEYS + _VALUES + _TOGETHER)})\.output$", re.IGNORECASE)

#: How far what is made again may be from the other run's output, of its norm (weights may have been recorded after
#: their step, which is in both of two that are made again, and not in what these differ by); and of what part no other
#: cut of heads is asked.
NEAR, _SURE = 0.05, 0.01
#: What part of the difference between the runs may be left, of float32 and of halves; and by how many times another
#: explanation leaves more.
LEFT, CLEARLY = (0.05, 0.2), 3.0
#: A simpler pattern of what is hidden is taken where it leaves no more than this times the least, or this of the norm.
_SIMPLER, _NOTHING = 1.5, 1e-3
#: Elements of a tensor that is read; tokens and channels that are asked.
MOST, ROWS, _CHANNELS = 1 << 23, 48, 96
#: Scores that are made at once, of all heads: of fewer tokens where heads are many.
_AT_ONCE = 1 << 16
_MOST_OF_DOCUMENTS = 512
BASES = (1e4, 5e5, 1e6, 1e5, 1e7)
_LOG_BASES = np.linspace(2, 18, 65)
_WIDTHS = (256, 192, 128, 96, 80, 64, 48, 40, 32, 24, 16, 12, 8, 6, 4)


class CutHeads(Struct, frozen=True):
    """Queries [S, head, d], keys and values [S, head of keys, d] of one sample; how heads are turned, scores capped,
    and made less by distance (ALiBi's slope of each head, Press et al. 2022); what output channels are made of heads,
    [channel, head x d].
    """

    q: Array
    k: Array
    v: Array
    out: Array
    base: float | None = None
    in_pairs: bool = False
    cap: float | None = None
    slopes: Array | None = None

    @property
    def knows_positions(self) -> bool:
        return self.base is not None or self.slopes is not None

    @property
    def heads(self) -> slice:
        """All of them."""
        return slice(0, int(self.q.shape[1]))


class How(Struct, frozen=True):
    """What each token sees [Q, S], and what is done otherwise.

    at_q, at_k: positions that queries and keys are turned by, None: not turned. bases: of each token, the base that it
    is turned by, where they have several. times: scores are so many times what
    they should be. keys: which key and value stands in the place of each; zeros: keys that are 0, no_values: and their
    values; twice: keys that count twice among all. of_keys: which head of keys each head of queries looks at; order:
    which head stands in the place of each. instead: places, and the keys and values [place, head, d] that stand there.
    chunks: keys whose outputs are made apart and merged as `merged` says.
    """

    sees_QS: Bools
    at_q: Array | None
    at_k: Array | None
    base: float | None
    in_pairs: bool
    cap: float | None
    slopes: Array | None = None
    bases: Array | None = None
    times: float = 1.0
    keys: Ints | None = None
    zeros: Ints | None = None
    no_values: bool = False
    twice: Ints | None = None
    of_keys: Ints | None = None
    order: Ints | None = None
    instead: tuple[Ints, Array, Array] | None = None
    chunks: Sequence[Ints] | None = None
    merged: Merged = "mean"


def goes_into(name: str) -> bool:
    """Whether a tensor is called as what goes into attention is."""
    return _INTO.search(name) is not None


def channels_of(off_BSO: Array) -> Ints:
    """Channels that are asked: some of all, and those that are furthest off."""
    count = off_BSO.shape[2]
    some = np.linspace(0, count - 1, min(count, _CHANNELS)).astype(np.int64)
    worst = np.argsort(-np.abs(off_BSO).sum((0, 1)), kind="stable")[: _CHANNELS // 4]
    return np.unique(np.concatenate([some, worst]))


_NUMBER = regex(r"(?<![^.])\d{1,6}(?![^.])")


class IntoAttention:
    """What went into attention, of all ranks, sample by sample."""

    def __init__(
        self, what: str, held: HeldByRanks, given: Sequence[HeldByRanks], tokens: tuple[int, ...],
        through: tuple[Array, Array] | None, channels: Ints, hidden: int,
    ) -> None:  # fmt: skip
        """tokens: samples, and how many each has. channels: of the output's `hidden`, those that are asked."""
        self._tokens, self._through, self.channels, self._hidden = tokens, through, channels, hidden
        around = what.removesuffix(".output").removesuffix(".inputs.0")
        self._arounds = (around, around.rpartition(".")[0]) if through is None else (around.rpartition(".")[0],)
        # Of what is cut among ranks both by samples and by heads, the first of each share stands for it.
        self._given = [one for one in given if one.ranks == held.ranks or set(one.ranks) < set(held.ranks)]
        self.heads_of: list[list[int]] = []
        self._q, self._k, self._v, self._all = (
            self._of(names, self._given, self._arounds) for names in (_QUERIES, _KEYS, _VALUES, _TOGETHER)
        )

    @property
    def are_known(self) -> bool:
        return self._all is not None or (self._q is not None and self._k is not None and self._v is not None)

    def _of(self, endings: Sequence[str], given: Sequence[HeldByRanks], arounds: Sequence[str]) -> Array | None:
        """[B, S, all] or [B, S, head, d]."""
        for ending in endings:
            for one in reversed(given):
                around, _, own = one.parts[0].name.removesuffix(".output").rpartition(".")
                is_there = any(f".{around}".endswith(f".{one}") for one in arounds if one)
                if not is_there or not re.fullmatch(ending, own, re.IGNORECASE):
                    continue
                laid = standing_for(one)
                if not laid.is_readable or laid.numel > MOST or laid.shape[0] != self._tokens[0]:
                    return None
                values = pages.array(laid).astype(np.float64)
                if values.ndim == 4 and values.shape[1] != self._tokens[1] and values.shape[2] == self._tokens[1]:
                    values = values.transpose(0, 2, 1, 3)
                if values.ndim not in (3, 4) or values.shape[1] != self._tokens[1] or not np.isfinite(values).all():
                    return None
                if one.axis in (2, 3) and not self.heads_of:
                    places = sorted(set(one.stretches))
                    self.heads_of = [
                        [rank for rank, own in zip(one.ranks, one.stretches, strict=True) if own == place]
                        for place in places
                    ]
                return np.asarray(values)
        return None

    def of_layers_before(
        self, earlier: Sequence[HeldByRanks], sample: int, like: CutHeads
    ) -> Iterator[tuple[str, Array, Array]]:
        """Keys and values of layers before this one, nearest first: a layer's name, and both cut as this one's are."""
        for around in self._arounds:
            *_, last = (None, *_NUMBER.finditer(around))
            for by in range(1, int(last.group()) + 1) if last is not None else ():
                name = f"{around[: last.start()]}{int(last.group()) - by}{around[last.end() :]}" if last else ""
                both = [self._of(names, earlier, (name,)) for names in (_KEYS, _VALUES)]
                if all(one is not None for one in both):
                    k_SHD, v_SHD = (
                        one[sample, : len(like.k)].reshape(len(like.k), -1) for one in both if one is not None
                    )
                    if k_SHD.shape[1] == v_SHD.shape[1] == like.k[0].size:
                        yield name, k_SHD.reshape(like.k.shape), v_SHD.reshape(like.v.shape)

    def target(self, there_SO: Array, length: int) -> Array:
        """What the heads of a sample's first tokens come to in the channels that are asked."""
        own_SO = there_SO[:length] if self._through is None else there_SO[:length] - self._through[1]
        return np.asarray(own_SO[:, self.channels])

    def cuts(self, sample: int, length: int) -> Iterator[CutHeads]:
        """Every way in which the heads of a sample's first tokens may be cut."""
        width_of_all = self._through[0].shape[1] if self._through is not None else self._hidden
        channels = self.channels
        if self._through is not None:
            out = self._through[0][channels]
        else:
            out = np.zeros((channels.size, self._hidden))
            out[np.arange(channels.size), channels] = 1

        def taken(values: Array | None) -> Array | None:
            return None if values is None else values[sample, :length]

        q, k, v, every = (taken(one) for one in (self._q, self._k, self._v, self._all))
        for width in _WIDTHS if q is None or q.ndim == 2 else (q.shape[2],):
            if width_of_all % width:
                continue
            for fused in split(every, width_of_all, width) if every is not None else ((None, None, None),):
                own = [mine if mine is not None else part for mine, part in zip((q, k, v), fused, strict=True)]
                yield from in_heads([one for one in own if one is not None], width, out)


def in_heads(parts: Sequence[Array], width: int, out: Array) -> Iterator[CutHeads]:
    """Queries, keys and values cut into heads so wide, where they can be."""
    if len(parts) < 3 or any(one[0].size % width for one in parts):
        return
    q, k, v = (one.reshape(len(one), -1, width) for one in parts)
    if q.shape[1] * width == out.shape[1] and k.shape == v.shape and q.shape[1] % k.shape[1] == 0:
        yield CutHeads(q, k, v, out)


def split(every: Array, hidden: int, width: int) -> Iterator[tuple[Array, Array, Array]]:
    """Queries, keys and values of what has them one after the other, or group by group (Megatron)."""
    flat = every.reshape(len(every), -1)
    rest = (flat.shape[1] - hidden) // 2
    if rest <= 0 or hidden + 2 * rest != flat.shape[1] or rest % width:
        return
    groups = rest // width
    yield flat[:, :hidden], flat[:, hidden : hidden + rest], flat[:, hidden + rest :]
    if hidden % rest == 0 and groups > 1:
        of_groups = flat.reshape(len(flat), groups, -1, width)
        yield of_groups[:, :, :-2], of_groups[:, :, -2], of_groups[:, :, -1]


def straight(every: Array, out: Array) -> Iterator[CutHeads]:
    """Every way in which the heads may be cut of queries, keys and values one after the other."""
    for width in _WIDTHS:
        if out.shape[1] % width == 0 and (parts := next(split(every, out.shape[1], width), None)) is not None:
            yield from in_heads(parts, width, out)


class SeenFrom(Struct, frozen=True):
    """The first key that each token sees, and words."""

    kind: str
    starts: Ints
    words: str
    #: The first token that sees itself alone: those before it are padding, whatever they see.
    begin: int = 0


def most_rows(cut: CutHeads, length: int) -> int:
    return min(ROWS, max(8, _AT_ONCE // (int(cut.q.shape[1]) * length)))


def asked(rows: Ints, size_S: Array, most: int) -> Ints:
    """Tokens that are asked: those that are furthest off, and others between."""
    if rows.size <= most:
        return rows
    worst = rows[np.argsort(-size_S[rows], kind="stable")[: most // 2]]
    return np.unique(np.concatenate([worst, rows[np.linspace(0, rows.size - 1, most // 2).astype(int)]]))


def normal(cut: CutHeads, rows: Ints, starts: Ints) -> How:
    at = np.arange(len(cut.q)).astype(float)
    keys = np.arange(len(cut.k))
    sees_QS = (keys <= rows[:, None]) & (keys >= starts[rows][:, None])
    turned = at if cut.knows_positions else None
    return How(sees_QS, turned, turned, cut.base, cut.in_pairs, cut.cap, cut.slopes)


def alibi(heads: int) -> Array:
    """The slopes of so many heads: a geometric sequence from 2^(-8 / heads) on; of a number that is no power of two,
    those of the next lower one, and every second of twice as many.
    """
    power = 1 << (heads.bit_length() - 1)
    own = 2.0 ** (-8.0 * np.arange(1, power + 1) / power)
    more = 2.0 ** (-4.0 * np.arange(1, 2 * (heads - power) + 1, 2) / power)
    return np.concatenate([own, more])


def _turned(x_SHD: Array, at: Array | None, base: float | Array | None, *, in_pairs: bool) -> Array:
    if base is None or at is None:
        return x_SHD
    width = x_SHD.shape[2]
    turn = at[:, None] * np.asarray(base, np.float64)[..., None] ** (-np.arange(0, width, 2) / width)
    cos, sin = np.cos(turn)[:, None], np.sin(turn)[:, None]
    half = width // 2
    first, second = (slice(0, None, 2), slice(1, None, 2)) if in_pairs else (slice(0, half), slice(half, None))
    made = np.empty_like(x_SHD)
    made[..., first] = x_SHD[..., first] * cos - x_SHD[..., second] * sin
    made[..., second] = x_SHD[..., second] * cos + x_SHD[..., first] * sin
    return made


def scores(cut: CutHeads, rows: Ints, heads: slice, how: How) -> Array:
    """How much tokens look at each key, [head, Q, S]."""
    width = cut.q.shape[2]
    at_q = None if how.at_q is None else how.at_q[rows]
    of_q, of_k = (how.base, how.base) if how.bases is None else (how.bases[rows], how.bases)
    q_HQD = _turned(cut.q[rows][:, heads], at_q, of_q, in_pairs=how.in_pairs).transpose(1, 0, 2)
    k_SHD = cut.k
    if how.instead is not None:
        k_SHD = k_SHD.copy()
        k_SHD[how.instead[0]] = how.instead[1]
    k_HDS = _turned(k_SHD, how.at_k, of_k, in_pairs=how.in_pairs).transpose(1, 2, 0)[_groups(cut, how)[heads]]
    scores_HQS = how.times * (q_HQD @ k_HDS) / math.sqrt(width)
    if how.slopes is not None and how.at_q is not None and how.at_k is not None:
        scores_HQS += how.slopes[heads, None, None] * (how.at_k[None] - how.at_q[rows][:, None])
    if how.zeros is not None:
        scores_HQS[:, :, how.zeros] = 0
    return np.asarray(scores_HQS if how.cap is None else how.cap * np.tanh(scores_HQS / how.cap))


def _groups(cut: CutHeads, how: How) -> Ints:
    """Which head of keys each head of queries looks at."""
    if how.of_keys is not None:
        return how.of_keys
    return np.repeat(np.arange(cut.k.shape[1]), cut.q.shape[1] // cut.k.shape[1])


def _values(cut: CutHeads, heads: slice, how: How) -> Array:
    v_SHD = cut.v
    if how.instead is not None:
        v_SHD = v_SHD.copy()
        v_SHD[how.instead[0]] = how.instead[2]
    v_HSD = v_SHD.transpose(1, 0, 2)[_groups(cut, how)[heads]]
    if how.zeros is not None and how.no_values:
        v_HSD = v_HSD.copy()
        v_HSD[:, how.zeros] = 0
    return np.asarray(v_HSD)


def _out(cut: CutHeads, heads: slice, made_HQD: Array) -> Array:
    """What these heads, [head, Q, d], add to the channels: [Q, channel]."""
    width = cut.q.shape[2]
    own = cut.out[:, heads.start * width : heads.stop * width]
    return np.asarray(made_HQD.transpose(1, 0, 2).reshape(made_HQD.shape[1], -1) @ own.T)


def made(cut: CutHeads, rows: Ints, heads: slice, how: How, known_HQS: Array | None = None) -> Array:
    """What the tokens of these rows get of these heads, [Q, channel]. known_HQS: the scores, where they are known."""
    scores_HQS = scores(cut, rows, heads, how) if known_HQS is None else known_HQS
    values_HSD = _values(cut, heads, how)
    if how.keys is not None:
        scores_HQS, values_HSD = scores_HQS[:, :, how.keys], values_HSD[:, how.keys]
    if how.twice is not None:
        scores_HQS = scores_HQS.copy()
        scores_HQS[:, :, how.twice] += math.log(2)
    chunks = how.chunks or (slice(None),)
    most_CHQ, sums_CHQ, made_CHQD = [], [], []
    for chunk in chunks:
        own_HQS = np.where(how.sees_QS[:, chunk], scores_HQS[:, :, chunk], -np.inf)
        most_HQ1 = own_HQS.max(2, keepdims=True)
        own_HQS = np.exp(own_HQS - np.where(np.isfinite(most_HQ1), most_HQ1, 0.0))
        sums_HQ1 = own_HQS.sum(2, keepdims=True)
        own_HQS /= np.maximum(sums_HQ1, 1e-300)
        made_CHQD.append(own_HQS @ values_HSD[:, chunk])
        most_CHQ.append(most_HQ1[:, :, 0])
        sums_CHQ.append(sums_HQ1[:, :, 0])
    made_HQD = made_CHQD[0]
    if len(chunks) > 1:
        made_HQD = _merged(np.array(made_CHQD), np.array(most_CHQ), np.array(sums_CHQ), how.merged)
    return _out(cut, heads, made_HQD if how.order is None else made_HQD[how.order])


def _merged(made_CHQD: Array, most_CHQ: Array, sums_CHQ: Array, merged: Merged) -> Array:
    """What is made of the outputs of chunks, whose largest scores (-inf: a token sees none) and sums are given."""
    top_HQ = most_CHQ.max(0)
    sees_CHQ = np.isfinite(most_CHQ)
    below_CHQ = np.where(sees_CHQ, most_CHQ - np.where(np.isfinite(top_HQ), top_HQ, 0.0), 0.0)
    logs_CHQ = below_CHQ + np.log(np.maximum(sums_CHQ, 1e-300))
    right_CHQ = np.exp(logs_CHQ) * sees_CHQ
    ones_CHQ, own_CHQ = sees_CHQ.astype(float), sums_CHQ * sees_CHQ
    if merged in ("mean", "sum"):
        above_CHQ, under_CHQ = ones_CHQ, ones_CHQ
        if merged == "sum":
            return np.asarray((above_CHQ[..., None] * made_CHQD).sum(0))
    elif merged == "maxima":
        above_CHQ = under_CHQ = np.exp(below_CHQ) * sees_CHQ
    elif merged == "sums":
        above_CHQ = under_CHQ = own_CHQ
    elif merged == "reversed":
        least_HQ = np.where(sees_CHQ, logs_CHQ, np.inf).min(0)
        turned_CHQ = np.where(sees_CHQ, least_HQ - logs_CHQ, -np.inf)
        above_CHQ = under_CHQ = np.exp(turned_CHQ)
    elif merged == "powers of two":
        above_CHQ = under_CHQ = np.exp2(logs_CHQ) * sees_CHQ
    elif merged == "sums below":
        above_CHQ, under_CHQ = right_CHQ, own_CHQ
    elif merged == "sums above":
        above_CHQ, under_CHQ = own_CHQ, right_CHQ
    else:
        so_far_CHQ = np.maximum.accumulate(most_CHQ, 0)
        held_CHQ = np.where(sees_CHQ, most_CHQ - np.where(np.isfinite(so_far_CHQ), so_far_CHQ, 0.0), 0.0)
        above_CHQ = under_CHQ = np.exp(held_CHQ) * own_CHQ
    return np.asarray((above_CHQ[..., None] * made_CHQD).sum(0) / np.maximum(under_CHQ.sum(0), 1e-300)[..., None])


def _by_starts(cut: CutHeads, row: int, heads: slice, scores_HS: Array, how: How) -> Array:
    """What a token gets that sees the keys from each of those before it on: [first key, channel]."""
    seen_HS = scores_HS[:, : row + 1]
    weights_HS = np.exp(seen_HS - seen_HS.max(1, keepdims=True))
    each_HSD = weights_HS[:, :, None] * _values(cut, heads, how)[:, : row + 1]
    sums_HSD, sums_HS = (np.flip(np.cumsum(np.flip(one, 1), 1), 1) for one in (each_HSD, weights_HS))
    return _out(cut, heads, sums_HSD / np.maximum(sums_HS, 1e-300)[:, :, None])


def off_by_starts(cut: CutHeads, rows: Ints, heads: slice, how: How, target_QC: Array) -> list[Array]:
    """Of each token, how far it is from the target where it sees the keys from each on."""
    scores_HQS = scores(cut, rows, heads, how)
    return [
        np.asarray(np.linalg.norm(_by_starts(cut, row, heads, scores_HQS[:, number], how) - target_QC[number], axis=1))
        for number, row in enumerate(rows.tolist())
    ]  # fmt: skip


def fitted(there_SC: Array, cuts: Iterator[CutHeads]) -> tuple[CutHeads, SeenFrom] | None:
    """The attention that makes the other run's output of a sample's tokens again, without what is added to it, and the
    keys that its tokens see.
    """
    length, begun = len(there_SC), time.thread_time()
    all_seen = np.zeros(length, np.int64)
    every = list(cuts)
    # The first token sees itself alone, whatever turns it; before it padding sees what it may.
    begins = [_first_alone(cut, there_SC) for cut in every]
    begin = min((one for one in begins if one is not None), default=None)
    if begin is None:
        return None
    rows = np.unique(np.linspace(begin, length - 1, min(length - begin, ROWS)).astype(np.int64))
    few = rows[np.unique(np.linspace(0, len(rows) - 1, 8).astype(int))]
    there_QC = there_SC[few]
    size = float(np.linalg.norm(there_QC))
    best: tuple[float, CutHeads] | None = None
    possible = [cut for cut, own in zip(every, begins, strict=True) if own == begin]
    for cut in possible:
        turns: list[tuple[float | None, bool]] = [(None, False)]
        turns += [(base, in_pairs) for base in BASES for in_pairs in (False, True) if cut.q.shape[2] % 2 == 0]
        for cap in (None, 50.0, 30.0, 20.0):
            if best is not None:
                break
            every = [replace(cut, base=base, in_pairs=in_pairs, cap=cap) for base, in_pairs in turns]
            for one in (*every[:1], replace(cut, slopes=alibi(int(cut.q.shape[1])), cap=cap), *every[1:]):
                if time.thread_time() - begun > _SECONDS:
                    return None
                if not _makes_early_tokens(one, few, there_QC):
                    continue
                off = off_by_starts(one, few, one.heads, normal(one, few, all_seen), there_QC)
                left = float(np.linalg.norm([row.min() for row in off]))
                if left <= NEAR * size and (best is None or left < 0.99 * best[0]):
                    best = left, one
        if best is not None and best[0] <= _SURE * size:
            break
    known = best[1] if best is not None else _of_another_base(possible, few, there_QC, begun, begin)
    if known is None:
        return None
    cut = known
    rows = asked(rows, np.zeros(length), most_rows(cut, length))
    there_QC = there_SC[rows]
    size = float(np.linalg.norm(there_QC))
    off = off_by_starts(cut, rows, cut.heads, normal(cut, rows, all_seen), there_QC)
    found = patterns(rows, off, length, size, begin)
    return (cut, found[1]) if found is not None and found[0] <= NEAR * size else None


def _first_alone(cut: CutHeads, there_SC: Array) -> int | None:
    """The first token whose output is what it makes of itself alone, but for the last few; None: there is none."""
    every = np.arange(len(there_SC))
    values_HSD = _values(cut, cut.heads, normal(cut, every[:1], np.zeros(len(every), np.int64)))
    size_S = np.linalg.norm(there_SC, axis=1)
    off_S = np.linalg.norm(_out(cut, cut.heads, values_HSD) - there_SC, axis=1)
    alone = np.flatnonzero(off_S <= 2 * NEAR * np.maximum(size_S, float(np.sqrt(np.square(size_S).mean()))))
    return int(alone[0]) if alone.size and alone[0] < max(1, len(every) - 3) else None


def _of_another_base(
    possible: Sequence[CutHeads], few: Ints, there_QC: Array, begun: float, begin: int
) -> CutHeads | None:
    """The cut of heads that makes these tokens again where they are turned by a base that is solved for."""
    early, early_QC = few[1:3], there_QC[1:3]
    if not early.size:
        return None
    most = int(early[-1]) + 1
    for cut in possible:
        for in_pairs in (False, True) if cut.q.shape[2] % 2 == 0 else ():

            def turned(log: float, cut: CutHeads = cut, *, in_pairs: bool = in_pairs) -> CutHeads:
                return replace(cut, base=math.exp(log), in_pairs=in_pairs)

            def left_early(log: float) -> float:
                own = turned(log)
                short = replace(own, q=own.q[:most], k=own.k[:most], v=own.v[:most])
                usual = normal(short, early, np.full(most, begin))
                return float(np.linalg.norm(made(short, early, short.heads, usual) - early_QC))

            log, left = solved(left_early, _LOG_BASES)
            if time.thread_time() - begun > _SECONDS:
                return None
            if left > NEAR * float(np.linalg.norm(early_QC)):
                continue
            own = turned(log)
            off = off_by_starts(own, few, own.heads, normal(own, few, np.zeros(len(own.q), np.int64)), there_QC)
            if float(np.linalg.norm([row.min() for row in off])) <= _SURE * float(np.linalg.norm(there_QC)):
                return own
    return None


def _makes_early_tokens(cut: CutHeads, few: Ints, there_QC: Array) -> bool:
    """Whether attention may make the second and third of some tokens, whose few keys are asked of at little cost."""
    early = slice(1, 3)
    rows, target_QC = few[early], there_QC[early]
    if not rows.size:
        return True
    most = int(rows[-1]) + 1
    short = replace(cut, q=cut.q[:most], k=cut.k[:most], v=cut.v[:most])
    off = off_by_starts(short, rows, short.heads, normal(short, rows, np.zeros(most, np.int64)), target_QC)
    left = float(np.linalg.norm([row.min() for row in off]))
    return bool(
        left <= 3 * NEAR * max(float(np.linalg.norm(target_QC)), float(np.linalg.norm(there_QC)) / len(few) ** 0.5)
    )


def patterns(rows: Ints, off: list[Array], length: int, size: float, begin: int = 0) -> tuple[float, SeenFrom] | None:
    """The simplest pattern of first keys that leaves little: none hidden, a window, the first few, documents."""
    least = float(np.linalg.norm([one.min() for one in off]))
    line = max(_SIMPLER * least, _NOTHING * size)

    def left(starts: Ints) -> float:
        return float(np.linalg.norm([one[starts[row]] for row, one in zip(rows.tolist(), off, strict=True)]))

    every = np.arange(length)
    none = SeenFrom("mask", np.zeros(length, np.int64), "with nothing hidden but later keys", begin)
    if left(none.starts) <= line:
        return left(none.starts), none
    windows = [np.maximum(0, every - width + 1) for width in range(1, length)]
    firsts = [np.minimum(first, every) for first in range(1, min(length, max(9, begin + 9)))]
    for kind, several, words in (
        ("window", windows, "in a window of {} keys"), ("mask", firsts, "without the first {} keys"),
    ):  # fmt: skip
        if several:
            lefts = [left(starts) for starts in several]
            number = int(np.argmin(lefts))
            if lefts[number] <= line:
                return lefts[number], SeenFrom(kind, several[number], words.format(number + 1), begin)
    starts = _documents(rows, off, length, line)
    if starts is not None and left(starts) <= line:
        begun = ", ".join(map(str, np.unique(starts).tolist()[:6]))
        return left(starts), SeenFrom("mask", starts, f"in documents that begin at tokens {begun}", begin)
    return None


def _documents(rows: Ints, off: list[Array], length: int, line: float) -> Ints | None:
    """Where documents begin of which each token sees its own alone: as few as leave little."""
    if length > _MOST_OF_DOCUMENTS:
        return None
    by_row = dict(zip(rows.tolist(), off, strict=True))
    each = line * line / 64
    least, before = np.full(length + 1, np.inf), np.zeros(length + 1, np.int64)
    least[0] = 0
    for start in range(length):
        cost = least[start] + each
        for row in range(start, length):
            cost += by_row[row][start] ** 2 if row in by_row else 0.0
            if cost < least[row + 1]:
                least[row + 1], before[row + 1] = cost, start
    starts, at = np.zeros(length, np.int64), length
    while at:
        starts[before[at] : at] = before[at]
        at = int(before[at])
    return starts if len(np.unique(starts)) <= max(2, length // 4) else None


def short(base: float) -> str:
    """A base as it was meant: two digits where these are near."""
    rounded = float(f"{base:.2g}")
    return f"{rounded:g}" if abs(rounded / base - 1) < 0.05 else f"{base:.3g}"
