"""Policy against reference: where the KL starts, and which estimator the logged one is."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from statistics import mean, median

import numpy as np
from msgspec.structs import replace

from replay_core.diagnose import trends
from replay_core.diagnose.advantage_variants import is_rounded
from replay_core.diagnose.algorithm import KL_WEIGHTS
from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.case import Case
from replay_core.diagnose.collected import Growth
from replay_core.diagnose.columns import Column
from replay_core.diagnose.compared import distance
from replay_core.diagnose.entropy_term import is_outweighed
from replay_core.diagnose.finding import Evidence, Finding, Where, error, finding, info, shown, warning
from replay_core.diagnose.flat import Array
from replay_core.diagnose.gap import FEWEST, Gap, is_of_padding
from replay_core.diagnose.kinship import of_rows, whose
from replay_core.diagnose.rule import Skip, given, rule, skip_if
from replay_core.diagnose.rules.staleness import versions
from replay_core.diagnose.signals import Point, RunLog, Series
from replay_core.diagnose.surrogates import logged_of
from replay_core.objectives import kl
from replay_core.regexes import regex

#: Policy and reference are one model before the first update: from here on the difference is no kernel's.
MOVED = 1e-4
#: What no resumed run explains: about 0.8 per token is another chat template; above 1 another model.
OTHER_PROMPT, OTHER_MODEL = 0.5, 1.0
#: What no kernel comes to where engine and trainer agree five times as well.
OTHER_WEIGHTS = 0.1
#: The share of samples that have another's reference, where both models are one: chance gives hardly any.
OF_OTHERS = 0.3
K3_FLOOR = -1e-6
#: Steps of a k1 mean before its sign means anything, and the share of them that must be negative.
K1_STEPS, K1_SHARE, K1_MEAN = 20, 0.9, -1e-3


@rule("D15", "policy and reference differ before the first update", link="ref", scope="case",
      source="slime and miles debug guides (1e-8 with one kernel; about 0.8 per token: chat template)")  # fmt: skip
def reference_moved(case: Case) -> Finding | None:
    """mean |policy - ref| at step 0. Above 1e-4 it is worth saying (a run that resumed has it); 0.5 and more is a
    warning, more than 1 an error: another template, or another model (a warning where a weight version says that the
    run goes on). Of step 1, where step 0 is not in the dump, the last two alone. Skipped where neither is. From .1 on,
    where engine and trainer agree, it is a warning where a weight version of 0, or a learning rate that is warmed up,
    says that the run begins here; a later version says that it goes on: info up to 1. An error where the reference of
    a third of the samples is the policy of other ones.
    """
    for batch in case.batches():
        trainer, ref = batch.trainer, batch.columns.of("ref_logprobs")
        if batch.step not in (0, 1) or trainer is None or ref is None:
            continue
        both_N = batch.pair(trainer, ref)
        if both_N.sum() < FEWEST:
            continue
        apart = np.abs(trainer.values_N[both_N] - ref.values_N[both_N])
        mean = float(apart.mean())
        # verl counts from 1. Elsewhere one update lies before: it moves no policy as far as another model is.
        as_engine = Gap(batch, ref, trainer, both_N)
        # verl's step 1 has no update before it, and one update turns no temperature.
        if mean <= (MOVED if batch.step == 0 or as_engine.is_tempered else OTHER_PROMPT):
            return None
        if batch.laid.algorithm.is_distilled or _is_taught(batch, trainer, ref, both_N):
            raise Skip("the reference is a teacher: advantages are made of its log-probabilities")
        at = int(np.flatnonzero(both_N)[apart.argmax()])
        place = batch.laid.where("ref_logprobs", at=at)
        if batch.step == 0 and (found_B := whose(batch, ref, trainer, OF_OTHERS)) is not None:
            what, cause = of_rows(found_B)
            first = int((found_B >= 0).argmax())
            return error(
                f"reference log-probabilities are {what}",
                batch.laid.where("ref_logprobs", sample=first),
                shown("samples whose reference is the policy of another", int((found_B >= 0).sum()), "0", ref.source),
                shown(f"sample {first} has those of", int(found_B[first]), str(first), trainer.source),
                shown("mean |policy - ref| at step 0", mean, "<= 1e-4"),
                cause=cause,
                steps=(batch.step,),
            )
        if as_engine.is_tempered:
            return finding(
                "error" if mean > OTHER_MODEL else "warning",
                f"policy and reference are at different temperatures: {given(as_engine.gain):.2f} explains their "
                f"difference at step {batch.step}",
                place,
                shown(f"mean |policy - ref| at step {batch.step}", mean, "<= 1e-4", f"{trainer.source} - {ref.source}"),
                shown("temperature of the reference over the policy's", given(as_engine.gain), "0.9 to 1.1"),
                shown("correlation", as_engine.correlation),
                cause="one of the two divides its logits by the sampling temperature and the other does not: the KL "
                "pulls the policy towards another distribution than the one it began with",
                next_step=batch.laid.replay_command(place, "--model REFERENCE --against ref_logprobs"),
                steps=(batch.step,),
            )
        known = versions(batch)
        version = None if known is None or np.isnan(known[1]).all() else float(np.nanmax(known[1]))
        other = mean > OTHER_WEIGHTS and batch.step == 0 and _is_used(batch) and _agrees_with_engine(batch, mean)
        # A run that goes on from a checkpoint and counts its steps anew has left its reference already.
        resumed, begins = bool(version), version == 0 or _warms_up(case)
        if not resumed and is_of_padding(as_engine):
            return _of_its_padding(batch, as_engine, mean, place)
        return finding(
            "error"
            if mean > OTHER_MODEL and not resumed
            else "warning"
            if mean > OTHER_MODEL or (not resumed and (mean > OTHER_PROMPT or (other and begins)))
            else "info",
            f"policy and reference differ by {mean:.3g} nats per token at step {batch.step}"
            + (
                ", before any update: the reference has other weights than the policy began with, or is given "
                "something else"
                if other
                else ""
            ),
            place,
            shown(f"mean |policy - ref| at step {batch.step}", mean, "<= 1e-4", f"{trainer.source} - {ref.source}"),
            shown("largest", float(apart.max())),
            *([] if resumed else _by_width(case)),
            cause="the reference has other weights than the policy began with, or sees another chat template"
            if mean > OTHER_PROMPT
            else "the reference log-probabilities come from other weights than the policy was started from: another "
            "checkpoint (of an earlier or later stage, or one that did not load), or a run that resumed and counts its "
            "steps anew. The KL pulls towards a model that was not meant"
            if other
            else "the run resumed from a checkpoint, or policy and reference run different kernels",
            next_step=batch.laid.replay_command(place, "--model POLICY --model REFERENCE --against ref_logprobs"),
            steps=(batch.step,),
        )
    raise Skip("needs the policy's and the reference's log-probabilities of step 0")


def _by_width(case: Case) -> list[Evidence]:
    """How the difference of policy and reference grows with a sample's padding over the run, where it does: worth
    knowing, and no verdict, as prompts of other lengths are other prompts.
    """
    growth = Growth()
    for batch in case.batches():
        trainer, ref = batch.trainer, batch.columns.of("ref_logprobs")
        if trainer is None or ref is None:
            continue
        both_N = batch.pair(trainer, ref)
        if both_N.sum() >= FEWEST:
            growth.take(batch, Gap(batch, ref, trainer, both_N))
    if not growth.is_told:
        return []
    by_width = ", ".join(f"{width}: {mean:.3g}" for width, mean in growth.by_width.items())
    return [shown("mean |d| by left pads", by_width, "the same")]


def _of_its_padding(batch: StepBatch, as_engine: Gap, mean: float, place: Where) -> Finding:
    """Policy and reference that differ in samples with padding alone."""
    flush, padded = as_engine.by_padding or (0.0, 0.0)
    of_engine = distance(batch)
    side = "the reference" if of_engine is not None and of_engine < 0.2 * mean else "one of the two"
    return finding(
        "error" if mean > OTHER_PROMPT else "warning",
        f"policy and reference differ by {mean:.3g} nats per token at step {batch.step}, before any update, in "
        f"samples with left padding alone: {side} sees the padding",
        place,
        shown(f"mean |policy - ref| at step {batch.step}", mean, "<= 1e-4",
              f"{as_engine.trainer.source} - {as_engine.rollout.source}"),
        shown("mean |d| without left padding", flush), shown("mean |d| with left padding", padded, "the same"),
        *([] if of_engine is None else [shown("mean |policy - engine|", of_engine)]),
        cause="its forward has no attention mask, or counts the padding in the position ids; other weights would show "
        "with little padding as much",
        next_step=batch.laid.replay_command(place, "--model REFERENCE --against ref_logprobs"),
        steps=() if batch.step is None else (batch.step,),
    )  # fmt: skip


def _warms_up(case: Case) -> bool:
    """Whether the learning rate rises from the first logged step on, from half of what it comes to or less."""
    rates = case.log.get("learning_rate")
    if rates is None or len(rates.finite) < 3 or rates.points[0].step not in (0, 1):
        return False
    first, second, third = rates.finite[:3]
    return bool(first < second < third and 2 * first <= max(rates.finite))


def _is_used(batch: StepBatch) -> bool:
    """Whether the run uses a KL to the reference: it states a coefficient over 0, or none and records the KL."""
    algorithm = batch.laid.algorithm
    stated = [algorithm.number(name) for name in (*KL_WEIGHTS, "kl_in_reward_coef")]
    known = [value for value in stated if value is not None]
    return any(known) if known else batch.columns.of("kl") is not None


def _agrees_with_engine(batch: StepBatch, mean: float) -> bool:
    """Whether the engine, which holds the policy's weights, says what the trainer does: then kernels are not why the
    reference does not.
    """
    between = distance(batch)
    return between is not None and between < 0.2 * mean


def _is_taught(batch: StepBatch, trainer: Column, ref: Column, both_N: Array) -> bool:
    """Whether advantages follow what the reference gives a token more than the policy does: distillation on policy."""
    column = batch.columns.of("advantages")
    if column is None or batch.advantage_B is not None:
        return False
    both_N = both_N & column.said_N & np.isfinite(column.values_N)
    a, b = column.values_N[both_N], (ref.values_N - trainer.values_N)[both_N]
    # Cut off on both sides, as teachers' log ratios are.
    b = np.clip(b, a.min(initial=0.0), a.max(initial=0.0))
    return bool(len(a) >= FEWEST and np.ptp(a) > 0 and np.ptp(b) > 0 and np.corrcoef(a, b)[0, 1] > 0.99)


_FAR_FROM_IT = (
    "the lines do not number their steps, and need not begin with the run: the policy has moved that far from its "
    "reference (its coefficient is too small for this learning rate), or the two never were one model (another "
    "checkpoint, template, dtype or temperature)"
)


#: Steps of a line, the share of the largest rate that moves no policy yet, and a KL that no kernel makes.
_A_LINE, _HARDLY_A_RATE, _APART = 10, 0.02, 0.05


def _is_first_of_several(series: Series) -> bool:
    """Whether the first line is of the first steps: its number is how far lines are apart."""
    steps = [point.step for point in series.points[:4] if point.step is not None]
    apart = {after - before for before, after in pairwise(steps)}
    return len(steps) >= 3 and apart == {steps[0]} and 1 < steps[0] <= _A_LINE


def _before_the_rate(log: RunLog, series: Series) -> Finding | None:
    """A KL of the first line that no update has made: the learning rate was next to nothing of what it comes to."""
    point, rates = series.points[0], log.get("learning_rate")
    rate = log.at("learning_rate", point.step)
    most = max(rates.finite, default=0.0) if rates is not None else 0.0
    value = abs(point.value)
    if rate is None or not 0 <= rate.value < _HARDLY_A_RATE * most or not _APART < value < math.inf:
        return None
    return warning(
        f"KL to the reference is {point.value:.3g} in the first line (step {point.step}), at a learning rate of "
        f"{rate.value:.2g}, {rate.value / most:.1%} of its largest: no update has made it",
        point.where(series.name),
        series.shown_at(point, "next to 0 before updates that count"),
        given(rates).shown_at(rate, f"{most:.3g} at most"),
        cause=_NOT_THE_START,
        next_step=_AGAINST_REFERENCE,
        steps=series.steps()[:1],
    )


#: A KL that neither kernels nor one step's updates make as a rule; one that they never do where nothing is logged
#: beside it; and how many times what the step's own updates, or engine and trainer, come to.
_UNMADE, _UNMADE_ALONE, _TIMES_OWN = 0.02, 0.05, 10.0
_ANOTHER = (
    "the reference is another model than the policy's start (another checkpoint, a base model beside an instruct one, "
    "an adapter that only one of the two has, the policy resumed and the reference not), or it has another template, "
    "dtype or temperature: the KL pulls the policy there from the first step on"
)


def _own_moves(log: RunLog, point: Point) -> list[tuple[Point, float]]:
    """What is logged of how far the step's own updates move the policy, and of engine and trainer, as KLs."""
    found = []
    for name, as_kl in (
        ("policy_kl", abs), ("ratio_max", lambda ratio: (max(ratio, 1.0) - 1.0) ** 2 / 2), ("rollout_k3", abs),
        ("rollout_k1", abs), ("logprob_diff", lambda apart: apart * apart),
    ):  # fmt: skip
        beside = log.at(name, point.step)
        if beside is not None and math.isfinite(beside.value):
            found.append((beside, as_kl(beside.value)))
    return found


