"""Rows of experts: how many tokens each expert of a layer computed in either run.

Rows of experts do not face each other one by one, so that an expert's tensors of other lengths used to be taken for
another layout. Where both runs have the same tokens in the same places, as many rows are sent to a layer's experts in
both: fewer are tokens that were lost, as many that went to other experts are another choice.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from replay_core import naming, pages
from replay_core.compare.pairing.align import MicroBatchPair, TensorPair
from replay_core.compare.pairing.micro_batch_pair import Side
from replay_core.compare.pairing.ranks import same_values
from replay_core.compare.pairing.routing import ROUTERS
from replay_core.records import TensorRef
from replay_core.regexes import regex

#: The part of a layer's rows that noise may send to other experts, or one.
_REROUTED = 0.05
#: Choices that lie apart, at least, and so many times those that noise turns, where they are taken for no noise; and
#: elements of scores that are read for it.
_FEWEST_MOVED, _BEYOND, _MOST = 2, 10.0, 1 << 24
#: An expert of a layer, by its number, in a module tensor's name.
_NUMBERED = regex(r"^(.*\bexperts)\.(\d{1,9})\.(.+)$")


class ExpertsOfRanks:
    """Which ranks of either run recorded which experts' tensors in a step's micro-batch."""

    def __init__(self, micro_pairs: list[MicroBatchPair]) -> None:
        #: By run, micro-batch, layer and tensor of an expert: by expert, what each rank has.
        self._by_expert: dict[tuple[object, ...], dict[str, dict[int | None, TensorRef]]] = {}
        for one in micro_pairs:
            for which, side in (("a", one.a), ("b", one.b)):
                for (name, stage), (_, ref) in side.tensors.items():
                    if (found := _NUMBERED.match(name)) is not None:
                        layer, number, rest = found.groups()
                        place = (which, one.key.step, one.key.micro, one.key.role, stage, layer, rest)
                        self._by_expert.setdefault(place, {}).setdefault(number, {})[one.key.rank] = ref

    def shared_layers(self, micro_pair: MicroBatchPair) -> frozenset[str]:
        """Layers whose experts lie on several ranks of a run, of which each pair of ranks sees its own alone."""
        key = micro_pair.key
        return frozenset(
            str(place[5]) for place, by_number in self._by_expert.items()
            if place[1:4] == (key.step, key.micro, key.role)
            and len({rank for having in by_number.values() for rank in having}) > 1
            and all(len(having) == 1 for having in by_number.values())
        )  # fmt: skip

    def are_elsewhere(self, pair: TensorPair, micro_pair: MicroBatchPair) -> bool:
        """Whether the run that lacks an expert's tensor has it on another rank, and every expert of the layer on one
        rank alone (expert parallelism), where the other run has it on several: rows are of other ranks' tokens then,
        and a weight or gradient is, by its values, the copy that is compared where the one run has it.

        Raises:
            DumpError: the bytes of one cannot be read.
        """
        found = _NUMBERED.match(pair.name)
        if found is None or (pair.a is None) == (pair.b is None):
            return False
        lacks, has = ("a", "b") if pair.a is None else ("b", "a")
        layer, number, rest = found.groups()
        record, ref = pair.one
        key = micro_pair.key
        where = (key.step, key.micro, key.role, record.key.stage, layer, rest)
        theirs, own = (self._by_expert.get((which, *where), {}) for which in (lacks, has))
        ranks = [rank for having in theirs.values() for rank in having]
        is_spread = len(set(ranks)) > 1 and all(len(having) == 1 for having in theirs.values())
        if not is_spread or number not in theirs or key.rank in theirs[number] or len(own.get(number, {})) < 2:
            return False
        if naming.is_module_tensor(pair.name) and not pair.name.startswith("grad."):
            return True
        copies = [own[number].get(rank) for rank in theirs[number]]
        return all(copy is not None and same_values(ref, copy) for copy in copies)


class Missent(Struct, frozen=True):
    """An expert that computed another number of tokens than in the other run, while the layouts are one.

    lost: by how many rows the run `which` has fewer in the whole layer; None where it has as many, or a layer's other
    experts were not recorded. ranks: of which ranks the expert is, where one run is of several. noise: where none is
    lost and so few moved that noise does it, what is said once of the layer. is_told: whether the routers' scores are
    the same to the last bit, so that no router chose otherwise.
    """

    sentence: str
    lost: int | None
    which: str | None
    ranks: tuple[int, ...]
    noise: str | None = None
    is_told: bool = False


def missent(pair: TensorPair, micro_pair: MicroBatchPair) -> Missent | None:
    """What another number of an expert's rows says; None where it may be a matter of layout: other samples or padding,
    padding that only one run sends to experts, experts that are all filled up to one number.
    """
    if pair.a is None or pair.b is None or not naming.is_routed(pair.name) or not _are_laid_alike(micro_pair):
        return None
    own = (pair.a[1].shape, pair.b[1].shape)
    found = _NUMBERED.match(pair.name)
    if found is None or not own[0] or not own[1] or own[0][0] == own[1][0] or own[0][1:] != own[1][1:]:
        return None
    layer, number, rest = found.groups()
    counts_a, counts_b = (dict(_counts(side, layer, rest)) for side in (micro_pair.a, micro_pair.b))
    if counts_a.keys() != counts_b.keys() or not _are_single(micro_pair, layer, rest):
        return None
    a, b = (np.array([counts[one] for one in counts_a]) for counts in (counts_a, counts_b))
    if any(_is_filled(one, micro_pair) and bool((one >= other).all()) for one, other in ((a, b), (b, a))):
        return None
    apart, unpadded = int(a.sum() - b.sum()), _padding(micro_pair)
    if unpadded and apart and apart % unpadded == 0 and abs(apart) <= unpadded * len(a):
        return None
    whose = (
        f"expert {number} of {layer.rpartition('.')[0] or layer} computed {own[0][0]} rows in a and {own[1][0]} in b"
    )
    together = micro_pair.together
    side = None if together is None else micro_pair.a if together.which == "a" else micro_pair.b
    held = None if side is None or together is None else next(
        (together.held.get(id(ref)) for _, ref in side.named(pair.name)), None
    )  # fmt: skip
    ranks = held.ranks if held is not None else ()
    if not apart:
        routers = _routers(micro_pair, layer)
        moved = int(np.abs(a - b).sum()) // 2
        are_same = all(same_values(one, other) for one, other in routers)
        if not are_same and not all(_is_beyond_noise(moved, one, other) for one, other in routers):
            return None  # what a router chose otherwise is said of the router
        if routers:
            scores = "the same" if are_same else "the same but for noise, which cannot turn as many choices"
            said = (
                f"{whose}, all experts together {int(a.sum())} in both, and their router's scores are {scores}: tokens "
                "were sent to other experts than in the other run, by what is no score of the router's (a selection "
                "bias that only one run moved so, a mask, a limit of groups)"
            )
            return Missent(said, None, None, ranks, is_told=True)
        said = f"{whose}, all experts together {int(a.sum())} in both: tokens were sent to other experts"
        return Missent(said, None, None, ranks, _noise(moved, int(a.sum()), layer, micro_pair))
    if together is None and layer in micro_pair.shared_experts:
        routers = _routers(micro_pair, layer)
        if routers and not all(same_values(one, other) for one, other in routers):
            return None
        said = (
            f"{whose}, this rank's experts together {int(a.sum())} and {int(b.sum())}: tokens were sent to other "
            "ranks' experts, or lost on the way"
        )
        return Missent(said, None, None, ranks)
    which = "b" if apart > 0 else "a"
    said = (
        f"{whose}, all experts together {int(a.sum())} and {int(b.sum())}, of the same tokens: {abs(apart)} of them "
        f"{'was' if abs(apart) == 1 else 'were'} lost on the way to the experts of {which}, or dropped"
    )
    return Missent(said, abs(apart), which, ranks)


def _is_beyond_noise(moved: int, one: TensorRef, other: TensorRef) -> bool:
    """Whether so many choices lie apart that what scores [N, experts] are apart turns a small part of them at most:
    of two experts' scores that lie as far from each other as neighbours do, noise turns the choice where they happen
    to be nearer than the noise. Rows may stand in any order: of each expert, its scores are asked by size.
    """
    if (
        one.shape != other.shape
        or len(one.shape) < 2
        or one.numel > _MOST
        or not (one.is_readable and other.is_readable)
    ):
        return False
    a_NE, b_NE = (pages.array(ref).astype(np.float64).reshape(-1, ref.shape[-1]) for ref in (one, other))
    apart = float(np.abs(np.sort(a_NE, 0) - np.sort(b_NE, 0)).max(initial=0.0))
    gap = float(np.median(np.diff(np.sort(a_NE, 1), axis=1))) if a_NE.shape[1] > 1 else 0.0
    return gap > 0 and np.isfinite(apart) and moved > max(_FEWEST_MOVED, _BEYOND * len(a_NE) * apart / gap)


def _noise(moved: int, rows: int, layer: str, micro_pair: MicroBatchPair) -> str | None:
    if moved > max(1, _REROUTED * rows):
        return None
    return (
        f"{micro_pair.where}: {layer.rpartition('.')[0] or layer}: at least {moved:,} of {rows:,} rows went to another "
        "expert and none was lost; so few may be noise between scores that are next to alike, the router was not "
        "recorded. The rows of experts that got another number are not compared"
    )


def _routers(micro_pair: MicroBatchPair, layer: str) -> list[tuple[TensorRef, TensorRef]]:
    """What the layer's router put out in either run; nothing where one did not record it."""
    block = layer.rpartition(".")[0]
    starts = tuple(f"{block}.{word}." for word in ROUTERS)
    return [
        (ref, other[1]) for place, (_, ref) in micro_pair.a.tensors.items()
        if place[0].startswith(starts) and not naming.is_input(place[0])
        and (other := micro_pair.b.tensors.get(place)) is not None
    ]  # fmt: skip


