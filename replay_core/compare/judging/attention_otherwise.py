"""Which attention makes a run's output of the same queries, keys and values: another mask, scale, cap or rotation.

What went into attention is recorded and agrees, what came out does not. The other run's output says how heads are cut
and turned and which keys a token sees (a window, documents): what does not make it again says nothing. Then one thing
after the other is changed, of all heads, of one rank's, or of one rank's tokens; only what makes the difference between
the two outputs, and clearly better than all else does, is said.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from replay_core import pages
from replay_core.compare.judging.attention_made import (
    BASES,
    CLEARLY,
    LEFT,
    MOST,
    ROWS,
    CutHeads,
    How,
    IntoAttention,
    Ints,
    SeenFrom,
    alibi,
    asked,
    channels_of,
    fitted,
    made,
    most_rows,
    normal,
    off_by_starts,
    patterns,
    short,
)
from replay_core.compare.judging.faults import Fault, whose
from replay_core.compare.judging.products import Array
from replay_core.compare.judging.solving import solved
from replay_core.compare.pairing.ranks import HeldByRanks, standing_for
from replay_core.records import TensorRef

#: What part of the difference is none at all; and tokens of a sample of which all are asked.
_FLOOR, _TOKENS = 1e-9, 256


class _Cell(Struct, frozen=True):
    """Some tokens of a sample, the heads that may be off there, and by how much the output is off."""

    cut: CutHeads
    rows: Ints
    heads: slice
    off_QC: Array
    normal: How
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
    through: tuple[Array, Array] | None, heads_of: Sequence[Sequence[int]] = (),
) -> Fault | None:  # fmt: skip
    """What attention does otherwise on which ranks.

    held: attention's output [sample, position, hidden], or what its projection makes of it `through` a weight
    [out, hidden] and a bias [out]; whole: the other run's. given: what ranks held alike with the other run before.
    parted: the ranks whose output is off. heads_of: of each share of the heads, the ranks that have it, where what went
    into attention does not say.

    Raises:
        DumpError: the bytes of one cannot be read.
    """
    if through is None and what.endswith(("proj.output", "dense.output", "wo.output")):
        return None
    if len(whole.shape) != 3 or held.axis not in (None, 0, 1) or whole.numel > MOST or not whole.is_readable:
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
    raw = IntoAttention(what, held, given, whole.shape[:2], through, channels_of(here_BSO - there_BSO), whole.shape[2])
    if not raw.are_known:
        return None
    raw.heads_of = raw.heads_of or [list(ranks) for ranks in heads_of]
    if (summed_BSO := _nearer_sum(held, there_BSO)) is not None:
        here_BSO = summed_BSO
        raw.channels = channels_of(here_BSO - there_BSO)
    is_half = bool({"bfloat16", "float16"} & {whole.dtype, laid.dtype})
    found: list[tuple[float, str, tuple[int, ...], str]] = []
    fits: dict[int, tuple[CutHeads, SeenFrom] | None] = {}
    for ranks, cells in _supposed(those, held, raw, there_BSO, here_BSO, fits):
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
    if not found or found[0][0] > LEFT[is_half]:
        return None
    near = [one for one in found if one[0] <= CLEARLY * max(found[0][0], _FLOOR)]
    # What is as it should be on some ranks besides may be said of all, and is of the fewest.
    _, kind, ranks, said = min(near, key=lambda one: len(one[2]))
    if any(one[1] != kind or not set(ranks) <= set(one[2]) for one in near):
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


def _nearer_sum(held: HeldByRanks, there_BSO: Array) -> Array | None:
    """What ranks hold added up, where that is nearer to the other run's than what any of them holds: a part each, of
    its own heads, recorded before the sum.
    """
    if held.is_cut or len(held.ranks) < 2 or len({ref.shape for ref in held.parts}) > 1:
        return None
    if not all(ref.is_readable for ref in held.parts):
        return None
    total_BSO, nearest = np.zeros_like(there_BSO), np.inf
    for ref in held.parts:
        part_BSO = pages.array(ref).astype(np.float64)
        total_BSO += part_BSO
        nearest = min(nearest, float(np.linalg.norm(part_BSO - there_BSO)))
    return total_BSO if float(np.linalg.norm(total_BSO - there_BSO)) < nearest else None


def _supposed(
    those: tuple[int, ...], held: HeldByRanks, raw: IntoAttention, there_BSO: Array, here_BSO: Array,
    fits: dict[int, tuple[CutHeads, SeenFrom] | None],
) -> Iterator[tuple[tuple[int, ...], list[_Cell]]]:  # fmt: skip
    """The ranks at which something may be otherwise, and the tokens and heads that it would show in."""
    if not raw.are_known:
        return
    off_BSO = here_BSO - there_BSO
    length = min(there_BSO.shape[1], _TOKENS)
    size_BS = np.linalg.norm(off_BSO, axis=2)

    def cell(sample: int, rows: Ints, part: tuple[int, int], words: str, **more: object) -> _Cell | None:
        if sample not in fits:
            fits[sample] = fitted(raw.target(there_BSO[sample], length), raw.cuts(sample, length))
        known = fits[sample]
        most, begin = (most_rows(known[0], length), known[1].begin) if known is not None else (ROWS, 0)
        rows = asked(rows[(rows < length) & (rows >= begin)], size_BS[sample], most)
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
            normal(cut, rows, pattern.starts), pattern.words, _within(cut, pattern), **more,  # type: ignore[arg-type]
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
    if len(shares) > 1 and (held.axis != 0 or raw.heads_of):
        sample = int(np.argmax(size_BS.sum(1)))
        for number, ranks in enumerate(shares):
            one = cell(sample, every, (number, len(shares)), "")
            if one is not None:
                yield tuple(ranks), [one]


def _within(cut: CutHeads, pattern: SeenFrom) -> Array | None:
    """Positions that begin at 0 in every document, where there are several: within them nobody can tell."""
    are_several = pattern.kind == "mask" and len(np.unique(pattern.starts)) > 1 and cut.knows_positions
    return np.asarray(np.arange(len(pattern.starts)) - pattern.starts).astype(float) if are_several else None


def _explained(cell: _Cell) -> list[_Explanation]:
    """What may make a cell's difference, and what part of it that leaves."""
    size = float(np.linalg.norm(cell.off_QC))
    right_QC = made(cell.cut, cell.rows, cell.heads, cell.normal)

    def left(how: How) -> float:
        made_QC = made(cell.cut, cell.rows, cell.heads, how)
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
    for usual in normals:
        one = replace(cell, normal=usual)
        told += [_Explanation(left(how), kind, words) for kind, words, how in _ways(one)]
        off = off_by_starts(one.cut, one.rows, one.heads, usual, right_QC + cell.off_QC)
        if (hidden := patterns(cell.rows, off, len(cell.cut.k), size)) is not None:
            sees_QS = normal(cell.cut, cell.rows, hidden[1].starts).sees_QS
            if not (sees_QS == usual.sees_QS).all():
                words = f"{hidden[1].words}, where the other run's is made {cell.words}"
                told.append(_Explanation(left(replace(usual, sees_QS=sees_QS)), "mask", words))
    return told


