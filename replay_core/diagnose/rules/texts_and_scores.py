"""What prompts give away and what scores pay for, by the recorded texts."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from msgspec import Struct

from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.case import Case
from replay_core.diagnose.finding import Finding, listed, share, shown, warning
from replay_core.diagnose.flat import Array
from replay_core.diagnose.rule import rule, skip_if
from replay_core.diagnose.rules.scores import ends_in, for_right_answers
from replay_core.regexes import regex

#: Prompts, and different ground truths, before what they share is no chance; the share of prompts that show it.
PROMPTS, TRUTHS, MOST = 8, 6, 0.95
#: Characters before a truth that all prompts share.
MARK = 3
#: Right answers of one number of a word, and different numbers; what is left of a score that the word does not explain.
OF_A_NUMBER, NUMBERS, LEFT = 4, 3, 1e-4
_WORD = regex(r"[^\W\d_]+")
_TAG = regex(r"<[^<>]{1,20}>")


@rule("D119", "ground truths stand in the prompts", link="tokens", scope="case", lasts=True,
      explains=("D56", "L08", "D01"),
      source="a template that prints the answer; a data set's column too many")  # fmt: skip
def leaks(case: Case) -> Finding | None:
    """The ground truth of nearly every prompt (.95 of 8 different ones and more, from some step to the last) stands in
    it as a word of its own, behind one and the same mark of 3 characters and more, while what is left of the prompts
    without it differs from prompt to prompt and is no choice of answers (6 different truths and more): a warning. A
    task that asks to copy, extract or choose has no question beside it, another place in every prompt, or few truths.
    """
    steps: list[tuple[StepBatch, dict[str, str]]] = []
    for batch in case.batches():
        prompts, truths = batch.columns.texts("prompt_text"), batch.columns.texts("ground_truth")
        if prompts is not None and truths is not None:
            steps.append((batch, {p: t.strip() for p, t in zip(prompts, truths, strict=True) if t.strip()}))
    skip_if(not steps, "needs the texts of prompts, and their ground truths")
    since = len(steps)
    marks: Counter[str] = Counter()
    while since:
        here = [_mark(prompt, truth) for prompt, truth in steps[since - 1][1].items()]
        told = Counter(mark for mark in here if mark is not None)
        if not here or max(told.values(), default=0) < MOST * len(here):
            break
        marks += Counter(dict(told.most_common(1)))
        since -= 1
    pairs = {prompt: truth for _, each in steps[since:] for prompt, truth in each.items()}
    if len(pairs) < PROMPTS or len(set(pairs.values())) < TRUTHS or not marks:
        return None
    mark, count = marks.most_common(1)[0]
    rest = {prompt.replace(mark + truth, "") for prompt, truth in pairs.items()}
    if len(rest) < max(TRUTHS, 0.5 * len(pairs)) or count < MOST * sum(len(each) for _, each in steps[since:]):
        return None
    batch, first = steps[since]
    prompt, truth = next(iter(first.items()))
    at = prompt.find(mark + truth)
    return warning(
        f"the prompts give the answer away: the ground truth stands in them behind {mark.lstrip()!r}, in all "
        f"{len(pairs)} different ones",
        batch.laid.where("prompt_text", sample=0),
        shown("such a prompt", prompt[max(at - 24, 0) : at + len(mark + truth) + 8]),
        shown("its ground truth", truth),
        shown("different ground truths", len(set(pairs.values()))),
        cause="a template or a column of the data set prints the answer into the input: the policy learns to copy it, "
        "and scores on clean prompts stay what they were",
        next_step="print the prompt of one row, and take the answer out of its template",
        steps=[each.step for each, _ in steps[since:] if each.step is not None],
    )


def _mark(prompt: str, truth: str) -> str | None:
    """The word, with what joins it, that stands right before the truth in the prompt; None where the truth is no word
    of it.
    """
    at = prompt.find(truth)
    while at >= 0:
        end = at + len(truth)
        apart = not prompt[end : end + 1].isalnum() and not prompt[at - 1 : at].isalnum()
        if apart and at >= MARK:
            words = prompt[:at].split(" ")
            mark = words[-1] if words[-1] else " ".join(words[-2:])
            return mark if len(mark) >= MARK else None
        at = prompt.find(truth, at + 1)
    return None


class _Scored(Struct, frozen=True):
    """A step's texts of right answers, and their scores [B]."""

    batch: StepBatch
    texts: list[str]
    score_B: Array


