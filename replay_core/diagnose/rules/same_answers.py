"""Evaluations that give the same answers word for word while the policy moves: other weights answer them."""

from __future__ import annotations

from collections import Counter
from statistics import fmean

import numpy as np
from msgspec import Struct, field

from replay_core import pages
from replay_core.diagnose import trends
from replay_core.diagnose.case import Case
from replay_core.diagnose.columns import OTHER_NAMES
from replay_core.diagnose.finding import Evidence, Finding, Where, share, shown, warning
from replay_core.diagnose.rule import rule, skip_if
from replay_core.errors import RldbgError
from replay_core.records import Inline, Record
from replay_core.samples.batch import Batch

#: Evaluations, answers in each, the share of them that is the same as at first, and different ones among them.
EVALUATIONS, ANSWERS, MOST, DIFFERENT = 4, 8, 0.9, 3
#: Words (or tokens) of an answer on average that no two policies give alike; nats below which a policy is so sure that
#: its short answers stay; by what share, and how much, its entropy changes.
LONG, UNSURE, MOVED, AT_LEAST = 8, 0.5, 0.15, 0.1
#: Nats that an answer holds on average (its words times the entropy of one), below which the likeliest answer of a
#: policy that only gets surer of it stays.
OPEN = 4.0


class _Evaluation(Struct):
    """The answers of one evaluation."""

    step: int
    place: Where
    rows: Counter[tuple[str | bytes, str | bytes]] = field(default_factory=Counter)
    words: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)


class _Motion(Struct, frozen=True):
    """A number of training that goes from one level to another over the evaluations."""

    name: str
    begun: float
    now: float
    is_sure: bool
    """Whether the policy may be so sure of its answers that short ones stay what they are."""
    surer: float | None = None
    """Nats of a token in the end, where the policy gets surer."""


@rule("D164", "validation's answers never change", link="trend", scope="case", lasts=True,
      explains=("D116", "L25", "L60"),
      source="huggingface/trl#3189: an engine that keeps its initial weights")  # fmt: skip
def word_for_word(case: Case) -> Finding | None:
    """The answers of 4 evaluations and more to the same prompts (8 and more that are not empty, 3 different ones and
    more): a warning where 9 of 10 and more are word for word those of the first in each of the others, while the policy
    moves: the entropy of training, or the log-probability of what is sampled, drifts by .15 of it and more, or its
    reward rises or falls beyond chance. Answers of less than 8 words on average stay the same where a policy is sure of
    them: they tell where not all of them have the best score, and the entropy is .5 nats and more throughout.
    Longer ones stay, too, where the policy only gets surer: they tell where an answer still holds 4 nats and more at
    the end (its words times the entropy), or the reward falls.
    """
    every = _evaluations(case)
    skip_if(len(every) < EVALUATIONS, f"needs the answers of {EVALUATIONS} evaluations")
    first, others = every[0], every[1:]
    size = first.rows.total()
    if size < ANSWERS or len({answer for _, answer in first.rows}) < DIFFERENT:
        return None
    same = [(one.rows & first.rows).total() for one in others]
    if any(one.rows.total() != size for one in others) or min(same) < MOST * size:
        return None
    is_long = fmean(first.words) >= LONG
    all_right = len(set(first.scores)) < 2
    motions = [one for one in _motions(case, every) if is_long or not (one.is_sure or all_right)]
    settled = is_long and any(one.surer is not None and one.surer * fmean(first.words) < OPEN for one in motions)
    motion = next((one for one in motions if not settled or (one.surer is None and one.now < one.begun)), None)
    if motion is None:
        return None
    scores = [fmean(one.scores) for one in every if one.scores]
    told: list[Evidence] = [shown("their mean score", scores[0])] if len(scores) == len(every) else []
    return warning(
        f"validation gives the same answers over and over: in all {len(every)} evaluations "
        f"{f'all {size}' if min(same) == size else f'{min(same)} of {size} and more'} are word for word those of step "
        f"{first.step}, while {motion.name} goes from {motion.begun:.3g} to "
        f"{motion.now:.3g}",
        others[0].place,
        shown("answers that are those of the first evaluation", share(sum(same), size * len(others)), "few"),
        shown("different answers among them", len({answer for _, answer in first.rows})),
        shown("words of an answer, on average", fmean(first.words)),
        *told,
        shown(motion.name, motion.now, f"was {motion.begun:.3g}"),
        cause="the weights that are validated are not those that are trained: an engine of its own that no update "
        "reaches, the initial weights, a checkpoint that is never replaced; or answers are cached by their prompts",
        next_step="compare a weight of the validating engine with the trainer's after an update; send it the weights "
        "before every evaluation",
        steps=[one.step for one in others],
    )


