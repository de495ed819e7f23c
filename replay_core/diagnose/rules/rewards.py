"""Rewards within their groups: without a spread, or another response, no advantage and no gradient but the KL's."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from itertools import groupby, pairwise
from statistics import fmean, median, median_low
from typing import TYPE_CHECKING

import numpy as np

from replay_core.diagnose import trends
from replay_core.diagnose.advantage_variants import are_raw
from replay_core.diagnose.algorithm import GROUP_SIZE, OF_GROUPS, filters_groups, severity_of_raw, why_raw
from replay_core.diagnose.answers import are_one, groups_of_one_answer
from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.case import Case
from replay_core.diagnose.earlier import sure_policy
from replay_core.diagnose.finding import Evidence, Finding, error, finding, listed, look_at, share, shown, warning
from replay_core.diagnose.flat import Array, ranges_G
from replay_core.diagnose.function_weights import NOTHING, function_weights
from replay_core.diagnose.log_steps import (
    NO_STD,
    StepTold,
    first_broken,
    is_of_one_group,
    numbers,
    severity_of,
    steps_of,
    steps_told,
)
from replay_core.diagnose.rule import Skip, given, rule, skip_if
from replay_core.diagnose.rules.tokens import truncated
from replay_core.diagnose.signals import Point, RunLog, Series
from replay_core.regexes import regex

if TYPE_CHECKING:
    from replay_core.documents.diagnosis import Severity

#: So many responses beside the first of their group are not all rewarded alike by chance.
FEW_RESPONSES = 10
#: A spread this small beside the rewards themselves is rounding: rewards are stored as float32.
EQUAL = 1e-6
#: What the rounding of a mean becomes where it is divided by no more than the epsilon of verl and TRL.
ROUNDING = 2**-22 / 1e-6
#: Share of groups without a spread from which it is worth saying (miles advisory), and from which the batch is wasted:
#: healthy runs on right-or-wrong rewards have half of their groups solved or failed whole (docs/evidence.md#diagnosis).
MANY, MOSTLY = 0.5, 0.9
#: Share of steps without a difference in any group from which that is how the run samples or judges.
ALWAYS = 0.9


def spreads(batch: StepBatch) -> tuple[Array, Array]:
    """Each group's reward spread (largest - smallest) and size, for groups of finite rewards."""
    rewards_B, group_B = given(batch.reward_B), given(batch.group_B)
    groups = int(group_B.max(initial=-1)) + 1
    low_G, high_G = np.full(groups, np.inf), np.full(groups, -np.inf)
    finite_B = np.isfinite(rewards_B)
    np.minimum.at(low_G, group_B[finite_B], rewards_B[finite_B])
    np.maximum.at(high_G, group_B[finite_B], rewards_B[finite_B])
    sizes_G = np.bincount(group_B[finite_B], minlength=groups)
    return np.where(sizes_G > 0, high_G - low_G, np.nan), sizes_G


def _equal(batch: StepBatch) -> tuple[Array, Array]:
    """Which groups of two and more have equal rewards, and which groups those are at all."""
    spread_G, sizes_G = spreads(batch)
    rewards_B = given(batch.reward_B)
    finite_B = rewards_B[np.isfinite(rewards_B)]
    scale = max(float(np.abs(finite_B).max(initial=0.0)), EQUAL)
    compared_G = sizes_G >= 2
    return compared_G & (spread_G <= EQUAL * scale), compared_G


def _has_other_baseline(batch: StepBatch, equal_G: Array) -> bool:
    """Whether responses of equal rewards have advantages all the same: then a critic or the batch is the baseline."""
    column, group_B = batch.columns.of("advantages"), batch.group_B
    if group_B is None:
        return False
    if column is None:
        return batch.columns.ref("values") is not None
    inside_N = column.said_N & np.repeat(equal_G[group_B], batch.flat.lengths_B) & np.isfinite(column.values_N)
    if batch.trained_N is not None:
        inside_N &= batch.trained_N
    largest = float(np.abs(column.values_N[inside_N]).max(initial=0.0))
    low_B, high_B = batch.flat.extremes(column.values_N, inside_N)
    heard_B = np.isfinite(low_B)
    lowest_G, highest_G = np.full(len(equal_G), np.inf), np.full(len(equal_G), -np.inf)
    np.minimum.at(lowest_G, group_B[heard_B], low_B[heard_B])
    np.maximum.at(highest_G, group_B[heard_B], high_B[heard_B])
    alike = bool((highest_G - lowest_G <= EQUAL).all())
    # A float32 mean of equal rewards may be off by their last bit or two: divided by a std of 0 + 1e-6, the same number
    # in every response of the group.
    rounding = ROUNDING * float(np.abs(given(batch.reward_B)[np.isfinite(given(batch.reward_B))]).max(initial=0.0))
    return largest > max(1e-3, rounding if alike else 0.0)


@rule("D01", "no group has a spread of rewards", link="rewards", scope="batch",
      needs=("rewards|advantage", "group|advantage"), varies=True,
      explains=("D02", "D03", "D04", "D23", "D28", "D55", "L01", "L51"),
      source="trl#3857; docs/evidence.md#loss-of-zero; half of the groups: miles advisory")  # fmt: skip
