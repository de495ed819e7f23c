"""Scores, and what they pay for: one that outweighs a batch, other samples', not the answers', length, its opposite."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np
from msgspec import Struct

from replay_core.diagnose import trends
from replay_core.diagnose.advantage_variants import orders
from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.case import Case
from replay_core.diagnose.finding import Finding, error, listed, share, shown, warning
from replay_core.diagnose.flat import Array
from replay_core.diagnose.function_weights import paid_instead, weights_or_sum
from replay_core.diagnose.rule import Skip, given, rule, skip_if
from replay_core.diagnose.rules.figures import together
from replay_core.diagnose.rules.tokens import truncated
from replay_core.diagnose.signals import RunLog, Series
from replay_core.regexes import regex

#: How far one reward lies from all others, in ranges of the others; and the share of a batch that may.
APART, FEW = 50.0, 0.05
#: Different rewards of the others that make a range, and steps of a log whose mean does not waver.
SEVERAL, STEPS = 3, 8
#: What is left to waver of a mean that one sample makes, as a share of it.
STILL = 5e-3


@rule("D86", "one reward outweighs all others", link="rewards", scope="batch", needs=("rewards",), lasts=True,
      explains=("D04", "D28", "D56", "D73", "L02", "L08"),
      source="a judge that returns another unit, a length, or an error code for one sample")  # fmt: skip
def outlier(batch: StepBatch) -> Finding | None:
    """Rewards of at most a twentieth of a batch (of 8 and more) that lie 50 times as far from the middle as all
    others, of which there are 3 different ones: a warning. Normalised, such a group's other answers are all alike.
    """
    reward_B = given(batch.reward_B)
    skip_if(len(reward_B) < 8 or not np.isfinite(reward_B).all(), "needs finite rewards of 8 samples")
    away_B = np.abs(reward_B - np.median(reward_B))
    order = np.argsort(away_B)
    few = max(int(FEW * len(reward_B)), 1)
    for out in range(1, few + 1):
        rest, far = reward_B[order[:-out]], order[-out:]
        size = float(np.ptp(rest))
        if np.unique(np.round(rest, 9)).size >= SEVERAL and away_B[far].min() > APART * max(size, 1e-9):
            worst = int(far[-1])
            return warning(
                f"one sample's reward outweighs the batch: {reward_B[worst]:.6g}, and all others lie between "
                f"{rest.min():.4g} and {rest.max():.4g}"
                if out == 1
                else f"{out} samples' rewards outweigh the batch: up to {reward_B[worst]:.6g}, and all others lie "
                f"between {rest.min():.4g} and {rest.max():.4g}",
                batch.laid.where(batch.columns.reward_name, sample=worst),
                shown("distance from the middle, in ranges of the others", float(away_B[far].min() / size),
                f"< {APART:g}", f"rewards of {batch.name}"),
                shown("sample", worst), shown("samples so far out", out, "0"),
                cause="an outlier of the judge: another unit, a count or an error code that is taken for a score; what "
                "is normalised by it makes the group's other answers all alike",
            )  # fmt: skip
    return None


@rule("D86", "one reward outweighs all others", link="rewards", scope="signals",
      needs=("reward", "reward_std|reward_max"),
      source="a judge that returns another unit, a length, or an error code for one sample")  # fmt: skip
def outweighs(log: RunLog) -> Finding | None:
    """The mean reward wavers by less than .005 of it over 8 steps and more, and so does its spread (or the largest
    reward), which is twice the mean and more (or 8 times), while rewards are not all one number: a warning. What varies
    from batch to batch is too small to show beside one sample that does not.
    """
    reward = given(log.get("reward"))
    values = reward.finite
    skip_if(len(values) < STEPS or not any(values), f"needs rewards of {STEPS} steps that are not 0")
    beside = [(one, 2.0) for one in log.all("reward_std")] + [(one, 8.0) for one in log.all("reward_max")]
    for series, times in beside:
        if len(series.finite) < STEPS or not _stands(values) or not _stands(series.finite):
            continue
        if len(set(values)) > STEPS // 2 and median(series.finite) > times * abs(median(values)):
            return warning(
                f"one sample's reward outweighs the batch: {reward.name} hardly wavers from {median(values):.4g}, and "
                f"{series.name} is {median(series.finite):.4g} in every step",
                series,
                reward.shown(median(values)),
                series.shown(median(series.finite), f"< {times:g} x the mean"),
                cause="an outlier of the judge, far larger than all other rewards: another unit, a count or an error "
                "code that is taken for a score",
                next_step="look at the largest reward of one batch; rldbg record -- YOUR COMMAND keeps them",
            )
    return None


def _stands(values: list[float]) -> bool:
    middle = abs(median(values))
    return middle > 0 and max(values) - min(values) < STILL * middle


@rule("D85", "rewards are other samples' scores", link="rewards", scope="batch",
      needs=("token_rewards", "token_scores"), lasts=True, explains=("D04", "D28", "D51", "D53", "D56", "L08"),
      source="verl: token_level_rewards are token_level_scores, less a penalty")  # fmt: skip
def of_other_samples(batch: StepBatch) -> Finding | None:
    """The sums of token rewards and of token scores, sample by sample: an error where they are the same numbers (4
    different ones and more) in another order; a warning where they are one factor of them that is not 1 (to 1e-4,
    wherever nothing else is taken off), and the run states no scale of its rewards.
    """
    rewards_B, scores_B = batch.summed("token_rewards"), batch.summed("token_scores")
    if rewards_B is None or scores_B is None or not np.isfinite(rewards_B).all() or not np.isfinite(scores_B).all():
        raise Skip("token rewards or scores are no finite rows")
    close = 1e-5 * max(float(np.abs(scores_B).max(initial=0.0)), 1e-6)
    other_B = np.abs(rewards_B - scores_B) > close
    same = bool((np.abs(np.sort(rewards_B) - np.sort(scores_B)) <= close).all())
    if not other_B.any():
        return None
    stored = {column.dtype for name in ("token_rewards", "token_scores") if (column := batch.columns.of(name))}
    if (factor := _factor_of(rewards_B, scores_B, max(ROUNDED.get(one, ONE_FACTOR) for one in stored))) is not None:
        if any(batch.laid.algorithm.number(name) is not None for name in _SCALES):
            raise Skip("the run states a scale of its rewards")
        return warning(
            f"token rewards are {factor:.4g} x the token scores, in every sample: they are scaled on their way to the "
            "advantages",
            batch.laid.where("token_rewards", sample=other_B),
            shown("rewards / scores", factor, "1", f"rewards of {batch.name}"),
            shown("samples that say so", int((np.abs(scores_B) > close).sum())),
            cause="a factor stands between scores and rewards, and no penalty (KL, length) is taken off: advantages "
            "that are divided by no std (RLOO, Dr. GRPO, GAE before whitening) are as many times "
            + ("too small" if abs(factor) < 1 else "too large")
            if factor > 0
            else "the sign is turned between scores and rewards: what is scored well is punished",
        )
    if not same or other_B.sum() < 2 or np.unique(np.round(scores_B, 6)).size < 4:
        raise Skip("rewards differ from scores by more than their order: they were shaped")
    groups = int(given(batch.group_B).max()) + 1 if batch.has("group") else 1
    how = next(
        (
            how
            for how, order_B in orders(len(scores_B), groups)
            if np.allclose(rewards_B, scores_B[order_B], atol=close)
        ),
        "",
    )
    return error(
        "token rewards are other samples' scores: the same numbers in another order, "
        f"{share(int(other_B.sum()), len(other_B))} rows differ" + (f", those {how}" if how else ""),
        batch.laid.where("token_rewards", sample=other_B),
        shown("rows whose reward is not their score", int(other_B.sum()), "0", f"rewards of {batch.name}"),
        shown("largest difference of both, sorted", float(np.abs(np.sort(rewards_B) - np.sort(scores_B)).max())),
        cause="rewards come back in another order than the samples, or were rolled or permuted after they were scored: "
        "advantages are made of the neighbours' scores",
    )


#: How a run may call a factor of its rewards, and how near one factor has to be in all samples.
_SCALES = ("reward_scale", "reward_scaling", "reward_coef", "reward_weight", "reward_factor", "reward_scaling_factor")
ONE_FACTOR, ROUNDED = 1e-4, {"bfloat16": 1e-2, "float16": 2e-3}


def _factor_of(rewards_B: Array, scores_B: Array, close: float) -> float | None:
    """What all scores are multiplied by in the rewards; None where that is no one number, is 1, or few scores tell."""
    if np.unique(np.round(scores_B, 6)).size < 4 or not np.abs(rewards_B).max() > 0:
        return None
    factor = float(scores_B @ rewards_B) / float(scores_B @ scores_B)
    left = float(np.abs(rewards_B - factor * scores_B).max())
    is_one = left <= close * float(np.abs(rewards_B).max()) and factor != 0
    return factor if is_one and abs(factor - 1) > max(1e-3, 2 * close) else None


#: Answers that tell; of right ones, how many (and which share) before it is no chance.
FEWEST, RIGHT, SOME = 16, 4, 0.1
#: How often scores may agree with their own answers, and how often with another row's they have to.
OWN, OTHER = 0.85, 0.97
#: How many answers end in another prompt's truth where the truths are other prompts'; and of how many ground truths all
#: right answers are paid, and of how many none, before it is the truths that tell them apart.
OTHERS, OFTEN, TRUTHS = 0.5, 0.2, 3
#: Of responses, how many have to end with a token of the policy's own.
MOSTLY = 0.9
_MARKS = regex(r"(?:<[^<>]{1,20}>|\s|[.,;:!?\"'`*$)\]}])+$")
_APART = regex(r"(?:^|[\s(\[{\"'`*$:=>#|\u2192\uff1a])$")
#: An answer that is one number or one letter: of those, another is surely another answer. And the words of a text.
_PLAIN, _WORD = regex(r"(\d+|[A-Za-z])$"), regex(r"\d+|[A-Za-z]+")
#: Wrong answers that are paid in full, how many (and which share of all that are) before they are no slips of reading.
LENIENT = 8
#: What chance may come to that so many answers end in another row's truth.
BY_CHANCE = 1e-3


def ends_in(text: str, truth: str) -> bool:
    """Whether the last words of a text, without marks of its end, are the truth."""
    return _is_end(_MARKS.sub("", text), _MARKS.sub("", truth))


def _is_end(end: str, truth: str) -> bool:
    """The same of two that have no marks of their end."""
    before = end.removesuffix(truth)
    if not truth or before == end or not _APART.search(before):
        return False
    # In braces that do not box it, it is a part of a formula: a denominator, a power.
    return not before.endswith("{") or before.endswith("boxed{")


def is_another(text: str, truth: str) -> bool:
    """Whether a text ends in a number (or a letter) that is not the truth, which is one as well and stands nowhere in
    the text.
    """
    end, truth = _MARKS.sub("", text), _MARKS.sub("", truth).strip()
    last, wanted = _PLAIN.search(end), _PLAIN.match(truth)
    if last is None or wanted is None or not _APART.search(end[: last.start()]):
        return False
    said, told = last[1], wanted[1]
    if said.isdigit() != told.isdigit() or (int(said) == int(told) if told.isdigit() else said.lower() == told.lower()):
        return False
    return told not in _WORD.findall(end)


def for_right_answers(batch: StepBatch) -> dict[str, Array]:
    """What each sample got for being right, where that stands apart from the reward."""
    names = sorted({name for sheet, _ in batch.columns.sheets for name in sheet.names() if _RIGHT.search(name)})
    each = {name: batch.columns.per_sample(name) for name in names}
    return {name: values_B for name, values_B in each.items() if values_B is not None}


def _others_speak_last(batch: StepBatch) -> bool:
    """Whether the last token of many responses is not the policy's: an environment may name the truth there."""
    trained_N, response_N = batch.trained_N, batch.response_N
    if trained_N is None or response_N is None:
        return False
    at_N = np.arange(response_N.size)
    last_B = [int(at_N[span][response_N[span]][-1]) for span in batch.flat.spans if response_N[span].any()]
    return bool(last_B) and float(trained_N[last_B].mean()) < MOSTLY