def _counts(side: Side, layer: str, rest: str) -> Iterator[tuple[str, int]]:
    for (name, _), (_, ref) in side.tensors.items():
        found = _NUMBERED.match(name) if name.startswith(f"{layer}.") else None
        if found is not None and found[3] == rest and ref.shape:
            yield found[2], ref.shape[0]


def _are_single(micro_pair: MicroBatchPair, layer: str, rest: str) -> bool:
    """Whether every expert's rows are of one rank: of several, each may have had tokens of its own."""
    together = micro_pair.together
    if together is None:
        return True
    side = micro_pair.a if together.which == "a" else micro_pair.b
    held = [
        together.held.get(id(ref)) for (name, _), (_, ref) in side.tensors.items()
        if (found := _NUMBERED.match(name)) is not None and found[1] == layer and found[3] == rest
    ]  # fmt: skip
    return together.whole_of is None and all(one is not None and len(one.ranks) == 1 for one in held)


def _are_laid_alike(micro_pair: MicroBatchPair) -> bool:
    a, b = micro_pair.a.layout, micro_pair.b.layout
    if a is None or b is None or micro_pair.partial or not np.array_equal(a.sample_BS, b.sample_BS):
        return False
    main_a, main_b = micro_pair.a.main, micro_pair.b.main
    return main_a is not None and main_b is not None and micro_pair.pairing(main_a, main_b).in_order


def _is_filled(counts: NDArray[np.int64], micro_pair: MicroBatchPair) -> bool:
    """Whether all experts have one number of rows that does not come of sending every token to as many of them."""
    layout = micro_pair.a.layout
    if layout is None or len(counts) < 2 or len({*counts.tolist()}) > 1:
        return False
    total = int(counts.sum())
    return all(not every or total % every or total > every * len(counts)
               for every in (layout.sample_BS.size, int(layout.lengths.sum())))  # fmt: skip


def _padding(micro_pair: MicroBatchPair) -> int:
    """How many slots are of no token."""
    layout = micro_pair.a.layout
    return 0 if layout is None else int(layout.sample_BS.size - layout.lengths.sum())
