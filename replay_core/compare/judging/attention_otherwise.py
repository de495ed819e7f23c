"""Which attention makes a run's output of the same queries, keys and values: another mask, scale, cap or rotation.

What went into attention is recorded and agrees, what came out does not. The other run's output says how heads are cut
and turned and which keys a token sees (a window, documents): what does not make it again says nothing. Then one thing
after the other is changed, of all heads, of one rank's, or of one rank's tokens; only what makes the difference between
the two outputs, and clearly better than all else does, is said.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from replay_core import pages
from replay_core.compare.judging.faults import Fault, whose
from replay_core.compare.judging.products import Array
from replay_core.compare.judging.solving import solved
from replay_core.compare.pairing.ranks import HeldByRanks, standing_for
from replay_core.records import TensorRef

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]

#: CPU seconds in which what makes attention is looked for, of one sample: where it takes longer, nothing known does.
_SECONDS = 5.0
#: Names of what goes into attention: as it is turned, before a norm, or all three in one.
QUERIES = ("q_norm.output", "q_layernorm.output", "q_proj.output")
KEYS = ("k_norm.output", "k_layernorm.output", "k_proj.output")
VALUES = ("v_proj.output",)
TOGETHER = ("qkv_proj.output", "query_key_value.output", "c_attn.output", "linear_qkv.output")
INTO = QUERIES + KEYS + VALUES + TOGETHER

#: How far what is made again may be from the other run's output, of its norm (weights may have been recorded after
#: their step); what part of the difference may be left, of float32 and of halves; by how many times all else leaves
#: more.
_NEAR = 0.05
#: And of what part no other cut of heads is asked.
_SURE = 0.01
_LEFT, _CLEARLY, _FLOOR = (0.05, 0.2), 3.0, 1e-9
#: A simpler pattern of what is hidden is taken where it leaves no more than this times the least, or this of the norm.
_SIMPLER, _NOTHING = 1.5, 1e-3
#: Elements of a tensor that is read; tokens of a sample, of which all see some; tokens and channels that are asked.
_MOST, _TOKENS, _ROWS, _CHANNELS = 1 << 23, 256, 48, 96
#: Scores that are made at once, of all heads: of fewer tokens where heads are many.
_AT_ONCE = 1 << 16
_MOST_OF_DOCUMENTS = 512
_BASES = (1e4, 5e5, 1e6, 1e5, 1e7)
_WIDTHS = (256, 192, 128, 96, 80, 64, 48, 40, 32, 24, 16, 12, 8, 6, 4)


class _Cut(Struct, frozen=True):
    """Queries [S, head, d], keys and values [S, head of keys, d] of one sample; how heads are turned and scores capped;
    what output channels are made of heads, [channel, head x d].
    """

    q: Array
    k: Array
    v: Array
    out: Array
    base: float | None = None
    in_pairs: bool = False
    cap: float | None = None


class _Otherwise(Struct, frozen=True):
    """What is done otherwise. at_q, at_k: positions that queries and keys are turned by, None: not turned."""

    sees_QS: Bools
    at_q: Array | None
    at_k: Array | None
    base: float | None
    in_pairs: bool
    cap: float | None
    times: float = 1.0
    zeros: Ints | None = None
    no_values: bool = False
    of_keys: Ints | None = None


class _Cell(Struct, frozen=True):
    """Some tokens of a sample, the heads that may be off there, and by how much the output is off."""

    cut: _Cut
    rows: Ints
    heads: slice
    off_QC: Array
    normal: _Otherwise
    words: str
    #: Where documents begin anew: the positions that tokens have in their own.
    within: Array | None = None
    #: Tokens of other ranks, and of the rank's own: words and places.
    pieces: tuple[tuple[str, Ints], ...] = ()
    own: Ints | None = None


class _Explanation(Struct, frozen=True):
    left: float
    kind: str
    words: str


def otherwise(
    what: str, whole: TensorRef, held: HeldByRanks, given: Sequence[HeldByRanks], parted: Sequence[int],
    through: tuple[Array, Array] | None,
) -> Fault | None:  # fmt: skip
    """What attention does otherwise on which ranks.

    held: attention's output [sample, position, hidden], or what its projection makes of it `through` a weight
    [out, hidden] and a bias [out]; whole: the other run's. given: what ranks held alike with the other run before.
    parted: the ranks whose output is off.

    Raises:
        DumpError: the bytes of one cannot be read.
    """
    if through is None and what.endswith(("proj.output", "dense.output", "wo.output")):
        return None
    if len(whole.shape) != 3 or held.axis not in (None, 0, 1) or whole.numel > _MOST or not whole.is_readable:
        return None
    those = tuple(rank for rank in held.ranks if rank in parted) or held.ranks
    laid = standing_for(held) if held.is_cut else held.parts[held.ranks.index(those[0])]
    if laid.shape != whole.shape or not laid.is_readable:
        return None
    if through is not None and (through[0].shape[0] != whole.shape[2] or through[1].shape != whole.shape[2:]):
        return None
    there_BSO, here_BSO = (pages.array(ref).astype(np.float64) for ref in (whole, laid))
    if not np.isfinite(there_BSO).all() or not np.isfinite(here_BSO).all():
        return None
    raw = _Given(what, held, given, whole.shape[:2], through, _channels(here_BSO - there_BSO))
    is_half = bool({"bfloat16", "float16"} & {whole.dtype, laid.dtype})
    found: list[tuple[float, str, tuple[int, ...], str]] = []
    made: dict[int, tuple[_Cut, _Pattern] | None] = {}
    for ranks, cells in _supposed(those, held, raw, there_BSO, here_BSO, made):
        told = [_explained(cell) for cell in cells]
        if not told:
            continue
        kinds = set.intersection(*({one.kind for one in of_cell} for of_cell in told))
        for kind in kinds:
            best = [min((one for one in of_cell if one.kind == kind), key=lambda one: one.left) for of_cell in told]
            each = dict.fromkeys(one.words for one in best)
            found.append((max(one.left for one in best), kind, ranks, "; ".join(each)))
    if min(whole.shape[1], _TOKENS) < 2:
        found = [one for one in found if one[1] == "part"]  # one token sees itself alone, however it is turned
    found.sort(key=lambda one: one[:3])
    if not found or found[0][0] > _LEFT[is_half]:
        return None
    left, kind, ranks, said = found[0]
    if len(found) > 1 and found[1][0] <= _CLEARLY * max(left, _FLOOR):
        return None
    of_heads = "" if set(ranks) == set(those) else f" of {whose(ranks)}'s heads"
    if of_heads and not held.is_cut and len(those) < len(held.ranks):
        # The sum is right on others: that of these ranks got another part of it.
        if kind == "part" and "missing" in said:
            said = f"{said}, for it did not reach {whose(those)}"
        ranks = those
    return Fault(
        f"attention's {kind}", ranks,
        f"{what}: attention{of_heads} on {whose(ranks)} is what the recorded queries, keys and values make {said} "
        "(made again from them; the other run's is made again without)",
    )  # fmt: skip


def _channels(off_BSO: Array) -> Ints:
    """Channels that are asked: some of all, and those that are furthest off."""
    count = off_BSO.shape[2]
    some = np.linspace(0, count - 1, min(count, _CHANNELS)).astype(np.int64)
    worst = np.argsort(-np.abs(off_BSO).sum((0, 1)), kind="stable")[: _CHANNELS // 4]
    return np.unique(np.concatenate([some, worst]))


class _Given:
    """What went into attention, of all ranks, sample by sample."""

    def __init__(
        self, what: str, held: HeldByRanks, given: Sequence[HeldByRanks], tokens: tuple[int, ...],
        through: tuple[Array, Array] | None, channels: Ints,
    ) -> None:  # fmt: skip
        self._tokens, self._through, self.channels = tokens, through, channels
        around = what.removesuffix(".output").removesuffix(".inputs.0")
        self._arounds = (around, around.rpartition(".")[0]) if through is None else (around.rpartition(".")[0],)
        self._given = [one for one in given if one.ranks == held.ranks]
        self.heads_of: list[list[int]] = []
        self._q, self._k, self._v, self._all = (self._of(names) for names in (QUERIES, KEYS, VALUES, TOGETHER))

    @property
    def are_known(self) -> bool:
        return self._all is not None or (self._q is not None and self._k is not None and self._v is not None)

    def _of(self, endings: Sequence[str]) -> Array | None:
        """[B, S, all] or [B, S, head, d]."""
        for ending in endings:
            for one in reversed(self._given):
                named = tuple(f"{around}.{ending}" for around in self._arounds if around)
                if not f".{one.parts[0].name}".endswith(tuple(f".{name}" for name in named)):
                    continue
                laid = standing_for(one)
                if not laid.is_readable or laid.numel > _MOST or laid.shape[0] != self._tokens[0]:
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

    def cuts(self, sample: int, hidden: int, length: int) -> Iterator[_Cut]:
        """Every way in which the heads of a sample's first tokens may be cut."""
        width_of_all = self._through[0].shape[1] if self._through is not None else hidden
        channels = self.channels
        if self._through is not None:
            out = self._through[0][channels]
        else:
            out = np.zeros((channels.size, hidden))
            out[np.arange(channels.size), channels] = 1

        def taken(values: Array | None) -> Array | None:
            return None if values is None else values[sample, :length]

        q, k, v, every = (taken(one) for one in (self._q, self._k, self._v, self._all))
        for width in _WIDTHS if q is None or q.ndim == 2 else (q.shape[2],):
            if width_of_all % width:
                continue
            for fused in self._split(every, width_of_all, width) if every is not None else ((None, None, None),):
                own = [mine if mine is not None else part for mine, part in zip((q, k, v), fused, strict=True)]
                if any(one is None or one[0].size % width for one in own):
                    continue
                heads = [one.reshape(length, -1, width) for one in own if one is not None]
                if heads[0].shape[1] * width != width_of_all or heads[1].shape != heads[2].shape:
                    continue
                if heads[0].shape[1] % heads[1].shape[1] == 0:
                    yield _Cut(heads[0], heads[1], heads[2], out)

    @staticmethod
    def _split(every: Array, hidden: int, width: int) -> Iterator[tuple[Array, Array, Array]]:
        """Queries, keys and values of what has them one after the other, or group by group (Megatron)."""
        rest = (every.reshape(len(every), -1).shape[1] - hidden) // 2
        flat = every.reshape(len(every), -1)
        if rest <= 0 or hidden + 2 * rest != flat.shape[1] or rest % width:
            return
        groups = rest // width
        yield flat[:, :hidden], flat[:, hidden : hidden + rest], flat[:, hidden + rest :]
        if hidden % rest == 0 and groups > 1:
            of_groups = flat.reshape(len(flat), groups, -1, width)
            yield of_groups[:, :, :-2], of_groups[:, :, -2], of_groups[:, :, -1]


