"""Rollout against trainer, told apart by what tells them apart: shift, temperature, top-p, stale weights, packing.

The size of the mismatch names no cause: a stale engine and a leaking pack show the same mean |d|.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from replay_core.diagnose import trends
from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.case import Case
from replay_core.diagnose.finding import Evidence, Finding, Where
from replay_core.diagnose.flat import Array
from replay_core.diagnose.gap import (
    BADLY,
    DISAGREE,
    FEWEST,
    LIMITS,
    USUAL,
    Gap,
    Limit,
    gap,
    is_of_padding,
    twins_of,
    unsampled,
)
from replay_core.diagnose.kinship import whose
from replay_core.diagnose.log_steps import steps_of
from replay_core.diagnose.merging import merged, weighed
from replay_core.diagnose.misplaced import Misplaced
from replay_core.diagnose.padded import Growth
from replay_core.diagnose.parting import AGREES, ENOUGH, comes_to_rest, parting
from replay_core.diagnose.passes import before_any_update_N
from replay_core.diagnose.rule import Skip, given, rule
from replay_core.diagnose.rules.staleness import versions
from replay_core.diagnose.signals import RunLog, Series
from replay_core.diagnose.softmax import stated_temperature
from replay_core.diagnose.stating import finding, listed, share, shown

_BOTH = ("rollout_logprobs", "trainer_logprobs", "mask|response")
_TOLD_APART = "rldbg record -- YOUR COMMAND, then rldbg diagnose rldbg-dump tells them apart (D08, D10, D11, D12, D16)"
#: Nats per token of a policy that hardly samples.
SURE = 0.05
#: Of two tokens that have nothing to do with each other, log-probabilities are apart by that much, nats.
OTHER_TOKENS = 1.0
#: The mismatch beside what it was before: weights were not delivered. docs/evidence.md#log-probabilities
JUMP = 5.0
#: What it has to have come to before old weights are the reason: a policy that gets sharper doubles rounding, too.
HEARD = {"logprob_diff": 0.005, "rollout_k3": 5e-5, "prob_diff": 1e-3, "rollout_k1": 0.02}


def _figures(between: Gap) -> list[Evidence]:
    source = f"{between.trainer.source} - {between.rollout.source}"
    return [
        shown("mean |trainer - rollout|", between.mean, "< 0.03 nats", source),
        shown("tokens compared", int(between.both_N.sum())),
    ]


def _worst(between: Gap) -> int:
    """The flat token with the largest difference."""
    tokens = np.flatnonzero(between.both_N)
    return int(tokens[np.abs(between.d).argmax()])


@rule("D08", "log-probabilities are shifted by one token", link="rollout_logprobs", scope="batch", needs=_BOTH,
      explains=("L10", "D09", "D12", "D14", "D15", "D24", "D29", "D35"), lasts=True,
      source="verl#3562, OpenRLHF#973; measured: lag 0 r 0.03, lag 1 r 1.000")  # fmt: skip
def shifted(batch: StepBatch) -> Iterator[Finding]:
    """Correlation of trainer and rollout at lags -1, 0, 1. An error where the best is not lag 0, is above 0.9 and above
    every other by 0.3: then one of the two is about the token before or after.
    """
    between = gap(batch)
    if not between.is_shifted:
        return
    lag = between.lag
    place = batch.laid.where("rollout_logprobs", sample=0)
    lags = [
        shown(f"correlation at lag {at:+d}", value, "the largest" if at == 0 else None)
        for at, value in lag.correlations.items()
    ]
    yield finding(
        "error",
        f"rollout log-probabilities are shifted by {lag.lag:+d} token against the trainer's",
        place,
        evidence=[*lags, *_figures(between)],
        cause="one side is about the token at its index, the other about the next: a roll or a slice is off by one",
    )


@rule("D10", "rollout and trainer use another temperature", link="rollout_logprobs", scope="case",
      explains=("L10", "D09", "D11", "D12", "D14", "D15", "D24", "D25"), lasts=True,
      source="trl#3029 #4159, OpenRLHF#853, NeMo-RL#935, miles#1345; measured: slope 1.63 at T = 0.6")  # fmt: skip
def tempered(case: Case) -> Iterator[Finding]:
    """Least squares slope of rollout on trainer log-probabilities, through their means: 1 / T of a rollout at T
    beside a trainer that does not divide its logits; where that does not fit, the temperature that makes
    p^(1/T) / (p^(1/T) + (1 - p)^(1/T)) of the trainer's p. An error where T is off 1 by 0.1 at a correlation above 0.9
    and takes away at least 40 % of the difference.

    Tokens that samples drew after the very same tokens (6 and more beyond each place's first) tell it best: within a
    place the slope is 1 / T whatever else could have been drawn, and 1 if top-p or top-k were renormalised. A slope
    that is 1 there is no temperature, and neither is a rollout that gives unsure tokens more and none less, all by
    about one number.

    Another mistake is told first: log p / T, divided after the softmax, is one factor of the trainer's log p through
    the origin (5 % of the difference left, 16 tokens and more); beside a trainer at the temperature that the dump
    states, the two differ by -log sum p^(1/T), within what one other token or all of a vocabulary would leave.

    A temperature is a setting: silent where the first step of the run has none of it (.01 nats and less). A policy that
    gets sharper with its updates looks as if its older samples were drawn at a higher one.
    """
    found: list[Finding] = []
    means: list[float] = []
    whys: list[str] = []
    for batch in case.batches():
        try:
            between = _gap(batch)
        except Skip as skip:
            whys.append(str(skip))
            continue
        if not means and batch.step in (0, 1) and between.mean <= AGREES and len(case.steps()) > 1:
            return
        means.append(between.mean)
        found += [replace(one, steps=() if batch.step is None else (batch.step,)) for one in _tempered(batch, between)]
    if not means:
        raise Skip(max(whys, key=whys.count, default="the dump holds no batch of samples"))
    yield from (weighed(one, len(means), varies=False) for one in merged(found))


def _gap(batch: StepBatch) -> Gap:
    """The gap of a batch.

    Raises:
        Skip: rollout or trainer is not recorded, or they cannot be compared.
    """
    missing = [need for need in _BOTH if not any(batch.has(name) for name in need.split("|"))]
    if missing:
        raise Skip("needs " + ", ".join(missing).replace("|", " or "))
    return gap(batch)


def _tempered(batch: StepBatch, between: Gap) -> Iterator[Finding]:
    place = batch.laid.where("rollout_logprobs", at=_worst(between))
    if between.after_softmax is not None:
        yield _after_softmax(between, between.after_softmax, place)
        return
    if not between.is_tempered:
        return
    stated, gain = stated_temperature(batch), given(between.gain)
    yield finding(
        "error",
        f"rollout and trainer are at different temperatures: {gain:.2f} explains their difference",
        place,
        evidence=[
            shown("temperature that explains it", gain, "0.9 to 1.1"),
            shown("slope of rollout on trainer", between.slope),
            *(
                [
                    shown("slope over tokens drawn in one place", between.contexts.slope, "0.9 to 1.1"),
                    shown("tokens drawn in one place", between.contexts.tokens),
                ]
                if between.contexts.temperature is not None
                else []
            ),
            shown("correlation", between.correlation),
            *([] if stated is None else [shown("temperature the dump states", stated)]),
            *_figures(between),
        ],
        cause=f"the rollout was sampled at about T = {gain:.2f} and the trainer's logits are not divided by it"
        if gain < 1
        else f"the trainer divides its logits by about T = {1 / gain:.2f} and the engine returns raw "
        f"log-probabilities; or the rollout was sampled at T = {gain:.2f}",
        next_step=batch.laid.mismatch_command(),
    )


def _after_softmax(between: Gap, temperature: float, place: Where) -> Finding:
    return finding(
        "error",
        f"rollout log-probabilities were divided by a temperature ({temperature:.2f}) after the softmax: they are no "
        "log-probabilities",
        place,
        evidence=[
            shown("temperature that explains it", temperature, "1"),
            shown("slope of rollout on trainer", between.slope),
            shown("mean rollout log-probability", float(between.rollout.values_N[between.both_N].mean())),
            shown("mean trainer log-probability", float(between.trainer.values_N[between.both_N].mean())),
            *_figures(between),
        ],
        cause="log_softmax(logits) / T in place of log_softmax(logits / T): raw log-probabilities of the engine are "
        "scaled by the sampling temperature afterwards. Divide the logits, or let the engine return processed "
        "log-probabilities",
        next_step=between.batch.laid.mismatch_command(),
    )


@rule("D11", "rollout log-probabilities are renormalised over top-p or top-k", link="rollout_logprobs", scope="batch",
      needs=_BOTH,
      explains=("L10", "D09", "D12", "D14", "D20", "D24", "D26"), lasts=True,
      source="verl#6240, trl#6789, ms-swift#8442, vllm#42259")  # fmt: skip
def renormalised(batch: StepBatch) -> Iterator[Finding]:
    """The rollout gives more to over 90 % of its own tokens, by 0.005 nats and more on average, with no change of
    slope: what is left of the distribution after top-p or top-k was normalised again. An error.
    """
    between = gap(batch)
    if not between.is_truncated:
        return
    place = batch.laid.where("rollout_logprobs", at=_worst(between))
    kept = float(np.exp(between.d.mean()))
    endless = _never_ends(batch, between)
    yield finding(
        "error",
        (
            "no response ends: all are cut off at the length limit, and the engine gives their tokens more than the "
            "trainer: it may not write the end token (EOS), and what is left is renormalised"
            if endless
            else "rollout log-probabilities are renormalised over top-p or top-k: "
            f"{between.one_sided:.0%} of the tokens have more of it than the trainer gives them"
        ),
        place,
        evidence=[
            shown("share of tokens with rollout > trainer", between.one_sided, "about 0.5"),
            shown("mean rollout - trainer", -float(between.d.mean()), "0"),
            shown("probability kept, geometric mean", kept),
            shown("probability kept, least (1 % of the tokens)", float(np.exp(np.quantile(between.d, 0.01)))),
            shown("slope of rollout on trainer", between.slope, "0.9 to 1.1"),
            *_figures(between),
        ],
        cause="ignore_eos, a min_tokens as large as the limit, or a logit bias bans the end token in the engine: its "
        "log-probabilities are of what is left, the trainer's of the whole"
        if endless
        else "the engine returns log-probabilities of what is left of the distribution, the trainer of the whole: "
        "top-p, top-k or min-p, or tokens that it may not write: an end before min_tokens, a grammar, banned words",
        next_step=batch.laid.mismatch_command() + "   # then set logprobs_mode=raw, or top_p=1 and top_k=-1",
    )


def _never_ends(batch: StepBatch, between: Gap) -> bool:
    """Whether all responses have one length, the limit, where the trainer would end them: at some places it gives the
    token that was written less than half of what the engine does. (What top-p keeps is most of a distribution.)
    """
    counts_B = batch.flat.count(between.both_N)
    cut_B = batch.truncated_flag_B
    if len(counts_B) < 4 or counts_B.min() < 4 or counts_B.min() != counts_B.max():
        return False
    kept = np.exp(between.d)
    ends = float((kept < 0.5).mean())
    return (cut_B is None or bool(cut_B.all())) and ends > 0.02


@dataclass(frozen=True, slots=True)
class _StepGap:
    """What one step tells of the engine's weights."""

    step: int | None
    mean: float
    from_reference: float | None
    is_stale: bool
    version: float | None
    place: Where
    command: str
    by_sample_B: Array
    prompt_B: Array | None


def _step_gaps(case: Case) -> Iterator[_StepGap]:
    """Steps whose mismatch has no cause that shows in one step, and does not stand beside importance weights."""
    for batch in case.batches():
        if not (batch.has("rollout_logprobs") and batch.has("trainer_logprobs")) or batch.has("is_weights"):
            continue
        try:
            between = gap(batch)
        except Skip:
            continue
        if between.is_shifted or between.after_softmax is not None or between.is_tempered or between.is_truncated:
            continue
        if between.leak:
            continue
        place = batch.laid.where("rollout_logprobs", at=_worst(between))
        command = batch.laid.mismatch_command()
        known = versions(batch)
        version = None if known is None or np.isnan(known[1]).all() else float(np.nanmax(known[1]))
        yield _StepGap(
            batch.step, between.mean, between.from_reference, between.is_stale, version, place, command,
            between.by_sample_B, batch.prompt_B,
        )  # fmt: skip


@rule("D12", "the engine samples with old weights", link="rollout_logprobs", scope="case",
      explains=("L10", "D09", "D13", "D14", "D24", "D31"), lasts=True,
      source="trl#5312 (.015 -> .201), verl#7495; measured: 0.000 against 0.094")  # fmt: skip
def stale(case: Case) -> Iterator[Finding]:
    """Two signs, over all steps. mean |rollout - ref| below a fifth of mean |trainer - rollout| > 0.03, up to the last
    step: what was sampled agrees with the reference, the initial weights, and not with the policy. Or a mismatch of 5
    times the median of two steps and more before it, above 0.03, and not back below it later. Each is an error.

    Silent where importance weights are recorded, or weight versions advance: such a run is off-policy on purpose (D31).
    But versions are held against what was sampled: an error where they advance and the tokens are the initial weights',
    or where they stop for more than twice as long as ever before while the mismatch grows.

    A third sign, in 4 steps and more: the first step has none of it (.01 nats and less), and it grows with the updates
    to ten times that and .03, by a quarter from the earlier half to the later (Kendall's tau .4), in all rows or in a
    part of them whose others agree. Weights of one age do not grow: silent where the last third of 7 steps and more has
    no more than 1.15 times the middle third. An error beside versions, too, where they follow the steps, so that the
    engine says it is up to date; without any a warning in fewer than 12 steps, since an asynchronous run begins so.
    Where what was sampled agrees with the reference, too, a run that begins in the dump has to be as long.
    Silent where the first step of a run has as much of it: before any update old weights are the new ones, and it is
    the trainer's own forward that differs (D09).
    """
    every = list(_step_gaps(case))
    if not every:
        raise Skip("needs rollout and trainer log-probabilities, no importance weights, and no other cause")
    if (grown := _never_updated(every)) is not None:
        yield grown
        return
    known = [one.version for one in every if one.version is not None]
    if len(set(known)) > 1:
        yield from _against_versions(every)
        return
    parted = [one for one in every if one.mean > DISAGREE]
    bad = [one for one in parted if one.is_stale]
    first = every[0]
    begins = first.step is not None and first.step <= 1
    own = begins and first.mean > max(DISAGREE, 0.3 * float(np.median([one.mean for one in parted or every])))
    if bad and not own and bad[-1] is every[-1] and 2 * len(bad) >= len(parted):
        worst = max(bad, key=lambda one: one.mean)
        # The first samples of an asynchronous run are of the initial weights on purpose.
        starts = begins and len(every) < ENOUGH and not known and first.mean <= AGREES
        yield finding(
            "warning" if starts else "error",
            "the rollout was sampled by the initial weights, not by the policy that is trained",
            worst.place,
            evidence=[
                shown("mean |rollout - ref|", worst.from_reference, f">= {0.2 * worst.mean:.4g}"),
                shown("mean |trainer - rollout|", worst.mean, f"< {DISAGREE} nats"),
                shown("steps that show it", share(len(bad), len(every))),
            ],
            cause="weights are not synchronised into the engine (or a LoRA adapter is not delivered)",
            next_step=worst.command,
            steps=[one.step for one in bad if one.step is not None],
        )
        return
    for number in range(2, len(every)):
        before, now = float(np.median([one.mean for one in every[:number]])), every[number]
        floor = max(DISAGREE, JUMP * before)
        if now.step is not None and all(later.mean >= floor for later in every[number:]):
            yield finding(
                "error",
                f"the engine does not follow the trainer's weights from step {now.step} on: they part by "
                f"{now.mean:.3g} nats per token after {before:.3g}",
                now.place,
                evidence=[
                    shown(f"mean |d| at step {now.step}", now.mean, f"< {floor:.3g}"),
                    shown("median of the steps before", before),
                    shown("mean |d| at the last step", every[-1].mean),
                ],
                cause="from here on the engine samples with weights that are not updated, or not all of them: a sync "
                "that failed, a part of the layers, an adapter that is not delivered or is scaled otherwise",
                next_step=now.command,
                steps=[one.step for one in every[number:] if one.step is not None],
            )
            return


def _never_updated(every: list[_StepGap]) -> Finding | None:
    """The engine agrees with the weights that it was started with, and not with those that came after."""
    told = [(one.step, one.version) for one in every if one.step is not None and one.version is not None]
    ages = {step - version for step, version in told}
    # Versions that stay behind are said to; those that keep pace with the steps say that the engine is up to date.
    if told and (len(told) < len(every) or len({version for _, version in told}) > 1) and len(ages) > 1:
        return None
    found = parting([one.by_sample_B for one in every], every[-1].prompt_B)
    if found is None:
        return None
    up_to_date = len(told) == len(every) and len(ages) == 1
    later = [one for one in every[1:] if one.mean > DISAGREE]
    worst = max(later or every, key=lambda one: one.mean)
    sure = up_to_date or found.is_growing or bool(told)
    return finding(
        "error" if sure else "warning",
        "the engine's weights are not updated: it agrees with the trainer in the first step, and parts more and more "
        "with the updates"
        + (found.where if found.is_in_part else "")
        + (", although its weight version advances" if up_to_date else ""),
        worst.place,
        evidence=[
            shown("mean |trainer - rollout| in the first step", found.first, f"< {DISAGREE} nats"),
            shown("mean |trainer - rollout| later, where they part", found.last, "as in the first step"),
            shown("by step", ", ".join(f"{one.mean:.3g}" for one in every[:12])),
            *([shown("rows that part in the last step", share(*found.rows))] if found.is_in_part else []),
        ],
        cause="a part of the rows is sampled with old weights: a prefix cache (KV cache) of the engine that is not "
        "emptied after a weight update, or one replica (rank, adapter) of the engine that a weight sync never reaches"
        if found.is_in_part
        else "weights are never synchronised into the engine after its start (a sync that fails silently, a renamed "
        "parameter, an adapter that is not delivered): it samples with the initial weights. Of an asynchronous run: "
        "its samples get older with every step" + ("" if sure else ", until they are as old as it lets them be"),
        next_step=worst.command,
        steps=[one.step for one in later if one.step is not None],
    )


def _against_versions(every: list[_StepGap]) -> Iterator[Finding]:
    """Weight versions that advance: what they say is held against what was sampled, and they against the steps."""
    told = [one for one in every if one.version is not None]
    oldest = min(one.version for one in told if one.version is not None)
    later = [one for one in told if one.version is not None and one.version > oldest]
    bad = [one for one in later if one.is_stale]
    own = told[0].mean > max(DISAGREE, 0.3 * max(one.mean for one in told)) and told[0].version == oldest
    if bad and not own and bad[-1] is told[-1] and 2 * len(bad) >= len([one for one in later if one.mean > DISAGREE]):
        worst = max(bad, key=lambda one: one.mean)
        yield finding(
            "error",
            "the rollout was sampled by the initial weights, although its weight version advances",
            worst.place,
            evidence=[
                shown("mean |rollout - ref|", worst.from_reference, f">= {0.2 * worst.mean:.4g}"),
                shown("mean |trainer - rollout|", worst.mean, f"< {DISAGREE} nats"),
                shown("weight version it names", worst.version),
                shown("steps that show it", share(len(bad), len(later))),
            ],
            cause="weights arrive and are not used: a LoRA adapter that is not loaded, parameters renamed on the way",
            next_step=worst.command,
            steps=[one.step for one in bad if one.step is not None],
        )
        return
    plateaus: list[list[_StepGap]] = []
    for one in told:
        if plateaus and plateaus[-1][0].version == one.version:
            plateaus[-1].append(one)
        else:
            plateaus.append([one])
    last, longest = plateaus[-1], max((len(each) for each in plateaus[:-1]), default=0)
    grown = last[-1].mean > max(DISAGREE, JUMP * max(last[0].mean if len(plateaus) == 1 else 0.0, 1e-9))
    if longest and len(last) >= 3 and len(last) > 2 * longest and grown:
        yield finding(
            "error",
            f"the engine is no longer updated: its weight version stays {last[0].version:g} for {len(last)} steps",
            last[-1].place,
            evidence=[
                shown("steps with this version", len(last), f"<= {2 * longest}, as before"),
                shown("mean |trainer - rollout| at the last step", last[-1].mean, f"< {DISAGREE} nats"),
                shown("mean |trainer - rollout| before", float(np.median([o.mean for p in plateaus[:-1] for o in p]))),
            ],
            cause="weights are not synchronised into the engine any more: a sync that failed once and is not retried",
            next_step=last[-1].command,
            steps=[one.step for one in last if one.step is not None],
        )
        return
    raise Skip("weight versions advance: the engine gets new weights, however late")


@rule("D13", "engine and trainer drift apart without an update", link="rollout_logprobs", scope="signals",
      needs=("learning_rate", "logprob_diff|rollout_k3|prob_diff|rollout_k1"),
      source="open-instruct#1473, vime#64")  # fmt: skip
@rule("D12", "engine and trainer drift apart", link="rollout_logprobs", scope="signals",
      needs=("logprob_diff|rollout_k3|prob_diff|rollout_k1",), explains=("D29",),
      source="trl#5312 (0.015 to 0.201), verl#7495, open-instruct#1473, vime#64")  # fmt: skip
def drifting(log: RunLog) -> Iterator[Finding]:
    """D12, D13. The distance between engine and trainer grows over the steps (at least 8, p < 0.005).

    Fivefold over its beginning (median of the first 3), and .005 nats, 5e-5 of k3, .001 of
    probability or .02 of k1 and more, while the weights move is D12: the engine keeps old weights.
    An error where a figure of the mismatch is past D09's limit for one.
    A rise while the learning rate is 0 (of any size) is D13: nothing is trained, so the engine itself drifts.
    """
    series = next((s for name in HEARD if (s := log.get(name)) is not None), None)
    values = [] if series is None else series.finite
    if series is None or len(values) < trends.MIN_STEPS:
        raise Skip(f"needs the distance between engine and trainer at {trends.MIN_STEPS} steps or more")
    begun, now, z = trends.level(values[:3]), trends.level(values, 3), trends.drift(values)
    rate = log.get("learning_rate")
    still = rate is not None and rate.finite and not any(rate.finite)
    grown = now / begun if begun > 0 else math.inf
    if z <= trends.DRIFT_Z or (not still and (grown < JUMP or now < HEARD[series.signal])):
        return
    finite = [point for point in series.points if math.isfinite(point.value)]
    mark = next((p for p in finite if p.value >= begun * JUMP), finite[-1])
    far = any(limit.is_past(each, limit.error) for name, limit in LIMITS.items() for _, each in log.level(name))
    yield finding(
        "error" if far and not still else "warning",
        f"{series.name} grows from {begun:.3g} to {now:.3g}"
        + (
            " although the learning rate is 0"
            if still
            else ": the engine does not follow the trainer: it has old weights, or an adapter never reaches it"
        ),
        mark.where(series.name),
        id="D13" if still else "D12",
        evidence=[
            replace(series.shown(grown, f"< {JUMP:g}"), name="growth"),
            shown("Mann-Kendall z", z, f"< {trends.DRIFT_Z}"),
        ],
        cause="nothing is trained: the engine's caches or kernels drift, or weights change on the way to it"
        if still
        else "the engine samples with old weights: the sync does not reach it (LoRA not delivered, a renamed "
        "parameter)",
        next_step=_TOLD_APART
        if still
        else "rldbg record -- YOUR COMMAND, then rldbg replay rldbg-dump --model STEP_A --model STEP_B "
        "--against rollout_logprobs ranks which weights sampled the tokens",
        steps=steps_of(finite[-3:]),
    )


@rule("D16", "the trainer's packs leak", link="logprobs", scope="batch", needs=_BOTH,
      explains=("L10", "D09", "D12", "D13", "D14", "D15", "D24"), lasts=True,
      source="transformers masking_utils: packed position ids only count without mask and cache; "
      "functionary#132")  # fmt: skip
def leaking(batch: StepBatch) -> Iterator[Finding]:
    """mean |d| per sample: the first sample of every pack agrees (below a fifth of the others, at least 5 times
    apart), every later one does not. Packs are as recorded, else every k-th sample, else what filling rows up to
    one length gives. An error. Only the first sample of a pack sees no other's tokens: no other cause spares just
    those.
    """
    between = gap(batch)
    found = between.leak
    if found is None:
        return
    clean_B, how = found
    values_B = between.by_sample_B
    place = batch.laid.where(between.trainer.name, sample=int(np.flatnonzero(~clean_B & ~np.isnan(values_B))[0]))
    yield finding(
        "error",
        "the first sample of every pack agrees with the rollout, the ones after it do not: attention crosses samples",
        place,
        evidence=[
            shown("mean |d| of the first samples", float(np.nanmean(values_B[clean_B])), None, between.trainer.source),
            shown("mean |d| of the later samples", float(np.nanmean(values_B[~clean_B])), "the same"),
            shown("samples that agree", listed(np.flatnonzero(clean_B))),
            shown("packs", how),
            *_figures(between),
        ],
        cause="samples are packed without a block-diagonal mask: use_cache was on, a mask of ones "
        "was passed, or no position ids",
        next_step=batch.laid.replay_command(place, "--packing"),
    )


@rule("D41", "tokens count that no engine sampled", link="masks", scope="batch", needs=(*_BOTH, "mask"),
      explains=("L10", "D09", "D12", "D14", "D24"), lasts=True,
      source="rllm#272, verl multi-turn masks: tool output and prompts are given, not sampled")  # fmt: skip
def never_sampled(batch: StepBatch) -> Iterator[Finding]:
    """Tokens in the loss whose rollout log-probability is exactly 0 while the trainer's mean over them is below -1: the
    engine fills in 0 where it sampled nothing, in prompts and tool output. Two and more are an error. (Of top-p or a
    greedy engine, 0 is a token that was left alone; the trainer then finds it probable.)
    """
    rollout, trainer = given(batch.columns.of("rollout_logprobs")), given(batch.trainer)
    both_N = batch.pair(rollout, trainer)
    alien_N = unsampled(rollout, trainer, both_N)
    if not alien_N.any():
        return
    if whose(batch, rollout, trainer) is not None:
        raise Skip("rollout log-probabilities are another sample's (D79): what is 0 is where that one has ended")
    if gap(batch).is_shifted:
        raise Skip("log-probabilities are shifted (D08): what is filled in with 0 lies beside its place")
    at = int(np.flatnonzero(alien_N)[0])
    name = "loss_mask" if batch.columns.of("loss_mask") else "response_mask"
    holders = int((batch.flat.count(alien_N) > 0).sum())
    where, cause = _given(batch, alien_N, both_N)
    yield finding(
        "error",
        f"{int(alien_N.sum())} tokens are in the loss that no engine sampled{where}",
        batch.laid.where(name, at=at),
        evidence=[
            shown("share of counted tokens", float(alien_N.sum() / both_N.sum()), "< 0.001", rollout.source),
            shown("samples that hold them", share(holders, len(batch))),
            shown("mean trainer log-probability there", float(trainer.values_N[alien_N].mean()), None, trainer.source),
        ],
        cause=cause,
    )


def _given(batch: StepBatch, alien_N: Array, counted_N: Array) -> tuple[str, str]:
    """Where the tokens lie that were not sampled, as the rest of a claim, and who wrote them there."""
    holders = np.flatnonzero(batch.flat.count(alien_N))
    once = int(alien_N.sum()) == len(holders)
    at_N = np.flatnonzero(alien_N)
    ids = None if batch.tokens_N is None else np.unique(batch.tokens_N[at_N])
    last_B = np.full(len(batch), -1, dtype=np.int64)
    np.maximum.at(last_B, batch.flat.sample_N[counted_N], batch.flat.position_N[counted_N])
    ends = once and bool((batch.flat.position_N[at_N] == last_B[batch.flat.sample_N[at_N]]).all())
    if ends and ids is not None and len(ids) == 1:
        longest = int(batch.flat.count(counted_N).max())
        full = bool((batch.flat.count(counted_N)[holders] == longest).all())
        return (
            f": the last of {share(len(holders), len(batch))} responses, which is always {int(ids[0])}",
            f"an end token (EOS, {int(ids[0])}) is appended to responses that "
            + ("were cut off at the limit" if full else "did not end by themselves")
            + ", and trained on: the engine never sampled it there. Leave it out of the mask, or do not append it",
        )
    # Places from the end of what counts, sample by sample: a run of zeros that reaches it in each that holds one.
    left_N = last_B[batch.flat.sample_N[at_N]] - batch.flat.position_N[at_N]
    each = [np.sort(left_N[batch.flat.sample_N[at_N] == sample]) for sample in holders]
    ends_each = all(np.array_equal(one, np.arange(len(one))) for one in each)
    if ends_each and len(holders) >= 2:
        return (
            ": rollout log-probabilities are exactly 0 on the last tokens of "
            f"{share(len(holders), len(batch))} responses",
            "the engine's log-probabilities of the last tokens are missing and were filled with 0 (a list that is "
            "shorter than the response, padded with a placeholder; the last chunk of a stream that was not recorded); "
            "or tool output, or an end that was appended, is left in the loss mask: the engine was given these tokens",
        )
    first_B = batch.flat.first(counted_N)
    heads_N = alien_N & (batch.flat.position_N == np.repeat(first_B, batch.flat.lengths_B))
    runs = np.flatnonzero(alien_N & ~np.roll(alien_N, 1))
    if heads_N.sum() == len(holders) == len(runs) and len(holders) >= 0.8 * len(batch):
        return (
            ": the first of each response",
            "a part of the prompt, or what every answer is made to begin with (a forced <think>, a role's header), is "
            "in the loss mask: the engine was given these tokens",
        )
    return "", "tool output or a part of the prompt is left in the loss mask: the engine was given these tokens"


@rule("D77", "the mask is turned around", link="masks", scope="batch",
      needs=("rollout_logprobs", "mask", "response"), lasts=True,
      explains=("D07", "D09", "D10", "D11", "D12", "D14", "D19", "D20", "D24", "D28", "D41", "D48", "L08", "L10"),
      source="RAGEN#71: the gradient went to the environment's tokens and to none of the policy's")  # fmt: skip
def turned_around(batch: StepBatch) -> Iterator[Finding]:
    """All tokens in the loss (4 and more) have a rollout log-probability of exactly 0, which the engine fills in
    where it sampled nothing, and four times as many of the responses that are not in it have another: an error.
    """
    rollout, trained_N = given(batch.columns.of("rollout_logprobs")), given(batch.trained_N)
    known_N = rollout.said_N & np.isfinite(rollout.values_N)
    counted_N = known_N & trained_N
    left_N = known_N & ~trained_N & given(batch.response_N) & (rollout.values_N != 0)
    if counted_N.sum() < 4 or rollout.values_N[counted_N].any() or left_N.sum() < 4 * counted_N.sum():
        return
    name = "loss_mask" if batch.columns.of("loss_mask") else "response_mask"
    yield finding(
        "error",
        f"the mask is inverted: the {int(counted_N.sum())} tokens in the loss are those that no engine sampled, and "
        "none that it sampled counts",
        batch.laid.where(name, at=int(np.flatnonzero(counted_N)[0])),
        evidence=[
            shown("sampled tokens in the loss", 0, "> 0", rollout.source),
            shown("sampled tokens that are left out", int(left_N.sum()), "0"),
        ],
        cause="1 and 0 are swapped: the mask of the environment's turns (tool output, states) is used as the loss mask",
    )


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

    Where nothing else tells, over a run's prompts (12 and more, 3 widths of left padding): a mean |d| that grows with
    the padding, by ranks, as chance does in one of a hundred, to twice and more, is of positions or of the mask.

    Tokens whose neighbour one or two places off is the same one (8 and more that are not sure) tell logits or labels
    that are gathered so far off: nine of ten agree then with what the engine gives the neighbour's place, or with the
    engine at all, to .15 of the usual difference.

    Info, too, over the steps of a run whose first has none of it, and where it does not grow any more: it is what
    weights some updates old make, as every asynchronous run has it (half a nat at the most). More of it, where the
    first step has none, is a warning: whether they are as old on purpose is D12's.
    """
    found: list[Finding] = []
    means: list[float] = []
    whys: list[str] = []
    growth, misplaced = Growth(), Misplaced()
    for batch in case.batches():
        try:
            between = _gap(batch)
        except Skip as skip:
            whys.append(str(skip))
            continue
        means.append(between.mean)
        growth.take(batch, between)
        misplaced.take(batch, between)
        steps = () if batch.step is None else (batch.step,)
        found += [replace(one, steps=steps) for one in _disagreement(batch, between)]
    if not means:
        raise Skip(max(whys, key=whys.count, default="the dump holds no batch of samples"))
    every = [*merged(found)]
    loud = [one for one in found if one.severity != "info"]
    # What the first step of a run has none of is of the weights alone: those of an update or more before (D12).
    if len(means) >= 4 and means[0] <= min(AGREES, 0.1 * float(np.median(means[1:]))):
        every = [replace(one, severity="warning") if one.severity == "error" else one for one in every]
    if loud and (told := misplaced.told()) is not None:
        every = [_of_neighbours(one, *told) for one in every]
    elif _is_one_update(means, *_OF_AN_UPDATE["logprob_diff"]) and 2 * sum(": " in one.claim for one in loud) < len(
        loud
    ):
        every = [replace(one, severity="info", claim=one.claim + _LATE, cause=_LATE_CAUSE) for one in every]
    elif any(one.claim.endswith(_PER_TOKEN) for one in every) and growth.is_told:
        every = [_of_growth(one, growth) if one.claim.endswith(_PER_TOKEN) else one for one in every]
    yield from (weighed(one, len(means), varies=False) for one in every)


#: How a claim ends that knows no cause.
_PER_TOKEN = "nats per token"


def _of_neighbours(one: Finding, words: str, cause: str, figures: list[Evidence]) -> Finding:
    """The finding, with the cause that tokens tell whose neighbour is the same one."""
    claim = one.claim.partition(_PER_TOKEN)[0] + _PER_TOKEN
    return replace(one, claim=f"{claim}: {words}", evidence=(*one.evidence[:2], *figures, *one.evidence[2:]),
                   cause=cause)  # fmt: skip


def _of_growth(one: Finding, growth: Growth) -> Finding:
    """The finding, with the cause that padding tells."""
    means = growth.by_width
    told = ", ".join(f"{width}: {mean:.3g}" for width, mean in means.items())
    counted = growth.are_positions_counted
    return replace(
        one,
        claim=f"{one.claim}: more, the more left padding a sample has",
        evidence=(*one.evidence[:2], shown("mean |d| by left pads", told, "the same"),
                  *([shown("recorded positions begin at", "the width of the padding", "0")] if counted else []),
                  *one.evidence[2:]),
        cause="left padding is counted in the position ids of one side, or attended to: a sample's positions begin "
        "later, the more padding stands before it"
        + ("; the recorded position_ids do" if counted else ". Make them of the attention mask (cumsum - 1), and pass "
           "the mask to the forward"),
    )  # fmt: skip


def _disagreement(batch: StepBatch, between: Gap) -> Iterator[Finding]:
    multiplier, k3 = LIMITS["mult_prob_error"].warning, LIMITS["rollout_k3"].warning
    bad = between.mean > DISAGREE or between.multiplier > multiplier or between.k3 > k3
    named = between.is_shifted or between.after_softmax is not None or between.is_tempered or between.is_truncated
    if not bad or named or between.leak is not None:
        return
    short, cause, told = _cause(batch, between)
    mild = between.mean <= DISAGREE or _is_off_policy(batch) or _is_usual(between, short)
    place = batch.laid.where(between.trainer.name, at=_worst(between))
    yield finding(
        "info" if mild else "error" if between.mean > BADLY else "warning",
        f"engine and trainer disagree by {between.mean:.3g} {_PER_TOKEN}" + (f": {short}" if short else ""),
        place,
        evidence=[
            *_figures(between),
            shown("99th percentile of |d|", between.p99),
            shown("mean e^|d|", between.multiplier, "<= 1.05"),
            shown("k3(rollout, trainer)", between.k3, "<= 1e-3"),
            shown("correlation at lag 0", between.correlation),
            shown("slope of rollout on trainer", between.slope, "0.9 to 1.1"),
            *told,
        ],
        cause=cause,
        next_step=batch.laid.mismatch_command(),
    )


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
    return between.mean <= USUAL and between.correlation > ALIKE and short in ("", _OF_THE_ENGINE)


#: Both sides of a mixture of experts in bf16 that is healthy rise and fall together by more.
ALIKE = 0.95
_OF_THE_ENGINE = "the engine gives one token after one prefix different numbers"

#: How far apart what one forward says of one token after one prefix may be, in shares of the mismatch, and in nats: two
#: batch shapes in bf16.
RANDOM, RANDOM_FLOOR = 0.25, 0.02


def _cause(batch: StepBatch, between: Gap) -> tuple[str, str, list[Evidence]]:
    """The cause that the differences tell: in a few words (empty where they are not sure), in a sentence, and the
    figures behind it.
    """
    if is_of_padding(between):
        flush, padded = between.by_padding or (0.0, 0.0)
        return (
            "only samples with left padding",
            "left padding is attended to, or counted in the positions: samples without padding agree",
            [shown("mean |d| without left padding", flush), shown("mean |d| with left padding", padded)],
        )
    if (random := _at_random(batch)) is not None:
        return (
            "two forwards of the trainer by the same weights disagree as much",
            "dropout is left on in the trainer's forward (train mode), or it is not deterministic in another way",
            random,
        )
    twins = twins_of(between)
    ranges = [
        shown("places where samples share a token and all before it", twins.places),
        shown("mean range of the trainer there", twins.trainer, f"< {max(RANDOM * between.mean, RANDOM_FLOOR):.3g}"),
        shown("mean range of the rollout there", twins.rollout),
    ]
    limit = max(RANDOM * between.mean, RANDOM_FLOOR)
    if between.mean > BADLY and twins.sees_next:
        return (
            "the trainer's number of a token depends on the token after it",
            "the trainer gathers log-probabilities at labels that are shifted by one (off by one): those of the next "
            "token, by logits that predict this one",
            [
                *ranges,
                shown("mean range of the trainer where the next token is shared, too", twins.followed),
                shown("mean range of the trainer where the next token is another", twins.parted, "0"),
            ],
        )
    if twins.known and twins.trainer > limit and twins.trainer > 4 * twins.rollout:
        return _not_one_number(batch, ranges)
    told = ranges if twins.known else []
    head_B = batch.flat.first(batch.response_N if batch.response_N is not None else between.both_N)
    d_N = np.zeros(between.both_N.size)
    d_N[between.both_N] = np.abs(between.d)
    early_N = between.both_N & (batch.flat.position_N < np.repeat(head_B + 3, batch.flat.lengths_B))
    late_N = between.both_N & ~early_N
    if early_N.sum() >= FEWEST and late_N.sum() >= FEWEST:
        early, late = float(d_N[early_N].mean()), float(d_N[late_N].mean())
        if early > 3 * late:
            return (
                "most at the first tokens, the prompts differ",
                "the prompts differ: chat template, system prompt or BOS; it fades as the response conditions itself",
                [shown("mean |d| of the first 3 response tokens", early), shown("mean |d| of the others", late)],
            )
    often = float((between.by_sample_B > DISAGREE).mean())
    told = [*told, shown("share of samples above 0.03", often)]
    side = _side(between)
    if side is not None:
        told.append(shown("mean |rollout - ref|", between.from_reference))
    # Before the first update all weights are the initial ones: what differs then is no matter of their version.
    begins = batch.step is not None and batch.step <= 1
    by_length = _by_prompt_length(batch, between, head_B)
    if by_length is not None:
        return by_length
    if often < 0.5 and len(batch) >= 4:
        if (unlikely := _unlikely(batch, between)) is not None:
            return (
                "few samples are off, their tokens are not the sampled ones",
                "text was encoded again into other tokens than were sampled (re-tokenised), or these samples' rows are "
                "another's: the trainer finds their tokens improbable, and hardly any more probable",
                [*told, unlikely],
            )
        return (
            "few samples are off",
            "few samples are off and the others agree: their weights' version, adapter or inputs (images, tools) "
            "differ",
            told,
        )
    if twins.known and twins.rollout > limit and twins.rollout > 4 * twins.trainer:
        return (
            _OF_THE_ENGINE,
            "its kernels depend on what else is in the batch (a mixture of experts routes by it), weights change while "
            "it samples, its replicas hold different ones, or its cache is not emptied after an update",
            ranges,
        )
    never_below, alike = float((between.d < -0.02).mean()), float((np.abs(between.d) < 0.02).mean())
    if between.mean > BADLY and never_below <= 0.01 and alike > 0.3:
        return (
            "the trainer gives no token less than the engine",
            "the trainer's values are those of the best token of each position (argmax, max over the vocabulary), not "
            "of the sampled one: a gather by other ids, or logits that are made colder",
            [*told, shown("share of tokens that it gives less", never_below, "about 0.5"),
             shown("share of tokens that agree", alike)],
        )  # fmt: skip
    if between.mean > BADLY and side == "trainer":
        padding = "" if between.by_padding is not None else ", its positions or mask of padding differ"
        dropout = ", or dropout is on" if not twins.known else ""
        stale = "" if begins else ", or the engine samples with the initial weights"
        return (
            "the rollout agrees with the reference, the trainer with neither",
            f"the trainer's own forward is off: it is given another prompt (chat template, system prompt, BOS){padding}"
            f"{dropout}{stale}",
            told,
        )
    if between.correlation < 0.5:
        other = "other weights (another model or adapter)" if begins else "other weights (another version or adapter)"
        return (
            "they do not rise and fall together",
            f"{'the engine' if side == 'engine' else 'one side'} is given another prompt (another prompt template, a "
            f"doubled or missing BOS), or has {other}",
            [*told, shown("correlation at lag 0", between.correlation, "> 0.9")],
        )
    if between.mean > BADLY:
        dropout = "" if twins.known else ", dropout left on in the trainer's forward"
        weights = "another prompt template" if begins else "weights of another version"
        return "", f"too much for precision: {weights}{dropout}, or an engine that is quantised", told
    return (
        "",
        "precision or kernels: bf16 against fp32, another attention or MoE kernel, tensor parallelism; or weights one "
        "update old. Not a shift, a temperature, top-p, a packing leak: their discriminators do not show",
        told,
    )


def _not_one_number(batch: StepBatch, ranges: list[Evidence]) -> tuple[str, str, list[Evidence]]:
    """The trainer gives one token after one prefix different numbers: at random, or by what else is in the batch."""
    claim = "the trainer gives one token after one prefix different numbers"
    moved = _moved_before_update(batch)
    if moved is not None:
        ranges = [*ranges, shown("mean |policy - old| before any update", moved, "0")]
    if moved is not None and moved <= SAME_FORWARD:
        return (
            claim,
            "samples see what else is in their batch: neighbours of a pack (no block-diagonal mask), or padding (mask, "
            "positions); two forwards of one batch agree, so that it is not dropout",
            ranges,
        )
    return (
        claim,
        "dropout is left on in the trainer's forward (train mode), or samples see what else is in their batch: "
        "neighbours of a pack, or padding (mask, positions)"
        + (
            "; or old log-probabilities are recomputed between the updates of a batch, with other weights each time"
            if batch.columns.of("policy_logprobs") is None
            else ""
        ),
        ranges,
    )


#: Two forwards of one batch by one set of weights differ by less, in bf16 too.
SAME_FORWARD = 1e-2


def _unlikely(batch: StepBatch, between: Gap) -> Evidence | None:
    """Of the tokens that are far apart in the samples that are off, the share that the trainer finds less probable than
    the engine did, where that is nearly all: other weights find some of them more probable.
    """
    d_N = np.zeros(between.both_N.size)
    d_N[between.both_N] = between.d
    off_N = np.repeat(np.nan_to_num(between.by_sample_B) > DISAGREE, batch.flat.lengths_B) & (np.abs(d_N) > 0.5)
    less = float((d_N[off_N] < 0).mean()) if off_N.sum() >= FEWEST else 0.0
    return shown("tokens far apart that the trainer finds less probable", less, "about 0.5") if less > 0.85 else None


def _by_prompt_length(batch: StepBatch, between: Gap, head_B: Array) -> tuple[str, str, list[Evidence]] | None:
    """Where samples agree whose prompts have one length, the shortest or the longest, and those of other lengths do
    not: positions that begin elsewhere by as much as a prompt is shorter or longer.
    """
    known_B = ~np.isnan(between.by_sample_B)
    fine_B = known_B & (between.by_sample_B <= DISAGREE)
    off_B = known_B & ~fine_B
    if fine_B.sum() < 3 or off_B.sum() < 3:
        return None
    fine, off = np.unique(head_B[fine_B]), np.unique(head_B[off_B])
    if fine.size != 1 or off.size < 2 or not (fine[0] < off.min() or fine[0] > off.max()):
        return None
    return (
        f"only prompts of {int(fine[0])} tokens agree",
        "position ids count from another place than the engine's, by as much as a prompt is longer or shorter: padding "
        "is counted in them, or left out twice",
        [shown("samples that agree", int(fine_B.sum())), shown("tokens of their prompts", int(fine[0])),
         shown("tokens of the others' prompts", listed(off))],
    )  # fmt: skip


def _at_random(batch: StepBatch) -> list[Evidence] | None:
    """Before any update old and new log-probabilities are of one set of weights: figures of them where they are as far
    from each other as either is from the rollout. (Old ones of other weights are far, and the new ones are not.)
    """
    policy, old = batch.columns.of("policy_logprobs"), batch.columns.of("old_logprobs")
    rollout = batch.columns.of("rollout_logprobs")
    if policy is None or old is None or rollout is None:
        return None
    both_N = (
        before_any_update_N(batch) & batch.pair(policy, old) & batch.pair(policy, rollout) & batch.pair(old, rollout)
    )
    if both_N.sum() < FEWEST:
        return None
    apart = [
        float(np.abs(a.values_N[both_N] - b.values_N[both_N]).mean())
        for a, b in ((policy, old), (policy, rollout), (old, rollout))
    ]
    if min(apart) < max(RANDOM * max(apart), DISAGREE):
        return None
    return [shown("mean |policy - old| before any update", apart[0], "0"), shown("mean |policy - rollout|", apart[1]),
            shown("mean |old - rollout|", apart[2])]  # fmt: skip


def _moved_before_update(batch: StepBatch) -> float | None:
    """mean |policy - old| over the first update of the batch; None where one of the two is not recorded."""
    policy, old = batch.columns.of("policy_logprobs"), batch.columns.of("old_logprobs")
    if policy is None or old is None:
        return None
    both_N = batch.pair(policy, old) & before_any_update_N(batch)
    if both_N.sum() < FEWEST:
        return None
    return float(np.abs(policy.values_N[both_N] - old.values_N[both_N]).mean())


def _side(between: Gap) -> str | None:
    """Which side parts from the reference, where the other does not: `trainer` or `engine`."""
    ref = between.batch.columns.of("ref_logprobs")
    if ref is None or between.from_reference is None:
        return None
    if between.from_reference < 0.2 * between.mean:
        return "trainer"
    known_N = between.both_N & ref.said_N & np.isfinite(ref.values_N)
    own = float(np.abs(between.trainer.values_N[known_N] - ref.values_N[known_N]).mean())
    return "engine" if own < 0.2 * between.mean else None


#: Where a mismatch is rounding, what the first step has, whose weights the engine was started with; and what one update
#: does not come to (nats, probability, k3).
_OF_AN_UPDATE = {"logprob_diff": (0.01, 0.5), "prob_diff": (0.003, 0.1), "rollout_k3": (5e-4, 0.1)}
_LATE = " after the first step, which has none, and comes to rest: samples are an update old, or more"
_LATE_CAUSE = (
    "right of an asynchronous run, whose samples are of weights before the last update; of a synchronous one the "
    "weights reach the engine a step late. Importance weights (truncated, TIS) set it right"
)


def _is_one_update(values: list[float], rounding: float, most: float) -> bool:
    """Whether a mismatch by step is that of weights some updates old: the first step has none, and what comes later
    does not grow any more. Weights that never arrive leave ever more of it.
    """
    if len(values) < 4 or values[0] > min(rounding, 0.1 * values[1]):
        return False
    later = values[1:]
    if np.median(later) > most:
        return False
    if comes_to_rest(later):
        return True
    half = len(later) // 2
    return bool(np.median(later[half:]) <= 1.2 * np.median(later[: max(half, 2)])) and not trends.rises(later)


def _leaps(log: RunLog) -> Iterator[Finding]:
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
            yield finding(
                "error" if bad[-1] is points[-1] else "warning",
                f"engine and trainer disagree from step {points[at].step} on: {series.name} leaps to "
                f"{points[at].value:.3g}, at most {before:.3g} before",
                points[at].where(series.name),
                evidence=[series.shown_at(points[at], f"< {limit:g}"), shown("largest before", before),
                          shown("steps past the limit", len(bad))],
                cause="from one step to the next the two have other weights: a checkpoint was loaded or resumed and "
                "the engine was not synchronised, a synchronisation failed, or the trainer's precision changed",
                next_step=_TOLD_APART,
                steps=steps_of(bad),
            )  # fmt: skip
            return


def _is_sure(log: RunLog) -> bool:
    """Whether the policy is sure of every token, and probabilities hardly differ between engine and trainer: they are
    all 1, and what is correlated is rounding.
    """
    apart, entropy = log.get("prob_diff"), log.get("entropy")
    if apart is None or entropy is None or not apart.finite or not entropy.finite:
        return False
    return trends.level(apart.finite) < LIMITS["prob_diff"].warning / 4 and trends.level(entropy.finite) < SURE


@rule("D09", "engine and trainer disagree", link="logprobs", scope="signals", needs=("|".join(LIMITS),),
      source="NeMo-RL docs; slime and miles CI; verl-omni#637")  # fmt: skip
def mismatch(log: RunLog) -> Iterator[Finding]:
    """Level (median of the last 10 steps) of what is logged of d = logp_trainer - logp_rollout.

    mean|d| over 0.03 (0.1 an error), mean e^|d| over 1.05 (1.2), k3 over 1e-3 (0.1), mean difference of the
    probabilities over 0.02 (0.1), their Pearson under 0.98 (0.9; not where they hardly differ and the entropy is below
    .05). One number does not name a cause: a shift, a temperature, stale weights and packing all look like this. A
    healthy bf16 mixture of experts has mean|d| of 0.064: up to 0.07 (mean e^|d| 1.08, k3 4e-3) it is info where it
    does not rise. It is info, too, where the first step has none, the second all of it, and it does not grow, within
    .5 nats, .1 of probability and .1 of k3: weights one update old, as of every asynchronous run.
    """
    bad = [
        (limit, series, now)
        for signal, limit in LIMITS.items()
        for series, now in log.level(signal)
        if limit.is_past(now, limit.warning) and not (signal == "prob_pearson" and _is_sure(log))
    ]
    if not bad:
        yield from _leaps(log)
        return
    if log.algorithm.is_off_policy or any(batch.has("is_weights") for batch in log.samples()):
        raise Skip("the run states that its samples are of older weights on purpose: a mismatch is part of it")
    limit, series, now = next((one for one in bad if one[0].is_past(one[2], one[0].error)), bad[0])
    past = [point for point in series.points if limit.is_past(point.value, limit.warning)]
    late = series.signal in _OF_AN_UPDATE and _is_one_update(series.finite, *_OF_AN_UPDATE[series.signal])
    usual = late or (now <= limit.usual and trends.drift(series.finite) <= trends.DRIFT_Z)
    other = series.signal == "logprob_diff" and now > OTHER_TOKENS and series.finite[0] > OTHER_TOKENS
    yield finding(
        "info" if usual else "error" if limit.is_past(now, limit.error) else "warning",
        f"engine and trainer disagree: {series.name} is {now:.3g}"
        + (_LATE if late else _steady(series, limit) or _grown(series, limit)),
        past[0].where(series.name),
        evidence=[series.shown(now, f"{'<' if limit.side > 0 else '>'} {limit.warning:g}")],
        cause=_LATE_CAUSE
        if late
        else "so far apart from the first step on that both hardly speak of the same tokens: log-probabilities that "
        "are shifted by one token, tokens that were re-tokenised or belong to other samples, tokens in the loss mask "
        "that no engine sampled such as padding, prompt or tool output, or another model"
        if other
        else "weights that are not all sent to the engine, or late: part of the layers, or all, stay behind "
        "from update to update; another precision, template or temperature would show in the first step as well "
        "(a precision that costs more as the policy moves, such as quantised weights, grows more slowly)"
        if _grown(series, limit)
        else "another precision or kernel, dropout left on, a temperature or top-p that one side applies, weights "
        "that were not synced, a chat template, packing, tokens in the loss mask that no engine sampled such as "
        "padding, prompt or tool output: the log has one number for all of them",
        next_step=_TOLD_APART,
        steps=steps_of(past),
    )


def _steady(series: Series, limit: Limit) -> str:
    """What it adds that they disagree by as much from the first step on: old weights would grow."""
    values = series.finite
    if len(values) < trends.MIN_STEPS or abs(trends.drift(values)) > trends.DRIFT_Z:
        return ""
    if not all(limit.is_past(value, limit.warning) for value in values[:3]):
        return ""
    return ", and as much from the first step on, which old weights do not make"


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
