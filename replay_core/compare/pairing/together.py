"""Which ranks of a step are put together: those that face one process, and those of two runs whose ranks share the
step otherwise (two tensor-parallel ranks against four), of which those of the run with fewer stand for the one process.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replay_core import naming, pages
from replay_core.compare.pairing.accumulated import laid_together
from replay_core.compare.pairing.dims import Stretch
from replay_core.compare.pairing.micro_batch_pair import MicroBatchPair, Side
from replay_core.compare.pairing.pipeline import in_one_numbering
from replay_core.compare.pairing.ranks import (
    MAY_BE_PARTS,
    OF_ALL_SAMPLES,
    HeldByRanks,
    RankGroup,
    Together,
    Which,
    ids_of,
    ids_of_stages,
    named,
    narrowed_to,
    same_values,
    standing_for,
    turns,
)
from replay_core.compare.pairing.renumbered_ranks import in_one_numbering as ranks_in_one_numbering
from replay_core.compare.pairing.slices_of_both import SlicesOfBoth
from replay_core.compare.pairing.whole_shapes import OF_ITS_OWN, WholeShapes
from replay_core.records import Inline, Record, RecordKey, TensorRef, Unreadable

#: Elements that are added up in memory.
_MOST = 1 << 24
#: Of so many tensors one may be cut in a way that is not known, and the others are compared.
_FEW = 4
#: Parts of a sum that are near each other make it up to this part of its norm.
_EVEN = 1e-2


def put_together(micro_pairs: list[MicroBatchPair], *, as_one: bool = False) -> list[MicroBatchPair]:
    """The pairs of a step, those whose ranks share it otherwise in the two runs as one. Loads every side.

    as_one: also those whose ranks share it alike, and could face each other one by one.
    """
    groups: dict[tuple[Any, ...], list[MicroBatchPair]] = defaultdict(list)
    for micro_pair in ranks_in_one_numbering(laid_together(micro_pairs)):
        groups[micro_pair.key.step, micro_pair.key.micro, micro_pair.key.role].append(micro_pair)
    cells: dict[tuple[Any, ...], dict[Which, list[list[int]]]] = defaultdict(dict)
    for group in groups.values():
        for which, ranked in _ranked(group).items():
            if any(ids_of(side) is not None for side in ranked.values()):
                cells[group[0].key.step, group[0].key.role][which] = _alike(ranked)
    otherwise = {(group[0].key.step, group[0].key.role) for group in groups.values() if not _are_alike(_ranked(group))}
    tried = []
    in_order: set[int] = set()
    for group in groups.values():
        place = group[0].key.step, group[0].key.role
        of_group = None
        if place in otherwise or not as_one:
            of_group = _ranks_of(group, cells[place], is_otherwise=place in otherwise)
        if of_group is None and as_one:
            of_group = _ranks_in_order(group)
            in_order |= {id(of_group)} if of_group is not None else set()
        tried.append((group, of_group))
    made = [ranks for _, ranks in tried if ranks is not None]
    sliced = {(ranks.key.step, ranks.key.role) for ranks in made if ranks.holds_slices}
    known = sliced | {(ranks.key.step, ranks.key.role) for ranks in made if ranks.shares != "none"}
    found: list[MicroBatchPair] = []
    for group, ranks in tried:
        if ranks is None:
            found += group
            continue
        place = ranks.key.step, ranks.key.role
        # Two runs whose ranks hold the same of everything, and no tokens, may be of other samples each.
        is_one = id(ranks) in in_order or (
            ranks.are_of_one_batch(sliced=place in sliced) and (ranks.of_one_process or place in known)
        )
        if is_one:
            ranks.made[0].notes[:0] = [note for one in group for note in one.notes]
        found += ranks.made if is_one else group
    return found


def _ranked(group: list[MicroBatchPair]) -> dict[Which, dict[int, Side]]:
    """The ranks of each run; of one that has a single record of the step, or does not number it, none."""
    sides: dict[Which, list[Side]] = {
        "a": [one.a for one in group if one.a.records],
        "b": [one.b for one in group if one.b.records],
    }
    return {which: ranks for which, own in sides.items() if (ranks := _by_rank(own)) is not None}


def _ranks_of(
    group: list[MicroBatchPair], cells: dict[Which, list[list[int]]], *, is_otherwise: bool
) -> RankGroup | None:
    """The ranks of one run that face one process of the other, or what stands for it; None where none do.

    cells: of either run, the ranks that have the same tokens. is_otherwise: whether the two share the step otherwise.
    """
    sides: dict[Which, list[Side]] = {
        "a": [one.a for one in group if one.a.records],
        "b": [one.b for one in group if one.b.records],
    }
    if not sides["a"] or not sides["b"] or max(map(len, sides.values())) < 2:
        return None
    many: Which = "a" if len(sides["a"]) > len(sides["b"]) else "b"
    one: Which = "b" if many == "a" else "a"
    ranked = _ranked(group)
    if (ranks := ranked.get(many)) is None:
        return None
    if len(sides[one]) == 1:
        whole = sides[one][0]
        key = next(pair.key for pair in group if (pair.a if one == "a" else pair.b) is whole)
        return RankGroup(key, many, whole, ranks, alike=cells.get(many, ()))
    if (fewer := ranked.get(one)) is None or not is_otherwise:
        return None
    key = next(pair.key for pair in group if (pair.a if one == "a" else pair.b).records)
    alike = cells.get(one, [list(fewer)]), cells.get(many, [list(ranks)])
    slices = SlicesOfBoth(fewer, ranks, alike)
    covered: list[RankGroup] = []
    uncovered: list[tuple[RankGroup, Together]] = []
    for ids in _ids_of_all(fewer, ranks):
        of_tokens = _shapes_of_both(fewer, ranks, ids, alike)

        def shape_of(place: tuple[str, str], of_tokens: Any = of_tokens) -> tuple[int, ...]:
            return slices.of(place) or of_tokens(place)

        whole, whole_of = _assembled(
            key, one, fewer, ranks, ids, alike[0], shape_of, is_numbered=True, slices_in=slices.turns
        )
        found = RankGroup(key, many, whole, ranks, of_one_process=False, alike=alike[1])
        if not found.is_covered:
            uncovered.append((found, whole_of))
            continue
        _face(found, whole_of, fewer, one)
        covered.append(found)
        if _are_at(found, ranks) is not False:
            return found
    if not covered and uncovered and not _are_mostly_alike(fewer, ranks):
        return _but_for_some(group, uncovered, fewer, one)
    # Samples of several ranks may be laid end to end so that the other run's stretches are some of these, too.
    return covered[0] if covered else None


def _face(found: RankGroup, whole_of: Together, fewer: dict[int, Side], one: Which) -> None:
    """Let ranks face what those of the other run, `one`, were put together to."""
    if (turn := next((of for axis, of in whole_of.cuts if axis == 1), None)) is not None:
        found.lay_gathered(turn)
    for pair in found.made:
        if pair.together is None:
            continue
        pair.together.whole_of = whole_of
        pair.notes.append(
            f"ranks {named(fewer)} of {one} are put together, and what ranks {named(pair.together.ranks)} of "
            f"{pair.together.which} hold is held against that"
        )


def _but_for_some(
    group: list[MicroBatchPair], uncovered: list[tuple[RankGroup, Together]], fewer: dict[int, Side], one: Which
) -> RankGroup | None:
    """Ranks that are laid but for few tensors, which are not compared: these may be cut in a way that is not known, and
    hide nothing of the others. None where most are so: nothing of such a step is.
    """
    found, whole_of = min(uncovered, key=lambda of: (not of[0].is_laid, len(of[0].uncovered)))
    parts = found.uncovered
    if not parts:
        return None
    made = [pair for pair in found.made if pair.together is not None]
    are_few = found.is_laid and _FEW * len(parts) <= sum(len(pair.together.held) for pair in made if pair.together)
    many, every = ("b" if one == "a" else "a"), named(made[0].together.ranks if made[0].together else ())
    asked = "record it with its dims and each rank's place on their axes (dims, tp_rank and tp_size)"
    shared = "share the step otherwise, and how could not be told"
    why = {
        name: f"ranks {named(fewer)} of {one} and {every} of {many} {shared}: {name} is to be {list(due)}, and "
        f"what ranks {named(those)} of {many} hold of it makes {list(shape)}; {asked}"
        for name, due, shape, those in parts
    }
    if not are_few:
        for pair in group:
            pair.untold = next(iter(why.values()))
        return None
    _face(found, whole_of, fewer, one)
    for pair in found.made:
        pair.untold_of = why
    return found


def _are_mostly_alike(own: dict[int, Side], others: dict[int, Side]) -> bool:
    """Whether ranks of the same numbers have most of what both have in one shape: few are cut otherwise, or wrong."""
    if own.keys() != others.keys():
        return False
    same = [
        others[rank].tensors[place][1].shape == ref.shape
        for rank, side in own.items() for place, (_, ref) in side.tensors.items() if place in others[rank].tensors
    ]  # fmt: skip
    return 2 * sum(same) >= len(same)


def _are_at(found: RankGroup, ranks: dict[int, Side]) -> bool | None:
    """Whether the positions that ranks count are those of their stretches of the sequences; None where none are."""
    cut = next((cut for pair in found.made if pair.together for cut in pair.together.cuts if cut[0] == 1), None)
    positions = [side.find("position_ids") for side in ranks.values()]
    if any(one is None for one in positions):
        return None
    if cut is not None:
        return all(_is_at(one, stretches) for one, stretches in zip(positions, cut[1], strict=True))
    return None


def _ranks_in_order(group: list[MicroBatchPair]) -> RankGroup | None:
    """The ranks of b, each of which could face one of a's, and what one process would hold of what a's do; None where
    it is not known what that would be.
    """
    ranked = _ranked(group)
    if len(ranked) < 2 or ranked["a"].keys() != ranked["b"].keys():
        return None
    own, others = ranked["a"], ranked["b"]
    key = next(pair.key for pair in group if pair.a.records)
    alike = _alike_by_stages(own)
    ids = _ids_by_positions(own)
    if ids is None and any(ids_of(side) is not None for side in own.values()):
        # Samples of several lengths, or packs: what is of all of them is compared alone.
        own, others = ({rank: narrowed_to(side, _is_of_all) for rank, side in ranks.items()} for ranks in (own, others))
        if not all(side.records for ranks in (own, others) for side in ranks.values()):
            return None
    whole, whole_of = _assembled(key, "a", own, others, ids, alike, WholeShapes(own, others, ids, alike).of)
    cut = next((of for axis, of in whole_of.cuts if axis == 1), ())
    found = RankGroup(
        key, "b", whole, others, of_one_process=False, alike=alike, turn=tuple(dict.fromkeys(cut))
    )  # fmt: skip
    for pair in found.made:
        if pair.together is not None:
            pair.together.whole_of = whole_of
    return found


def _alike_by_stages(ranks: dict[int, Side]) -> list[list[int]]:
    """The ranks in groups that have the same tokens, those of a pipeline's later stages by what they were given; those
    of which nobody knows are one group for each set of tensors.
    """
    found: list[tuple[TensorRef | None, Any, list[int]]] = []
    for (rank, side), ref in zip(ranks.items(), ids_of_stages(list(ranks.values())), strict=True):
        held = frozenset(side.tensors) if ref is None else None
        of = next(
            (members for one, theirs, members in found
             if theirs == held and (ref is None or (one is not None and same_values(one, ref)))),
            None,
        )  # fmt: skip
        if of is None:
            found.append((ref, held, [rank]))
        else:
            of.append(rank)
    return [members for _, _, members in found]


def _is_of_all(record: Record, ref: TensorRef) -> bool:
    return record.key.stage in OF_ALL_SAMPLES or not ref.shape


def _ids_by_positions(ranks: dict[int, Side]) -> TensorRef | None:
    """The token ids of the step as a whole: side by side where the ranks' positions say that they follow each other, or
    their labels do; else one below the other. None where none are known, or they are of several shapes.
    """
    given: list[tuple[TensorRef, Side]] = []
    for side in ranks.values():
        ref = ids_of(side)
        if ref is not None and not any(same_values(ref, one) for one, _ in given):
            given.append((ref, side))
    if not given or any(len(ref.shape) != 2 or ref.shape != given[0][0].shape for ref, _ in given):
        return None
    below = None
    for made, places in _laid_out([ref for ref, _ in given]):
        positions = [side.find("position_ids") for _, side in given]
        if all(_is_at(one, stretches) for one, (_, stretches) in zip(positions, places, strict=True)):
            return made
        labels = [side.find("labels") for _, side in given]
        if _go_on(labels, pages.array(made), places):
            return made
        below = made  # the last way
    return below


def _go_on(labels: list[TensorRef | None], ids_BS: NDArray[Any], places: list[_Standing]) -> bool:
    """Whether the labels at the ends of the ranks' stretches are the tokens that then come, which other ranks have."""
    met = 0
    for ref, (row, stretches) in zip(labels, places, strict=True):
        if ref is None or not ref.is_readable or len(ref.shape) != 2:
            return False
        own, before = pages.array(ref), 0
        for at, long in stretches:
            before += long
            if at + long < ids_BS.shape[1] and before <= own.shape[1]:
                last_B, next_B = own[:, before - 1], ids_BS[row : row + len(own), at + long]
                if last_B.shape != next_B.shape or bool(((last_B != next_B) & (last_B >= 0)).any()):
                    return False
                met += int((last_B >= 0).sum())
    return met > 0


