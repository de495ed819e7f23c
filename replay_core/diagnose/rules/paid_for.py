"""What a reward pays for, as its changes from step to step tell: length, or the opposite of right answers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from replay_core.diagnose import trends
from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.case import Case
from replay_core.diagnose.finding import Finding, error, shown, warning
from replay_core.diagnose.flat import Array
from replay_core.diagnose.rule import Skip, given, rule
from replay_core.diagnose.rules.figures import together
from replay_core.diagnose.rules.tokens import truncated
from replay_core.diagnose.signals import RunLog, Series
from replay_core.regexes import regex

#: Steps, and how well the changes of two figures go together before one makes the other: of 12 pairs by chance, one in
#: a thousand comes to .8.
STEPS, IN_STEP = 12, 0.85
#: How far a length has to have come before what is paid for it matters.
FAR = 1.3
_RIGHT = regex(r"(?i)accura|correct|exact|solved|success|pass@|(?:^|[/_.])acc(?:$|[@/_.])")


def _by_changes(a: Series, b: Series) -> float | None:
    """Correlation of the changes from step to step of two figures; None where they are too few, or one rests."""
    rows = [row for _, row in together(a, b)]
    if len(rows) < STEPS:
        return None
    xs, ys = ([y - x for x, y in pairwise(values)] for values in zip(*rows, strict=True))
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    xx, yy = sum((x - mean_x) ** 2 for x in xs), sum((y - mean_y) ** 2 for y in ys)
    if xx <= 0 or yy <= 0:
        return None
    xy = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    return float(xy / math.sqrt(xx * yy))


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
    if len(told) < OVER or cut < CUT:
        raise Skip(f"needs {CUT} responses that were cut, with one reward, over {OVER} steps")
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
        evidence=[
            shown("responses that were cut", cut), shown("their reward", float(last)),
            shown("median reward of finished ones", float(np.median(ended))),
            shown("finished ones with just this reward", as_much, "as many"),
        ],
        cause="the judge gives what it cannot parse (an answer that was cut) its default or its highest score: nothing "
        "keeps responses from growing to the limit",
        next_step="score a cut response by hand; pay nothing for it, or leave it out of the loss",
        steps=[each.step for each, *_ in told],
    )  # fmt: skip


@rule("L32", "the reward pays for something else than answers", link="trend", scope="signals",
      needs=("reward", "response_length|reward_function|held_out"),
      explains=("D20", "D25", "L05", "L08", "L09", "L12", "L20", "L24", "D37"),
      source="arXiv 2310.03716 (a long way to go: length in RLHF); arXiv 2210.10760")  # fmt: skip
def pays(log: RunLog) -> Iterator[Finding]:
    """The reward's changes from step to step go with those of the mean length (correlation over .85, 12 steps and
    more), and the length has come to 1.3 times what it was, or to less than that part of it: an error where it rises
    with the reward, or falls while the reward rises. Against those of the share of right answers (below -.85): an
    error, the reward's sign is turned. Noise of batches makes no such correlation: one figure is made of the other.
    """
    reward = given(log.get("reward"))
    length = log.get("response_length")
    judged = [one for one in log.all("reward_function") if _RIGHT.search(one.name) and one.name != reward.name]
    turned = ((one, by) for one in judged if (by := _by_changes(reward, one)) is not None and by < -IN_STEP)
    for one, by in turned:
        yield error(
            f"the reward's sign is turned: {reward.name} falls whenever {one.name} rises, and rises when it falls",
            reward,
            evidence=[
                shown("correlation of their changes", by, f"> -{IN_STEP:g}", reward.source),
                one.shown(one.values[-1]),
            ],
            cause="right answers are punished: the score is negated, a distance or a loss stands for a reward, or a "
            "component's weight is negative",
            next_step="score a right and a wrong answer by hand",
            link="rewards",
        )
        return
    cut = log.get("truncated")
    if cut is not None and (by := _by_changes(reward, cut)) is not None and by > IN_STEP and trends.rises(cut.finite):
        yield error(
            f"the reward pays for responses that are cut: {reward.name} follows {cut.name} step by step, which comes "
            f"to {trends.level(cut.finite, 3):.2g}",
            cut.last.where(cut.name),
            evidence=[shown("correlation of their changes", by, f"< {IN_STEP:g}", reward.source),
                      cut.shown(trends.level(cut.finite, 3), f"about {trends.level(cut.finite[:3], 3):.2g}")],
            cause="an answer that is not finished counts as right, or is not punished as a wrong one is: the policy "
            "learns never to end",
            next_step="score a cut response by hand; leave cut ones out of the loss, or pay nothing for them",
            steps=cut.steps(),
        )  # fmt: skip
        return
    by = None if length is None else _by_changes(reward, length)
    if length is None or by is None:
        raise Skip(f"needs reward and response length, or the share of right answers, of {STEPS} steps")
    begun, now = trends.level(length.finite[:3], 3), trends.level(length.finite, 3)
    longer, shorter = now > FAR * begun, now < begun / FAR
    if not (longer and by > IN_STEP) and not (shorter and by < -IN_STEP):
        return
    yield error(
        f"the reward pays for {'longer' if longer else 'shorter'} responses: {reward.name} follows {length.name} step "
        f"by step, and the length goes from {begun:.3g} to {now:.3g}: length hacking",
        length.last.where(length.name),
        evidence=[
            shown("correlation of their changes", by, f"< {IN_STEP:g} in size", reward.source),
            length.shown(now, f"about {begun:.3g}"),
        ],
        cause=f"the judge pays for {'length' if longer else 'brevity'} (a bonus or penalty per token, a reward model "
        f"with that bias), and the policy learns it instead of the task",
        next_step="score one answer padded and cut by hand; look at what is right per length; reward within a group of "
        "like lengths, or without the length's term",
        steps=length.steps(),
    )
