"""What the stages of a pipeline hand to each other, which one process has between two layers and nowhere else.

The module around the layers runs on every stage: what it returns on a stage that is not the last is the output of that
stage's last layer, and what it is given on one that is not the first is the input of its first. Which layers a rank has
is told by the names of its modules; where none are recorded, by what one rank returned being what another was given.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field

from replay_core import pages
from replay_core.compare.pairing.micro_batch_pair import Side
from replay_core.errors import DumpError
from replay_core.records import TensorRef
from replay_core.regexes import regex

OF_LAYER = regex(r"^((?:[\w.]{1,200}\.)?(?:layers|layer|h|blocks|block)\.)(\d{1,5})\.")
_OUTPUT = regex(r"^(.+)\.output(?:\.0)?$")
_INPUT = regex(r"^(.+)\.inputs\.\w+$")
_RETURNED = "forward.output."
#: What a model returns that returns one tensor: its logits, and on a stage that is not the last what it hands on.
_BARE = ("forward.output", "modules")
#: What a model returns as one of several that are numbered (its hidden states).
_NUMBERED = regex(r"^(forward\.output\.(?:[\w.]{1,200}\.)?)(\d{1,5})$")

Place = tuple[str, str]


class HandedOver(Struct):
    """Of tensors by rank and place: those that stand at another place of the one process, and those at none.

    moved: where to. left_out: those that are said by another tensor, or that the one process never has; said: of each,
    what it is compared as, empty where as nothing.
    """

    moved: dict[tuple[int, Place], Place] = field(default_factory=dict)
    left_out: set[tuple[int, Place]] = field(default_factory=set)
    said: list[tuple[int, str, str]] = field(default_factory=list)

    @property
    def sentences(self) -> list[str]:
        """What a reader is told of them, for the places of each kind."""
        compared = [f"{name} of rank {rank} (as {other})" for rank, name, other in self.said if other]
        alone = [f"{name} of rank {rank}" for rank, name, other in self.said if not other]
        told = [
            f"{_first(compared)}: handed from stage to stage of a pipeline, and compared as what it is between two "
            "layers"
        ] * bool(compared)  # fmt: skip
        return told + [
            f"{_first(alone)}: handed from stage to stage of a pipeline; the other run has nothing that it could be "
            "compared with"
        ] * bool(alone)  # fmt: skip


class _Layers(Struct, frozen=True):
    """A stage's layers: the name before their numbers, the first and the last."""

    head: str
    first: int
    last: int


def handed_over(ranks: Mapping[int, Side], whole: Side) -> HandedOver:
    """What ranks were handed or handed on, of one micro-batch."""
    found = HandedOver()
    stages = _stages(ranks, whole)
    if stages:
        lowest, highest = min(one.first for one in stages.values()), max(one.last for one in stages.values())
        for rank, layers in stages.items():
            for place, (_, ref) in ranks[rank].tensors.items():
                if layers.last < highest and (
                    _is_returned_by_body(place, ref, ranks[rank], layers)
                    or (place == _BARE and is_of_tokens(ref))
                    or (place not in whole.tensors and _is_returned_by_stage(place, ref))
                ):
                    own, next_one = f"{layers.head}{layers.last}.output", f"{layers.head}{layers.last + 1}.inputs.0"
                    _place(found, (rank, place), ref, ranks[rank], whole, (own, next_one))
                elif layers.first > lowest and place not in whole.tensors and _is_given_to_body(place, ref):
                    own, one_before = f"{layers.head}{layers.first}.inputs.0", f"{layers.head}{layers.first - 1}.output"
                    _place(found, (rank, place), ref, ranks[rank], whole, (own, one_before))
    numbered = _renumbered(ranks, whole)
    found.moved |= {at: place for at, place in numbered.items() if at[1] != place}
    _leave_out_what_was_passed(found, ranks, whole, numbered)
    return found


