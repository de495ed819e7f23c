"""The order of computation, and the origin: the smallest module whose inputs agree and whose output does not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING

from replay_core import naming
from replay_core.naming import Phase
from replay_core.records import STAGES, RecordKey

if TYPE_CHECKING:
    from replay_core.compare.judging.tensors import TensorVerdict

#: Verdicts of these kinds are counted but never first: they say how tokens lie, not what was computed.
NEVER_FIRST = frozenset({"mask", "layout", "note"})


def order_of(key: RecordKey, name: str, order: int | None) -> tuple[int, int, int, int, int, int, int]:
    """Sort key of a tensor: step, before / within / closing the micro-batches, micro, phase, then as recorded.

    Ranks of one micro-batch are simultaneous: the rank comes last.
    """
    phase = naming.meaning(name).phase
    if key.micro is not None:
        section = 1
    else:
        section = 0 if phase < Phase.INPUTS else 2
        if phase is Phase.UNKNOWN and key.stage in STAGES[:6]:
            section = 0
    stage = STAGES.index(key.stage) if key.stage in STAGES else len(STAGES)
    return (
        -1 if key.step is None else key.step,
        section,
        -1 if key.micro is None else key.micro,
        int(phase),
        stage,
        order or 0,
        -1 if key.rank is None else key.rank,
    )


def may_be_first(verdict: TensorVerdict) -> bool:
    """Whether this pair can be the first divergence: NAN, SHAPE or DIFF of something that was computed."""
    return verdict.verdict.diverges and naming.meaning(verdict.name).kind not in NEVER_FIRST


def origin_of(verdicts: Iterable[TensorVerdict]) -> str | None:
    """The smallest module, earliest in call order, all of whose inputs agree and some output of which does not.

    Masks among the inputs do not speak: padded and packed forwards need different ones.
    """
    inputs: dict[str, list[TensorVerdict]] = defaultdict(list)
    outputs: dict[str, list[TensorVerdict]] = defaultdict(list)
    for verdict in verdicts:
        if not naming.is_module_tensor(verdict.name):
            continue
        side = inputs if naming.is_input(verdict.name) else outputs
        if naming.meaning(verdict.name).kind != "mask":
            side[naming.module_of(verdict.name)].append(verdict)
    for module, results in outputs.items():
        if not any(may_be_first(result) for result in results):
            continue
        given = inputs.get(module, [])
        if given and all(agrees(one) for one in given):
            inside = [other for other in outputs if other.startswith(module + ".")]
            smaller = (other for other in inside if _breaks(inputs.get(other, []), outputs[other]))
            return next(smaller, module)
    return None


def _breaks(given: list[TensorVerdict], results: list[TensorVerdict]) -> bool:
    return bool(given) and all(agrees(one) for one in given) and any(may_be_first(result) for result in results)


def agrees(verdict: TensorVerdict) -> bool:
    """Whether two tensors were compared and found equal or within noise."""
    return verdict.verdict.value in ("SAME", "CLOSE", "PADDING")