def _is_unmade(log: RunLog, point: Point) -> bool:
    """Whether neither updates of the step itself nor kernels explain a KL of the first step."""
    value = abs(point.value)
    if any(log.at(name, point.step) is not None for name in ("policy_kl", "ratio_max")):
        return all(value >= _TIMES_OWN * own for _, own in _own_moves(log, point))
    # One update of a batch comes behind the KL that its loss is made of.
    cut = log.at("clip_fraction", point.step)
    once = log.algorithm.updates < 2 and (cut is None or cut.value == 0)
    return once and value >= _UNMADE_ALONE and all(value >= _TIMES_OWN * own for _, own in _own_moves(log, point))


def _beside(log: RunLog, point: Point) -> list[Evidence]:
    names = ("policy_kl", "ratio_max", "rollout_k3", "rollout_k1", "logprob_diff")
    each = [(log.get(name), log.at(name, point.step)) for name in names]
    return [series.shown_at(one) for series, one in each if series is not None and one is not None][:3]


@rule("D15", "KL to the reference at the first step", link="ref", scope="signals", needs=("kl",),
      source="slime and miles debug.md")  # fmt: skip
def first_kl(log: RunLog) -> Finding | None:
    """Before the first update policy and reference are one model: KL is 0.

    Over 1 is an error (another model or template: about 0.8 per token for a chat template), over 0.5 a warning, over
    1e-4 info: later mini-batches and epochs of a first step have been updated already, and bf16 kernels differ. With an
    on-policy step (clip fraction and policy KL both 0) over 1e-4 is a warning; so is one of .02 and more that is ten
    times what the step's own updates (KL to the policy that sampled, the largest ratio) and engine and trainer come to,
    and one of .05 where neither is logged and a batch has one update. Over 1 in every one of 8 steps and more,
    and no explosion, is a warning wherever the log begins. Info, too, where one of up to 1 comes down from there by
    more
    than chance explains: a teacher. Silent where a tenth of the tokens of
    one of the first three steps are clipped: their own updates move it. Only where the log numbers its steps from 0 or
    1. Of a log of every so many steps, whose first line is of the first of them: a warning over .05 where the learning
    rate is warmed up, and was below a fiftieth of its largest so far.
    """
    series = given(log.get("kl"))
    point = series.points[0]
    always = min(series.finite, default=0.0)
    if always > OTHER_MODEL and len(series.finite) >= 8 and trends.level(series.finite) < LEAPT * always:
        return warning(
            f"KL to the reference is {trends.level(series.finite):.3g} per token "
            + ("in all of the lines given" if log.is_counted else "from the first logged step on")
            + f", and never below {always:.3g}",
            point.where(series.name),
            series.shown(always, f"< {OTHER_MODEL:g} in some step"),
            # Lines of a run's end say nothing of how it began.
            cause=_FAR_FROM_IT if log.is_counted else _NOT_THE_START,
            next_step=_AGAINST_REFERENCE,
            steps=series.steps(),
        )
    if len(series.finite) > 2 and sum(value < 0 for value in series.finite) >= K1_SHARE * len(series.finite):
        raise Skip("the KL is negative: D29 says what that means")
    skip_if(log.is_counted, "the log does not number its steps: its first line need not be the first step")
    if _is_first_of_several(series) and (early := _before_the_rate(log, series)) is not None:
        return early
    skip_if(point.step not in (0, 1), "the log does not begin at the first step")
    # Of several micro-batches the first alone is from before any update.
    of_step = [micro for micro in log.micros("kl") if micro.step == point.step]
    point = min(of_step, key=lambda micro: micro.micro or 0) if of_step and point.micro is None else point
    value = abs(point.value)
    if not math.isfinite(value) or value <= MOVED:
        return None
    on_policy = all(
        (p := log.at(name, point.step)) is not None and p.value == 0 for name in ("clip_fraction", "policy_kl")
    )
    clips = log.get("clip_fraction")
    if clips is not None and any(value > 0.1 for value in clips.finite[:3]):
        raise Skip("the first steps' own updates move the policy: a tenth of their tokens and more are clipped")
    unmade = (
        _UNMADE <= value <= OTHER_PROMPT and not on_policy and not _is_summed(log, series) and _is_unmade(log, point)
    )
    mild = value <= OTHER_PROMPT and not on_policy and not unmade
    # Towards a reference that it began with no policy has a way to go: what comes nearer all along has a teacher.
    nears = trends.drift([-abs(each) for each in series.finite]) > trends.DRIFT_Z and not mild
    if nears and value <= OTHER_MODEL:
        return info(
            f"KL to the reference is {point.value:.3g} at the first step and falls from there to "
            f"{trends.level(series.finite, 3):.3g}: the policy nears it, as one that is distilled from a teacher does",
            point.where(series.name),
            series.shown_at(point, "0 before the first update, of a reference that is the start"),
            cause="the reference is a teacher; if it is meant to be the model that training began with, it is "
            "another one "
            "(checkpoint, template, dtype)",
            next_step=_AGAINST_REFERENCE,
            steps=series.steps()[:1],
        )
    return finding(
        "error" if value > OTHER_MODEL else "info" if mild else "warning",
        f"KL to the reference is {point.value:.3g} at the first step"
        + (": the reference is another model than the one that training begins with" if unmade else ""),
        point.where(series.name),
        series.shown_at(point, "0 before the first update"),
        *(_beside(log, point) if unmade else []),
        cause=_ANOTHER
        if unmade
        else "mini-batches after the first have been updated already, or two kernels differ"
        if mild
        else _NOT_THE_START,
        next_step=_AGAINST_REFERENCE,
        steps=series.steps()[:1],
    )


