"""Engine against trainer, from logged metrics: how far apart (D09), since when (D12), without updates (D13)."""

from __future__ import annotations

import math
from collections.abc import Iterable

from replay_core.diagnose import trends
from replay_core.diagnose.finding import Evidence, Finding
from replay_core.diagnose.rule import Skip
from replay_core.diagnose.signals import Part, Series, signal_rule

#: signal -> (warning, error, which side is bad). Sources: NeMo-RL docs, slime and miles CI, verl-omni#637.
LIMITS: dict[str, tuple[float, float, int]] = {
    "logprob_diff": (0.03, 0.1, +1),
    "mult_prob_error": (1.05, 1.2, +1),
    "rollout_k3": (1e-3, 1e-1, +1),
    # A bf16 mixture of experts lies at 4e-3 and 0.998 when healthy; five times its distance is none of that.
    "prob_diff": (0.02, 0.1, +1),
    "prob_pearson": (0.98, 0.9, -1),
}
#: D12: growth of the level over its beginning.
JUMP = 5.0

_NEXT = "rldbg record -- YOUR COMMAND, then rldbg diagnose rldbg-dump tells them apart (D08, D10, D11, D12, D16)"


def _line(series: Series) -> str:
    return f"{series.source}, line {series.last.line}" if series.last.line else series.source


@signal_rule(
    "D09",
    "engine and trainer disagree",
    link="rollout_logprobs",
    needs=("logprob_diff|mult_prob_error|rollout_k3|prob_diff|prob_pearson",),
    source="NeMo-RL docs; slime and miles CI; verl-omni#637",
)
def mismatch(part: Part) -> Iterable[Finding]:
    """D09. Level (median of the last 10 steps) of what is logged of d = logp_trainer - logp_rollout.

    mean|d| over 0.03 (0.1 an error), mean e^|d| over 1.05 (1.2), k3 over 1e-3 (0.1), mean difference of the
    probabilities over 0.02 (0.1), their Pearson under 0.98 (0.9). One number does not name a cause: a shift, a
    temperature, stale weights and packing all look like this. A healthy bf16 mixture of experts has mean|d| of 0.064.
    """
    worst: tuple[float, Series, float, float] | None = None
    for signal, (warn, bad, side) in LIMITS.items():
        for series in part.all(signal)[:1]:
            if not series.finite:
                continue
            now = trends.level(series.finite)
            if (now - warn) * side > 0:
                grade = 2.0 if (now - bad) * side > 0 else 1.0
                if worst is None or grade > worst[0]:
                    worst = grade, series, now, warn
    if worst is None:
        return
    grade, series, now, warn = worst
    steps = tuple(
        p.step for p in series.points if p.step is not None and (p.value - warn) * LIMITS[series.signal][2] > 0
    )
    first = next(p for p in series.points if (p.value - warn) * LIMITS[series.signal][2] > 0)
    yield Finding(
        "D09",
        "error" if grade > 1 else "warning",
        f"engine and trainer disagree: {series.name} is {now:.3g}",
        (Evidence(series.name, now, f"{'<' if LIMITS[series.signal][2] > 0 else '>'} {warn:g}", _line(series)),),
        "another precision or kernel, a temperature or top-p that one side applies, weights that were not synced, "
        "a chat template, packing: the log has one number for all of them",
        _NEXT,
        "rollout_logprobs",
        "NeMo-RL docs; slime and miles CI",
        first.where(series.name),
        steps,
    )


