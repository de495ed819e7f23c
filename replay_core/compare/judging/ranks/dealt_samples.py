"""Samples that are dealt by another number than the rank of a group: ranks of one group compute other ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replay_core import naming
from replay_core.compare.judging import token_rows
from replay_core.compare.judging.faults import is_open
from replay_core.compare.judging.ranks.row import RowOfRanks, say_first
from replay_core.compare.judging.ranks.tokens_given import TokensGiven
from replay_core.compare.judging.verdict import Verdict
from replay_core.compare.pairing.ranks import HeldByRanks, laid_of
from replay_core.records import TensorRef

if TYPE_CHECKING:
    from replay_core.compare.judging.tensors import TensorVerdict


class DealtSamples:
    """Of a step, the first activation that is off, in whatever way, with what the ranks hold of it, until its weight
    says whose samples it was made of.
    """

    def __init__(self, tokens: TokensGiven) -> None:
        self._tokens = tokens
        self._first: dict[int | None, tuple[TensorVerdict, HeldByRanks] | None] = {}

    def note(self, of: RowOfRanks) -> None:
        if of.row.verdict in (Verdict.DIFF, Verdict.SHAPE) and naming.is_module_tensor(of.name):
            self._first.setdefault(of.step, (of.row, of.held))

    def explain(self, of: RowOfRanks) -> None:
        """Whether the step's first activation that is off is the output of this weight, of which ranks that were given
        the same samples do not hold every slice: the samples are dealt by another number than the rank of a group.
        """
        weight, known = of.held, self._first.get(of.step)
        name = of.name.removeprefix("param.").removesuffix(".weight")
        if known is None or known[0].name != f"{name}.output" or known[0].ranks is None or weight.axis != 0:
            return
        first, output = known
        self._first[of.step] = None
        is_alike = weight.ranks == of.together.ranks and len(set(weight.stretches)) >= 2
        if first.ranks is None or not is_open(first.ranks.fault) or not is_alike:
            return
        # Of FSDP and the like every rank has all channels of the output; a lookup's rows are words.
        widths = {ref.shape[0] for ref in weight.parts}
        is_cut_alike = len(widths) == 1 and all(_own_width(ref) in widths for ref in output.parts)
        if not is_cut_alike and not f"{name}.weight".endswith(naming.EMBEDDINGS):
            return
        fault = token_rows.dealt_otherwise(first.name, weight, self._tokens.of_step(of.step))
        if fault is not None:
            say_first(first, fault)


def _own_width(output: TensorRef) -> int | None:
    """How many channels a rank has of an output, which may be laid together of those of ranks with the same samples."""
    if not output.shape:
        return None
    laid = laid_of(output, len(output.shape) - 1)
    return (output if laid is None else laid.parts[0]).shape[-1]