def _right_ones(case: Case) -> Iterator[_Scored]:
    for batch in case.batches():
        texts, reward_B = batch.columns.texts("response_text"), batch.reward_B
        if texts is None or reward_B is None or not np.isfinite(reward_B).all():
            continue
        truths = batch.columns.texts("ground_truth")
        told = next((each for each in for_right_answers(batch).values() if np.isin(each, (0.0, 1.0)).all()), None)
        if told is not None:
            right_B = told > 0
        elif truths is not None:
            right_B = np.array([bool(t.strip()) and ends_in(x, t.strip()) for x, t in zip(texts, truths, strict=True)])
        else:
            continue
        if right_B.any():
            kept = np.flatnonzero(right_B)
            yield _Scored(batch, [texts[at] for at in kept], reward_B[kept])


@rule("D120", "a word is paid for", link="rewards", scope="case", lasts=True, explains=("L08", "L09", "D26", "D56"),
      source="a reward that counts a pattern in the answer's text")  # fmt: skip
def paid_by_the_word(case: Case) -> Finding | None:
    """Among right answers alone (by a reward for being right, else by their last words) the score is a rising function
    of how often one word stands in the answer, to 1e-4 and in every row from some step on, over 3 numbers of it and
    more with 4 answers each; without the word it is one number. A warning, which names the word and what one more of it
    pays. No other word, and not the number of words, does as much.
    """
    steps = list(_right_ones(case))
    skip_if(not steps, "needs texts, scores, and which answers are right")
    for since in range(len(steps)):
        rows = [
            (text, float(score)) for one in steps[since:] for text, score in zip(one.texts, one.score_B, strict=True)
        ]
        if len(rows) < NUMBERS * OF_A_NUMBER:
            break
        found = _word_of(rows)
        if found is None:
            continue
        word, paid = found
        numbers = sorted(paid)
        more = (paid[numbers[1]] - paid[numbers[0]]) / (numbers[1] - numbers[0])
        one = steps[since]
        at = next(
            (n for n, text in enumerate(one.batch.columns.texts("response_text") or []) if word in _counts(text)), 0
        )
        return warning(
            f"the reward pays for the word {word!r}: right answers have {paid[numbers[0]]:.4g} without it, and "
            f"{more:.3g} more for each one, up to {paid[numbers[-1]]:.4g}",
            one.batch.laid.where(one.batch.columns.reward_name, sample=at),
            *(shown(f"score of right answers with {number} of it", paid[number], f"{paid[numbers[0]]:.4g}")
              for number in numbers[1:4]),
            shown("right answers that say so", share(len(rows), len(rows))),
            shown("of it in an answer, by step", listed([f"{_mean(each, word):.2g}" for each in steps[since:]], 8)),
            cause="the score counts a pattern in the text (a filler, a phrase of reasoning, a format's mark) and pays "
            "for each one: answers fill with it, and a right answer alone is worth less than a padded one",
            next_step="call the reward function by hand on one answer, with the word and without",
            steps=[each.batch.step for each in steps[since:] if each.batch.step is not None],
        )  # fmt: skip
    return None


def _counts(text: str) -> Counter[str]:
    return Counter(_WORD.findall(_TAG.sub(" ", text)))


def _mean(one: _Scored, word: str) -> float:
    texts = one.batch.columns.texts("response_text") or one.texts
    return sum(_counts(text)[word] for text in texts) / max(len(texts), 1)


def _word_of(rows: list[tuple[str, float]]) -> tuple[str, dict[int, float]] | None:
    """The one word whose number in the text makes the score, and what each number of it has."""
    counted = [_counts(text) for text, _ in rows]
    scores = [score for _, score in rows]
    words = Counter(word for each in counted for word in each)
    of_words = [word for word, many in words.items() if many >= OF_A_NUMBER * (NUMBERS - 1)]
    every = {word: [each[word] for each in counted] for word in of_words[:200]}
    found = {word: paid for word, numbers in every.items() if (paid := _paid(numbers, scores)) is not None}
    if len(found) != 1 or _paid([sum(each.values()) for each in counted], scores) is not None:
        return None
    return next(iter(found.items()))


def _paid(numbers: list[int], scores: list[float]) -> dict[int, float] | None:
    """What each number has, where that is one score in all rows, and rises."""
    of_number: dict[int, list[float]] = defaultdict(list)
    for number, score in zip(numbers, scores, strict=True):
        of_number[number].append(score)
    several = sorted(number for number, each in of_number.items() if len(each) >= OF_A_NUMBER)
    if len(several) < NUMBERS or several[0] != 0 or any(max(each) - min(each) > LEFT for each in of_number.values()):
        return None
    paid = {number: each[0] for number, each in sorted(of_number.items())}
    values = list(paid.values())
    rises = all(b >= a - LEFT for a, b in pairwise(values))
    first = [paid[number] for number in several[:NUMBERS]]
    return paid if rises and all(b > a + LEFT for a, b in pairwise(first)) else None