@signal_rule(
    "D13",
    "engine and trainer drift apart without an update",
    link="rollout_logprobs",
    needs=("learning_rate", "logprob_diff|rollout_k3|prob_diff"),
    source="open-instruct#1473, vime#64",
)
@signal_rule(
    "D12",
    "engine and trainer drift apart",
    link="rollout_logprobs",
    needs=("logprob_diff|rollout_k3|prob_diff",),
    source="trl#5312 (0.015 to 0.201), verl#7495, open-instruct#1473, vime#64",
)
def drifting(part: Part) -> Iterable[Finding]:
    """D12, D13. The distance between engine and trainer grows over the steps (at least 8, p < 0.005).

    Fivefold over its beginning (median of the first 3) while the weights move is D12: the engine keeps old weights.
    A rise while the learning rate is 0 (of any size) is D13: nothing is trained, so the engine itself drifts.
    """
    series = next(
        (s for name in ("logprob_diff", "rollout_k3", "prob_diff") if (s := part.get(name)) is not None), None
    )
    values = [] if series is None else series.finite
    if series is None or len(values) < trends.MIN_STEPS:
        raise Skip(f"needs the distance between engine and trainer at {trends.MIN_STEPS} steps or more")
    z = trends.drift(values)
    if z <= trends.DRIFT_Z:
        return
    begun, now = trends.level(values[:3]), trends.level(values, 3)
    rate = part.get("learning_rate")
    still = rate is not None and rate.finite and not any(rate.finite)
    grown = now / begun if begun > 0 else math.inf
    if not still and grown < JUMP:
        return
    finite = [point for point in series.points if math.isfinite(point.value)]
    mark = next((p for p in finite if p.value >= begun * JUMP), finite[-1])
    yield Finding(
        "D13" if still else "D12",
        "warning",
        f"{series.name} grows from {begun:.3g} to {now:.3g}" + (" although the learning rate is 0" if still else ""),
        (Evidence("growth", grown, f"< {JUMP:g}", _line(series)), Evidence("Mann-Kendall z", z, f"< {trends.DRIFT_Z}")),
        "nothing is trained: the engine's caches or kernels drift, or weights change on the way to it"
        if still
        else "the engine samples with old weights: the sync does not reach it (LoRA not delivered, "
        "a renamed parameter)",
        _NEXT
        if still
        else "rldbg record -- YOUR COMMAND, then rldbg replay rldbg-dump --model STEP_A --model STEP_B "
        "--against rollout_logprobs ranks which weights sampled the tokens",
        "rollout_logprobs",
        "trl#5312, verl#7495" if not still else "open-instruct#1473, vime#64",
        mark.where(series.name),
        tuple(p.step for p in finite[-3:] if p.step is not None),
    )


@signal_rule(
    "D20", "responses are cut", link="tokens", needs=("truncated",), source="miles advisory (0.25); autocontext#1067"
)
def truncated(part: Part) -> Iterable[Finding]:
    """D20. Level of the fraction of responses that end at the token limit: 0.25 and more a warning, 1 an error.

    Where the same steps show that rewards still differ within groups, the cut responses teach something, and it is
    info. With a reward of 0 for all of them it is the cause of D01.
    """
    series = part.get("truncated")
    if series is None or not series.finite:
        raise Skip("the fraction of truncated responses is not finite in any step")
    now = trends.level(series.finite)
    if now < 0.25:
        return
    spread = next((s for s in part.all("reward_std") if s.formula == "within-group"), None)
    zero = part.get("frac_zero_std")
    teaches = (spread is not None and spread.finite and trends.level(spread.finite) > 0) or (
        spread is None and zero is not None and zero.finite and trends.level(zero.finite) < 0.5
    )
    reward = part.get("reward")
    nothing = reward is not None and reward.finite and trends.level(reward.finite) == 0
    yield Finding(
        "D20",
        "info" if teaches else "error" if now >= 1 or nothing else "warning",
        f"{now:.0%} of the responses are cut at the token limit",
        (
            Evidence(series.name, now, "< 0.25", _line(series)),
            *((Evidence("reward", 0.0, source=reward.source),) if nothing and reward is not None else ()),
        ),
        "the limit is too small for this task, or the model does not end its answers (no EOS is trained)"
        + ("; a judge that finds no answer gives 0 to all" if nothing else ""),
        "raise the token limit, and see whether the responses would end; rldbg record -- YOUR COMMAND, then "
        "rldbg diagnose rldbg-dump --rule D19",
        "tokens",
        "miles advisory (0.25)",
        next(p for p in series.points if p.value >= 0.25).where(series.name),
        tuple(p.step for p in series.points if p.step is not None and p.value >= 0.25),
    )
