"""Gradients that alone are off in a step, where all others agree: what they have in common says whose sum it is.

A weight that the first and the last stage of a pipeline both have (an embedding that is the head too) has in either the
sum of both. Experts are summed and divided over other ranks than all else: those that have the same experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from replay_core import naming
from replay_core.compare.judging.faults import Fault, whose
from replay_core.regexes import regex

if TYPE_CHECKING:
    from replay_core.compare.judging.tensors import TensorVerdict

_EMBEDDING = regex(r"(?:^|[._])(?:embed\w*|wte|tok_embeddings|word_embeddings|lm_head|output_layer)\.weight$")
_ATTENTION = regex(r"(?:^|[._])(?:\w*attn|\w*attention|mixer)\b")
#: Fewer gradients that agree say nothing of those that do not.
_FEWEST = 4
_EXPERTS = regex(r"experts?(?:[._\d]|$)")
_SCALED = ("too much", "too little")


def tied_weight(rows: Sequence[TensorVerdict]) -> tuple[Fault, TensorVerdict, int] | None:
    """The embedding that stages of a pipeline share, where its gradient alone is off and each other's is of one stage.

    rows: in order of computation, those that agree too.
    """
    first = next((row for row in rows if row.verdict.diverges), None)
    if first is None or first.ranks is None or _EMBEDDING.search(first.name) is None:
        return None
    own = _gradients(rows, first)
    ranks = first.ranks.ranks
    others = [row for row in own if row is not first]
    if first not in own or len(ranks) < 2 or len(others) < _FEWEST or any(row.verdict.diverges for row in others):
        return None
    if any(row.ranks is None or set(row.ranks.ranks) >= set(ranks) for row in others):
        return None
    return (
        Fault(
            "tied weight", ranks,
            f"{first.name.removeprefix('grad.')}'s gradient is the only one that is off, and the only one that stages "
            f"of the pipeline share ({whose(ranks)}: an embedding that is the head too); the forward and all "
            f"{len(others)} others agree: its sum over the first and the last stage is not made once, at the end of "
            "the step (of every micro-batch's, so that what was summed before is summed again; twice; or of another "
            "buffer)",
        ),
        first, 1,
    )  # fmt: skip


def of_experts(fault: Fault, name: str | None, rows: Sequence[TensorVerdict]) -> Fault:
    """The fault of a gradient that is scaled; with whose number of ranks it is, where experts' are off alone."""
    if fault.kind not in _SCALED:
        return fault
    first = next((row for row in rows if row.name == name and row.verdict.diverges), None)
    if first is None or not first.name.startswith("grad."):
        return fault
    own = _gradients(rows, first)
    off, rest = ([row for row in own if row.verdict.diverges is parts] for parts in (True, False))
    if len(rest) < _FEWEST or not all(map(_is_of_experts, off)) or any(map(_is_of_experts, rest)):
        return fault
    return replace(
        fault,
        sentence=f"{fault.sentence}. Experts' gradients alone are off so ({len(off)}), and all {len(rest)} others are "
        "the other run's: experts' are divided by, or summed over, the number of ranks of another group (those that "
        "have the same experts, as expert data parallelism has them) than is due, which is that of all data-parallel "
        "ranks",
    )


def _is_of_experts(row: TensorVerdict) -> bool:
    """Whether it is of an expert, or of a layer's experts in one tensor."""
    held = row.a or row.b
    return _EXPERTS.search(row.name) is not None or (held is not None and len(held[1].shape) == 3)


def _gradients(rows: Sequence[TensorVerdict], of: TensorVerdict) -> list[TensorVerdict]:
    return [
        row for row in rows
        if row.key.step == of.key.step and row.name.startswith("grad.") and row.skipped is None
    ]  # fmt: skip


def drawn_by_itself(fault: Fault, name: str | None, rows: Sequence[TensorVerdict]) -> Fault:
    """The fault of ranks that have another output of the same tokens than their like, all before it being right; with
    what makes it so.
    """
    first = next((row for row in rows if row.verdict.diverges), None)
    if fault.kind != "apart" or first is None or first.name != name or first.ranks is None:
        return fault
    if first.name in ("policy_logprobs", "old_logprobs") and first.ranks.axis == 0 and rows[0] is first:
        those = whose(fault.ranks)
        return replace(
            fault,
            sentence=f"{fault.sentence}. Each has samples of its own, and nothing of the forward is recorded before: "
            f"{those} may have other weights (a sync of weights, or a step, that did not reach {those}), or compute in "
            "another mode or precision",
        )
    of_module = first.name.endswith(".output") and naming.is_module_tensor(first.name)
    if not of_module or not set(fault.ranks) < set(first.ranks.ranks):
        return fault
    # The first share of a sequence alone attends to no other's.
    is_first_right = first.ranks.ranks[0] not in fault.ranks
    is_cut = is_first_right and first.ranks.relation == "slices" and first.ranks.axis == 1
    if first.ranks.relation != "all" and not (is_cut and _ATTENTION.search(first.name) is not None):
        return fault
    before = rows[: next(at for at, row in enumerate(rows) if row is first)]
    if not any(naming.is_module_tensor(row.name) and row.key.step == first.key.step for row in before):
        return fault
    weights = [
        row for row in rows
        if row.key.step == first.key.step and row.name.startswith(f"param.{naming.module_of(first.name)}.")
    ]  # fmt: skip
    own = "" if weights and not any(row.verdict.diverges for row in weights) else ", or a weight of its own"
    if is_cut:
        return replace(
            fault,
            sentence=f"{fault.sentence}. What is recorded before it agrees on all of {whose(first.ranks.ranks)}, which "
            f"share sequences (context parallelism), and {whose(sorted(set(first.ranks.ranks) - {*fault.ranks}))} "
            "needs nothing of others: what attention makes of other ranks' keys and values (which of them, their "
            f"positions, or how the blocks' sums are put together by their log-sum-exp){own}",
        )
    return replace(
        fault,
        sentence=f"{fault.sentence}. What is recorded before it agrees on {whose(first.ranks.ranks)}, which have "
        "the same tokens: what is drawn at random between (dropout, with a seed of the rank's own where all are to "
        f"draw the same){own}",
    )
