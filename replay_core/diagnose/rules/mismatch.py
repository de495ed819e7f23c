"""Engine and trainer disagree about the same tokens: how far, and as what.

The size of the mismatch names no cause: a stale engine and a leaking pack show the same mean |d|.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain
from statistics import median

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from replay_core.diagnose import trends
from replay_core.diagnose.algorithm import is_synchronous
from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.by_context import ByContext
from replay_core.diagnose.case import Case
from replay_core.diagnose.collected import AGREES, Growth, Misplaced, Partway, comes_to_rest, synced_every
from replay_core.diagnose.compared import TOLD_APART, compared, figures_of, old_is_odd, worst_of
from replay_core.diagnose.falling_apart import falls_apart
from replay_core.diagnose.finding import Evidence, Finding, Where, finding, shown, warning
from replay_core.diagnose.gap import BADLY, DISAGREE, LIMITS, OLDEST, USUAL, Gap, Limit
from replay_core.diagnose.leaps import leap_in
from replay_core.diagnose.log_steps import steps_of
from replay_core.diagnose.merging import merged, weighed
from replay_core.diagnose.mismatch_causes import OF_THE_ENGINE, MismatchCause, Repeated, cause_of
from replay_core.diagnose.passes import before_any_update_N
from replay_core.diagnose.rule import Skip, rule
from replay_core.diagnose.rules.old_weights import JUMP
from replay_core.diagnose.rules.staleness import age_of, versions
from replay_core.diagnose.signals import RunLog, Series
from replay_core.diagnose.since_token import SinceToken

#: Nats per token of a policy that hardly samples.
SURE = 0.05
#: Of two tokens that have nothing to do with each other, log-probabilities are apart by that much, nats.
OTHER_TOKENS = 1.0


@rule("D09", "engine and trainer disagree", link="logprobs", scope="case",
      explains=("L10", "D14", "D15", "D24"),
      source="NeMo-RL docs (mean e^|d| > 1.05, KL error 1e-3); miles CI 0.03; slime CI 0.1")  # fmt: skip
def disagree(case: Case) -> Iterator[Finding]:
    """mean |d| > 0.03 is a warning, > 0.1 an error; mean e^|d| > 1.05 or k3 > 1e-3 alone is worth saying: few tokens do
    it, as where a mixture of experts routes them differently. bf16 engines beside fp32 trainers are at about 0.005, MoE
    ones near 0.06: up to 0.07 it is info where both sides rise and fall together (correlation above 0.95) and nothing
    below tells of another cause. Silent where D08, D10, D11 or D16 name the cause; info where the run is off-policy on
    purpose: importance weights are recorded, or weight versions behind the step.

    The cause is told by where the difference lies: in left-padded samples only (positions, mask; of rows that are not
    recorded padded the longest prompts have none), between samples that share a token and all before it (one forward
    gives them one number: else dropout, or neighbours are seen), at the first response tokens (another prompt: chat
    template), in few samples, or evenly (precision, kernels, parallelism); and by which side the reference agrees with.

    Where nothing else is sure, over a run's prompts (12 and more, 3 widths of left padding): a mean |d| that grows with
    the padding, by ranks, as chance does in one of a hundred, to twice and more, is of positions or of the mask. And
    where the first step has it, over tokens that are not sure: none of it (a mean of .02 nats, 16 tokens and more) with
    fewer than so many tokens before, and off in half behind, is a window of attention; a rank correlation of |d| with
    the tokens
    before of .28 and more (.4 with the place in the response) is of positions; as much at the first tokens as behind,
    and a correlation of the two sides below .95, is of other weights: another prompt tells at the first tokens most.

    Tokens whose neighbour one or two places off is the same one (8 and more that are not sure) tell logits or labels
    that are gathered so far off: nine of ten agree then with what the engine gives the neighbour's place, or with the
    engine at all, to .15 of the usual difference. And over all tokens that differ by .03 nats and more, those that
    stood in the context before (8 and more) are given less by the engine, and all others (8 and more) more, in .85 of
    each: a repetition penalty.

    Info, too, over the steps of a run whose first has none of it, and where it does not grow any more: it is what
    weights some updates old make, as every asynchronous run has it (half a nat at the most); a warning of a run that
    states samples no updates old, and of any where weight versions, or the run, say that they are none, and each later
    step has 10 times the first one's, which is rounding (.001), and .005 in most. More of it, where the
    first step has none, is a warning: whether they are as old on purpose is D12's. So is what lies on the first k
    tokens of responses alone, each of these places (2 and more) 3 times as far apart as each behind them. So is half a
    nat and less of a dump that begins after the second step, unless the differences show that one forward is wrong.
    """
    found: list[tuple[Finding, bool, bool]] = []
    means: list[float] = []
    off: list[int] = []
    whys: list[str] = []
    growth, misplaced, partway, repeated, places = Growth(), Misplaced(), Partway(), Repeated(), ByContext()
    since, promised = SinceToken(), _Promised()
    weak: set[str] = set()
    open_: set[str] = set()
    for batch in case.batches():
        try:
            between = compared(batch)
        except Skip as skip:
            whys.append(str(skip))
            continue
        means.append(between.mean)
        growth.take(batch, between)
        since.take(between)
        promised.take(batch, between)
        if between.mean > DISAGREE:
            off += [] if batch.step is None else [batch.step]
            misplaced.take(batch, between)
            partway.take(batch, between)
            repeated.take(batch, between)
            places.take(between)
        steps = () if batch.step is None else (batch.step,)
        if (one := _disagreement(batch, between)) is not None:
            told, cause = one
            of_old = told.claim.endswith(_PER_TOKEN) or cause.is_random
            if of_old and old_is_odd(batch) is not None:
                continue  # the policy's first forward agrees with the engine: D14's
            # The weights of a dump that begins late may be old.
            may_be_old = not case.begins and between.mean <= OLDEST
            of_a_forward = cause.is_of_tokens or (may_be_old and cause.is_of_a_forward)
            if cause.is_weak:
                weak.add(told.claim)
            if cause.is_weak or cause.is_of_few:
                open_.add(told.claim)
            found.append((replace(told, steps=steps), may_be_old, of_a_forward))
    if not means:
        raise Skip(max(whys, key=whys.count, default="the dump holds no batch of samples"))
    # What the first step of a run has none of is of the weights alone: those of an update or more before (D12).
    begins_so = case.begins and len(means) >= 4 and all(one.severity == "info" for one, *_ in found)
    fresh = len(means) >= 4 and means[0] <= min(AGREES, 0.1 * float(np.median(means[1:])))
    # Before any update both have the weights they were loaded with: what differs there is no matter of syncs.
    begins_with = case.begins and means[0] > DISAGREE
    beside = misplaced.told() if any(one.severity != "info" for one, *_ in found) else None
    grows = growth.is_told and any(one.claim in weak for one, *_ in found)
    # What the run's tokens or its padding tell is of one forward, too: no weights make it.
    sure = beside is not None or grows
    every = [
        *merged(
            _milder(one) if (fresh or may_be_old) and not (sure or of_a_forward) else one
            for one, may_be_old, of_a_forward in found
        )
    ]
    uncaused = [one for one in every if one.claim.endswith(_PER_TOKEN)]
    guessed = [one for one in every if one.claim in weak and one.severity != "info"]
    if found and (token := since.told()) is not None:
        # What one token parts is of the tokens, however little it comes to over the batch.
        every = [_because(replace(one, severity="warning") if one.severity == "info" else one, *token) for one in every]
    elif beside is not None:
        words, why, figures = beside
        every = [_because(one, f": {words}", why, figures) for one in every]
    elif begins_with and not fresh and open_ and (edge := places.edge()) is not None:
        every = [_because(one, *edge) if one.claim in open_ else one for one in every]
    elif (again := repeated.told()) is not None:
        every = [_because(one, f": {again.short}", again.sentence, again.figures) for one in every]
    elif fresh and (swapped := partway.told()) is not None:
        every = [_because(_milder(one), *_of_swap(*swapped)) for one in every]
    elif not any(of_a_forward for *_, of_a_forward in found) and _is_one_update(means, *_OF_AN_UPDATE["logprob_diff"]):
        # What is wrong with prompts, padding or a forward is so in the first step, too: no place tells a cause here.
        every = [
            _because(_milder(one), _UNSYNCED, _UNSYNCED_CAUSE)
            if one.severity != "info" and is_synchronous(case.algorithm)
            else _because(replace(one, severity="info"), _LATE, _LATE_CAUSE) for one in every
        ]  # fmt: skip
    elif grows:
        every = [_because(one, *_of_growth(growth)) if one in guessed else one for one in every]
    elif fresh and case.begins and guessed:
        # Prompts, templates and precision are those of the first step, which agrees.
        every = [_because(one, _LEFT, _LEFT_CAUSE) if one in guessed else one for one in every]
    elif (
        not fresh and begins_with and guessed and growth.is_open
        and not places.is_of_the_prompt and not places.told(sure=True)
    ):  # fmt: skip
        every = [_because(one, *_of_padding_or_weights(growth)) if one in guessed else one for one in every]
    elif not fresh and begins_with and guessed and (by_place := places.told()) is not None:
        # What all steps together tell is of all of them, those too whose own differences told something weaker.
        every = [replace(_because(one, *by_place), steps=tuple(off)) if one in guessed else one for one in every]
    elif begins_so and min(means) > DISAGREE and max(means) < 2 * min(means):
        every = [_because(one, *_OF_PRECISION) if one in uncaused else one for one in every]
    elif begins_with and not fresh and len(means) >= 3 and max(means) < 2 * min(means):
        every = [_because(one, *_OF_THE_START) if one in uncaused else one for one in every]
    told_so = [one for one in every if one.severity != "info"]
    # A guess of one step or two says less than what parts all steps behind the first.
    passing = all(one.claim in open_ for one in told_so) and 2 * len({*chain(*(one.steps for one in told_so))}) < len(
        means
    )
    if passing and (unsent := promised.told(case)) is not None:
        every = [unsent]
    yield from (weighed(one, len(means), varies=False) for one in every)


#: What two forwards of one set of weights come to in the first step at most, how many times that each later step comes
#: to, and what most of them come to: half precision of the engine is there from the first step on.
ROUNDED, TIMES, PARTED = 1e-3, 10.0, 0.005


class _Promised(Struct):
    """Steps with their mismatch, and whether versions say that the samples are of the newest weights."""

    steps: list[tuple[int | None, float, Where, str | None]] = field(default_factory=list)
    ages: list[float | None] = field(default_factory=list)
    are_counted: list[bool] = field(default_factory=list)
    is_plain: bool = True

    def take(self, batch: StepBatch, between: Gap) -> None:
        place = batch.laid.where(between.trainer.name, at=worst_of(between))
        self.steps.append((batch.step, between.mean, place, batch.laid.mismatch_command()))
        known, own = versions(batch), batch.columns.scalars("trainer_version")
        now = own[0].value if own else batch.step
        has_all = known is not None and now is not None and bool(np.isfinite(known[0]).all())
        # By the oldest of each batch: what is said of it is said of all of it.
        self.ages.append(float(now or 0) - float(known[0].min()) if known is not None and has_all else None)
        self.are_counted.append(bool(own))
        # Later passes are of a policy that has moved.
        is_old = between.trainer.name == "old_logprobs"
        self.is_plain = self.is_plain and (is_old or bool(before_any_update_N(batch)[between.both_N].all()))

    def says(self, case: Case) -> str:
        """What says that samples are of the newest weights; empty where nothing does, or something says otherwise."""
        ages = [age for age in self.ages if age is not None]
        if len(ages) == len(self.steps) and len(set(ages)) == 1 and (ages[0] == 0 or not any(self.are_counted)):
            return "its weight versions are those of the trainer in every step"
        return (
            "the run states that samples are of the newest weights"
            if not ages and is_synchronous(case.algorithm)
            else ""
        )

    def told(self, case: Case) -> Finding | None:
        """Both agree in the first step, to rounding, and in none behind it."""
        means = [mean for _, mean, *_ in self.steps]
        if not case.begins or len(means) < 4 or not self.is_plain or means[0] > ROUNDED:
            return None
        later = means[1:]
        if min(later) < TIMES * means[0] or median(later) < PARTED or not (says := self.says(case)):
            return None
        _, most, place, command = max(self.steps, key=lambda one: one[1])
        return warning(
            f"engine and trainer disagree by {most:.3g} {_PER_TOKEN} after the first step, which has none, although "
            f"{says}: the engine does not hold all of the trainer's weights",
            place,
            shown("mean |trainer - rollout|, largest of a step", most, f"as in the first: {means[0]:.2g} nats"),
            shown("by step", ", ".join(f"{mean:.2g}" for mean in means[:12])),
            cause="a part of the weights does not reach the engine (names that do not match, some layers, an adapter), "
            "or not all updates do, while its version is counted on; or they are changed on their way (rounded, "
            "merged at another scale). Not another prompt, template, temperature or precision, which the first step "
            "would show as well, and no older samples. rldbg weights of what both sides hold names the parameters",
            next_step=command,
            steps=[step for step, *_ in self.steps[1:] if step is not None],
        )


#: How a claim ends that knows no cause.
_PER_TOKEN = "nats per token"


def _milder(one: Finding) -> Finding:
    return replace(one, severity="warning") if one.severity == "error" else one


def _because(one: Finding, words: str, cause: str, figures: Sequence[Evidence] = ()) -> Finding:
    """The finding with another cause, which all steps together tell: the end of its claim, why, and the figures."""
    claim = one.claim.partition(_PER_TOKEN)[0] + _PER_TOKEN + words
    return replace(one, claim=claim, evidence=(*one.evidence[:2], *figures, *one.evidence[2:]), cause=cause)


def _of_swap(at: int, before: float, after: float) -> tuple[str, str, list[Evidence]]:
    """The place in a response at which the engine's weights became the trainer's."""
    return (
        f" after the first step, which has none: on the first {at} tokens of responses, and on none behind them: "
        "weights change while responses are sampled",
        "the engine gets new weights in the middle of generation (in-flight updates, partial rollouts that go on): a "
        "response begins under old weights and ends under the newest. Where it is meant, importance weights by token "
        "(truncated, TIS) set the first part right; else wait with the update for requests in flight, or abort them",
        [shown(f"mean |d| of the first {at} tokens", before, "as behind them"), shown("mean |d| behind them", after)],
    )


#: Of a run that has as much of it in every step, before the first update, too.
_OF_PRECISION = (
    ", and as much from the first step on, before any update: no old weights, but the engine's precision, or what it "
    "makes of its logits",
    "the engine's precision: its weights are quantised (fp8, int8, int4), or it computes in another one (a bf16 "
    "mixture of experts comes to as much, a dense model in bf16 to a tenth of it); or a mild penalty on its logits. "
    "Not a shift, a temperature, top-p, a packing leak: their discriminators do not show",
)


#: The same of more than precision comes to.
_OF_THE_START = (
    ", and as much from the first step on, before any update: no old weights",
    "the engine computes with other numbers than the trainer's weights: they are quantised coarsely (int4, fp8 with "
    "wide scales), were converted wrongly, or are another checkpoint's; or another prompt template, which tells at the "
    "first tokens most. The engine's weights beside the trainer's tell which (rldbg compare of the two directories), "
    "or a replay with either (rldbg replay --model A --model B --against rollout_logprobs)",
)


def _of_growth(growth: Growth) -> tuple[str, str, list[Evidence]]:
    """The cause that padding tells."""
    counted = growth.are_positions_counted
    told = ", ".join(f"{width}: {mean:.3g}" for width, mean in growth.by_width.items())
    begin = [shown("recorded positions begin at", "the width of the padding", "0")] if counted else []
    return (
        ": more, the more left padding a sample has",
        "left padding is counted in the position ids of one side, or attended to: a sample's positions begin later, "
        "the more padding stands before it"
        + ("; the recorded position_ids do" if counted else ". Make them of the attention mask (cumsum - 1), and pass "
           "the mask to the forward"),
        [shown("mean |d| by left pads", told, "the same"), *begin],
    )  # fmt: skip


def _of_padding_or_weights(growth: Growth) -> tuple[str, str, list[Evidence]]:
    """What is left where most samples are left-padded, and the places in the sequence tell nothing."""
    told = ", ".join(f"{width}: {mean:.3g}" for width, mean in growth.by_width.items())
    return (
        ", in every step from the first on: left padding is handled wrongly on one side, or the engine holds other "
        "weights",
        "the trainer's forward attends to left padding (no attention mask), or counts it in the position ids; or the "
        "engine was loaded with another checkpoint. Rows forwarded alone, without padding, tell which (rldbg replay "
        "--rows-per-forward 1)",
        [shown("mean |d| by left pads", told, "the same")],
    )


def _disagreement(batch: StepBatch, between: Gap) -> tuple[Finding, MismatchCause] | None:
    """What a batch shows, and why, as far as it tells; None where nothing does, or where another rule names it."""
    multiplier, k3 = LIMITS["mult_prob_error"].warning, LIMITS["rollout_k3"].warning
    bad = between.mean > DISAGREE or between.multiplier > multiplier or between.k3 > k3
    named = between.is_shifted or between.after_softmax is not None or between.is_tempered or between.is_truncated
    if not bad or named or between.leak is not None:
        return None
    why = cause_of(batch, between)
    short = why.short
    mild = between.mean <= DISAGREE or _is_off_policy(batch) or _is_usual(between, short)
    place = batch.laid.where(between.trainer.name, at=worst_of(between))
    made = finding(
        "info" if mild else "error" if between.mean > BADLY else "warning",
        f"engine and trainer disagree by {between.mean:.3g} {_PER_TOKEN}" + (f": {short}" if short else ""),
        place,
        *figures_of(between),
        shown("99th percentile of |d|", between.p99),
        shown("mean e^|d|", between.multiplier, "<= 1.05"),
        shown("k3(rollout, trainer)", between.k3, "<= 1e-3"),
        shown("correlation at lag 0", between.correlation),
        shown("slope of rollout on trainer", between.slope, "0.9 to 1.1"),
        *why.figures,
        cause=why.sentence,
        next_step=batch.laid.mismatch_command(),
    )
    return made, why


def _is_off_policy(batch: StepBatch) -> bool:
    """Whether the batch is older than the policy on purpose: importance weights, or versions behind the step."""
    if batch.has("is_weights") or batch.laid.algorithm.is_off_policy:
        return True
    known = versions(batch)
    if known is None or batch.step is None or np.isnan(known[1]).all():
        return False
    return float(np.nanmax(known[1])) < batch.step


def _is_usual(between: Gap, short: str) -> bool:
    """Whether it is as much as precision comes to, and looks like it."""
    return between.mean <= USUAL and between.correlation > ALIKE and short in ("", OF_THE_ENGINE)


#: Both sides of a mixture of experts in bf16 that is healthy rise and fall together by more.
ALIKE = 0.95
#: Where a mismatch is rounding, what the first step has, whose weights the engine was started with; and what one update
#: does not come to (nats, probability, k3).
_OF_AN_UPDATE = {"logprob_diff": (0.01, OLDEST), "prob_diff": (0.003, 0.1), "rollout_k3": (5e-4, 0.1)}
_LATE = (
    " after the first step, which has none, and comes to rest: samples are an update old, or more, or the engine's "
    "weights are changed on their way"
)
_LATE_CAUSE = (
    "right of an asynchronous run, whose samples are of weights before the last update; of a synchronous one the "
    "weights reach the engine a step late (importance weights, truncated, TIS, set it right), or what is learnt "
    "reaches it otherwise than it is: an adapter that is applied twice or with another scale, updates that are rounded"
)

#: The same of more than that, or of what wavers.
_LEFT = " after the first step, which has none: from the first update on the engine's weights are not the trainer's"
_LEFT_CAUSE = (
    "weights are not sent to the engine, or late, or not all of them (a sync that fails silently, renamed parameters, "
    "an adapter that is not delivered), or they are changed on their way. Not another prompt, template or precision, "
    "which the first step would show as well"
)

#: The same of a run that states that its samples are no updates old.
_UNSYNCED = (
    " after the first step, which has none, although the run states that samples are of the newest weights: the "
    "engine's are older, or a part of them is"
)
_UNSYNCED_CAUSE = (
    "the engine is not given every update, or not all of the weights (names that do not match, a part of the layers, "
    "an adapter): a synchronous run without importance weights has as little of it in each step as in the first"
)


def _is_one_update(values: list[float], rounding: float, most: float) -> bool:
    """Whether a mismatch by step is that of weights some updates old: the first step has none, and what comes later
    does not grow any more. Weights that never arrive leave ever more of it.
    """
    if len(values) < 4 or values[0] > min(rounding, 0.1 * values[1]):
        return False
    later = values[1:]
    if np.median(later) > most or synced_every(values) is not None:
        return False
    if comes_to_rest(later):
        return True
    half = len(later) // 2
    return bool(np.median(later[half:]) <= 1.2 * np.median(later[: max(half, 2)])) and not trends.rises(later)


def _leaps(log: RunLog) -> Finding | None:
    """The mismatch past its error limit, and 5 times all before it (2 steps and more), in 2 steps in a row."""
    for signal in ("logprob_diff", "rollout_k3", "prob_diff"):
        series = log.get(signal)
        points = [] if series is None else [point for point in series.points if math.isfinite(point.value)]
        for at in range(2, len(points) - 1):
            before = max(point.value for point in points[:at])
            now, limit = min(point.value for point in points[at : at + 2]), LIMITS[signal].error
            if series is None or now <= limit or now <= JUMP * max(before, 1e-12):
                continue
            bad = [point for point in points[at:] if point.value > limit]
            return finding(
                "error" if bad[-1] is points[-1] else "warning",
                f"engine and trainer disagree from step {points[at].step} on: {series.name} leaps to "
                f"{points[at].value:.3g}, at most {before:.3g} before",
                points[at].where(series.name),
                series.shown_at(points[at], f"< {limit:g}"), shown("largest before", before),
                shown("steps past the limit", len(bad)),
                cause="from one step to the next the two have other weights: a checkpoint was loaded or resumed and "
                "the engine was not synchronised, a synchronisation failed, or the trainer's precision changed",
                next_step=TOLD_APART,
                steps=steps_of(bad),
            )  # fmt: skip
    return None


#: First steps that have to be past a limit each, and how many times the run is as long as they are.
FIRST, AS_LONG = 8, 2


def _begins(log: RunLog) -> Finding | None:
    """The mismatch past its warning limit, and past what precision comes to, in each of the first 8 steps, of a run
    that is twice as long and comes to less: a policy that gets sure of its tokens hides what parts both sides.
    """
    if log.algorithm.is_off_policy or any(batch.has("is_weights") for batch in log.samples()):
        return None
    for signal in ("logprob_diff", "mult_prob_error", "prob_diff", "rollout_k3"):
        series, limit = log.get(signal), LIMITS[signal]
        heat = None if series is None else _stated_heat(log, series, limit)
        if signal == "rollout_k3" and heat is None:
            continue  # a sum over tokens of which few make all of it
        values = [] if series is None else series.finite
        first = series.points[0].step if series is not None else None
        if series is None or len(values) < AS_LONG * FIRST or first is None or first > 1:
            continue
        least = limit.warning if math.isnan(limit.usual) else limit.usual
        if all(limit.is_past(value, least) for value in values[:FIRST]):
            return warning(
                f"engine and trainer disagree before anything is learnt: {series.name} is {median(values[:FIRST]):.3g} "
                f"in the first {FIRST} steps, and {trends.level(values):.2g} by now"
                + (
                    ""
                    if heat is None
                    else f"; the engine samples at temperature {heat:g}, the trainer scores at another"
                ),
                series.between(over=limit.warning),
                series.shown(median(values[:FIRST]), f"< {limit.warning:g}"),
                shown("in the first step", values[0]),
                cause=("" if heat is None else f"the temperature ({heat:g}) on one side alone; or: ")
                + "no weights are old at first: one side adds something to the logits that the other does not (a "
                "penalty on repeated tokens, a temperature, top-p), has another template or precision, or counts "
                "other tokens; it costs less as the policy gets surer of its tokens, and is no less wrong",
                next_step=TOLD_APART,
            )
    return None


def _is_sure(log: RunLog) -> bool:
    """Whether the policy is sure of every token, and probabilities hardly differ between engine and trainer: they are
    all 1, and what is correlated is rounding.
    """
    apart, entropy = log.get("prob_diff"), log.get("entropy")
    if apart is None or entropy is None or not apart.finite or not entropy.finite:
        return False
    return trends.level(apart.finite) < LIMITS["prob_diff"].warning / 4 and trends.level(entropy.finite) < SURE


@rule("D09", "engine and trainer disagree", link="logprobs", scope="signals", needs=("|".join([*LIMITS, "behave_kl"]),),
      source="NeMo-RL docs; slime and miles CI; verl-omni#637")  # fmt: skip
def mismatch(log: RunLog) -> Finding | None:
    """Level (median of the last 10 steps) of what is logged of d = logp_trainer - logp_rollout.

    mean|d| over 0.03 (0.1 an error), mean e^|d| over 1.05 (1.2), k3 over 1e-3 (0.1), mean difference of the
    probabilities over 0.02 (0.1), their Pearson under 0.98 (0.9; not where they hardly differ and the entropy is below
    .05). One number does not name a cause: a shift, a temperature, stale weights and packing all look like this. A
    healthy bf16 mixture of experts has mean|d| of 0.064: up to 0.07 (mean e^|d| 1.08, k3 4e-3) it is info where it does
    not rise. It is info, too, where the first step has none, the second all of it, and it does not grow, within .5
    nats, .1 of probability and .1 of k3: weights one update old, as of every asynchronous run; and where the log tells
    that samples are some updates old, and the first step has less than half of it, and it does not grow. A warning at
    most where it begins as the policy falls apart (L08). Where the run
    states a temperature of sampling other than 1 and the first 3 steps are past the limit, that is told first. A
    warning, too, where each of the first 8 steps is past the
    limit (and past what precision comes to) of 16 and more that come to less: no weights are old there, and a policy
    that gets surer of its tokens hides the cause.
    """
    bad = [
        (limit, series, now)
        for signal, limit in LIMITS.items()
        for series, now in log.level(signal)
        if limit.is_past(now, limit.warning) and not (signal == "prob_pearson" and _is_sure(log))
    ]
    if not bad:
        return _leaps(log) or _begins(log) or _of_no_age(log)
    if log.algorithm.is_off_policy or any(batch.has("is_weights") for batch in log.samples()):
        raise Skip("the run states that its samples are of older weights on purpose: a mismatch is part of it")
    if any(old_is_odd(batch) is not None for batch in log.samples()):
        raise Skip("the policy agrees with the engine, as its samples tell: the old log-probabilities are off (D14)")
    limit, series, now = next((one for one in bad if one[0].is_past(one[2], one[0].error)), bad[0])
    past = [point for point in series.points if limit.is_past(point.value, limit.warning)]
    late = series.signal in _OF_AN_UPDATE and _is_one_update(series.finite, *_OF_AN_UPDATE[series.signal])
    late = late or _is_of_lag(log, series, limit)
    usual = late or (now <= limit.usual and trends.drift(series.finite) <= trends.DRIFT_Z)
    other = series.signal == "logprob_diff" and now > OTHER_TOKENS and series.finite[0] > OTHER_TOKENS
    cut = not late and _is_of_truncation(log)
    leapt = _leapt(series, limit)
    # What a policy writes that has fallen apart lies where two precisions differ most.
    heat = None if late or cut or leapt else _stated_heat(log, series, limit)
    apart = falls_apart(log)
    follows = apart is not None and (past[0].step or 0) >= (apart[0] or 0)
    return finding(
        "info" if usual else "error" if limit.is_past(now, limit.error) and not follows else "warning",
        f"engine and trainer disagree: {series.name} is {now:.3g}"
        + (
            ": the engine's log-probabilities are renormalised over what top-p or top-k leaves (D11)"
            if cut
            else _LATE
            if late
            else ", since the policy falls apart (L08)"
            if follows
            else f" from the first step on, and the engine samples at temperature {heat:g}: the trainer takes its "
            "log-probabilities at another one (1)"
            if heat is not None and not usual
            else leapt or _steady(series, limit) or _grown(series, limit)
        ),
        series.of(past),
        series.shown(now, f"{'<' if limit.side > 0 else '>'} {limit.warning:g}"),
        cause="the engine returns log-probabilities of what is left of the distribution, the trainer of the whole: "
        "they are never less, and up to -log(top_p) more. Take raw log-probabilities, or sample with top_p 1, no top_k"
        if cut
        else _LATE_CAUSE
        if late
        else f"the temperature: logits are divided by {heat:g} where tokens are sampled, and not where the "
        "trainer scores "
        "them (or the engine returns log-probabilities of what it would sample at 1). If both have it: another "
        "precision "
        "or kernel, a template, top-p, tokens in the loss mask that no engine sampled"
        if heat is not None and not usual
        else "so far apart from the first step on that both hardly speak of the same tokens: log-probabilities that "
        "are shifted by one token, tokens that were re-tokenised or belong to other samples, tokens in the loss mask "
        "that no engine sampled such as padding, prompt or tool output, or another model"
        if other
        else "one side computes or samples otherwise from that step on: a temperature, top-p or penalty of the "
        "engine that "
        "was changed, an engine that was restarted with other settings, precision or weights, another template. "
        "Weights "
        "that are no longer sent part by and by, and no further at once"
        if leapt
        else "weights that are not all sent to the engine, or late: part of the layers, or all, stay behind "
        "from update to update; another precision, template or temperature would show in the first step as well "
        "(a precision that costs more as the policy moves, such as quantised weights, grows more slowly)"
        if _grown(series, limit)
        else "another precision or kernel, dropout left on, a temperature or top-p that one side applies, weights "
        "that were not synced, a chat template, packing, tokens in the loss mask that no engine sampled such as "
        "padding, prompt or tool output: the log has one number for all of them",
        next_step="divide the trainer's logits by the sampling temperature, before its log-probabilities and its "
        "entropy; " + TOLD_APART
        if heat is not None and not usual
        else TOLD_APART,
    )


#: How far from 1 a temperature is another one.
ANOTHER_HEAT = 0.02


def _stated_heat(log: RunLog, series: Series, limit: Limit) -> float | None:
    """The temperature that the engine is stated or logged to sample at, where it is none of 1 and both disagree in the
    first steps already.
    """
    logged = log.get("rollout_temperature")
    stated = log.algorithm.number("rollout_temperature", "sampling_temperature", "temperature")
    heat = logged.finite[0] if logged is not None and logged.finite else stated
    first = series.finite[:3]
    if heat is None or not heat > 0 or abs(heat - 1) < ANOTHER_HEAT or series.points[0].step not in (0, 1, None):
        return None
    return heat if first and all(limit.is_past(value, limit.warning) for value in first) else None


def _of_no_age(log: RunLog) -> Finding | None:
    """Where the policy that sampled and the one that is recomputed before the update (decoupled PPO) differ although
    no sample is older than the weights: only the engine and the trainer are left to.
    """
    series, age = log.get("behave_kl"), age_of(log)
    values = [] if series is None else [abs(value) for value in series.finite]
    if series is None or age is None or len(values) < trends.MIN_STEPS or not age.finite or any(age.finite):
        return None
    # A policy that gets sure of its tokens hides in the end what parted both sides at first.
    limit, begun = LIMITS["logprob_diff"], abs(median(series.finite[:FIRST]))
    now = max(trends.level(values), begun)
    if not limit.is_past(now, limit.warning):
        return None
    return finding(
        "error" if limit.is_past(now, limit.error) else "warning",
        f"engine and trainer disagree: {series.name} is {now:.3g}{' in the first steps' if now == begun else ''} where "
        f"no sample is old ({age.name} is 0 in every "
        "step), so that no update lies between the log-probabilities that it compares",
        series,
        series.shown(now if series.last.value > 0 else -now, f"within {limit.warning:g} of 0"),
        shown("in the first step", series.points[0].value),
        age.shown(0.0),
        cause="one side adds something to the logits that the other does not: a temperature (the engine samples at "
        "another one than the trainer scores at), top-p, a penalty; or another precision, template or model, or "
        "weights that were not synced",
        next_step=TOLD_APART,
    )


def _is_of_truncation(log: RunLog) -> bool:
    """Whether the recorded samples say that it is what top-p or top-k leaves (D11)."""
    for batch in log.samples():
        try:
            return compared(batch).is_truncated
        except Skip:
            continue
    return False


#: The share of the later level that the first steps have at least where a mismatch is theirs, too.
AS_MUCH = 0.5


def _is_of_lag(log: RunLog, series: Series, limit: Limit) -> bool:
    """Whether samples are some updates old, as the log says, and the mismatch has come up behind the first step, and
    rests: that of weights so old.
    """
    lag, values = age_of(log), series.finite
    if lag is None or not lag.finite or trends.level(lag.finite) <= 0 or len(values) < trends.MIN_STEPS:
        return False
    later = values[2:]
    return (
        limit.side > 0
        and values[0] < AS_MUCH * float(np.median(later))
        and not trends.rises(later)
        and not limit.is_past(trends.level(values), limit.error)
    )


def _steady(series: Series, limit: Limit) -> str:
    """What it adds that they disagree by as much from the first step on: old weights would grow."""
    values = series.finite
    if len(values) < trends.MIN_STEPS or abs(trends.drift(values)) > trends.DRIFT_Z:
        return ""
    if not all(limit.is_past(value, limit.warning) for value in values[:3]):
        return ""
    if limit.side > 0 and min(values[:2]) < AS_MUCH * float(np.median(values[2:])):
        return ""
    return ", and as much from the first step on, which old weights do not make"


def _leapt(series: Series, limit: Limit) -> str:
    """What it adds that both agreed until one step, and lie as far apart from there on."""
    if limit.side < 0 or len(series.finite) < trends.MIN_STEPS:
        return ""
    leap = leap_in(series)
    if leap is None or not limit.is_past(leap.after, limit.warning) or leap.before > limit.warning / 3:
        return ""
    return (
        f": it leaps from {leap.before:.2g} to {leap.after:.2g} at step {leap.at.step}, within one step, and stays "
        "there, as a "
        "setting does that was changed on one side"
    )


#: How many times the first step's figure makes it a growth from next to nothing.
GROWN = 20.0


def _grown(series: Series, limit: Limit) -> str:
    """What it adds that both agreed in the first step, before any update, and part over those that follow."""
    values = series.finite
    if limit.side < 0 or len(values) < trends.MIN_STEPS or series.signal == "mult_prob_error":
        return ""
    first, steps = values[0], [point.step for point in series.points]
    if not 0 < first < limit.warning / 3 or steps[0] not in (0, 1) or float(np.median(values[-4:])) < GROWN * first:
        return ""
    # A single update that leaps to what it stays at is one update's age: told apart elsewhere.
    if float(np.median(values[2:5])) < 2 * values[1] and max(values[5:]) < 2 * values[1]:
        return ""
    return f", and {first:.2g} in the first step: it grows with the updates, as weights do that the engine does not get"
