"""Tokens of a layer of experts that are off just where their experts are on several ranks: each rank's experts make
something that is right by itself, and what is put together of several ranks is not (weights that each rank normalises
over its own experts, a combination that lacks or scales what other ranks made).

Which experts a token goes to, the router's scores say: its k largest. Experts lie on the ranks in turn.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from replay_core import naming, pages
from replay_core.compare.judging.faults import Fault, whose
from replay_core.compare.pairing.ranks import HeldByRanks, standing_for
from replay_core.records import TensorRef
from replay_core.regexes import regex

_SCORES = regex(r"(?:^|\.)(?:\w*router\w*|gate|wg)\.output")
#: Tokens on either side, at least, that the split is told by; how many may not fit it; and experts of a token.
_FEWEST, _MISFIT, _MOST_EXPERTS = 4, 0.0, 8
#: A token is right where it is off by so small a part of what the worst is.
_RIGHT = 1e-3
_MOST = 1 << 22


def explain(
    what: str, whole: TensorRef, laid: TensorRef, ranks: Sequence[int], before: Sequence[HeldByRanks]
) -> Fault | None:
    """Of a layer's output [sample, token, H] or [token, H]. before: what stands before it, the last first."""
    if whole.shape != laid.shape or len(whole.shape) < 2 or whole.numel > _MOST or len(ranks) < 2:
        return None
    around = naming.module_of(what)
    scores = next((
        one for one in before if _SCORES.search(one.parts[0].name) and one.parts[0].name.startswith(f"{around}.")
    ), None)  # fmt: skip
    if scores is None or not all(ref.is_readable for ref in (whole, laid, *scores.parts)):
        return None
    made = standing_for(scores) if scores.is_cut else scores.parts[0]
    experts = made.shape[-1]
    if made.numel // experts * whole.shape[-1] != whole.numel or experts % len(ranks) or experts == len(ranks):
        return None
    score_NE = pages.array(made).astype(np.float64).reshape(-1, experts)
    there, here = (pages.array(ref).astype(np.float64).reshape(len(score_NE), -1) for ref in (whole, laid))
    off_N = np.abs(here - there).max(1)
    if not np.isfinite(off_N).all() or not off_N.any():
        return None
    is_off_N = off_N > _RIGHT * off_N.max()
    owner_NE = np.argsort(-score_NE, axis=1, kind="stable") // (experts // len(ranks))
    for count in range(2, min(_MOST_EXPERTS, experts - 1) + 1):
        is_spread_N = (owner_NE[:, :count] != owner_NE[:, :1]).any(1)
        split = min(int(is_spread_N.sum()), int((~is_spread_N).sum()))
        if split >= _FEWEST and (is_spread_N != is_off_N).mean() <= _MISFIT:
            return Fault(
                "experts spread", tuple(ranks),
                f"{what} is off at the {int(is_off_N.sum())} tokens whose {count} experts are on several of "
                f"{whose(ranks)}, and right at all {int((~is_off_N).sum())} whose experts are on one: what is put "
                "together of several ranks' experts is not what one process makes (each rank normalises a token's "
                "weights over its own experts, or what other ranks' experts made is lost or scaled)",
            )  # fmt: skip
    return None