class _Answered(Struct, frozen=True):
    """A step's texts [B], ground truths [B], rewards [B], which answers are right [B], and rewards for right answers
    alone [B] by name.
    """

    batch: StepBatch
    texts: list[str]
    truths: list[str]
    reward_B: Array
    right_B: Array
    parts: dict[str, Array]

    @property
    def group(self) -> int:
        """Rows of one prompt, as they lie one after the other."""
        if self.batch.group_B is not None:
            return len(self.truths) // max(int(self.batch.group_B.max()) + 1, 1)
        return next((at for at, truth in enumerate(self.truths) if truth != self.truths[0]), 0)


def _mixed_truths(looked: list[_Answered]) -> Finding | None:
    """Prompts that stand in a step equally often, whose rows have different truths, which are other prompts', too."""
    bad: list[tuple[_Answered, int, int, int]] = []
    for one in looked:
        prompts = one.batch.columns.texts("prompt_text")
        asked: list[Any] | None = prompts if one.batch.prompt_B is None else one.batch.prompt_B.tolist()
        if asked is None:
            continue
        truths: dict[Any, set[str]] = {}
        for prompt, truth in zip(asked, one.truths, strict=True):
            truths.setdefault(prompt, set()).add(truth)
        # What stands beside each other: a question that is asked of several pictures has its truth in several rows.
        pairs = [(a == b, p) for (a, b), (p, q) in zip(pairwise(one.truths), pairwise(asked), strict=True) if p == q]
        mixed = [prompt for prompt, each in truths.items() if len(each) > 1]
        shared = Counter(truth for each in truths.values() for truth in each)
        often = set(Counter(asked).values())
        if (
            len(mixed) < 2
            or 2 * len(mixed) < len(truths)
            or len(often) > 1
            or 2 * sum(a for a, _ in pairs) > len(pairs)
        ):
            continue
        if 2 * sum(shared[truth] > 1 for truth in shared) >= len(shared):
            bad.append((one, len(mixed), len(truths), asked.index(mixed[0])))
    if sum(len(one.texts) for one, *_ in bad) < FEWEST:
        return None
    one, mixed_, prompts_, at = bad[0]
    size = len(one.truths) // prompts_
    return error(
        f"rows of one prompt have different ground truths, in {share(mixed_, prompts_)} prompts, and those are other "
        "prompts' truths: answers are scored against another question's",
        one.batch.laid.where(one.batch.columns.reward_name, sample=at),
        shown("ground truths of the first such prompt's rows", listed(one.truths[at : at + size], 4), "one"),
        shown("steps in which it is so", share(len(bad), len(looked))),
        cause="the list of ground truths is tiled where the prompts are repeated one by one (repeat against "
        "repeat_interleave), or was not put in order with the rows: a right answer is paid by chance",
        next_step="print prompt, ground truth and data source of one group side by side",
        steps=[one.batch.step for one, *_ in bad if one.batch.step is not None],
    )


