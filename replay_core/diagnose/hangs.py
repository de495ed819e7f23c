"""What a log goes on to say where its steps do not go on: the same words of waiting, and for how long."""

from __future__ import annotations

import re
from bisect import bisect
from itertools import pairwise

from msgspec import Struct

from replay_core.diagnose.signals import RunLog, Told
from replay_core.regexes import regex

#: Lines that say the same before it is a habit; and seconds that they span before it is a stall.
LINES, LONG = 5, 900.0
#: Without a clock, so many lines in a row.
MANY = 20
#: How many times the longest step, or as many lines as came between two steps before, a wait has to be no step's own.
_LONGER = 3.0
_CLOCK = regex(r"(?<![\d:])(\d{1,2}):(\d{2}):(\d{2})(?![\d:])")
#: An engine that has nothing to do, by its own account.
_IDLE = regex(r"Running: 0 reqs?, (?:Swapped: 0 reqs, )?(?:Pending|Waiting): 0 reqs|#running-req: 0,")
#: What is waited for is samples.
_SAMPLES = regex(r"(?i)buffer|trajector|rollout|sample|group|episode|queue|generat")


class Wait(Struct, frozen=True):
    """The words that come again and again, their lines, and the seconds up to the end; None where no clock tells."""

    words: str
    lines: list[Told]
    beside: str
    """Other words of the same wait; empty where there are none."""
    seconds: float | None

    @property
    def how_long(self) -> str:
        return "" if self.seconds is None else f" for {in_words(self.seconds)}"

    @property
    def is_for_samples(self) -> bool:
        return _SAMPLES.search(self.words) is not None


def in_words(seconds: float) -> str:
    if seconds >= 5400:
        return f"{seconds / 3600:.2g} hours"
    return f"{seconds / 60:.2g} minutes" if seconds >= 120 else f"{seconds:.3g} seconds"


def bare(one: Told) -> str:
    """Its words without its numbers."""
    return re.sub(r"[\d.:]+", "#", one.text.splitlines()[0])


def waited_until(end: Told, log: RunLog) -> Wait | None:
    """What the log said between its last metric and this end, where that is a hang: lines of waiting, or of an engine
    that has nothing to do, 5 and more of one kind over 15 minutes and over 3 times the longest step; without a clock 20
    and more, and 3 times as many as came between two steps before.
    """
    path, until = end.point.path, end.point.line or 0
    last = log.last_lines().get(path, 0)
    if not last:
        return None
    told = [one for one in log.events("waiting", "engine") if one.point.path == path]
    told = sorted((one for one in told if last < (one.point.line or 0) < until), key=lambda one: one.point.line or 0)
    waits: dict[str, list[Told]] = {}
    for one in told:
        if one.kind == "waiting" or _IDLE.search(one.text):
            waits.setdefault("" if one.kind == "engine" else bare(one), []).append(one)
    same = max(waits.values(), key=len, default=[])
    if len(same) < LINES:
        return None
    first = same[0].point.line or 0
    seconds = _between(
        [one for one in told if (one.point.line or 0) <= first and _CLOCK.search(one.text[:200])][-1:]
        + [one for one in told if (one.point.line or 0) > first]
        + [end]
    )
    if seconds is not None:
        step = log.get("step_seconds")
        if seconds < max(LONG, _LONGER * max(step.finite if step is not None else [], default=0.0)):
            return None
    elif len(same) < MANY or len(same) <= _LONGER * as_many_before(same, log):
        return None
    others = [each[-1].text.splitlines()[0].strip() for words, each in waits.items() if words and each is not same]
    return Wait(same[0].text.splitlines()[0].strip(), same, others[0][:160] if others else "", seconds)


def as_many_before(same: list[Told], log: RunLog) -> int:
    """The most lines of these words that came between two lines of metrics, where the steps went on behind them."""
    path, first, words = same[0].point.path, same[0].point.line or 0, bare(same[0])
    series = max((one.points for one in log.signals()), key=len, default=())
    metrics = sorted(point.line or 0 for point in series if point.path == path)
    counts: dict[int, int] = {}
    for one in log.events(same[0].kind):
        if one.point.path == path and (one.point.line or 0) < first and bare(one) == words:
            at = bisect(metrics, one.point.line or 0)
            counts[at] = counts.get(at, 0) + 1
    return max(counts.values(), default=0)


def _between(told: list[Told]) -> float | None:
    """Seconds from the first of these lines that has a clock to the last one, which has to be the last of all."""
    clocks = [_CLOCK.search(one.text[:200]) for one in told]
    if clocks[-1] is None:
        clocks.pop()
    times = [int(m[1]) * 3600 + int(m[2]) * 60 + int(m[3]) for m in clocks if m is not None]
    return float(sum((b - a) % 86400 for a, b in pairwise(times))) if len(times) > 1 else None