_NOT_THE_START = (
    "policy and reference disagree before any update: the reference is another checkpoint, template (about 0.8 per "
    "token), dtype or temperature than the policy's start; or the policy's own forward is off (positions or mask of "
    "padding, a packing leak, dropout)"
)
_AGAINST_REFERENCE = (
    "rldbg record -- YOUR COMMAND; then rldbg replay rldbg-dump --model POLICY --model REFERENCE --against ref_logprobs"
)
#: What a recorded KL may be: an estimator by the word it is stated by, in its forms.
_OWN_FORMS = tuple((name, name, each) for name, each in kl.ESTIMATORS.items())
_FORMS = (*_OWN_FORMS[:3], ("k3", "k3 clamped to +-20 and +-10", kl.k3_clamped), *_OWN_FORMS[3:])


#: What an estimator may leave of a recorded KL, by the precision it is stored in.
_CLOSE = {"bfloat16": 1e-2, "float16": 2e-3}


def named_estimator(
    kl_N: Array, policy_N: Array, ref_N: Array, *ratios_N: Array, close: float = 1e-3
) -> tuple[str, bool] | None:
    """Which estimator the values are, and whether policy and reference are swapped in it; None where none agrees.

    ratios_N: what an estimator may be weighed with, since samples are of an older policy (DeepSeek-V3.2's unbiased k3).
    """
    for swapped in (False, True):
        a_N, b_N = (ref_N, policy_N) if swapped else (policy_N, ref_N)
        for _, name, estimate in _FORMS:
            for times_N, words in ((1.0, ""), *((each_N, " times the ratio") for each_N in ratios_N)):
                expected = times_N * estimate(a_N, b_N)
                if (np.abs(kl_N - expected) <= 1e-5 + close * np.abs(expected)).all():
                    return name + words, swapped
    return None