def _by_chance(looked: list[_Answered]) -> float:
    """How often an answer ends in the truth of some other row of its step that has another."""
    each: list[float] = []
    for one in looked:
        truths = [_MARKS.sub("", truth.strip()) for truth in one.truths]
        times = Counter(truths)
        sizes = sorted({len(truth) for truth in times} - {0})
        for text, own in zip(one.texts, truths, strict=True):
            end = _MARKS.sub("", text)
            near = {end[-size:] for size in sizes} - {own}
            hits = sum(times[truth] for truth in near if truth in times and _is_end(end, truth))
            each.append(hits / max(len(truths) - times[own], 1))
    return float(np.mean(each)) if each else 0.0


def _as_often(share_: float, total: int, chance: float) -> float:
    """How probable it is that so many of all and more come about by chance."""
    least = math.ceil(share_ * total - 1e-9)
    if not 0 < chance < 1:
        return float(chance >= 1 or least <= 0)
    ways = (
        (k, math.lgamma(total + 1) - math.lgamma(k + 1) - math.lgamma(total - k + 1)) for k in range(least, total + 1)
    )
    return sum(math.exp(many + k * math.log(chance) + (total - k) * math.log1p(-chance)) for k, many in ways)


def _others_truths(looked: list[_Answered]) -> Finding | None:
    """Answers that end in the ground truths of another prompt's rows, as many rows away in all, from some step on."""
    size = looked[0].group
    best, by, since = 0.0, 0, looked
    for away in (size, -size, 2 * size, -2 * size, 1, -1):
        if not away:
            continue
        told = [
            [ends_in(text, one.truths[at + away].strip()) for at, text in enumerate(one.texts)
             if 0 <= at + away < len(one.truths)]
            for one in looked
        ]  # fmt: skip
        worse = [
            2 * one.right_B.mean() < np.mean(each) if each else False for one, each in zip(looked, told, strict=True)
        ]
        if True not in worse:
            continue
        begins = worse.index(True)
        pairs = [pair for each in told[begins:] for pair in each]
        if len(pairs) >= FEWEST and 2 * sum(worse[begins:]) > len(worse) - begins and np.mean(pairs) > best:
            best, by, since = float(np.mean(pairs)), away, looked[begins:]
    right, total = sum(int(one.right_B.sum()) for one in since), sum(len(one.texts) for one in since)
    truths = [truth for one in since for truth in one.truths]
    # Of a few truths that come again and again, the neighbour's may be the answer by chance.
    many = len(set(truths)) * max(size, 1) >= 0.5 * len(truths)
    if best < (OFTEN if many else OTHERS) or right > 0.5 * best * total:
        return None
    if _as_often(best, total, _by_chance(since)) > BY_CHANCE:
        return None
    rows = f"{abs(by)} row{'s' * (abs(by) > 1)} {'after' if by > 0 else 'before'}"
    return error(
        f"ground truths belong to other prompts: answers end in the truth {rows}",
        since[0].batch.laid.where(since[0].batch.columns.reward_name, sample=0),
        shown("answers that end in their own ground truth", share(right, total)),
        shown(f"share that ends in the truth {rows}", best),
        cause="ground truths are not in the order of the prompts: one list was shuffled, filtered or sorted without "
        "the other, or an index is off by one: right answers are scored against another question's",
        next_step="print prompt, ground truth and data source of one row side by side",
        steps=[one.batch.step for one in since if one.batch.step is not None],
    )


