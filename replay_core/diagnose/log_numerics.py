"""Numbers that are none, and gradients that leap: which signal broke first, at which step (D06, D21, D22, L02)."""

from __future__ import annotations

import math
from collections.abc import Iterable

from replay_core.diagnose import trends
from replay_core.diagnose.finding import Evidence, Finding
from replay_core.diagnose.rule import Skip
from replay_core.diagnose.signal_names import MACHINE, ORDER
from replay_core.diagnose.signals import Part, Point, Series, signal_rule

_ORDER = {signal: number for number, signal in enumerate(ORDER)}
#: L02: how far the level of the last quarter must lie over the first half's.
EXPLODED = 5.0

_CAUSES = {
    "reward": "the reward function returned no number (a failed judge, 0/0 in a normalisation)",
    "reward_std": "a group of one sample: its unbiased std is 0/0; n must be at least 2",
    "reward_function": "a reward function returned no number (None counts as NaN)",
    "reward_function_std": "a reward over fewer than two samples: its unbiased std is 0/0",
    "advantage_max": "a group of one sample (unbiased std is 0/0), or a reward that is no number",
    "advantage_min": "a group of one sample (unbiased std is 0/0), or a reward that is no number",
    "entropy": "logits that are not finite: the weights, an attention row that is masked whole, or a temperature of 0",
    "kl": "log-probabilities that are not finite in policy or reference",
    "policy_kl": "log-probabilities that are not finite, or an overflow of the ratio",
    "grad_norm": "the backward pass: the forward is finite and its gradient is not",
}
_LOSSES = ("loss", "pg_loss", "micro_loss", "value_loss")


@signal_rule(
    "D06",
    "the spread of rewards is not a number",
    link="advantages",
    needs=("reward_std|reward_function_std|advantage_max",),
    source="DeepAnalyze#116",
)
@signal_rule("D22", "grad_norm is never a number", link="gradient", needs=("grad_norm",), source="verl#2505, #1197")
@signal_rule(
    "D21", "a metric is not a number", link="loss", needs=("|".join(ORDER),), source="verl#1197, #2626, #721; seeds"
)
def first_non_finite(part: Part) -> Iterable[Finding]:
    """D06, D21, D22. The first NaN or Inf by step, within the step by order of computation.

    Rewards come before advantages, log-probabilities, ratio, loss, gradient: what is broken first is the cause, the
    rest its echo. NaN in the spread of rewards alone is a group of one (D06). A finite loss whose gradient is NaN at
    every step, from the first on, is D22: an accumulation of 0 micro-batches (mini // (micro * dp) = 0). A gradient
    that is not finite once, with everything finite after it, is a skipped step: a warning. A series that holds no
    finite value at all while no other is broken is a metric that is not computed: info.
    """
    broken = [
        (s, point)
        for s in part.signals()
        if s.signal in _ORDER
        for point in _points(part, s)
        if not math.isfinite(point.value)
    ]
    if not broken:
        return
    series, point = min(broken, key=lambda b: (_step(b[1]), _micro(b[1]), _ORDER[b[0].signal]))
    signal = series.signal
    with_it = sorted({s.name for s, p in broken if p.step == point.step and s is not series})
    steps = tuple(sorted({p.step for _, p in broken if p.step is not None}))
    evidence = (
        Evidence(series.name, point.value, "a finite number", f"line {point.line}" if point.line else series.source),
        *((Evidence("not finite in the same step", ", ".join(with_it[:6]), source="log"),) if with_it else ()),
        Evidence("steps that are not finite", len(steps) or 1, source="log"),
    )
    where = point.where(series.name)
    if signal in ("reward_std", "reward_function_std", "advantage_max", "advantage_min") and math.isnan(point.value):
        harmless = signal == "reward_function_std" and not part_is_broken_after(broken)
        yield Finding(
            "D06",
            "info" if harmless else "error",
            f"{series.name} is NaN",
            evidence,
            _CAUSES[signal],
            "sample at least two completions per prompt, or use a biased std; "
            "rldbg record -- YOUR COMMAND shows the groups",
            "advantages",
            "DeepAnalyze#116",
            where,
            steps,
        )
        return
    has_loss = any(part.has(name) for name in _LOSSES)
    if signal == "grad_norm":
        yield _gradient(part, series, evidence, where, steps, has_loss)
        return
    yield Finding(
        "D21",
        "error",
        f"{series.name} is the first metric that is not finite"
        + (f", at step {point.step}" if point.step is not None else ""),
        evidence,
        _CAUSES.get(signal, "an overflow, a 0/0, or a mask without a token in the steps before the loss"),
        "record the steps before it: rldbg record -- YOUR COMMAND, then rldbg diagnose rldbg-dump names the first "
        "tensor; "
        "rldbg replay rldbg-dump --backward repeats the micro-batch",
        "loss" if signal in _LOSSES else "logprobs" if signal not in ("reward", "reward_function") else "rewards",
        "verl#2626, #721",
        where,
        steps,
    )


def part_is_broken_after(broken: list[tuple[Series, Point]]) -> bool:
    """Whether more than the spread of single reward functions is broken."""
    return any(series.signal != "reward_function_std" for series, _ in broken)