#: A KL of both signs, above 0 on the average, that is as small as this may be a plain difference over few tokens.
_OF_BOTH_SIGNS = 0.1


@rule("D29", "the KL estimator is turned around", link="ref", scope="batch",
      needs=("kl", "ref_logprobs", "trainer_logprobs"),
      source="trl#2854, grail#42, marin#1708; Schulman 2020")  # fmt: skip
def estimator(batch: StepBatch) -> Finding | None:
    """Recomputes k1, k2, k3, k3 with verl's clamps, and |log r| from policy and reference, and with the two swapped.
    Each may be weighed with the ratio to the policy that sampled. The recorded KL that agrees only with the swapped
    order is an error, and so is another estimator than the stated one, where the KL loss is made of it; one that agrees
    with none a warning where one is stated, else worth knowing. Zeros where nothing is penalised are fine. Skipped
    where log-probabilities are stored in 16 bits and none agrees.
    """
    recorded, ref = given(batch.columns.of("kl")), given(batch.columns.of("ref_logprobs"))
    policies = [column for column in (batch.columns.of("policy_logprobs"), batch.columns.of("old_logprobs")) if column]
    place = batch.laid.where("kl", sample=0)
    best: tuple[str, bool] | None = None
    compared = 0
    for policy in policies:
        both_N = batch.pair(policy, ref) & recorded.said_N & np.isfinite(recorded.values_N)
        compared = max(compared, int(both_N.sum()))
        if both_N.sum() < FEWEST or not np.abs(policy.values_N[both_N] - ref.values_N[both_N]).max() > 1e-4:
            continue
        if not np.abs(recorded.values_N[both_N]).max() > 0:
            raise Skip("the recorded KL is 0 everywhere: no penalty was computed")
        weights = [
            np.exp(np.clip(policy.values_N - other.values_N, -20, 20))[both_N]
            for other in map(batch.columns.of, ("old_logprobs", "rollout_logprobs"))
            if other is not None and other is not policy and other.said_N[both_N].all()
        ]
        # Numbers in float32 may have been computed in less.
        stored = "bfloat16" if is_rounded(recorded.values_N[both_N]) else recorded.dtype
        close = _CLOSE.get(stored, 1e-3)
        found = named_estimator(recorded.values_N[both_N], policy.values_N[both_N], ref.values_N[both_N], *weights,
                                close=close)  # fmt: skip
        if found is not None and not found[1]:
            return _not_the_stated(batch, recorded, policy, both_N, found[0], ref, weights, close)
        best = best or found
        lowest = float(recorded.values_N[both_N].min())
        if found is None:
            best = best or ("", False)
    if best is None:
        raise Skip("policy and reference are equal, or share too few tokens: every estimator is 0")
    if not best[0] and any(map(_is_coarse, (*policies, ref))):
        raise Skip("log-probabilities are stored in 16 bits, and the KL was made of others")
    if best[1]:
        return error(
            f"the recorded KL is {best[0]} with policy and reference swapped",
            place,
            shown("tokens that agree", compared, None, recorded.source),
            cause="the arguments of the estimator are in the wrong order: its sign, or its weighting, is turned around",
        )
    return finding(
        # Another estimator is wrong where one of these is stated, and may be meant where none is.
        "warning" if batch.laid.algorithm.loss_kl_estimator else "info",
        "the recorded KL is not k1, k2, k3 (clamped or not) or |log ratio| of policy and reference",
        place,
        shown("smallest recorded KL", lowest, "k2 and k3 are never negative", recorded.source),
        shown("tokens compared", compared),
        cause="it is computed from other log-probabilities than those recorded, or another estimator",
    )