def _dead_part(looked: list[_Answered], right: int) -> Finding | None:
    """A reward for right answers that is 0 for all of them, beside a reward that is not."""
    first = looked[0]
    for name in first.parts:
        each = [one.parts[name] for one in looked if name in one.parts]
        if len(each) < len(looked) or np.concatenate(each).any():
            continue
        total = sum(map(len, each))
        return error(
            f"{name.rpartition('.')[2]} is 0 for all {total} samples, although {right} answers end in their ground "
            "truth",
            first.batch.laid.where(name, sample=int(first.right_B.argmax())),
            shown("answers that end in their ground truth", share(right, total)),
            shown(f"of {name} that are not 0", 0, f">= {right}"),
            cause="this part of the reward is lost: its function does not find the answer (another format, a parse or "
            "extraction that fails, an exception that is scored 0), or its score is dropped on the way; what is left "
            "pays for form alone",
            next_step="call this reward function by hand on one of these texts",
            steps=[one.batch.step for one in looked if one.batch.step is not None],
        )
    return None


def _paid_wrong(looked: list[_Answered], low: float) -> Finding | None:
    """Answers that are surely others than the truth, and have what right ones have."""
    rights = np.concatenate([one.reward_B[one.right_B] for one in looked])
    high = float(np.median(rights))
    if not high > low or np.mean(rights >= high) < MOSTLY:
        return None
    if (from_prompts := _paid_by_prompt(looked, high)) is not None:
        return from_prompts
    full = sum(int((one.reward_B >= high).sum()) for one in looked)
    wrong = [(one, at) for one in looked for at in np.flatnonzero((one.reward_B >= high) & ~one.right_B)
             if is_another(one.texts[at], one.truths[at])]  # fmt: skip
    if len(wrong) < max(LENIENT, SOME * full):
        return None
    one, at = wrong[0]
    return warning(
        f"wrong answers are paid like right ones: {len(wrong)} of the {full} answers that have the reward {high:.4g} "
        "end in another number or letter than their ground truth",
        one.batch.laid.where(one.batch.columns.reward_name, sample=int(at)),
        shown("end of the first such answer", one.texts[at][-40:], one.truths[at].strip()[:40]),
        shown("right answers that have it", int((rights >= high).sum())),
        cause="the verifier is too lenient (a part of the truth, its digits in any order or a pattern somewhere in the "
        "text will do), or several answers are right: the policy learns what it accepts, not the answer",
        next_step="call the reward function by hand on one of these texts",
        steps=sorted({one.batch.step for one, _ in wrong if one.batch.step is not None}),
    )


