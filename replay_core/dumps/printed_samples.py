"""Answers that a log prints with what each earned: no steps of training, though each has a row of rewards.

Generation: ...
Metrics:  {'format_reward': 1.0, 'answer_reward': 0.0, 'reward': 0.0}
GT Answer:  460
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

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


def without_samples(lines: Iterable[TrainerLine]) -> Iterator[TrainerLine]:
    """Every line; those of an answer's rewards, beside its ground truth, without their text."""
    held: deque[TrainerLine] = deque()
    truths: deque[int] = deque(maxlen=2 * _BESIDE + 2)
    seen = 0
    for line in lines:
        seen += 1
        if _TRUTH.match(line.text[:80]):
            truths.append(seen)
        held.append(line)
        if len(held) > _BESIDE:
            yield _told(held.popleft(), seen - _BESIDE, truths)
    while held:
        yield _told(held.popleft(), seen - len(held), truths)


def _told(line: TrainerLine, at: int, truths: Iterable[int]) -> TrainerLine:
    text = line.text
    if "{" not in text or not _REWARDS.match(text) or _STATISTIC.search(text):
        return line
    return replace(line, text="") if any(abs(at - truth) <= _BESIDE for truth in truths) else line