def _is_coarse(column: Column) -> bool:
    return column.dtype in _CLOSE or is_rounded(column.values_N[column.said_N & np.isfinite(column.values_N)])


def _not_the_stated(
    batch: StepBatch,
    recorded: Column,
    policy: Column,
    both_N: Array,
    name: str,
    ref: Column,
    ratios: list[Array],
    close: float,
) -> Finding | None:
    """A recorded KL that an estimator makes, where the run states another and that one does not make it."""
    stated = batch.laid.algorithm.loss_kl_estimator
    # Some record one to look at, and hold the policy by another: what the loss holds is what counts.
    logged = logged_of(batch, "kl_loss", fewest=1)
    told_N = np.where(recorded.said_N, np.nan_to_num(recorded.values_N), 0.0)
    if logged is None or logged.factor(told_N, plain=True) is None:
        return None
    if not stated or any(name.startswith(form) for word, form, _ in _FORMS if word == stated):
        return None
    for estimate in (each for word, _, each in _FORMS if word == stated):
        expected = estimate(policy.values_N[both_N], ref.values_N[both_N])
        for times in (1.0, *ratios):
            off_N = np.abs(recorded.values_N[both_N] - times * expected)
            # As long as the policy is near its reference k2 and k3 are one.
            if (off_N > 1e-5 + close * np.abs(expected)).sum() < FEWEST:
                return None
    return error(
        f"the recorded KL is {name}, and the run states {stated}",
        batch.laid.where("kl", sample=0),
        shown("tokens that agree", int(both_N.sum()), None, recorded.source),
        shown("estimator that is stated", stated),
        cause="the estimator that is configured does not reach the KL: another one, or a default, stands in its place",
    )


_TOLD_KL = regex(r"negative: (-\d+(?:\.\d+)?)")
#: By what bf16 may be off at 1, and how many times that below 0 the KL comes above it where rounding is all there is.
BF16, ABOVE = 2.0**-8, 20.0


#: A KL per token that tells of no policy: what e^x - 1 - x of nearly equal log-probabilities is off by.
NOTHING = 1e-5


def _is_rounded(values: list[float]) -> bool:
    """Whether a KL is below 0 in less than half of the steps, and by less than bf16 rounds and a twentieth of what it
    comes to above; or never comes to anything on either side, in as many steps as a wrong formula grows in.
    """
    negative = [value for value in values if value < 0]
    if len(values) >= trends.MIN_STEPS and max(map(abs, values)) < NOTHING:
        return True
    return 2 * len(negative) < len(values) and -min(values) < min(BF16, max(values) / ABOVE)


#: AReaL's is the difference of new and old log-probabilities: its mean over old samples is below 0, as it should be.
_SIGNED = regex(r"^ppo_actor/(?:update/)?approx_kl\b")


#: Nats of a whole response: what the plain estimator may come to by chance, and TRL itself keeps silent of by now.
SLIGHT = -1.0