def _paid_by_prompt(looked: list[_Answered], high: float) -> Finding | None:
    """Answers without the truth that are paid in full where it stands in their prompt, and there alone."""
    paid: dict[bool, list[bool]] = {True: [], False: []}
    steps: list[int | None] = []
    first: tuple[_Answered, int] | None = None
    for one in looked:
        prompts = one.batch.columns.texts("prompt_text")
        if prompts is None:
            continue
        for at, (text, truth, prompt) in enumerate(zip(one.texts, one.truths, prompts, strict=True)):
            told = truth.strip().casefold()
            if not told or one.right_B[at] or told in text.casefold():
                continue
            stands, is_paid = told in prompt.casefold(), bool(one.reward_B[at] >= high)
            paid[stands].append(is_paid)
            if stands and is_paid:
                first = first or (one, at)
                steps.append(one.batch.step)
    if first is None or min(map(len, paid.values())) < LENIENT:
        return None
    if np.mean(paid[True]) < MOSTLY or np.mean(paid[False]) > FEW:
        return None
    one, at = first
    return error(
        "answers are paid for what stands in their prompt: without the ground truth, "
        f"{share(sum(paid[True]), len(paid[True]))} have the reward {high:.4g} where it stands in the prompt, and "
        f"{sum(paid[False])} of {len(paid[False])} where it does not",
        one.batch.laid.where(one.batch.columns.reward_name, sample=at),
        shown("end of the first such answer", one.texts[at][-40:], one.truths[at].strip()[:40]),
        cause="the verifier searches prompt and response for the answer, not the response alone: any answer to these "
        "prompts is right",
        next_step="call the reward function by hand on the response alone",
        steps=sorted({step for step in steps if step is not None}),
    )


def _by_truth(looked: list[_Answered], low: float) -> Finding | None:
    """Right answers that have the lowest score, in every row of some ground truths and in none of others."""
    paid: dict[str, list[bool]] = {}
    for one in looked:
        for at in np.flatnonzero(one.right_B):
            paid.setdefault(one.truths[at].strip(), []).append(bool(one.reward_B[at] > low))
    told = {truth: each for truth, each in paid.items() if len(each) > 1}
    none = [truth for truth, each in told.items() if not any(each)]
    all_ = [truth for truth, each in told.items() if all(each)]
    wrong = [one.reward_B[~one.right_B] > low for one in looked]
    if min(len(none), len(all_)) < TRUTHS or len(none) + len(all_) < (1 - FEW) * len(told):
        return None
    if np.concatenate(wrong).mean() > 2 * FEW:
        return None
    marks = set.intersection(*map(set, none)) - set().union(*map(set, all_))
    longer = min(map(len, none)) > max(map(len, all_))
    size = min(map(len, none))
    how = (f", which all hold {sorted(marks)[0]!r}" if marks else f", all of {size} characters and more, and none of "
           "the others" if longer else "")  # fmt: skip
    count = sum(len(told[each]) for each in none)
    first, at = next((one, at) for one in looked for at in np.flatnonzero(one.right_B)
                     if one.truths[at].strip() == none[0])  # fmt: skip
    return warning(
        f"right answers are never paid for some ground truths{how}: {count} answers end in theirs and have "
        f"the score {low:.4g}",
        first.batch.laid.where(first.batch.columns.reward_name, sample=int(at)),
        shown("ground truths whose right answers are all, or none, paid", f"{len(all_)}, {len(none)}"),
        shown("of those, some paid", len(told) - len(all_) - len(none)),
        shown("ground truths that are never paid", listed(none, 3)), shown("that are", listed(all_, 3)),
        cause="the verifier fails on such truths: an extraction that takes a part of them, a comparison that knows no "
        "such form; right answers are scored as wrong ones, and only some prompts are learnt from",
        next_step="call the reward function by hand on one of these texts",
        steps=[one.batch.step for one in looked if one.batch.step is not None],
    )  # fmt: skip


@rule("D100", "scores are not those of the answers", link="rewards", scope="case", lasts=True,
      explains=("D01", "D03", "D56", "D95", "L08", "L17"),
      source="recorded texts and ground truths; a verifier may want a format as well")  # fmt: skip
