"""A mixture of experts whose router has collapsed: all tokens go the same way, or more and more of them do."""

from __future__ import annotations

import numpy as np

from replay_core import pages
from replay_core.diagnose import trends
from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.finding import Finding, Where, listed, shown, warning
from replay_core.diagnose.rule import rule, skip_if
from replay_core.diagnose.rules.routing import routing_of
from replay_core.diagnose.signals import RunLog

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


#: Steps, and how many times its first level the balance of experts grows to.
STEPS, GROWS = 12, 1.5


@rule(
    "L64",
    "the router sends more and more tokens to few experts",
    link="trend",
    scope="signals",
    needs=("balance_loss|expert_load",),
    source="Megatron: load_balancing_loss",
)
def unbalanced(log: RunLog) -> Finding | None:
    """A loss that balances experts, or the largest load of one over the mean, that rises by half and more (the last
    quarter of 12 steps and more over the first ones, a rise that chance does not explain, to its most of the run):
    a warning.
    """
    grown = []
    for series in (*log.all("expert_load"), *log.all("balance_loss")):
        values = series.finite
        if len(values) < STEPS or min(values) < 0:
            continue
        begun, now = trends.level(values[:3]), trends.level(values, len(values) // 4)
        middle = trends.level(values[: len(values) // 2])
        if begun > 0 and now >= GROWS * begun and now >= middle and trends.rises(values):
            grown.append((series, begun, now))
    if not grown:
        return None
    series, begun, now = grown[0]
    return warning(
        f"the router gets unbalanced: {series.name} rises from {begun:.3g} to {now:.3g}"
        + "".join(f", {other.name} from {was:.3g} to {to:.3g}" for other, was, to in grown[1:3])
        + ": more and more tokens go to few experts",
        series.ended,
        *(one.shown(to, f"about {was:.3g}") for one, was, to in grown[:3]),
        cause="nothing holds the experts' loads alike while the policy is trained: a load-balancing loss whose weight "
        "is too small beside the policy's (or is off), a bias of the router that is not updated, a router that is "
        "trained at the policy's learning rate. Experts that get no tokens learn nothing, and the busiest are late",
        next_step="raise the weight of the balance loss (moe_aux_loss_coeff, router_aux_loss_coef), or freeze the "
        "router; count tokens by expert",
    )
