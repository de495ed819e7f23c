"""A run that earned something and earns nothing now, its answers with it: the policy has fallen apart.

What else such a run shows (responses that are cut, an entropy that grows, an engine that is further from its trainer)
follows from it.
"""

from __future__ import annotations

import math
from statistics import median

from msgspec import Struct

from replay_core.diagnose import trends
from replay_core.diagnose.signals import Point, RunLog, Series

#: Of where it began: what is left of a reward that is lost, and what no value of the last quarter exceeds.
LOST, NOT_OVER = 0.05, 0.25
#: Responses at the token limit: few of them, most of them.
SELDOM, MOSTLY_CUT = 0.25, 0.5


def runs_into_the_limit(log: RunLog) -> tuple[float, float] | None:
    """The share of responses at the token limit at first and in the end, of a run that earned something while few were
    and earns nothing now that most are: it falls apart, and a higher limit does not help. None of any other. Needs 16
    steps.
    """
    reward, cut = log.get("reward"), log.get("truncated")
    if reward is None or cut is None or min(len(reward.finite), len(cut.finite)) < 2 * trends.MIN_STEPS:
        return None
    first, now = trends.level(cut.finite[:3]), trends.level(cut.finite)
    return (first, now) if _is_lost(reward.finite) and first < SELDOM and now >= MOSTLY_CUT else None


def _is_lost(values: list[float]) -> bool:
    """Whether next to nothing is left of what was earned at first."""
    begun, last = trends.level(values[:3]), values[-(len(values) // 4) :]
    return begun > 0 and min(values) >= 0 and median(last) <= LOST * begun and max(last) <= NOT_OVER * begun


#: How many times the median gradient norm before it a spike is, and steps after the reward has fallen to half in which
#: it counts.
SPIKE, AROUND = 10.0, 3
#: How far entropy and mean length of a policy that falls apart come from where they began.
DISSOLVES, STRAYS = 3.0, 3.0


def falls_apart(log: RunLog) -> tuple[int | None, str] | None:
    """Since when a run of 16 steps and more that has lost all of its reward earns less than half of what it did, and
    what of its answers goes with it, in words: the token limit, a length or an entropy three times off. None of any
    other.
    """
    reward = log.get("reward")
    if reward is None or len(reward.finite) < 2 * trends.MIN_STEPS or not _is_lost(reward.finite):
        return None
    since = lost_since(reward).step
    told = []
    if (cut := runs_into_the_limit(log)) is not None:
        told.append(f"responses run into the token limit ({cut[0]:.0%} at first, {cut[1]:.0%} now)")
    for name, words, far in (("entropy", "the entropy goes from {:.3g} to {:.3g}", DISSOLVES),
                             ("response_length", "responses go from {:.3g} tokens to {:.3g}", STRAYS)):  # fmt: skip
        values = [] if (series := log.get(name)) is None else series.finite
        if len(values) < 2 * trends.MIN_STEPS or not (begun := trends.level(values[:3])) > 0:
            continue
        now = trends.level(values)
        # How long they are is said with the limit that they run into.
        if name == "response_length" and cut is not None:
            continue
        if now > far * begun or (name == "response_length" and now < begun / far):
            told.append(words.format(begun, now))
    return (since, " and ".join(told)) if told else None


#: Steps before a fall among which the reward that it fell from is looked for.
BEFORE = 8


def lost_since(reward: Series) -> Point:
    """The first step of the end of the run in which every reward is below half of the first three: a low first step is
    no fall.
    """
    half, points = trends.level(reward.finite[:3]) / 2, [p for p in reward.points if math.isfinite(p.value)]
    held = max((at for at, point in enumerate(points) if point.value >= half), default=-1)
    return points[min(held + 1, len(points) - 1)]


def fell_from(reward: Series) -> Point:
    """The last of the large rewards (within a tenth of the largest) of the steps before it was lost."""
    since, points = lost_since(reward), [p for p in reward.points if math.isfinite(p.value)]
    at = points.index(since)
    before = points[max(0, at - BEFORE) : at] or points[:1]
    top = max(point.value for point in before)
    return next(point for point in reversed(before) if point.value >= 0.9 * top)


class Spike(Struct, frozen=True):
    """A gradient norm far above those before it, where the reward is lost; and the largest of the whole run."""

    norms: Series
    point: Point
    before: float
    largest: Point


def spike_before(log: RunLog, since: int | None) -> Spike | None:
    """The largest gradient norm up to that step and a few after it, where it is ten times the median before it."""
    norms = log.get("grad_norm")
    points = [] if norms is None else [p for p in norms.points if p.step is not None and math.isfinite(p.value)]
    near = [p for p in points if since is not None and p.step is not None and p.step <= since + AROUND]
    if norms is None or not near:
        return None
    top = max(near, key=lambda point: point.value)
    # A step whose groups have no spread has no gradient, and tells nothing of those that have.
    before = [p.value for p in near[: near.index(top)] if p.value > 0]
    if len(before) < 2 or top.value <= SPIKE * median(before):
        return None
    return Spike(norms, top, median(before), max(points, key=lambda point: point.value))


#: What is left of an entropy that is used up, in nats and of what it was; what was left as the reward was lost.
USED_UP, LEFT, HALFWAY = 0.05, 0.1, 0.5


def entropy_used_up(log: RunLog, since: int | None) -> Series | None:
    """The entropy, where next to nothing is left of it and it was down to half no later than the reward was lost."""
    series = log.get("entropy")
    values = [] if series is None else series.finite
    if series is None or since is None or len(values) < 2 * trends.MIN_STEPS or min(values) < 0:
        return None
    begun, now = trends.level(values[:3]), trends.level(values)
    falls = [p for p in series.points if p.step is not None and p.step <= since and p.value < HALFWAY * begun]
    return series if falls and 0 < now < min(USED_UP, LEFT * begun) else None