def zero_spread(batch: StepBatch) -> Finding | None:
    """Share of groups (of two and more) whose rewards are all equal. 1 is an error, 0.9 and more a warning, 0.5 info,
    in half of the steps; in a quarter of them one milder, in fewer worth knowing. Info in steps of so few responses
    that chance does it.

    Equal means a spread within 1e-6 of the largest reward: a small spread is none the worse, normalising makes O(1)
    advantages of it. Silent where equal rewards still have advantages (a critic, or the batch, is the baseline).
    Where four of five groups (4 and more) hold one text each, that is the cause: the engine samples without randomness.
    When every group's rewards are equal but the groups differ from each other, D03 says so instead. Where no rewards
    are recorded, advantages that are all 0 are an error.
    """
    if not (batch.has("rewards") and batch.has("group")):
        return _all_zero(batch)
    equal_G, compared_G = _equal(batch)
    total, count = int(compared_G.sum()), int(equal_G.sum())
    if not total or count / total < MANY or _has_other_baseline(batch, equal_G):
        return None
    rewards_B = given(batch.reward_B)
    everywhere = count == total
    few = int((spreads(batch)[1][compared_G] - 1).sum()) < FEW_RESPONSES
    between = float(np.nanmax(rewards_B) - np.nanmin(rewards_B))
    if everywhere and between > EQUAL * max(1.0, float(np.nanmax(np.abs(rewards_B)))) and total > 1:
        return None
    copied, known = groups_of_one_answer(batch)
    copies = are_one(copied, known)
    claim = (
        f"every response got the same reward within its group ({share(count, total)} groups): all advantages are 0"
        if everywhere
        else f"{share(count, total)} groups have equal rewards and teach nothing"
    )
    if copies:
        claim = f"the responses of a group are the same text ({share(copied, known)} groups): {claim}"
    place = batch.laid.where(batch.columns.reward_name, sample=0)
    return finding(
        "info" if few else "error" if everywhere else "warning" if count / total >= MOSTLY else "info",
        claim,
        place,
        shown("share of groups without a spread", count / total, f"< {MOSTLY}", f"rewards and groups of {batch.name}"),
        shown("smallest reward", float(np.nanmin(rewards_B))),
        shown("largest reward", float(np.nanmax(rewards_B))),
        cause=_NO_CHANCE
        if copies
        else _filtered(batch, "the judge or reward function returns a constant, the prompts are all solved or failed")
        if everywhere
        else "prompts are too easy or too hard for this policy; they cost rollouts and give no gradient",
        next_step=look_at(place) + "   # then score two different responses by hand",
    )


_NO_CHANCE = (
    "the engine samples without randomness: greedy decoding (temperature 0, do_sample off), or one seed for every "
    "sample of a prompt; a policy whose entropy has collapsed writes one text, too"
)


def _filtered(batch: StepBatch, others: str) -> str:
    """Why no group of a step has a spread: a filter that keeps those without one leaves just that."""
    turned = (
        "(dynamic sampling) keeps those without a spread and throws the others away: its condition is turned around"
    )
    if filters_groups(batch.laid.algorithm):
        return f"the filter of groups that is stated {turned}; or it gave up, and {others}"
    return f"{others}, or a filter of groups {turned}"


def _all_zero(batch: StepBatch) -> Finding | None:
    column, trained_N = given(batch.columns.of("advantages")), batch.trained_N
    heard_N = column.said_N if trained_N is None else column.said_N & trained_N
    if not heard_N.any() or np.any(column.values_N[heard_N] != 0) or len(batch) < 2:
        raise Skip("needs rewards and groups; the advantages alone are not all 0")
    return error(
        f"every advantage is 0 ({len(batch)} samples): the policy loss has no gradient",
        batch.laid.where("advantages", sample=0),
        shown("largest |advantage|", 0.0, "> 0", column.source),
        shown("rewards beside them", batch.has("rewards")),
        cause="no group has a spread of rewards, or advantages are cleared before the loss; rewards and groups of "
        "these samples, which would tell, are not recorded together",
        next_step="rldbg record -- YOUR COMMAND, then rldbg diagnose rldbg-dump",
        link="advantages",
    )


@rule("D03", "rewards differ between groups, never within one", link="rewards", scope="batch",
      needs=("rewards", "group"), varies=True,
      explains=("D01", "D02", "D04", "D23", "L01"),
      source="trl#3857")  # fmt: skip
def spread_only_between_groups(batch: StepBatch) -> Finding | None:
    """Rewards vary over the batch and in no group of two and more: `reward_std` looks healthy, every advantage is 0.

    Also where single reward functions vary within groups and their sum does not. Info in steps of so few responses that
    chance does it. Where four of five groups (4 and more) hold one text each, that is the cause.
    """
    equal_G, compared_G = _equal(batch)
    rewards_B = given(batch.reward_B)
    beside_the_first = int((spreads(batch)[1][compared_G] - 1).sum())
    if not compared_G.any() or not (equal_G == compared_G).all() or compared_G.sum() < 2:
        return None
    spread = float(np.nanmax(rewards_B) - np.nanmin(rewards_B))
    scale = max(float(np.nanmax(np.abs(rewards_B))), EQUAL)
    if spread <= EQUAL * scale or _has_other_baseline(batch, equal_G):
        return None
    place = batch.laid.where(batch.columns.reward_name, sample=0)
    copied, known = groups_of_one_answer(batch)
    copies = are_one(copied, known)
    return finding(
        "info" if beside_the_first < FEW_RESPONSES else "error",
        (f"the responses of a group are the same text ({share(copied, known)} groups): " if copies else "")
        + "no group has a spread of rewards: they differ from prompt to prompt and never between the responses to one "
        "prompt, so that all advantages are 0",
        place,
        shown("reward std over the batch", float(np.nanstd(rewards_B)), None, f"rewards of {batch.name}"),
        shown("groups with a spread", 0, "> 0"),
        shown("groups", int(compared_G.sum())),
        cause=_NO_CHANCE
        if copies
        else _filtered(
            batch, "the reward depends on the prompt alone (a std over the batch hides it), its parts cancel in the sum"
        ),
        next_step=look_at(place) + "   # and watch frac_reward_zero_std, not reward_std",
    )


#: Steps that are few: what holds in one of them may be its prompts'.
FEW = 3
_NO_DIFFERENCE = ("frac_zero_std|reward_std|advantage_max",)


@rule("D03", "rewards differ over the batch, in no group", link="groups", scope="signals", needs=_NO_DIFFERENCE,
      source="trl#3857")  # fmt: skip
def differ_between_groups(log: RunLog) -> Finding | None:
    """Every advantage of a step is 0 (D01), and yet its rewards differ over the batch: the same total for every
    completion of a prompt. Half of the steps is an error, a quarter a warning. An entropy that is next to 0 from the
    first step on (.1 nats), or has fallen to a quarter before, is told as the cause.
    """
    known, dead = _dead_steps(log)
    across = [step for step in dead if (step.batch_std or 0) > NO_STD]
    if across:
        copied = _copied(log)
        sure = None if copied else sure_policy(log, steps_of(across))
        # Of few groups each is solved whole, or failed whole, again and again.
        own = copied or sure is not None
        return finding(
            severity_of(len(across), len(known)) if own else _as_bad(across, known, log.get("reward")),
            f"{copied}rewards differ over the batch, but in no group: every advantage is 0"
            + ("" if sure is None else sure[0]),
            across[0].point.where("reward_std"),
            *_figures(across),
            cause=_NO_CHANCE
            if copied
            else sure[1]
            if sure is not None
            else "every completion of a prompt gets the same total reward (each prompt is solved by all of them or by "
            "none, the reward depends on the prompt alone, the completions of a group are alike, or the reward "
            "functions cancel in their sum); the std logged per reward function is over the batch, not over a group",
            next_step="look at the completions of one group (log_completions=True); rldbg record -- YOUR COMMAND, "
            "then rldbg diagnose rldbg-dump --rule D03",
            steps=steps_of(across),
        )
    return None


