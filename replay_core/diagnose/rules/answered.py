"""Scores held against the texts they are of: answers that end in their ground truth, and what they were paid."""

from __future__ import annotations

import numpy as np

from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.case import Case
from replay_core.diagnose.finding import Finding, error, share, shown, warning
from replay_core.diagnose.flat import Array
from replay_core.diagnose.rule import Skip, rule
from replay_core.regexes import regex

#: Answers that tell; of right ones, how many (and which share) before it is no chance.
FEWEST, RIGHT, SOME = 16, 4, 0.1
#: How often scores may agree with their own answers, and how often with another row's they have to.
OWN, OTHER = 0.85, 0.97

#: Of responses, how many have to end with a token of the policy's own.
MOSTLY = 0.9

_MARKS = regex(r"(?:<[^<>]{1,20}>|\s|[.,;:!?\"'`*$)\]}])+$")
_WORD = regex(r"[^\s(\[{\"'`*$:=]+$")


def ends_in(text: str, truth: str) -> bool:
    """Whether the last word of a text, without marks of its end, is the truth."""
    end = _MARKS.sub("", text)
    last = _WORD.search(end)
    if last is None or last[0] != truth:
        return False
    # In braces that do not box it, it is a part of a formula: a denominator, a power.
    before = end[: last.start()]
    return not before.endswith("{") or before.endswith("boxed{")


def _others_speak_last(batch: StepBatch) -> bool:
    """Whether the last token of many responses is not the policy's: an environment may name the truth there."""
    trained_N, response_N = batch.trained_N, batch.response_N
    if trained_N is None or response_N is None:
        return False
    at_N = np.arange(response_N.size)
    last_B = [
        int(at_N[start : start + length][response_N[start : start + length]][-1])
        for start, length in zip(batch.flat.starts_B, batch.flat.lengths_B, strict=True)
        if response_N[start : start + length].any()
    ]
    return bool(last_B) and float(trained_N[last_B].mean()) < MOSTLY


@rule("D100", "scores are not those of the answers", link="rewards", scope="case", lasts=True,
      explains=("D01", "D03", "D95", "L08", "L17"),
      source="recorded texts and ground truths; a verifier may want a format as well")  # fmt: skip
def of_the_answers(case: Case) -> Finding | None:
    """Where texts, ground truths and scores are recorded: answers whose last word is the ground truth, over 16 samples
    and more. A warning where every score is 0 and a tenth of the answers (4 and more), and not all, end in theirs; an
    error where scores agree with the answers of the row before or after (or of a group before or after) in .97 of all,
    and with their own in less than .85.
    """
    looked: list[tuple[StepBatch, Array, Array]] = []
    for batch in case.batches():
        texts, truths = batch.columns.texts("response_text"), batch.columns.texts("ground_truth")
        reward_B = batch.reward_B
        if texts is None or truths is None or reward_B is None or not np.isfinite(reward_B).all():
            continue
        if batch.laid.algorithm.is_distilled or _others_speak_last(batch):
            continue
        right_B = np.array([bool(truth.strip()) and ends_in(text, truth.strip())
                            for text, truth in zip(texts, truths, strict=True)])  # fmt: skip
        looked.append((batch, right_B, reward_B))
    total, right = sum(len(one) for _, one, _ in looked), sum(int(one.sum()) for _, one, _ in looked)
    if total < FEWEST or right < max(RIGHT, SOME * total):
        raise Skip(f"needs texts, ground truths and scores of {FEWEST} samples, some of which end in the truth")
    batch, right_B, _ = looked[0]
    steps = [each.step for each, _, _ in looked if each.step is not None]
    place = batch.laid.where(batch.columns.reward_name, sample=int(right_B.argmax()))
    every = np.concatenate([each for _, _, each in looked])
    if not every.any():
        if right == total:
            raise Skip("every answer ends in its ground truth, and all scores are 0: it may be the highest")
        return warning(
            f"the reward is 0 for all {total} samples, although {right} answers end in their ground truth",
            place,
            evidence=[shown("answers that end in their ground truth", share(right, total)),
                      shown("scores that are not 0", 0, f">= {right}")],
            cause="the verifier does not find the answer (answers lack the format it asks for, a parse or extraction "
            "that fails, an exception that is scored 0), or its score is lost on the way: there is no signal to learn "
            "from",
            next_step="call the reward function by hand on one of these texts",
            steps=steps,
        )  # fmt: skip
    low = float(every.min())

    def agreement(by: int) -> float:
        same = [np.roll(one, by) == (reward > low) for _, one, reward in looked if len(one) > abs(by)]
        return float(np.concatenate(same).mean()) if same else 0.0

    own = agreement(0)
    group = 0 if batch.group_B is None else len(batch) // max(int(batch.group_B.max()) + 1, 1)
    by = max((1, -1, 2, -2, *((group, -group) if group > 1 else ())), key=agreement)
    if own >= OWN or agreement(by) < OTHER:
        return None
    rows = f"{abs(by)} row{'s' * (abs(by) > 1)} {'before' if by > 0 else 'after'}"
    return error(
        f"scores belong to other samples: they are those of the answers {rows}, as texts and ground truths tell",
        place,
        evidence=[shown("scores that agree with their own answer", own, f">= {OWN:g}"),
                  shown(f"that agree with the answer {rows}", agreement(by)),
                  shown("samples", total)],
        cause="scores come back in another order than the samples, or were rolled or shuffled after they were "
        "computed: a row is paid for its neighbour's answer",
        steps=steps,
    )  # fmt: skip
