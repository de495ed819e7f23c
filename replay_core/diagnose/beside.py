"""What a log shows beside a figure that changes: whether that falls at once, and what else is another by then."""

from __future__ import annotations

import math
from statistics import median

from msgspec import Struct

from replay_core.diagnose.finding import Evidence, shown
from replay_core.diagnose.signals import RunLog, Series

#: Of what a line leaves of a series, the share that one step leaves, before it falls at once; and how many times what
#: is left that step is.
SHARPER, FAR = 0.6, 3.0
#: Steps on each side of it that are looked at, and how far a figure may waver there and be what it was.
AROUND, SAME, MADS, OTHER = 5, 0.25, 3.0, 1.5
#: Figures of what the policy writes, and of how it is moved.
_OF_THE_POLICY = ("entropy", "response_length", "truncated", "kl", "policy_kl")
_WORDS = {"entropy": "the entropy", "response_length": "the length of responses", "truncated": "the share cut off",
          "kl": "the KL to the reference", "policy_kl": "the policy's KL within a batch"}  # fmt: skip


class Fall(Struct, frozen=True):
    """A fall from one step to the next: the step, what it was before and is from there on."""

    step: int | None
    number: int
    before: float
    after: float


def at_once(series: Series) -> Fall | None:
    """The one step at which a series falls; None where a line through it all leaves about as little."""
    points = [point for point in series.points if math.isfinite(point.value)]
    values = [point.value for point in points]
    if len(values) < 2 * AROUND:
        return None
    n = len(values)
    middle = (n - 1) / 2
    mean = sum(values) / n
    slope = sum((at - middle) * (each - mean) for at, each in enumerate(values)) / sum(
        (at - middle) ** 2 for at in range(n)
    )
    line = sum((each - mean - slope * (at - middle)) ** 2 for at, each in enumerate(values))
    best, number = math.inf, 0
    for at in range(3, n - 2):
        left = 0.0
        for part in (values[:at], values[at:]):
            own = sum(part) / len(part)
            left += sum((each - own) ** 2 for each in part)
        if left < best:
            best, number = left, at
    before, after = median(values[:number]), median(values[number:])
    if not number or best > SHARPER * line or before - after < FAR * math.sqrt(best / n):
        return None
    return Fall(points[number].step, number, before, after)


def changed_beside(log: RunLog, fall: Fall) -> tuple[list[str], list[str], list[Evidence]]:
    """Figures of the policy that are what they were around the step of a fall, those that are others by the end, in
    words, and the figures of both.
    """
    same, other, told = [], [], []
    for signal in _OF_THE_POLICY:
        series = log.get(signal)
        points = [] if series is None else [one for one in series.points if math.isfinite(one.value)]
        before = [one.value for one in points if one.step is not None and one.step < (fall.step or 0)][-AROUND:]
        since = [one.value for one in points if one.step is not None and one.step >= (fall.step or 0)]
        if series is None or len(before) < 3 or len(since) < 3:
            continue
        a, b, end = median(before), median(since[:AROUND]), median(since[-AROUND:])
        waver = median(abs(each - a) for each in before)
        room = max(SAME * abs(a), MADS * waver)
        if abs(b - a) <= room:
            same.append(_WORDS[signal])
        # A KL to the reference grows as a policy learns.
        if signal != "kl" and abs(end - a) > room and (abs(end) > OTHER * abs(a) or OTHER * abs(end) < abs(a)):
            other.append(f"{_WORDS[signal]} goes from {a:.3g} to {end:.3g}")
        told.append(shown(f"{series.name} before it, in the {AROUND} steps from it on, and at the end",
                          f"{a:.3g}, {b:.3g}, {end:.3g}"))  # fmt: skip
    return same, other, told
