"""Rewards within their groups: without a spread there, no advantage and no gradient but the KL's."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median_low

import numpy as np

from replay_core.diagnose.algorithm import filters_groups
from replay_core.diagnose.answers import are_one, groups_of_one_answer
from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.finding import Evidence, Finding, error, finding, look_at, share, shown
from replay_core.diagnose.flat import Array
from replay_core.diagnose.log_steps import NO_STD, StepTold, numbers, severity_of, steps_of, steps_told
from replay_core.diagnose.rule import Skip, given, rule
from replay_core.diagnose.signals import Point, RunLog

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
      explains=("D02", "D03", "D04", "D23", "D28", "D55", "L01"),
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
        evidence=[
            shown(
                "share of groups without a spread", count / total, f"< {MOSTLY}", f"rewards and groups of {batch.name}"
            ),
            shown("smallest reward", float(np.nanmin(rewards_B))),
            shown("largest reward", float(np.nanmax(rewards_B))),
        ],
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
    place = batch.laid.where("advantages", sample=0)
    return error(
        f"every advantage is 0 ({len(batch)} samples): the policy loss has no gradient",
        place,
        evidence=[
            shown("largest |advantage|", 0.0, "> 0", column.source),
            shown("rewards in the dump", batch.has("rewards")),
        ],
        cause="no group has a spread of rewards, or advantages are cleared before the loss; the dump holds no "
        "rewards and groups to tell which",
        next_step="rldbg record -- YOUR COMMAND, then rldbg diagnose rldbg-dump",
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
        evidence=[
            shown("reward std over the batch", float(np.nanstd(rewards_B)), None, f"rewards of {batch.name}"),
            shown("groups with a spread", 0, "> 0"),
            shown("groups", int(compared_G.sum())),
        ],
        cause=_NO_CHANCE
        if copies
        else _filtered(
            batch, "the reward depends on the prompt alone (a std over the batch hides it), its parts cancel in the sum"
        ),
        next_step=look_at(place) + "   # and watch frac_reward_zero_std, not reward_std",
    )


_NO_DIFFERENCE = ("frac_zero_std|reward_std|advantage_max",)


@rule("D03", "rewards differ over the batch, in no group", link="groups", scope="signals", needs=_NO_DIFFERENCE,
      source="trl#3857")  # fmt: skip
def differ_between_groups(log: RunLog) -> Finding | None:
    """Every advantage of a step is 0 (D01), and yet its rewards differ over the batch: the same total for every
    completion of a prompt. Half of the steps is an error, a quarter a warning.
    """
    known, dead = _dead_steps(log)
    across = [step for step in dead if (step.batch_std or 0) > NO_STD]
    if across:
        return finding(
            severity_of(len(across), len(known)),
            "rewards differ over the batch, but in no group: every advantage is 0",
            across[0].point.where("reward_std"),
            evidence=_figures(across),
            cause="every completion of a prompt gets the same total reward (the reward depends on the prompt alone, "
            "the completions of a group are alike, or the reward functions cancel in their sum); the std logged per "
            "reward function is over the batch, not over a group",
            next_step="look at the completions of one group (log_completions=True); rldbg record -- YOUR COMMAND, "
            "then rldbg diagnose rldbg-dump --rule D03",
            steps=steps_of(across),
        )
    return None


@rule("D01", "no reward differs within a group", link="groups", scope="signals",
      needs=(f"{_NO_DIFFERENCE[0]}|event:warning",),
      source="trl#3857; miles advisory (0.5); docs/evidence.md#grpo-notes")  # fmt: skip
def no_difference_within_groups(log: RunLog) -> Iterator[Finding]:
    """GRPO's advantage is the reward less its group's mean: without a difference within the group it is 0.

    Fraction of groups whose rewards have std 0 (or, where not logged: the within-group std, the extreme advantages,
    the trainer's warning). 1 in half of the steps is an error, in a quarter a warning; a median of 0.9 and more a
    warning, of 0.5 info. Rewards that differ over the batch but in no group are D03's. A small reward std is fine:
    advantages are normalised.
    """
    yield from _said_by_trainer(log)
    known, dead = _dead_steps(log)
    alike = [step for step in dead if (step.batch_std or 0) <= NO_STD]
    if alike:
        means = log.get("reward")
        varies = len(alike) >= ALWAYS * len(known) and means is not None and len(set(means.finite)) > len(known) // 2
        yield finding(
            severity_of(len(alike), len(known)),
            "rewards differ over the prompts, but in no group: every advantage is 0"
            if varies
            else "all rewards of every group are equal: every advantage is 0",
            alike[0].point.where("reward_std"),
            evidence=_figures(alike),
            cause="the reward depends on the prompt alone (its mean is another in every step, so that the judge is not "
            "constant), or all responses of a group are the same text: one seed for every sample, or greedy sampling"
            if varies
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
        yield finding(
            "warning" if most else "info",
            f"{'most groups' if most else 'half of the groups or more'} have no difference in reward: they teach "
            "nothing",
            worst.point.where("frac_zero_std"),
            evidence=numbers(frac_zero_std=worst.frac_zero, reward_std=worst.group_std),
            cause="prompts too easy or too hard for this policy: all completions of a group are right, or all are "
            "wrong",
            next_step="filter prompts by solve rate, raise the temperature, or sample more completions per prompt",
            steps=steps_of(known),
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


def _one_group(points: list[Point], micros: int, evidence: list[Evidence], why: str) -> Finding:
    return finding(
        severity_of(len(points), micros),
        "all rewards of a group are equal: every advantage is 0",
        points[0].where("rewards"),
        evidence=[*evidence, shown("micro-batches", share(len(points), micros), None, "log")],
        cause=f"{why}; a loss that is not 0 is then KL alone",
        next_step="look at one group's completions and scores; rldbg record -- YOUR COMMAND",
        steps=steps_of(points),
    )