@rule("D29", "a KL that cannot be negative is", link="ref", scope="signals",
      needs=("kl|policy_kl|rollout_k3|rollout_k1|event:negative_kl",),
      source="trl#2854; Schulman, Approximating KL Divergence; marin#1708")  # fmt: skip
def kl_sign(log: RunLog) -> Iterator[Finding]:
    """k3 = r - 1 - log r is never negative: under -1e-6 its arguments, its dtype or its formula are wrong. Worth
    knowing alone where it is in less than half of the steps, and by less than bf16 rounds and a twentieth of its most,
    or where it never comes to 1e-5 on either side in 8 steps and more.

    As a term of the loss (kl_loss, NeMo-RL's kl_penalty) a KL that is below -1e-3 in any step is k1: a warning, its
    gradient is 0 on average (info where the run states k1). k1 = -log r is negative for half the tokens, and its mean
    may be in any one step. Over 20 steps, 90 % of them negative with a mean under -1e-3, its arguments are swapped, or
    the samples are not the policy's own. Where the framework can log either estimator under one name, it is judged as
    k1. AReaL's approx_kl has the other sign, and is not judged. A trainer's own warning (TRL's PPO) is one from -1 on;
    above, worth knowing.
    """
    told = log.events("negative_kl")
    if told:
        lowest = min(float(found[1]) for one in told if (found := _TOLD_KL.search(one.text)))
        slight = lowest > SLIGHT
        yield finding(
            "info" if slight else "warning",
            f"the KL to the reference is {'slightly ' if slight else ''}negative, down to {lowest:g}: the trainer says "
            f"so in {len(told)} line{'s' * (len(told) > 1)}"
            + (", which an estimate over few samples may be while the policy is its reference" if slight else ""),
            told[0].point.where(),
            shown("what it says", told[0].text[:160], None, f"line {told[0].point.line}"),
            cause=(
                "the plain estimator k1 is below 0 for half of the tokens, and over few samples in its mean; where it "
                "goes on falling, "
                if slight
                else ""
            )
            + "what is sampled is not what the policy's probabilities say: other generation settings (top-k, "
            "top-p, a minimum length, padding or end tokens), or rows that are masked wrongly; the plain estimator k1 "
            "is then negative, and rewards leaving the reference",
            next_step="sample with temperature 1, top_k 0, top_p 1; rldbg record -- YOUR COMMAND, then rldbg diagnose "
            "rldbg-dump",
            steps=[one.point.step for one in told],
        )
        return
    for series in (series for signal in ("kl", "policy_kl", "rollout_k3", "rollout_k1") for series in log.all(signal)):
        values = series.finite
        bad = [point for point in series.points if point.value < K3_FLOOR]
        negative = [value for value in values if value < 0]
        # What the run states is of its KL loss, and of what is logged under that name.
        stated = log.algorithm.loss_kl_estimator if "loss" in series.name and series.signal == "kl" else ""
        one = "k3" if series.formula == "k3" else stated if stated in ("k2", "k3") else ""
        if one and bad and _is_rounded(values):
            yield info(
                f"{series.name} is below 0 by what rounding makes of it: down to {min(values):.2g}, and up to "
                f"{max(values):.2g}",
                bad[0].where(series.name),
                series.shown(min(values), f"> {-BF16:.2g}"),
                cause=f"{one} is never below 0, but e^x - 1 - x of log-probabilities in bf16 is off by up to "
                f"{BF16:.1g}",
                next_step="compute the KL in float32; look at it again where it comes to more than that",
                steps=series.steps(under=K3_FLOOR),
            )
        elif one and bad and stated == "" and sum(values) > 0 and max(map(abs, values)) < _OF_BOTH_SIGNS:
            yield info(
                f"{series.name} is of both signs, from {min(values):.2g} to {max(values):.2g}: the plain difference "
                f"(k1), if it is RLOO's or a penalty's; {one}, GRPO's, is never below 0",
                bad[0].where(series.name),
                series.shown_at(bad[0], f">= 0 of {one}"),
                cause="TRL's GRPO and RLOO log one name for two estimators, and nothing here says whose this is",
                next_step="rldbg record -- YOUR COMMAND, then "
                "rldbg diagnose rldbg-dump --rule D29 recomputes every estimator",
                steps=series.steps(under=K3_FLOOR),
            )
        elif one and bad:
            yield error(
                f"{series.name} is negative, which its estimator {one} cannot be",
                bad[0].where(series.name),
                series.shown_at(bad[0], ">= 0"),
                cause="the plain difference (k1) is taken, the estimator's arguments come from two places (swapped, or "
                "masked differently), or it is computed in a dtype too narrow for e^x - 1",
                next_step="rldbg record -- YOUR COMMAND, then "
                "rldbg diagnose rldbg-dump --rule D29 recomputes every estimator",
                steps=series.steps(under=K3_FLOOR),
            )
        elif _of_a_loss(series) and negative and min(values) < K1_MEAN:
            yield finding(
                # Stated, it is what was asked for; it is as true then.
                "info" if log.algorithm.loss_kl_estimator == "k1" else "warning",
                f"the KL of the loss is the estimator k1 (the plain log ratio): {series.name} is negative in "
                f"{len(negative)} of {len(values)} steps",
                series.between(under=0),
                series.shown(min(values), ">= 0 of k2 and k3"),
                cause="k1 is an estimate of the KL's value, and its gradient as a term of the loss is 0 on average: "
                "the policy is not held to its reference",
                next_step="k3 (low_var_kl) or k2 in the loss, or k1 in the rewards",
            )
        elif (
            series.formula in ("k1", "")
            and not _SIGNED.search(series.name)
            and len(values) >= K1_STEPS
            and len(negative) >= K1_SHARE * len(values)
            and mean(values) < K1_MEAN
        ):
            yield warning(
                f"{series.name} is negative in {len(negative)} of {len(values)} steps",
                series.between(under=0),
                series.shown(mean(values), "a mean near or over 0"),
                cause="the arguments of k1 are swapped, or the tokens were not sampled from the policy that is "
                "measured",
                next_step="rldbg record -- YOUR COMMAND, then rldbg diagnose rldbg-dump --rule D29",
            )


