"""The tokens themselves: responses cut off, degenerate, or not the ones that were sampled."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any

import numpy as np

from replay_core import pages
from replay_core.diagnose import trends
from replay_core.diagnose.algorithm import filters_overlong
from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.case import Case
from replay_core.diagnose.earlier import fresh_weights, grown_lengths, names_in, noisy_policy
from replay_core.diagnose.falling_apart import falls_apart, runs_into_the_limit
from replay_core.diagnose.finding import Evidence, Finding, error, finding, listed, share, shown, warning
from replay_core.diagnose.flat import Array
from replay_core.diagnose.log_steps import steps_of
from replay_core.diagnose.resting import rests
from replay_core.diagnose.rule import Skip, given, rule, skip_if
from replay_core.diagnose.rules.entropy import ENTROPY_MIN
from replay_core.diagnose.rules.learning import harder_prompts, learns_between
from replay_core.diagnose.sheets import Sheet
from replay_core.diagnose.short_limits import short_limit
from replay_core.diagnose.signals import Point, RunLog, Series
from replay_core.samples.batch import SAMPLED_MASKS

#: Share of cut-off responses worth saying (miles advisory), and from which hardly any ends.
MANY, MOST = 0.25, 0.97
#: Of a log, the share of cut responses that is a warning as a habit of many steps.
MOSTLY, HABIT = 0.85, 16
#: The share of cut responses in every one of a few steps from which it is one, too.
ALL_BUT = 0.98
#: Below this share of cut responses a run may do well with them.
HALF = 0.5
#: No response is longer: what claims so is no count of tokens.
MOST_TOKENS = 1e9
#: The share of cut responses that leaves a batch without a reward, and that does where none of them earns anything.
CUT_OFF, LAMED = 0.9, 0.7
#: Fewer responses than this all being cut off is chance.
FEWEST = 4
#: One token being more than this of everything written is no language.
DEGENERATE = 0.5
#: And from where it is all that is written.
NOTHING_ELSE = 0.95
#: Mean length below which a share of one token says nothing: `yes <end>` is half end.
LONG_ENOUGH = 8


def truncated(batch: StepBatch) -> Array | None:
    """Which responses were cut off at the length limit: as the dump says, else no end token at the largest length."""
    if (stated_B := batch.truncated_flag_B) is not None:
        return stated_B
    if batch.response_N is None or batch.tokens_N is None or not batch.tokens_N.size:
        return None
    counts_B = batch.flat.count(batch.response_N)
    longest_B: Array = (counts_B == counts_B.max()) & (counts_B > 1)
    last_B = batch.tokens_N[np.maximum(batch.flat.starts_B + batch.flat.lengths_B - 1, 0)]
    if batch.eos_id is not None:
        cut_B: Array = longest_B & (last_B != batch.eos_id)
        return cut_B
    if batch.pad_id is not None and (last_B == batch.pad_id).any():
        return None
    # Nothing shorter ended on one id: of equally long responses, different last tokens are no end token.
    if not longest_B.all() or np.unique(last_B).size < max(2, len(last_B) // 4):
        return None if longest_B.all() else longest_B
    return longest_B


@rule("D20", "responses are cut off", link="tokens", scope="case",
      explains=("D01", "D02", "D03", "D23", "L01"),
      source="autocontext#1067, ms-swift#4950; a quarter: miles advisory")  # fmt: skip
def cut_off(case: Case) -> Finding | None:
    """Share of responses without an end token at the length limit, over all steps looked at.

    97 % (and at least 4) is a warning, an error where the rewards have no spread either: then it is why. From 0.25
    on it is a warning where all of them have the lowest reward and others earn more, unless the run states that it
    masks them; else worth saying (info): the share alone is normal for a policy that has not learnt to stop. An
    error, and the cause of groups without a spread, where nine of ten responses (or seven, if all of these have the
    lowest reward) are cut and half of the steps (2 and more) have not one reward above the lowest.
    """
    cut, total, spread, first, steps = 0, 0, 0.0, None, []
    least: list[tuple[float, float]] = []
    lowest, best_cut, mean_ended = np.inf, -np.inf, []
    for batch in case.batches():
        cut_B = truncated(batch)
        if cut_B is None or not len(cut_B):
            continue
        cut, total = cut + int(cut_B.sum()), total + len(cut_B)
        rewards_B = batch.reward_B
        if rewards_B is None:
            spread = np.inf
        elif np.isfinite(rewards_B).any():
            spread = max(spread, float(np.nanmax(rewards_B) - np.nanmin(rewards_B)))
            lowest = min(lowest, float(np.nanmin(rewards_B)))
            least.append((float(np.nanmin(rewards_B)), float(np.nanmax(rewards_B))))
            best_cut = max([best_cut, *rewards_B[cut_B & np.isfinite(rewards_B)].tolist()])
            mean_ended += rewards_B[~cut_B & np.isfinite(rewards_B)].tolist()
        if cut_B.any():
            steps += [] if batch.step is None else [batch.step]
            first = first or batch.laid.where("response_ids" if batch.columns.ref("response_ids") else "input_ids",
                                         sample=cut_B)  # fmt: skip
    skip_if(not total, "needs responses and either their end token or what stopped them")
    if cut / total < MANY or first is None:
        return None
    every, most = cut == total and total >= FEWEST, cut >= MOST * total and total >= FEWEST
    dead = sum(high <= lowest for _, high in least)
    pays = cut >= FEWEST and best_cut <= lowest and bool(mean_ended) and float(np.mean(mean_ended)) > lowest
    masked = pays and filters_overlong(case.algorithm)
    starves = dead >= 2 and 2 * dead >= len(least) and cut >= (LAMED if pays else CUT_OFF) * total
    return finding(
        "error" if (spread == 0 and (most or pays)) or starves else "warning" if most or pays > masked else "info",
        f"{'all' if every else share(cut, total)} responses are cut off at the length limit"
        + (": none ever ends" if every else ", and each of them earns the lowest reward" if pays else "")
        + (", and they are masked, as the run states" if masked else "")
        + (f", and in {share(dead, len(least))} steps none of them earns anything" if starves and spread else ""),
        first,
        shown("share of responses cut off", cut / total, "< 0.25", "end tokens and lengths of the responses"),
        shown("responses", total),
        cause="the limit on new tokens is too small, or the end token is not among those the engine stops at"
        if every
        else "the limit on new tokens is reached often (it is too small, or the policy does not stop); where the "
        "reward needs an end, those responses earn nothing",
        steps=tuple(sorted(set(steps))),
    )


@rule("D20", "responses are cut", link="tokens", scope="signals", needs=("truncated",),
      source="miles advisory (0.25); autocontext#1067")  # fmt: skip
def cut_off_in_log(log: RunLog) -> Finding | None:
    """Level of the fraction of responses that end at the token limit: 0.25 and more a warning, 1 an error.

    The share alone is no harm: it is info below 0.5 where neither it grows nor the reward falls, and below 0.85 while
    the reward gains (a third of all it spans, from its first third to its last, 8 steps and more), unless something
    below tells of a cause.
    Where the same steps show that rewards still differ within groups, the cut responses teach something, and it is
    info; so it is below 0.5 where a reward over 0 does not fall over 8 steps and more, and no more are cut than before
    (an agent's limit of turns); a warning where a quarter is cut in each third of 100 steps and more in which the
    reward does not rise (two fifths of 8 lines and more over 40 steps, whose reward stays below .2), and where hardly
    any ends (0.97, in 8 steps and more; 0.85, in 16; 0.98 in each of 2 and more, their mean length within .01 of the
    limit; mean and longest response one number in 8 steps and more: all run to the limit, whatever share of them is
    counted as cut). With a reward of 0 for all of them it is the cause of D01. A warning at most where hardly any was
    cut at first and the reward was lost as they came to be (L08): the policy falls apart. Skipped where the longest
    response is one token: each ends at the limit, as it is meant to; and where what is logged is above 1, which is no
    fraction (L30). Responses that grow into the limit (to 1.3 times, hardly any cut at first, both by more than
    chance), or an entropy over 2.5 nats in every step beside hardly any reward, are told as the cause: no limit is too
    small there.
    """
    series, now = next(log.level("truncated"), (None, 0.0))
    if series is None:
        raise Skip("the fraction of truncated responses is not finite in any step")
    skip_if(now > 1 + 1e-6, f"{series.name} is {now:.3g}, which is no fraction of responses")
    if now < MOST and (short := _below_the_stated(log, series)) is not None:
        return short
    if now < MANY:
        return None
    longest = [level for name in ("response_length_max", "response_length") for _, level in log.level(name)]
    skip_if(longest and max(longest) <= 1, "responses are of one token: each of them ends at the limit")
    spread = next((s for s in log.all("reward_std") if s.formula == "within-group"), None)
    zero = next((level for _, level in log.level("frac_zero_std")), 1.0)
    teaches = zero < 0.5 if spread is None else bool(spread.finite) and trends.level(spread.finite) > 0
    count = len(series.finite)
    reward = log.get("reward")
    holds = (
        now < HALF and count >= trends.MIN_STEPS and reward is not None and trends.level(reward.finite) > 0
        and trends.drift(reward.finite) > -trends.DRIFT_Z and trends.drift(series.finite) < trends.DRIFT_Z
    )  # fmt: skip
    teaches = teaches or holds
    always = (now >= MOST and count >= trends.MIN_STEPS) or (now >= MOSTLY and count >= HABIT)
    # Of fewer steps: hardly any response has ended in any of them, and the mean is next to the limit.
    always = always or (count >= 2 and min(series.finite) >= ALL_BUT and _at_the_limit(log))
    # What is counted as cut has no end token in its last place: an end that nobody heeds may stand there by chance.
    pinned = _of_one_length(log)
    always = always or pinned is not None
    apart = runs_into_the_limit(log) is not None
    always = always or (count >= HABIT and now >= NEARLY and _all_along(series, NEARLY))
    grown, noise = (None, None) if pinned is not None or apart else (grown_lengths(log, series), noisy_policy(log))
    fresh = fresh_weights(log) if noise else None
    idle = _all_along(series, MANY) and rests(log) is not None
    idle = idle or (_all_along(series, OFTEN) and _earns_little(reward))
    nothing = [Evidence("reward", 0.0, None, reward.source) for reward, level in log.level("reward") if level == 0]
    # The same share from the start, or one that costs no reward: the policy does well with it.
    gains = now < MOSTLY and count >= trends.MIN_STEPS and _gains(reward)
    loses = reward is not None and trends.drift(reward.finite) < -trends.DRIFT_Z
    told = pinned is not None or apart or idle or bool(grown) or bool(noise)
    harmless = not told and (gains or (now < HALF and not loses and not trends.rises(series.finite)))
    return finding(
        ("warning" if (always or idle) and not harmless else "info")
        if teaches
        else "error"
        if (now >= 1 or nothing) and not apart
        else "info"
        if harmless
        else "warning",
        f"{now:.0%} of the responses are cut at the token limit"
        + _from_the_start(series, longest)
        + (
            f": the policy samples noise, its entropy is {noise:.3g} nats per token from the first step on"
            + ("" if fresh is None else f", and {names_in(fresh.text)} begins at random")
            if noise
            else f": responses grow from {grown[0]:.3g} to {grown[1]:.3g} tokens, into the limit"
            if grown
            else ""
        )
        + (f", and the reward does not rise in {len(given(reward).finite)} lines" if idle else "")
        if pinned is None
        else f"every response is {pinned:g} tokens long in every step: all run to the limit, and no end token ends one "
        f"({now:.0%} are counted as cut)",
        next(p for p in series.points if p.value >= MANY).where(series.name),
        series.shown(now, f"< {MANY}"),
        *nothing,
        cause="the policy no longer ends its answers: hardly any was cut at first, and the reward was lost with it"
        if apart
        else "the engine does not stop at the end token (ignore_eos, another id), or the limit is far too small"
        if pinned is not None
        else "weights that the checkpoint does not hold were newly initialized as the model was loaded (line "
        f"{fresh.point.line}): {names_in(fresh.text)}. The policy begins at random, and what it samples does not "
        "depend on the prompt"
        if noise and fresh is not None
        else "the sampling temperature is far too high (or the weights are not those of a trained model): what is "
        "sampled hardly depends on the prompt, and ends by chance"
        if noise
        else "the reward pays for length, or loses nothing by it: the policy writes ever longer answers until they are "
        "cut. A larger limit moves the end, and does not stop it"
        if grown
        else "the limit is too small for this task, or the model does not end its answers (no EOS is trained)"
        + ("; a judge that finds no answer gives 0 to all" if nothing else ""),
        next_step=(
            "compare the names with the checkpoint's: rldbg show CHECKPOINT; "
            if noise and fresh is not None
            else "lower the temperature, and read ten responses; "
            if noise
            else "plot reward against length within groups, and punish length (overlong shaping) or score answers; "
            if grown
            else ""
            if apart
            else "raise the token limit, and see whether the responses would end; "
        )
        + "rldbg record -- YOUR COMMAND, then rldbg diagnose rldbg-dump --rule D19",
        steps=steps_of(p for p in series.points if p.value >= MANY),
    )


#: The share of responses that a limit below the stated one cuts, in the mean of the steps, from which it matters.
_SOME = 0.05


def _below_the_stated(log: RunLog, series: Series) -> Finding | None:
    """That responses are cut by another limit than the one that is stated."""
    short, cut = short_limit(log), sum(series.finite) / len(series.finite)
    if short is None or cut < _SOME:
        return None
    return warning(
        f"responses are cut at {short.tokens:g} tokens, though {short.name} is {short.stated:g}: the longest of "
        f"{len(short.steps)} of {len(short.longest.points)} steps has that length, and {cut:.0%} of all are cut there",
        short.steps[0].where(short.longest.name),
        short.longest.shown(short.tokens, f"{short.name} = {short.stated:g}"),
        shown(f"{series.name}, mean of all steps", cut, f"< {_SOME:g}", series.source),
        cause="another limit holds than the one that is stated"
        + (f": {short.why}" if short.why else "")
        + ". The engine has limits of its own (max_tokens of its sampling parameters; max_model_len or max_seq_length "
        "less the prompt), and the smallest of them cuts",
        next_step=f"print the sampling parameters that the engine is handed, and its context length; give it room for "
        f"prompt and {short.stated:g} tokens, or lower {short.name} to what is meant",
        steps=steps_of(short.steps),
    )


#: The share of which hardly an answer is left, where it holds in each third of the run.
NEARLY = 0.75
#: Of few lines: the share that is cut, lines and steps of them, and a share of the best reward that is little.
OFTEN, FEW_LINES, FEW_STEPS, LITTLE = 0.4, 8, 40, 0.2


def _earns_little(reward: Series | None) -> bool:
    """Whether a reward that is a share stays small over 8 lines and 40 steps."""
    values = [] if reward is None else reward.finite
    if reward is None or len(values) < FEW_LINES:
        return False
    first, last = reward.points[0].step, reward.points[-1].step
    is_long = first is not None and last is not None and last - first >= FEW_STEPS
    return is_long and min(values) >= 0 and 0 < max(values) < LITTLE and not trends.rises(values)


def _all_along(series: Series, least: float) -> bool:
    """Whether that share and more of the responses is cut in the mean of each third of the run."""
    third = max(1, len(series.finite) // 3)
    parts = [series.finite[:third], series.finite[third:-third], series.finite[-third:]]
    return all(sum(part) >= least * len(part) for part in parts if part)


def _at_the_limit(log: RunLog) -> bool:
    """Whether the mean length lies within a hundredth of the longest response of each step."""
    mean, longest = log.get("response_length"), log.get("response_length_max")
    if mean is None or longest is None or len(mean.finite) != len(longest.finite):
        return False
    return all(each >= 0.99 * top for each, top in zip(mean.finite, longest.finite, strict=True))


def _of_one_length(log: RunLog) -> float | None:
    """The length, in tokens, of every response in each of 8 steps and more: mean and longest are one number in all."""
    mean, longest = log.get("response_length"), log.get("response_length_max")
    if mean is None or longest is None or len(mean.finite) < trends.MIN_STEPS:
        return None
    lengths = {*mean.values, *longest.values}
    return mean.finite[0] if len(lengths) == 1 and len(mean.values) == len(longest.values) else None


#: What the share that is cut was at first, over what it has come to, before it has grown; and lines before that shows.
BEGUN, MOST_OF_LINES = 0.85, 6


def _from_the_start(series: Series, longest: list[float]) -> str:
    """What it adds that they were from the first step on."""
    if min(series.finite[:3]) < HALF:
        return ""
    # A mean of prompt and response, or over steps of several limits, is no limit.
    is_limit = bool(longest) and max(longest) < MOST_TOKENS and abs(max(longest) - round(max(longest))) <= 1e-6
    limit = f" of {max(longest):g}" if is_limit else ""
    begun, now = sum(series.finite[:3]) / 3, trends.level(series.finite)
    if len(series.finite) > MOST_OF_LINES and begun < BEGUN * now and trends.rises(series.finite):
        return f", {begun:.0%} in the first steps: fewer and fewer end within the limit{limit}"
    return f" from the first step on: the limit{limit} is too small for the answers, or they never end"


@rule("D26", "degenerate output", link="tokens", scope="batch", needs=("tokens", "response"),
      explains=("D01", "D03", "D18", "D19", "D20"),
      source="verl#2626 (`!!!!` from NaN weights); slime repetition_frac")  # fmt: skip
def degenerate(batch: StepBatch) -> Finding | None:
    """Share of the most frequent token among all response tokens. Above 0.5 is a warning, an error above 0.95
    and where it is id 0: what sampling from NaN logits gives. Skipped where responses are short on average (below 8
    tokens). Where all responses are of one length and end in a run of it, it is an end that nobody heeds. Where nothing
    says which slots are padding, only the tokens in the loss are looked at.
    """
    tokens_N, response_N = given(batch.tokens_N), given(batch.response_N)
    if not batch.spine.padding_known and batch.trained_N is not None:
        response_N = response_N & batch.trained_N
    written = tokens_N[response_N]
    skip_if(written.size < LONG_ENOUGH * max(1, len(batch)), "responses are shorter than 8 tokens on average")
    ids, counts = np.unique(written, return_counts=True)
    most, top = int(ids[counts.argmax()]), float(counts.max() / written.size)
    if top <= DEGENERATE or most == batch.pad_id:
        return None
    place = batch.laid.where("input_ids", at=response_N & (tokens_N == most))
    unheeded = top < NOTHING_ELSE and _ends_in(batch, response_N, most)
    return finding(
        "error" if most == 0 or top >= NOTHING_ELSE else "warning",
        f"token {most} is {top:.0%} of everything that was written"
        + (": a run of it ends every response, and all are of one length" if unheeded else ""),
        place,
        shown("share of the most frequent token", top, "<= 0.5", f"responses of {batch.name}"),
        shown("token id", most),
        shown("different tokens", ids.size),
        cause="sampling from NaN logits returns id 0: look for the first non-finite weight of the step before"
        if most == 0
        else "generation goes on after the end token (EOS) up to the limit: the engine ignores it (ignore_eos, an id "
        "that is not among its stop tokens); or the policy repeats itself"
        if unheeded
        else "the policy repeats itself: collapsed entropy, or broken weights in the engine",
    )


def _ends_in(batch: StepBatch, response_N: Array, token: int) -> bool:
    """Whether every response has as many tokens, and nine of ten end in two and more of that one."""
    tokens_N = given(batch.tokens_N)
    rows = [tokens_N[span][response_N[span]] for span in batch.flat.spans]
    if len({len(row) for row in rows}) != 1 or len(rows[0]) < 2:
        return False
    alike = sum(1 for row in rows if bool((row[-2:] == token).all()))
    return alike >= 0.9 * len(rows)


@rule("D27", "trained tokens are not the sampled ones", link="tokens", scope="batch", needs=("tokens",),
      explains=("D09", "D12", "D14", "D39", "D41"), lasts=True,
      source="trl#5224, rllm#272, ms-swift#10012, verl#6719")  # fmt: skip
def retokenised(batch: StepBatch) -> Iterator[Finding]:
    """The same samples with other token ids in the rollout's records than in the trainer's: text went out, was decoded,
    and came back in as other tokens. Samples are the same by their id; without ids, where two records of one step hold
    as many samples, and half of them and more are equal to the token (an eighth where rows are in one order, and those
    that differ have equal prompts). Any mismatch is an error: such records do not join, and what compares rollout and
    trainer cannot look. Or the ids that the engine sampled are recorded beside those that are trained on, and differ
    inside a response: an error, too, token by token, or row by row where an eighth of the rows and more are equal (what
    is cut off or appended is no difference).
    """
    beside = _sampled_beside(batch) or _sampled_rows_beside(batch.once)
    if beside is not None:
        yield from beside
        return
    own, looked = _ids_by_sample(batch.spine), False
    for sheet in batch.strangers:
        theirs = _ids_by_sample(sheet)
        shared = sorted(set(own) & set(theirs))
        pairs = [(own[name], theirs[name]) for name in shared] or _in_part(batch, sheet)
        looked = looked or bool(pairs)
        different = [
            (mine, other)
            for mine, other in pairs
            if other < 0 or not np.array_equal(batch.spine.tokens(mine), sheet.tokens(other))
        ]
        if not different:
            continue
        mine, other = different[0]
        evidence = [shown("sample id", next((name for name in shared if own[name] == mine), str(mine)))]
        if other >= 0:
            a, b = batch.spine.tokens(mine), sheet.tokens(other)
            size = min(a.size, b.size)
            apart = np.flatnonzero(a[:size] != b[:size])
            source = batch.spine.parts[0].held.record.path.name
            evidence.append(shown("first token that differs", int(apart[0]) if apart.size else size, None, source))
            evidence.append(shown("tokens", a.size, str(b.size), source))
        prompts = _prompts_differ(batch, sheet, different)
        theirs_in, own_in = _named_apart(sheet, batch.spine)
        yield error(
            f"{share(len(different), len(pairs))} samples have other token ids in {theirs_in} than "
            f"in {own_in}: the two do not join" + (f", {prompts}" if prompts else ""),
            batch.laid.where("input_ids", sample=mine),
            *evidence,
            cause="the prompt is built twice, and not alike: another chat template, a generation prompt that one side "
            "adds, a BOS, or a prompt that is cut; the responses are the sampled ones"
            if prompts
            else "re-tokenised: responses are decoded to text and encoded again between engine and trainer",
            next_step=batch.laid.mismatch_command(),
        )
        return
    skip_if(not looked and len(batch.columns.sheets) < 2, "the step holds no second record of the same samples")


def _named_apart(one: Sheet, other: Sheet) -> tuple[str, str]:
    """What two sheets are called; their folders where neither is of a stage."""
    if one.name != other.name:
        return one.name, other.name
    a, b = (sheet.parts[0].held.record.path for sheet in (one, other))
    return (f"{a.parent.name}/", f"{b.parent.name}/") if a.parent != b.parent else (a.name, b.name)


#: How far engine and trainer part where they speak of other tokens.
PARTED = 0.05
#: Under which names what the engine sampled stands beside what is trained on.
_SAMPLED = (
    "rollout_input_ids", "rollout_token_ids", "sampled_input_ids",
    "sampled_token_ids", "sampled_tokens", "sampled_ids", "engine_token_ids", "engine_input_ids", "vllm_token_ids",
    "raw_token_ids", "output_ids", "output_token_ids", "output_tokens", "generated_ids", "generated_token_ids",
    "generation_ids", "rollout_output_ids", "rollout_response_ids", "sampled_response_ids",
)  # fmt: skip


def _sampled_beside(batch: StepBatch) -> list[Finding] | None:
    """What the sampled ids that are recorded per token say beside the trained ones; None where none are recorded."""
    # One number of each sample is a count (`output_tokens`) or a number of its own, no ids.
    named = (name for name in _SAMPLED if batch.columns.per_sample(name) is None)
    sampled = next((found for name in named if (found := batch.columns.of(name)) is not None), None)
    if sampled is None or batch.tokens_N is None or batch.response_N is None:
        return None
    both_N = batch.response_N & sampled.said_N & np.isfinite(sampled.values_N)
    apart_N = both_N & (sampled.values_N != batch.tokens_N)
    # Ids of rows of another layout share hardly any: those are no second record of these samples.
    if both_N.sum() < FEWEST or float(apart_N.sum()) > 0.9 * float(both_N.sum()):
        return None
    if not apart_N.any():
        return []
    rows = int((batch.flat.count(apart_N) > 0).sum())
    at = int(np.flatnonzero(apart_N)[0])
    return [
        error(
            f"the token ids trained on are not those that were sampled: {int(apart_N.sum())} tokens differ, in "
            f"{share(rows, len(batch))} responses",
            batch.laid.where("input_ids", at=at),
            shown("tokens that differ", int(apart_N.sum()), "0", sampled.source),
            shown("first: sampled", int(sampled.values_N[at])),
            shown("first: trained on", int(batch.tokens_N[at]), str(int(sampled.values_N[at]))),
            cause="re-tokenised: responses are decoded to text and encoded again between engine and trainer, into "
            "other tokens than were sampled; log-probabilities of the engine are then of other tokens. Train on the "
            "engine's own ids",
            next_step=batch.laid.mismatch_command(),
        )
    ]


#: Under which names the engine's answers stand as rows of their own, padded on the right.
_ANSWERS = ("completion_ids", "completion_token_ids", "response_ids", "response_token_ids", "responses")


def _sampled_rows(batch: StepBatch) -> tuple[str, list[Array]] | None:
    """What the engine sampled, a row for each sample without the padding, and under which name it is recorded."""
    for sheet, places in batch.columns.sheets:
        # Beside prompts they are what the rows are put together of, and no second record.
        are_parts = any(sheet.refs(each) for each in ("prompt_ids", "prompts"))
        for name in _SAMPLED if are_parts else (*_SAMPLED, *_ANSWERS):
            refs = sheet.refs(name)
            if not refs or any(ref.is_text or len(ref.shape) != 2 for ref in refs):
                continue
            at = [sheet.index[place] for place in places if place is not None]
            if len(at) < len(batch) or any(
                ref.shape[0] != len(part) for ref, part in zip(refs, sheet.parts, strict=True)
            ):
                continue
            grids = [pages.array(ref) for ref in refs]
            rows = [np.asarray(grids[part][row]) for part, row in at]
            sizes_B = batch.columns.per_sample("sampled_lengths", "sampled_length", "completion_lengths")
            if sizes_B is not None:
                return name, [row[: int(size)] for row, size in zip(rows, sizes_B, strict=True)]
            masks = next((found for each in SAMPLED_MASKS if (found := sheet.refs(each))), None)
            if masks and [mask.shape for mask in masks] == [ref.shape for ref in refs]:
                marks = [pages.array(mask).astype(bool) for mask in masks]
                return name, [np.asarray(grids[part][row][marks[part][row]]) for part, row in at]
            pad = 0 if batch.pad_id is None else batch.pad_id
            return name, [row[: int(np.flatnonzero(row != pad).max(initial=-1)) + 1] for row in rows]
    return None


def _is_part(a: Array, b: Array) -> bool:
    """Whether one of two rows is the other without some of its tokens, or is as far as that goes, which may be cut off:
    tokens that were encoded anew are others.
    """
    return _goes_along(a, b) or _goes_along(b, a)


def _goes_along(some: Array, every: Array) -> bool:
    wanted, met, last = some.tolist(), 0, -1
    for at, token in enumerate(every.tolist()):
        if met < len(wanted) and token == wanted[met]:
            met, last = met + 1, at
    return met == len(wanted) or last == len(every) - 1


def _sampled_rows_beside(batch: StepBatch) -> list[Finding] | None:
    """What rows of sampled ids say of the responses that are trained on; None where none are recorded, or they do not
    lie as the responses do.
    """
    told = _sampled_rows(batch)
    tokens_N, response_N = batch.tokens_N, batch.response_N
    if told is None or tokens_N is None or response_N is None:
        return None
    name, rows = told
    own = [tokens_N[span][response_N[span]] for span in batch.flat.spans]
    if (trained_N := batch.trained_N) is not None:
        # What is cut off amid a tool's output ends in what no engine sampled.
        ends = [np.flatnonzero(trained_N[span][response_N[span]]).max(initial=-1) + 1 for span in batch.flat.spans]
        own = [row[:end] if end else row for row, end in zip(own, ends, strict=True)]
    mask = batch.columns.of("response_mask")
    if mask is not None:
        # Rows of what was sampled alone, beside answers that tools wrote into.
        marked_N = mask.said_N & (mask.values_N != 0)
        bare = [tokens_N[span][marked_N[span]] for span in batch.flat.spans]
        if sum(map(np.array_equal, bare, rows)) > sum(map(np.array_equal, own, rows)):
            own = bare
    apart = [np.flatnonzero(a[: len(b)] != b[: len(a)]) for a, b in zip(own, rows, strict=True)]
    # What is the other without some tokens is the same: behind a prompt, without a forced beginning or tool output.
    off = [row for row, each in enumerate(apart) if each.size and not _is_part(own[row], rows[row])]
    same = sum(min(len(a), len(b)) > 0 for a, b in zip(own, rows, strict=True)) - len(off)
    if same < max(2, IN_ORDER * len(own)):
        return None
    if not off:
        return []
    row, at = off[0], int(apart[off[0]][0])
    evidence = [
        shown(f"rows of {name} that differ", share(len(off), len(own)), "none"),
        shown("first: sampled", listed(rows[row][at : at + 4].tolist(), 4)),
        shown("first: trained on", listed(own[row][at : at + 4].tolist(), 4)),
    ]
    rollout, trainer = batch.columns.of("rollout_logprobs"), batch.trainer
    if rollout is not None and trainer is not None:
        both_N = batch.pair(rollout, trainer)
        far_N = both_N & (np.abs(np.where(both_N, rollout.values_N - trainer.values_N, 0.0)) > PARTED)
        far = np.flatnonzero(batch.flat.count(far_N))
        evidence.append(shown(f"rows in which engine and trainer part by {PARTED:g} nats, of those that differ",
                              share(len(set(far.tolist()) & set(off)), len(off))))  # fmt: skip
        evidence.append(shown("of the others", share(len(set(far.tolist()) - set(off)), len(own) - len(off))))
    return [
        error(
            f"the token ids trained on are not those that were sampled, in {share(len(off), len(own))} responses",
            batch.laid.where("input_ids", sample=row),
            *evidence,
            cause="re-tokenised: responses are decoded to text and encoded again between engine and trainer, into "
            "other tokens than were sampled; the engine's log-probabilities and the mask are then of other tokens, and "
            "behind the first that differs in length they lie at another place. Train on the engine's own ids",
            next_step=batch.laid.mismatch_command(),
        )
    ]


def _prompts_differ(batch: StepBatch, sheet: Sheet, different: list[tuple[int, int]]) -> str:
    """In words, how prompts differ where they alone do, by one number of tokens in every pair; else nothing."""
    longer = set()
    for mine, other in different:
        if other < 0:
            return ""
        a, b = batch.spine.tokens(mine).tolist(), sheet.tokens(other).tolist()
        size = next(
            (at for at, (x, y) in enumerate(zip(a[::-1], b[::-1], strict=False)) if x != y), min(len(a), len(b))
        )
        longer.add(len(b) - len(a))
        # What follows the last difference has to be the better part of both: a response, and not its last tokens.
        if size < max(1, min(len(a), len(b)) // 4):
            return ""
    if len(longer) != 1 or not (by := longer.pop()):
        return ""
    here, there = (batch.spine.name, sheet.name) if by > 0 else (sheet.name, batch.spine.name)
    return f"the prompt of {here} is {abs(by)} token{'s' * (abs(by) > 1)} shorter than {there}'s"


#: Of two sheets in one order, the share of equal samples that tells it where all others have equal prompts.
IN_ORDER = 0.125


def _in_part(batch: StepBatch, other: Sheet) -> list[tuple[int, int]]:
    """Samples of two sheets of one size, half of which and more are equal: each with its twin, -1 for none. Fewer do
    where they stand in the same rows, and the rows that differ have the same prompt.
    """
    spine = batch.spine
    if len(spine) != len(other) or not other.has_tokens or len(spine) < FEWEST:
        return []
    left: dict[bytes, list[int]] = {}
    for sample in range(len(other)):
        left.setdefault(other.tokens(sample).tobytes(), []).append(sample)
    found = []
    for sample in range(len(spine)):
        twins = left.get(spine.tokens(sample).tobytes())
        found.append((sample, twins.pop() if twins else -1))
    if 2 * sum(other >= 0 for _, other in found) >= len(found):
        return found
    rows = [(spine.tokens(row), other.tokens(row)) for row in range(len(spine))]
    equal = [np.array_equal(mine, theirs) for mine, theirs in rows]
    if batch.response_N is None or sum(equal) < max(FEWEST, IN_ORDER * len(rows)):
        return []
    prompts = batch.flat.first(batch.response_N).astype(int).tolist()
    alike = all(
        same or (size > 0 and np.array_equal(mine[:size], theirs[:size]))
        for same, size, (mine, theirs) in zip(equal, prompts, rows, strict=True)
    )
    return [(row, row) for row in range(len(rows))] if alike else []


def _ids_by_sample(sheet: Sheet) -> dict[str, int]:
    """A sheet's samples by the id the trainer gave them; empty where they have none, or share one."""
    found: dict[str, int] = {}
    for sample, (part, row) in enumerate(sheet.index):
        ref = next((ref for ref in sheet.parts[part].held.fields() if ref.canonical == "sample_id"), None)
        if ref is None or ref.shape != (len(sheet.parts[part]),):
            return {}
        name = str(np.asarray(pages.array(ref)).reshape(-1)[row])
        if name in found:
            return {}
        found[name] = sample
    return found


#: How much longer, or shorter, responses get before it is no longer reasoning that is learnt.
GROWN, SHRUNK = 3.0, 1 / 3
#: Responses that are cut: next to none, more, and as many as no reward makes up for.
SELDOM_CUT, MORE_CUT, MUCH_CUT = 0.02, 0.04, 0.1
#: Growth that is told of where nothing is earned by it, and steps and certainty (a normal quantile) that it takes.
DOUBLED, MANY_STEPS, SURELY = 1.7, 24, 4.0
#: What is left of the mean length where hardly an answer is, while the reward falls.
LEFT = 0.1


def _gains(reward: Series | None) -> bool:
    """Whether the reward has risen by .3 of all it spans, from its first third to its last."""
    values = [] if reward is None else reward.finite
    third = len(values) // 3
    return third > 0 and median(values[-third:]) - median(values[:third]) > 0.3 * (max(values) - min(values))


def _shrinks(log: RunLog, now: float) -> bool:
    """Whether the entropy has come to a fifth of what it was at first."""
    entropy = log.get("entropy")
    return entropy is not None and len(entropy.finite) >= 12 and now < trends.level(entropy.finite[:3]) / 5


#: A mean of so few tokens is hardly a response.
HARDLY = 2.0


#: How many times the length of all that follows the first line's is, tokens that are hardly an answer, and the share of
#: groups without a spread in most lines.
_AT_ONCE, _A_WORD, _DEAD = 5.0, 8.0, 0.5


def _nearly_most(values: list[float]) -> float:
    """What nine of ten of them do not exceed."""
    return sorted(values)[int(0.9 * (len(values) - 1))]


def _gone_at_once(log: RunLog, series: Series) -> Finding | None:
    """Answers that were lost before the second line: a mean over ten steps stands in each."""
    first, *rest = series.points
    values = [point.value for point in rest if math.isfinite(point.value)]
    dead = log.get("frac_zero_std")
    if not values or dead is None or first.value < _AT_ONCE * _nearly_most(values) or median(values) > _A_WORD:
        return None
    shares = dead.finite[1:]
    if not shares or median(shares) < _DEAD:
        return None
    now = trends.level(values)
    return warning(
        f"response length collapses to {now:.2g} tokens: {series.name} is {first.value:.3g} in the first line and "
        f"{max(values):.3g} at most after it, and most groups have no spread of rewards left",
        rest[0].where(series.name),
        series.shown(series.last.value, f"was {first.value:.3g}"),
        dead.shown(trends.level(shares), f"< {_DEAD:g}"),
        cause="the policy has come upon an answer of a few tokens that is paid, or not punished, as well as a whole "
        "one (a "
        "reward for the form or a keyword, none for the reasoning): all answers of a group are then alike, and nothing "
        "is learnt any more; entropy falls as a consequence",
        next_step="read ten responses; pay nothing without what the task asks for; a smaller learning rate, a KL term",
        steps=[point.step for point in rest if point.step is not None],
    )


@rule("L09", "responses get far longer or shorter", link="trend", scope="signals", needs=("response_length",),
      explains=("D01", "D20", "D25", "D37", "L02", "L05", "L08", "L10"),
      source="rldbg; DAPO section 3.4 (overlong responses); R1-Zero (a growth that is wanted)")  # fmt: skip
def lengths(log: RunLog) -> Finding | None:
    """The mean length's last 3 steps over its first 3, in 12 steps and more, and a trend that chance does not explain:
    threefold, or one and a half where half of the responses are cut at the limit, is a warning; so is a third. Worth
    knowing alone where the reward rises by more than chance explains, no more than a quarter is cut (a tenth, where
    next to none was at first and the reward gains less than .3 of all it spans), and the entropy has not collapsed: so
    look reasoning that is learnt, and answers that get to the point; or where it falls as other prompts make it fall
    (L08). An error where all are cut in the end, or hardly a token is left (a mean below 2), or a tenth of the length
    while the reward falls. Of 24 steps and more 1.7 times is a warning, where the reward does not rise, and ever more
    are cut. Silent where L08 says that the policy falls apart. A warning, too, where the first line's length is five
    times that of nine in ten after it, which are 8 tokens and less in the median, while in half of the lines and more
    most
    groups have no spread.
    """
    series = given(log.get("response_length"))
    values = series.finite
    skip_if(len(values) < 12, "needs the response length of 12 steps")
    if (gone := _gone_at_once(log, series)) is not None:
        return gone
    begun, now, z = trends.level(values[:3]), trends.level(values, 3), trends.drift(values)
    cut = next((level for _, level in log.level("truncated")), 0.0)
    first_cut = next((trends.level(one.finite[:3]) for one in log.all("truncated")[:1] if one.finite), 0.0)
    reward = log.get("reward")
    # More of them run into the limit: what grows is no longer paid for.
    more_cut = first_cut < SELDOM_CUT and cut >= max(MORE_CUT, 2 * first_cut)
    idle = len(values) >= MANY_STEPS and reward is not None and not trends.rises(reward.finite) and more_cut
    grown = 1.5 if cut >= 0.5 else DOUBLED if idle and z > SURELY else GROWN
    longer = begun > 0 and z > trends.DRIFT_Z and now > grown * begun
    # A response has one token at the least: what ends there may have begun anywhere.
    most = max(values[:3]) if now < HARDLY else begun
    if not longer and not (z < -trends.DRIFT_Z and now < SHRUNK * most):
        return None
    if longer and falls_apart(log) is not None and harder_prompts(log, given(reward)) is None:
        return None  # L08 says it, with the reward that goes
    falls = reward is not None and trends.drift(reward.finite) < -trends.DRIFT_Z
    entropy = next((level for _, level in log.level("entropy") if 0 <= level < ENTROPY_MIN), None)
    if longer and entropy is not None and not _shrinks(log, entropy):
        entropy = None
    hardly = not longer and now < HARDLY
    # The log of a reward that rises does not tell whether it is length that is paid: L32 does, and held-out results.
    dearly = longer and first_cut < SELDOM_CUT and cut >= MUCH_CUT and not _gains(reward)
    few = cut < MANY and entropy is None and not hardly and not dearly
    learns = few and reward is not None and trends.rises(reward.finite)
    others = (
        few and falls and (harder_prompts(log, given(reward)) is not None or bool(learns_between(given(reward).finite)))
    )
    also = (
        ""
        if entropy is None
        else f", and the entropy to {entropy:.2g}: the policy "
        + ("repeats itself" if longer else "has collapsed onto one answer")
    )
    if longer and MORE_CUT <= cut < 0.5 and more_cut:
        also += f", {cut:.0%} of them are cut at the limit ({first_cut:.0%} at first)"
    if longer and idle:
        also += ", and the reward does not rise"
    peak = _paid_at_first(series, reward) if falls and not longer else None
    if falls and not longer and reward is not None:
        most_paid = peak.value if peak is not None else trends.level(reward.finite[:3])
        also += f", and {reward.name} falls with it, from {most_paid:.3g} to {trends.level(reward.finite, 3):.3g}"
    return finding(
        "error"
        if (longer and cut >= 1) or hardly or (falls and not longer and now < LEFT * begun)
        else "info"
        if learns or others
        else "warning",
        (
            f"responses get far {'longer' if longer else 'shorter'} "
            f"{'while the reward rises' if learns else 'with other prompts'}: "
            if learns or others
            else f"response length {'explodes' if longer else 'collapses'}: "
        )
        + f"{series.name} goes from {begun:.3g} to "
        f"{now:.3g}{also}" + (f", and {cut:.0%} of them are cut at the limit" if longer and cut >= 0.5 else ""),
        series.last.where(series.name),
        series.shown(now, f"< {GROWN * begun:.3g}" if longer else f"> {SHRUNK * begun:.3g}"),
        shown("Mann-Kendall z", z),
        *([shown("responses cut at the limit", cut)] if cut else []),
        cause="the policy learns to think for longer, or to come to the point; or the length itself is paid for: what "
        "is right per length tells them apart"
        if learns
        else "prompts change, as a curriculum makes them, and answers with them (L08)"
        if others
        else "the reward falls with it, so nothing pays for long ones: the policy falls apart (by a ratio or its "
        "clipping that is made wrongly, a learning rate too high), or no longer ends its answers"
        if longer and falls
        else "longer responses are paid for (the judge, or a sum over tokens that is not divided), or the policy no "
        "longer ends them (the end token is not trained, or advantages or updates are made wrongly): the length alone "
        "does not tell which"
        if longer
        else f"the reward rose while they got shorter (to {peak.value:.3g} at step {peak.step}), and falls since: "
        "shortness itself is paid for (a length penalty, a mean per response that makes a token of a short one weigh "
        "more), and is driven past what an answer needs"
        if peak is not None
        else "the reward falls with it, so nothing pays for short ones: the policy is pushed away from what is "
        "rewarded: the sign of loss or advantage is turned"
        if falls
        else "short responses are paid for: a length penalty too strong, a judge that likes a bare end, or a mean per "
        "response that makes each token of a short one weigh more",
        next_step="read ten responses of the last step; rldbg record -- YOUR COMMAND",
        steps=series.steps(over=(begun + now) / 2) if longer else series.steps(under=(begun + now) / 2),
    )


#: What a reward rises to, beside its beginning, and a length falls to, before both fall.
ROSE, SHORTER = 1.15, 0.95


def _paid_at_first(lengths: Series, reward: Series | None) -> Point | None:
    """Where the reward was at its most, if it rose to that while responses got shorter, in the first half of a fall."""
    points = [] if reward is None else [point for point in reward.points if math.isfinite(point.value)]
    if len(points) < 12:
        return None
    begun = trends.level([point.value for point in points[:3]])
    peak = max(points[: 2 * len(points) // 3], key=lambda point: point.value)
    by_step = {point.step: point.value for point in lengths.points}
    shorter = by_step.get(peak.step, math.inf) < SHORTER * trends.level(lengths.finite[:3])
    return peak if begun > 0 and peak.value > ROSE * begun and shorter else None


#: Steps, and calls that differ, before answers that do not are a broken tool.
CALLED = 3


@rule("D70", "every tool call gets the same answer", link="tokens", scope="case",
      explains=("D01", "D03", "L08"),
      source="a tool server that is down answers every call with its error")  # fmt: skip
def one_answer(case: Case) -> Finding | None:
    """Tokens between two turns of a response that are not the policy's own, the same in every sample of 3 steps and
    more while the turns before them
    differ: a warning where the run states tools, since a template's words between turns are
    the same on purpose.
    """
    answers: set[bytes] = set()
    calls: set[bytes] = set()
    steps: list[int] = []
    first: StepBatch | None = None
    stated = False
    for batch in case.batches():
        own_N, tokens_N = batch.trained_N, batch.tokens_N
        rollout = batch.columns.of("rollout_logprobs")
        if own_N is None or tokens_N is None or batch.step is None:
            continue
        if rollout is not None:
            own_N = own_N | (rollout.said_N & (rollout.values_N != 0))
        stated = stated or any("tool" in str(key).lower() for key in _keys(batch.laid.stated))
        found = False
        for span in batch.flat.spans:
            own = own_N[span]
            edges = np.flatnonzero(np.diff(own.astype(np.int8))) + 1
            # Outside, own, outside, own: what lies between the first two turns.
            if len(edges) < 3 or own[0]:
                continue
            row = tokens_N[span]
            calls.add(row[edges[0] : edges[1]].tobytes())
            answers.add(row[edges[1] : edges[2]].tobytes())
            found = True
        if len(answers) > 1:
            return None
        if found:
            steps.append(batch.step)
            first = first or batch
    if first is None or len(set(steps)) < CALLED or len(calls) < CALLED or not stated:
        raise Skip("needs turns of tools over 3 steps, and a run that states tools")
    return warning(
        f"every tool call gets the same answer: one in {len(set(steps))} steps, to {len(calls)} different calls",
        first.laid.where("input_ids", sample=0),
        shown("different answers", 1, "> 1"),
        shown("different calls", len(calls)),
        cause="the tool fails (a server that is down, a parser that never matches) and answers every call with its "
        "error: what the tool is needed for is out of reach",
        steps=sorted(set(steps)),
    )


def _keys(facts: Mapping[str, Any]) -> Iterator[str]:
    for key, value in facts.items():
        yield str(key)
        if isinstance(value, Mapping):
            yield from _keys(value)