def _gradient(
    part: Part, series: Series, evidence: tuple[Evidence, ...], where: object, steps: tuple[int, ...], has_loss: bool
) -> Finding:
    from replay_core.diagnose.finding import Where

    place = where if isinstance(where, Where) else Where()
    finite = series.finite
    losses = [point for each in part.signals() if each.signal in _LOSSES for point in _points(part, each)]
    if not finite and len(series.points) > 1 and has_loss and all(math.isfinite(point.value) for point in losses):
        return Finding(
            "D22",
            "error",
            "grad_norm is NaN at every step while the loss is finite",
            evidence,
            "gradients divided by an accumulation of 0 micro-batches "
            "(mini_batch // (micro_batch * data_parallel) = 0), "
            "or an overflow in the backward pass from the start",
            "check that the micro-batch is no larger than the mini-batch per rank; "
            "rldbg record --gradients . -- YOUR COMMAND names the first parameter",
            "gradient",
            "verl#2505, #1197",
            place,
            steps,
        )
    after = [p.value for p in series.points if p.step is not None and steps and p.step > steps[0]]
    recovered = bool(after) and all(map(math.isfinite, after))
    return Finding(
        "D21",
        "warning" if recovered else "error",
        "grad_norm is not finite once, and the run goes on"
        if recovered
        else "the gradient is the first thing that is not finite: the forward pass is",
        evidence,
        "an overflow in the backward pass; the step was skipped (loss scaler, or a guard of the trainer)"
        if recovered
        else "forward finite, backward not: an overflow or 0/0 whose value is masked but whose gradient is not "
        "(0 * inf in a mask, sqrt or log at 0, a softmax row that is masked whole)",
        "rldbg record --gradients . -- YOUR COMMAND, then rldbg diagnose rldbg-dump names the first parameter; "
        "rldbg replay rldbg-dump --backward repeats it",
        "gradient",
        "verl#721, #2626; UniRL#110",
        place,
        steps,
    )


def _points(part: Part, series: Series) -> Iterable[Point]:
    yield from series.points
    yield from (point for point in part.micros(series.signal) if not math.isfinite(point.value))


def _step(point: Point) -> int:
    return -1 if point.step is None else point.step


def _micro(point: Point) -> int:
    """A step's own value is logged after its micro-batches."""
    return 1 << 30 if point.micro is None else point.micro


@signal_rule("L02", "the gradient norm explodes", link="gradient", needs=("grad_norm",), source="rldbg; verl#2626")
def gradient_norm_leaps(part: Part) -> Iterable[Finding]:
    """L02. The level of grad_norm (median of the last quarter) is over 5 times that of the first half, and rises.

    At least 8 steps. Single outliers that came down again (6 robust sigmas and 5 medians) are normal and are told
    as info: clipping took care of them.
    """
    series = part.get("grad_norm")
    values = series.finite if series else []
    if series is None or len(values) < trends.MIN_STEPS:
        raise Skip(f"needs grad_norm of at least {trends.MIN_STEPS} steps")
    half, quarter = values[: len(values) // 2], values[-(len(values) // 4) :]
    before, after = trends.level(half, len(half)), trends.level(quarter, len(quarter))
    finite = [point for point in series.points if math.isfinite(point.value)]
    if before > 0 and after > EXPLODED * before and trends.drift(values) > trends.DRIFT_Z:
        begun = next(point for point in finite[len(half) :] if point.value > EXPLODED * before)
        yield Finding(
            "L02",
            "warning",
            "the gradient norm grows and stays there",
            (
                Evidence("median of the last quarter", after, f"< {EXPLODED:g} x {before:.3g}", series.source),
                Evidence("median of the first half", before, source=series.source),
            ),
            "the learning rate is too high, the policy has left the data it is trained on, or entropy has collapsed",
            "look at KL, clip fraction and entropy at the same steps; rldbg record --gradients . -- YOUR COMMAND",
            "gradient",
            "rldbg",
            begun.where(series.name),
            tuple(p.step for p in finite[-len(quarter) :] if p.step is not None),
        )
        return
    middle, sigma = trends.spread(values)
    spikes = [p for p in finite if middle > 0 and p.value > max(5 * middle, middle + trends.OUTLIER_SIGMAS * sigma)]
    if spikes and sigma > 0:
        worst = max(spikes, key=lambda point: point.value)
        yield Finding(
            "L02",
            "info",
            "single steps have a far larger gradient norm than the rest",
            (
                Evidence(
                    "grad_norm",
                    worst.value,
                    f"median {middle:.3g}",
                    f"line {worst.line}" if worst.line else series.source,
                ),
                Evidence("such steps", len(spikes), source=series.source),
            ),
            "a batch with rare tokens or an outlier advantage; clipping bounds its update",
            "look at the worst micro-batch of that step",
            "gradient",
            "rldbg",
            worst.where(series.name),
            tuple(p.step for p in spikes if p.step is not None),
        )


@signal_rule("L03", "the log holds no number", link="dump", needs=(), source="rldbg")
def no_numbers(part: Part) -> Iterable[Finding]:
    """L03. Every training metric of the run is NaN or Inf: nothing further can be judged, and no cause is invented."""
    training = [s for s in part.signals() if s.signal not in MACHINE and s.signal != "learning_rate" and s.points]
    if not training:
        raise Skip("the run has no training metric that is known")
    if not any(series.finite for series in training):
        first = training[0].points[0]
        yield Finding(
            "L03",
            "error",
            "no training metric is a finite number, from the first logged step on",
            (
                Evidence("metrics", len(training), source="log"),
                Evidence(training[0].name, first.value, source=f"line {first.line}" if first.line else "log"),
            ),
            "the weights or the data were not finite before the first step that is logged",
            "record the run from its first step: rldbg record -- YOUR COMMAND",
            "dump",
            "rldbg",
            first.where(training[0].name),
        )