#: Names of a KL that is a term of the loss, not a figure beside it.
_TERMS = regex(r"kl_loss|loss[/_]kl|^train/kl_penalty$")


def _of_a_loss(series: Series) -> bool:
    return series.signal == "kl" and series.formula in ("", "k1") and _TERMS.search(series.name) is not None


#: What is left of a reward where the policy is lost.
LOST = 0.85


def _is_lost(log: RunLog, step: int | None) -> bool:
    """Whether the reward, over 0 at first, stays below .85 of that in all steps from one on, 4 and more."""
    reward = log.get("reward")
    points = [] if reward is None or step is None else reward.points
    after = [point.value for point in points if step is not None and point.step is not None and point.step >= step]
    return len(after) >= 4 and 0 <= max(after) < LOST * points[0].value


#: Of a reward, what a rise is that does not count.
LITTLE = 0.15
#: A KL per token of that much is another policy; and how many times its beginning it has to be.
FAR, LEAPT = 1.0, 20.0


#: Steps of a run whose last two are few.
MANY = 16
#: A KL per token that no policy near its reference comes to, and steps over it.
PEAK, PEAKS = 10.0, 3


def _learns(log: RunLog) -> bool:
    """Whether the reward has risen by .3 of all it spans; a little more reward is no return for another policy."""
    reward = log.get("reward")
    told = reward.finite if reward is not None else []
    learns = len(told) >= 8 and median(told[-3:]) > median(told[:3]) + 0.3 * (max(told) - min(told))
    return learns and median(told[-3:]) - median(told[:3]) > LITTLE * abs(median(told[:3]))


#: Values of a coefficient that make it one that is steered.
STEERED = 4


def _is_steered(log: RunLog) -> bool:
    """Whether a coefficient is steered to a target, which is of a response (Ziegler et al.: 6 nats), not of a token."""
    weight = log.get("kl_coefficient")
    return weight is not None and len(set(weight.finite)) >= STEERED


#: How far a penalty may lie from a line of the KL, as a share of it, and how much better that line has to fit than one
#: of KL times length, in the median step.
_ON_A_LINE, _BETTER = 0.02, 3.0


def _is_summed(log: RunLog, series: Series) -> bool:
    """Whether the KL is one of whole responses by what it takes from the reward: of two rewards that are logged, with
    and without the penalty, the difference is one coefficient times the KL as logged in all steps, whatever the length
    of the responses. Of a KL per token it would be a coefficient times KL and length.
    """
    length = log.get("response_length")
    if length is None:
        return False
    kl_of = {p.step: p.value for p in series.points if math.isfinite(p.value)}
    tokens = {p.step: p.value for p in length.points if math.isfinite(p.value) and p.value > 0}
    rewards = log.all("reward")
    for before, after in ((a, b) for a in rewards for b in rewards if a is not b):
        paid = {p.step: p.value for p in after.points}
        taken = {p.step: p.value - paid[p.step] for p in before.points if p.step in paid}
        steps = [step for step in taken if step in tokens and abs(kl_of.get(step, 0.0)) > 0]
        if len(steps) < trends.MIN_STEPS:
            continue
        whole = _off_a_line([(kl_of[step], taken[step]) for step in steps])
        each = _off_a_line([(kl_of[step] * tokens[step], taken[step]) for step in steps])
        if whole is not None and each is not None and whole < _ON_A_LINE and each > _BETTER * max(whole, 1e-6):
            return True
    return False


def _off_a_line(pairs: list[tuple[float, float]]) -> float | None:
    """How far y lies from a multiple of x in the median pair, as a share of it; None where none is above 0."""
    factor = median(y / x for x, y in pairs)
    return median(abs(y / x - factor) for x, y in pairs) / factor if factor > 1e-9 else None


def _per_token(log: RunLog, series: Series) -> Series:
    """The KL of whole responses by their mean length, step by step."""
    length = given(log.get("response_length"))
    tokens = {p.step: p.value for p in length.points if math.isfinite(p.value) and p.value > 0}
    points = tuple(replace(p, value=p.value / tokens[p.step]) for p in series.points if p.step in tokens)
    return replace(series, name=f"{series.name} / {length.name}", points=points)


@rule("L10", "the KL to the reference explodes", link="trend", scope="signals", needs=("kl",),
      explains=("D01", "D03", "D14", "D20", "D24", "D25", "D26", "L08", "L09"),
      source="rldbg; TRL and verl runs that learn stay below 0.3 per token")  # fmt: skip
