"""Rows of several experts in one tensor that stand in another order than the other run's.

Which token a row is of hangs on how tokens were sent: by loops over experts, sorted, traded between ranks. Without a
record of it rows do not face each other one by one. That they are the same rows says nothing of where each went back
to: what is computed of them next says it.
"""

from __future__ import annotations

import numpy as np

from replay_core import naming, pages
from replay_core.compare.judging import limits
from replay_core.compare.judging.verdict import Context
from replay_core.compare.pairing.align import MicroBatchPair, TensorPair, pair_tensors
from replay_core.compare.pairing.same_rows import same_rows
from replay_core.regexes import regex

#: Rows that are looked for among each other, at most, and channels at least: narrower rows are others' by chance.
_MOST_ROWS, _FEWEST_CHANNELS = 2048, 8
#: How far what follows may be off, of how far the rows are off in place: rows of other tokens leave more.
_PASSED_ON = 0.1
#: One of a layer's experts, by its number: its rows are looked for where ranks are laid together.
_ONE_EXPERT = regex(r"\.experts\.(?:.*\.)?(?:expert_?)?\d+(?:\.|$)")
_LAYER = regex(r"^((?:.*\.)?)(\d+)\.")


def moved_rows(pair: TensorPair, context: Context) -> int | None:
    """How many rows of experts stand elsewhere than in the other run, where all of them are that run's to rounding;
    None where they are not, or of one expert alone.
    """
    assert pair.a is not None
    assert pair.b is not None
    a, b = pair.a[1], pair.b[1]
    if not naming.is_of_experts(pair.name) or _ONE_EXPERT.search(f".{naming.module_of(pair.name)}"):
        return None
    if (
        a.shape != b.shape
        or len(a.shape) < 2
        or a.shape[-1] < _FEWEST_CHANNELS
        or not (a.is_readable and b.is_readable)
    ):
        return None
    if not 1 < a.numel // a.shape[-1] <= _MOST_ROWS:
        return None
    there_ND, here_ND = (pages.array(ref).astype(np.float64).reshape(-1, ref.shape[-1]) for ref in (a, b))
    order = same_rows(there_ND, here_ND)
    if order is None:
        return None
    off_N, size_N = (np.linalg.norm(each, axis=1) for each in (here_ND[order] - there_ND, there_ND))
    limit = limits.REL_L2[context.column][context.row]
    if (off_N > limit * np.maximum(size_N, float(np.median(size_N)))).any():
        return None
    return int((order != np.arange(len(order))).sum())


def what_follows(pair: TensorPair, micro_pair: MicroBatchPair) -> list[TensorPair]:
    """What is computed of a layer's experts next, nearest first: what the modules around them in their layer put out;
    where none of these was recorded, the next layer's outputs, else the log-probabilities.
    """
    module = naming.module_of(pair.name)
    layer = _LAYER.match(module)
    outermost = layer.end() - 1 if layer is not None else 1
    around = [module[:at] for at in range(len(module) - 1, outermost - 1, -1) if module[at] == "."]
    every = [
        one for one in pair_tensors(micro_pair)
        if one.a is not None and one.b is not None and (one.a[1].is_readable and one.b[1].is_readable)
    ]  # fmt: skip
    outputs = [one for one in every if naming.is_module_tensor(one.name) and not naming.is_input(one.name)]
    found = [one for of in around for one in outputs if naming.module_of(one.name) == of]
    if not found and layer is not None:
        following = f"{layer[1]}{int(layer[2]) + 1}."
        found = [one for one in outputs if one.name.startswith(following) and not naming.is_of_experts(one.name)]
    return found or [one for one in every if one.name == "policy_logprobs"]


def is_passed_on(follows_rel_l2: float, rows_rel_l2: float) -> bool:
    """Whether what follows is off by as much as rows of other tokens would leave of it."""
    return follows_rel_l2 > _PASSED_ON * rows_rel_l2