def _renumbered(ranks: Mapping[int, Side], whole: Side) -> dict[tuple[int, Place], Place]:
    """What stages return as one of several, and where it stands among the one process's: one stage's after the other's,
    where all together are as many as that has.
    """
    found = in_one_numbering(ranks)
    heads = {(one[1], place[1]) for place in found.values() if (one := _NUMBERED.match(place[0]))}
    own = {(head, stage): {place[0] for place in found.values() if place[0].startswith(head)} for head, stage in heads}
    as_many = {
        (head, stage) for (head, stage), names in own.items()
        if {int(name.removeprefix(head)) for name in names} == _numbers_after(whole, head, stage)
    }  # fmt: skip
    return {
        at: place for at, place in found.items()
        if (one := _NUMBERED.match(place[0])) is not None and (one[1], place[1]) in as_many
    }  # fmt: skip


def in_one_numbering(ranks: Mapping[int, Side]) -> dict[tuple[int, Place], Place]:
    """What stages of a pipeline return as one of several (hidden states), each counting its own from 0 or on from the
    stage before, under the number that it has among all of them.
    """
    stages = _in_turn(ranks)
    found: dict[tuple[int, Place], Place] = {}
    if len(stages) < 2:
        return found
    every = {(one[1], at) for side in ranks.values() for name, at in side.tensors if (one := _NUMBERED.match(name))}
    for head, stage in every:
        before, of_head = 0, dict[tuple[int, Place], Place]()
        for members in stages:
            counts = {frozenset(_numbers_after(ranks[rank], head, stage)) for rank in members}
            own = next(iter(counts))
            first = min(own, default=0)
            if len(counts) > 1 or first not in (0, before) or own != set(range(first, first + len(own))):
                break
            for rank in members:
                of_head |= {(rank, (f"{head}{one}", stage)): (f"{head}{before + one - first}", stage) for one in own}
            before += len(own)
        else:
            found |= of_head
    return found


def _numbers_after(side: Side, head: str, stage: str) -> set[int]:
    return {
        int(one[2]) for name, at in side.tensors if at == stage and (one := _NUMBERED.match(name)) and one[1] == head
    }


def _in_turn(ranks: Mapping[int, Side]) -> list[list[int]]:
    """The ranks of each stage, by who was given what another returned; none where some are in no such chain."""
    given = {
        rank: [ref for place, (_, ref) in side.tensors.items() if place[1] == "batch_inputs" and is_of_tokens(ref)]
        for rank, side in ranks.items()
    }
    made = {
        rank: [ref for place, (_, ref) in side.tensors.items() if place[1] == "modules" and is_of_tokens(ref)
               and place[0].startswith(_RETURNED)]
        for rank, side in ranks.items()
    }  # fmt: skip
    stages = [[rank for rank, refs in given.items() if not refs]]
    left = [rank for rank, refs in given.items() if refs]
    while left and stages[-1]:
        last = [ref for rank in stages[-1] for ref in made[rank]]
        stages.append([rank for rank in left if any(_is_same(one, ref) for one in given[rank] for ref in last)])
        left = [rank for rank in left if rank not in stages[-1]]
    return stages if stages[-1] else []


def _stages(ranks: Mapping[int, Side], whole: Side) -> dict[int, _Layers]:
    """Of each rank its layers; empty where the ranks do not each have a stretch of the one process's of its own."""
    every = _numbers(whole)
    stretches = {rank: _numbers(side) for rank, side in ranks.items()}
    if len(every) != 1 or any(len(one) != 1 or set(one) != set(every) for one in stretches.values()):
        return {}
    ((head, numbers),) = every.items()
    found = {}
    for rank, one in stretches.items():
        mine = one[head]
        if max(mine) - min(mine) + 1 != len(mine) or not mine <= numbers:
            return {}
        found[rank] = _Layers(head, min(mine), max(mine))
    distinct = {(one.first, one.last) for one in found.values()}
    covered = sum(last - first + 1 for first, last in distinct)
    return found if len(distinct) > 1 and covered == len(numbers) else {}


def _numbers(side: Side) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for name, stage in side.tensors:
        if stage == "modules" and (place := OF_LAYER.match(name)):
            found.setdefault(place[1], set()).add(int(place[2]))
    return found