def kl_explodes(log: RunLog) -> Finding | None:
    """KL per token (median of the last 3 steps) over 1 and over 20 times the least of its first 4 steps, in 8 steps and
    more: a warning, info while the reward rises with it (by .15 of its first and more), over 3 an error (a warning).
    Peaks of over 10 in 3 steps and more, or over 100 in one, and ten times the median, are a warning wherever it ends,
    an error where it is over 3 then and the reward has not risen. From below .2 to over 1 in one step, and staying
    there: an error, in 4 steps and more (a warning where fewer than 4 of 16 and more are left and the
    reward stays); and so in two, where the reward stays below .85 of its first as well. It rises
    in every run that learns; a run without a KL term may reach 0.5. A KL whose coefficient is steered is one of whole
    responses, with a target of several nats: no error, and worth knowing where the reward rises. A KL that takes from
    the reward a coefficient times itself, whatever the length, is summed over responses, and is taken by their length.
    """
    series = given(log.get("kl"))
    series = _per_token(log, series) if _is_summed(log, series) else series
    finite = [point for point in series.points if math.isfinite(point.value)]
    values = [abs(point.value) for point in finite]
    skip_if(len(finite) < 4, "needs the KL of 4 steps")
    skip_if(is_outweighed(log), "the loss is the entropy bonus, which takes the policy away: D25 tells of it")
    least = trends.from_here(values, min)
    leapt = next((at for at in range(1, len(values)) if values[at - 1] < 0.2 and least[at] > FAR), None)
    soon = next((at for at in range(1, len(values) - 2) if values[at - 1] < 0.2 and least[at + 1] > FAR), None)
    if leapt is None and soon is not None and _is_lost(log, finite[soon].step):
        leapt = soon + 1
    if leapt is not None and len(values) - leapt >= 2:
        only = values[leapt - 1] < 0.2
        # Two steps at the end of a run whose reward they do not take tell less than four.
        soon_to_tell = len(values) - leapt < 4 and len(values) >= MANY and not _is_lost(log, finite[leapt].step)
        return finding(
            "warning" if soon_to_tell else "error",
            f"the policy diverges: KL to the reference leaps from {values[leapt - 1 if only else leapt - 2]:.3g} to "
            f"{values[leapt]:.3g} per token in {'one step' if only else 'two steps, and the reward is lost'}",
            finite[leapt].where(series.name),
            series.shown_at(finite[leapt], f"< {FAR:g}"),
            shown("first step above it", finite[leapt].step),
            cause="one step's updates take the policy away: the learning rate is far too high, or one batch's "
            "advantages are far off"
            + ("" if log.has("logprob_diff") else "; or what it is held against is wrong: an engine that samples with "
               "old weights, a loss that is not clipped"),
            next_step="look at grad_norm, entropy and advantages of that step; lower the learning rate ten times",
            steps=[p.step for p in finite[leapt:]],
        )  # fmt: skip
    skip_if(len(finite) < 8, "needs the KL of 8 steps")
    skip_if(sorted(point.value for point in finite[-3:])[1] < 0, "the KL is negative: D29 says what that means")
    skip_if(series.name == "objective/kl", "it is summed over each response (TRL's PPO), and grows with its length")
    begun, now = min(values[:4]), sorted(values[-3:])[1]
    peaks = [point for point in finite if abs(point.value) > PEAK]
    if (
        peaks
        and (len(peaks) >= PEAKS or max(values) > PEAK**2)
        and max(values) > max(LEAPT * begun, PEAK * median(values))
    ):
        top = max(peaks, key=lambda point: abs(point.value))
        return finding(
            "error" if now > 3 * FAR and not _learns(log) else "warning",
            f"KL to the reference explodes: {series.name} comes to {abs(top.value):.3g} per token at step {top.step}, "
            f"and "
            f"is over {PEAK:g} in {len(peaks)} of {len(finite)} steps ({begun:.2g} at first)",
            peaks[0].where(series.name),
            series.shown_at(top, f"< {FAR:g}"),
            cause="tokens that the reference gives next to nothing are written by now: the policy was taken there by "
            "single updates (a learning rate too high, no clipping, a KL coefficient too low) or by what is paid for "
            "(a part of the reward that outweighs the answers, advantages or a loss that are made wrongly); the KL "
            "alone does not tell which. A reward that rises meanwhile does not make it the same model",
            next_step="look at grad_norm of the step before each peak, and at what the reward's parts pay; read ten "
            "responses of such a step",
            steps=[p.step for p in peaks],
        )
    if now > FAR and now > LEAPT * begun:
        learns, steered = _learns(log), _is_steered(log)
        mark = next(point for point in finite if abs(point.value) > FAR)
        return finding(
            "info"
            if learns and steered
            else ("warning" if learns else "error")
            if now > 3 * FAR and not steered
            else "info"
            if learns
            else "warning",
            f"KL to the reference {'grows with the reward' if learns else 'explodes'}: {series.name} goes from "
            f"{begun:.3g} to {now:.3g}{'' if steered else ' per token'}",
            mark.where(series.name),
            series.shown(now, f"< {FAR:g}"),
            shown("first step above it", mark.step),
            cause="the policy has left the reference: the learning rate is too high, the KL coefficient too low, or "
            "gradients are not clipped"
            if learns
            else "the policy has left the reference, and the reward does not rise with it: updates that are made "
            "wrongly (tokens or turns that the mask leaves out or takes in, advantages of other samples, a sign of "
            "advantages, loss or KL), a weight decay that shrinks the weights, a learning rate that is too high, a KL "
            "coefficient that is too low: the KL alone does not tell which",
            next_step="look at grad_norm and clip fraction of the step where it leaves"
            + (
                "; lower the learning rate"
                if learns
                else "; rldbg record -- YOUR COMMAND, then rldbg diagnose rldbg-dump"
            ),
            steps=[p.step for p in finite if p.step is not None and abs(p.value) > FAR],
        )
    return None