def _is_at(positions: TensorRef | None, stretches: tuple[Stretch, ...]) -> bool:
    """Whether a rank's positions are those of these stretches of a sequence."""
    if positions is None or not positions.is_readable or not positions.dtype.startswith("int"):
        return False
    expected = np.concatenate([np.arange(at, at + long) for at, long in stretches])
    own = pages.array(positions)
    return own.ndim > 0 and own.shape[-1] == expected.size and bool((own == expected).all())


def _by_rank(sides: list[Side]) -> dict[int, Side] | None:
    ranked = {side.records[0].key.rank: side for side in sides}
    if None in ranked or len(ranked) < 2:
        return None
    return {rank: ranked[rank] for rank in sorted(rank for rank in ranked if rank is not None)}


def _are_alike(ranked: dict[Which, dict[int, Side]]) -> bool:
    """Whether rank faces rank: they are the same numbers, what both have of one name is of one shape, and no name that
    one of them lacks is on another rank there, as where stages of a pipeline are cut otherwise.
    """
    if len(ranked) < 2:
        return True
    one, other = ranked["a"], ranked["b"]
    if one.keys() != other.keys():
        return False
    for rank, side in one.items():
        theirs = other[rank].tensors
        if any(key in theirs and theirs[key][1].shape != ref.shape for key, (_, ref) in side.tensors.items()):
            return False
    places: list[dict[Any, set[int]]] = [defaultdict(set), defaultdict(set)]
    for of_run, sides in zip(places, (one, other), strict=True):
        for rank, side in sides.items():
            for key in side.tensors:
                of_run[key].add(rank)
    return not any(own.isdisjoint(places[1][key]) for key, own in places[0].items() if key in places[1])


