"""How the policy moves, as it is logged: clip fraction and ratio (D24), entropy (D25), KL (D15, D29), lr 0 (D14)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import mean

from replay_core.diagnose import trends
from replay_core.diagnose.finding import Evidence, Finding
from replay_core.diagnose.rule import Skip
from replay_core.diagnose.signals import Part, Series, signal_rule
from replay_core.documents.diagnosis import Severity

CLIPPED_WARN, CLIPPED_BAD = 0.2, 0.5
RATIO_MAX = 10.0
ESS_MIN = 0.5
ENTROPY_MIN = 0.05
ENTROPY_GROWTH = 2.0
K3_FLOOR = -1e-6
#: Steps of a k1 mean before its sign means anything, and the share of them that must be negative.
K1_STEPS, K1_SHARE, K1_MEAN = 20, 0.9, -1e-3


def _cited(series: Series, value: float, expected: str | None = None) -> Evidence:
    line = series.last.line
    return Evidence(series.name, value, expected, f"{series.source}, line {line}" if line else series.source)


def _steps(series: Series, over: float = -math.inf, under: float = math.inf) -> tuple[int, ...]:
    return tuple(p.step for p in series.points if p.step is not None and over < p.value < under)


def _first(series: Series, over: float = -math.inf, under: float = math.inf):  # type: ignore[no-untyped-def]
    return next(p for p in series.points if over < p.value < under).where(series.name)


@signal_rule(
    "D24",
    "the policy leaves the clip range",
    link="ratio",
    needs=("clip_fraction|ratio_max|ess|ratio_mean",),
    source="miles docs (pg_clipfrac), verl rollout correction (ESS)",
)
def clipped(part: Part) -> Iterable[Finding]:
    """D24. Level (median of the last 10 steps) of the clip fraction: over 0.2 a warning, over 0.5 an error.

    The largest ratio over 10 is a warning, and so is an effective sample size of the importance weights,
    1 / E[(w/E w)^2], under 0.5. Healthy runs stay under 0.2; a single step does not count.
    """
    series = part.get("clip_fraction")
    if series is not None and series.finite and (now := trends.level(series.finite)) > CLIPPED_WARN:
        yield Finding(
            "D24",
            "error" if now > CLIPPED_BAD else "warning",
            f"{now:.0%} of the tokens are clipped",
            (_cited(series, now, f"< {CLIPPED_WARN} (bad over {CLIPPED_BAD})"),),
            "learning rate too high, too many updates per batch, stale samples, or an engine that samples from other "
            "probabilities than the trainer's",
            "compare old and new log-probabilities of the first mini-batch: rldbg record -- YOUR COMMAND, then "
            "rldbg diagnose rldbg-dump",
            "ratio",
            "miles docs",
            _first(series, over=CLIPPED_WARN),
            _steps(series, over=CLIPPED_WARN),
        )
    series = part.get("ratio_max")
    if series is not None and series.finite and (now := trends.level(series.finite)) > RATIO_MAX:
        yield Finding(
            "D24",
            "warning",
            f"the largest importance ratio is {now:.3g}",
            (_cited(series, now, f"< {RATIO_MAX:g}"),),
            "the policy is far from the one that sampled: off-policy data, or log-probabilities that do "
            "not belong together",
            "rldbg record -- YOUR COMMAND, then rldbg diagnose rldbg-dump",
            "ratio",
            "verl rollout correction",
            _first(series, over=RATIO_MAX),
            _steps(series, over=RATIO_MAX),
        )
    series = part.get("ess")
    if series is not None and series.finite and (now := trends.level(series.finite)) < ESS_MIN:
        yield Finding(
            "D24",
            "warning",
            f"importance weights leave {now:.0%} of the samples effective",
            (_cited(series, now, f"> {ESS_MIN:g}"),),
            "engine and trainer disagree about the samples' probabilities, or the samples are stale",
            "rldbg record -- YOUR COMMAND, then rldbg diagnose rldbg-dump --rule D09",
            "ratio",
            "verl rollout correction",
            _first(series, under=ESS_MIN),
            _steps(series, under=ESS_MIN),
        )


@signal_rule(
    "D25", "entropy collapses or explodes", link="trend", needs=("entropy",), source="verl#5953, #2738; rllm#116"
)
def entropy(part: Part) -> Iterable[Finding]:
    """D25. Level of the mean token entropy (nats): under 0.05 a warning; over twice its beginning and rising, too.

    For growth the median of the last 3 steps is held against that of the first 3; it needs 8 steps and a rise that
    chance does not explain.
    An entropy of exactly 0 in every step is one that was not computed.
    """
    series = part.get("entropy")
    values = [] if series is None else series.finite
    if series is None or not values or not any(values):
        raise Skip("the logged entropy is 0 or not finite in every step: it was not computed")
    if min(values) < 0:
        raise Skip(f"{series.name} is negative: a loss term, not an entropy")
    now = trends.level(values)
    if now < ENTROPY_MIN:
        yield Finding(
            "D25",
            "warning",
            f"the policy's entropy is {now:.3g} nats per token: it hardly samples any more",
            (_cited(series, now, f"> {ENTROPY_MIN:g}"),),
            "entropy collapse: no KL or entropy term, a clip range that favours likely tokens, a low temperature",
            "raise the upper clip bound, add an entropy or KL term, check the sampling temperature",
            "trend",
            "verl#5953",
            _first(series, under=ENTROPY_MIN),
            _steps(series, under=ENTROPY_MIN),
        )
    begun = trends.level(values[:3])
    rising = len(values) >= trends.MIN_STEPS and trends.drift(values) > trends.DRIFT_Z
    now = trends.level(values, 3)
    if rising and begun > 0 and now > ENTROPY_GROWTH * begun:
        yield Finding(
            "D25",
            "warning",
            f"the policy's entropy has grown from {begun:.3g} to {now:.3g} nats per token",
            (_cited(series, now, f"< {ENTROPY_GROWTH:g} x {begun:.3g}"),),
            "entropy bonus too strong, off-policy noise, or a policy that falls apart (log V is a uniform one)",
            "look at reward and response length at the same steps; lower the entropy bonus or the learning rate",
            "trend",
            "verl#2738",
            _first(series, over=ENTROPY_GROWTH * begun),
            _steps(series, over=ENTROPY_GROWTH * begun),
        )


@signal_rule(
    "D15", "KL to the reference at the first step", link="ref", needs=("kl",), source="slime and miles debug.md"
)
def first_kl(part: Part) -> Iterable[Finding]:
    """D15. Before the first update policy and reference are one model: KL is 0.

    Over 1 is an error (another model or template: about 0.8 per token for a chat template), over 1e-2 a warning, over
    1e-4 info: later mini-batches of a first step have been updated already, and bf16 kernels differ. With an on-policy
    step (clip fraction and policy KL both 0) over 1e-4 is a warning. Only where the log numbers its steps from 0 or 1.
    """
    if part.is_counted:
        raise Skip("the log does not number its steps: its first line need not be the first step")
    series = part.get("kl")
    if series is None or series.points[0].step not in (0, 1):
        raise Skip("the log does not begin at the first step")
    point = series.points[0]
    value = abs(point.value)
    if not math.isfinite(value) or value <= 1e-4:
        return
    on_policy = all(
        (p := part.at(name, point.step)) is not None and p.value == 0 for name in ("clip_fraction", "policy_kl")
    )
    severity: Severity = "error" if value > 1 else "warning" if value > 1e-2 or on_policy else "info"
    yield Finding(
        "D15",
        severity,
        f"KL to the reference is {point.value:.3g} at the first step",
        (
            Evidence(
                series.name,
                point.value,
                "0 before the first update",
                f"line {point.line}" if point.line else series.source,
            ),
        ),
        "the reference is another checkpoint, template (about 0.8 per token) or dtype than the policy's start"
        if severity != "info"
        else "mini-batches after the first have been updated already, or two kernels differ",
        "rldbg record -- YOUR COMMAND; then "
        "rldbg replay rldbg-dump --model POLICY --model REFERENCE --against ref_logprobs",
        "ref",
        "slime and miles debug.md",
        point.where(series.name),
        _steps(series)[:1],
    )


@signal_rule(
    "D29",
    "a KL that cannot be negative is",
    link="ref",
    needs=("kl|policy_kl|rollout_k3|rollout_k1",),
    source="trl#2854; Schulman, Approximating KL Divergence",
)
def kl_sign(part: Part) -> Iterable[Finding]:
    """D29. k3 = r - 1 - log r is never negative: under -1e-6 its arguments, its dtype or its formula are wrong.

    k1 = -log r is negative for half the tokens, and its mean may be in any one step. Over 20 steps, 90 % of them
    negative with a mean under -1e-3, its arguments are swapped, or the samples are not the policy's own. Where the
    framework can log either estimator under one name, it is judged as k1.
    """
    for signal in ("kl", "policy_kl", "rollout_k3", "rollout_k1"):
        for series in part.all(signal):
            values = series.finite
            if series.formula == "k3":
                bad = [point for point in series.points if point.value < K3_FLOOR]
                if bad:
                    yield Finding(
                        "D29",
                        "error",
                        f"{series.name} is negative, which its estimator k3 cannot be",
                        (
                            Evidence(
                                series.name,
                                bad[0].value,
                                ">= 0",
                                f"line {bad[0].line}" if bad[0].line else series.source,
                            ),
                        ),
                        "the estimator's arguments come from two places (swapped, or masked differently), or it is "
                        "computed in a dtype too narrow for e^x - 1",
                        "rldbg record -- YOUR COMMAND, then "
                        "rldbg diagnose rldbg-dump --rule D29 recomputes every estimator",
                        "ref",
                        "trl#2854",
                        bad[0].where(series.name),
                        _steps(series, under=K3_FLOOR),
                    )
            elif series.formula in ("k1", "") and len(values) >= K1_STEPS:
                negative = [value for value in values if value < 0]
                if len(negative) >= K1_SHARE * len(values) and mean(values) < K1_MEAN:
                    yield Finding(
                        "D29",
                        "warning",
                        f"{series.name} is negative in {len(negative)} of {len(values)} steps",
                        (_cited(series, mean(values), "a mean near or over 0"),),
                        "the arguments of k1 are swapped, or the tokens were not sampled from the "
                        "policy that is measured",
                        "rldbg record -- YOUR COMMAND, then rldbg diagnose rldbg-dump --rule D29",
                        "ref",
                        "trl#2854; marin#1708",
                        _first(series, under=0),
                        _steps(series, under=0),
                    )


@signal_rule(
    "D14",
    "the ratio is not 1 although nothing moves",
    link="ratio",
    needs=("learning_rate", "clip_fraction|policy_kl"),
    source="RLinf#1534, verl#6280",
)
def ratio_without_updates(part: Part) -> Iterable[Finding]:
    """D14. With a learning rate of 0 the weights stay: no token may be clipped, and the policy's KL to itself is 0.

    A clip fraction over 1e-3 or |KL| over 1e-3 at a step whose lr is 0 (bf16 noise stays below) is two forward passes
    that disagree: other micro-batches, dropout, train against eval mode, or the engine's log-probabilities as old ones.
    """
    rate = part.get("learning_rate")
    still = {} if rate is None else {point.step: point for point in rate.points if point.value == 0}
    if not still:
        raise Skip("the learning rate is never 0: a ratio other than 1 is no sign of anything")
    for signal in ("clip_fraction", "policy_kl"):
        series = part.get(signal)
        bad = [] if series is None else [p for p in series.points if p.step in still and abs(p.value) > 1e-3]
        if series is not None and bad:
            yield Finding(
                "D14",
                "warning",
                f"the learning rate is 0, and {series.name} is not",
                (Evidence(series.name, bad[0].value, "0", f"line {bad[0].line}" if bad[0].line else series.source),),
                "old and new log-probabilities come from forward passes that disagree: other micro-batch "
                "sizes, dropout, "
                "train against eval mode, or the engine's probabilities",
                "rldbg record -- YOUR COMMAND, then rldbg replay rldbg-dump --rows-per-forward 1",
                "ratio",
                "RLinf#1534",
                bad[0].where(series.name),
                tuple(p.step for p in bad if p.step is not None),
            )
            return
