"""Samples that nobody could grade and that have a grade all the same: failures as 0, empty ground truths as right."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.case import Case
from replay_core.diagnose.finding import Finding, finding, listed, share, shown, warning
from replay_core.diagnose.flat import Array
from replay_core.diagnose.rule import rule, skip_if
from replay_core.regexes import regex

#: What says how a sample ended.
_STATUS = ("exit_status", "exit_reason", "termination_reason", "termination", "status", "finish_reason", "stop_reason",
           "outcome", "error", "error_type")  # fmt: skip
#: Ends that are the environment's, whatever was answered; and those that may as well be the answer's own: its program
#: may run for ever, or take all memory, wherever it runs, and that a verifier failed may be what it says of an answer.
_RUNS_IT = r"(?:sandbox|container|docker|pod|env(?:ironment)?)"
_SERVES = r"(?:worker|server|infra\w*)"
_GRADES = r"(?:judge|verifier|grader|scorer|reward)"
_OF_PLACES = rf"(?:{_RUNS_IT}|{_SERVES}|{_GRADES})"
_LOST = regex(
    rf"(?i)infra|unavailable|connection|disconnect|evicted|preempt|{_OF_PLACES}\W?_?"
    rf"(?:lost|crash|error|died|dead|down|unreachable)|(?:{_RUNS_IT}|{_SERVES})\W?_?fail|"
    rf"(?:{_SERVES}|{_GRADES})\W?_?(?:time_?d?_?out|killed)|(?:lost|crashed|dead)_?{_OF_PLACES}"
)
_MAYBE = regex(
    rf"(?i)abort|cancel|crash|exception|time_?d?_?out|killed|\blost\b|error|\boom\b|out_of_memory|{_GRADES}\W?_?fail"
)
#: Columns that say how the environment or the judge of a sample ended: their owner stands in their name.
_OWNED = regex(rf"(?i)^(?:.*[._])?({_OF_PLACES})\w*_(?:status|state|outcome|result|reason|error|error_type)$")
#: Samples of such an end, the steps they are of, different rewards of all others; the most of all that may be lost; and
#: how likely chance may make all of theirs the least, as a logarithm.
FEWEST, STEPS, SEVERAL, MOST, CHANCE = 6, 2, 3, 0.5, -8.0


@rule("D131", "failures of the environment are graded as wrong answers", link="rewards", scope="case", lasts=True,
      explains=("D04", "D98", "D56", "L08"),
      source="miles#2800, NeMo-RL#2207, benchflow#1071: a lost sandbox leaves a reward of 0")  # fmt: skip
def failures_graded(case: Case) -> Finding | None:
    """Samples whose recorded end (exit_status, status, finish_reason, verifier_status and the like) is one of the
    environment's (a lost sandbox, an error of a judge or verifier, a connection), 6 and more in 2 steps and more, no
    more than half of all: a warning where every one of them has the run's least reward, which chance makes of what
    others earn with e^-8 at the most, others have 3 different rewards and more (or two, both common), and they count in
    the loss. Where their end may be the answer's own (aborted, a time-out or too little memory where it runs, an error,
    a failed verifier) it is worth knowing alone. Silent where such samples are masked, or have no advantage.
    """
    rows: list[tuple[StepBatch, list[str], Array, Array]] = []
    for batch in case.batches():
        reward_B = batch.reward_B
        words = next((each for each in _ends(batch) if len(set(each)) > 1), None)
        if words is None or reward_B is None or not np.isfinite(reward_B).all():
            continue
        rows.append((batch, words, reward_B, _counts_B(batch)))
    skip_if(not rows, "needs rewards, and how each sample ended")
    least = min(float(reward_B.min()) for _, _, reward_B, _ in rows)
    total = sum(len(words) for _, words, _, _ in rows)
    for word in sorted({word for _, words, _, _ in rows for word in words}):
        sure = _LOST.search(word) is not None
        if not sure and _MAYBE.search(word) is None:
            continue
        marks = [np.array([each == word for each in words]) for _, words, _, _ in rows]
        lost = np.concatenate([reward_B[mark_B] for (_, _, reward_B, _), mark_B in zip(rows, marks, strict=True)])
        others = np.concatenate([reward_B[~mark_B] for (_, _, reward_B, _), mark_B in zip(rows, marks, strict=True)])
        steps = [batch.step for (batch, *_), mark_B in zip(rows, marks, strict=True) if mark_B.any()]
        trained = sum(int((mark_B & counts_B).sum()) for (*_, counts_B), mark_B in zip(rows, marks, strict=True))
        few = len(lost) < FEWEST or len(steps) < STEPS or len(lost) > MOST * total
        if few or (lost > least).any() or not trained or not len(others):
            continue
        of_others = float((others <= least).mean())
        graded = np.unique(others).size >= SEVERAL or 0.1 < of_others < 0.9
        if not graded or len(lost) * np.log(max(of_others, 1e-3)) > CHANCE:
            continue
        at = next(at for at, mark_B in enumerate(marks) if mark_B.any())
        return finding(
            "warning" if sure else "info",
            f"all {len(lost)} samples that ended as {word!r} ({len(lost) / total:.0%} of all) have the least reward, "
            f"{least:g}, and are trained on as wrong answers",
            rows[at][0].laid.where(rows[at][0].columns.reward_name, sample=marks[at]),
            shown("their rewards", listed(np.unique(lost))),
            shown("of the others, those with the least reward", of_others, "as many"),
            shown("mean reward of the others", float(others.mean())),
            shown("of them, those that count in the loss", share(trained, len(lost)), "none"),
            cause="the environment or the judge failed, and a default stands for the score it never gave: these "
            "answers may have been right, are pushed down, and lower the baseline of their group",
            next_step="leave such samples out of the loss and of their group's mean, or run them again"
            if sure
            else "see whether the answer or the environment ends so; leave what nobody graded out of its group",
            steps=steps,
        )
    return None


def _ends(batch: StepBatch) -> Iterator[list[str]]:
    """How each sample ended, by every column that says so: `timeout` of a `verifier_status` is the verifier's."""
    for name in _STATUS:
        if (words := batch.columns.texts(name)) is not None:
            yield words
    for name in sorted({name for sheet, _ in batch.columns.sheets for name in sheet.names()}):
        owner = _OWNED.match(name)
        if owner is not None and (words := batch.columns.texts(name)) is not None:
            yield [f"{owner[1]} {word}" for word in words]


