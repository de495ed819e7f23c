"""What single figures of a log cannot be, and what they tell by themselves: two tables, one line per figure and state.

BOUNDS   a share above 1, a negative norm, an entropy of more than any vocabulary has: it is another figure
STATES   a figure that is 0 throughout, never moves, or has come to a level that says what is wrong
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from statistics import median
from typing import TYPE_CHECKING

from msgspec import Struct

from replay_core.diagnose.finding import Finding, finding, share, shown
from replay_core.diagnose.rule import Skip, rule
from replay_core.diagnose.signals import RunLog, Series

if TYPE_CHECKING:
    from replay_core.documents.diagnosis import Severity

#: Logs are rounded; means over ranks are sums of rounded numbers.
ROUNDED = 1e-3
#: ln of a vocabulary of 400,000: no policy has more nats per token.
MOST_NATS = 12.9


class _Bound(Struct, frozen=True):
    """What a figure lies between by its own definition; None is open."""

    signal: str
    low: float | None
    high: float | None
    below: str
    above: str
    meant: tuple[str, ...] = ()
    """How names begin that mean another figure: TRL's PPO sums the entropy over a response."""


_COUNTED = "it is a number or a sum over ranks and micro-batches, no share (or in percent)"
_SHARES = ("clip_fraction", "truncated", "frac_zero_std", "value_clip_fraction", "prompts_at_limit",
           "is_weight_clipped", "ess", "kv_usage", "padding_share", "repetition")  # fmt: skip
_BOUNDS: tuple[_Bound, ...] = (
    *(_Bound(signal, 0.0, 1.0, "a share is never negative", _COUNTED) for signal in _SHARES),
    _Bound("entropy", None, MOST_NATS, "", "more nats than any vocabulary has: it is summed over the tokens, no mean",
           ("objective/",)),
    _Bound("prob_pearson", -1.0, 1.0, "no correlation", "no correlation"),
    _Bound("explained_variance", None, 1.0, "", "no more than all can be explained: the variance or its sign is wrong"),
    _Bound("grad_norm", 0.0, None, "a norm is never negative", ""),
    _Bound("grad_norm_clipped", 0.0, None, "a norm is never negative", ""),
    _Bound("learning_rate", 0.0, None, "gradient ascent: the schedule has run past its end and below 0, or the rate's "
           "sign is turned; every update undoes what is rewarded", ""),
    _Bound("response_length", 0.0, None, "a length is never negative: prompt and response are subtracted the wrong way "
           "round", ""),
    _Bound("reward_std", 0.0, None, "a standard deviation is never negative", ""),
    _Bound("advantage_std", 0.0, None, "a standard deviation is never negative", ""),
    _Bound("ratio_mean", 0.0, None, "a ratio is never negative: it is its logarithm, never exponentiated", ""),
    _Bound("is_weight_mean", 0.0, None, "a weight is never negative: it is its logarithm, never exponentiated", ""),
)  # fmt: skip


@rule("L30", "a figure is what it cannot be", link="dump", scope="signals",
      needs=("|".join(dict.fromkeys(bound.signal for bound in _BOUNDS)),), lasts=True, source="the figures' "
       "definitions")  # fmt: skip
def impossible(log: RunLog) -> Finding | None:
    """A share outside of 0 to 1, an entropy over 12.9 nats (ln 400,000), a correlation or explained variance over 1, a
    norm, length, standard deviation, ratio or learning rate below 0, in a quarter of the steps and more (one step of a
    learning rate): a warning, an error of a learning rate, worth knowing of an entropy. What is logged is another
    figure than its name says.
    """
    for bound in _BOUNDS:
        for series in log.all(bound.signal):
            if series.name.startswith(bound.meant):
                continue
            over = [p for p in series.points if bound.high is not None and p.value > bound.high * (1 + ROUNDED)]
            under = [p for p in series.points if bound.low is not None and p.value < bound.low - 1e-12]
            bad = max(over, under, key=len)
            bad = [point for point in bad if math.isfinite(point.value)]
            is_rate = bound.signal == "learning_rate"
            if not bad or (not is_rate and 4 * len(bad) < len(series.points)):
                continue
            limit, why = (bound.high, bound.above) if bad[0].value > 0 else (bound.low, bound.below)
            worst = max(bad, key=lambda point: abs(point.value))
            return finding(
                "error" if is_rate else "info" if bound.signal == "entropy" else "warning",
                f"{series.name} is {worst.value:.4g}, which it cannot be: {why}",
                bad[0].where(series.name),
                series.shown_at(worst, f"{'<=' if worst.value > 0 else '>='} {limit:g}"),
                shown("steps", share(len(bad), len(series.points)), "none", "log"),
                link="optimizer" if is_rate else "",
                cause=why,
                next_step="look at how the figure is computed and put together over ranks",
                steps=[point.step for point in bad],
            )
    return None


