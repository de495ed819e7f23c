"""Rewards that are not of the answers they stand beside: of the step before, or with their fractions cut off."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.case import Case
from replay_core.diagnose.finding import Finding, Where, error, share, shown, warning
from replay_core.diagnose.flat import Array, groups_of
from replay_core.diagnose.rule import rule, skip_if
from replay_core.diagnose.rules.scores import ends_in

#: How likely chance may make a step's rewards those of the step before, as a logarithm; of the rows, how many have to
#: hold another answer than then.
BY_CHANCE, OTHER_ANSWERS = -14.0, 0.5
#: Of the rewards before, the share that are fractions; of those since, the share that are the least one.
FRACTIONS, AT_LEAST = 0.2, 0.1


@rule("D117", "rewards are those of the step before", link="rewards", scope="case", lasts=True,
      explains=("D01", "D03", "D04", "D56", "D100", "L08"),
      source="a queue of scores that is read one step late; a buffer that is read before it is filled")  # fmt: skip
def of_the_step_before(case: Case) -> Finding | None:
    """The rewards of a step, row by row, are to the last bit those of the step recorded right before, while half of its
    rows and more hold other tokens: an error where chance, drawing each row's reward from those of its own group in
    both steps, comes to e^-14 at the most. Rewards of one number per group tell nothing. A queue that runs one step
    late gives its first step's rewards twice. An error, too, where answers and ground truths are recorded, and the
    highest score stands in .97 of the rows (16 and more) just where the answer of the step before was right, and in
    less than .85 where its own is.
    """
    if (paid := _paid_late(case)) is not None:
        return paid
    before: tuple[int, Array, list[bytes]] | None = None
    late: list[tuple[int, float]] = []
    looked = 0
    where: Where | None = None
    for batch in case.batches():
        reward_B = batch.reward_B
        if reward_B is None or batch.step is None or not np.isfinite(reward_B).all():
            continue
        answers = _answers(batch)
        if answers is None:
            continue
        if before is not None and batch.step == before[0] + 1 and len(before[1]) == len(reward_B):
            looked += 1
            others = np.mean([a != b for a, b in zip(answers, before[2], strict=True)])
            if np.array_equal(before[1], reward_B) and others >= OTHER_ANSWERS:
                chance = _chance(reward_B, batch.group_B)
                if chance <= BY_CHANCE:
                    late.append((batch.step, chance))
                    where = where or batch.laid.where(batch.columns.reward_name, sample=0)
        before = (batch.step, reward_B, answers)
    skip_if(not looked, "needs rewards and answers of two steps in a row, of as many samples")
    if not late:
        return None
    first, chance = late[0]
    return error(
        f"rewards do not belong to the answers: those of step {first} are, row by row, those of step {first - 1}, and "
        "the answers are others",
        where,
        shown("steps whose rewards are the step before's", share(len(late), looked), "0"),
        shown("log of the chance of as much", chance, f"> {BY_CHANCE:g}"),
        cause="scores come one step late (a queue that is read before it is filled, a future that is awaited a step "
        "too late), so that every step is paid for the answers of the step before"
        if len(late) == 1
        else "one step's scores are kept and handed out again: the judge is not called anew, or its answer is cached "
        "under a key that does not change",
        next_step="score two rows of this step by hand, and compare",
        steps=[step for step, _ in late],
    )


#: Right answers before they tell; how often scores may agree with their own, and have to with the step before's.
RIGHT, OWN, OTHER = 4, 0.85, 0.97


def _paid_late(case: Case) -> Finding | None:
    """The highest score where the answer of the step before was right, and not where a row's own is."""
    rows: list[tuple[StepBatch, Array, Array]] = []
    for batch in case.batches():
        texts, truths = batch.columns.texts("response_text"), batch.columns.texts("ground_truth")
        reward_B = batch.reward_B
        if texts is None or truths is None or reward_B is None or batch.step is None:
            continue
        right_B = np.array([
            bool(truth.strip()) and ends_in(text, truth.strip()) for text, truth in zip(texts, truths, strict=True)
        ])  # fmt: skip
        rows.append((batch, reward_B, right_B))
    pairs = [(last, here) for last, here in pairwise(rows)
             if here[0].step == (last[0].step or 0) + 1 and len(last[1]) == len(here[1])]  # fmt: skip
    if not pairs:
        return None
    highest = max(float(reward_B.max()) for _, reward_B, _ in rows)
    paid = np.concatenate([here[1] >= highest - 1e-6 for _, here in pairs])
    own, before = (np.concatenate(each) for each in zip(*((here[2], last[2]) for last, here in pairs), strict=True))
    few = min(int(before.sum()), int((~before).sum()), int(paid.sum())) < RIGHT
    of_own, of_before = float((paid == own).mean()), float((paid == before).mean())
    if len(paid) < FEWEST or few or of_own >= OWN or of_before < OTHER:
        return None
    batch = pairs[0][1][0]
    return error(
        "rewards do not belong to the answers: they are those of the answers of the step before, row by row, as texts "
        "and ground truths tell",
        batch.laid.where(batch.columns.reward_name, sample=int(np.argmax(pairs[0][0][2] != pairs[0][1][2]))),
        shown("scores that agree with their own answer", of_own, f">= {OWN:g}"),
        shown("that agree with the answer of the step before", of_before),
        shown("samples", len(paid)),
        cause="scores come one step late (a queue that is read before it is filled, a future that is awaited a step "
        "too late), so that every step is paid for the answers of the step before",
        next_step="score two rows of this step by hand, and compare",
        steps=[here[0].step for _, here in pairs if here[0].step is not None],
    )


