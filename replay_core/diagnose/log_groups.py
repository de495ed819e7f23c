"""Rewards without a difference, as logs show them: equal everywhere (D01), or within every group (D03)."""

from __future__ import annotations

import math
from collections.abc import Iterable

from replay_core.diagnose.finding import Evidence, Finding
from replay_core.diagnose.log_steps import (
    NO_STD,
    StepTold,
    numbers,
    severity_of,
    step_numbers,
    steps_of,
    steps_told,
)
from replay_core.diagnose.signals import Part, Point, signal_rule

#: D01: from this share of groups without a difference on, most of a batch teaches nothing.
DEAD_GROUPS = 0.5


@signal_rule(
    "D03",
    "rewards differ over the batch, in no group",
    link="groups",
    needs=("frac_zero_std|reward_std|advantage_max",),
    source="trl#3857",
)
@signal_rule(
    "D01",
    "no reward differs within a group",
    link="groups",
    needs=("frac_zero_std|reward_std|advantage_max|event:warning",),
    source="seed 002; trl#3857; miles advisory (0.5)",
)
def no_difference_within_groups(part: Part) -> Iterable[Finding]:
    """D01, D03. GRPO's advantage is the reward less its group's mean: without a difference within the group it is 0.

    Fraction of groups whose rewards have std 0 (or, where not logged: the within-group std, the extreme advantages,
    the trainer's warning). 1 in half of the steps is an error, in a quarter a warning; a median of 0.5 and more a
    warning. Rewards that differ over the batch but in no group are D03: the same total for every completion of a
    prompt. A small reward std is fine: advantages are normalised.
    """
    steps = steps_told(part)
    known = [step for step in steps if step.is_dead is not None]
    yield from _warned(part)
    dead = [step for step in known if step.is_dead]
    for across in (True, False):
        some = [step for step in dead if ((step.batch_std or 0) > NO_STD) is across]
        if some:
            yield _dead(some, len(known), across)
    partly = sorted(step.frac_zero for step in known if step.frac_zero is not None)
    if partly and not dead and partly[len(partly) // 2 if len(partly) % 2 else len(partly) // 2 - 1] >= DEAD_GROUPS:
        worst = max(known, key=lambda step: step.frac_zero or 0)
        yield Finding(
            "D01",
            "warning",
            "half of the groups or more have no difference in reward: they teach nothing",
            numbers(frac_zero_std=worst.frac_zero, reward_std=worst.group_std),
            "prompts too easy or too hard for this policy: all completions of a group are right, or all are wrong",
            "filter prompts by solve rate, raise the temperature, or sample more completions per prompt",
            "groups",
            "miles advisory (0.5)",
            worst.point.where("frac_zero_std"),
            tuple(step_numbers(known)),
        )


def _dead(some: list[StepTold], steps: int, across: bool) -> Finding:
    first = some[0]
    severity = severity_of(len(some), steps)
    evidence = numbers(
        frac_zero_std=first.frac_zero,
        reward_std_within_groups=first.group_std,
        advantage_max=first.advantage,
        reward_std_over_the_batch=first.batch_std,
        loss=first.loss,
        grad_norm=first.grad,
        steps=len(some),
    )
    if across:
        return Finding(
            "D03",
            severity,
            "rewards differ over the batch, but in no group: every advantage is 0",
            evidence,
            "every completion of a prompt gets the same total reward (the reward depends on the prompt alone, the "
            "completions of a group are alike, or the reward functions cancel in their sum); the std logged per "
            "reward function is over the batch, not over a group",
            "look at the completions of one group (log_completions=True); rldbg record -- YOUR COMMAND, then "
            "rldbg diagnose rldbg-dump --rule D03",
            "groups",
            "trl#3857",
            first.point.where("reward_std"),
            tuple(step_numbers(some)),
        )
    return Finding(
        "D01",
        severity,
        "all rewards of every group are equal: every advantage is 0",
        evidence,
        "the judge is constant, or every prompt is too easy or too hard; a loss that is not 0 is then KL alone",
        "look at the rewards of one group (log_completions=True) and at the reward function; "
        "rldbg record -- YOUR COMMAND, then rldbg diagnose rldbg-dump --rule D01",
        "groups",
        "seed 002; miles advisory",
        first.point.where("reward_std"),
        tuple(step_numbers(some)),
    )


def _warned(part: Part) -> Iterable[Finding]:
    """What the trainer of seed 002 itself says of a micro-batch."""
    alike = [told for told in part.warnings() if "All advantages are near zero" in told.text]
    same = [told for told in part.warnings() if "completions are identical" in told.text]
    for told, why in (
        (alike, "the judge gave every completion the same score"),
        (same, "all completions of the prompt are the same text: a greedy or collapsed sampler"),
    ):
        if told:
            places = {_place(one.point) for one in told} | {_place(point) for point in part.micros("micro_loss")}
            micros = len(places)
            yield Finding(
                "D01",
                severity_of(len(told), micros),
                "all rewards of a group are equal: every advantage is 0",
                (
                    Evidence("warning", told[0].text[:200], source=f"line {told[0].point.line}"),
                    Evidence("micro-batches", f"{len(told)} of {micros}", source="log"),
                ),
                why + "; a loss that is not 0 is then KL alone",
                "look at one group's completions and scores; rldbg record -- YOUR COMMAND",
                "groups",
                "seed 002",
                told[0].point.where("rewards"),
                steps_of(one.point for one in told),
            )
    # A trainer of another commit, or a log without its warnings: the printed figures are exactly 0.
    masked = {_place(point) for point in part.micros("num_masked")}
    losses = {_place(point): point for point in part.micros("pg_loss")}
    flat = [
        point
        for point in part.micros("reward_std")
        if point.value == 0 and _place(point) not in masked and losses.get(_place(point), _NONE).value == 0
    ]
    if flat and not alike and not same:
        yield Finding(
            "D01",
            severity_of(len(flat), max(1, len(losses))),
            "all rewards of a group are equal: every advantage is 0",
            (
                Evidence("rewards_std", 0.0, "> 0", f"line {flat[0].line}"),
                Evidence("pg_loss", 0.0, source=f"line {losses[_place(flat[0])].line}"),
                Evidence("micro-batches", f"{len(flat)} of {len(losses)}", source="log"),
            ),
            "the judge gave every completion the same score; a loss that is not 0 is then KL alone",
            "look at one group's completions and scores; rldbg record -- YOUR COMMAND",
            "groups",
            "seed 002",
            flat[0].where("rewards"),
            steps_of(flat),
        )


_NONE = Point(None, math.nan)


def _place(point: Point) -> tuple[int | None, int | None, int | None]:
    return point.step, point.micro, point.rank