def _ways(cell: _Cell) -> Iterator[tuple[str, str, How]]:
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
        for base in BASES:
            for in_pairs in (False, True) if cut.q.shape[2] % 2 == 0 else ():
                words = f"turned by RoPE of base {base:g}, where the other run's are not turned"
                yield "RoPE", words, replace(normal, at_q=at, at_k=at, base=base, in_pairs=in_pairs)
    if cut.slopes is not None:
        yield "ALiBi", "without making scores less by distance (no ALiBi)", replace(normal, slopes=None)
        for number in (2, 4, 8):
            each, rest = divmod(cut.slopes.size, number)
            if each and not rest:
                words = (
                    f"with the slopes (ALiBi) of {each} heads on each of {number} ranks, where all heads have their own"
                )
                for slopes, whose_own in (
                    (cut.slopes[:each], f"heads 0 to {each - 1}, as if heads are numbered on each rank by itself"),
                    (alibi(each), f"a model of {each} heads"),
                ):
                    said = f"{words}: those of {whose_own}"
                    yield "ALiBi", said, replace(normal, slopes=np.tile(slopes, number))
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


def _of_pieces(cell: _Cell) -> Iterator[tuple[str, str, How]]:
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


def _along(left: Callable[[How], float], cell: _Cell) -> Iterator[_Explanation]:
    """A scale, a cap or a base of rotations that is solved for."""
    normal, width = cell.normal, cell.cut.q.shape[2]

    def scaled(log: float) -> How:
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
            words = f"turned by RoPE of base {short(base)}, where the other run's is {cell.cut.base:g}"
            yield _Explanation(rest, "RoPE", words)
    log, rest = solved(lambda log: left(replace(normal, cap=math.exp(log))), np.linspace(-1, 5, 25))
    if cell.cut.cap is None:
        yield _Explanation(rest, "soft cap", f"with scores capped at {math.exp(log):.3g}, which the other run does not")
