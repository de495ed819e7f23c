"""A run whose updates change nothing: gradients come, and the policy is the same in its last step as in its first."""

from __future__ import annotations

import math
from statistics import fmean, median, pvariance

from replay_core.diagnose import trends
from replay_core.diagnose.finding import Finding, finding
from replay_core.diagnose.signals import RunLog, Series

#: Steps of a run in which no update has an effect; the gradient that is no small one; the sum of learning rates after
#: which any policy has moved; what a ratio may be off 1 by, and a KL of one policy to itself, where two kernels
#: make it.
_IDLE, _A_GRADIENT, _SUM_OF_RATES, _OFF_ONE, _NO_KL = 24, 1e-2, 1e-2, 1e-6, 1e-7


def without_effect(log: RunLog) -> Finding | None:
    """A run whose gradients are none of nothing and whose policy is the same from its first step to its last."""
    grads, rates, reward = log.get("grad_norm"), log.get("learning_rate"), log.get("reward")
    if grads is None or rates is None or reward is None or not rates.finite or not grads.finite:
        return None
    rests = [
        (series, value)
        for name, value, off in (("clip_fraction", 0.0, 0.0), ("policy_kl", 0.0, _NO_KL), ("ratio_max", 1.0, _OFF_ONE))
        for series in log.all(name)[:1]
        if len(series.finite) >= _IDLE and all(abs(each - value) <= off for each in series.finite)
    ]
    logged = sum(log.get(name) is not None for name in ("clip_fraction", "policy_kl", "ratio_max"))
    entropy, kl = log.get("entropy"), log.get("kl")
    if not rests or len(rests) < logged or entropy is None or min(median(grads.finite), max(rates.finite)) <= 0:
        return None
    several = log.algorithm.updates >= 2
    sum_of_rates = fmean(rates.finite) * len(reward.finite)
    if median(grads.finite) < _A_GRADIENT or not (several or sum_of_rates >= _SUM_OF_RATES):
        return None
    if not (_stays(reward) and _stays(entropy)) or (kl is not None and any(abs(each) > _NO_KL for each in kl.finite)):
        return None
    held = [series for series in log.all("held_out") if len(series.finite) > 2]
    first, value = rests[0]
    return finding(
        "error" if several else "warning",
        f"no update has an effect: {', '.join(series.name for series, _ in rests)} is exactly {value:g} in all "
        f"{len(first.finite)} steps"
        + (f" in spite of {log.algorithm.updates:g} updates of a batch" if several else "")
        + f", and neither {reward.name} ({median(reward.finite):.3g}) nor {entropy.name} "
        f"({median(entropy.finite):.3g}) "
        f"moves, at a gradient norm of {median(grads.finite):.2g} and a learning rate of {median(rates.finite):.2g}",
        first,
        *(series.shown(value, "another number behind the first update") for series, value in rests),
        reward.shown(trends.level(reward.finite), "to move as the policy learns"),
        entropy.shown(trends.level(entropy.finite), "to move as the policy learns"),
        grads.shown(median(grads.finite)),
        *(series.shown(series.last.value, f"was {series.finite[0]:.3g}") for series in held[:1]),
        link="optimizer",
        cause="the optimizer holds other parameters than the model that is run: it was made before the model was "
        "wrapped (FSDP, DDP), moved, loaded or given its adapter; or its step is never taken or is undone "
        "(weights that "
        "are loaded anew, updates that bf16 weights round away)",
        next_step="compare a weight before and after optimizer.step(); make the optimizer of the wrapped model's own "
        "parameters; rldbg record --params . -- YOUR COMMAND, then compare the weights of two of its steps",
    )


def _stays(series: Series) -> bool:
    """Whether it neither drifts by more than chance has it nor is another in its last third than in its first."""
    values = series.finite
    part = len(values) // 3
    if len(values) < _IDLE or len(set(values)) < 2 or abs(trends.drift(values)) > trends.DRIFT_Z:
        return False
    first, last = values[:part], values[-part:]
    error_of = math.sqrt((pvariance(first) + pvariance(last)) / part)
    return abs(fmean(first) - fmean(last)) <= trends.DRIFT_Z * error_of