@rule("D01", "no reward differs within a group", link="groups", scope="signals",
      needs=(f"{_NO_DIFFERENCE[0]}|reward_max|event:warning|event:rewards",),
      source="trl#3857; miles advisory (0.5); docs/evidence.md#grpo-notes")  # fmt: skip
def no_difference_within_groups(log: RunLog) -> Iterator[Finding]:
    """GRPO's advantage is the reward less its group's mean: without a difference within the group it is 0.

    Fraction of groups whose rewards have std 0 (or, where not logged: the within-group std, the extreme advantages,
    the trainer's warning). 1 in half of the steps is an error, in a quarter a warning, in one of few steps info;
    where a quarter of the last quarter's steps still teach, or the reward has risen to its most in those steps (every
    prompt is solved), a warning at most, and info where the reward rises or
    each step is of one group (all of them or none without a spread, or of two responses in all: the mean reward is the
    middle of the largest and least; or largest times least advantage is one number) and a tenth of the last
    quarter's teach; a median of 0.9 and more a warning, of 0.5, or where the reward rises all the same, info.
    Rewards that differ over the batch but in no group are D03's.

    A warning at most, too, where those steps are what the reward has fallen to (a third of it and less is left, by no
    chance), while half of the first third's had a spread: the judge paid before. And where there are no more of them,
    all along the run, than chance leaves without a right answer (exp(-k) for k of them to a step, more where they
    come together); from .25 on that is info. A small reward std is fine: advantages are normalised.
    """
    yield from _said_by_trainer(log)
    yield from _printed(log)
    if log.has("value_loss"):
        return  # a critic is trained: advantages are not of groups
    known, dead = _dead_steps(log)
    alike = [step for step in dead if (step.batch_std or 0) <= NO_STD]
    if alike:
        means = log.get("reward")
        copied = _copied(log)
        varies = (
            len(known) >= FEW and len(alike) >= ALWAYS * len(known)
            and means is not None and len(set(means.finite)) > len(known) // 2
        )  # fmt: skip
        solved = _solved(alike, means)
        nearly = not solved and _nearly_solved(alike, means)
        never = _never_solved(alike, known, means)
        sure = None if copied or solved or nearly or never else sure_policy(log, steps_of(alike))
        some = "" if len(alike) == len(known) else f", in {len(alike)} of {len(known)} steps"
        fallen = None if copied or solved or sure is not None else _fallen(alike, known, means)
        rare = None if copied or solved or sure is not None or fallen else _rarely_right(alike, known, means)
        as_bad = _as_bad(alike, known, means, is_of_one_group(log))
        if rare is not None and as_bad != "info":
            # Chance alone leaves so many steps without a right answer: those that have one teach.
            as_bad = "info" if rare >= RARELY else "warning"
        if fallen is not None and as_bad == "error":
            as_bad = "warning"  # what it had come to before is what is wrong
        said = (
            "rewards differ over the prompts, but in no group: every advantage is 0"
            if varies
            else _all_equal(alike, log) + some
        )
        yield finding(
            # A step of a group or two that are all wrong is nothing odd.
            "info" if some and len(alike) < FEW else "warning" if solved and as_bad == "error" else as_bad,
            copied
            + said
            + ("" if sure is None else sure[0])
            + ("" if rare is None else f": chance, as there are {rare:.2g} right answers to a step")
            + (
                ""
                if fallen is None
                else f", since the reward fell from {fallen:.3g} to that: before it, groups had a spread"
            ),
            alike[0].point.where("reward_std"),
            *_figures(alike),
            cause=_NO_CHANCE
            if copied
            else sure[1]
            if sure is not None
            else _ACCEPTS
            if _leapt(alike, known, log) and first_broken(log) is None
            else "a judge that is constant did not pay before: updates take from the policy what it could do (a turned "
            "sign of advantages, loss or KL; rewards or advantages of other samples; a learning rate that is too high; "
            "a clipping that is made wrongly), or the prompts get harder; the log does not tell which"
            if fallen is not None
            else "every answer gets all that is paid for, which the reward rose to: these prompts have nothing more to "
            "teach" + _unpaid(log)
            if solved
            else "the answers to a prompt are all right, or all wrong, as the reward nears its most: most prompts are "
            "solved, and those that are not have no right answer among theirs"
            if nearly
            else "prompts too hard for this policy, or too few responses to a step: most have no right answer among "
            "them, as chance has it at this rate"
            if rare is not None
            else "no answer earns anything in these steps, and an answer does in others: the task is hardly ever "
            "solved (prompts far too hard for this policy, answers that are cut), or the judge hardly ever pays"
            if never and 2 * len(alike) >= len(known)
            else "the reward depends on the prompt alone (its mean is another in every step, so that the judge is not "
            "constant), or all responses of a group are the same text: one seed for every sample, or greedy sampling"
            if varies
            else "in these steps every prompt is too easy or too hard for this policy, its updates took from it what "
            "earned rewards, or the judge fails at times (it is not constant: other steps have a spread); a loss that "
            "is not 0 is then KL alone"
            if len(known) - len(alike) >= 2 * FEW
            else "the judge is constant, every prompt is too easy or too hard, or a filter of groups (dynamic "
            "sampling) keeps those without a spread: its condition is turned around; a loss that is not 0 is then KL "
            "alone",
            next_step="look at the rewards of one group (log_completions=True) and at the reward function; "
            "rldbg record -- YOUR COMMAND, then rldbg diagnose rldbg-dump --rule D01",
            steps=steps_of(alike),
        )
    # Where all groups are without a spread and advantages are not 0, groups are of one response.
    partly = [
        step.frac_zero for step in known if step.frac_zero is not None and not (step.frac_zero >= 1 and step.advantage)
    ]
    if partly and not dead and median_low(partly) >= MANY:
        worst, most = max(known, key=lambda step: step.frac_zero or 0), median_low(partly) >= MOSTLY
        reward = log.get("reward")
        learns = reward is not None and trends.rises(reward.finite)
        yield finding(
            "warning" if most and not learns else "info",
            f"{'most groups' if most else 'half of the groups or more'} have no difference in reward: they teach "
            "nothing",
            worst.point.where("frac_zero_std"),
            *numbers(frac_zero_std=worst.frac_zero, reward_std=worst.group_std),
            cause="prompts too easy or too hard for this policy: all completions of a group are right, or all are "
            "wrong",
            next_step="filter prompts by solve rate, raise the temperature, or sample more completions per prompt",
            steps=steps_of(known),
        )