class _Pattern(Struct, frozen=True):
    """The first key that each token sees, and words."""

    kind: str
    starts: Ints
    words: str


def _supposed(
    those: tuple[int, ...], held: HeldByRanks, raw: _Given, there_BSO: Array, here_BSO: Array,
    made: dict[int, tuple[_Cut, _Pattern] | None],
) -> Iterator[tuple[tuple[int, ...], list[_Cell]]]:  # fmt: skip
    """The ranks at which something may be otherwise, and the tokens and heads that it would show in."""
    if not raw.are_known:
        return
    off_BSO = here_BSO - there_BSO
    length = min(there_BSO.shape[1], _TOKENS)
    size_BS = np.linalg.norm(off_BSO, axis=2)

    def cell(sample: int, rows: Ints, part: tuple[int, int], words: str, **more: object) -> _Cell | None:
        if sample not in made:
            made[sample] = _fitted(there_BSO[sample], raw, sample, length)
        known = made[sample]
        most = _most_rows(known[0], length) if known is not None else _ROWS
        rows = _asked(rows[rows < length], size_BS[sample], most)
        if known is None or not rows.size or not size_BS[sample, rows].any():
            return None
        cut, pattern = known
        heads = cut.q.shape[1]
        if heads % part[1]:
            return None
        each = heads // part[1]
        off_QC = off_BSO[sample][rows][:, raw.channels]
        if not off_QC.any():
            return None
        return _Cell(
            cut, rows, slice(part[0] * each, (part[0] + 1) * each), off_QC,
            _normal(cut, rows, pattern.starts), pattern.words, _within(cut, pattern), **more,  # type: ignore[arg-type]
        )  # fmt: skip

    every = np.arange(length)
    if held.is_cut:
        cells = []
        places = [np.concatenate([np.arange(at, at + long) for at, long in one]) for one in held.stretches]
        for rank, own in zip(held.ranks, places, strict=True):
            if rank not in those:
                continue
            if held.axis == 0:
                sample = int(own[np.argmax(size_BS[own].sum(1))]) if own.size else 0
                cells.append(cell(sample, every, (0, 1), f"rank {rank}"))
            else:
                sample = int(np.argmax(size_BS[:, own].sum(1)))
                others = tuple(
                    (f"rank {other}", there[there < length]) for other, there in zip(held.ranks, places, strict=True)
                    if other != rank
                )  # fmt: skip
                cells.append(cell(sample, own, (0, 1), f"rank {rank}", pieces=others, own=own[own < length]))
        if all(one is not None for one in cells):
            yield those, [one for one in cells if one is not None]
    else:
        one = cell(int(np.argmax(size_BS.sum(1))), every, (0, 1), "")
        if one is not None:
            yield those, [one]
    shares = raw.heads_of or ([[rank] for rank in held.ranks] if held.axis == 1 else [])
    if len(shares) > 1 and held.axis != 0:
        sample = int(np.argmax(size_BS.sum(1)))
        for number, ranks in enumerate(shares):
            one = cell(sample, every, (number, len(shares)), "")
            if one is not None:
                yield tuple(ranks), [one]


