"""Where a backward goes wrong, and which layers whose: told by which gradients agree, in the order of the backward.

Stages of a pipeline: the last stage goes first, and hands each before it what that goes on with.

Where all gradients of one stage are others, from its last layer on, and those of the stages behind it agree as the
whole forward does, the stage went back with something else than it was sent. A weight that two stages share (an
embedding that is the head too) has the sum of both in either, so that the later stage's copy is off by what the earlier
one made of it: it began nothing.

A layer that is cut by its outputs (column-parallel) hands back a part on each rank, which are to be added up. Where the
gradients of such a layer agree and those of all before it do not, its forward being right, that sum is not made.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from replay_core import naming
from replay_core.compare.judging.faults import Fault, whose
from replay_core.compare.judging.token_rows import LOST_MICRO_BATCH
from replay_core.compare.pairing.ranks import same_values
from replay_core.regexes import regex

if TYPE_CHECKING:
    from replay_core.compare.judging.tensors import TensorVerdict

#: Fewer gradients of a stage, all of them off, may be so each for its own reason.
_FEWEST = 3
#: Gradients of one stage that are all off by one factor are another matter.
_ONE_FACTOR = 1e-2
#: What is off by a factor alone is off by no more than this part besides.
_ALL_OF_IT = 1e-4
#: Of the gradients before a layer, so many are off where what flows back from it is.
_MOSTLY = 0.9
#: Beside a layer that is off, so many that feed the same as it agree.
_FEWEST_BESIDE = 2
_NORM = regex(r"norm|(?:[._]|^)ln(?:[._\d]|$)", re.IGNORECASE)
_ROUTER = regex(r"(?:^|\.)(?:gate|router|wg|gate_proj_router|router\.classifier)\.weight$")
_LAYER = regex(r"(?:grad|param)\.(?:\w+\.)*?(?:layers|h|blocks)\.(\d{1,6})\.")


def tied_copies(rows: Sequence[TensorVerdict]) -> set[int]:
    """Rows (by id) of a step's gradients that are another stage's of another name, in both runs, where nothing else of
    their own stage is off.
    """
    off = [row for row in rows if _is_of_a_stage(row) and row.verdict.diverges]
    found: set[int] = set()
    for row in off:
        others = [
            one for one in off
            if one.key.step == row.key.step and _ranks(one) != _ranks(row) and one.name != row.name
        ]  # fmt: skip
        own = [one for one in off if one.key.step == row.key.step and _ranks(one) == _ranks(row)]
        if len(own) == 1 and any(_are_one(row, one) for one in others):
            found.add(id(row))
    return found


def went_back_otherwise(rows: Sequence[TensorVerdict]) -> tuple[Fault, TensorVerdict, int] | None:
    """The stage that all is off of in the first step's backward, with its first row and how many there are.

    rows: in order of computation, those that agree too.
    """
    first = next((row for row in rows if row.verdict.diverges), None)
    if first is None or not _is_of_a_stage(first):
        return None
    own = [row for row in rows if row.key.step == first.key.step]
    if any(row.verdict.diverges and not _is_of_the_backward(row) for row in own):
        return None
    tied = tied_copies(own)
    gradients = [row for row in own if _is_of_a_stage(row) and id(row) not in tied and row.skipped is None]
    off = [row for row in gradients if row.verdict.diverges]
    stages = {_ranks(row) for row in off}
    if len(off) < _FEWEST or len(stages) != 1:
        return None
    (stage,) = stages
    mine = [row for row in gradients if _ranks(row) == stage]
    behind = [row for row in gradients[: gradients.index(off[0])] if _ranks(row) != stage]
    if len(mine) > len(off) or not behind:
        return None
    factors = [1 + row.figures.total.gain for row in off if row.figures is not None]
    are_scaled = all(
        row.figures is not None and row.figures.total.rel_l2 <= abs(row.figures.total.gain) * (1 + _ONE_FACTOR)
        for row in off
    )
    if are_scaled and factors and max(factors) - min(factors) <= _ONE_FACTOR * abs(max(factors, key=abs)):
        return None
    told = (row.ranks.fault for row in off if row.ranks is not None and row.ranks.fault is not None)
    lost = next((fault for fault in told if fault.kind == LOST_MICRO_BATCH), None)
    why = (
        "it was handed back another gradient than that of what it had put out, or went back with another than it was "
        "sent, or at another time (another micro-batch's, a stale one of the micro-batch or step before), or without "
        "some micro-batch's"
    ) if lost is None else f"it did not go back for one micro-batch ({lost.sentence})"  # fmt: skip
    return (
        Fault(
            "went back otherwise", stage,
            f"all {len(off)} gradients of {whose(stage)}'s stage are others, from its last layer on, while its forward "
            f"and the gradients of the stages behind it ({whose(_ranks(behind[-1]))}) agree: {why}",
        ),
        off[0], len(off),
    )  # fmt: skip


def went_back_in_parts(rows: Sequence[TensorVerdict]) -> tuple[Fault, TensorVerdict, int] | None:
    """The layer from which on all is off in the first step's backward, and whose own gradients agree; with the first
    row that is off, and how many are.

    rows: in order of computation, those that agree too.
    """
    started = next((row for row in rows if row.verdict.diverges), None)
    if started is None or not _is_of_a_stage(started):
        return None
    own = [row for row in rows if row.key.step == started.key.step]
    if any(row.verdict.diverges and not _is_of_the_backward(row) for row in own):
        return None
    gradients = [row for row in own if _is_of_a_stage(row) and row.skipped is None]
    factor = _factor(started)
    off = [row for row in gradients if row.verdict.diverges and not _is_times(row, factor)]
    at = gradients.index(off[0]) if off else 0
    first, fed = gradients[at], gradients[at - 1] if at else None
    ranks = _ranks(first)
    if fed is None or fed.ranks is None or fed.ranks.relation != "slices" or fed.ranks.axis != 0 or len(ranks) < 2:
        return None
    if _NORM.search(first.name) is None:
        return None
    if fed.ranks.ranks != ranks or len(off) < _FEWEST or len(off) < _MOSTLY * len(gradients[at:]):
        return None
    layer, norm = (row.name.removeprefix("grad.").rpartition(".")[0] for row in (fed, first))
    # Clipped by the norm of them all, those that are right are off by one factor.
    scaled = "" if factor is None else f" (b's are {factor:.4g} times a's: clipped by the norm that the rest makes)"
    return (
        Fault(
            "went back in parts", ranks,
            f"the gradients of {layer} and of all behind it agree{scaled}, and so does the forward; from {norm} on, "
            f"which feeds it, all {len(off)} are others: what flows back from its slices on {whose(ranks)} is not "
            "summed as it is to be over these ranks (each goes on with its own part, or some part is lost or added "
            "twice)",
        ),
        first, len(off),
    )  # fmt: skip


def _factor(row: TensorVerdict) -> float | None:
    """What a's is of b's, where one factor is all that is between the two."""
    if row.figures is None or not row.verdict.diverges:
        return None
    total = row.figures.total
    is_all = total.rel_l2 <= abs(total.gain) * (1 + _ALL_OF_IT)
    return 1 + total.gain if is_all else None


def _is_times(row: TensorVerdict, factor: float | None) -> bool:
    own = _factor(row) if factor is not None else None
    return own is not None and factor is not None and abs(own - factor) <= _ONE_FACTOR * abs(factor - 1)


def lost_beside_its_siblings(rows: Sequence[TensorVerdict]) -> tuple[Fault, TensorVerdict, int] | None:
    """The layer whose gradient is the first that is off, beside others of its module that agree, and of which all that
    is before is off; with its first row, and how many are off.

    Queries, keys and values are fed by one norm, so what is off before them comes back through the one that is off.

    rows: in order of computation, those that agree too.
    """
    # The norm of all gradients is off where one is.
    first = next((row for row in rows if row.verdict.diverges and row.name != "grad_norm"), None)
    if first is None or not _is_of_a_stage(first) or len(_ranks(first)) < 2:
        return None
    own = [row for row in rows if row.key.step == first.key.step]
    if any(row.verdict.diverges and not _is_of_the_backward(row) for row in own):
        return None
    gradients = [row for row in own if _is_of_a_stage(row) and row.skipped is None]
    layer = first.name.removeprefix("grad.").rpartition(".")[0]
    around = layer.rpartition(".")[0]
    if not around:
        return None
    beside = [row for row in gradients if row.name.startswith(f"grad.{around}.")]
    weights = {row.name.removeprefix("grad.").rpartition(".")[0]: row for row in beside if row.name.endswith(".weight")}
    off = [name for name, row in weights.items() if row.verdict.diverges]
    last = max(gradients.index(row) for row in beside)
    before = gradients[last + 1 :]
    lost = [row for row in before if row.verdict.diverges]
    if layer not in off or len(weights) - len(off) < _FEWEST_BESIDE or len(lost) < max(_FEWEST, _MOSTLY * len(before)):
        return None
    # Were it the layer's own gradient alone that is off, nothing before it would be; and an expert feeds no other.
    if any("expert" in name for name in weights) or lost[0] is not before[0]:
        return None
    ranks = _ranks(first)
    those, right = (" and ".join(names) for names in (off, [name for name in weights if name not in off]))
    return (
        Fault(
            "went back in parts", ranks,
            f"the gradient of {those} is another, while those of {right} beside it and of all behind agree, and so "
            f"does the forward; all {len(lost)} before are others: of what flows back through {those} a part is lost "
            f"or there twice between {whose(ranks)} (values of other ranks that are gathered without a gradient, a "
            "sum over ranks that is not made)",
        ),
        first, len(off) + len(lost),
    )  # fmt: skip


def left_out_of_the_loss(rows: Sequence[TensorVerdict]) -> tuple[Fault, TensorVerdict, int] | None:
    """Ranks whose loss alone is another while the forward agrees, and which first gradient is off for it: where that is
    a router's, and those of all behind it agree, what the loss has otherwise begins at the router.

    rows: in order of computation, those that agree too.
    """
    first = next((row for row in rows if row.verdict.diverges), None)
    if first is None or first.ranks is None or not first.name.endswith("loss"):
        return None
    own = [row for row in rows if row.key.step == first.key.step]
    if any(row.verdict.diverges and not _is_of_the_backward(row) and not row.name.endswith("loss") for row in own):
        return None
    gradients = [row for row in own if _is_of_a_stage(row) and row.skipped is None]
    off = next((number for number, row in enumerate(gradients) if row.verdict.diverges), None)
    if not off or not _ROUTER.search(gradients[off].name):
        return None
    some = 0 < len(first.ranks.parted) < len(first.ranks.ranks)
    ranks = first.ranks.parted if some else first.ranks.ranks
    router = gradients[off].name.removeprefix("grad.")
    return (
        Fault(
            "router's loss", ranks,
            f"loss of {whose(ranks)} is another while all that was recorded of the forward agrees, and of the "
            f"gradients {router}'s is the first that is off, while those of all behind it agree: a term of the loss "
            "that begins at the router is left out or weighs otherwise (auxiliary or balance loss, z loss)",
        ),
        first, 1,
    )  # fmt: skip


def lost_at_a_router(rows: Sequence[TensorVerdict]) -> tuple[Fault, TensorVerdict, int] | None:
    """The router whose gradient is the first that is off, while those of its experts agree; with its row, and how many
    gradients are off.

    Experts that are right were handed back what they are due, so that what is off comes back through the weights by
    which their outputs are added, or from a loss of the router's own.

    rows: in order of computation, those that agree too.
    """
    first = next((row for row in rows if row.verdict.diverges), None)
    if first is None or not _is_of_a_stage(first) or len(_ranks(first)) < 2 or not _ROUTER.search(first.name):
        return None
    own = [row for row in rows if row.key.step == first.key.step]
    if any(row.verdict.diverges and not _is_of_the_backward(row) and row.name != "grad_norm" for row in own):
        return None
    gradients = [row for row in own if _is_of_a_stage(row) and row.skipped is None]
    router = first.name.removeprefix("grad.").removesuffix(".weight")
    around = router.rpartition(".")[0]
    experts = [row for row in gradients if row.name.startswith(f"grad.{around}.") and _is_of_experts(row, router)]
    behind = gradients[: gradients.index(first)]
    before = [row for row in gradients[len(behind) + 1 :] if row not in experts]
    lost = [row for row in before if row.verdict.diverges]
    if len(experts) < _FEWEST_BESIDE or any(row.verdict.diverges for row in experts) or not behind:
        return None
    if len(lost) < _MOSTLY * len(before):
        return None
    ranks = _ranks(first)
    return (
        Fault(
            "router's gradient", ranks,
            f"the gradient of {router} is the first that is off, while those of its experts and of all behind it "
            f"agree, and so does the forward: on {whose(ranks)} what comes back to the router through the weights that "
            "experts' outputs are added by is not all of it (weights or probabilities that travel to other ranks' "
            "experts, or are gathered, without a gradient), or a loss of the router's own weighs otherwise",
        ),
        first, 1 + len(lost),
    )  # fmt: skip


def _is_of_experts(row: TensorVerdict, router: str) -> bool:
    """Whether a weight beside a router is one of its experts: by name, or all of them in one (w1 [E, ...])."""
    if row.name.startswith(f"grad.{router}."):
        return False
    shape = row.a[1].shape if row.a is not None else ()
    return "expert" in row.name or len(shape) == 3


def layers_of_several_stages(rows: Sequence[TensorVerdict]) -> Fault | None:
    """Layers of the first step that diverges which two stages of a pipeline have, of which all others are on one."""
    first = next((row for row in rows if row.verdict.diverges), None)
    if first is None or first.ranks is None or not first.ranks.parted:
        return None
    of_layers: dict[int, set[tuple[int, ...]]] = {}
    stages: set[tuple[int, ...]] = set()
    for row in rows:
        if row.key.step != first.key.step or row.ranks is None or not row.name.startswith(("grad.", "param.")):
            continue
        found = _LAYER.match(row.name)
        if found is None or "expert" in row.name:
            stages |= {_ranks(row)} if found is None else set()
        else:
            of_layers.setdefault(int(found[1]), set()).add(_ranks(row))
    alone = {next(iter(of)) for of in of_layers.values() if len(of) == 1} | stages
    for layer, of in sorted(of_layers.items()):
        (own, *more) = of
        parts = [one for one in alone if set(one) < set(own)]
        if more or len(parts) < 2 or any(set(one) & set(other) for one in parts for other in parts if one != other):
            continue
        late = tuple(rank for rank in own if rank in first.ranks.parted)
        if set().union(*parts) == set(own) and late and len(late) < len(own):
            return Fault(
                "layer twice", late,
                f"layer {layer} is on {whose(own)}, which are several stages of a pipeline, and all others on one "
                f"stage each: it is computed twice, the boundary of the stages is off by a layer ({whose(late)} "
                f"begin{'s' * (len(late) == 1)} too early, or the stage before ends too late)",
            )  # fmt: skip
    return None


def _is_of_the_backward(row: TensorVerdict) -> bool:
    return row.name.startswith(("grad.", "param.")) or naming.meaning(row.name).kind == "gradient"


def _is_of_a_stage(row: TensorVerdict) -> bool:
    return row.name.startswith("grad.") and row.key.micro is None and row.ranks is not None


def _ranks(row: TensorVerdict) -> tuple[int, ...]:
    return row.ranks.ranks if row.ranks is not None else ()


def _are_one(row: TensorVerdict, other: TensorVerdict) -> bool:
    if row.a is None or row.b is None or other.a is None or other.b is None:
        return False
    return same_values(row.a[1], other.a[1]) and same_values(row.b[1], other.b[1])
