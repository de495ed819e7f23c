"""An engine that samples with other weights than the trainer's: old ones, or another model's."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from replay_core.diagnose import trends
from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.case import Case
from replay_core.diagnose.collected import AGREES, ENOUGH, Misplaced, parting, synced_every
from replay_core.diagnose.compared import TOLD_APART, gap_of, old_is_odd, worst_of
from replay_core.diagnose.falling_apart import falls_apart
from replay_core.diagnose.finding import Evidence, Finding, Where, error, finding, share, shown
from replay_core.diagnose.flat import Array
from replay_core.diagnose.gap import BADLY, DISAGREE, LIMITS, OLDEST, Gap, ahead_of, gap, same_way
from replay_core.diagnose.log_steps import steps_of
from replay_core.diagnose.mismatch_causes import gathered_elsewhere, other_tokens
from replay_core.diagnose.rule import Skip, rule, skip_if
from replay_core.diagnose.rules.staleness import age_of, ever_older, versions
from replay_core.diagnose.rules.tokens import truncated
from replay_core.diagnose.rules.weights import ADAPTER, has_norms_of_ranks, weights_by_step
from replay_core.diagnose.signals import RunLog, Series
from replay_core.regexes import regex

#: The mismatch beside what it was before: weights were not delivered. docs/evidence.md#log-probabilities
JUMP = 5.0
#: Steps after such a jump that tell whether it grows, and how many times the first of them the others come to where
#: it does not.
RESTS, STILL = 3, 1.5
#: What of the first step's mismatch is noise before a jump: old weights grow from the first update on.
UNMOVED = 2.0
#: Share of the rows that one sample with a tensor of its own does not come to.
FEW_ROWS = 0.1
#: And while versions stand: what was there before they stood has another cause.
GROWS = 1.5
#: What it has to have come to before old weights are the reason: a policy that gets sharper doubles rounding, too.
HEARD = {"logprob_diff": 0.005, "rollout_k3": 5e-5, "prob_diff": 1e-3, "rollout_k1": 0.02}
#: How many times a warning's limit engine and trainer are apart in a run's first step before old weights are not all.
AT_FIRST = 3.0
#: Up to that share of what is a warning of a run that has it from the first step on, such a growth is worth knowing.
FAINT = 0.4


class _StepGap(Struct, frozen=True):
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
    ahead: float | None = None
    """How far the rollout lies beyond the trainer on the way from the reference, in shares of that way; None where the
    policy has hardly moved, or the rollout lies elsewhere."""
    rank_B: Array | None = None
    same_way: float | None = None
    """Of the tokens that both have moved, the share whose probability the rollout moves on where the trainer moved it:
    half of them where the two have nothing to do with each other."""


def _step_gaps(case: Case, misplaced: Misplaced, *, weighed: bool = False) -> Iterator[_StepGap]:
    """Steps whose mismatch has no cause that shows in one step, and does not stand beside importance weights (or stands
    beside them: `weighed`). What their tokens tell of a gather is taken down.
    """
    for batch in case.batches():
        if not (batch.has("rollout_logprobs") and batch.has("trainer_logprobs")):
            continue
        if batch.has("is_weights") is not weighed:
            continue
        try:
            between = gap(batch)
        except Skip:
            continue
        if between.is_shifted or between.after_softmax is not None or between.is_tempered or between.is_truncated:
            continue
        if old_is_odd(batch) is not None:
            continue  # the engine has the weights of the trainer's first forward: the old ones are D14's
        if between.leak or other_tokens(batch, between) is not None or gathered_elsewhere(batch, between) is not None:
            continue
        if between.mean > DISAGREE:
            misplaced.take(batch, between)
        place = batch.laid.where("rollout_logprobs", at=worst_of(between))
        command = batch.laid.mismatch_command()
        known = versions(batch)
        version = None if known is None or np.isnan(known[1]).all() else float(np.nanmax(known[1]))
        mean, by_sample_B = between.mean, between.by_sample_B
        # Samples that name older weights are said to be of them: what the newest version promises, the others do not.
        older_B = np.zeros(len(batch), dtype=bool) if known is None or version is None else known[0] < version
        if older_B.any() and np.isfinite(by_sample_B[~older_B]).any():
            by_sample_B = np.where(older_B, np.nan, by_sample_B)
            mean = float(np.nanmean(by_sample_B))
        yield _StepGap(
            batch.step, mean, between.from_reference, between.is_stale, version, place, command,
            by_sample_B, batch.prompt_B, ahead_of(between), _rank_B(batch), same_way(between),
        )  # fmt: skip


def _rank_B(batch: StepBatch) -> Array | None:
    """The rank [B] that sampled each of them; None where one alone is recorded, or none."""
    ranks = [None if key is None else key.rank for key in batch.laid.keys_of("rollout_logprobs")]
    known = [rank for rank in ranks if rank is not None]
    return np.array(known) if len(known) == len(ranks) and len(set(known)) > 1 else None


@rule("D12", "the engine samples with old weights", link="rollout_logprobs", scope="case",
      explains=("L10", "D09", "D13", "D14", "D24", "D31"), lasts=True,
      source="trl#5312 (.015 -> .201), verl#7495; measured: 0.000 against 0.094")  # fmt: skip
def stale(case: Case) -> Finding | None:
    """Two signs, over all steps. mean |rollout - ref| below a fifth of mean |trainer - rollout| > 0.03, up to the last
    step: what was sampled agrees with the reference, the initial weights, and not with the policy. Or a mismatch of 5
    times the median of two steps and more before it, above 0.03, and not back below it later. Each is an error. Where
    the jump is all of it (3 steps and more, the others 1.5 times the first), weights that arrive are
    changed, and not old.

    Or the rollout lies on the way from the reference through the trainer, and beyond it: by half of that way to twice
    in each of 3 steps and more, and in four of five whose policy has moved by .01 nats (correlation .85). Weights that
    are older lie before the trainer's. An error. So it is where, in each of 3 steps and more after a first one without
    any of it, seven of ten tokens (median, six in each) that both have moved are moved on the same way.

    Versions that follow the steps, and a first step or more without any of it (.01 nats) before 3 and more, up to the
    last, that are all past .03 and 10 times that, and half of them twice as far (half a nat at the most): samples are
    not of the weights that their version names. An error. So is, with checkpoints of these steps, a mismatch that goes
    with the distance of a step's weights from others (to 1.5 over 4 steps and more, the first step without any), and
    not with that from the version's (twice and more).

    So is, with checkpoints, a mismatch that goes with the distance of each step's weights from those of one early step
    (to 2.2 over 5 steps and more), while by the versions that are named it lies apart by 3 times and more, and by twice
    as much: the engine stays at that step's weights, whatever it names. Both hold beside importance weights, too.

    Else silent where importance weights are recorded, or weight versions advance: such a run is off-policy on purpose
    (D31).
    Of samples of several versions in one step, those of its newest are looked at. But versions are held against what
    was sampled: an error where they advance and the tokens are the initial weights', or where they stop for more than
    twice as long as ever before while the mismatch grows by half.

    A third sign, in 4 steps and more: the first step has none of it (.01 nats and less), and it grows with the updates
    to ten times that and .03 (or five times that, and .03 in one step, where nearly every step has more than those
    before it: tau .7), by a quarter from the earlier half to the later (Kendall's tau .4), in all rows or in a part of
    them whose others agree (an error where those are the rows of some ranks, and of no others). Weights of one age do
    not grow: silent where the last third of 7 steps and more has no more than 1.15 times the middle third. An error
    beside versions, too, where they follow the steps, so that the engine says it is up to date; without
    any a warning in fewer than 12 steps, since an asynchronous run begins so.
    Where what was sampled agrees with the reference, too, a run that begins in the dump has to be as long, or its
    mismatch past D09's limit of an error.
    Where no versions are recorded: none of it (.01 nats) in every k-th step, the first and two more among them, and
    past .03 and ten times that in all others. A warning, an error past .1; worth knowing where it is stated.

    Silent where the first step of a run has as much of it: before any update old weights are the new ones, and it is
    the trainer's own forward that differs (D09).
    """
    misplaced = Misplaced()
    every = list(_step_gaps(case, misplaced))
    skip_if(misplaced.told() is not None, "the trainer gathers other tokens than were sampled (D09)")
    if not every and (older := _older_though_weighed(case) or _falls_behind(case)) is not None:
        return older
    skip_if(not every, "needs rollout and trainer log-probabilities, no importance weights, and no other cause")
    if (twice := _applied_twice(every)) is not None:
        return replace(twice, claim=twice.claim + OF_ADAPTER) if _trains_an_adapter(case) else twice
    jump = _jump(every)
    alone = not has_norms_of_ranks(case)
    if (jump is None or not jump.is_clean) and (grown := _never_updated(every, is_open=alone)) is not None:
        # Of samples that may be old and name no version, an age that is still coming is no fault.
        if grown.severity == "warning" and any(batch.laid.algorithm.is_off_policy for batch in case.batches()):
            grown = replace(grown, severity="info")
        return _of_an_adapter(grown) if _trains_an_adapter(case) and _NOT_UPDATED in grown.claim else grown
    known = [one.version for one in every if one.version is not None]
    if not known and (turns := _synced_now_and_then(case, every)) is not None:
        return turns
    if len(set(known)) > 1:
        return _against_versions(case, every)
    parted = [one for one in every if one.mean > DISAGREE]
    bad = [one for one in parted if one.is_stale]
    first = every[0]
    begins = first.step is not None and first.step <= 1
    own = begins and first.mean > max(DISAGREE, 0.3 * float(np.median([one.mean for one in parted or every])))
    if bad and not own and bad[-1] is every[-1] and 2 * len(bad) >= len(parted):
        worst = max(bad, key=lambda one: one.mean)
        # The first samples of an asynchronous run are of the initial weights on purpose.
        starts = begins and len(every) < ENOUGH and not known and first.mean <= AGREES
        # Past what any policy learns from, whatever was meant (D09 is an error there, too).
        starts = starts and not LIMITS["logprob_diff"].is_past(worst.mean, LIMITS["logprob_diff"].error)
        return finding(
            "warning" if starts else "error",
            "the rollout was sampled by the initial weights, not by the policy that is trained",
            worst.place,
            shown("mean |rollout - ref|", worst.from_reference, f">= {0.2 * worst.mean:.4g}"),
            shown("mean |trainer - rollout|", worst.mean, f"< {DISAGREE} nats"),
            shown("steps that show it", share(len(bad), len(every))),
            cause="weights are not synchronised into the engine (or a LoRA adapter is not delivered)",
            next_step=worst.command,
            steps=[one.step for one in bad],
        )
    if jump is not None and (told := _left_behind(every, jump)) is not None:
        if not any(batch.has("policy_logprobs") for batch in case.batches()):
            return replace(told, cause=told.cause + _OR_STALE)
        return told
    return None


_OR_STALE = (
    "; or the old log-probabilities are stale: a forward of the update beside them would tell, and none is recorded"
)


class _Jump(Struct, frozen=True):
    """The mismatch leaps at a step of the run, and stays: its `number`, the median before, whether it had not moved."""

    number: int
    before: float
    is_clean: bool


def _jump(every: list[_StepGap]) -> _Jump | None:
    for number in range(2, len(every)):
        means = [one.mean for one in every[:number]]
        before = float(np.median(means))
        floor = max(DISAGREE, JUMP * before)
        several = all(float((later.by_sample_B > DISAGREE).mean()) > FEW_ROWS for later in every[number:])
        if every[number].step is not None and several and all(later.mean >= floor for later in every[number:]):
            fine = [float((later.by_sample_B < DISAGREE / 3).mean()) > FEW_ROWS for later in every[number:]]
            return _Jump(number, before, max(means) <= UNMOVED * means[0] and not all(fine))
    return None


def _left_behind(every: list[_StepGap], jump: _Jump) -> Finding | None:
    """From a step on the engine has other weights than the trainer: old ones, or ones that are changed on the way. None
    where it is more at once than either comes to, and rests there: other tokens or prompts are D09's.
    """
    now, later = every[jump.number], [one.mean for one in every[jump.number :]]
    # Every update that is missed adds to what weights are apart.
    rests = len(later) >= RESTS and float(np.median(later[1:])) <= STILL * later[0]
    if rests and later[0] > OLDEST:
        return None
    return error(
        f"the engine's weights are no longer the trainer's from step {now.step} on, and not old ones: they "
        f"part by {now.mean:.3g} nats per token after {jump.before:.3g}, and by no more with later updates"
        if rests
        else f"the engine does not follow the trainer's weights from step {now.step} on: they part by "
        f"{now.mean:.3g} nats per token after {jump.before:.3g}",
        now.place,
        shown(f"mean |d| at step {now.step}", now.mean, f"< {max(DISAGREE, JUMP * jump.before):.3g}"),
        shown("median of the steps before", jump.before),
        shown("mean |d| at the last step", every[-1].mean),
        cause="every sync delivers weights that are rounded or changed on the way: quantised (fewer bits, "
        "coarser scales), of another precision, or a tensor in another layout"
        if rests
        else "from here on the engine samples with weights that are not updated, or not all of them: a sync "
        "that failed, a part of the layers, an adapter that is not delivered or is scaled otherwise",
        next_step=now.command,
        steps=[one.step for one in every[jump.number :]],
    )


#: Steps that show an engine ahead of its trainer, the share of those that can, and by how much of the way.
AHEAD_STEPS, AHEAD_SHARE, AHEAD = 3, 0.8, (0.5, 2.0)
#: Beyond small steps a policy does not move on a line: the share of tokens that move on the same way, median of steps
#: and in each. (Older weights come to .14, what has nothing to do with the updates to a half.)
SAME_WAY, EACH_WAY = 0.7, 0.6
OF_ADAPTER = ": the adapter (LoRA) is applied twice, or with another scale"


_TWICE = (
    "what the trainer learnt is applied twice in the engine: a LoRA adapter is merged into the weights and loaded once "
    "more, its scale (alpha / r) is another, or a delta is added to weights that hold it already"
)


def _applied_twice(every: list[_StepGap]) -> Finding | None:
    """An engine whose weights are further from the reference than the trainer's, the same way, in all steps."""
    moved = [one for one in every if one.ahead is not None]
    beyond = [one for one in moved if one.ahead is not None and AHEAD[0] <= one.ahead <= AHEAD[1]]
    if len(beyond) < AHEAD_STEPS or len(beyond) < AHEAD_SHARE * len(moved):
        return _further(every)
    worst = max(beyond, key=lambda one: one.mean)
    by = 1 + float(np.median([one.ahead for one in beyond if one.ahead is not None]))
    return error(
        f"the engine goes {by:.3g} times as far from the reference as the trainer's policy, the same way",
        worst.place,
        shown("rollout - trainer over trainer - ref, median", by - 1, "0"),
        shown("steps that show it", share(len(beyond), len(moved))),
        shown("mean |trainer - rollout|", worst.mean, f"< {DISAGREE} nats"),
        cause=_TWICE,
        next_step=worst.command,
        steps=[one.step for one in beyond],
    )


def _further(every: list[_StepGap]) -> Finding | None:
    """An engine that moves what the trainer moved further the same way, token by token, in every step that tells."""
    moved = [one for one in every if one.same_way is not None and one.mean > DISAGREE]
    shares = [one.same_way for one in moved if one.same_way is not None]
    if (
        len(moved) < AHEAD_STEPS
        or min(shares) < EACH_WAY
        or float(np.median(shares)) < SAME_WAY
        or every[0].mean > AGREES
    ):
        return None
    worst = max(moved, key=lambda one: one.mean)
    return error(
        "the engine is further from the reference than the trainer's policy, the same way: it has no old weights, "
        "which would lie before the trainer's",
        worst.place,
        shown("tokens that the rollout moves on where the trainer moved them, median of the steps",
              float(np.median(shares)),
              "about 0.5, or next to 0 of older weights"),
        shown("steps that show it", share(len(moved), len(every))),
        shown("mean |trainer - rollout|", worst.mean, f"< {DISAGREE} nats"),
        cause=_TWICE,
        next_step=worst.command,
        steps=[one.step for one in moved],
    )  # fmt: skip


#: Words for how often weights are sent to the engine.
_SYNCED_EVERY = (
    "weight_sync_interval", "sync_every", "sync_interval", "weight_sync_steps", "trigger_parameter_sync_step",
    "update_weights_interval", "sync_weights_every",
)  # fmt: skip


def _synced_now_and_then(case: Case, every: list[_StepGap]) -> Finding | None:
    """Engine and trainer that agree in every k-th step, and part more in each until the next."""
    steps = [one.step for one in every if one.step is not None]
    turns = synced_every([one.mean for one in every])
    if turns is None or steps != list(range(steps[0], steps[0] + len(every))):
        return None
    worst = max(every, key=lambda one: one.mean)
    meant = case.algorithm.is_off_policy or (case.algorithm.number(*_SYNCED_EVERY) or 0) > 1
    return finding(
        "info" if meant else "error" if worst.mean > BADLY else "warning",
        f"the engine gets new weights every {turns} steps only: it agrees with the trainer in steps "
        f"{', '.join(map(str, steps[::turns][:4]))}, and parts by up to {worst.mean:.3g} nats per token between",
        worst.place,
        shown("mean |trainer - rollout| by step", ", ".join(f"{one.mean:.3g}" for one in every[:12]), "as at first"),
        shown("largest in steps that agree", max(one.mean for one in every[::turns])),
        shown("mean |trainer - rollout| at most", worst.mean, f"< {DISAGREE} nats"),
        cause="weights are sent to the engine once in so many steps, or that often alone with success: samples in "
        "between are of old weights, and neither versions nor importance weights are recorded that correct for them",
        next_step=worst.command,
        steps=[one.step for number, one in enumerate(every) if number % turns],
    )


def _trains_an_adapter(case: Case) -> bool:
    """Whether all gradients that are recorded are an adapter's, or, of none, the run states one."""
    names = {
        ref.name
        for record in case.records()
        if record.key.stage == "gradient"
        for ref in record.tensors()
        if (ref.canonical or ref.name).startswith("grad.")
    }
    states = (case.algorithm.number("lora_rank", "lora_r", "peft_rank") or 0) > 0
    return all(map(ADAPTER.search, names)) if names else states


_NOT_UPDATED = "the engine's weights are not updated, or not all of them"


def _of_an_adapter(one: Finding) -> Finding:
    """The finding of a run that trains nothing else: what the engine lacks is the adapter."""
    of_async = one.cause.partition(". Of an")[2]
    return replace(
        one,
        claim=one.claim.replace(
            _NOT_UPDATED,
            "the adapter (LoRA) does not reach the engine as it is: not at all, in part, or at another scale",
        ),
        cause="the engine samples with the base model, with a part of the adapter, or with what is merged at another "
        "scale (alpha / r) or twice: it is not loaded (another path or name, some layers alone), its request does not "
        "name it, or the merge multiplies by another factor" + (". Of an" + of_async if of_async else ""),
    )


def _never_updated(every: list[_StepGap], *, is_open: bool = False) -> Finding | None:
    """The engine agrees with the weights that it was started with, and not with those that came after. `is_open`: of
    rows of some ranks nothing tells whether the engine's replica stayed behind, or the rank's trainer left.
    """
    told = [(one.step, one.version) for one in every if one.step is not None and one.version is not None]
    ages = {step - version for step, version in told}
    # Versions that stay behind are said to; those that keep pace with the steps say that the engine is up to date.
    if told and (len(told) < len(every) or len({version for _, version in told}) > 1) and len(ages) > 1:
        return None
    found = parting([one.by_sample_B for one in every], every[-1].prompt_B, [one.rank_B for one in every])
    if found is None:
        return None
    up_to_date = len(told) == len(every) and len(ages) == 1
    later = [one for one in every[1:] if one.mean > DISAGREE]
    worst = max(later or every, key=lambda one: one.mean)
    # Samples that are old on purpose are so on every rank.
    sure = up_to_date or found.is_growing or bool(told) or found.ranks is not None
    either = found.ranks is not None and is_open
    return finding(
        "error" if sure else "warning",
        (
            "engine and trainer of one rank have other weights, and which of the two is off is not told: it agrees"
            if either
            else f"{_NOT_UPDATED}: it agrees"
        )
        + " with the trainer in the first step, and parts more and more with the updates"
        + (found.where if found.is_in_part else "")
        + (", although its weight version advances" if up_to_date else ""),
        worst.place,
        shown("mean |trainer - rollout| in the first step", found.first, f"< {DISAGREE} nats"),
        shown("mean |trainer - rollout| later, where they part", found.last, "as in the first step"),
        shown("by step", ", ".join(f"{one.mean:.3g}" for one in every[:12])),
        *([shown("rows that part in the last step", share(*found.rows))] if found.is_in_part else []),
        cause="the replica of the engine that samples for this rank has old weights, since the weight sync does not "
        "reach it; or the rank trains a model of its own, since gradients are not reduced over the ranks: their "
        "gradient norms, of which none are recorded by rank, would tell"
        if either
        else "the replica of the engine that samples for this rank has old weights: the weight sync does not reach it"
        if found.ranks is not None
        else "a part of the rows is sampled with old weights: a prefix cache (KV cache) of the engine that is not "
        "emptied after a weight update, or one replica (rank, adapter) of the engine that a weight sync never reaches"
        if found.is_in_part
        else "weights are never synchronised into the engine after its start (a sync that fails silently, a renamed "
        "parameter, a part of the layers, an adapter that is not delivered), so that it samples with initial weights; "
        "or what it is given is not what is trained: an adapter that is merged with another scale (alpha / r for "
        "alpha / sqrt(r)), or a part of it. Of an asynchronous run: its samples get older with every step"
        + (
            ""
            if sure
            else ", until they are as old as it lets them be. Nothing that is recorded rules out that it holds "
            "new weights and others (an adapter applied twice or with another scale)"
        ),
        next_step=worst.command,
        steps=[one.step for one in later],
    )


def _against_versions(case: Case, every: list[_StepGap]) -> Finding | None:
    """Weight versions that advance: what they say is held against what was sampled, and they against the steps."""
    told = [one for one in every if one.version is not None]
    oldest = min(one.version for one in told if one.version is not None)
    later = [one for one in told if one.version is not None and one.version > oldest]
    bad = [one for one in later if one.is_stale]
    own = told[0].mean > max(DISAGREE, 0.3 * max(one.mean for one in told)) and told[0].version == oldest
    if bad and not own and bad[-1] is told[-1] and 2 * len(bad) >= len([one for one in later if one.mean > DISAGREE]):
        worst = max(bad, key=lambda one: one.mean)
        return error(
            "the rollout was sampled by the initial weights, although its weight version advances",
            worst.place,
            shown("mean |rollout - ref|", worst.from_reference, f">= {0.2 * worst.mean:.4g}"),
            shown("mean |trainer - rollout|", worst.mean, f"< {DISAGREE} nats"),
            shown("weight version it names", worst.version),
            shown("steps that show it", share(len(bad), len(later))),
            cause="weights arrive and are not used: a LoRA adapter that is not loaded, parameters renamed on the way",
            next_step=worst.command,
            steps=[one.step for one in bad],
        )
    plateaus: list[list[_StepGap]] = []
    for one in told:
        if plateaus and plateaus[-1][0].version == one.version:
            plateaus[-1].append(one)
        else:
            plateaus.append([one])
    last, longest = plateaus[-1], max((len(each) for each in plateaus[:-1]), default=0)
    before = float(np.median([one.mean for each in plateaus[:-1] for one in each])) if longest else 0.0
    grown = last[-1].mean > max(DISAGREE, GROWS * before)
    if longest and len(last) >= 3 and len(last) > 2 * longest and grown:
        return error(
            f"the engine is no longer updated: its weight version stays {last[0].version:g} for {len(last)} steps",
            last[-1].place,
            shown("steps with this version", len(last), f"<= {2 * longest}, as before"),
            shown("mean |trainer - rollout| at the last step", last[-1].mean, f"< {DISAGREE} nats"),
            shown("mean |trainer - rollout| before", before),
            cause="weights are not synchronised into the engine any more: a sync that failed once and is not retried",
            next_step=last[-1].command,
            steps=[one.step for one in last],
        )
    if (older := _older_than_said(case, every) or _stays_at(case, every)) is not None:
        return older
    if (other := _of_other_versions(every)) is not None:
        # The policy's own, where nothing else is recorded, are of updates of the step as well.
        before_updates = all(batch.has("old_logprobs") for batch in case.batches())
        return other if before_updates else replace(other, severity="warning")
    raise Skip("weight versions advance: the engine gets new weights, however late")


#: Of mean |d| over the distance of two checkpoints, largest over least: what one pair of weights leaves over the steps,
#: and what no such pair does; and the steps that tell.
ALIKE, UNLIKE, TOLD_BY = 1.5, 2.0, 4


#: A step whose engine and trainer are apart, its number, and the step whose weights its samples name.
_Said = tuple[_StepGap, int, int]


def _said_of(every: list[_StepGap], weights: dict[int, Any]) -> list[_Said]:
    """Those of a run that names a version in each, agrees in its first step, and has the checkpoints of all of them."""
    told = [(one, one.step, one.version) for one in every if one.step is not None and one.version is not None]
    if len(told) < len(every) or every[0].mean > AGREES:
        return []
    behind = min(step - version for _, step, version in told)
    rows = [(one, step, int(version + behind)) for one, step, version in told if one.mean > DISAGREE]
    return rows if {at for _, *each in rows for at in each} <= weights.keys() else []


def _spread(rows: list[_Said], weights: dict[int, Any]) -> float:
    """mean |d| over the distance of the two steps' weights, largest over least; infinite where weights are the same."""
    moved = [float(np.linalg.norm(weights[step] - weights[at])) for _, step, at in rows]
    each = [one.mean / by if by > 0 else math.inf for (one, *_), by in zip(rows, moved, strict=True)]
    return max(each) / min(each) if max(each) < math.inf else math.inf


def _older_than_said(case: Case, every: list[_StepGap]) -> Finding | None:
    """Checkpoints beside versions: how far engine and trainer are apart goes with how far the weights had moved between
    the two that they hold.
    """
    weights = weights_by_step(case)
    rows = _said_of(every, weights)
    if len(rows) < TOLD_BY:
        return None
    oldest = min(weights)

    def spread(older: int) -> float:
        return _spread([(one, step, max(at - older, oldest)) for one, step, at in rows], weights)

    spreads = {older: spread(older) for older in range(1, len(weights)) if all(
        max(at - older, oldest) in weights for *_, at in rows)}  # fmt: skip
    older = min(spreads, key=lambda one: spreads[one], default=0)
    said = spread(0)
    if not older or spreads[older] > ALIKE or said < UNLIKE:
        return None
    # Distances alone hardly tell one age from the next.
    fits = [one for one in spreads if spreads[one] <= ALIKE]
    by = " to ".join(str(one) for one in sorted({min(fits), max(fits)}))
    worst = max((one for one, *_ in rows), key=lambda one: one.mean)
    return error(
        f"samples are older than their weight version says, by {by} updates: engine and trainer are apart as the "
        "checkpoints of such steps are",
        worst.place,
        shown("mean |trainer - rollout| over the distance of the two checkpoints, largest over least", spreads[older]),
        shown("the same by the version that is named", "infinite" if said == math.inf else said, f"< {UNLIKE:g}"),
        shown("mean |trainer - rollout| by step", ", ".join(f"{one.mean:.3g}" for one in every[:12])),
        shown("steps compared", len(rows)),
        cause="the version is stamped when samples are taken from the queue, or counts the trainer's steps, while the "
        "engine samples with older weights (a sync that lags, a longer queue): limits on staleness and corrections "
        "look at the wrong age",
        next_step=worst.command,
        steps=[one.step for one, *_ in rows],
    )


def _older_though_weighed(case: Case) -> Finding | None:
    """Of a run that weighs its samples for their age: whether they are older than they are said to be."""
    every = list(_step_gaps(case, Misplaced(), weighed=True))
    if len({one.version for one in every}) < 2 or any(one.version is None for one in every):
        return None
    return _older_than_said(case, every) or _stays_at(case, every)


#: Steps before an engine falls behind and after, how far the last is from those before, and how much larger an update
#: may be by then: of weights of one age the mismatch goes with it.
FOLLOWS, BEHIND, FAR_BEHIND, LARGER = 4, 4, 6.0, 2.0


def _falls_behind(case: Case) -> Finding | None:
    """Samples that are weighed for their age, and get older than that: from a step on, up to the last, engine and
    trainer part ever more, while updates are no larger, as checkpoints tell: without these a kernel whose error grows
    looks so, too.
    """
    every = [one for one in _step_gaps(case, Misplaced(), weighed=True) if one.step is not None]
    if len(every) < FOLLOWS + BEHIND:
        return None
    weights = weights_by_step(case)
    moved = {
        step + 1: float(np.linalg.norm(weights[step + 1] - weights[step])) for step in weights if step + 1 in weights
    }
    for begun in range(FOLLOWS, len(every) - BEHIND + 1):
        before, later = [one.mean for one in every[1:begun]], [one.mean for one in every[begun:]]
        usual = float(np.median(before))
        grows = sum(b > a for a, b in pairwise(later)) >= len(later) - 2
        if min(later) <= max(DISAGREE, max(before)) or later[-1] < FAR_BEHIND * usual or not grows:
            continue
        since = every[begun].step or 0
        earlier = [by for step, by in moved.items() if step < since]
        largest = max((by for step, by in moved.items() if step >= since), default=0.0)
        if not largest or not earlier or not max(earlier) > 0:
            continue
        larger = largest / float(np.median(earlier))
        if larger > LARGER:
            continue
        last = every[-1]
        return finding(
            "warning",
            f"the engine falls behind the trainer from step {every[begun].step} on: engine and trainer part by ever "
            f"more, {last.mean:.3g} nats per token at step {last.step} after {usual:.3g}, as where its weights are no "
            "longer updated",
            every[begun].place,
            shown("mean |trainer - rollout| by step", ", ".join(f"{one.mean:.3g}" for one in every[:12])),
            shown("median of the steps before", usual),
            shown("largest update from then on over the median one before, by checkpoints", larger, f"<= {LARGER:g}"),
            cause="weight updates do not reach the engine any more (a sync that fails silently), or its samples get "
            "older than the run states: importance weights are cut off, and do not correct for that. Else a kernel or "
            "a precision of the engine whose error grows as the policy gets sure",
            next_step=last.command,
            steps=[one.step for one in every[begun:]],
        )  # fmt: skip
    return None


#: The same of one early step's weights, which an engine that is no longer updated keeps: noise leaves more of it.
STAYS, STRAYS, STAYS_FOR = 2.2, 3.0, 5


def _stays_at(case: Case, every: list[_StepGap]) -> Finding | None:
    """Checkpoints beside versions: engine and trainer are as far apart as the trainer is from where it was at one early
    step, and not as far as the versions say.
    """
    weights = weights_by_step(case)
    rows = _said_of(every, weights)
    fits: dict[int, float] = {}
    for stayed in sorted(weights)[: len(weights) // 2]:
        # What was sampled before it stayed, and what names its weights, tells nothing of it.
        later = [row for row in rows if row[1] > stayed and row[2] >= stayed]
        if len({at for *_, at in later}) < STAYS_FOR:
            continue
        found = _spread([(one, step, stayed) for one, step, _ in later], weights)
        said = _spread(later, weights)
        if found <= STAYS and said >= max(STRAYS, 2 * found):
            fits[stayed] = found
    if not fits:
        return None
    at = min(fits, key=lambda one: fits[one])
    by = " or ".join(str(one) for one in sorted({min(fits), max(fits)}))
    later = [row for row in rows if row[1] > at]
    said = _spread(later, weights)
    worst = max((one for one, *_ in later), key=lambda one: one.mean)
    return error(
        f"the engine's weights are no longer updated: they stay those of step {by}, although its weight version "
        "advances",
        worst.place,
        shown(f"mean |trainer - rollout| over the distance of the weights from step {at}'s, largest over least",
              fits[at], f"<= {STAYS:g}"),
        shown("the same by the version that is named", "infinite" if said == math.inf else said, f"< {STRAYS:g}"),
        shown("mean |trainer - rollout| by step", ", ".join(f"{one.mean:.3g}" for one in every[:12])),
        shown("steps compared", len(later)),
        cause="weight updates are acknowledged and not applied: a sync that fails silently, a process or replica that "
        "still holds the old weights; samples are older than any limit on staleness or importance weight assumes",
        next_step=worst.command,
        steps=[one.step for one, *_ in later],
    )  # fmt: skip


def _of_other_versions(every: list[_StepGap]) -> Finding | None:
    """Samples that name the newest weights in every step, and agree with the trainer's in the first steps alone."""
    told = [(one.step, one.version) for one in every if one.step is not None and one.version is not None]
    if len(told) < len(every) or len({step - version for step, version in told}) > 1:
        return None
    fresh = next((at for at, one in enumerate(every) if one.mean > AGREES), len(every))
    late = every[fresh:]
    least = max(DISAGREE, 10 * max((one.mean for one in every[:fresh]), default=math.inf))
    if len(late) < RESTS or min(one.mean for one in late) < least or np.median([one.mean for one in late]) < 2 * least:
        return None
    worst = max(late, key=lambda one: one.mean)
    if worst.mean > OLDEST:
        return None  # no age makes as much of a policy that learns
    return error(
        f"samples are not of the weights that their version names: they agree with the trainer's in the first {fresh} "
        f"step{'s' * (fresh > 1)}, and are {worst.mean:.3g} nats per token apart later, as {fresh} "
        f"update{'s' * (fresh > 1)} old or more",
        worst.place,
        shown("mean |trainer - rollout| by step", ", ".join(f"{one.mean:.3g}" for one in every[:12]), "as at first"),
        shown("weight version less step, in every step", float(told[0][1] - told[0][0])),
        cause="the version is stamped when samples are trained on, or counts the trainer's steps, while the engine "
        "samples with weights some updates older (a queue, a sync that lags): nothing corrects for their age",
        next_step=worst.command,
        steps=[one.step for one in late],
    )


def _is_off_at_first(series: Series) -> bool:
    """Whether the first step of a run has a gap that old weights cannot make: all weights are one there."""
    limit, first = LIMITS.get(series.signal), series.points[0]
    begins = first.step is not None and first.step <= 1
    return limit is not None and limit.side > 0 and begins and first.value > AT_FIRST * limit.warning


@rule("D13", "engine and trainer drift apart without an update", link="rollout_logprobs", scope="signals",
      needs=("learning_rate", "logprob_diff|rollout_k3|prob_diff|rollout_k1"),
      source="open-instruct#1473, vime#64")  # fmt: skip
@rule("D12", "engine and trainer drift apart", link="rollout_logprobs", scope="signals",
      needs=("logprob_diff|rollout_k3|prob_diff|rollout_k1",), explains=("D29",),
      source="trl#5312 (0.015 to 0.201), verl#7495, open-instruct#1473, vime#64")  # fmt: skip
def drifting(log: RunLog) -> Finding | None:
    """D12, D13. The distance between engine and trainer grows over the steps (at least 8, p < 0.005).

    Fivefold over its beginning (median of the first 3), and .005 nats, 5e-5 of k3, .001 of
    probability or .02 of k1 and more, while the weights move is D12: the engine keeps old weights.
    An error where a figure of the mismatch is past D09's limit for one, and the policy had not fallen apart before
    (L08); worth knowing alone where none is past .4 of what D09 warns of: any noise grows as tokens get unlikely.
    Where the logged age of the samples grows as well (D31), that is the cause, and this is skipped.
    Skipped where the first step of a run is past three times what D09 warns of: that gap is none of old weights.
    A rise while the learning rate is 0 (of any size) is D13: nothing is trained, so the engine itself drifts.
    Weights that stay behind part by every update. A gap that has come to less than a fiftieth of its end after a third
    of its way, or that no longer grows (its last quarter within 1.15 of its second), is worth knowing alone, and no
    cause is named; a warning where it rests past D09's limit for an error.
    """
    skip_if(
        (age := age_of(log)) is not None and len(age.finite) >= trends.MIN_STEPS and ever_older(log),
        "the logged age of the samples grows (D31): older weights are further apart",
    )
    series = next((s for name in HEARD if (s := log.get(name)) is not None), None)
    values = [] if series is None else series.finite
    if series is None or len(values) < trends.MIN_STEPS:
        raise Skip(f"needs the distance between engine and trainer at {trends.MIN_STEPS} steps or more")
    begun, now, z = trends.level(values[:3]), trends.level(values, 3), trends.drift(values)
    rate = log.get("learning_rate")
    still = rate is not None and rate.finite and not any(rate.finite)
    grown = now / begun if begun > 0 else math.inf
    if z <= trends.DRIFT_Z or (not still and (grown < JUMP or now < HEARD[series.signal])):
        return None
    finite = [point for point in series.points if math.isfinite(point.value)]
    mark = next((p for p in finite if p.value >= begun * JUMP), finite[-1])
    low = next((at for at, p in reversed([*enumerate(finite)]) if p.value < begun * JUMP), -1)
    # What a policy writes that has fallen apart lies where two precisions differ most.
    apart = falls_apart(log)
    late = apart is not None and (mark.step or 0) >= (apart[0] or 0)
    far = not late and any(
        limit.is_past(each, limit.error) for name, limit in LIMITS.items() for _, each in log.level(name)
    )
    if not still and _is_off_at_first(series):
        raise Skip("engine and trainer are apart in the first step, before any weights are old: D09 tells of it")
    # Far below what is worth saying of a run that has it from the first step on, any noise grows as tokens get unlikely
    # (one that the engine may not sample, another precision).
    heard = (
        still
        or series.signal not in LIMITS
        or any(
            limit.is_past(each, limit.warning if limit.side < 0 else FAINT * limit.warning)
            for name, limit in LIMITS.items()
            for _, each in log.level(name)
        )
    )
    since = finite[low + 1 :] if 0 <= low < len(finite) - 1 else finite
    slow = "" if still else _is_of_no_update([point.value for point in since])
    if slow:
        return finding(
            "warning" if far and "at rest" in slow else "info",
            f"engine and trainer come apart by and by: {series.name} grows from {begun:.3g} to {now:.3g}, {slow}",
            mark.where(series.name),
            replace(series.shown(grown, f"< {JUMP:g}"), name="growth"),
            shown("Mann-Kendall z", z, f"< {trends.DRIFT_Z}"),
            id="D12",
            cause="not weights that stay behind, which part from the first updates on and by every one: tokens that "
            "the engine may not write (banned or reserved ids) and that the policy comes to give weight to; a "
            "precision that costs more as tokens get unlikely; a policy that drifts to where both sides compute "
            "differently",
            next_step=TOLD_APART,
            steps=steps_of(since),
        )
    skips = None if still else _takes_no_time(log)
    return finding(
        "error" if far and not still else "warning" if heard else "info",
        f"{series.name} grows from {begun:.3g} to {now:.3g}"
        + (" although the learning rate is 0" if still else ": the engine does not hold the trainer's weights"),
        mark.where(series.name),
        replace(series.shown(grown, f"< {JUMP:g}"), name="growth"),
        shown("Mann-Kendall z", z, f"< {trends.DRIFT_Z}"),
        *(
            []
            if skips is None
            else [shown("seconds that update_weights takes", skips[1], f"about {skips[0]:g}", f"since line {skips[2]}")]
        ),
        id="D13" if still else "D12",
        cause="nothing is trained: the engine's caches or kernels drift, or weights change on the way to it"
        if still
        else "the engine samples with old weights: from some step on their sync takes no time, and sends none"
        if skips is not None
        else "the engine samples with old weights: the sync does not reach it (LoRA not delivered, a renamed "
        "parameter); or with others than the trainer computes with (an adapter that is applied twice or with another "
        "scale, weights that are merged or cast on the way). The log does not tell which",
        next_step=TOLD_APART
        if still
        else "rldbg record -- YOUR COMMAND, then rldbg replay rldbg-dump --model STEP_A --model STEP_B "
        "--against rollout_logprobs ranks which weights sampled the tokens",
        steps=steps_of(finite[low + 1 :] or finite[-3:]),
    )


#: What a trainer says of each sync of the weights; what is left of its time where nothing is sent, and such syncs.
_SYNCED = regex(r"\bTimer update_weights end \(elapsed time: (\d+(?:\.\d+)?)s")
NO_TIME, SYNCS = 0.1, 3


def _takes_no_time(log: RunLog) -> tuple[float, float, int] | None:
    """The seconds of a sync before, those since it takes none to the end of the log, and the line from which on."""
    told = [
        (float(match[1]), one.point.line or 0) for one in log.events("phase") if (match := _SYNCED.search(one.text))
    ]
    since = len(told)
    while since and told[since - 1][0] <= NO_TIME * median(seconds for seconds, _ in told[:SYNCS]):
        since -= 1
    if since < SYNCS or len(told) - since < SYNCS:
        return None
    return (
        median(seconds for seconds, _ in told[:since]),
        median(seconds for seconds, _ in told[since:]),
        told[since][1],
    )


#: Of where it comes to, what a gap of old weights has come to after a third of its way (it grows with the updates, or
#: with their square while the rate warms up: a ninth), and by how much its last quarter lies over its second.
EARLY, GROWS_ON, QUARTER = 0.02, 1.15, 4


def _is_of_no_update(values: list[float]) -> str:
    """Why a gap that has grown is none of weights that stay behind, in words; empty where it may be."""
    if len(values) < 3 * QUARTER:
        return ""
    now = median(values[-QUARTER:])
    third = len(values) // 3
    if median(values[max(third - 1, 0) : third + 2]) < EARLY * now:
        return "most of it at the end"
    quarter = len(values) // QUARTER
    before = median(values[quarter : 2 * quarter])
    return "and is at rest since" if median(values[-quarter:]) < GROWS_ON * before and values[0] < before else ""


#: Nats per token that no precision, temperature or update makes: two models of one text are as far apart.
TWO_MODELS = 1.0
#: Steps of it, and the share of responses cut off that says they say nothing.
FEWEST, CUT = 3, 0.9
#: In a dump, the correlation under which two sides do not speak of one distribution.
UNRELATED = 0.5


@rule("L38", "the engine writes with other weights", link="trend", scope="signals",
      needs=("logprob_diff|rollout_k3|rollout_k1",), lasts=True,
      explains=("D01", "D02", "D03", "D09", "D12", "D18", "D20", "D25", "D26", "D94", "L08", "L09",
               "L17"),
      source="slime#1673, verl#7495: an engine that was never given the checkpoint")  # fmt: skip
def foreign(log: RunLog) -> Finding | None:
    """A mismatch of engine and trainer over 1 nat per token in each of the first 3 steps and as its level, while the
    reward is one number in every step, or nine of ten responses are cut off from the first step on: an error, and the
    cause of both. The first step's samples are older than any update. Without either, log-probabilities of other tokens
    (shifted, re-tokenised) look the same, and D09 tells of them.
    """
    series = next((found for name in ("logprob_diff", "rollout_k3", "rollout_k1") if (found := log.get(name))), None)
    values = [] if series is None else [abs(value) for value in series.finite]
    if series is None or len(values) < FEWEST:
        raise Skip(f"needs the mismatch of {FEWEST} steps")
    if min(values[:FEWEST]) < TWO_MODELS or trends.level(values) < TWO_MODELS:
        return None
    symptoms = _symptoms(log)
    if not symptoms:
        return None
    return error(
        f"the engine writes with other weights than the trainer has: {series.name} is {values[0]:.3g} nats per token "
        "from the first step on, and what it writes earns nothing",
        series.place,
        series.shown(values[0], f"< {TWO_MODELS:g} even of an odd setting"),
        *symptoms,
        cause="the engine holds another model than the trainer: weights that were never loaded or sent (a dummy load "
        "format, a sync that fails silently), another checkpoint, or another tokenizer or chat template for its "
        "prompts. Constant rewards and responses that do not end follow from it",
        next_step="compare what both sides say of one fixed text before the first step; rldbg record -- YOUR COMMAND, "
        "then rldbg diagnose rldbg-dump",
        steps=steps_of(point for point in series.points if abs(point.value) > TWO_MODELS),
    )


def _symptoms(log: RunLog) -> list[Evidence]:
    """What a model that writes nonsense comes to, from the first step on."""
    found = []
    for name in ("reward", "accuracy"):
        series: Series | None = log.get(name) if log.has(name) else None
        values = [] if series is None else series.finite
        if series is not None and len(values) >= FEWEST and min(values) == max(values):
            found.append(shown(f"{series.name}, in every step", values[0], "another number in every step"))
            break
    cut = log.get("truncated")
    if cut is not None and len(cut.finite) >= FEWEST and min(cut.finite[:FEWEST]) >= CUT:
        found.append(shown(f"{cut.name} in the first step", cut.finite[0], "< 0.25"))
    return found


@rule("L38", "the engine writes with other weights", link="trend", scope="case", lasts=True,
      source="slime#1673: a checkpoint that was converted wrongly for the engine")  # fmt: skip
def foreign_samples(case: Case) -> Finding | None:
    """Recorded samples: mean |d| over 1 nat per token from the first step on, in every step, and over .03 in all but a
    tenth of the rows; the trainer gives the tokens 1 nat less than the engine, and the two do not rise and fall
    together (correlation under .5, at no shift either); and nothing that is written earns another reward than the
    rest, or nine of ten responses are cut off. An error, and the cause of the others. A policy that learns on what
    its own engine wrote earns something; log-probabilities that are mixed up afterwards leave the responses as they
    are.
    """
    seen: list[tuple[Gap, Where, int | None]] = []
    rewards: set[float] = set()
    cut: list[bool] = []
    for batch in case.batches():
        if (between := gap_of(batch)) is None:
            continue
        tokens = np.flatnonzero(between.both_N)
        seen.append((between, batch.laid.where("rollout_logprobs", at=int(tokens[0])), batch.step))
        rewards |= set() if batch.reward_B is None else set(batch.reward_B[np.isfinite(batch.reward_B)].tolist())
        cut_B = truncated(batch)
        cut += [] if cut_B is None else cut_B.tolist()
    skip_if(not seen, "needs rollout and trainer log-probabilities")
    if not all(_are_two_models(between) for between, _, _ in seen):
        return None
    symptoms = []
    if len(rewards) == 1:
        symptoms.append(shown("reward of every response", rewards.pop(), "others among them"))
    if cut and float(np.mean(cut)) >= CUT:
        symptoms.append(shown("share of responses cut off", float(np.mean(cut)), "< 0.25"))
    if not symptoms:
        return None
    first, place, _ = seen[0]
    return error(
        "the engine writes with other weights than the trainer has: they disagree by "
        f"{first.mean:.3g} nats per token from the first step on, in all rows, and what it writes earns nothing",
        place,
        shown("mean |trainer - rollout| in the first step", first.mean, f"< {DISAGREE} nats"),
        shown("mean trainer - rollout", float(first.d.mean()), "0"),
        shown("correlation", first.correlation, "> 0.9"),
        shown("least mean |trainer - rollout| of a step", min(between.mean for between, _, _ in seen)),
        *symptoms,
        cause="the engine holds another model than the trainer: weights that were converted wrongly for it (rows of a "
        "head or an embedding moved, a tensor under another name), never loaded (a dummy format), or another "
        "checkpoint, tokenizer or prompt. Responses that do not end and constant rewards follow from it",
        next_step=first.batch.laid.mismatch_command(),
        steps=[step for _, _, step in seen],
    )


def _are_two_models(between: Gap) -> bool:
    rows = between.by_sample_B[np.isfinite(between.by_sample_B)]
    return (
        between.mean > TWO_MODELS
        and -float(between.d.mean()) > TWO_MODELS
        and not between.is_shifted
        and not between.correlation > UNRELATED
        and float((rows > DISAGREE).mean()) >= CUT
    )