def _counts_B(batch: StepBatch) -> Array:
    """Which samples have a token that counts and an advantage that is not 0, as far as either is recorded."""
    counts_B = np.ones(len(batch), dtype=bool)
    if batch.trained_N is not None:
        counts_B &= batch.flat.count(batch.trained_N) > 0
    advantage_B = batch.advantage_B
    if advantage_B is not None:
        counts_B &= np.nan_to_num(advantage_B) != 0
    return counts_B


#: Ground truths that are none.
_NO_TRUTH = frozenset({"", "none", "null", "nan", "n/a", "[]", "{}"})
#: Samples without one, the prompts they answer.
UNTOLD, PROMPTS = 6, 2


@rule("D133", "answers without a ground truth have the full score", link="rewards", scope="case", lasts=True,
      explains=("D01", "D03", "D123", "L08"),
      source="open-r1#55: accuracy_reward returns 1.0 where the gold answer cannot be parsed")  # fmt: skip
def right_by_default(case: Case) -> Finding | None:
    """Samples whose ground truth is empty (or none, null, []), 6 and more, to 2 prompts and more: a warning where every
    one of them has the run's highest reward, which chance makes of what the others earn with e^-8 at the most.
    """
    steps: list[tuple[StepBatch, Array, Array]] = []
    prompts = 0
    for batch in case.batches():
        truths, reward_B = batch.columns.texts("ground_truth"), batch.reward_B
        if truths is None or reward_B is None or not np.isfinite(reward_B).all():
            continue
        none_B = np.array([truth.strip().lower() in _NO_TRUTH for truth in truths])
        steps.append((batch, none_B, reward_B))
        group_B = batch.group_B
        prompts += int(none_B.any()) if group_B is None else np.unique(group_B[none_B]).size
    skip_if(not steps, "needs ground truths and rewards")
    none = np.concatenate([none_B for _, none_B, _ in steps])
    rewards = np.concatenate([reward_B for _, _, reward_B in steps])
    if none.sum() < UNTOLD or prompts < PROMPTS or none.all():
        return None
    highest = float(rewards.max())
    of_others = float((rewards[~none] >= highest).mean())
    if (rewards[none] < highest).any() or none.sum() * np.log(max(of_others, 1e-3)) > CHANCE:
        return None
    batch, none_B, _ = next(each for each in steps if each[1].any())
    return warning(
        f"all {int(none.sum())} answers to prompts without a ground truth have the full score, {highest:g}, whatever "
        "they say",
        batch.laid.where(batch.columns.reward_name, sample=none_B),
        shown("of the others, those with the full score", of_others, "as many"),
        shown("prompts without a ground truth", prompts),
        shown("mean reward with and without them", f"{rewards.mean():.3g}, {rewards[~none].mean():.3g}"),
        cause="the reward function returns the full score where the truth is empty or cannot be parsed (to skip the "
        "sample): such groups teach nothing or whatever was said, and the mean reward is too high",
        next_step="drop these prompts from the data set, or return no reward (NaN, None) and leave them out",
        steps=[each.step for each, none_B, _ in steps if none_B.any()],
    )