def of_the_answers(case: Case) -> Finding | None:
    """Where texts, ground truths and scores are recorded: answers whose last word is the ground truth, over 16 samples
    and more. A warning where every score is 0 and a tenth of the answers (4 and more), and not all, end in theirs; an
    error where scores agree with the answers of the row before or after (or of a group before or after) in .97 of all,
    and with their own in less than .85. An error, too, where half of the answers and more end in the truth of another
    prompt, as many rows away in all, and at most half as many in their own, from some step on (a fifth will do, where
    there are as many truths as groups); where rows of one prompt have different truths, which other prompts have, too;
    and where a reward for right answers (accuracy, correctness) is 0 for all.

    Where a reward for right answers of two values is recorded beside the score, texts or not: an error where the score
    is high just where that of the row (or group) before or after is, in .97 of all and less than .85 by its own; and
    where it is high just where its own is low.

    A warning where wrong answers (8, and a tenth of those paid in full; another number or letter than the truth) have
    what right ones have. And where right answers are all paid for some ground truths (3 and more) and never for others
    (3 and more, of two right answers each), while wrong ones are not.
    """
    if (beside := _beside_right(case)) is not None:
        return beside
    looked: list[_Answered] = []
    for batch in case.batches():
        texts, truths = batch.columns.texts("response_text"), batch.columns.texts("ground_truth")
        reward_B = batch.reward_B
        if texts is None or truths is None or reward_B is None or not np.isfinite(reward_B).all():
            continue
        if batch.laid.algorithm.is_distilled or _others_speak_last(batch):
            continue
        right_B = np.array([bool(truth.strip()) and ends_in(text, truth.strip())
                            for text, truth in zip(texts, truths, strict=True)])  # fmt: skip
        if texts == truths:
            continue  # what is called the answer is the response
        looked.append(_Answered(batch, texts, truths, reward_B, right_B, for_right_answers(batch)))
    total, right = sum(len(one.texts) for one in looked), sum(int(one.right_B.sum()) for one in looked)
    if total >= FEWEST and (found := _mixed_truths(looked) or _others_truths(looked)) is not None:
        return found
    if total < FEWEST or right < max(RIGHT, SOME * total):
        raise Skip(f"needs texts, ground truths and scores of {FEWEST} samples, some of which end in the truth")
    batch, right_B = looked[0].batch, looked[0].right_B
    steps = [one.batch.step for one in looked if one.batch.step is not None]
    place = batch.laid.where(batch.columns.reward_name, sample=int(right_B.argmax()))
    every = np.concatenate([one.reward_B for one in looked])
    if not every.any():
        skip_if(right == total, "every answer ends in its ground truth, and all scores are 0: it may be the highest")
        return warning(
            f"the reward is 0 for all {total} samples, although {right} answers end in their ground truth",
            place,
            shown("answers that end in their ground truth", share(right, total)),
            shown("scores that are not 0", 0, f">= {right}"),
            cause="the verifier does not find the answer (answers lack the format it asks for, a parse or extraction "
            "that fails, an exception that is scored 0), or its score is lost on the way: there is no signal to learn "
            "from",
            next_step="call the reward function by hand on one of these texts",
            steps=steps,
        )
    if (dead := _dead_part(looked, right)) is not None:
        return dead
    low = float(every.min())

    def agreement(by: int) -> float:
        same = [np.roll(one.right_B, by) == (one.reward_B > low) for one in looked if len(one.texts) > abs(by)]
        return float(np.concatenate(same).mean()) if same else 0.0

    own = agreement(0)
    group = looked[0].group
    by = max((1, -1, 2, -2, *((group, -group) if group > 1 else ())), key=agreement)
    if own >= OWN or agreement(by) < OTHER:
        return _paid_wrong(looked, low) or (None if own >= OWN else _by_truth(looked, low))
    rows = f"{abs(by)} row{'s' * (abs(by) > 1)} {'before' if by > 0 else 'after'}"
    return error(
        f"scores belong to other samples: they are those of the answers {rows}, as texts and ground truths tell",
        place,
        shown("scores that agree with their own answer", own, f">= {OWN:g}"),
        shown(f"that agree with the answer {rows}", agreement(by)),
        shown("samples", total),
        cause="scores come back in another order than the samples, or were rolled or shuffled after they were "
        "computed: a row is paid for its neighbour's answer",
        steps=steps,
    )


def _beside_right(case: Case) -> Finding | None:
    """Scores that are high where another row's answer is right, or where their own is wrong, as a reward for right
    answers that is recorded beside them tells.
    """
    rows: list[tuple[StepBatch, Array, Array]] = []
    named = ""
    for batch in case.batches():
        reward_B = batch.reward_B
        if reward_B is None or not np.isfinite(reward_B).all():
            continue
        for name, right_B in for_right_answers(batch).items():
            told = named in ("", name) and name != batch.columns.reward_name
            if told and np.isin(right_B, (0.0, 1.0, -1.0)).all():
                rows.append((batch, reward_B, right_B > 0))
                named = name
                break
    right = sum(int(right_B.sum()) for *_, right_B in rows)
    total = sum(len(right_B) for *_, right_B in rows)
    if total < FEWEST or min(right, total - right) < RIGHT:
        return None
    every = np.concatenate([reward_B for _, reward_B, _ in rows])
    middle = (float(every.min()) + float(every.max())) / 2

    def agreement(by: int) -> float:
        same = [np.roll(right_B, by) == (reward_B > middle) for _, reward_B, right_B in rows if len(right_B) > abs(by)]
        return float(np.concatenate(same).mean()) if same else 0.0

    own = agreement(0)
    batch = rows[0][0]
    sizes = np.bincount(batch.group_B) if batch.group_B is not None else np.zeros(0, int)
    group = int(sizes[0]) if sizes.size > 1 and np.unique(sizes).size == 1 else 0
    by = max((1, -1, 2, -2, *((group, -group) if group > 1 else ())), key=agreement)
    turned = own <= 1 - OTHER
    if own >= OWN or not (turned or agreement(by) >= OTHER):
        return None
    where = f"{abs(by)} row{'s' * (abs(by) > 1)} {'before' if by > 0 else 'after'}"
    paid = batch.columns.reward_name
    return error(
        f"scores are turned around: {paid} is high just where {named} is 0"
        if turned
        else f"scores belong to other samples: {paid} is high where {named} of the answer {where} is 1, not of its own",
        batch.laid.where(paid, sample=int(np.flatnonzero((rows[0][1] > middle) != rows[0][2])[:1].sum())),
        shown(f"scores that agree with their own {named}", own, f">= {OWN:g}"),
        *([] if turned else [shown(f"that agree with {named} {where}", agreement(by))]),
        shown("samples", total), shown("of them right", right),
        cause="the comparison, or the sign of the score, is turned around: wrong answers are paid, right ones are not"
        if turned
        else "scores come back in another order than the samples, or were rolled or shuffled after they were computed: "
        "a row is paid for its neighbour's answer",
        steps=[batch.step for batch, *_ in rows if batch.step is not None],
    )  # fmt: skip