def _within(cut: _Cut, pattern: _Pattern) -> Array | None:
    """Positions that begin at 0 in every document, where there are several: within them nobody can tell."""
    are_several = pattern.kind == "mask" and len(np.unique(pattern.starts)) > 1 and cut.base is not None
    return np.asarray(np.arange(len(pattern.starts)) - pattern.starts).astype(float) if are_several else None


def _most_rows(cut: _Cut, length: int) -> int:
    return min(_ROWS, max(8, _AT_ONCE // (int(cut.q.shape[1]) * length)))


def _asked(rows: Ints, size_S: Array, most: int) -> Ints:
    """Tokens that are asked: those that are furthest off, and others between."""
    if rows.size <= most:
        return rows
    worst = rows[np.argsort(-size_S[rows], kind="stable")[: most // 2]]
    return np.unique(np.concatenate([worst, rows[np.linspace(0, rows.size - 1, most // 2).astype(int)]]))


def _normal(cut: _Cut, rows: Ints, starts: Ints) -> _Otherwise:
    at = np.arange(len(cut.q)).astype(float)
    keys = np.arange(len(cut.k))
    sees_QS = (keys <= rows[:, None]) & (keys >= starts[rows][:, None])
    turned = at if cut.base is not None else None
    return _Otherwise(sees_QS, turned, turned, cut.base, cut.in_pairs, cut.cap)


def _turned(x_SHD: Array, at: Array | None, base: float | None, *, in_pairs: bool) -> Array:
    if base is None or at is None:
        return x_SHD
    width = x_SHD.shape[2]
    turn = at[:, None] * base ** (-np.arange(0, width, 2) / width)
    cos, sin = np.cos(turn)[:, None], np.sin(turn)[:, None]
    half = width // 2
    first, second = (slice(0, None, 2), slice(1, None, 2)) if in_pairs else (slice(0, half), slice(half, None))
    made = np.empty_like(x_SHD)
    made[..., first] = x_SHD[..., first] * cos - x_SHD[..., second] * sin
    made[..., second] = x_SHD[..., second] * cos + x_SHD[..., first] * sin
    return made


def _scores(cut: _Cut, rows: Ints, heads: slice, how: _Otherwise) -> Array:
    """How much tokens look at each key, [head, Q, S]."""
    width = cut.q.shape[2]
    at_q = None if how.at_q is None else how.at_q[rows]
    q_HQD = _turned(cut.q[rows][:, heads], at_q, how.base, in_pairs=how.in_pairs).transpose(1, 0, 2)
    k_HDS = _turned(cut.k, how.at_k, how.base, in_pairs=how.in_pairs).transpose(1, 2, 0)[_groups(cut, how)[heads]]
    scores_HQS = how.times * (q_HQD @ k_HDS) / math.sqrt(width)
    if how.zeros is not None:
        scores_HQS[:, :, how.zeros] = 0
    return np.asarray(scores_HQS if how.cap is None else how.cap * np.tanh(scores_HQS / how.cap))


def _groups(cut: _Cut, how: _Otherwise) -> Ints:
    """Which head of keys each head of queries looks at."""
    if how.of_keys is not None:
        return how.of_keys
    return np.repeat(np.arange(cut.k.shape[1]), cut.q.shape[1] // cut.k.shape[1])


def _values(cut: _Cut, heads: slice, how: _Otherwise) -> Array:
    v_HSD = cut.v.transpose(1, 0, 2)[_groups(cut, how)[heads]]
    if how.zeros is not None and how.no_values:
        v_HSD = v_HSD.copy()
        v_HSD[:, how.zeros] = 0
    return np.asarray(v_HSD)


def _out(cut: _Cut, heads: slice, made_HQD: Array) -> Array:
    """What these heads, [head, Q, d], add to the channels: [Q, channel]."""
    width = cut.q.shape[2]
    own = cut.out[:, heads.start * width : heads.stop * width]
    return np.asarray(made_HQD.transpose(1, 0, 2).reshape(made_HQD.shape[1], -1) @ own.T)


def _made(cut: _Cut, rows: Ints, heads: slice, how: _Otherwise) -> Array:
    scores_HQS = np.where(how.sees_QS, _scores(cut, rows, heads, how), -np.inf)
    most_HQ1 = scores_HQS.max(2, keepdims=True)
    scores_HQS = np.exp(scores_HQS - np.where(np.isfinite(most_HQ1), most_HQ1, 0.0))
    scores_HQS /= np.maximum(scores_HQS.sum(2, keepdims=True), 1e-300)
    return _out(cut, heads, scores_HQS @ _values(cut, heads, how))


def _by_starts(cut: _Cut, row: int, heads: slice, scores_HS: Array, how: _Otherwise) -> Array:
    """What a token gets that sees the keys from each of those before it on: [first key, channel]."""
    seen_HS = scores_HS[:, : row + 1]
    weights_HS = np.exp(seen_HS - seen_HS.max(1, keepdims=True))
    each_HSD = weights_HS[:, :, None] * _values(cut, heads, how)[:, : row + 1]
    sums_HSD, sums_HS = (np.flip(np.cumsum(np.flip(one, 1), 1), 1) for one in (each_HSD, weights_HS))
    return _out(cut, heads, sums_HSD / np.maximum(sums_HS, 1e-300)[:, :, None])


def _off_by_starts(cell: _Cell, target_QC: Array) -> list[Array]:
    """Of each token, how far it is from the target where it sees the keys from each on."""
    scores_HQS = _scores(cell.cut, cell.rows, cell.heads, cell.normal)
    return [
        np.asarray(np.linalg.norm(
            _by_starts(cell.cut, row, cell.heads, scores_HQS[:, number], cell.normal) - target_QC[number], axis=1
        ))
        for number, row in enumerate(cell.rows.tolist())
    ]  # fmt: skip


def _fitted(there_SO: Array, raw: _Given, sample: int, length: int) -> tuple[_Cut, _Pattern] | None:
    """The attention that makes the other run's output of a sample again, and the keys that its tokens see."""
    rows = np.unique(np.linspace(0, length - 1, min(length, _ROWS)).astype(np.int64))
    few = rows[np.unique(np.linspace(0, len(rows) - 1, 8).astype(int))]
    best: tuple[float, _Cut] | None = None
    channels, begun = raw.channels, time.thread_time()
    own_SO: Array = there_SO[:length] if raw._through is None else there_SO[:length] - raw._through[1]
    for cut in raw.cuts(sample, there_SO.shape[1], length):
        there_QC = own_SO[few][:, channels]
        size = float(np.linalg.norm(there_QC))
        every = slice(0, cut.q.shape[1])
        # The first token sees itself alone, whatever turns it.
        alone_C = _out(cut, every, _values(cut, every, _normal(cut, few[:1], np.zeros(length, np.int64)))[:, :1])
        if np.linalg.norm(alone_C - own_SO[:1, channels]) > 2 * _NEAR * max(
            float(np.linalg.norm(own_SO[:1, channels])), size / len(few) ** 0.5
        ):
            continue
        turns: list[tuple[float | None, bool]] = [(None, False)]
        turns += [(base, in_pairs) for base in _BASES for in_pairs in (False, True) if cut.q.shape[2] % 2 == 0]
        for cap in (None, 50.0, 30.0, 20.0):
            if best is not None:
                break
            for base, in_pairs in turns:
                if time.thread_time() - begun > _SECONDS:
                    return None
                one = replace(cut, base=base, in_pairs=in_pairs, cap=cap)
                if not _makes_early_tokens(one, few, there_QC):
                    continue
                cell = _Cell(one, few, every, there_QC, _normal(one, few, np.zeros(length, np.int64)), "")
                left = float(np.linalg.norm([off.min() for off in _off_by_starts(cell, there_QC)]))
                if left <= _NEAR * size and (best is None or left < 0.99 * best[0]):
                    best = left, one
        if best is not None and best[0] <= _SURE * size:
            break
    if best is None:
        return None
    cut = best[1]
    rows = _asked(rows, np.zeros(length), _most_rows(cut, length))
    there_QC = own_SO[rows][:, channels]
    cell = _Cell(cut, rows, slice(0, cut.q.shape[1]), there_QC, _normal(cut, rows, np.zeros(length, np.int64)), "")
    size = float(np.linalg.norm(there_QC))
    patterns = _patterns(rows, _off_by_starts(cell, there_QC), length, size)
    return (cut, patterns[1]) if patterns is not None and patterns[0] <= _NEAR * size else None


def _makes_early_tokens(cut: _Cut, few: Ints, there_QC: Array) -> bool:
    """Whether attention may make the second and third of some tokens, whose few keys are asked of at little cost."""
    early = slice(1, 3)
    rows, target_QC = few[early], there_QC[early]
    if not rows.size:
        return True
    most = int(rows[-1]) + 1
    short = replace(cut, q=cut.q[:most], k=cut.k[:most], v=cut.v[:most])
    cell = _Cell(short, rows, slice(0, cut.q.shape[1]), target_QC, _normal(short, rows, np.zeros(most, np.int64)), "")
    left = float(np.linalg.norm([off.min() for off in _off_by_starts(cell, target_QC)]))
    return bool(
        left <= 3 * _NEAR * max(float(np.linalg.norm(target_QC)), float(np.linalg.norm(there_QC)) / len(few) ** 0.5)
    )


def _patterns(rows: Ints, off: list[Array], length: int, size: float) -> tuple[float, _Pattern] | None:
    """The simplest pattern of first keys that leaves little: none hidden, a window, the first few, documents."""
    least = float(np.linalg.norm([one.min() for one in off]))
    line = max(_SIMPLER * least, _NOTHING * size)

    def left(starts: Ints) -> float:
        return float(np.linalg.norm([one[starts[row]] for row, one in zip(rows.tolist(), off, strict=True)]))

    every = np.arange(length)
    none = _Pattern("mask", np.zeros(length, np.int64), "with nothing hidden but later keys")
    if left(none.starts) <= line:
        return left(none.starts), none
    windows = [np.maximum(0, every - width + 1) for width in range(1, length)]
    firsts = [np.minimum(first, every) for first in range(1, min(length, 9))]
    for kind, several, words in (
        ("window", windows, "in a window of {} keys"), ("mask", firsts, "without the first {} keys"),
    ):  # fmt: skip
        if several:
            lefts = [left(starts) for starts in several]
            number = int(np.argmin(lefts))
            if lefts[number] <= line:
                return lefts[number], _Pattern(kind, several[number], words.format(number + 1))
    starts = _documents(rows, off, length, line)
    if starts is not None and left(starts) <= line:
        begun = ", ".join(map(str, np.unique(starts).tolist()[:6]))
        return left(starts), _Pattern("mask", starts, f"in documents that begin at tokens {begun}")
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


def _explained(cell: _Cell) -> list[_Explanation]:
    """What may make a cell's difference, and what part of it that leaves."""
    size = float(np.linalg.norm(cell.off_QC))
    right_QC = _made(cell.cut, cell.rows, cell.heads, cell.normal)

    def left(how: _Otherwise) -> float:
        made_QC = _made(cell.cut, cell.rows, cell.heads, how)
        return float(np.linalg.norm(made_QC - right_QC - cell.off_QC)) / size

    told = list(_along(left, cell))
    times = float((right_QC * cell.off_QC).sum() / max(float((right_QC * right_QC).sum()), 1e-300))
    rest = float(np.linalg.norm(cell.off_QC - times * right_QC)) / size
    said = {-1: "and left out of the sum: its contribution is missing", 1: "and counted twice in the sum"}
    is_whole = abs(times - round(times)) <= 0.03 and round(times) in said
    told.append(_Explanation(rest, "part", said[round(times)] if is_whole else f"times {1 + times:.3g}"))
    normals = [cell.normal]
    if cell.within is not None:
        normals.append(replace(cell.normal, at_q=cell.within, at_k=cell.within))
    for normal in normals:
        one = replace(cell, normal=normal)
        told += [_Explanation(left(how), kind, words) for kind, words, how in _ways(one)]
        off = _off_by_starts(one, right_QC + cell.off_QC)
        if (hidden := _patterns(cell.rows, off, len(cell.cut.k), size)) is not None:
            sees_QS = _normal(cell.cut, cell.rows, hidden[1].starts).sees_QS
            if not (sees_QS == normal.sees_QS).all():
                words = f"{hidden[1].words}, where the other run's is made {cell.words}"
                told.append(_Explanation(left(replace(normal, sees_QS=sees_QS)), "mask", words))
    return told


def _ways(cell: _Cell) -> Iterator[tuple[str, str, _Otherwise]]:
    normal, cut = cell.normal, cell.cut
    keys, rows = np.arange(len(cut.k)), cell.rows[:, None]
    at = keys.astype(float)
    if cut.base is not None:
        yield "RoPE", "without turning them (no RoPE)", replace(normal, at_q=None, at_k=None)
        yield "RoPE", "with keys that are not turned", replace(normal, at_k=None)
        yield "RoPE", "with queries that are not turned", replace(normal, at_q=None)
        if cut.in_pairs:
            yield "RoPE", "turned by halves, where neighbours are the pairs (RoPE)", replace(normal, in_pairs=False)
        else:
            yield "RoPE", "turned in pairs of neighbours (interleaved RoPE), where halves are", (
                replace(normal, in_pairs=True)
            )  # fmt: skip
        for by in (*range(-4, 0), *range(1, 5)):
            yield "positions", f"with queries turned by positions {by:+} from the keys'", replace(normal, at_q=at + by)
        for factor in (0.125, 0.25, 0.5, 2.0, 4.0, 8.0):
            words = f"turned by positions times {factor:g} (RoPE scaling)"
            yield "RoPE", words, replace(normal, at_q=at * factor, at_k=at * factor)
    else:
        for base in _BASES:
            for in_pairs in (False, True) if cut.q.shape[2] % 2 == 0 else ():
                words = f"turned by RoPE of base {base:g}, where the other run's are not turned"
                yield "RoPE", words, replace(normal, at_q=at, at_k=at, base=base, in_pairs=in_pairs)
    if cut.cap is not None:
        yield "soft cap", f"without the cap of {cut.cap:g} on scores", replace(normal, cap=None)
    first = normal.sees_QS.argmax(1)[:, None]
    from_first_QS = keys >= np.minimum(first, rows)
    yield (
        "mask",
        "where every token sees all keys, later ones too",
        replace(normal, sees_QS=np.ones_like(from_first_QS)),
    )
    for by in (1, 2):
        seen_QS = from_first_QS & (keys <= rows + by)
        yield "mask", f"where each token sees {by} later key{'s' * (by > 1)}", replace(normal, sees_QS=seen_QS)
        seen_QS = from_first_QS & (keys <= rows - by)
        lone_QS = seen_QS | (~seen_QS.any(1)[:, None] & normal.sees_QS)
        hidden = "itself" if by == 1 else "itself and the key before"
        yield "mask", f"where each token does not see {hidden}", replace(normal, sees_QS=lone_QS)
        strict_QS = seen_QS & (keys > 0)
        yield "mask", f"where each token sees neither {hidden} nor the first key", replace(normal, sees_QS=strict_QS)
    groups, shared = cut.k.shape[1], cut.q.shape[1] // cut.k.shape[1]
    if shared > 1 and groups > 1:
        words = "with heads of keys dealt in turn to the heads of queries, where each is to serve those beside it"
        yield "heads", words, replace(normal, of_keys=np.tile(np.arange(groups), shared))
    for by in range(1, min(groups, 5)):
        of_keys = np.roll(np.repeat(np.arange(groups), shared), by * shared)
        yield "heads", f"with the heads of keys {by} before their own", replace(normal, of_keys=of_keys)
    yield from _of_pieces(cell)


def _of_pieces(cell: _Cell) -> Iterator[tuple[str, str, _Otherwise]]:
    """Keys of other ranks that never came."""
    normal = cell.normal
    keys = np.arange(len(cell.cut.k))
    if cell.own is not None:
        alone_QS = normal.sees_QS & np.isin(keys, cell.own)
        if not (alone_QS == normal.sees_QS).all():
            yield (
                "keys",
                "of its own tokens alone: those of other ranks are not seen",
                replace(normal, sees_QS=alone_QS),
            )
    for words, places in cell.pieces:
        seen_QS = normal.sees_QS & ~np.isin(keys, places)
        if not normal.sees_QS[:, places].any():
            continue
        if len(cell.pieces) > 1:
            yield "keys", f"without the keys of {words}: they never came, or were left out", (
                replace(normal, sees_QS=seen_QS)
            )  # fmt: skip
        yield (
            "keys",
            f"with zeros in the place of the keys of {words}: they had not come",
            replace(normal, zeros=places),
        )
        yield "keys", f"with zeros in the place of the keys and values of {words}: they had not come", (
            replace(normal, zeros=places, no_values=True)
        )  # fmt: skip


def _along(left: Callable[[_Otherwise], float], cell: _Cell) -> Iterator[_Explanation]:
    """A scale, a cap or a base of rotations that is solved for."""
    normal, width = cell.normal, cell.cut.q.shape[2]

    def scaled(log: float) -> _Otherwise:
        return replace(normal, times=math.exp(log))

    log, rest = solved(lambda log: left(scaled(log)), np.linspace(-4, 4, 33))
    times = math.exp(log)
    known = {width**0.5: "not divided by sqrt(d)", width**-0.5: "divided by d, not by sqrt(d)"}
    said = next((words for value, words in known.items() if abs(times - value) <= 0.03 * value), "")
    if abs(times - 1) > 0.005:
        yield _Explanation(rest, "scale", f"with scores {said or f'times {times:.3g}'} (another scale)")
    if cell.cut.base is not None:
        log, rest = solved(lambda log: left(replace(normal, base=math.exp(log))), np.linspace(2, 18, 65))
        base = math.exp(log)
        if abs(base / cell.cut.base - 1) > 0.01:
            words = f"turned by RoPE of base {_short(base)}, where the other run's is {cell.cut.base:g}"
            yield _Explanation(rest, "RoPE", words)
    log, rest = solved(lambda log: left(replace(normal, cap=math.exp(log))), np.linspace(-1, 5, 25))
    if cell.cut.cap is None:
        yield _Explanation(rest, "soft cap", f"with scores capped at {math.exp(log):.3g}, which the other run does not")


def _short(base: float) -> str:
    """A base as it was meant: two digits where these are near."""
    rounded = float(f"{base:.2g}")
    return f"{rounded:g}" if abs(rounded / base - 1) < 0.05 else f"{base:.3g}"