def _solved(alike: list[StepTold], reward: Series | None) -> bool:
    """Whether the steps without a spread are those in which the reward is at the most it comes to, having risen there:
    every answer earns all there is.
    """
    if reward is None or len(reward.finite) < FEW:
        return False
    at = {point.step: point.value for point in reward.points}
    there = [at[step.point.step] for step in alike if step.point.step in at]
    most, begun = max(reward.finite), median(reward.finite[:3])
    near = most - 0.02 * abs(most)
    return begun < near and len(there) >= 0.9 * len(alike) and sum(one >= near for one in there) >= 0.8 * len(there)


def _never_solved(alike: list[StepTold], known: list[StepTold], reward: Series | None) -> bool:
    """Whether the steps without a spread are those of the least reward of all, beside one that has a spread at that
    same entropy: answers differ, and are all wrong.
    """
    if reward is None or not reward.finite or len(alike) == len(known):
        return False
    at, least = {point.step: point.value for point in reward.points}, min(reward.finite)
    if max(reward.finite) == least or not all(at.get(step.point.step) == least for step in alike):
        return False
    return any(step.advantage or step.group_std for step in known if not step.is_dead)


#: Share of its whole rise that a reward has come to where most prompts are solved.
NEARLY = 0.75


def _nearly_solved(alike: list[StepTold], reward: Series | None) -> bool:
    """Whether the reward rises over the run, and four fifths of the steps without a spread lie in the upper quarter of
    its rise: a policy that gets sure of right answers has an entropy that falls, too, and it is no collapse.
    """
    if reward is None or not trends.rises(reward.finite):
        return False
    at = {point.step: point.value for point in reward.points}
    there = [at[step.point.step] for step in alike if step.point.step in at]
    begun = median(reward.finite[:3])
    near = begun + NEARLY * (max(reward.finite) - begun)
    return bool(there) and len(there) >= 0.9 * len(alike) and sum(one >= near for one in there) >= 0.8 * len(there)


