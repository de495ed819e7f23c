"""Answers that a log prints with what each earned: no steps of training, though each has a row of rewards.

Generation: ...
Metrics:  {'format_reward': 1.0, 'answer_reward': 0.0, 'reward': 0.0}
GT Answer:  460

The mean of a step's rewards reads the same, and may stand beside the step's one printed answer: rows are those of
answers only where several stand for each row of a loss, or where they have several numbers, each of which one answer
may earn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator

from msgspec.structs import replace

from replay_core.dumps.log_lines import TrainerLine
from replay_core.regexes import regex

#: Rewards alone, of one answer: no loss, no rate, no step, and no statistic over several.
_REWARDS = regex(
    r"^[^{}]{0,40}\{\s?(?:['\"]\w{0,40}(?:reward|score|correct)\w{0,20}['\"]:\s?-?\d[\d.e-]{0,24},?\s?){1,12}\}\s{0,8}$"
)
_STATISTIC = regex(r"(?:mean|avg|std|max|min|total)['\"_]|loss|step")
#: What the answer is held against.
_TRUTH = regex(
    r"(?i)^\W{0,8}(?:gt|ground[ _]?truth|gold(?:en)?|reference|expected|correct|true|target)"
    r"(?:[ _](?:answer|solution|output))?\s?[:=]"
)
#: Lines around it in which that stands.
_BESIDE = 3


#: What one answer earns.
_LEVELS = frozenset((0.0, 0.5, 1.0))
_NUMBER = regex(r":\s?(-?\d[\d.e-]{0,24})")
_TRAINED = regex(r"(?:loss|grad_norm)['\"]?\s{0,2}[:=]\s{0,2}['\"]?(?:[-\d.]|nan|inf)")
#: Rows of answers for each row of a loss.
_SEVERAL = 2


class PrintedSamples:
    """The rows of answers of one log. `whole`: all of its lines anew, which say whether there are such rows."""

    def __init__(self, whole: Callable[[], Iterable[TrainerLine]]) -> None:
        self._whole = whole
        self._are_answers: bool | None = None
        self.left_out = 0

    def without(self, lines: Iterable[TrainerLine]) -> Iterator[TrainerLine]:
        """Every line; those of an answer's rewards, beside its ground truth, without their text."""
        for line, is_beside in _beside(lines):
            if is_beside and self._are_answers is None:
                self._are_answers = _are_answers(self._whole())
            if is_beside and self._are_answers:
                self.left_out += 1
                yield replace(line, text="")
            else:
                yield line


def _are_answers(lines: Iterable[TrainerLine]) -> bool:
    rows = trained = 0
    earned: set[float | None] = set()
    for line, is_beside in _beside(lines):
        if is_beside:
            rows += 1
            if earned <= _LEVELS:
                earned.update(_number(found[1]) for found in _NUMBER.finditer(line.text))
        elif _TRAINED.search(line.text) is not None:
            trained += 1
    return (len(earned) > 1 and earned <= _LEVELS) or rows >= _SEVERAL * trained


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _beside(lines: Iterable[TrainerLine]) -> Iterator[tuple[TrainerLine, bool]]:
    """Every line, and whether it is one of rewards beside a ground truth."""
    held: deque[TrainerLine] = deque()
    truths: deque[int] = deque(maxlen=2 * _BESIDE + 2)
    seen = 0
    for line in lines:
        seen += 1
        if _TRUTH.match(line.text[:80]):
            truths.append(seen)
        held.append(line)
        if len(held) > _BESIDE:
            told = held.popleft()
            yield told, _is_beside(told, seen - _BESIDE, truths)
    while held:
        told = held.popleft()
        yield told, _is_beside(told, seen - len(held), truths)


def _is_beside(line: TrainerLine, at: int, truths: Iterable[int]) -> bool:
    text = line.text
    if "{" not in text or not _REWARDS.match(text) or _STATISTIC.search(text):
        return False
    return any(abs(at - truth) <= _BESIDE for truth in truths)
