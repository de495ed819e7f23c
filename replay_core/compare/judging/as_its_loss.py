"""What a loss leaves at the logits, where the ranks' losses are made larger for the mean that is taken over them.

A data-parallel rank carries back the mean over its own samples, and DDP and FSDP take the mean over the ranks of the
weights' gradients only. What stands at the logits before is then a multiple of what one process has there, by the
factor that its loss is, which the losses alone told (`pairing.step_losses`, `pairing.step_numbers`).
"""

from __future__ import annotations

from replay_core.compare.judging.products import NEAR
from replay_core.compare.judging.tensors import TensorVerdict
from replay_core.compare.judging.verdict import Verdict
from replay_core.compare.pairing.micro_batch_pair import MicroBatchPair

#: What a fault of a multiple is called (`judging.algebra`).
_MULTIPLES = ("too much", "too little")


def is_as_its_loss(row: TensorVerdict, micro_pair: MicroBatchPair) -> bool:
    """Whether all that parts a gradient at the logits from the other run's is the factor that parts their losses."""
    fault = row.ranks.fault if row.ranks is not None else None
    if row.verdict is not Verdict.DIFF or row.key.stage != "loss_gradient" or fault is None or row.ranks is None:
        return False
    if row.context is not None and row.context.bitwise_only:
        return False
    if micro_pair.averaged == 1.0 or not fault.factor or fault.kind not in _MULTIPLES:
        return False
    of_b = fault.factor if row.ranks.which == "b" else 1.0 / fault.factor
    return abs(of_b * micro_pair.averaged - 1.0) <= NEAR