#: Of a series: whether the state holds. Values are finite, as many as the state asks for.
Test = Callable[[list[float]], bool]


def _always(value: float) -> Test:
    return lambda values: all(each == value for each in values)


def _still(values: list[float]) -> bool:
    return len(set(values)) == 1 and values[0] != 0


def _over(limit: float) -> Test:
    return lambda values: median(values[-10:]) > limit


def _share_over(limit: float) -> Test:
    """Of a share: rllm logs the number of prompts under the same name."""
    return lambda values: max(values) <= 1 and median(values[-10:]) > limit


def _often_over(limit: float) -> Test:
    return lambda values: sum(value > limit for value in values) >= 2


def _outside(low: float, high: float) -> Test:
    return lambda values: not low <= median(values[-10:]) <= high


class FigureState(Struct, frozen=True):
    """A state of a figure that says what is wrong. `fewest`: steps, or lines, before it is no chance; `moving`: only
    where the weights are updated, as far as the log tells; `always`: of what is odd at a glance, in long logs, too.
    """

    signal: str
    holds: Test
    fewest: int
    severity: Severity
    link: str
    claim: str
    expected: str
    cause: str
    next_step: str
    moving: bool = False
    always: bool = False


_STATES: tuple[FigureState, ...] = (
    FigureState(
        "weight_version", _still, 8, "warning", "rollout_logprobs",
        "the engine samples with one version of the weights throughout: {name} is {now:g} in all {n} steps", "rises",
        "the synchronisation to the engine never happens, or the version is not handed on: every step is sampled by "
        "old weights", "compare the engine's weights with the trainer's: rldbg weights", moving=True,
    ),
    FigureState(
        "update_norm", _always(0.0), 5, "warning", "optimizer",
        "no weight changes: {name} is 0 in all {n} steps", "> 0",
        "no update reaches the weights: the learning rate is 0, the optimizer holds other parameters, or updates are "
        "lost in bf16", "rldbg record --params . -- YOUR COMMAND, then compare the weights of two of its steps",
    ),
    FigureState(
        "critic_learning_rate", _always(0.0), 5, "warning", "optimizer",
        "the critic learns nothing: its learning rate, {name}, is 0 in all {n} steps", "> 0",
        "the critic's scheduler or configuration has no rate: values stay those of the first step",
        "print the critic optimizer's param_groups[0]['lr']",
    ),
    FigureState(
        "critic_grad_norm", _always(0.0), 5, "warning", "gradient",
        "the critic gets no gradient: {name} is 0 in all {n} steps", "> 0",
        "the value loss is detached, clipped away whole (a value clip range that is far too small) or multiplied by 0",
        "rldbg record --gradients . -- YOUR COMMAND",
    ),
    FigureState(
        "advantage_std", _always(0.0), 5, "error", "groups",
        "no advantage differs from its group's: {name} is 0 in all {n} steps", "> 0",
        "the rewards within a group are all equal, or what is normalised is the group itself: nothing is learnt",
        "look at the rewards of one group",
    ),
    FigureState(
        "is_weight_max", _often_over(10.0), 2, "warning", "rollout_logprobs",
        "importance weights of trainer over engine are not truncated: the largest, {name}, comes to {most:.3g}", "< 10",
        "no cap on the weights (truncated importance sampling cuts them at 2 to 5): a few tokens make the whole "
        "update, and the policy falls apart", "set the cap; rldbg mismatch rldbg-dump shows which tokens have them",
    ),
    FigureState(
        "is_weight_clipped", _over(0.3), 5, "warning", "logprobs",
        "{now:.0%} of the importance weights between engine and trainer are cut off or thrown away", "< 0.3",
        "engine and trainer disagree about the probabilities of most tokens: another temperature, old weights, other "
        "precision, or tokens that do not fit", "rldbg record -- YOUR COMMAND, then rldbg mismatch rldbg-dump",
    ),
    FigureState(
        "is_weight_mean", _outside(0.7, 1.5), 8, "warning", "logprobs",
        "the importance weights of trainer over engine average {now:.3g}: over the engine's own samples their mean is "
        "1",
        "about 1", "the samples are not those of the logged engine probabilities: another temperature or top-p "
        "(renormalised), old weights, a shift, or the ratio the wrong way round",
        "rldbg record -- YOUR COMMAND, then rldbg mismatch rldbg-dump",
    ),
    FigureState(
        "solve_none", _share_over(0.9), 5, "warning", "rewards",
        "nearly no prompt is ever solved: {name} is {now:.2g}", "< 0.9",
        "the data are too hard for the policy, or the reward never fires (a parser, an answer format nobody writes)",
        "score one right answer by hand; filter prompts by solve rate",
    ),
    FigureState(
        "solve_all", _share_over(0.9), 5, "warning", "groups",
        "nearly every prompt is always solved: {name} is {now:.2g}", "< 0.9",
        "the data are too easy: no group has a spread, and nothing is left to learn",
        "filter prompts by solve rate, bring harder ones",
    ),
    FigureState(
        "preemptions", _over(0.0), 3, "warning", "time",
        "the engine preempts requests: {name} is {now:g}", "0",
        "the KV cache is too small for the sequences that run at once: what was computed of a preempted one is thrown "
        "away and computed again", "raise gpu_memory_utilization or tensor parallelism; lower max_num_seqs or the "
        "response length",
    ),
    FigureState(
        "padding_share", _over(0.7), 5, "info", "time",
        "{now:.0%} of the tokens that are computed are padding", "< 0.7",
        "responses of very different lengths stand in one micro-batch", "pack sequences, or sort them by length",
    ),
    FigureState(
        "repetition", _over(0.3), 5, "warning", "tokens",
        "responses repeat themselves: {name} is {now:.2g}", "< 0.3",
        "the policy has fallen into loops: degenerate output, a reward for length, or an end of text that is never "
        "trained", "read ten responses; rldbg samples rldbg-dump",
    ),
    FigureState(
        "rollout_temperature", _always(0.0), 1, "warning", "rollout_logprobs",
        "generation is greedy: {name} is 0", "> 0",
        "every response of a group is one and the same: no advantage differs from 0", "temperature 1 for training",
    ),
)  # fmt: skip