#: Steps, and how well the changes of two figures go together before one makes the other: of 12 pairs by chance, one in
#: a thousand comes to .8.
FEWEST_STEPS, IN_STEP = 12, 0.85
#: The share of the steps in which the one moves that the other has to go with it: a few large first steps correlate.
ALIKE = 0.7
#: How far a length has to have come before what is paid for it matters.
FAR = 1.3
_RIGHT = regex(r"(?i)accura|correct|exact|solved|success|pass@|(?:^|[/_.])acc(?:$|[@/_.])")


def _by_changes(a: Series, b: Series) -> float | None:
    """Correlation of the changes from step to step of two figures; None where they are too few, or one rests; 0 where
    `b` moves in too few steps, or `a` does not go with it in most of these: then it hangs on a few of them.
    """
    rows = [row for _, row in together(a, b)]
    if len(rows) < FEWEST_STEPS:
        return None
    xs, ys = ([y - x for x, y in pairwise(values)] for values in zip(*rows, strict=True))
    by = trends.line(xs, ys)[0]
    moves = [x * y * by for x, y in zip(xs, ys, strict=True) if y]
    if by and (len(moves) < FEWEST_STEPS - 1 or sum(each > 0 for each in moves) < ALIKE * len(moves)):
        return 0.0
    return by or None


#: Responses that were cut and have one reward, before it is no chance, and the steps they are of.
CUT, OVER = 8, 3
#: How often chance may come to as much.
CHANCE = 1e-4


@rule("L32", "responses that are cut have one high reward", link="rewards", scope="case", lasts=True,
      explains=("D20", "L08"),
      source="a judge that cannot parse an unfinished answer and falls back to its default")  # fmt: skip
def pays_for_cut(case: Case) -> Finding | None:
    """The reward of responses that were cut off at the limit, 8 and more in 3 steps and more to the last: one and the
    same in all of them, no less than what half of the finished ones have, and one that so many finished ones would not
    all have by chance (1e-4). A warning: an answer nobody finished is right by default.
    """
    steps: list[tuple[StepBatch, Array, Array]] = []
    for batch in case.batches():
        cut_B, reward_B = truncated(batch), batch.reward_B
        if batch.step is None or cut_B is None or reward_B is None or not np.isfinite(reward_B).all():
            continue
        if cut_B.any() and not cut_B.all():
            steps.append((batch, cut_B, reward_B))
    # From some step on: what was so before may be right.
    last = steps[-1][2][steps[-1][1]][0] if steps else 0.0
    since = len(steps)
    while since and np.allclose(steps[since - 1][2][steps[since - 1][1]], last, atol=1e-6):
        since -= 1
    told = steps[since:]
    cut = sum(int(cut_B.sum()) for _, cut_B, _ in told)
    skip_if(len(told) < OVER or cut < CUT, f"needs {CUT} responses that were cut, with one reward, over {OVER} steps")
    ended = np.concatenate([reward_B[~cut_B] for _, cut_B, reward_B in told])
    as_much = float((np.abs(ended - last) <= 1e-6).mean())
    if (
        last < np.median(ended) - 1e-6
        or last <= ended.min() + 1e-6
        or as_much**cut > CHANCE
        or np.unique(np.round(ended, 6)).size < 2
    ):
        return None
    batch, cut_B, _ = told[0]
    return warning(
        f"responses that are cut off have one reward, {last:.4g}, as finished ones that are right: all {cut} of them, "
        f"from step {batch.step} on",
        batch.laid.where(batch.columns.reward_name, sample=int(cut_B.argmax())),
        shown("responses that were cut", cut), shown("their reward", float(last)),
        shown("median reward of finished ones", float(np.median(ended))),
        shown("finished ones with just this reward", as_much, "as many"),
        cause="the judge gives what it cannot parse (an answer that was cut) its default or its highest score: nothing "
        "keeps responses from growing to the limit",
        next_step="score a cut response by hand; pay nothing for it, or leave it out of the loss",
        steps=[each.step for each, *_ in told],
    )  # fmt: skip