def _is_returned_by_body(place: Place, ref: TensorRef, side: Side, layers: _Layers) -> bool:
    """Whether the tensor is the output of a module that has the rank's layers in it."""
    module = _OUTPUT.match(ref.name)
    if module is None or place[1] != "modules" or not is_of_tokens(ref):
        return False
    inner = next((ref for (name, _), (_, ref) in side.tensors.items() if name.startswith(layers.head)), None)
    return inner is not None and inner.name.startswith(f"{module[1]}.") and not OF_LAYER.match(f"{module[1]}.")


def _is_returned_by_stage(place: Place, ref: TensorRef) -> bool:
    """Whether the tensor is what the whole of a stage returns, and none of several that are numbered."""
    name, stage = place
    return stage == "modules" and is_of_tokens(ref) and name.startswith(_RETURNED) and not _NUMBERED.match(name)


def _is_given_to_body(place: Place, ref: TensorRef) -> bool:
    name, stage = place
    if not is_of_tokens(ref) or OF_LAYER.match(name):
        return False
    return stage == "batch_inputs" or (stage == "modules" and _INPUT.match(name) is not None)


def is_of_tokens(ref: TensorRef) -> bool:
    return len(ref.shape) > 2 and ref.dtype.startswith(("float", "bfloat"))


def _place(
    found: HandedOver, at: tuple[int, Place], ref: TensorRef, side: Side, whole: Side, names: tuple[str, str]
) -> None:  # fmt: skip
    """Say where a tensor stands. names: the rank's own tensor of the same values, and its neighbour's."""
    rank, (name, _) = at
    own, beside = ((one, "modules") for one in names)
    mine = side.tensors.get(own)
    if mine is not None and own in whole.tensors:
        if not _is_same(mine[1], ref):
            # Not what it should be: held against what the neighbour has, where that can be.
            if beside in whole.tensors:
                found.moved[at] = beside
                found.said.append((rank, name, beside[0]))
            return
        found.left_out.add(at)
        found.said.append((rank, name, own[0]))
        return
    there = next((one for one in (own, beside) if one in whole.tensors and one not in side.tensors), None)
    if there is not None:
        found.moved[at] = there
    else:
        found.left_out.add(at)
    found.said.append((rank, name, there[0] if there is not None else ""))


def _leave_out_what_was_passed(
    found: HandedOver, ranks: Mapping[int, Side], whole: Side, numbered: Mapping[tuple[int, Place], Place]
) -> None:
    """Leave out what one rank returned and another was given, byte for byte, and the one process has not at all.

    numbered: what ranks returned that the one process has.
    """
    given = {
        (rank, place): ref for rank, side in ranks.items() for place, (_, ref) in side.tensors.items()
        if place not in whole.tensors and _is_given_to_body(place, ref)
        and (rank, place) not in found.moved and (rank, place) not in found.left_out
    }  # fmt: skip
    if not given:
        return
    returned = {
        (rank, place): ref for rank, side in ranks.items() for place, (_, ref) in side.tensors.items()
        if place[1] == "modules" and is_of_tokens(ref) and (rank, place) not in {*found.left_out, *numbered}
        and (place[0].startswith(_RETURNED) or _OUTPUT.match(place[0])) and not OF_LAYER.match(place[0])
    }  # fmt: skip
    for at, ref in given.items():
        by = [other for other, made in returned.items() if other[0] != at[0] and _is_same(made, ref)]
        for rank, place in [at, *by] * bool(by):
            if (rank, place) not in found.left_out:
                found.left_out.add((rank, place))
                found.said.append((rank, place[0], ""))


def _is_same(one: TensorRef, other: TensorRef) -> bool:
    try:
        return one.shape == other.shape and one.dtype == other.dtype and (
            bool(pages.same_bytes(one, other)) or pages.array(one).tobytes() == pages.array(other).tobytes()
        )  # fmt: skip
    except DumpError:
        return False


def _first(names: list[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f"{', '.join(names[:4])}{more}"