def moves(log: RunLog) -> bool:
    """Whether the log tells of updates: a gradient, or a loss that changes."""
    grads, rates = log.get("grad_norm"), log.get("learning_rate")
    if rates is not None and rates.finite and not any(rates.finite):
        return False
    if grads is not None:
        return any(grads.finite)
    loss = log.get("loss") or log.get("pg_loss")
    return loss is not None and len(set(loss.finite)) > 1


#: A mean of advantages that are weights, in every step.
OF_WEIGHTS = 0.1


_OF_TRAINING = ("loss", "pg_loss", "grad_norm", "learning_rate", "reward_std", "kl", "advantage_std")


#: AReaL's cap of importance weights over the engine's policy; and what a weight of trainer over engine is no more than.
_CAPS, LARGE_WEIGHT = ("behave_imp_weight_cap", "behav_imp_weight_cap"), 10.0


def _is_capped(log: RunLog) -> bool:
    """Whether the run states a cap of its importance weights, and nothing that switches them off."""
    stated = log.algorithm
    caps = (stated.number(*_CAPS), stated.weight_bounds[1] if stated.is_weighed is not False else None)
    return any(cap is not None and 0 < cap <= LARGE_WEIGHT for cap in caps)


def _holds(log: RunLog, series: Series, state: FigureState) -> bool:
    values = series.finite
    mean = log.get("advantage_mean")
    # One weight for all that were chosen (RAFT, SFT) has no spread, and is not 0.
    if state.signal == "advantage_std" and mean is not None and min(map(abs, mean.finite), default=0.0) > OF_WEIGHTS:
        return False
    # What is logged before it is cut may be as large as it will.
    if state.signal == "is_weight_max" and _is_capped(log):
        return False
    # An evaluation's temperature is what it is: where nothing is paid and nothing trained, no group is sampled.
    if state.signal == "rollout_temperature" and not any(map(log.has, _OF_TRAINING)):
        return False
    return len(values) >= state.fewest and state.holds(values) and (not state.moving or moves(log))


@rule("L31", "a figure tells by itself", link="trend", scope="signals",
      needs=("|".join(dict.fromkeys(state.signal for state in _STATES)),),
      lasts=True, explains=("D01", "D09", "D12", "D14", "D23", "D24", "D46", "D55", "L08", "L14"),
      source="the figures' definitions")  # fmt: skip
def tells(log: RunLog) -> Iterator[Finding]:
    """States that have one meaning: a version of the weights that never changes although there are
    gradients, an update's norm, a critic's gradient or learning rate or the advantages' spread of 0 in every step,
    importance weights of trainer over engine whose median mean lies outside of .7 to 1.5 (it is 1 over the engine's own
    samples), of which over .3 are cut or two steps have one over 10 and no cap is stated, over .9 of the prompts never
    or always solved, requests preempted in most steps, over .3 of repetition, a temperature of 0. Levels are the median
    of the last 10 steps. Advantages without a spread whose mean is not 0 are weights (RAFT, SFT).
    """
    if not any(len(series.finite) >= state.fewest for state in _STATES for series in log.all(state.signal)[:1]):
        raise Skip("needs 5 to 8 steps of these figures")
    for state in _STATES:
        series = log.get(state.signal)
        if series is None or not _holds(log, series, state):
            continue
        now = median(series.finite[-10:])
        yield finding(
            state.severity,
            state.claim.format(name=series.name, now=now, n=len(series.finite), most=max(series.finite)),
            series,
            series.shown(now, state.expected),
            link=state.link,
            cause=state.cause,
            next_step=state.next_step,
        )
