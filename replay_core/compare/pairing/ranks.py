"""Several ranks of one run that together hold what one process of the other holds: a step under tensor, sequence,
context, expert, pipeline or data parallelism, against the same step alone.

What a rank holds of a tensor is told by shapes: all of it, where it is as large as the other run's; a stretch of one
axis, where the ranks' lengths add up to the other's. Where the dump itself says how its dimensions are cut, it counts.
Only token ids are read here, which say who has which tokens.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise, permutations
from math import prod
from typing import Any, Literal

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from replay_core import naming, pages
from replay_core.compare.pairing.dims import Cut, Dims, Stretch, parsed, share, within
from replay_core.compare.pairing.micro_batch_pair import MicroBatchPair, Side
from replay_core.compare.pairing.pipeline import handed_over
from replay_core.compare.pairing.same_rows import same_rows
from replay_core.compare.pairing.slices import among, makes_words
from replay_core.dtypes import ITEMSIZE
from replay_core.errors import DumpError
from replay_core.records import FileBytes, Inline, Parts, Problem, Record, RecordKey, TensorRef, Unreadable
from replay_core.regexes import regex

#: Which run: a is the baseline.
Which = Literal["a", "b"]
#: Kinds of which ranks may hold parts: a module's output before its sum, a loss over some of the tokens.
MAY_BE_PARTS = frozenset({"activation", "loss", "value", "metric"})
#: Weights of one name and their gradients that are asked which ranks share a slice.
_MOST_LIKE = 16
_NUMBER = regex(r"(?<=\.)\d{1,9}(?=\.)")
#: Elements of what is laid in another turn.
_MOST = 1 << 26
#: Of two turns that is taken which leaves so small a part of the squared difference of the other.
_FAR_NEARER = 0.25
#: Stages of what is the same on every replica, whatever its samples.
OF_ALL_SAMPLES = ("gradient", "param", "optimizer", "training_metrics")


class HeldByRanks(Struct, frozen=True):
    """What each rank holds of one tensor.

    axis: the one that is cut among the ranks; None where each holds all of it. stretches: of a cut one, which parts of
    the whole a rank holds, end to end.
    """

    ranks: tuple[int, ...]
    parts: tuple[TensorRef, ...]
    axis: int | None = None
    stretches: tuple[tuple[Stretch, ...], ...] = ()
    #: Where the dump says that the ranks hold parts of a sum: which of the parts make it, as numbers from 0.
    summed: tuple[int, ...] = ()

    @property
    def is_cut(self) -> bool:
        return self.axis is not None


class Astray(Struct, frozen=True):
    """Ranks whose samples or tokens are not those that are left for them: found where the ranks are put together."""

    kind: str
    ranks: tuple[int, ...]
    sentence: str
    #: The tensor that shows it.
    name: str = "input_ids"


class Together(Struct):
    """What the ranks of one micro-batch hold, by the id of the tensor that stands for them.

    which: the run whose ranks they are. shares: "all" where each rank has every token, "tokens" where each has some
    tokens of every sample, "samples" where each has samples of its own, "none" where no samples are known.
    """

    which: Which
    ranks: tuple[int, ...]
    shares: str
    held: dict[int, HeldByRanks]
    astray: Astray | None = None
    step: int | None = None
    #: How many groups of ranks have tokens of their own.
    groups: int = 1
    #: And how many have samples of their own.
    samples: int = 1
    #: Whether the loss of each rank or group is the mean over its own samples, as far as was noticed here.
    own_mean: bool = False
    #: What ranks of a pipeline were given by the stage before, which the one process never has as an input.
    handed: list[tuple[int, str]] = field(default_factory=list)
    #: What is said of tensors that stages of a pipeline handed to each other.
    staged: list[str] = field(default_factory=list)
    #: Of every rank, which of the other run's samples it has, as the token ids say; None where they do not, or where
    #: two samples are of the same tokens and may be either's.
    whose: tuple[tuple[Stretch, ...], ...] | None = None
    #: Of the axes of samples and tokens that are cut among the ranks, every rank's stretches.
    cuts: tuple[tuple[int, tuple[tuple[Stretch, ...], ...]], ...] = ()
    #: By rank, the log-probabilities that it recorded itself, before they were put together.
    logprobs: dict[int, TensorRef] = field(default_factory=dict)
    #: By rank, the micro-batches that were laid together to what it holds, in turn.
    micros: dict[int, tuple[int, ...]] = field(default_factory=dict)
    #: Of every rank, its token ids; None where they are not known.
    ids: tuple[TensorRef, ...] | None = None
    #: What the ranks of the other run hold, where these stand for the one process.
    whole_of: Together | None = None
    #: Of ranks that stand for one process: what each holds of a loss, by its name.
    by_name: dict[str, HeldByRanks] = field(default_factory=dict)
    #: By how many rows, of how many words: names of what a rank has past a vocabulary that was padded.
    padded: dict[tuple[int, int, int], list[str]] = field(default_factory=dict)
    #: What a dump says of its tensors' dimensions, and the tensors do not bear out.
    problems: list[Problem] = field(default_factory=list)


class RankGroup:
    """The ranks of one micro-batch, and the one process they face."""

    def __init__(
        self, key: RecordKey, many: Which, whole: Side, ranks: dict[int, Side], ids: TensorRef | None = None,
        *, of_one_process: bool = True, alike: Sequence[Sequence[int]] = (),
        turn: tuple[tuple[Stretch, ...], ...] = (), slices_in: Mapping[tuple[str, int], tuple[int, ...]] | None = None,
    ) -> None:  # fmt: skip
        """ids: the token ids of the one process, where it has none of its own. of_one_process: whether the whole is
        one process's, and not put together of other ranks. alike: the ranks that have the same tokens elsewhere in the
        step, which says who of those that hold no tokens here are of one group. turn: how the ranks of the other run
        share a sequence, where as many do. slices_in: of weights, by name without numbers and how many
        ranks have them, the way in which their slices lie, where it is known.
        """
        self.of_one_process = of_one_process
        self._whole_ids = ids if ids is not None else ids_of(whole)
        #: How long a sequence is in the one process, and with the padding that lets the ranks share it evenly.
        self._padded: tuple[int, int] | None = None
        self.key, self._many, self._whole, self._ranks, self._turn = key, many, whole, ranks, turn
        #: Of every rank, the token ids it computed with; None where these are not known.
        self._ids = ids_of_stages(list(ranks.values()))
        self._astray: Astray | None = None
        #: By id, what ranks hold of a tensor that is not whole, for some rank's part cannot be read.
        self._unread: set[int] = set()
        #: Of weights, by name without numbers: how many copies are equal in each way in which ranks may share slices.
        self._copies: dict[str, Counter[tuple[tuple[Stretch, ...], ...]]] = {}
        #: Of weights, by name without numbers: the turn in which slices of them lie on the ranks.
        self._turns: dict[tuple[str, int], tuple[int, ...]] = dict(slices_in or {})
        #: Of the axis of samples or tokens, where it is cut: which, and every rank's stretches of it. Where both are,
        #: of samples; and of tokens beside it.
        self._cut: tuple[int, tuple[tuple[Stretch, ...], ...]] | None = None
        self._cut_too: tuple[int, tuple[tuple[Stretch, ...], ...]] | None = None
        #: Whether no two samples of the one process are of the same tokens.
        self._are_unlike = False
        #: Numbers of ranks with the same tokens, where these are known.
        self._groups: list[list[int]] = [[number] for number in range(len(ranks))]
        if sorted(rank for members in alike for rank in members) == sorted(ranks):
            at = {rank: number for number, rank in enumerate(ranks)}
            self._groups = [sorted(at[rank] for rank in members) for members in alike]
        self.shares = self._shared()
        self.made = list(self._pairs())

    @property
    def is_covered(self) -> bool:
        """Whether the ranks' tensors are all of the one process, wherever both have them."""
        return self.is_laid and not self.uncovered

    @property
    def is_laid(self) -> bool:
        """Whether it is known which of the one process's tokens each rank has, where they share these."""
        return self.shares in ("all", "none") or (self._cut is not None and self._astray is None)

    @property
    def uncovered(self) -> list[tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
        """The tensors that the ranks do not make: each one's name, its shape, theirs, and the ranks."""
        together = [pair.together for pair in self.made if pair.together is not None]
        there = {ref.name: ref.shape for _, ref in self._whole.tensors.values()}
        found = []
        for held in (held for one in together for held in one.held.values() if id(held) not in self._unread):
            name, shape = held.parts[0].name, standing_for(held).shape
            if name in there and there[name] != shape:
                found.append((name, there[name], shape, held.ranks))
        return found

    @property
    def holds_slices(self) -> bool:
        """Whether some tensor is cut among the ranks."""
        together = [pair.together for pair in self.made if pair.together is not None]
        return any(held.is_cut for one in together for held in one.held.values())

    def are_of_one_batch(self, *, sliced: bool) -> bool:
        """Whether what the ranks hold is of the samples of the one process: of others it had never heard.

        sliced: some tensor of this step is cut among the ranks, so that none of them computes it alone.
        """
        if self.shares == "samples":
            mains = [list(self._ranks.values())[members[0]].main for members in self._groups]
            whole = self._whole.main
            has_more = whole is not None and sum(main.count for main in mains if main is not None) > whole.count
            return self._cut is not None or not has_more
        if self.shares != "none":
            return True
        computed = [key for key in self._whole.tensors if key[1] not in OF_ALL_SAMPLES]
        held = [[side.tensors[key][1] for side in self._ranks.values() if key in side.tensors] for key in computed]
        given = [
            (self._whole.tensors[key][1], refs)
            for key, refs in zip(computed, held, strict=True) if key[1] == "batch_inputs" and len(refs) > 1
        ]  # fmt: skip
        if self._are_stated():
            return True
        if given:
            return all(same_values(whole, ref) for whole, refs in given for ref in refs) or self.holds_slices
        # A stage of a pipeline has some of the modules; each of several replicas has them all.
        return sliced or any(0 < len(refs) < len(self._ranks) for refs in held) or not any(held)

    def _are_stated(self) -> bool:
        """Whether the dump says of some tensor what every rank has of it, on every axis along which the ranks stand."""
        for place in self._whole.tensors:
            said = [side.tensors[place][1].stated for side in self._ranks.values() if place in side.tensors]
            if len(said) < len(self._ranks) or (first := said[0]) is None or any(one is None for one in said):
                continue
            stands = {(axis, number) for one in said if one is not None for axis, number, _ in one.axes}
            differ = {axis for axis, number in stands if number}
            try:
                dims = parsed(first.dims)
            except DumpError:
                continue
            if differ and differ <= dims.replicated | {cut.axis for dim in dims.dims for cut in dim.cuts}:
                return True
        return False

    def _pairs(self) -> Iterator[MicroBatchPair]:
        if self.shares != "samples" or self._cut is not None:
            yield self._pair(self.key, self._whole, self._ranks)
            return

        # Samples face samples wherever they are; a number that is said of a whole micro-batch faces them all.
        def is_number(_: Record, ref: TensorRef) -> bool:
            return not ref.shape and not ref.is_text

        def is_tensor(record: Record, ref: TensorRef) -> bool:
            return not is_number(record, ref)

        numbers = {rank: narrowed_to(side, is_number) for rank, side in self._ranks.items()}
        yield self._pair(self.key, narrowed_to(self._whole, is_number), numbers)
        rest = [narrowed_to(side, is_tensor) for side in self._ranks.values()]
        whole = narrowed_to(self._whole, is_tensor)
        for number, side in enumerate(rest):
            alone = whole if not number else Side()
            a, b = (side, alone) if self._many == "a" else (alone, side)
            key = RecordKey(self.key.step, self.key.micro, side.records[0].key.rank, self.key.role)
            pair = MicroBatchPair(key, a, b)
            yield pair

    def _shared(self) -> str:
        """How the ranks share the tokens of the one process."""
        ids, whole = self._ids, self._whole_ids
        every = [one for one in ids if one is not None]
        if whole is None or len(every) != len(ids):
            return "none"
        if (padded := _padded(whole, every)) is not None:
            self._padded = whole.shape[1], padded.shape[1]
            self._whole_ids = whole = padded
        if all(same_values(one, whole) for one in every):
            return "all"
        self._group(every)
        present = [every[members[0]] for members in self._groups]
        found = self._cut_among(present, whole)
        of = {number: group for group, members in enumerate(self._groups) for number in members}

        def of_ranks(cut: tuple[int, tuple[tuple[Stretch, ...], ...]] | None) -> Any:
            return cut and (cut[0], tuple(cut[1][of[number]] for number in range(len(every))))

        self._cut, self._cut_too = of_ranks(self._cut), of_ranks(self._cut_too)
        return found

    def _group(self, ids: Sequence[TensorRef]) -> None:
        """Ranks with the same tokens: a tensor-parallel group of several."""
        self._groups = []
        for number, one in enumerate(ids):
            known = next((members for members in self._groups if same_values(ids[members[0]], one)), None)
            if known is None:
                self._groups.append([number])
            else:
                known.append(number)

    def _cut_among(self, present: Sequence[TensorRef], whole: TensorRef) -> str:
        """How groups of ranks, each with tokens of its own, share those of the one process."""
        shapes = {one.shape for one in present}
        # Rows one behind the other, of lengths of their own; a pack of as many tokens as another rank's is no slice.
        are_flat = any(len(shape) != 2 for shape in shapes) or self._hold_packs(present) or self._hold_rows(present)
        are_flat = are_flat or self._hold_others(present, whole)
        if not are_flat and len(whole.shape) == 2 and len(shapes) == 1 and present[0].shape[0] == whole.shape[0]:
            length = present[0].shape[1]
            if length * len(present) == whole.shape[1]:
                self._cut_tokens(present, whole)
                return "tokens"
        if len(whole.shape) == 2 and {shape[1:] for shape in shapes} == {whole.shape[1:]}:
            self._cut_samples(present, whole)
        elif not are_flat and len(whole.shape) == 2 and len(shapes) == 1:
            self._cut_samples_and_tokens(present, whole)
        if len(present) == 1 and present[0].shape != whole.shape:
            if (astray := self._of_one_share(present[0], whole)) is not None:
                self._astray = astray
            else:
                self._note_same_samples(present[0].shape[0] if len(present[0].shape) == 2 else None)
        return "samples"

    def _of_one_share(self, ids: TensorRef, whole: TensorRef) -> Astray | None:
        """Whether all ranks were given one rank's share of every sequence (context parallelism)."""
        ranks = list(self._ranks)
        if len(ids.shape) != 2 or len(whole.shape) != 2 or len(ranks) < 2 or ids.shape[0] != whole.shape[0]:
            return None
        length = ids.shape[1]
        if length * len(ranks) != whole.shape[1]:
            return None
        ids_BS, own = _numbers(whole), _numbers(ids)
        owner = next(
            (at for turn in turns(len(ranks), length) for at, share_ in enumerate(turn)
             if np.array_equal(_taken(ids_BS, share_), own)),
            None,
        )  # fmt: skip
        if owner is None:
            return None
        others = tuple(rank for at, rank in enumerate(ranks) if at != owner)
        have, own_share = ("have", "their own are") if len(others) > 1 else ("has", "its own is")
        return Astray(
            "same tokens", others,
            f"rank{'s' * (len(others) > 1)} {named(others)} of {self._many} {have} rank {ranks[owner]}'s share of "
            f"every sequence, and {own_share} on no rank",
        )  # fmt: skip

    def _hold_packs(self, present: Sequence[TensorRef]) -> bool:
        """Whether each rank states bounds of sequences (cu_seqlens) that end within its own tokens, behind which there
        may be padding; those of a pack that is cut over ranks are the whole's.
        """
        bounds = [
            ref for side in self._ranks.values() for name in ("cu_seqlens", "cu_seqlens_q")
            if (ref := side.find(name)) is not None and ref.dtype.startswith("int") and len(ref.shape) == 1
            and ref.is_readable and ref.shape[0]
        ]  # fmt: skip
        tokens = {int(np.prod(one.shape)) for one in present}
        return len(bounds) >= len(self._ranks) and max(int(pages.array(ref)[-1]) for ref in bounds) <= max(tokens)

    def _hold_rows(self, present: Sequence[TensorRef]) -> bool:
        """Whether the one process has a pack, and the groups' rows are as long as its sequences (by their masks, else
        whole), or their masks leave out what slices of it would not: samples of their own, though as many tokens as a
        slice of the pack would have.
        """
        bounds = next(
            (ref for name in ("cu_seqlens", "cu_seqlens_q") if (ref := self._whole.find(name)) is not None), None
        )
        if bounds is None or not bounds.is_readable or len(bounds.shape) != 1:
            return False
        sides, lengths, are_masked = list(self._ranks.values()), [], True
        for members, ids in zip(self._groups, present, strict=True):
            mask = sides[members[0]].find("attention_mask")
            has_mask = mask is not None and mask.shape == ids.shape and mask.is_readable
            are_masked &= has_mask
            if mask is not None and has_mask:
                lengths += pages.array(mask).astype(np.int64).sum(axis=-1).reshape(-1).tolist()
            else:
                lengths += [ids.shape[-1]] * (ids.shape[0] if len(ids.shape) > 1 else 1)
        whole = np.diff(pages.array(bounds).astype(np.int64)).tolist()
        return sorted(lengths) == sorted(whole) or (are_masked and sum(lengths) != sum(whole))

    def _hold_others(self, present: Sequence[TensorRef], whole: TensorRef) -> bool:
        """Whether most tokens of the groups, without what their masks leave out, are none of the whole: rows of other
        samples that are together as long as one of the whole is, by chance.
        """
        sides = list(self._ranks.values())
        held: Counter[int] = Counter()
        for ids, members in zip(present, self._groups, strict=True):
            mask, own = sides[members[0]].find("attention_mask"), _numbers(ids)
            is_masked = mask is not None and mask.shape == ids.shape and mask.is_readable
            held.update((own[pages.array(mask) != 0] if mask is not None and is_masked else own.reshape(-1)).tolist())
        return 2 * (held & Counter(_numbers(whole).reshape(-1).tolist())).total() < held.total()

    def _note_same_samples(self, number: int | None) -> None:
        if any(len(members) > 1 for members in self._groups):
            whom = "each rank" if len(self._groups) == 1 else "each group"
            self._astray = Astray(
                "same samples", tuple(self._ranks),
                f"ranks {named(self._ranks)} of {self._many} were given the same {number or ''} samples, and the other "
                f"run has more: {whom} should have samples of its own",
            )  # fmt: skip

    def _cut_tokens(self, ids: Sequence[TensorRef], whole: TensorRef) -> None:
        length, ranks = ids[0].shape[1], len(ids)
        ids_BS, own = pages.array(whole), [pages.array(one) for one in ids]
        if ranks == 1 and own[0].shape == ids_BS.shape and not np.array_equal(own[0], ids_BS):
            # All tokens of all samples, which the first stage of a pipeline may take in another order.
            self._cut_samples(ids, whole)
            if self._cut is not None:
                return
        tried = turns(ranks, length)

        def fits(stretches: tuple[Stretch, ...], mine: np.ndarray[Any, Any]) -> bool:
            return np.array_equal(_taken(ids_BS, stretches), mine)

        def fitting(one: tuple[tuple[Stretch, ...], ...]) -> tuple[int, int]:
            """How many ranks have a share of such a cut, and how many their own."""
            return sum(any(fits(share, mine) for share in one) for mine in own), sum(map(fits, one, own))

        expected = max(tried, key=lambda one: (*fitting(one), one == self._turn))
        places = list(expected)
        wrong = [rank for rank in range(ranks) if not fits(expected[rank], own[rank])]
        if wrong:
            known = [(rank, other) for rank in wrong for other in range(ranks) if fits(expected[other], own[rank])]
            if len(known) == len(wrong) and sorted(other for _, other in known) == sorted(wrong):
                # Nothing is lost: other ranks have these tokens, in a turn of their own.
                for rank, other in known:
                    places[rank] = expected[other]
            else:
                self._astray = self._off(expected, wrong, ids_BS, own)
        self._cut = 1, tuple(places)

    def _cut_samples_and_tokens(self, ids: Sequence[TensorRef], whole: TensorRef) -> None:
        """Where groups of ranks have samples of their own, and a rank of a group some tokens of each of these."""
        ids_BS, own = _numbers(whole), [_numbers(one) for one in ids]
        samples, length = own[0].shape
        if not samples or not length or samples * length * len(own) > ids_BS.size or ids_BS.shape[1] % length:
            return
        for turn in turns(ids_BS.shape[1] // length, length):
            left: dict[tuple[int, bytes], list[int]] = defaultdict(list)
            for number, share_ in enumerate(turn):
                for row, mine in enumerate(_taken(ids_BS, share_)):
                    left[number, mine.tobytes()].append(row)
            places = [
                next(
                    (number for number in range(len(turn)) if all(left.get((number, row.tobytes())) for row in mine)),
                    -1,
                )
                for mine in own
            ]
            if -1 in places:
                continue
            rows = [
                [of.pop(0) if (of := left[number, row.tobytes()]) else -1 for row in mine]
                for number, mine in zip(places, own, strict=True)
            ]
            if any(-1 in mine for mine in rows):
                continue
            if any(left.values()):
                self._note_same_samples(samples)
                return
            self._cut = 0, tuple(tuple(_runs(mine)) for mine in rows)
            self._cut_too = 1, tuple(turn[number] for number in places)
            return

    def _cut_samples(self, ids: Sequence[TensorRef], whole: TensorRef) -> None:
        """Where every sample of the one process is on one rank: which rows are whose."""
        rows: dict[bytes, list[int]] = defaultdict(list)
        for number, row in enumerate(_numbers(whole)):
            rows[row.tobytes()].append(number)
        found = [[rows[row.tobytes()].pop(0) if rows[row.tobytes()] else -1 for row in _numbers(one)] for one in ids]
        if any(-1 in mine for mine in found) or any(rows.values()):
            self._note_samples_twice([_numbers(one) for one in ids], _numbers(whole))
            return
        self._cut = 0, tuple(tuple(_runs(mine)) for mine in found)
        self._are_unlike = len(rows) == whole.shape[0]

    def _note_samples_twice(self, own: Sequence[np.ndarray[Any, Any]], whole: np.ndarray[Any, Any]) -> None:
        """Say where all groups have samples of the one process, as many as it has, some of them twice and so others on
        no rank. More samples than it has may well be twice, to make the ranks' shares even.
        """
        numbers: dict[bytes, int] = {row.tobytes(): number for number, row in enumerate(whole)}
        held = [[numbers.get(row.tobytes(), -1) for row in mine] for mine in own]
        groups = self._groups
        if sum(map(len, held)) != len(whole) and sum(map(len, groups)) * len(own[0]) == len(whole):
            # Ranks whose samples are all another's are no group with it where all ranks' are just as many as there are.
            groups = [[number] for number in range(sum(map(len, groups)))]
            of = {number: mine for members, mine in zip(self._groups, held, strict=True) for number in members}
            held = [of[number] for (number,) in groups]
        if len(numbers) < len(whole) or any(-1 in mine for mine in held) or sum(map(len, held)) != len(whole):
            return
        times = Counter(number for mine in held for number in mine)
        twice, lost = sorted(one for one in times if times[one] > 1), sorted(set(range(len(whole))) - set(times))
        ranks = list(self._ranks)
        those = [
            ranks[number] for members, mine in zip(groups, held, strict=True) if set(mine) & set(twice)
            for number in members
        ]  # fmt: skip
        verb = "is" if len(twice) == 1 else "are"
        self._astray = Astray(
            "same samples", tuple(sorted(those)),
            f"sample{'s' * (len(twice) > 1)} {named(twice)} of the other run {verb} on ranks {named(sorted(those))} of "
            f"{self._many} more than once, and sample{'s' * (len(lost) > 1)} {named(lost)} on none of its ranks",
        )  # fmt: skip

    def _off(
        self,
        expected: tuple[tuple[Stretch, ...], ...],
        wrong: list[int],
        ids_BS: np.ndarray[Any, Any],
        own: list[np.ndarray[Any, Any]],
    ) -> Astray:
        numbers = list(self._ranks)
        said = []
        if all(
            len(expected[rank]) > 1 and np.array_equal(_taken(ids_BS, expected[rank][::-1]), own[rank])
            for rank in wrong
        ):
            those = named(numbers[rank] for rank in wrong)
            return Astray(
                "order", tuple(numbers[rank] for rank in wrong),
                f"of rank {those} of {self._many} the two chunks of the sequence (zigzag) stand in the other order: "
                "the late one is first",
            )  # fmt: skip
        for rank in wrong:
            before = 0
            for at, long in expected[rank]:
                mine = own[rank][:, before : before + long]
                before += long
                found = [
                    start for start in range(ids_BS.shape[1] - long + 1)
                    if np.array_equal(ids_BS[:, start : start + long], mine)
                ]  # fmt: skip
                if at in found:
                    continue
                nearest = min(found, key=lambda start: abs(start - at)) if found else None
                held = f"tokens {nearest} to {nearest + long - 1}" if nearest is not None else "tokens of no one place"
                off = "" if nearest is None else f" ({abs(nearest - at)} too {'early' if nearest < at else 'late'})"
                said.append(f"rank {numbers[rank]} holds {held} where {at} to {at + long - 1} are left for it{off}")
        return Astray(
            "boundary", tuple(numbers[rank] for rank in wrong),
            f"the sequence is cut at other places than its {len(numbers)} ranks make of it in {self._many}: "
            f"{'; '.join(said)}",
        )  # fmt: skip

    def _pair(self, key: RecordKey, whole: Side, ranks: dict[int, Side]) -> MicroBatchPair:
        together = Together(self._many, tuple(ranks), self.shares, {}, self._astray, self.key.step, len(self._groups))
        if self.shares == "samples":
            rows = self._cut is not None and self._cut[0] == 0
            together.samples = len(set(self._cut[1])) if rows and self._cut is not None else len(self._groups)
            if rows and self._cut is not None and self._astray is None and self._are_unlike:
                together.whose = self._cut[1]
        together.cuts = tuple(cut for cut in (self._cut, self._cut_too) if cut and len(cut[1]) == len(self._ranks))
        own = {rank: side.find("policy_logprobs") for rank, side in ranks.items()}
        together.micros = {rank: side.micros for rank, side in ranks.items() if side.micros}
        together.logprobs = {rank: ref for rank, ref in own.items() if ref is not None}
        side = self._side(whole, ranks, together)
        if all(one is not None for one in self._ids):
            together.ids = tuple(one for one in self._ids if one is not None)
        pair = MicroBatchPair(key, *((side, whole) if self._many == "a" else (whole, side)))
        pair.together = together
        for (past, words, rank), names in together.padded.items():
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            pair.notes.append(
                f"{pair.where}: the last {past} of rank {rank}'s words in {', '.join(names[:3])}{more} are past the "
                f"{words} of the other run (a padded vocabulary), and are not compared"
            )
        if together.handed:
            said = ", ".join(f"{name} of rank {rank}" for rank, name in together.handed[:4])
            pair.notes.append(f"{pair.where}: {said}: handed over by the stage before, and compared as its output")
        pair.notes += [f"{pair.where}: {said}" for said in together.staged]
        return pair

    def _side(self, whole: Side, ranks: dict[int, Side], together: Together) -> Side:
        """One side of all the ranks' tensors, in the turn of the first rank that has each."""
        by_name: dict[tuple[str, str], dict[int, tuple[Record, TensorRef]]] = {}
        is_staged = any(ids_of(side) is None for side in ranks.values()) and any(
            ids_of(side) for side in ranks.values()
        )
        passed = handed_over(ranks, whole)
        together.staged = passed.sentences
        for rank, side in ranks.items():
            for own, (record, ref) in side.tensors.items():
                if (rank, own) in passed.left_out:
                    continue
                key = passed.moved.get((rank, own), own)
                if is_staged and ids_of(side) is None and key[1] == "batch_inputs" and key not in whole.tensors:
                    together.handed.append((rank, key[0]))  # by the stage before, in whose outputs it is
                    continue
                by_name.setdefault(key, {})[rank] = (record, ref if key is own else _called(ref, key, whole))
        in_another_order: list[str] = []
        made: dict[tuple[str, str], list[TensorRef]] = defaultdict(list)
        first: dict[tuple[str, str], Record] = {}
        for (name, stage), by_rank in by_name.items():
            record = next(iter(by_rank.values()))[0]
            facing = whole.tensors.get((name, stage)) or next(iter(whole.named(name)), None)
            if facing is None and name == "attention_mask" and self.shares == "samples" and self._whole_ids is not None:
                facing = record, self._whole_ids  # the mask lies as the ids do that it is of
            by_ranks = {rank: ref for rank, (_, ref) in by_rank.items()}
            try:
                held = self._as_stated(by_ranks, facing and facing[1]) or self._laid(
                    by_ranks, facing and facing[1], stage
                )
            except DumpError as error:
                together.problems.append(_contradicted(error, name, record, by_ranks))
                held = self._held(by_ranks, facing and facing[1], stage)
            for rank, kept in zip(held.ranks, held.parts, strict=True):
                ref = by_ranks[rank]
                if held.axis is None or facing is None or self._are_of_tokens(held.axis, facing[1]):
                    continue
                if 0 < kept.shape[held.axis] < ref.shape[held.axis]:
                    past = ref.shape[held.axis] - kept.shape[held.axis], facing[1].shape[held.axis], rank
                    together.padded.setdefault(past, []).append(name)
            tokens = self._whole_ids.numel if self._whole_ids is not None else 0
            if facing is not None and (ordered := _rows_of_expert(name, held, facing[1], whole, tokens)) is not None:
                held = ordered
                in_another_order.append(name)
            ref = standing_for(held)
            if facing is not None and (why := self._why_lost(held, stage, facing[1], ref)) is not None:
                # The first slice would stand for what nobody has whole.
                ref = ref.with_(shape=facing[1].shape, source=Unreadable(why), digest=None, copies=())
                self._unread.add(id(held))
            together.held[id(ref)] = held
            place = stage, str(record.key.role)
            first.setdefault(place, record)
            made[place].append(ref)
        if in_another_order:
            more = f" and {len(in_another_order) - 1} more" if len(in_another_order) > 1 else ""
            together.staged.append(
                f"the rows of {in_another_order[0]}{more} stand in another order in {together.which}, and are paired "
                "by their values: an expert's tokens have no order of their own"
            )
        records = []
        for place, refs in made.items():
            one = first[place]
            records.append(Record(one.key, one.path, lambda refs=refs: refs))  # type: ignore[misc]
        found = Side(records)
        found.load()
        for side in ranks.values():
            found.problems += [problem for problem in side.problems if problem not in found.problems]
            found.unreadable += side.unreadable
        return found

    def _why_lost(self, held: HeldByRanks, stage: str, whole: TensorRef, laid: TensorRef) -> str | None:
        """Why the ranks' tensor cannot be made as large as the other run's: a rank whose part cannot be read."""
        lost = [
            (rank, getattr(part.source, "why", "")) for rank, part in zip(held.ranks, held.parts, strict=True)
            if not part.is_readable and not (part.digest and laid.shape == whole.shape)
        ]  # fmt: skip
        if len(lost) == len(held.parts):
            return None  # all are: so is the first, which stands for them
        if not lost and laid.shape != whole.shape:
            lost = [
                (rank, problem) for rank, side in self._ranks.items()
                if rank not in held.ranks and (problem := _lost(side, stage)) is not None
            ]  # fmt: skip
        if not lost:
            return None
        rank, why = lost[0]
        return f"what rank {rank} of {self._many} holds of it cannot be read: {why}"

    def _as_stated(self, refs: dict[int, TensorRef], whole: TensorRef | None) -> HeldByRanks | None:
        """What each rank has of a tensor, by what the dump says of its dimensions; None where it says nothing of them.

        Raises:
            DumpError: what it says cannot be, or is not so.
        """
        said = [ref.stated for ref in refs.values() if ref.stated is not None]
        if whole is None or len(refs) < 2 or len(said) < len(refs):
            return None
        if len({one.dims for one in said}) > 1:
            texts = " and ".join(sorted({repr(one.dims) for one in said})[:2])
            raise DumpError(f"ranks say different dims: {texts}", expected="one statement of all ranks", found=texts)
        places = [{axis: (number, many) for axis, number, many in one.axes} for one in said]
        held = laid_as_stated(refs, whole.shape, parsed(said[0].dims), places, self._sequences())
        cut = next(self._cuts_of(refs), None)
        if cut is None or len(cut[1]) != len(held.ranks):
            return held
        if held.axis != cut[0]:
            return None  # which samples or tokens are whose the ids say; the rest is told by shapes
        if held.stretches != cut[1]:
            raise DumpError(
                f"dims {said[0].dims!r} say another turn of tokens or samples than the ranks' token ids",
                expected=f"{held.stretches[0]} (from, how many) on rank {held.ranks[0]}", found=f"{cut[1][0]}",
            )  # fmt: skip
        return held

    def _sequences(self) -> tuple[int, ...]:
        """The lengths of the sequences that lie end to end in the one process's tokens, as a rank's bounds say them."""
        for side in (self._whole, *self._ranks.values()):
            for name in ("cu_seqlens", "cu_seqlens_q"):
                if (ref := side.find(name)) is not None and ref.dtype.startswith("int") and len(ref.shape) == 1:
                    return tuple(np.diff(pages.array(ref).astype(np.int64)).tolist())
            if (ref := side.find("seq_lens")) is not None and ref.dtype.startswith("int") and len(ref.shape) == 1:
                return tuple(pages.array(ref).astype(np.int64).tolist())
        return ()

    def _held(self, refs: dict[int, TensorRef], whole: TensorRef | None, stage: str) -> HeldByRanks:
        """What each rank has of a tensor, by its shape beside the other run's."""
        called = whole.name if whole is not None else ""
        if called == "forward.output" and refs:
            # What a model returns are its logits where its head put out as much.
            shape = next(iter(refs.values())).shape
            heads = (one for _, one in self._ranks[min(refs)].tensors.values() if one.shape == shape)
            called = next((one.name for one in heads if one.name != called and makes_words(one.name)), called)
        ranks, parts = tuple(refs), tuple(refs.values())
        alike = HeldByRanks(ranks, parts)
        if (
            whole is None
            or len(parts) < 2
            or whole.is_text
            or any(ref.rows is not None or ref.is_text for ref in parts)
        ):
            return alike
        shapes = {ref.shape for ref in parts}
        if shapes == {whole.shape} or any(len(shape) != len(whole.shape) for shape in shapes):
            return alike
        axes = [
            axis for axis in range(len(whole.shape))
            if all(shape[:axis] + shape[axis + 1 :] == whole.shape[:axis] + whole.shape[axis + 1 :] for shape in shapes)
        ]  # fmt: skip
        if len(axes) != 1:
            return self._of_groups(refs, whole) or self._in_a_grid(refs, whole, stage) or alike
        (axis,) = axes
        total, lengths = whole.shape[axis], [ref.shape[axis] for ref in parts]
        if self._padded is not None and total == self._padded[0] and stage not in OF_ALL_SAMPLES:
            total = self._padded[1]
            if set(lengths) == {total}:
                return alike
        for cut in self._cuts_of(refs):
            # Heads may stand before the tokens, and tokens before samples; what is of all samples has no axis of them.
            if stage in OF_ALL_SAMPLES and (axis != cut[0] or _is_of_a_weight(whole.name)):
                continue
            if (stretches := _along_cut(cut[1], total, lengths, is_of_tokens=cut[0] == 1)) is not None:
                return HeldByRanks(ranks, parts, axis, stretches)
        if axis == 0 and stage not in OF_ALL_SAMPLES:
            # Either way of the samples' tokens in one row, as the values tell.
            either = (HeldByRanks(ranks, parts, axis, one) for one in self._in_one_row(refs, total, lengths))
            if (nearest := min(either, key=lambda held: _apart(held, whole), default=None)) is not None:
                return nearest
        if self.shares == "all" and stage not in OF_ALL_SAMPLES and self._are_of_tokens(axis, whole):
            long = sum(lengths)
            if len(set(lengths)) == 1 and total < long < total + lengths[0]:
                # Sequence parallelism, of tokens whose padding was taken off.
                ends = [min(at * lengths[0], total) for at in range(len(lengths) + 1)]
                own = tuple(((at, end - at),) for at, end in pairwise(ends))
                return _held_along(ranks, parts, axis, own)
        tried = [*self._within_groups(refs, lengths, total, called)]
        if (in_turn := _one_after_the_other(lengths, total)) is not None:
            tried.append(in_turn)
        if len(set(lengths)) == 1:
            count = len(lengths)
            tried += among([range(count)], count, lengths[0], total, called)
            if stage in OF_ALL_SAMPLES:
                # Groups as ranks are numbered, whatever tokens they were given.
                for size in (one for one in range(2, count) if count % one == 0 and one * lengths[0] >= total):
                    apart = count // size
                    tried += among(
                        [range(at, at + size) for at in range(0, count, size)], count, lengths[0], total, called
                    )
                    tried += among([range(at, count, apart) for at in range(apart)], count, lengths[0], total, called)
            if (turned := self._turned(refs, whole, stage)) is not None:
                return turned
        laid = [_held_along(ranks, parts, axis, stretches) for stretches in dict.fromkeys(tried)]
        if len(laid) < 2:
            return (*laid, alike)[0]
        # Copies are equal, so that of two ways to number them the ranks' own values tell which it is; where none are,
        # what is nearer to the other run's.
        told = self._copies_of_like(whole.name, refs, [one.stretches for one in laid])
        return max(laid, key=lambda held: (told[held.stretches] or _equal_copies(held), -_apart(held, whole)))

    def _turned(self, refs: dict[int, TensorRef], whole: TensorRef, stage: str) -> HeldByRanks | None:
        """Slices of a weight that are cut once more among ranks of another axis (those of tensor parallelism by a
        sharded optimizer), so that the ranks with parts of one slice do not follow each other. None where those in the
        turn of the ranks are not far off.
        """
        if stage not in OF_ALL_SAMPLES:
            return None
        return self._nearest_of_like(refs, whole) if not self._is_in_turn(refs, whole) else None

    def _in_a_grid(self, refs: dict[int, TensorRef], whole: TensorRef, stage: str) -> HeldByRanks | None:
        """Slices of a weight along two axes, each by ranks of another axis; None where none are as large."""
        return self._nearest_of_like(refs, whole) if stage in OF_ALL_SAMPLES else None

    def _nearest_of_like(self, refs: dict[int, TensorRef], whole: TensorRef) -> HeldByRanks | None:
        """A weight as it lies in the way that most of its like do; None where no way makes it."""
        turn = self._turn_of_like(refs, whole)
        return None if turn is None else self._ways(refs, whole.shape)[turn]

    def _ways(self, refs: Mapping[int, TensorRef], shape: tuple[int, ...]) -> dict[tuple[int, ...], HeldByRanks]:
        every = list(self._ranks)
        return ways(refs, shape, [[every[number] for number in members] for members in self._groups])

    def _is_in_turn(self, refs: dict[int, TensorRef], whole: TensorRef) -> bool:
        """Whether the first way in which slices may lie is that of most of the weight's like, or there is none."""
        turn = self._turn_of_like(refs, whole)
        return turn is None or turn == next(iter(self._ways(refs, whole.shape)))

    def _turn_of_like(self, refs: dict[int, TensorRef], whole: TensorRef) -> tuple[int, ...] | None:
        """The way in which slices lie that is nearest by far to the other run's of most of a weight's like (those of
        its name in other layers, and their gradients), the first way where none is: one that is exchanged among ranks
        is off. None where no way makes it.
        """
        every = list(self._ways(refs, whole.shape))
        if not every:
            return None
        pattern = without_numbers(whole.name)
        known = self._turns.get((pattern, len(refs)))
        if known not in every:
            nearest = Counter[tuple[int, ...]]()
            shape, like = next(iter(refs.values())).shape, 0
            for place, (_, one) in self._whole.tensors.items():
                if place[1] not in OF_ALL_SAMPLES or one.shape != whole.shape or not one.is_readable:
                    continue
                if without_numbers(place[0]) != pattern:
                    continue
                own = {rank: self._ranks[rank].tensors[place][1] for rank in refs if place in self._ranks[rank].tensors}
                if len(own) < len(refs) or any(ref.shape != shape or not ref.is_readable for ref in own.values()):
                    continue
                off = [_apart(held, one) for held in self._ways(own, whole.shape).values()]
                nearest[every[off.index(min(off))] if min(off) < _FAR_NEARER * off[0] else every[0]] += 1
                like += 1
                if like == _MOST_LIKE:
                    break
            known = self._turns[pattern, len(refs)] = max(every, key=lambda turn: nearest[turn])  # the first of several
        return known

    def _copies_of_like(
        self, name: str, refs: dict[int, TensorRef], tried: list[tuple[tuple[Stretch, ...], ...]]
    ) -> dict[tuple[tuple[Stretch, ...], ...], int]:
        """Of each way in which ranks may share slices of a weight, how many copies are equal in it, over the weights of
        that name of some layers and their gradients: they are all shared alike, whatever is wrong with one. Nothing of
        what is no weight.
        """
        own = name.removeprefix("grad.").removeprefix("param.")
        if own == name:
            return Counter()
        pattern = _NUMBER.sub("#", own)
        known = self._copies.get(pattern)
        if known is None or known.keys() != set(tried):
            known = self._copies[pattern] = Counter(dict.fromkeys(tried, 0))
            first = self._ranks[min(refs)]
            like = [
                place for place in first.tensors
                if place[0].startswith(("grad.", "param.")) and _NUMBER.sub("#", place[0].partition(".")[2]) == pattern
            ]  # fmt: skip
            shape = next(iter(refs.values())).shape
            for place in like[:_MOST_LIKE]:
                parts = [self._ranks[rank].tensors[place][1] for rank in refs if place in self._ranks[rank].tensors]
                if len(parts) == len(refs) and all(ref.shape == shape for ref in parts):
                    for stretches in tried:
                        known[stretches] += _equal_copies(HeldByRanks(tuple(refs), tuple(parts), 0, stretches))
        return known

    def _laid(self, refs: dict[int, TensorRef], whole: TensorRef | None, stage: str) -> HeldByRanks:
        """What each rank has of a tensor, by its shape; and what is of all tokens though a rank computes some (keys
        gathered from the ranks of context parallelism) as it stands, or as the tokens follow each other where it stands
        in the turn of the ranks: whichever is nearer to the other run's, by far.
        """
        held = self._held(refs, whole, stage)
        cut = next((one for one in self._cuts_of(refs) if one[0] == 1), None)
        if cut is None or whole is None or whole.is_text or len(cut[1]) != len(refs) or stage in OF_ALL_SAMPLES:
            return held
        turn = _in_ranks_turn(cut[1])
        every = (whole, *refs.values())
        for axis in _axes_of(turn, every):
            laid = {rank: _as_tokens_follow(ref, axis, turn) for rank, ref in refs.items()}
            again = self._held(laid, whole, stage)
            if _off(again, whole) < _FAR_NEARER * _off(held, whole):
                return again
        return held

    def lay_gathered(self, cut: tuple[tuple[Stretch, ...], ...]) -> None:
        """Lay what the ranks of the other run gathered in their turn as the tokens follow each other, where that is
        nearer to what these ranks hold, by far. cut: of every rank of the other run, its tokens.
        """
        turn = _in_ranks_turn(cut)
        for pair in self.made:
            if pair.together is None:
                continue
            own, other = (pair.a, pair.b) if self._many == "a" else (pair.b, pair.a)
            for place, (record, whole) in list(other.tensors.items()):
                held = pair.together.held.get(id(own.tensors[place][1])) if place in own.tensors else None
                if held is None or place[1] in OF_ALL_SAMPLES or whole.is_text:
                    continue
                for axis in _axes_of(turn, (whole,)):
                    laid = _as_tokens_follow(whole, axis, turn)
                    if standing_for(held).shape == laid.shape and (
                        _off(held, laid) < _FAR_NEARER * _off(held, whole)
                    ):  # fmt: skip
                        copies = tuple(_as_tokens_follow(ref, axis, turn) for ref in whole.copies)
                        other.tensors[place] = record, laid.with_(copies=copies)
                        break

    def _in_one_row(
        self, refs: dict[int, TensorRef], total: int, lengths: list[int]
    ) -> Iterator[tuple[tuple[Stretch, ...], ...]]:
        """Where ranks' tokens stand among those of all samples in one row (what a router is given), in which are one
        sample after the other, or one token of all samples after the other (Megatron-LM); nothing where they are as
        many rows of something else.
        """
        ids = self._whole_ids.shape if self._whole_ids is not None else ()
        cuts = dict(self._cuts_of(refs))
        if len(ids) != 2 or ids[0] < 2 or total != ids[0] * ids[1] or not cuts:
            return
        samples, tokens = (cuts.get(axis, (((0, ids[axis]),),) * len(refs)) for axis in (0, 1))
        own = list(zip(samples, tokens, strict=True))
        if lengths != [sum(n for _, n in rows) * sum(long for _, long in mine) for rows, mine in own]:
            return
        yield tuple(
            tuple(
                (sample * ids[1] + at, long) for start, n in rows for sample in range(start, start + n)
                for at, long in mine
            )
            for rows, mine in own
        )  # fmt: skip
        if 0 not in cuts:
            yield tuple(tuple((at * ids[0], long * ids[0]) for at, long in mine) for mine in tokens)
            return
        yield tuple(
            tuple(
                (token * ids[0] + start, n) for at, long in mine for token in range(at, at + long) for start, n in rows
            )
            for rows, mine in own
        )  # fmt: skip

    def _are_of_tokens(self, axis: int, whole: TensorRef) -> bool:
        """Whether an axis of what one process has is that of a sequence's tokens."""
        ids = self._whole_ids.shape if self._whole_ids is not None else ()
        return axis < 2 < len(whole.shape) and len(ids) == 2 and whole.shape[axis] == ids[1] != whole.shape[1 - axis]

    def _cuts_of(self, refs: dict[int, TensorRef]) -> Iterator[tuple[int, tuple[tuple[Stretch, ...], ...]]]:
        """The axes of samples and tokens that are cut, with the stretches of those ranks that have a tensor."""
        for cut in (self._cut, self._cut_too):
            if cut is not None and len(cut[1]) == len(self._ranks):
                yield cut[0], tuple(mine for rank, mine in zip(self._ranks, cut[1], strict=True) if rank in refs)

    def _within_groups(
        self, refs: dict[int, TensorRef], lengths: list[int], total: int, name: str
    ) -> Iterator[tuple[tuple[Stretch, ...], ...]]:
        """Where ranks of the same tokens, wherever they stand among all, hold a slice each: which."""
        have = {number: at for at, number in enumerate(n for n, rank in enumerate(self._ranks) if rank in refs)}
        groups = [[have[number] for number in members if number in have] for members in self._groups]
        groups = [members for members in groups if members]
        sizes = {len(members) for members in groups}
        if len(set(lengths)) > 1 or sum(map(len, groups)) != len(lengths) or len(sizes) > 1:
            return
        if min(sizes) > 1 and min(sizes) * lengths[0] >= total:
            yield from among(groups, len(lengths), lengths[0], total, name)

    def _of_groups(self, refs: dict[int, TensorRef], whole: TensorRef) -> HeldByRanks | None:
        """Of a tensor that is cut along several axes (by samples, by tokens, within a group of the same tokens): what
        each of the outermost groups holds, laid together, under the name of its first rank.
        """
        shapes = [ref.shape for ref in refs.values()]
        axes = [axis for axis in range(len(whole.shape)) if any(shape[axis] != whole.shape[axis] for shape in shapes)]
        known: list[tuple[int, tuple[tuple[Stretch, ...], ...]]] = []
        for cut in self._cuts_of(refs):
            lengths = [sum(long for _, long in stretches) for stretches in cut[1]]
            at = [axis for axis in axes if axis not in dict(known) and [shape[axis] for shape in shapes] == lengths]
            if at:
                known.append((cut[0] if cut[0] in at else at[0], cut[1]))
        rest = [axis for axis in axes if axis not in dict(known)]
        if not known or len(rest) > 1 or not all(ref.is_readable for ref in refs.values()):
            return None
        cells: dict[tuple[tuple[Stretch, ...], ...], list[tuple[int, TensorRef]]] = defaultdict(list)
        for number, part in enumerate(refs.items()):
            cells[tuple(stretches[number] for _, stretches in known)].append(part)
        if rest:
            laid = {place: _side_by_side(members, rest[0], whole.shape[rest[0]]) for place, members in cells.items()}
            if not all(laid.values()):
                return None
            cells = laid  # type: ignore[assignment]
        for axis, _ in reversed(known[1:]):
            inner, cells = cells, defaultdict(list)
            for place in dict.fromkeys(place[:-1] for place in inner):
                mine = [(one[-1], members) for one, members in inner.items() if one[:-1] == place]
                if len({len(members) for _, members in mine}) > 1:
                    return None
                for copies in zip(*(members for _, members in mine), strict=True):
                    ranks, parts = zip(*copies, strict=True)
                    held = HeldByRanks(ranks, parts, axis, tuple(stretches for stretches, _ in mine))
                    cells[place].append((ranks[0], standing_for(held)))
        axis = known[0][0]
        ordered = [(place[0], part) for place, members in cells.items() for part in members]
        held = HeldByRanks(
            tuple(rank for _, (rank, _) in ordered), tuple(ref for _, (_, ref) in ordered), axis,
            tuple(place for place, _ in ordered),
        )  # fmt: skip
        return held if standing_for(held).shape == whole.shape else None


def without_numbers(name: str) -> str:
    """A weight's name, or its gradient's, without those of layers."""
    return _NUMBER.sub("#", name.removeprefix("grad.").removeprefix("param."))


def ways(
    refs: Mapping[int, TensorRef], shape: tuple[int, ...], alike: Sequence[Sequence[int]]
) -> dict[tuple[int, ...], HeldByRanks]:
    """The ways in which slices of one shape that ranks have may lie in a whole of this shape: along one axis, in the
    turn of the ranks or those next to each other apart (cut by ranks of two axes); along two axes, whichever of these
    and of copies ranks count first. None where they make no such whole.

    alike: the ranks that have the same tokens. Where all have, or none, they are of one axis (but of experts, of three
    axes, which ranks with tokens of their own share): slices in another turn were exchanged.
    """
    parts = tuple(refs.values())
    own = parts[0].shape
    if len({ref.shape for ref in parts}) > 1 or len(own) != len(shape) or not all(own):
        return {}
    if any(long % short for long, short in zip(shape, own, strict=True)):
        return {}
    cut = [(axis, long // short) for axis, (long, short) in enumerate(zip(shape, own, strict=True)) if long != short]
    if not cut:
        return {(): HeldByRanks(tuple(refs), parts)}
    size = prod(many for _, many in cut)
    if len(cut) > 2 or len(refs) % size or not all(ref.is_readable for ref in parts):
        return {}
    together = {sum(rank in refs for rank in members) for members in alike} - {0}
    many = together.pop() if len(together) == 1 else 1
    if len(cut) == 2:
        copies, rows, columns = len(refs) // size, cut[0][1], cut[1][1]
        is_of_two = many < len(refs) and many in (rows, columns, copies * rows, copies * columns)
        if not is_of_two and len(own) < 3:
            return {}
        return {turn: _in_cells(refs, shape, cut, turn) for turn in permutations(range(3))}
    ((axis, _),) = cut
    found = {}
    for inner in dict.fromkeys((1, *((many, size // many) if 1 < many < size and size % many == 0 else ()))):
        turn = tuple(at * inner + number for number in range(inner) for at in range(size // inner))
        places = tuple(((turn.index(number % size) * own[axis], own[axis]),) for number in range(len(refs)))
        found[turn] = _held_along(tuple(refs), parts, axis, places)
    return found


def _in_cells(
    refs: Mapping[int, TensorRef], shape: tuple[int, ...], cut: list[tuple[int, int]], turn: tuple[int, ...]
) -> HeldByRanks:
    """Slices along two axes. turn: which of copies (0) and of the two axes (1, 2) ranks count first."""
    (outer, rows), (inner, columns) = cut
    sizes = (len(refs) // (rows * columns), rows, columns)
    cells: dict[tuple[int, int], list[tuple[int, TensorRef]]] = defaultdict(list)
    for number, part in enumerate(refs.items()):
        at, place = number, dict[int, int]()
        for digit in reversed(turn):
            at, place[digit] = divmod(at, sizes[digit])
        cells[place[0], place[1]].append(part)
    made, long = [], shape[outer] // rows
    for (_, row), members in cells.items():
        beside = HeldByRanks(
            tuple(rank for rank, _ in members), tuple(ref for _, ref in members), inner,
            tuple(((at * ref.shape[inner], ref.shape[inner]),) for at, (_, ref) in enumerate(members)),
        )  # fmt: skip
        made.append((members[0][0], standing_for(beside), ((row * long, long),)))
    ranks, refs_, stretches = zip(*made, strict=True)
    return HeldByRanks(ranks, refs_, outer, stretches)


def _in_ranks_turn(cut: tuple[tuple[Stretch, ...], ...]) -> tuple[Stretch, ...]:
    """The tokens of a sequence as its ranks have them, one rank after the other."""
    return tuple(stretch for own in dict.fromkeys(cut) for stretch in own)


def _axes_of(turn: tuple[Stretch, ...], every: Sequence[TensorRef]) -> Iterator[int]:
    """The axes along which tensors may have all tokens in this turn; none where it is that of the tokens itself."""
    total, in_order = sum(long for _, long in turn), sorted(turn)
    if turn == tuple(in_order) or any(at != sum(long for start, long in turn if start < at) for at, _ in in_order):
        return
    if any(ref.rows is not None or not ref.is_readable or ref.numel > _MOST for ref in every):
        return
    for axis in range(min(3, len(every[0].shape))):
        if all(len(ref.shape) == len(every[0].shape) and ref.shape[axis] == total for ref in every):
            yield axis


def _as_tokens_follow(ref: TensorRef, axis: int, turn: tuple[Stretch, ...]) -> TensorRef:
    """What has all tokens in the turn of the ranks, as they follow each other."""
    return standing_for(HeldByRanks((0,), (ref,), axis, (turn,)))


def _off(held: HeldByRanks, whole: TensorRef) -> float:
    """How far what ranks hold is from where it stands, squared; infinite where it is of no such shape."""
    if held.is_cut:
        return _apart(held, whole)
    if any(ref.shape != whole.shape for ref in held.parts):
        return float("inf")
    values = pages.array(whole).astype(np.float64)
    return float(sum(np.square(pages.array(ref).astype(np.float64) - values).sum() for ref in held.parts))


def _is_of_a_weight(name: str) -> bool:
    """A weight, its gradient or moment, and not what a step's tensors of tokens have for theirs (`grad.logits`)."""
    own = name.removeprefix("grad.").removeprefix("param.")
    return "." in own and not own.endswith("logits") and naming.meaning(name).region == "all"


def _held_along(
    ranks: tuple[int, ...], parts: tuple[TensorRef, ...], axis: int, stretches: tuple[tuple[Stretch, ...], ...]
) -> HeldByRanks:
    """Parts that lie so; what a part has past its stretch (a padded vocabulary) is no part of the whole."""
    long = [sum(length for _, length in own) for own in stretches]
    kept = tuple(
        ref if ref.shape[axis] == length or not ref.is_readable else narrowed(ref, axis, 0, length)
        for ref, length in zip(parts, long, strict=True)
    )
    return HeldByRanks(ranks, kept, axis, stretches)


def _apart(held: HeldByRanks, whole: TensorRef) -> float:
    """How far ranks' slices are from where they are said to lie, squared, or what the ranks with one slice make of it
    together (of gradients that were not summed over them, the mean or the sum); 0 where that cannot be read.
    """
    assert held.axis is not None
    if not whole.is_readable or not all(ref.is_readable for ref in held.parts):
        return 0.0
    values, each = pages.array(whole), 0.0
    laid: dict[tuple[Stretch, ...], list[np.ndarray[Any, Any]]] = defaultdict(list)
    before = (slice(None),) * held.axis
    for ref, stretches in zip(held.parts, held.stretches, strict=True):
        places = [(*before, slice(at, at + long)) for at, long in stretches]
        block = np.concatenate([values[place] for place in places], held.axis)
        own, block = pages.array(ref).astype(np.float64), block.astype(np.float64)
        # What is not finite in both (an expert that is masked out) is off by nothing.
        own[~np.isfinite(own)], block[~np.isfinite(block)] = 0.0, 0.0
        off = own - block
        each += float(np.square(off).sum())
        known = laid[stretches]
        known[:] = [known[0] + off, known[1]] if known else [off, block]
    copies = len(held.parts) / len(laid)
    mean = sum(float(np.square(off).sum()) for off, _ in laid.values()) / copies
    total = sum(float(np.square(off + (copies - 1) * block).sum()) for off, block in laid.values()) * copies
    return min(each, mean, total)


def _along_cut(
    cut: tuple[tuple[Stretch, ...], ...], total: int, lengths: list[int], *, is_of_tokens: bool
) -> tuple[tuple[Stretch, ...], ...] | None:
    """Which parts of an axis so long the ranks hold, where it is that of the samples or tokens of which each has its
    stretches, or ranks with the same tokens have a share of these each (sequence parallelism in context parallelism);
    None where the lengths say that it is neither.
    """
    own = [sum(long for _, long in stretches) for stretches in cut]
    if len(lengths) != len(cut) or total != sum(sum(long for _, long in stretches) for stretches in set(cut)):
        return None
    if lengths == own:
        return cut
    many = Counter(cut)
    if not is_of_tokens or any(
        length * many[stretches] != long for length, long, stretches in zip(lengths, own, cut, strict=True)
    ):
        return None
    found, before = [], Counter[tuple[Stretch, ...]]()
    for length, stretches in zip(lengths, cut, strict=True):
        found.append(tuple(within(stretches, before[stretches] * length, length)))
        before[stretches] += 1
    return tuple(found)


def _one_after_the_other(lengths: list[int], total: int) -> tuple[tuple[Stretch, ...], ...] | None:
    """Slices in the turn of the ranks; where these are more than slices, those of one copy follow each other."""
    if not total or not any(lengths):
        return None  # no row here, or none there
    if sum(lengths) != total and (len(set(lengths)) > 1 or total % lengths[0] or sum(lengths) % total):
        return None
    starts: list[tuple[Stretch, ...]] = []
    at = 0
    for length in lengths:
        starts.append(((at % total, length),))
        at += length
    return tuple(starts)


def _equal_copies(held: HeldByRanks) -> int:
    """Of how many ranks the slice is, value by value, that of the first rank said to have the same."""
    first: dict[tuple[Stretch, ...], TensorRef] = {}
    readable = [(stretches, ref) for stretches, ref in zip(held.stretches, held.parts, strict=True) if ref.is_readable]
    return sum(
        (one := first.setdefault(stretches, ref)) is not ref and same_values(one, ref) for stretches, ref in readable
    )


def laid_as_stated(
    refs: dict[int, TensorRef], shape: tuple[int, ...], dims: Dims, places: list[dict[str, tuple[int, int]]],
    sequences: tuple[int, ...] = (),
) -> HeldByRanks:  # fmt: skip
    """The ranks' parts of a tensor as `dims` say they lie, beside the other run's shape. `places`: each rank's, on each
    axis of ranks. `sequences`: the lengths of what lies end to end in a packed dimension (t).

    Raises:
        DumpError: the parts are not as large as that, or some are not there.
    """
    for ref in refs.values():
        if len(ref.shape) != len(dims.dims):
            raise DumpError(
                "dims name another number of dimensions than the tensor has",
                expected=f"{len(dims.dims)} dimensions", found=f"shape {list(ref.shape)}",
            )  # fmt: skip
        if wrong := [at for at, dim in enumerate(dims.dims) if dim.names == ("1",) and ref.shape[at] != 1]:
            raise DumpError(f"dims say that dimension {wrong[0]} is 1", expected="1", found=f"shape {list(ref.shape)}")
    kept = [at for at, dim in enumerate(dims.dims) if dim.names != ("1",)]
    if len(shape) == len(kept) < len(dims.dims):
        refs = {rank: _only(ref, kept) for rank, ref in refs.items()}
        dims = dims._replace(dims=tuple(dims.dims[at] for at in kept))
    known = set(places[0]).union(*places)
    cut_dims = []
    for at, dim in enumerate(dims.dims):
        cuts = [cut for cut in dim.cuts if cut.axis in known and not cut.is_partial]
        if any(cut.order == "zigzag" for cut in cuts) and dim.name != "s" and not (dim.name == "t" and sequences):
            why = (
                "needs the lengths of its sequences (cu_seqlens_q or seq_lens)" if dim.name == "t" else "is for s only"
            )
            raise DumpError(
                f"dims: zigzag of {dim.name} {why}", expected="s[cp:zigzag]", found=f"{dim.name}[...:zigzag]"
            )
        if cuts:
            cut_dims.append((at, cuts, sequences if dim.name == "t" else ()))
    named_axes = dims.replicated | {cut.axis for dim in dims.dims for cut in dim.cuts}
    parts = list(zip(refs, refs.values(), places, strict=True))
    while len(cut_dims) > 1:
        at, cuts, packed = cut_dims.pop()
        named_axes -= {cut.axis for cut in cuts}
        groups: dict[tuple[Any, ...], list[tuple[int, TensorRef, dict[str, tuple[int, int]]]]] = defaultdict(list)
        seen: dict[tuple[Any, ...], int] = defaultdict(int)
        for part in parts:
            others = tuple((axis, part[2].get(axis)) for axis in sorted(named_axes))
            own = others, tuple(part[2].get(cut.axis) for cut in cuts)
            groups[others, seen[own]].append(part)  # copies beyond those that are named face each other
            seen[own] += 1
        parts = [
            (group[0][0], standing_for(_cut_along(at, cuts, group, packed)), group[0][2]) for group in groups.values()
        ]
    partial = {cut.axis for dim in dims.dims for cut in dim.cuts if cut.is_partial} & known
    first_of = {
        tuple(part[2].get(axis) for axis in sorted(partial)): number for number, part in [*enumerate(parts)][::-1]
    }
    summed = tuple(sorted(first_of.values())) if partial else ()
    held = HeldByRanks(tuple(part[0] for part in parts), tuple(part[1] for part in parts), summed=summed)
    if cut_dims:
        at, cuts, packed = cut_dims[0]
        held = _cut_along(at, cuts, parts, packed)
    if len(held.parts[0].shape) == len(shape):
        found = standing_for(held).shape
        if found != shape:
            raise DumpError(
                "dims do not make the other run's shape of the ranks' parts",
                expected=f"shape {list(shape)} of all {len(refs)} ranks",
                found=f"shape {list(found)} of parts of {list(next(iter(refs.values())).shape)}",
            )
    return held


def _cut_along(
    axis: int, cuts: Sequence[Cut], parts: Sequence[tuple[int, TensorRef, dict[str, tuple[int, int]]]],
    sequences: tuple[int, ...] = (),
) -> HeldByRanks:  # fmt: skip
    """Parts that lie along one axis, each where its rank stands."""
    lengths: dict[tuple[tuple[int, int], ...], int] = {}
    for rank, ref, place in parts:
        if lost := [cut.axis for cut in cuts if cut.axis not in place]:
            raise DumpError(
                f"rank {rank} does not say where it stands on {lost[0]}",
                expected=f"{lost[0]}_rank and {lost[0]}_size", found="none",
            )  # fmt: skip
        at = tuple(place[cut.axis] for cut in cuts)
        if lengths.setdefault(at, ref.shape[axis]) != ref.shape[axis]:
            raise DumpError(
                "ranks that stand at one place hold parts of different lengths",
                expected=f"{lengths[at]} along dimension {axis}", found=f"{ref.shape[axis]} on rank {rank}",
            )  # fmt: skip
    sizes = [{at[number][1] for at in lengths} for number in range(len(cuts))]
    expected = prod(max(size) for size in sizes)
    if any(len(size) > 1 for size in sizes) or len(lengths) != expected:
        raise DumpError(
            f"not every rank of {', '.join(cut.axis for cut in cuts)} holds a part of the tensor",
            expected=f"{expected} parts along dimension {axis}", found=f"{len(lengths)}",
        )  # fmt: skip
    total = sum(lengths.values())
    if len(set(lengths.values())) == 1:
        places = [share(total, cuts, place, sequences) for _, _, place in parts]
    elif len(cuts) == 1 and cuts[0].order != "zigzag":
        starts, before = {}, 0
        for at in sorted(lengths):
            starts[at], before = ((before, lengths[at]),), before + lengths[at]
        places = [starts[(place[cuts[0].axis],)] for _, _, place in parts]
    else:
        places = [None]
    if None in places:
        raise DumpError(
            "parts are of lengths that such a cut does not make",
            expected="as many of each rank, even in zigzag", found=f"{sorted(lengths.values())} along dimension {axis}",
        )  # fmt: skip
    ranks, refs = tuple(part[0] for part in parts), tuple(part[1] for part in parts)
    return HeldByRanks(ranks, refs, axis, tuple(one for one in places if one is not None))


def _only(ref: TensorRef, kept: Sequence[int]) -> TensorRef:
    """A tensor without those of its dimensions that are 1."""
    source = ref.source
    if isinstance(source, FileBytes) and source.strides is not None:
        source = dataclasses.replace(source, strides=tuple(source.strides[at] for at in kept))
    return ref.with_(shape=tuple(ref.shape[at] for at in kept), source=source)


def _contradicted(error: DumpError, name: str, record: Record, refs: dict[int, TensorRef]) -> Problem:
    """What a dump says wrongly of its tensors, told with the file that says it."""
    source = next(iter(refs.values())).source
    said = [error.message]
    said += [f"{word} {what}" for word, what in (("expected", error.expected), ("found", error.found)) if what]
    file = source.path if isinstance(source, FileBytes) else record.path
    return Problem(str(file), f"{name}: {'; '.join(said)}; its ranks are put together by shapes and token ids instead")


#: Rows of an expert that are looked for among each other, at most.
_MOST_ROWS = 1024
#: What one of a layer's experts is called; `experts.down_proj` is of all of them.
_ONE_EXPERT = regex(r"(?:^|\.)experts\.(?:.*\.)?(?:expert_?)?\d+\.")
#: Heads of queries for each head of keys, at most.
_MOST_SHARED = 16


def sections(held: HeldByRanks) -> Iterator[tuple[int, ...]]:
    """What a tensor that several were laid into may be made of, along the axis that is cut: two or three as long as
    each other, or queries with fewer keys and values.
    """
    assert held.axis is not None
    total = sum(long for share_ in set(held.stretches) for _, long in share_)
    ranks = len(set(held.stretches))
    for number in (3, 2):
        if total % (number * ranks) == 0:
            yield (total // number,) * number
    for shared in range(2, _MOST_SHARED + 1):
        each = total // (shared + 2)
        if each * (shared + 2) == total and each % ranks == 0:
            yield shared * each, each, each


def laid_of(whole: TensorRef, axis: int | None) -> HeldByRanks | None:
    """The slices that a tensor was laid together of, along an axis where one is given; None where it was not."""
    source = whole.source
    if not isinstance(source, Parts) or len(source.parts) < 2 or not whole.numel:
        return None
    if axis is None:
        is_flat = len(source.parts[0].shape) < len(whole.shape)
        axis = next(at for at, long in enumerate(whole.shape) if long > 1) if is_flat else source.axis
    beside = prod(whole.shape[:axis]) * prod(whole.shape[axis + 1 :])
    lengths = {ref.numel // beside for ref in source.parts} if beside else set()
    if len(lengths) != 1 or (source.axis != axis and prod(whole.shape[:axis]) != 1):
        return None
    (length,) = lengths
    parts = tuple(
        ref.with_(shape=(*whole.shape[:axis], length, *whole.shape[axis + 1 :])) for ref in source.parts
    )  # fmt: skip
    stretches: tuple[tuple[Stretch, ...], ...] = tuple(((at * length, length),) for at in range(len(parts)))
    return HeldByRanks(tuple(range(len(parts))), parts, axis, stretches)


def in_sections(held: HeldByRanks, sizes: tuple[int, ...]) -> HeldByRanks | None:
    """The same parts, each as a rank's share of every section; None where they are not even."""
    ranks = len(set(held.stretches))
    if any(len(one) != 1 or sum(sizes) != ranks * one[0][1] or one[0][0] % one[0][1] for one in held.stretches):
        return None
    if any(size % ranks for size in sizes):
        return None
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    stretches = tuple(
        tuple((start + one[0][0] // one[0][1] * (size // ranks), size // ranks)
              for start, size in zip(starts, sizes, strict=True))
        for one in held.stretches
    )  # fmt: skip
    return replace(held, stretches=stretches)


def _side_by_side(members: list[tuple[int, TensorRef]], axis: int, total: int) -> list[tuple[int, TensorRef]] | None:
    """The tensor that slices of several ranks make along an axis, and copies of it; None where they make none."""
    found: list[tuple[int, TensorRef]] = []
    first, stretches, at = 0, list[tuple[Stretch, ...]](), 0
    for number, (_, ref) in enumerate(members):
        stretches.append(((at, ref.shape[axis]),))
        at += ref.shape[axis]
        if at == total:
            ranks, parts = zip(*members[first : number + 1], strict=True)
            found.append((ranks[0], standing_for(HeldByRanks(ranks, parts, axis, tuple(stretches)))))
            first, stretches, at = number + 1, [], 0
    return found if not at and found else None


def turns(ranks: int, length: int) -> list[tuple[tuple[Stretch, ...], ...]]:
    """How so many ranks may share a sequence, `length` tokens each: in order; in zigzag, an early and a late chunk."""
    in_order: tuple[tuple[Stretch, ...], ...] = tuple(((rank * length, length),) for rank in range(ranks))
    if length % 2:
        return [in_order]
    chunk = length // 2
    return [
        in_order,
        tuple(((rank * chunk, chunk), ((2 * ranks - 1 - rank) * chunk, chunk)) for rank in range(ranks)),
    ]


def _padded(whole: TensorRef, ids: Sequence[TensorRef]) -> TensorRef | None:
    """The one process's token ids with the padding that ranks have besides, all of one number, so that they share a
    sequence evenly; None where none is needed, or what they have is no padding.
    """
    shapes = {one.shape for one in ids}
    if len(whole.shape) != 2 or len(shapes) != 1 or len(ids[0].shape) != 2 or ids[0].shape[0] != whole.shape[0]:
        return None
    length, (samples, own) = ids[0].shape[1], whole.shape
    if not length or not own % length or not all(ref.is_readable for ref in (whole, *ids)):
        return None
    different: list[TensorRef] = []
    for one in ids:
        if not any(same_values(one, other) for other in different):
            different.append(one)
    long = length * len(different)
    if not 0 < long - own < max(2, length):
        return None
    ids_BS, given = _numbers(whole), [_numbers(one) for one in different]
    for number in sorted({int(one[0, -1]) for one in given}):
        made_BS = np.concatenate([ids_BS, np.full((samples, long - own), number)], 1)
        if any(
            all(np.array_equal(_taken(made_BS, share_), mine) for share_, mine in zip(turn, given, strict=True))
            for turn in turns(len(given), length)
        ):
            return whole.with_(dtype="int64", shape=made_BS.shape, source=Inline(made_BS.tobytes()), digest=None)
    return None


def _numbers(ids: TensorRef) -> np.ndarray[Any, Any]:
    """Token ids of one width, so that equal rows are equal bytes whatever either run records them as."""
    return pages.array(ids).astype(np.int64)


def _taken(ids_BS: np.ndarray[Any, Any], stretches: Sequence[Stretch]) -> np.ndarray[Any, Any]:
    return np.concatenate([ids_BS[:, at : at + long] for at, long in stretches], 1)


def _runs(numbers: list[int]) -> Iterator[Stretch]:
    """Stretches of numbers that follow each other."""
    begun = 0
    for place in range(1, len(numbers) + 1):
        if place == len(numbers) or numbers[place] != numbers[place - 1] + 1:
            yield numbers[begun], place - begun
            begun = place


def _rows_of_expert(name: str, held: HeldByRanks, whole: TensorRef, beside: Side, tokens: int) -> HeldByRanks | None:
    """Rows of experts in the order of the other run's, where the rank that has the expert, or the ranks that have some
    experts each, were sent their tokens in another one; None where they are in that order, or are other rows.

    beside: what the other run recorded, which says how many rows each of several experts computed. Where nothing does,
    the rows may be the tokens themselves, or each token's in turn, whose order counts.
    """
    if not naming.is_of_experts(name) or len(whole.shape) != 2 or not 1 < whole.shape[0] <= _MOST_ROWS:
        return None
    is_of_one = _ONE_EXPERT.search(f"{naming.module_of(name)}.") is not None
    if len(held.parts) > 1 and (is_of_one or held.axis != 0):
        return None
    if not whole.is_readable or not all(ref.is_readable and ref.shape[1:] == whole.shape[1:] for ref in held.parts):
        return None
    rows = [np.asarray(pages.array(ref), np.float64) for ref in held.parts]
    order = same_rows(pages.array(whole).astype(np.float64), np.concatenate(rows))
    if order is None:
        return None
    if not is_of_one:
        counts = _rows_by_expert(name, whole.shape[0], beside, tokens)
        if counts is None:
            return None
        expert_N = np.repeat(np.arange(len(counts)), counts)
        if (expert_N[order] != expert_N).any():
            return None  # one expert's rows are where another's belong
    place, begun = np.argsort(order), 0  # where each of the ranks' rows stands in the other run
    parts, stretches = [], []
    for ref in held.parts:
        own = place[begun : begun + ref.shape[0]]
        begun += ref.shape[0]
        in_turn = [narrowed(ref, 0, row, 1) for row in np.argsort(own).tolist()]
        parts.append(ref.with_(source=Parts(tuple(in_turn)), digest=None))
        stretches.append(tuple(_runs(np.sort(own).tolist())))
    if len(parts) == 1:
        return HeldByRanks(held.ranks, tuple(parts))
    return HeldByRanks(held.ranks, tuple(parts), 0, tuple(stretches))


def _rows_by_expert(name: str, rows: int, beside: Side, tokens: int) -> np.ndarray[Any, Any] | None:
    """How many of so many rows each expert of a layer computed, as its router's record says: by counts of them, or by
    the experts [tokens, k], k at least 2, that each token was sent to; None where none that was recorded makes them.
    """
    layer = name[: name.rindex("experts.")]
    for (other, _), (_, ref) in beside.tensors.items():
        if not other.startswith(layer) or "int" not in ref.dtype or not ref.is_readable or not ref.shape:
            continue
        is_chosen = ref.numel == rows and ref.shape[-1] > 1 and ref.numel == tokens * ref.shape[-1]
        if not is_chosen and (len(ref.shape) != 1 or ref.numel > _MOST_ROWS):
            continue
        found = pages.array(ref).reshape(-1).astype(np.int64)
        if found.min(initial=0) < 0 or found.max(initial=0) > _MOST_ROWS:
            continue
        counts = np.bincount(found) if is_chosen else found
        if len(counts) > 1 and counts.sum() == rows:
            return counts
    return None


def standing_for(held: HeldByRanks) -> TensorRef:
    """The tensor of all ranks: the slices laid together, or the first rank's."""
    first = held.parts[0]
    whole = first.with_(digest=first.digest if len({ref.digest for ref in held.parts}) == 1 else None)
    if held.axis is None or not all(ref.is_readable for ref in held.parts):
        return whole
    dtypes = {ref.dtype for ref in held.parts}
    parts = held.parts if len(dtypes) == 1 else tuple(map(_as_int64, held.parts))
    pieces: dict[int, TensorRef] = {}
    for ref, stretches in zip(parts, held.stretches, strict=True):
        own = 0
        for start, length in stretches:
            if not length:
                continue  # and no other rank's that begins there is this one's copy
            pieces.setdefault(start, ref if length == ref.shape[held.axis] else narrowed(ref, held.axis, own, length))
            own += length
    if not pieces:
        return whole
    ordered = tuple(pieces[start] for start in sorted(pieces) if pieces[start].numel)
    length = sum(piece.shape[held.axis] for piece in ordered)
    shape = (*first.shape[: held.axis], length, *first.shape[held.axis + 1 :])
    if len({piece.dtype for piece in ordered}) > 1:
        why = f"its ranks hold it in several dtypes: {', '.join(sorted(dtypes))}"
        return whole.with_(shape=shape, source=Unreadable(why), digest=None)
    laid: FileBytes | Inline | Parts = Parts(ordered, held.axis)
    is_strided = any(isinstance(piece.source, FileBytes) and piece.source.strides is not None for piece in ordered)
    if held.axis and not prod(first.shape[: held.axis]) > 1 and not is_strided:
        # Nothing stands before the axis but ones: the pieces follow each other.
        laid = Parts(tuple(piece.with_(shape=(piece.numel,)) for piece in ordered))
    return whole.with_(dtype=ordered[0].dtype if ordered else first.dtype, shape=shape, source=laid, digest=None)


def _as_int64(ref: TensorRef) -> TensorRef:
    """Whole numbers in one width, for ranks that record them in several (token ids); any other tensor as it is."""
    try:
        if "int" in ref.dtype and ref.dtype != "int64":
            return ref.with_(dtype="int64", source=Inline(_numbers(ref).tobytes()), digest=None)
    except DumpError:
        pass  # of another dtype than the rest: the whole is not read
    return ref


def narrowed(ref: TensorRef, axis: int, start: int, length: int) -> TensorRef:
    """A stretch of one axis of a tensor, where it lies."""
    shape = (*ref.shape[:axis], length, *ref.shape[axis + 1 :])
    where = ref.source
    if not isinstance(where, FileBytes):
        here = (slice(None),) * axis + (slice(start, start + length),)
        return ref.with_(
            shape=shape, source=Inline(np.ascontiguousarray(pages.array(ref)[here]).tobytes()), digest=None
        )
    strides = where.strides or tuple(prod(ref.shape[number + 1 :]) for number in range(len(ref.shape)))
    size = ITEMSIZE[ref.dtype]
    extent = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) if all(shape) else 0
    lies = FileBytes(where.path, where.offset + start * strides[axis] * size, extent * size, strides, where.big_endian)
    return ref.with_(shape=shape, source=lies, digest=None)


def named(ranks: Any) -> str:
    """`0, 1 and 3`."""
    words = [str(rank) for rank in ranks]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def ids_of_stages(sides: Sequence[Side]) -> list[TensorRef | None]:
    """Of every rank its token ids; of a pipeline's later stages, those of the rank whose output they were given."""
    found = [ids_of(side) for side in sides]
    if all(one is None for one in found) or all(one is not None for one in found):
        return found
    given = [
        [ref for (_, stage), (_, ref) in side.tensors.items()
         if stage == "batch_inputs" and len(ref.shape) > 2 and ref.dtype.startswith(("float", "bfloat"))]
        for side in sides
    ]  # fmt: skip
    put_out = [[ref for (_, stage), (_, ref) in side.tensors.items() if stage == "modules"] for side in sides]
    for _ in sides:
        left = [number for number, one in enumerate(found) if one is None and given[number]]
        lent = {
            number: other for number in left for other, ids in enumerate(found)
            if ids is not None and any(same_values(ref, mine) for ref in put_out[other] for mine in given[number])
        }  # fmt: skip
        if not lent:
            break
        for number, other in lent.items():
            found[number] = found[other]
    return found


def _called(ref: TensorRef, place: tuple[str, str], whole: Side) -> TensorRef:
    """A tensor under the name that the one process's has at a place."""
    there = whole.tensors[place][1]
    return ref.with_(name=there.name, canonical=there.canonical)


def _lost(side: Side, stage: str) -> str | None:
    """Why a rank's record of a stage could not be read; None where it was, or there is none."""
    read = {id(record) for record, _ in side.tensors.values()}
    lost = {str(record.path) for record in side.records if record.key.stage == stage and id(record) not in read}
    return next((problem.what for problem in side.problems if problem.where in lost), None) if side.unreadable else None


def ids_of(side: Side) -> TensorRef | None:
    return side.main.held.ids if side.main is not None else None


def same_values(one: TensorRef, other: TensorRef) -> bool:
    if one.shape != other.shape:
        return False
    try:
        return bool(pages.same_bytes(one, other)) or bool(np.array_equal(pages.array(one), pages.array(other)))
    except DumpError:
        return False


def narrowed_to(side: Side, wanted: Callable[[Record, TensorRef], bool]) -> Side:
    """The side with only those tensors that are wanted."""
    records = []
    for record in side.records:
        refs = [ref for held, ref in side.tensors.values() if held is record and wanted(record, ref)]
        if refs:
            made = Record(record.key, record.path, lambda refs=refs: refs)  # type: ignore[misc]
            records.append(made)
    found = Side(records)
    found.load()
    found.problems, found.unreadable, found.micros = list(side.problems), side.unreadable, side.micros
    return found
