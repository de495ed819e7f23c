"""Right answers beside what they are paid: scores of other rows, of the prompt alone, or none for a part of them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from msgspec import Struct

from replay_core.diagnose.advantage_variants import orders
from replay_core.diagnose.answers import asked_of
from replay_core.diagnose.apart import Apart, Trait, response_sizes
from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.case import Case
from replay_core.diagnose.finding import Evidence, Finding, error, listed, share, shown, warning
from replay_core.diagnose.flat import Array
from replay_core.diagnose.rule import rule, skip_if
from replay_core.diagnose.rules.scores import ends_in, for_right_answers
from replay_core.regexes import regex

#: Right and wrong answers, and groups that hold both, before they tell; how often a score has to follow what is right.
FEWEST, GROUPS, FOLLOWS = 16, 6, 0.85
#: The share of groups, or rows, that another reading has to make.
MOST = 0.95
#: Right answers without a score before it is no slip, and the share of all right ones.
UNPAID, SOME = 8, 0.1
#: A penalty that grows with the length has several degrees, and nothing else makes these scores.
DEGREES, FALLS = 3, 0.6
_TAG = regex(r"<[^<>]{1,20}>")


class _PaidStep(Struct, frozen=True):
    """A step's samples [B]: their scores, which answers are right, the group (or prompt) each is of, and forms of
    answers (its marks without words), where texts tell them.
    """

    batch: StepBatch
    score_B: Array
    right_B: Array
    group_B: Array
    forms: list[str] | None
    by: str

    @property
    def groups(self) -> int:
        return int(self.group_B.max()) + 1


def _steps(case: Case) -> list[_PaidStep]:
    found = []
    for batch in case.batches():
        score_B = batch.reward_B
        if score_B is None or not np.isfinite(score_B).all() or batch.laid.algorithm.is_distilled:
            continue
        named = ((name, values_B) for name, values_B in for_right_answers(batch).items()
                 if name != batch.columns.reward_name and np.isin(values_B, (0.0, 1.0)).all())  # fmt: skip
        name, told_B = next(named, ("", None))
        texts, truths = batch.columns.texts("response_text"), batch.columns.texts("ground_truth")
        if told_B is None:
            if texts is None or truths is None or texts == truths:
                continue
            told_B = _by_text(batch)
        group_B = batch.group_B
        if group_B is None:
            asked = asked_of(batch)
            if asked is None:
                continue
            group_B = np.unique(np.array(asked, dtype=object), return_inverse=True)[1]
        forms = None if texts is None else ["".join(_TAG.findall(text)) for text in texts]
        found.append(_PaidStep(batch, score_B, told_B > 0, np.asarray(group_B), forms, name))
    return found


class LostGrades(Struct, frozen=True):
    """Right answers with the lowest score of the run, of all right ones, where no wrong answer has more than that."""

    unpaid: int
    right: int
    wrong: int
    low: float


def _by_text(batch: StepBatch) -> Array:
    """Which answers end in their ground truth: a reward for being right may be the verifier's own. None does where no
    texts are recorded.
    """
    texts, truths = batch.columns.texts("response_text"), batch.columns.texts("ground_truth")
    pairs = zip(texts or [""] * len(batch), truths or [""] * len(batch), strict=True)
    return np.array([bool(truth.strip()) and ends_in(text, truth.strip()) for text, truth in pairs], dtype=bool)


def lost_grades(case: Case) -> LostGrades | None:
    """Whether scores err to one side: a part of the right answers (8, and a tenth) has the lowest score, the rest more,
    and of 16 wrong answers and more none has. Scores of other rows would pay wrong answers, too. None where it is not
    known which are right.
    """
    steps = _steps(case)
    if not steps:
        return None
    score_B = np.concatenate([one.score_B for one in steps])
    right_B = np.concatenate([_by_text(one.batch) if one.by else one.right_B for one in steps])
    low = float(score_B.min())
    least_B = score_B <= low + 1e-6 * max(1.0, abs(low))
    unpaid, right, wrong = int((right_B & least_B).sum()), int(right_B.sum()), int((~right_B).sum())
    if wrong < FEWEST or not least_B[~right_B].all() or not max(UNPAID, SOME * right) <= unpaid < right:
        return None
    return LostGrades(unpaid, right, wrong, low)


@rule("D123", "right answers are not paid as such", link="rewards", scope="case", lasts=True,
      explains=("D01", "D03", "D20", "D56", "D95", "D100", "L08", "L17"),
      source="a parser that misses a part of the right answers; scores that come back in another order")  # fmt: skip
def not_paid(case: Case) -> Finding | None:
    """Where it is recorded which answers are right (a reward for that alone, or texts that end in their ground truth),
    and scores beside it, over 16 right answers and 16 wrong ones, fewer than .85 of the right ones have the full score.

    An error where in 2 steps and more full scores lie on right answers up to one row, and from there on the row before
    (or behind) tells them (.98 of 8 rows and more), the other steps being right. An error where the full scores of each
    group (or of each step) are as many as its right answers, in .95 of those
    that hold both and are not all alike, and lie on other rows. A warning where all answers of a prompt have one
    score, in .95 of the groups that hold right and wrong ones. A warning where a part of the right answers (8, and
    a tenth of them) has no more than wrong ones have, with what sets these apart from those that are paid: their
    length, their first word, a word in them, their row, a ground truth that is empty, or their prompt (all right
    answers to 3 and more of them unpaid, all to 3 and more paid), or all of them at one score. Of texts only
    answers whose marks (tags) some paid answer has are counted.
    """
    steps = _steps(case)
    right = sum(int(one.right_B.sum()) for one in steps)
    wrong = sum(len(one.right_B) for one in steps) - right
    skip_if(min(right, wrong) < FEWEST, f"needs {FEWEST} right and {FEWEST} wrong answers, and their scores")
    every = np.concatenate([one.score_B for one in steps])
    full, low = float(every.max()), float(every.min())
    if not full > low:
        return None
    close = 1e-6 * max(abs(full), abs(low), 1e-6)

    def paid(one: _PaidStep) -> Array:
        return one.score_B >= full - close

    if (shifted := _shifted(steps, paid)) is not None:
        return shifted
    of_right = float(np.concatenate([paid(one)[one.right_B] for one in steps]).mean())
    if of_right >= FOLLOWS:
        return None
    of_wrong = float(np.concatenate([paid(one)[~one.right_B] for one in steps]).mean())
    told = [
        shown("right answers that have the full score", of_right, f">= {FOLLOWS:g}"),
        shown("wrong answers that have it", of_wrong),
        shown("right and wrong answers", f"{right}, {wrong}", None, steps[0].by or "texts and ground truths"),
    ]
    return _on_other_rows(steps, paid, told) or _of_the_prompt(steps, close, told) or _unpaid(steps, full, low, told)


def _on_other_rows(steps: list[_PaidStep], paid: Callable[[_PaidStep], Array], told: list[Evidence]) -> Finding | None:
    """Full scores that are as many as right answers, in each group or step, and lie elsewhere."""
    for what, key in (("group", lambda one: one.group_B), ("step", lambda one: np.zeros(len(one.right_B), int))):
        pairs = []
        for one in steps:
            key_B = key(one)
            sizes = np.bincount(key_B)
            counts = [np.bincount(key_B, weights=each) for each in (one.right_B, paid(one))]
            mixed = (counts[0] > 0) & (counts[0] < sizes)
            pairs += [*zip(counts[0][mixed], counts[1][mixed], strict=True)]
        alike = sum(a == b for a, b in pairs)
        if len(pairs) < (GROUPS if what == "group" else 3) or alike < MOST * len(pairs):
            continue
        if len({a for a, _ in pairs}) < 2:
            continue
        named = [_order(one, paid(one)) for one in steps]
        how = named[0] if named[0] and len(set(named)) == 1 else ""
        off = sum(int((one.right_B != paid(one)).sum()) for one in steps)
        one = steps[0]
        return error(
            f"scores lie on other rows of their {what}: each {what} has as many full scores as right answers, and "
            f"{off} rows have another's" + (f": {how}" if how else ""),
            one.batch.laid.where(one.batch.columns.reward_name, sample=int((one.right_B != paid(one)).argmax())),
            shown(f"{what}s with as many full scores as right answers", share(alike, len(pairs)), "and on their rows"),
            *told,
            cause="scores come back in another order than the samples (workers that end when they like, a sort, a "
            "swap), and are not put in order again: right answers are paid what wrong ones earned",
            next_step="score ten answers by hand, and compare them with the recorded scores row by row",
            steps=[each.batch.step for each in steps if each.batch.step is not None],
        )
    return None


#: Steps whose scores are moved on from some row, rows behind it, how many of them have another score than their own
#: answer, and the share of those that have to have their neighbour's.
SHIFTED, BEHIND, OTHERS, NEIGHBOURS = 2, 8, 4, 0.98


def _shifted(steps: list[_PaidStep], paid: Callable[[_PaidStep], Array]) -> Finding | None:
    """Steps whose full scores lie on right answers up to one row, and on the row behind (or before) them from there
    on, to the last.
    """
    found = [(one, *told) for one in steps if (told := _moved_on(one.right_B, paid(one))) is not None]
    if len(found) < SHIFTED or len({by for _, _, by, _ in found}) > 1:
        return None
    one, row, by, off = max(found, key=lambda each: each[3])
    others = [float((each.right_B == paid(each)).mean()) for each in steps if all(each is not got for got, *_ in found)]
    if others and min(others) < NEIGHBOURS:
        return None
    whose = "before" if by > 0 else "behind"
    return error(
        f"from row {row} on scores are those of the answer {whose}: up to there they are right, as texts and ground "
        f"truths (or marks of right answers) tell, and {off} rows behind it have another's",
        one.batch.laid.where(one.batch.columns.reward_name, sample=row),
        shown("rows behind it whose score is not their own answer's", off, "0"),
        shown("row where the shift begins, by step", listed(at for _, at, *_ in found)),
        shown("steps that are shifted", share(len(found), len(steps)), "none"),
        cause="a call to the reward function failed there, and its score was appended twice (in the handler of the "
        "exception and behind it)" if by > 0 else
        "a call to the reward function failed there, and nothing was appended for it: scores behind it move up by one",
        next_step="index scores by sample instead of appending them, and count them against the answers",
        steps=[each.batch.step for each, *_ in found if each.batch.step is not None],
    )  # fmt: skip


def _moved_on(right_B: Array, paid_B: Array) -> tuple[int, int, int] | None:
    """The row from which on scores are one row off, by how many rows (1: the one before), and how many rows then have
    another score than their answer's; None where there is none.
    """
    size = len(right_B)
    off = np.flatnonzero(right_B != paid_B)
    # Scores that move leave right answers unpaid and pay wrong ones; a parser that misses some pays no more.
    if len(off) < OTHERS or len({bool(each) for each in paid_B[off]}) < 2:
        return None
    first = int(off[0])
    for by in (1, -1):
        moved_B = np.roll(right_B, by)
        # The last of a row that lost one is what stands for it.
        tail = slice(first + 1, size) if by > 0 else slice(first, size - 1)
        rows = tail.stop - tail.start
        # What stands for the call that failed may be another score than its answer's, and so may its copy.
        if rows >= BEHIND and (moved_B != paid_B)[tail].sum() <= 1 + (1 - NEIGHBOURS) * rows:
            return first, by, len(off)
    return None


def _order(one: _PaidStep, paid_B: Array) -> str:
    """The order that puts the full scores on the right answers; empty where none is known."""
    size = len(paid_B)
    each = np.arange(size)
    known = [("each two neighbouring rows have each other's", each ^ 1)] if size % 2 == 0 else []
    for how, order in (*known, *orders(size, max(one.groups, 1))):
        if (one.right_B[order] == paid_B).all():
            return how
    return ""


def _of_the_prompt(steps: list[_PaidStep], close: float, told: list[Evidence]) -> Finding | None:
    """One score for all answers of a prompt, right and wrong ones."""
    alike = mixed = 0
    first: tuple[_PaidStep, int] | None = None
    for one in steps:
        for group in range(one.groups):
            rows = np.flatnonzero(one.group_B == group)
            if len(rows) < 2 or one.right_B[rows].all() or not one.right_B[rows].any():
                continue
            mixed += 1
            alike += bool(np.ptp(one.score_B[rows]) <= close)
            first = first or (one, int(rows[0]))
    if first is None or mixed < GROUPS or alike < MOST * mixed:
        return None
    one, at = first
    return warning(
        "all answers of a prompt have one score, right and wrong ones: the score is not made of the answer",
        one.batch.laid.where(one.batch.columns.reward_name, sample=at),
        shown("groups with right and wrong answers whose scores are all one", share(alike, mixed), "none"),
        *told,
        cause="the parser reads something that all of them share (the prompt, the first match in prompt and answer "
        "together) and not what was answered; or a score of the group is given to each of its answers",
        next_step="call the reward function by hand on a right and on a wrong answer to one prompt",
        steps=[each.batch.step for each in steps if each.batch.step is not None],
    )


_EMPTY = "whose ground truth is empty"
_OF_PROMPTS = "all right ones to some prompts, and none to the others"
#: Prompts with two right answers and more, of either kind, before it is no chance that all of them are treated alike.
PROMPTS = 3


def _paid_or_not(one: _PaidStep, full: float, most: float, close: float) -> tuple[Array, Array]:
    """Right answers that have no more than wrong ones have, and those that have the full score."""
    return one.right_B & (one.score_B <= most + close), one.right_B & (one.score_B >= full - close)


def _without_truth(steps: list[_PaidStep], full: float, most: float, close: float) -> Trait | None:
    """Right answers without a score, nearly all of which have no ground truth, which the paid ones have."""
    off = off_empty = paid = paid_empty = 0
    for one in steps:
        truths = one.batch.columns.texts("ground_truth")
        if truths is None:
            return None
        empty_B = np.array([not truth.strip() or truth.strip() in ("None", "null", "nan") for truth in truths])
        off_B, paid_B = _paid_or_not(one, full, most, close)
        off, off_empty = off + int(off_B.sum()), off_empty + int((off_B & empty_B).sum())
        paid, paid_empty = paid + int(paid_B.sum()), paid_empty + int((paid_B & empty_B).sum())
    # Of a step in which no label is recorded, and what is paid has none either, it tells nothing.
    if off_empty < UNPAID or off_empty < MOST * off or paid < UNPAID or paid_empty > (1 - MOST) * paid:
        return None
    return Trait(_EMPTY, off_empty, off_empty + paid_empty, off - off_empty, off + paid - off_empty - paid_empty)


def _by_prompt(steps: list[_PaidStep], full: float, most: float, close: float) -> list[Evidence] | None:
    """Prompts to which all right answers are unpaid, and such to which all are paid, and none in between."""
    without = with_ = between = 0
    for one in steps:
        off_B, paid_B = _paid_or_not(one, full, most, close)
        for group in range(one.groups):
            inside_B = one.group_B == group
            off, paid = int((off_B & inside_B).sum()), int((paid_B & inside_B).sum())
            if off + paid >= 2:
                without, with_, between = without + (not paid), with_ + (not off), between + bool(off and paid)
    if min(without, with_) < PROMPTS or between > (1 - MOST) * (without + with_):
        return None
    return [shown("prompts whose right answers (2 and more) are all unpaid, all paid, and some of each",
                  f"{without}, {with_}, {between}")]  # fmt: skip


def _unpaid(steps: list[_PaidStep], full: float, low: float, told: list[Evidence]) -> Finding | None:
    """Right answers that have no more than wrong ones have, and what sets them apart."""
    wrong = np.concatenate([one.score_B[~one.right_B] for one in steps])
    most = float(np.median(wrong))
    close = 1e-6 * max(abs(full), 1e-6)
    if full - most < 0.2 * (full - low):
        return None
    apart, unpaid, right = Apart(), 0, 0
    first: tuple[_PaidStep, int] | None = None
    paid_forms = {
        form for one in steps if one.forms is not None
        for form, is_paid in zip(one.forms, one.right_B & (one.score_B >= full - close), strict=True) if is_paid
    }  # fmt: skip
    scores: list[float] = []
    for one in steps:
        among_B = one.right_B.copy()
        if not one.by and one.forms is not None:
            among_B &= np.array([form in paid_forms for form in one.forms])
        off_B = among_B & (one.score_B <= most + close)
        # What lies between the two is paid in part, for whatever reason.
        apart.take(one.batch, off_B, among_B & (off_B | (one.score_B >= full - close)))
        unpaid, right = unpaid + int(off_B.sum()), right + int(among_B.sum())
        scores += one.score_B[off_B].tolist()
        if first is None and off_B.any():
            first = one, int(off_B.argmax())
    if first is None or unpaid < max(UNPAID, SOME * right) or _falls_with_length(steps, full - close):
        return None
    trait: Trait | None = _without_truth(steps, full, most, close) or apart.told()
    of_prompts = _by_prompt(steps, full, most, close) if trait is None else None
    is_level = max(scores) - min(scores) <= close
    # Texts that end in the truth may be wrong in what they hold before it: only where something sets them apart. And
    # what another term outweighs has no one level, as answers have that are taken for wrong.
    if trait is None and of_prompts is None and not (first[0].by and is_level):
        return None
    one, at = first
    level = f"{scores[0]:.4g}" if is_level else f"{min(scores):.4g} to {max(scores):.4g}"
    return warning(
        f"right answers are paid as wrong ones: {share(unpaid, right)} have the score {level}"
        + (f", those {trait.words}" if trait is not None else f", {_OF_PROMPTS}" if of_prompts is not None else ""),
        one.batch.laid.where(one.batch.columns.reward_name, sample=at),
        *([] if trait is None else [trait.evidence]),
        *(of_prompts or []),
        shown("median score of wrong answers", most), shown("full score", full),
        *told,
        cause="the reward function is given no label for these prompts (a column that is empty or renamed in a part of "
        "the data, a join that misses): no answer can be right, and right ones are trained against"
        if trait is not None and trait.words == _EMPTY
        else "what sets them apart is the prompt, not the answer: its label (ground truth) is missing, of another "
        "prompt, or in a form that no answer has; or its source goes to another reward function"
        if of_prompts is not None
        else "the reward function does not find these answers: a parser that cuts the response, wants the answer in "
        "another place or form, or a rule on top of it takes the score away: right answers are trained against",
        next_step="look at the ground truth of these prompts"
        if of_prompts is not None or (trait is not None and trait.words == _EMPTY)
        else "call the reward function by hand on one of these answers",
        steps=[each.batch.step for each in steps if each.batch.step is not None],
    )  # fmt: skip


def _falls_with_length(steps: list[_PaidStep], full: float) -> bool:
    """Whether what right answers are paid goes down by degrees as they get longer: a penalty on overlong answers."""
    sizes = [response_sizes(one.batch) for one in steps]
    if any(size is None for size in sizes):
        return False
    length = np.concatenate([size[1][one.right_B] for size, one in zip(sizes, steps, strict=True) if size is not None])
    score = np.concatenate([one.score_B[one.right_B] for one in steps]).astype(float)
    if len(np.unique(score[score < full].round(6))) < DEGREES or not np.ptp(length) > 0:
        return False
    return bool(np.corrcoef(length, score)[0, 1] <= -FALLS)