def _ids_of_all(fewer: dict[int, Side], ranks: dict[int, Side]) -> Iterator[TensorRef | None]:
    """What token ids the step may have had as a whole, as far as the ranks' own tell; None where none are known."""
    own, others = ([ids_of(side) for side in sides.values()] for sides in (fewer, ranks))
    if not any(own) and not any(others):
        yield None
        return
    different: list[TensorRef] = []
    for ref in own:
        if ref is None or len(ref.shape) != 2 or ref.shape != (own[0] and own[0].shape):
            return
        if not any(same_values(ref, one) for one in different):
            different.append(ref)
    for made, _ in _laid_out(different):
        yield made


#: Of one rank's token ids, from which row on they are and where along the rows they stand.
_Standing = tuple[int, tuple[Stretch, ...]]


def _laid_out(different: list[TensorRef]) -> Iterator[tuple[TensorRef, list[_Standing]]]:
    """Ways in which ranks' different token ids may lie in the step's: side by side, one below the other, or both; and
    where each then stands.
    """
    first, parts = different[0], [pages.array(ref) for ref in different]
    if len(parts) == 1:
        yield first, [(0, ((0, first.shape[-1]),))]
        return
    for groups in range(1, len(parts) + 1):
        if len(parts) % groups:
            continue
        each = len(parts) // groups
        # Ranks of one group follow each other, or those of one place in their groups do.
        numbers = list(range(len(parts)))
        beside = [numbers, [at * groups + group for group in range(groups) for at in range(each)]]
        for turn in turns(each, first.shape[1]) if each > 1 else [[((0, first.shape[1]),)]]:
            for in_turn in beside if 1 not in (groups, each) else beside[:1]:
                made = np.zeros((first.shape[0] * groups, first.shape[1] * each), parts[0].dtype)
                places: dict[int, _Standing] = {}
                for number, of in enumerate(in_turn):
                    rows = slice(number // each * first.shape[0], (number // each + 1) * first.shape[0])
                    places[of] = rows.start, turn[number % each]
                    before = 0
                    for at, long in turn[number % each]:
                        made[rows, at : at + long] = parts[of][:, before : before + long]
                        before += long
                ref = first.with_(shape=made.shape, source=Inline(made.tobytes()), digest=None)
                yield ref, [places[of] for of in numbers]


#: Of each of two runs, the ranks that have the same tokens.
Alike = tuple[list[list[int]], list[list[int]]]


def _shapes_of_both(
    ranks: dict[int, Side], others: dict[int, Side], ids: TensorRef | None, alike: Alike
) -> Callable[[tuple[str, str]], tuple[int, ...]]:
    """What tells how large a tensor is as a whole of which both runs' ranks hold parts: the shapes of both."""
    sizes = _Sizes(ranks, others, ids, alike)

    def shape_of(place: tuple[str, str]) -> tuple[int, ...]:
        ref = next(side.tensors[place][1] for side in ranks.values() if place in side.tensors)
        theirs = next((side.tensors[place][1] for side in others.values() if place in side.tensors), None)
        if theirs is None:  # what a stage of a pipeline returns under a number of its own
            return ref.shape if place[1] in OF_ALL_SAMPLES else sizes.of_own_tokens(ref.shape)
        shape = sizes.of(place[1], ref.shape, theirs.shape)
        if shape == ref.shape == theirs.shape and place[1] in OF_ALL_SAMPLES:
            return _of_slices(place, ranks, others, alike)
        if place[1] not in OF_ALL_SAMPLES:
            if sizes.are_cut_along_tokens(place, (ranks, others)):
                return shape
            return _of_slices_of_tokens(place, (ranks, others), shape, alike)
        return shape

    return shape_of


def _assembled(
    key: RecordKey, which: Which, ranks: dict[int, Side], others: dict[int, Side], ids: TensorRef | None,
    alike: list[list[int]], shape_of: Callable[[tuple[str, str]], tuple[int, ...]], *, is_numbered: bool = False,
    slices_in: dict[tuple[str, int], tuple[int, ...]] | None = None,
) -> tuple[Side, Together]:  # fmt: skip
    """What one process would hold of what these ranks do. is_numbered: what stages return is numbered as of one.
    slices_in: the ways in which slices of weights lie, filled as their shapes are asked for.
    """
    imagined = Side([next(iter(ranks.values())).records[0]])
    imagined.is_loaded = True
    numbered = in_one_numbering(ranks) if is_numbered else {}
    for rank, side in ranks.items():
        for own, (record, ref) in side.tensors.items():
            place = numbered.get((rank, own), own)
            if place not in imagined.tensors:
                whole = ref.with_(shape=shape_of(own), source=Unreadable(""), copies=(), digest=None)
                whole = whole if place == own else whole.with_(name=place[0], canonical=place[0])
                imagined.tensors[place] = record, whole
    group = RankGroup(key, which, imagined, ranks, ids, alike=alike, slices_in=slices_in)
    (pair,) = group.made if len(group.made) == 1 else group.made[:1]
    side = pair.a if which == "a" else pair.b
    assert pair.together is not None
    for place, (record, ref) in side.tensors.items():
        held = pair.together.held.get(id(ref))
        if held is not None and len(held.ranks) > 1:
            if naming.meaning(place[0]).kind == "loss":
                pair.together.by_name[place[0]] = held
            theirs_of = [other.tensors[place][1] for other in others.values() if place in other.tensors]
            side.tensors[place] = record, _of_all(place[0], ref, held, theirs_of, alike, pair.together)
    return side, pair.together


def _of_slices(
    place: tuple[str, str], ranks: dict[int, Side], others: dict[int, Side], alike: Alike
) -> tuple[int, ...]:
    """The shape of a tensor that is of one shape on every rank of both runs: of one, where all hold the same; of a
    slice for each rank with the same tokens, where these hold values of their own in both runs, alike (tensor
    parallelism as wide in both). Along which axis does not matter to values that face each other one by one.
    """
    shape = next(side.tensors[place][1].shape for side in ranks.values() if place in side.tensors)
    if not shape:
        return shape
    firsts = _of_a_group(place, (ranks, others), alike)
    if firsts is None:
        return _of_shared_slices(place, ranks, others, alike)
    own, theirs = firsts
    apart = [float(np.abs(one - sides[0]).max(initial=0.0)) for sides in firsts for one in sides[1:]]
    off = [float(np.abs(one - other).max(initial=0.0)) for one, other in zip(own, theirs, strict=True)]
    is_sliced = min(apart) > 0 and 10 * sorted(off)[0] < min(apart)
    return (len(own) * shape[0], *shape[1:]) if is_sliced else shape


def _of_shared_slices(
    place: tuple[str, str], ranks: dict[int, Side], others: dict[int, Side], alike: Alike
) -> tuple[int, ...]:
    """The same where the ranks with the same tokens are more in one run than in the other: slices that several ranks
    have (heads of keys and values, of which there are fewer than ranks) are as large in both. What either run has of
    the weight is then one of a few values; a gradient is cut as its weight is.
    """
    name, stage = place
    shape = next(side.tensors[place][1].shape for side in ranks.values() if place in side.tensors)
    weight = f"param.{name.removeprefix('grad.')}", "param"
    for told in dict.fromkeys((weight if stage == "gradient" else place, place)):
        firsts = _of_a_group(told, (ranks, others), alike, as_many=False)
        if firsts is None or firsts[0][0].shape != shape:
            continue
        slices: list[NDArray[np.float64]] = []
        for one in firsts[0]:
            size = float(np.linalg.norm(one))
            if not size or any(0 < float(np.linalg.norm(one - known)) < OF_ITS_OWN * size for known in slices):
                return shape  # copies that are off a little
            slices += [] if any(np.array_equal(one, known) for known in slices) else [one]
        count = len(slices)
        if count < 2 or any(len(of) % count for of in firsts):
            return shape
        nearest = [min(float(np.linalg.norm(one - known)) for known in slices) for one in firsts[1]]
        is_sliced = all(10 * off <= float(np.linalg.norm(one)) for off, one in zip(nearest, firsts[1], strict=True))
        return (count * shape[0], *shape[1:]) if is_sliced else shape
    return shape


def _of_slices_of_tokens(
    place: tuple[str, str], sides: tuple[dict[int, Side], dict[int, Side]], shape: tuple[int, ...], alike: Alike
) -> tuple[int, ...]:
    """The shape of a tensor of samples or tokens, so long as they are: longer along its last axis where ranks with the
    same tokens hold values of their own in both runs, on as many ranks of each (tensor parallelism as wide in both).
    """
    firsts = _of_a_group(place, sides, alike)
    refs = [side.tensors[place][1] for ranks in sides for side in ranks.values() if place in side.tensors]
    if firsts is None or len(shape) < 3 or any(ref.shape[-1] != shape[-1] or len(ref.shape) < 3 for ref in refs):
        return shape
    for held in firsts:
        for one in held[1:]:
            if one.shape != held[0].shape or np.linalg.norm(one - held[0]) < OF_ITS_OWN * np.linalg.norm(one):
                return shape
    return (*shape[:-1], len(firsts[0]) * shape[-1])


def _of_a_group(
    place: tuple[str, str], sides: tuple[dict[int, Side], dict[int, Side]], alike: Alike, *, as_many: bool = True
) -> tuple[list[NDArray[np.float64]], list[NDArray[np.float64]]] | None:
    """What the first ranks with the same tokens hold of a tensor, those that have it (stages of a pipeline have
    others'), in either run; None unless they are more than one and (as_many) they are as many in both.
    """
    found: list[list[NDArray[np.float64]]] = []
    for ranks, groups in zip(sides, alike, strict=True):
        refs = [ranks[rank].tensors[place][1] for rank in groups[0] if place in ranks[rank].tensors]
        if len(refs) < 2 or (as_many and found and len(refs) != len(found[0])):
            return None
        if not all(ref.is_readable and ref.shape == refs[0].shape for ref in refs) or refs[0].numel > _MOST:
            return None
        if not refs[0].dtype.startswith(("float", "bfloat")):
            return None
        found.append([pages.array(ref).astype(np.float64) for ref in refs])
    return found[0], found[1]


class _Sizes:
    """How long the axes of a tensor are of which two runs hold parts."""

    def __init__(self, ranks: dict[int, Side], others: dict[int, Side], ids: TensorRef | None, alike: Alike) -> None:
        self._whole = None if ids is None else ids.shape
        self._own, self._theirs = (_ids_shape(sides) for sides in (ranks, others))
        self._members = tuple(len(groups[0]) for groups in alike)
        counts = [(1, len(sides), len(groups[0])) for sides, groups in zip((ranks, others), alike, strict=True)]
        self._counts = [(own, other) for own in counts[0] for other in counts[1]]

    def are_cut_along_tokens(self, place: tuple[str, str], sides: tuple[dict[int, Side], dict[int, Side]]) -> bool:
        """Whether ranks of either run have fewer tokens of it than token ids, as of sequence parallelism: these are
        other values on every rank, and no slices of its last axis.
        """
        for ranks, ids in zip(sides, (self._own, self._theirs), strict=True):
            refs = [side.tensors[place][1] for side in ranks.values() if place in side.tensors]
            if len(ids) == 2 and any(
                len(ref.shape) == 3 and ref.shape[0] == ids[0] and ref.shape[1] < ids[1] for ref in refs
            ):
                return True
        return False

    def of(self, stage: str, own: tuple[int, ...], theirs: tuple[int, ...]) -> tuple[int, ...]:
        if len(own) != len(theirs):
            return own
        made = list(own)
        for axis, (mine, other) in enumerate(zip(own, theirs, strict=True)):
            of_tokens = self._whole is not None and axis < 2 and stage not in OF_ALL_SAMPLES
            if of_tokens and (mine, other) == (self._own[axis], self._theirs[axis]):
                made[axis] = self._whole[axis]  # type: ignore[index]
                continue
            if of_tokens and mine != other and len(own) > 2 and self._are_shares(axis, own, theirs):
                made[axis] = self._whole[1]  # type: ignore[index]
                continue
            if of_tokens and mine == other and len(own) > 2 and self._is_cut_twice(axis, mine):
                made[axis] = self._whole[1]  # type: ignore[index]
                continue
            if stage not in OF_ALL_SAMPLES and self._whole is not None and mine != other:
                # Heads may stand before the tokens, and tokens before samples.
                held = ((self._own[of], self._theirs[of]) for of in (1, 0))
                found = next((of for of, both in zip((1, 0), held, strict=True) if (mine, other) == both), None)
                if found is not None:
                    made[axis] = self._whole[found]
                    continue
            if mine != other:
                made[axis] = min([mine * own for own, of in self._counts if mine * own == other * of], default=mine)
        return tuple(made)

    def of_own_tokens(self, own: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of what one run alone has: of all tokens, where a rank has it of as many as it has token ids."""
        is_of_ids = self._whole is not None and own[:2] == self._own
        return (*self._whole, *own[2:]) if self._whole is not None and is_of_ids else own

    def _are_shares(self, axis: int, own: tuple[int, ...], theirs: tuple[int, ...]) -> bool:
        """Whether ranks of either run have along an axis all their tokens, or the ranks with the same ones a share of
        these each (sequence parallelism), whatever samples they have.
        """
        for ids, shape, many in zip((self._own, self._theirs), (own, theirs), self._members, strict=True):
            if len(ids) != 2 or shape[1 - axis] != ids[0] or not shape[axis] or ids[1] % shape[axis]:
                return False
            if many % (ids[1] // shape[axis]):  # stages of a pipeline have the same tokens too
                return False
        return True

    def _is_cut_twice(self, axis: int, long: int) -> bool:
        """Whether an axis is as short in one run as its ranks' token ids (context parallelism), and in the other by the
        ranks that have the same ones (sequence parallelism).
        """
        if self._whole is None or (axis == 0 and long == self._whole[0]):
            return False
        ids = self._own[1], self._theirs[1]
        return any(long == ids[1 - at] < ids[at] == self._whole[1] == long * self._members[at] for at in (0, 1))


def _ids_shape(sides: dict[int, Side]) -> tuple[int, ...]:
    ref = next((ref for side in sides.values() if (ref := ids_of(side)) is not None), None)
    return (-1, -1) if ref is None or len(ref.shape) != 2 else ref.shape


def _alike(sides: dict[int, Side]) -> list[list[int]]:
    """The ranks in groups that have the same tokens; all in one where the first's are not known."""
    ids = {rank: ids_of(side) for rank, side in sides.items()}
    if next(iter(ids.values())) is None:
        return [list(sides)]
    found: list[tuple[TensorRef | None, list[int]]] = []
    for rank, ref in ids.items():
        known = (one for one, _ in found if one is not None and ref is not None and same_values(one, ref))
        of = next(known, None)
        if of is None:
            found.append((ref, [rank]))
        else:
            next(members for one, members in found if one is of).append(rank)
    return [members for _, members in found]


def _of_all(
    name: str, ref: TensorRef, held: HeldByRanks, theirs: list[TensorRef], alike: list[list[int]], together: Together
) -> TensorRef:
    """What ranks hold of a tensor, their copies beside it; of what may be parts and differs, the sum or the mean."""
    if not ref.is_readable and ref.digest is None:
        return ref
    if any(part.is_text for part in held.parts):
        if all(part.dtype == ref.dtype and part.source == ref.source for part in held.parts):
            return ref
        return ref.with_(source=Unreadable("its ranks hold texts of their own"), digest=None)
    if not held.is_cut and len({part.shape for part in held.parts}) > 1:
        shapes = ", ".join(sorted({"x".join(map(str, part.shape)) for part in held.parts}))
        return ref.with_(source=Unreadable(f"its ranks hold it in several shapes ({shapes})"), digest=None)
    if held.is_cut:
        by_place: dict[object, list[TensorRef]] = defaultdict(list)
        for part, stretches in zip(held.parts, held.stretches, strict=True):
            by_place[stretches].append(part)
        sets = zip(*by_place.values(), strict=False)
        next(sets)
        every = tuple(by_place)
        made = [standing_for(HeldByRanks(held.ranks[: len(one)], one, held.axis, every)) for one in sets]  # type: ignore[arg-type]
        return ref.with_(copies=tuple(made))
    if (
        naming.meaning(name).kind in MAY_BE_PARTS and ref.numel <= _MOST
        and all(part.is_readable for part in held.parts)
        and not all(same_values(held.parts[0], part) for part in held.parts[1:])
    ):  # fmt: skip
        theirs = [one for one in theirs if one.is_readable and one.shape == ref.shape]
        own, there = _each_once(held, theirs, alike, together), _different(theirs)
        total = _sum(own)
        if there:
            theirs_sum = _sum(there)
            # Either run's may be parts of a sum, or each a mean of its own.
            apart = {(own_of, of): float(np.abs(total / own_of - theirs_sum / of).sum())
                     for own_of in (1, len(own)) for of in (1, len(there))}  # fmt: skip
            best = min(apart, key=apart.__getitem__)
            if 10 * apart[best] < apart[1, 1] and best[0] > 1:
                total = total / len(own)
                together.own_mean |= naming.meaning(name).kind == "loss"
        return ref.with_(dtype="float32", source=Inline(total.astype(np.float32).tobytes()), digest=None)
    return ref.with_(copies=held.parts[1:])


def _each_once(
    held: HeldByRanks, theirs: list[TensorRef], alike: list[list[int]], together: Together
) -> list[TensorRef]:
    """What is to be added up of ranks: of those that have the same tokens and hold nearly the same, the one that is
    furthest off what the other run holds, so that no error of one is spread over all; else each value once.
    """
    found: list[TensorRef] = []
    for members in alike:
        own = _different([part for rank, part in zip(held.ranks, held.parts, strict=True) if rank in members])
        # Of ranks whose tokens nobody knows, numbers may be of other samples each, and near each other for all that.
        may_be_copies = len(own) > 1 and (together.ids is not None or held.parts[0].numel > 1)
        if may_be_copies and _are_near(own) and not _adds_up(own, theirs):
            others = theirs[:1] or own
            own = [max(own, key=lambda one: sum(_off(one, other) for other in others))]
        found += own
    return _different(found)


def _are_near(parts: list[TensorRef]) -> bool:
    """Whether ranks hold one another's values but for noise, or for what is wrong with one of them."""
    first = pages.array(parts[0]).astype(np.float64)
    return all(_off(parts[0], one) <= OF_ITS_OWN * float(np.linalg.norm(first)) for one in parts[1:])


def _adds_up(parts: list[TensorRef], theirs: list[TensorRef]) -> bool:
    """Whether the sum of what ranks hold is what one rank of the other run holds, or all of them: even parts of it."""
    # Two runs' copies, each with noise of its own, are one another's, and so are their sums.
    if theirs and parts[0].numel > 1 and _off(parts[0], theirs[0]) <= _EVEN * float(np.linalg.norm(_sum(parts[:1]))):
        return False
    total = _sum(parts)
    most = _EVEN * float(np.linalg.norm(total))
    there = [pages.array(one).astype(np.float64) for one in theirs[:1]] + ([_sum(_different(theirs))] if theirs else [])
    return any(float(np.linalg.norm(total - one)) <= most for one in there)


def _off(one: TensorRef, other: TensorRef) -> float:
    return float(np.linalg.norm(pages.array(one).astype(np.float64) - pages.array(other).astype(np.float64)))


def _different(parts: list[TensorRef]) -> list[TensorRef]:
    """One of each group of ranks that hold the same."""
    found: list[TensorRef] = []
    for ref in parts:
        if not any(same_values(ref, one) for one in found):
            found.append(ref)
    return found


def _sum(parts: list[TensorRef]) -> NDArray[np.float64]:
    total = pages.array(parts[0]).astype(np.float64)
    for ref in parts[1:]:
        total += pages.array(ref)  # one rank at a time: all of them beside each other may be more than memory holds
    return total