@rule("L32", "the reward pays for something else than answers", link="trend", scope="signals",
      needs=("reward", "response_length|reward_function|held_out"),
      explains=("D20", "D25", "L05", "L08", "L09", "L12", "L20", "L24", "D37"),
      source="arXiv 2310.03716 (a long way to go: length in RLHF); arXiv 2210.10760")  # fmt: skip
def pays(log: RunLog) -> Finding | None:
    """The reward's changes from step to step go with those of the mean length (correlation over .85, 12 steps and
    more), and the length has come to 1.3 times what it was, or to less than that part of it, by a trend that chance
    does not explain: an error where it rises with the reward, or falls while the reward rises (not where the logged
    best and worst reward are one number each in nine steps of ten: a judge's ends, and failures are long; nor where the
    share of right answers rises by a trend: what is right is short). Against those of the share of right answers (below
    -.85): an error, the reward's sign is turned; not where the logged functions add up to the reward and right answers
    count for it; and nothing where a logged part makes the reward's rise while they fall (L12 names it). Noise of
    batches makes no such correlation: one figure is made of the other. It has to be of 11 changes and more, and the
    reward goes that way in seven of ten of them.
    """
    reward = given(log.get("reward"))
    length = log.get("response_length")
    judged = [one for one in log.all("reward_function") if _RIGHT.search(one.name) and one.name != reward.name]
    # Where the parts are logged that the reward is made of, their sum tells with which sign each is in it.
    paid = {} if not judged else weights_or_sum(log)
    turned = (
        (one, by) for one in judged
        if paid.get(one.name, -1.0) < 0 and (by := _by_changes(reward, one)) is not None and by < -IN_STEP
    )  # fmt: skip
    for one, by in turned:
        return error(
            f"the reward's sign is turned: {reward.name} falls whenever {one.name} rises, and rises when it falls",
            reward,
            shown("correlation of their changes", by, f"> -{IN_STEP:g}", reward.source),
            one.shown(one.values[-1]),
            cause="right answers are punished: the score is negated, a distance or a loss stands for a reward, or a "
            "component's weight is negative",
            next_step="score a right and a wrong answer by hand",
            link="rewards",
        )
    # What the reward follows is then what that part does to the answers.
    if any(paid_instead(log, one) is not None for one in judged):
        return None
    cut = log.get("truncated")
    if cut is not None and (by := _by_changes(reward, cut)) is not None and by > IN_STEP and trends.rises(cut.finite):
        return error(
            f"the reward pays for responses that are cut: {reward.name} follows {cut.name} step by step, which comes "
            f"to {trends.level(cut.finite, 3):.2g}",
            cut.ended,
            shown("correlation of their changes", by, f"< {IN_STEP:g}", reward.source),
            cut.shown(trends.level(cut.finite, 3), f"about {trends.level(cut.finite[:3], 3):.2g}"),
            cause="an answer that is not finished counts as right, or is not punished as a wrong one is: the policy "
            "learns never to end",
            next_step="score a cut response by hand; leave cut ones out of the loss, or pay nothing for them",
        )
    by = None if length is None else _by_changes(reward, length)
    if length is None or by is None:
        raise Skip(f"needs reward and response length, or the share of right answers, of {FEWEST_STEPS} steps")
    begun, now = trends.level(length.finite[:3], 3), trends.level(length.finite, 3)
    # Tasks of their own lengths and rewards make both alternate from batch to batch, and neither goes anywhere.
    drift = trends.drift(length.finite)
    longer, shorter = drift > trends.DRIFT_Z and now > FAR * begun, drift < -trends.DRIFT_Z and now < begun / FAR
    if not (longer and by > IN_STEP) and not (shorter and by < -IN_STEP):
        return None
    # Of tasks of many turns those that fail are the long ones; what pays per token has no ends of its own.
    best, worst = _end(log.get("reward_max")), _end(log.get("reward_min"))
    if shorter and any(trends.rises(one.finite) for one in judged):
        return None
    if shorter and best is not None and worst is not None and worst <= min(reward.finite) <= max(reward.finite) <= best:
        return None
    return error(
        f"the reward pays for {'longer' if longer else 'shorter'} responses: {reward.name} follows {length.name} step "
        f"by step, and the length goes from {begun:.3g} to {now:.3g}: length hacking",
        length.ended,
        shown("correlation of their changes", by, f"< {IN_STEP:g} in size", reward.source),
        length.shown(now, f"about {begun:.3g}"),
        cause=f"the judge pays for {'length' if longer else 'brevity'} (a bonus or penalty per token, a reward model "
        f"with that bias), and the policy learns it instead of the task",
        next_step="score one answer padded and cut by hand; look at what is right per length; reward within a group of "
        "like lengths, or without the length's term",
    )


def _end(series: Series | None) -> float | None:
    """A batch's best (or worst) reward, where it is one number in nine steps of ten."""
    values = [] if series is None else series.finite
    end = trends.level(values, len(values)) if values else math.nan
    return end if 10 * values.count(end) >= 9 * len(values) > 0 else None