def _answers(batch: StepBatch) -> list[bytes] | None:
    """What each row holds: its tokens, else its text."""
    tokens_N = batch.tokens_N
    if tokens_N is not None:
        return [tokens_N[span].tobytes() for span in batch.flat.spans]
    texts = batch.columns.texts("response_text")
    return None if texts is None else [text.encode() for text in texts]


def _chance(reward_B: Array, group_B: Array | None) -> float:
    """Log of the chance that rows drawn anew, each from its group's rewards, are the same."""
    total = 0.0
    for inside in [slice(None)] if group_B is None else groups_of(group_B):
        _, number, counts = np.unique(reward_B[inside], return_inverse=True, return_counts=True)
        total += float(np.log(counts[number] / counts.sum()).sum())
    return total


@rule("D118", "fractions of the rewards are lost", link="rewards", scope="case", lasts=True,
      explains=("D01", "D03", "L08", "L17"), source="int(score), a threshold or a comparison that takes the score's "
      "place")  # fmt: skip
def fractions_lost(case: Case) -> Finding | None:
    """From one step to the next rewards become whole numbers, and stay so: a fifth and more of those before (16 rewards
    and more) are fractions, none since is, a tenth of these and more are the least there is, and chance comes to e^-20
    at the most. A warning: a cast, or another judge, cuts off what was paid for a part of the answer.
    """
    steps: list[tuple[StepBatch, Array]] = []
    for batch in case.batches():
        reward_B = batch.reward_B
        if reward_B is not None and batch.step is not None and np.isfinite(reward_B).all() and len(reward_B):
            steps.append((batch, reward_B))
    skip_if(len(steps) < 2, "needs the rewards of two steps")
    since = len(steps)
    while since and not _is_fraction(steps[since - 1][1]).any():
        since -= 1
    skip_if(since in (0, len(steps)), "rewards are all whole numbers, or fractions to the end")
    before, after = (np.concatenate([reward_B for _, reward_B in each]) for each in (steps[:since], steps[since:]))
    # The last step before tells how the run paid, not the mean of a run that gets better.
    of_before = float(_is_fraction(steps[since - 1][1]).mean())
    least = float(after.min())
    odds = len(after) * np.log1p(-min(of_before, 0.999))
    if (
        len(before) < FEWEST
        or min(of_before, float(_is_fraction(before).mean())) < FRACTIONS
        or odds > BY_CHANCE
        or float((after == least).mean()) < AT_LEAST
        or not np.ptp(after) > 0
    ):
        return None
    batch = steps[since][0]
    values = np.unique(after)
    return warning(
        f"rewards are whole numbers alone from step {batch.step} on: partial scores are lost, "
        f"{float(_is_fraction(before).mean()):.0%} of the rewards before were fractions",
        batch.laid.where(batch.columns.reward_name, sample=int(np.argmin(steps[since][1]))),
        shown("rewards since that are fractions", share(0, len(after)), f"{of_before:.0%} in the step before"),
        shown("values that rewards take since", ", ".join(f"{value:g}" for value in values[:4])),
        shown("mean reward since", float(after.mean()), f"was {float(steps[since - 1][1].mean()):.3g}"),
        cause="the score is cast to an integer (or a bool), floored, or compared with a threshold: an answer that is "
        "right in part is paid like one that is wrong; or another judge is asked from here on",
        next_step="score one answer of a step before by hand",
        steps=[each.step for each, _ in steps[since:]],
    )


#: Rewards before that tell.
FEWEST = 16


def _is_fraction(reward_B: Array) -> Array:
    fraction_B: Array = np.abs(reward_B - np.round(reward_B)) > 1e-4
    return fraction_B