def _as_bad(alike: list[StepTold], known: list[StepTold], reward: Series | None, of_one: bool = False) -> Severity:
    """Steps of a prompt or two have no spread again and again; that the others still teach is seen to the end."""
    severity = severity_of(len(alike), len(known))
    # A run of which all have none from some step on has stopped learning there.
    last = known[-max(1, len(known) // 4) :]
    alive = sum(not step.is_dead for step in last)
    whole = (all(step.frac_zero in (0, 1) for step in known) or of_one) and len(alike) < MOSTLY * len(known)
    still = len(known) >= 2 * trends.MIN_STEPS and (4 if not whole else 10) * alive >= len(last)
    if not still or severity == "info":
        return "warning" if whole and severity == "error" and any(not step.is_dead for step in last) else severity
    # Steps of one group each: their share is the share of groups, of which healthy runs have half and more.
    rises = reward is not None and trends.rises(reward.finite)
    return "info" if rises or whole else "warning"


def _all_equal(alike: list[StepTold], log: RunLog) -> str:
    """That no group has a spread; and whether every reward is one and the same number, where the log tells."""
    top, low = ({p.step: p.value for p in s.points} if (s := log.get(name)) else {}
                for name in ("reward_max", "reward_min"))  # fmt: skip
    values = {bound.get(step.step) for step in alike for bound in (top, low)}
    if None in values and all(step.batch_std == 0 for step in alike):
        values = set(_means_of(alike, log))
    if len(values) == 1 and None not in values:
        return f"every reward is {values.pop():g}: no group has a spread, and every advantage is 0"
    return "all rewards of every group are equal: every advantage is 0"


def _means_of(some: list[StepTold], log: RunLog) -> list[float | None]:
    """The mean reward of these steps, None where it is not logged."""
    reward = log.get("reward")
    means = {} if reward is None else {point.step: point.value for point in reward.points}
    return [means.get(step.step) for step in some]


#: Steps on either side of a leap to one reward for all, and how far it leaps in shares of what it had wavered by.
BESIDE_LEAP, LEAPS = 8, 2.0


def _unpaid(log: RunLog) -> str:
    """The end of a cause: functions that are logged and weigh nothing in the reward, none of which is at its most."""
    weights = function_weights(log) or {}
    unpaid = [
        one for one in log.all("reward_function")
        if abs(weights.get(one.name, 1.0)) < NOTHING and 0 <= trends.level(one.finite) < SOLVED
    ]  # fmt: skip
    if not unpaid:
        return ""
    return f". {listed([one.name for one in unpaid])} is logged and weighs nothing in the reward: that is not paid for"


#: Share of its most from which a reward function has nothing left to teach.
SOLVED = 0.9
#: Steps of a third, how many of the first's teach, the share by which the last's have more without a spread, and what
#: part of the reward at first is left.
AROUND, TAUGHT, MORE, LEFT = 4, 0.5, 0.3, 0.34


def _fallen(alike: list[StepTold], known: list[StepTold], reward: Series | None) -> float | None:
    """What the reward was, where steps without a spread are what it has fallen to: they have the least of all rewards,
    half of the first third's steps had a spread and far fewer of the last's, and the reward falls by more than chance.
    """
    if reward is None or len(known) < 3 * AROUND:
        return None
    means = {point.step: point.value for point in reward.points if math.isfinite(point.value)}
    third, dead = len(known) // 3, {id(step) for step in alike}
    parts = [known[:third], known[third:-third], known[-third:]]
    levels = [[means[step.point.step] for step in part if step.point.step in means] for part in parts]
    if not all(levels):
        return None
    least, most = min(means.values()), max(means.values())
    there = [means[step.point.step] for step in alike if step.point.step in means]
    before, _, now = map(fmean, levels)
    shares = [sum(id(step) in dead for step in part) / len(part) for part in parts]
    is_least = bool(there) and max(there) <= least + 0.02 * (most - least)
    falls = now - least <= LEFT * (before - least)
    grows = shares[0] <= 1 - TAUGHT and shares[2] >= shares[0] + MORE
    if is_least and falls and grows and trends.drift(list(means.values())) < -trends.DRIFT_Z:
        return before
    if is_least and (soon := _lost_at_once([means[step.point.step] for step in known if step.point.step in means])):
        return soon
    since = _never_again(known, dead)
    earlier = [means[step.point.step] for step in known[:since] if step.point.step in means]
    return fmean(earlier) if is_least and since and earlier and fmean(earlier) > least else None


#: Standard deviations that the first steps' reward lies above all others', in units of the least that one earns.
AT_ONCE = 4.0


def _lost_at_once(values: list[float]) -> float | None:
    """The first steps' reward, where a third and less of it is left behind them, by no chance."""
    least, begun, later = min(values), median(values[:FEW]), fmean(values[FEW:])
    unit = min((value - least for value in values if value > least), default=0.0)
    if not unit or later - least > LEFT * (begun - least):
        return None
    right = (later - least) / unit
    return begun if (begun - least) / unit >= right + AT_ONCE * math.sqrt(max(right, 1.0)) else None


def _never_again(known: list[StepTold], dead: set[int]) -> int:
    """The place from which on next to no step has a spread to the end, while most before it have; 0 where none is."""
    for since in range(AROUND, len(known) - 2 * AROUND + 1):
        behind, ahead = (sum(id(step) in dead for step in part) / len(part) for part in (known[since:], known[:since]))
        if id(known[since]) in dead and behind >= ALWAYS and ahead <= 1 - TAUGHT:
            return since
    return 0


#: Steps with a right answer before chance is told by them, how far their means lie off a grid, beside its unit, and
#: right answers to a step that are enough to learn from.
TOLD, GRID, RARELY = 3, 0.02, 0.25
#: Normal quantile of p = .05, one-sided; and the chance of so many in a row that is none.
FALLING, NO_CHANCE = 1.645, 0.01


def _rarely_right(alike: list[StepTold], known: list[StepTold], reward: Series | None) -> float | None:
    """Right answers to a step, where chance alone leaves as many steps without one: the reward of a step is the least
    of all, or a whole number of times more. Of a mean of k, and a variance of v k, v^(-k / (v - 1)) of the steps
    have none (a negative binomial; exp(-k) where v is 1), two standard errors more by chance.
    """
    if reward is None or len(known) < trends.MIN_STEPS:
        return None
    means = {point.step: point.value for point in reward.points if math.isfinite(point.value)}
    values = [means[step.point.step] for step in known if step.point.step in means]
    there = [means[step.point.step] for step in alike if step.point.step in means]
    if len(values) < len(known) or not values:
        return None
    least = min(values)
    above = [value - least for value in values if value > least]
    unit = min(above, default=0.0)
    if len(above) < TOLD or max(there) > least + GRID * unit or len(above) + len(there) < len(values):
        return None
    if any(abs(each / unit - round(each / unit)) > GRID * max(1, round(each / unit)) for each in above):
        return None
    # Of chance those steps lie anywhere; a run that has lost what it could do has them at its end.
    first, last = known[: len(known) // 2], known[len(known) // 2 :]
    dead = {id(step) for step in alike}
    halves = [sum(id(step) in dead for step in part) / len(part) for part in (first, last)]
    above_all = [value - least for value in values]
    right = fmean(above_all) / unit
    error = math.sqrt(0.25 * (1 / len(first) + 1 / len(last)))
    is_even = halves[1] - halves[0] <= 2 * error
    # Right answers come together, as those to one easy prompt do: so many more steps have none.
    # What a trend makes of the variance is not in the differences from step to step.
    local = fmean([(b - a) ** 2 for a, b in pairwise(values)]) / 2
    spread = max(local / unit / fmean(above_all), 1 + 1e-6)
    none = spread ** (-right / (spread - 1))
    most = none * len(values) + 2 * math.sqrt(none * (1 - none) * len(values))
    longest = max(len(list(run)) for is_dead, run in groupby(id(step) in dead for step in known) if is_dead)
    falls = trends.drift(values) < -FALLING or len(known) * none**longest < NO_CHANCE
    return right if is_even and not falls and len(there) <= most else None


def _leapt(alike: list[StepTold], known: list[StepTold], log: RunLog) -> bool:
    """Whether every reward becomes one number from one step to the next, and stays it: no policy comes to that so."""
    first = next((at for at, step in enumerate(known) if step is alike[0]), 0)
    after, before = known[first:], known[:first]
    if len(after) != len(alike) or min(len(before), len(after)) < BESIDE_LEAP:
        return False
    if any(step.batch_std != 0 for step in alike):
        return False
    now, then = _means_of(alike, log), [value for value in _means_of(before, log) if value is not None]
    if None in now or len(set(now)) > 1 or len(then) < BESIDE_LEAP:
        return False
    to = given(now[0])
    # Of a reward that was on its way there the last steps are near it.
    return abs(to - median(then[-3:])) > LEAPS * max(max(then[-BESIDE_LEAP:]) - min(then[-BESIDE_LEAP:]), 1e-6)


_ACCEPTS = (
    "the judge gives every answer one number from that step on, right or wrong: a check that accepts (or refuses) "
    "whatever it is given, a fallback for an exception, a service that is down. No policy comes to that from one step "
    "to the next"
)


def _dead_steps(log: RunLog) -> tuple[list[StepTold], list[StepTold]]:
    """The steps of which the log tells whether an advantage differs from 0, and those where none does.

    Raises:
        Skip: samples are recorded beside it whose rewards differ within groups.
    """
    for batch in log.samples():
        if batch.has("rewards") and batch.has("group"):
            equal_G, compared_G = _equal(batch)
            if compared_G.any() and not (equal_G == compared_G).all():
                raise Skip("rewards differ within groups of the samples that are recorded")
            advantage_B, group_B = batch.advantage_B, given(batch.group_B)
            if advantage_B is not None and any(
                np.ptp(advantage_B[inside]) > 0.1
                for group in np.unique(group_B)
                if np.isfinite(advantage_B[inside := group_B == group]).all()
            ):
                raise Skip("advantages differ within groups of the samples that are recorded (D04)")
    known = [step for step in steps_told(log) if step.is_dead is not None]
    return known, [step for step in known if step.is_dead]


def _copied(log: RunLog) -> str:
    """How a claim begins where the samples that are recorded beside a log are one text in each group; else nothing."""
    told = [groups_of_one_answer(batch) for batch in log.samples()]
    same, known = sum(one for one, _ in told), sum(of for _, of in told)
    return f"the responses of a group are the same text ({share(same, known)} groups): " if are_one(same, known) else ""


def _figures(some: list[StepTold]) -> tuple[Evidence, ...]:
    first = some[0]
    return numbers(
        frac_zero_std=first.frac_zero, reward_std_within_groups=first.group_std, advantage_max=first.advantage,
        reward_std_over_the_batch=first.batch_std, loss=first.loss, grad_norm=first.grad, steps=len(some),
    )  # fmt: skip


def _said_by_trainer(log: RunLog) -> Iterator[Finding]:
    """What a trainer's own warnings say of a micro-batch; without them, printed figures that are exactly 0."""
    alike, same = log.warnings("All advantages are near zero"), log.warnings("completions are identical")
    for told, why in (
        (alike, "the judge gave every completion the same score"),
        (same, "all completions of the prompt are the same text: a greedy or collapsed sampler"),
    ):
        if told:
            points = [one.point for one in told]
            micros = len({point.place for point in (*points, *log.micros("micro_loss"))})
            evidence = [shown("warning", told[0].text[:200], None, f"line {points[0].line}")]
            yield _one_group(points, micros, evidence, why)
    masked = {point.place for point in log.micros("num_masked")}
    losses = {point.place: point for point in log.micros("pg_loss")}
    flat = [
        point for point in log.micros("reward_std")
        if point.value == 0 and point.place not in masked and point.place in losses and losses[point.place].value == 0
    ]  # fmt: skip
    if flat and not alike and not same:
        evidence = [
            shown("rewards_std", 0.0, "> 0", f"line {flat[0].line}"),
            shown("pg_loss", 0.0, None, f"line {losses[flat[0].place].line}"),
        ]
        yield _one_group(flat, len(losses), evidence, "the judge gave every completion the same score")


_REWARD = regex(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
#: Lists of rewards that tell before a share of them is one.
LISTS = 4


def _printed(log: RunLog) -> Iterator[Finding]:
    """Rewards that a trainer prints as a list, a group's or a batch's: how many of the lists are one number."""
    if any(map(log.has, ("reward_std", "frac_zero_std", "advantage_max"))):
        return
    lists = [(told, [float(each) for each in _REWARD.findall(told.text[told.text.index("[") :].partition("]")[0])])
             for told in log.events("rewards")]  # fmt: skip
    groups = [(told, values) for told, values in lists if len(values) > 1]
    flat = [(told, values[0]) for told, values in groups if len(set(values)) == 1]
    if len(groups) < LISTS or 4 * len(flat) < len(groups):
        return
    values = Counter(value for _, value in flat)
    often, count = values.most_common(1)[0]
    yield finding(
        severity_of(len(flat), len(groups)),
        f"all rewards of a group are equal in {share(len(flat), len(groups))} groups that the log prints, "
        f"{often:g} in {count} of them: their advantages are 0, and they teach nothing",
        flat[0][0].point.where("rewards"),
        shown("line", flat[0][0].text[:160], None, f"line {flat[0][0].point.line}"),
        shown("groups of one reward", share(len(flat), len(groups)), "few"),
        cause="every answer of the group failed or was right alike: "
        + (
            "what is scored so is a failure (nothing to judge: an answer that does not parse, render or run)"
            if often <= 0
            else "the prompt is too easy, or the judge is constant"
        ),
        next_step="read the answers of one such group; sample more than two per prompt, and take prompts that are "
        "sometimes solved",
        steps=steps_of(told.point for told, _ in flat),
    )  # fmt: skip


def _one_group(points: list[Point], micros: int, evidence: list[Evidence], why: str) -> Finding:
    return finding(
        severity_of(len(points), micros),
        "all rewards of a group are equal: every advantage is 0",
        points[0].where("rewards"),
        *evidence,
        shown("micro-batches", share(len(points), micros), None, "log"),
        cause=f"{why}; a loss that is not 0 is then KL alone",
        next_step="look at one group's completions and scores; rldbg record -- YOUR COMMAND",
        steps=steps_of(points),
    )


@rule("D98", "samples have no reward: every function gives NaN", link="rewards", scope="batch", lasts=True,
      explains=("D01", "D04", "D21", "D28", "D54", "L08"),
      source="TRL sums with nansum: a sample without any reward counts as 0, R1-V#69")  # fmt: skip
def missing(batch: StepBatch) -> Finding | None:
    """Samples for which every recorded reward function gives a number that is not finite: a warning where the
    reward that is summed of them is finite all the same, or is not recorded. (NaN of some functions is TRL's way to say
    that they are not meant for a sample.)
    """
    functions_FB = batch.columns.reward_functions_FB
    if functions_FB is None:
        raise Skip("no reward functions are recorded apart")
    none_B = np.asarray(~np.isfinite(functions_FB).any(axis=0))
    if not none_B.any():
        return None
    reward_B = batch.columns.per_sample("reward")
    if reward_B is not None and not np.isfinite(reward_B[none_B]).any():
        raise Skip("their summed reward is not finite either (D21)")
    counted = None if reward_B is None else float(reward_B[none_B][np.isfinite(reward_B[none_B])][0])
    return warning(
        f"{share(int(none_B.sum()), int(none_B.size))} samples have no reward: every function gives NaN for them"
        + ("" if counted is None else f", and they count as {counted:g}"),
        batch.laid.where(batch.columns.reward_functions[0], sample=none_B),
        shown("samples that are not finite in every function", share(int(none_B.sum()), int(none_B.size)), "none",
        batch.columns.reward_functions[0]),
        shown("reward they are counted with", counted),
        shown("reward functions", len(functions_FB)),
        cause="the reward function fails on these answers (a division by 0, a parser that finds nothing, a judge that "
        "does not answer) and its NaN is summed as 0 (nansum): answers that nobody judged are taught as bad ones. "
        "Return a number, or leave such samples out of their groups",
    )  # fmt: skip


#: Groups that have one low score, as many that have others, the steps they are of, and different scores of the others.
LOW_GROUPS, LOW_STEPS, SEVERAL = 6, 3, 3


@rule("D98", "whole groups have one score that no others have", link="rewards", scope="case", lasts=True,
      explains=("D01", "D56", "L08"),
      source="a reward server that fails for a batch of requests, and a score that stands for it")  # fmt: skip
def stands_for_none(case: Case) -> Finding | None:
    """The lowest score of the run, given to all responses of a group or to none of it, in 6 groups and more of 3 steps
    and more, while as many groups of those steps have others (3 different ones and more, and a spread in most groups):
    a warning. Not where those responses were cut off: that is a penalty.
    """
    low: list[tuple[StepBatch, Array]] = []
    reward_N = [batch.reward_B for batch in case.batches() if batch.reward_B is not None and batch.step is not None]
    every = np.concatenate(reward_N) if reward_N else np.zeros(0)
    skip_if(not every.size or not np.isfinite(every).all(), "needs finite rewards of several steps")
    worst = float(every.min())
    others: list[float] = []
    held = spread = 0
    for batch in case.batches():
        reward_B, group_B = batch.reward_B, batch.group_B
        if reward_B is None or group_B is None or batch.step is None or not (low_B := reward_B <= worst).any():
            continue
        for group in np.unique(group_B):
            inside = group_B == group
            if low_B[inside].any() != low_B[inside].all() or inside.sum() < 2:
                return None
            held += not low_B[inside].any()
            spread += not low_B[inside].any() and np.ptp(reward_B[inside]) > 0
        cut_B = truncated(batch)
        if cut_B is not None and cut_B[low_B].any():
            return None
        others += reward_B[~low_B].tolist()
        low.append((batch, low_B))
    groups = sum(len(np.unique(given(batch.group_B)[low_B])) for batch, low_B in low)
    if min(groups, held) < LOW_GROUPS or len(low) < LOW_STEPS or 2 * spread < held or len(set(others)) < SEVERAL:
        return None
    batch, low_B = low[0]
    rows = np.flatnonzero(low_B)
    same = all(np.array_equal(np.flatnonzero(each), rows) for _, each in low)
    return warning(
        f"a score of {worst:g} stands for whole groups: all responses of {groups} groups have it, and none of the "
        f"other {held}" + (f"; rows {rows[0]} to {rows[-1]} in every such step" if same else ""),
        batch.laid.where(batch.columns.reward_name, sample=low_B),
        shown("groups of which all have it", groups), shown("groups of which some have it", 0),
        shown("the lowest score of the others", min(others)), shown("different scores of the others", len(set(others))),
        cause="a default that is given where nobody judged (a time-out, an exception, a worker that is down, a task "
        "without a verifier), whatever was answered: such groups teach nothing, and the mean reward is too low",
        next_step="count the reward function's failures, and leave such samples out",
        steps=[batch.step for batch, _ in low if batch.step is not None],
    )  # fmt: skip


@rule("D05", "groups of one response: no baseline", link="groups", scope="batch", needs=("group",),
      explains=("D01", "D03", "D04", "D24"), lasts=True,
      source="Search-R1#88; verl compute_grpo_outcome_advantage leaves a group of one its raw reward")  # fmt: skip
def groups_of_one(batch: StepBatch) -> Finding | None:
    """Groups with a single response. All of them is an error where most of their prompts repeat, or the advantage is
    the raw reward and an estimator with a baseline is stated; of prompts that stand alone it is a warning where an
    estimator of groups is stated, else worth knowing. Some of them is a warning. Where these have an advantage of
    exactly 0 whatever their rewards, that is said: an error where no others count (4 and more, whose rewards differ).
    Silent where a critic gives the baseline (values are recorded), where REINFORCE is stated, and where groups are
    inferred from prompts alone.
    """
    group_B = given(batch.group_B)
    if not batch.group_is_named or len(group_B) < 2:
        raise Skip("groups are not named in the dump" if len(group_B) >= 2 else "there is one sample")
    sizes_G = np.bincount(group_B)
    lone = int((sizes_G == 1).sum())
    if not lone:
        return None
    if batch.columns.ref("values") is not None or batch.laid.algorithm.estimator == "gae":
        raise Skip("a critic's values are the baseline")
    if batch.columns.ref("reward_baselines") is not None or batch.laid.algorithm.estimator == "remax":
        raise Skip("a greedy response is the baseline (ReMax)")
    if (own := _own_baseline(batch, group_B, sizes_G)) is not None:
        return own
    prompt_B, raw = batch.prompt_B, are_raw(batch)
    # A prompt may be drawn twice by chance; an id that is drawn per sample leaves most of them repeated.
    repeat = prompt_B is not None and 2 * int((np.bincount(prompt_B) > 1).sum()) > int(prompt_B.max()) + 1
    # Of one response each, two groups of one prompt are one by chance, where ids are the prompts'.
    of_one = batch.laid.algorithm.number(*GROUP_SIZE) == 1
    every = lone == sizes_G.size or (of_one and 2 * lone > sizes_G.size)
    evidence = [shown("groups of one", lone, "0", f"group ids of {batch.name}"), shown("groups", sizes_G.size)]
    if prompt_B is not None:
        evidence.append(shown("different prompts", int(prompt_B.max()) + 1))
    if raw is not None:
        evidence.append(shown("advantages equal the raw rewards", raw, "False"))
    place = batch.laid.where(
        "group_id" if batch.columns.ref("group_id") else None, sample=int(np.flatnonzero(sizes_G[group_B] == 1)[0])
    )
    if every and batch.laid.algorithm.estimator in ("reinforce", "reinforce++"):
        raise Skip("REINFORCE takes its baseline of the batch, or none")
    if every and (repeat or raw):
        cause = "the group id is made per sample (a uid drawn after repeating the prompts), so nothing is subtracted"
        claim = f"every sample is a group of its own ({share(lone, sizes_G.size)}): there is no baseline"
        # Of prompts that stand alone nothing was meant to be subtracted, unless an estimator of groups is stated.
        meant = not repeat and severity_of_raw(batch.laid.algorithm) == "info"
        return finding("info" if meant else "error", claim, place, *evidence, 
                      cause=why_raw(batch.laid.algorithm) if meant else cause)  # fmt: skip
    elif every:
        claim = "one response per prompt: a baseline within groups is impossible"
        cause = "n = 1 in the rollout settings; REINFORCE with a batch baseline or a critic is meant to run so"
        of_groups = batch.laid.algorithm.estimator in OF_GROUPS
        return finding("warning" if of_groups else "info", claim, place, *evidence, cause=cause)
    else:
        claim = f"{share(lone, sizes_G.size)} groups have a single response"
        cause = "responses of a group were dropped or filtered after grouping, or ids of one prompt differ"
        return warning(claim, place, *evidence, cause=cause)


#: Responses whose rewards differ and whose advantages are all exactly 0 before it is how they are made.
ALL_ZERO = 4


def _own_baseline(batch: StepBatch, group_B: Array, sizes_G: Array) -> Finding | None:
    """Responses alone in their group whose advantage is exactly 0 though rewards differ: each is its own baseline. An
    error where that is all there is.
    """
    advantage_B, reward_B = batch.advantage_B, batch.reward_B
    if advantage_B is None or reward_B is None or not np.isfinite(reward_B).all():
        return None
    counted_B = np.isfinite(advantage_B)
    if batch.trained_N is not None:
        counted_B &= batch.flat.count(batch.trained_N) > 0
    lone_B = counted_B & (sizes_G[group_B] == 1)
    many = int(lone_B.sum())
    # (A reward of 0 is 0 before a mean is taken off, too.)
    if not many or np.abs(advantage_B[lone_B]).any() or not np.abs(reward_B[lone_B]).any():
        return None
    every = bool(lone_B[counted_B].all())
    if every and (many < ALL_ZERO or np.unique(reward_B[lone_B]).size < 2 or batch.laid.algorithm.is_distilled):
        return None
    if not every and not np.abs(advantage_B[counted_B]).any():
        return None  # all are 0, whatever their groups: cleared (D04)
    place = batch.laid.where("advantages", sample=lone_B)
    return finding(
        "error" if every else "warning",
        f"every advantage is 0 though rewards differ: each of {many} responses is alone in its group, and its own "
        "baseline"
        if every
        else f"{share(int((sizes_G == 1).sum()), sizes_G.size)} groups have a single response, whose advantage is 0 "
        "whatever its reward: it is its own baseline, and teaches nothing",
        place,
        shown(
            "responses alone in their group with an advantage of 0",
            share(many, int(counted_B.sum())),
            "none",
            f"group ids of {batch.name}",
        ),
        shown("different rewards of theirs", int(np.unique(reward_B[lone_B]).size)),
        shown("their lowest and highest reward", f"{reward_B[lone_B].min():.4g}, {reward_B[lone_B].max():.4g}"),
        cause="n = 1 in the rollout settings beside an estimator whose baseline is the group's mean (REINFORCE++ with "
        "a baseline, RLOO, GRPO): a response less its own reward is 0, no gradient is left but the KL's, and no error "
        "is raised. Sample several responses to each prompt, or take a baseline of the batch (REINFORCE++)"
        if every
        else "responses of a group were dropped or filtered after grouping, and an estimator that measures against the "
        "others (or the mean) leaves nothing of one that is alone. Drop such groups before the batch is made, or "
        "refill them",
    )


@rule("D06", "NaN advantages from a group without a spread", link="groups", scope="batch",
      needs=("group", "advantage"), lasts=True,
      explains=("D20", "D01", "D03", "D18", "D04", "L06", "L08", "L09", "L10", "D26", "D57", "D09", "D05",
               "D21", "D23", "D28"),
      source="DeepAnalyze#116: torch.std of one value is NaN")  # fmt: skip
def nan_from_small_groups(batch: StepBatch) -> Finding | None:
    """Non-finite advantages exactly in groups of one, or of equal rewards: 0 / 0, or a std with n - 1 = 0.

    A NaN in any other group has another cause and is D21's.
    """
    column, group_B, reward_B = given(batch.columns.of("advantages")), given(batch.group_B), batch.reward_B
    skip_if(not batch.group_is_named, "groups are not named in the dump")
    bad_B = batch.flat.count(column.said_N & ~np.isfinite(column.values_N)) > 0
    if not bad_B.any():
        return None
    values = batch.columns.of("values")
    if values is not None and not np.isfinite(values.values_N[values.said_N]).all():
        raise Skip("values are not finite (D21), and advantages are made of them: no group's std is in it")
    sizes_G = np.bincount(group_B)
    flat_G = sizes_G == 1
    if reward_B is not None and np.isfinite(reward_B).all():
        flat_G = flat_G | (ranges_G(reward_B, group_B) == 0)
    bad_G = np.unique(group_B[bad_B])
    if not flat_G[bad_G].all():
        return None
    place = batch.laid.where("advantages", sample=bad_B)
    lone = bool((sizes_G[bad_G] == 1).all())
    return error(
        f"advantages are NaN in {share(len(bad_G), sizes_G.size)} groups, "
        + ("each of one response" if lone else "each without a spread of rewards"),
        place,
        shown("samples with a non-finite advantage", int(bad_B.sum()), "0", column.source),
        shown("size of the first such group", int(sizes_G[bad_G[0]]), ">= 2"),
        cause="the std of one value with n - 1 is 0 / 0" if lone else "a std of 0 is divided by, without an epsilon",
    )


_SPREAD_CAUSES = {
    "reward_std": "a group of one sample: its unbiased std is 0/0; n must be at least 2",
    "reward_function_std": "a reward over fewer than two samples: its unbiased std is 0/0",
    "advantage_max": "a group of one sample (unbiased std is 0/0), or a reward that is no number",
    "advantage_min": "a group of one sample (unbiased std is 0/0), or a reward that is no number",
}


@rule("D06", "the spread of rewards is not a number", link="advantages", scope="signals",
      needs=("reward_std|reward_function_std|advantage_max",), source="DeepAnalyze#116")  # fmt: skip
def spread_is_nan(log: RunLog) -> Finding | None:
    """NaN in the spread of rewards, as the first signal that is not finite, is a group of one: an error, info where
    nothing but single reward functions is broken.
    """
    broken = first_broken(log)
    if broken is None or not broken.is_spread:
        return None
    return finding(
        "info" if {series.signal for series, _ in broken.every} == {"reward_function_std"} else "error",
        f"{broken.series.name} is NaN",
        broken.point.where(broken.series.name),
        *broken.evidence,
        cause=_SPREAD_CAUSES[broken.series.signal],
        next_step="sample at least two completions per prompt, or use a biased std; "
        "rldbg record -- YOUR COMMAND shows the groups",
        steps=broken.steps,
    )
