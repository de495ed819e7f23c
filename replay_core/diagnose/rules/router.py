"""A mixture of experts whose router has collapsed: all tokens go the same way."""

from __future__ import annotations

import numpy as np

from replay_core import pages
from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.finding import Finding, Where, listed, shown, warning
from replay_core.diagnose.rule import rule, skip_if
from replay_core.diagnose.rules.routing import routing_of

#: Tokens that all choose the same experts before it is no chance.
TOKENS = 64
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts", "num_moe_experts")


@rule("D111", "all tokens are routed to the same experts", link="rollout_logprobs", scope="batch", lasts=True,
      explains=("L08",), source="a load-balancing loss or a router bias that is missing")  # fmt: skip
def collapsed(batch: StepBatch) -> Finding | None:
    """Recorded routing whose layers, all of them, send each of 64 tokens and more to one and the same set of experts: a
    warning. Not where these are all there are, as far as the run states.
    """
    recorded = routing_of(batch)
    skip_if(not recorded, "no routing is recorded (routed_experts): only mixtures of experts have one")
    there = batch.laid.algorithm.number(*_EXPERTS)
    for record, ref in recorded:
        experts = np.asarray(pages.array(ref))
        tokens = np.sort(experts.reshape(-1, *experts.shape[-2:]), axis=-1)
        # Padding that nothing was routed for holds one number in every place.
        heard = tokens[(np.ptp(tokens, axis=-1) > 0).all(axis=-1)] if tokens.shape[-1] > 1 else tokens
        if len(heard) < TOKENS or (heard != heard[:1]).any():
            continue
        chosen = np.unique(heard[0])
        if there is not None and heard.shape[-1] >= there:
            return None
        return warning(
            f"every token is routed to the same experts: {listed(chosen.tolist())} of each layer get all "
            f"{len(heard)} tokens of {ref.name}, the others none",
            Where.of(record, ref.name),
            shown("experts of a layer in use", heard.shape[-1], "all" if there is None else f"up to {there:g}"),
            shown("tokens routed", len(heard)),
            cause="the router has collapsed: its load-balancing loss or bias is off or has the wrong sign, or the "
            "checkpoint's router was not loaded; what the model is worth is that of these experts alone",
            next_step="count tokens by expert in the model that the run began with; check aux_loss_coef",
        )
    return None
