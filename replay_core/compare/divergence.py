"""The order of computation, and the origin: what produced the first tensor that diverges."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import total_ordering
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import Struct

from replay_core import naming
from replay_core.naming import Phase
from replay_core.records import STAGES, RecordKey

if TYPE_CHECKING:
    from replay_core.compare.judging.tensors import TensorVerdict
    from replay_core.compare.pairing.micro_batch_pair import MicroBatchPair, Side

_STAGE_ORDER = {stage: order for order, stage in enumerate(STAGES)}
#: Verdicts of these kinds are counted but never first: they say how tokens lie, not what was computed.
NEVER_FIRST = frozenset({"mask", "layout", "note"})


#: Name of a parameter -> its place in a forward, where names do not tell.
Places = Mapping[str, int]
NO_PLACES: Places = {}


def order_of(
    key: RecordKey, name: str, order: int | None, places: Places = NO_PLACES
) -> tuple[int, int, int, int, int, Any, int]:
    """Sort key of a tensor: step, before / within / closing the micro-batches, micro, phase, then as recorded.

    Weights lie in a file as they were registered or by the alphabet: their names say which is used first, and of
    gradients, which a backward reaches first; or `places` do. Ranks of one micro-batch are simultaneous: the rank comes
    last.
    """
    phase = naming.meaning(name).phase
    if key.micro is not None:
        section = 1
    else:
        section = 0 if phase < Phase.INPUTS else 2
        if phase is Phase.UNKNOWN and _STAGE_ORDER.get(key.stage, len(STAGES)) < 6:
            section = 0
    stage = _STAGE_ORDER.get(key.stage, len(STAGES))
    return (
        -1 if key.step is None else key.step,
        section,
        -1 if key.micro is None else key.micro,
        int(phase),
        stage,
        _within(phase, name, order, places),
        -1 if key.rank is None else key.rank,
    )


def _within(phase: Phase, name: str, order: int | None, places: Places) -> Any:
    if phase not in (Phase.PARAMS, Phase.GRADIENTS):
        return order or 0
    place = naming.called(name)
    if places:
        place = ((places.get(_bare(name), -1), ()), *place)
    return place if phase is Phase.PARAMS else _Backward(place)


def _bare(name: str) -> str:
    return name.removeprefix("grad.").removeprefix("param.")


def places_of(micro_pairs: Sequence[MicroBatchPair]) -> Places:
    """Where in a forward the parameters of a step are used, where some have names of nobody's but their author: as
    modules' outputs were recorded, else as the model registers its parameters. Empty where names tell it, or nothing.
    """
    sides = [side for micro_pair in micro_pairs for side in (micro_pair.a, micro_pair.b)]
    listed = [_listed(side) for side in sides]
    known = dict.fromkeys(name for names in listed for name in names)
    if all(map(naming.is_placed, known)):
        return NO_PLACES
    for side in sides:
        outputs = [(ref.order or 0, naming.module_of(name)) for (name, _), (_, ref) in side.tensors.items()
                   if naming.is_module_tensor(name) and not naming.is_input(name)]  # fmt: skip
        passed = {module: place for place, (_, module) in reversed(list(enumerate(sorted(outputs))))}
        if passed and all(name.rpartition(".")[0] in passed for name in known):
            return {name: passed[name.rpartition(".")[0]] for name in known}
    # A rank of a pipeline lists its own part: the longest list is the model's. By the alphabet is no order of a model.
    longest = max(listed, key=len)
    if longest == sorted(longest):
        return NO_PLACES
    return {name: place for place, name in enumerate(longest)}


def are_placed(side: Side) -> bool:
    """Whether the names of a side's parameters say where in a forward each is used, whatever other sides hold."""
    return all(map(naming.is_placed, _listed(side)))


def _listed(side: Side) -> list[str]:
    """The parameters of which a side has the gradients, or itself, as they lie in the file."""
    for phase in (Phase.PARAMS, Phase.GRADIENTS):
        found = [
            (ref.order or 0, _bare(name)) for (name, _), (_, ref) in side.tensors.items()
            if naming.meaning(name).phase is phase and name.startswith(("grad.", "param."))
            and not naming.is_module_tensor(_bare(name))
        ]  # fmt: skip
        if found:
            return [name for _, name in sorted(found)]
    return []


@total_ordering
@dataclass(frozen=True, slots=True)
class _Backward:
    """A place in a model that sorts as a backward passes it: the last one first."""

    place: naming.Place

    def __lt__(self, other: _Backward) -> bool:
        return self.place > other.place


def may_be_first(verdict: TensorVerdict) -> bool:
    """Whether this pair can be the first divergence: NAN, SHAPE or DIFF of something that was computed."""
    return verdict.verdict.diverges and naming.meaning(verdict.name).kind not in NEVER_FIRST


class Origin(Struct, frozen=True):
    """Where the first diverging tensor comes from: the module that produced it, None where no recorded one did."""

    module: str | None
    why: str


class ModuleStanding(NamedTuple):
    """How a tensor of a module stands: it agrees, it parts and may be the first to, or neither (MISSING, skipped, a
    mask)."""

    name: str
    agrees: bool
    parts: bool


def standing(verdict: TensorVerdict) -> ModuleStanding:
    """How a row stands."""
    return ModuleStanding(verdict.name, agrees(verdict), may_be_first(verdict))


def origin_of(verdicts: Iterable[ModuleStanding]) -> Origin | None:
    """What produced the first diverging tensor: the smallest module around it all of whose inputs agree and some output
    of which does not. None where the first one is no tensor of a module.

    Masks among the inputs do not speak: padded and packed forwards need different ones.
    """
    rows = [verdict for verdict in verdicts if naming.is_module_tensor(verdict.name)]
    first = next((row for row in rows if row.parts), None)
    if first is None:
        return None
    given: dict[str, list[bool]] = defaultdict(list)
    for row in rows:
        if naming.is_input(row.name) and naming.meaning(row.name).kind != "mask":
            given[naming.module_of(row.name)].append(row.agrees)
    parted = {naming.module_of(row.name) for row in rows if row.parts and not naming.is_input(row.name)}
    around = naming.module_of(first.name)
    if naming.is_input(first.name):  # what a module is given is made by one that it is part of
        around = around.rpartition(".")[0]
    while around:
        if around in parted and given[around] and all(given[around]):
            return Origin(around, "its inputs agree, its output does not")
        around = around.rpartition(".")[0]
    if naming.is_input(first.name):
        return Origin(None, "handed in from outside; no recorded module produced it")
    recorded = given[naming.module_of(first.name)]
    return Origin(
        None, "not told: " + ("its inputs could not all be compared" if recorded else "no input was recorded")
    )


def agrees(verdict: TensorVerdict) -> bool:
    """Whether two tensors were compared and found equal or within noise."""
    return verdict.skipped is None and verdict.verdict.value in ("SAME", "CLOSE", "PADDING")