def _evaluations(case: Case) -> list[_Evaluation]:
    """The evaluations with answers, by step."""
    found: dict[int, _Evaluation] = {}
    for record in case.records():
        key = record.key
        # A loss of held-out demonstrations or pairs passes the same responses each time, and samples none.
        if key.role != "eval" or key.step is None or record.is_flat or key.stage == "forward_data":
            continue
        one = found.get(key.step) or _Evaluation(key.step, Where.of(record, None))
        try:
            rows = _texts(record) or _tokens(record)
        except (RldbgError, ValueError):
            continue
        for prompt, answer, words in rows:
            one.rows[prompt, answer] += 1
            one.words.append(words)
        ref = next(
            (ref for name in ("reward", "token_scores") for ref in record.tensors() if ref.canonical == name), None
        )
        if rows and ref is not None and ref.is_readable and not ref.is_text and ref.shape == (len(rows),):
            one.scores += [float(value) for value in pages.array(ref)]
        if rows:
            found[key.step] = one
    return [found[step] for step in sorted(found)]


_Row = tuple[str | bytes, str | bytes, int]


def _texts(record: Record) -> list[_Row]:
    """Prompts and answers that are no more than white space, and their words."""
    each = []
    for name in ("prompt_text", "response_text"):
        known = (name, *OTHER_NAMES[name])
        texts = [
            [str(text) for text in ref.source.value] for ref in record.tensors()
            if (ref.canonical in known or ref.name in known) and ref.is_text and isinstance(ref.source, Inline)
        ]  # fmt: skip
        each.append(next(iter(texts), []))
    if len(each[0]) != len(each[1]):
        return []
    return [(prompt, answer, len(answer.split())) for prompt, answer in zip(*each, strict=True) if answer.strip()]


def _tokens(record: Record) -> list[_Row]:
    """The same of token ids, where it is known at which of them the responses begin."""
    rows = Batch(record, record.tensors(), by_shape=True)
    if not rows.has_tokens or not rows.padding_known or rows.contents is None or rows.packs is not None:
        return []
    starts, mask = rows.response_starts, rows.held.find("response_mask")
    if starts is None:
        if mask is None or len(mask.shape) != 2 or mask.shape[0] != len(rows):
            return []
        # A response's mask ends where its row ends.
        starts = rows.lengths - (pages.array(mask) != 0).sum(1)
    found: list[_Row] = []
    for ids, start in zip(rows.contents, starts, strict=True):
        at = max(int(start), 0)
        prompt, answer = (np.ascontiguousarray(part, dtype=np.int64) for part in (ids[:at], ids[at:]))
        if answer.size:
            found.append((prompt.tobytes(), answer.tobytes(), int(answer.size)))
    return found


def _motions(case: Case, every: list[_Evaluation]) -> list[_Motion]:
    """What tells that the policy moves between the first evaluation and the last, the surest first."""
    found: list[_Motion] = []
    levels: list[tuple[str, list[float]]] = []
    log = case.log
    begin, end = every[0].step - 1, every[-1].step + 1
    for signal in ("entropy", "reward"):
        series = log.get(signal)
        if series is not None:
            values = [point.value for point in series.points if point.step is None or begin <= point.step <= end]
            levels.append((series.name, [value for value in values if np.isfinite(value)]))
        else:
            levels.append((signal, []))
    entropy, reward = levels
    surprise = [] if entropy[1] else _surprise(case, begin, end)
    unsure = entropy[1] or surprise
    sure = not unsure or min(trends.level(unsure[:3]), trends.level(unsure, 3)) < UNSURE
    for name, values in (entropy, ("-log p of what is sampled", surprise)):
        if len(values) < trends.MIN_STEPS or abs(trends.drift(values)) <= trends.DRIFT_Z:
            continue
        begun, now = trends.level(values[:3]), trends.level(values, 3)
        if abs(now - begun) >= max(AT_LEAST, MOVED * abs(begun)):
            found.append(_Motion(name, begun, now, sure, surer=now if now < begun else None))
    if abs(trends.drift(reward[1])) > trends.DRIFT_Z:
        found.append(_Motion(reward[0], trends.level(reward[1][:3]), trends.level(reward[1], 3), sure))
    return found


def _surprise(case: Case, begin: int, end: int) -> list[float]:
    """How unlikely what is sampled is on average, step by step."""
    found = []
    for batch in case.batches():
        if batch.step is None or not begin <= batch.step <= end:
            continue
        column = batch.columns.of("rollout_logprobs") or batch.trainer
        if column is None:
            continue
        counted_N = batch.pair(column, column)
        if counted_N.any():
            found.append(-float(column.values_N[counted_N].mean()))
    return found
