"""What becomes of the samples of a step on their way to the update: broken, left out, or kept as a small part."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import median

from msgspec import Struct

from replay_core.diagnose import trends
from replay_core.diagnose.counted_names import of_groups
from replay_core.diagnose.finding import Finding, finding, shown
from replay_core.diagnose.rule import rule, skip_if
from replay_core.diagnose.signals import Point, RunLog, Series
from replay_core.regexes import regex

#: Shares of samples that break or are left out: from which on it is worth knowing, and from which on a warning.
BROKEN, BROKEN_BAD = 0.1, 0.25
LEFT, LEFT_BAD = 0.3, 0.6
#: The share left out that is much where samples are as old as the limit lets them be; that age, in updates.
TOO_OLD, AGE = 0.25, 8.0
#: What it is at first where it comes later, and by its end where it gets better.
LATER, BETTER = 0.25, 0.7
_OF_AGE = regex(r"(?i)cancel|stale|off_policy|old")
_TOO_LONG = regex(r"(?i)exceed|overlong|context")
#: What counts since the run began.
_SINCE_THE_START = regex(r"(?i)(?:^|/)count/|cumulative|so_far")


class _Lost(Struct, frozen=True):
    """A share of samples by step, as logged or of counts; the series it is told by, and the one it is a part of."""

    series: Series
    points: tuple[Point, ...]
    of: Series | None
    broken: bool

    @property
    def values(self) -> list[float]:
        return [point.value for point in self.points]

    @property
    def now(self) -> float:
        return trends.level(self.values, max(3, len(self.points) // 4))

    @property
    def begun(self) -> float:
        return trends.level(self.values[: max(3, len(self.points) // 4)])


@rule("L80", "samples are lost before they are trained on", link="tokens", scope="signals",
      needs=("lost_share|lost_count|left_share|left_count",), lasts=True, explains=("D37",),
      source="prime-rl: Error, Cancelled; SkyRL: generate/num_error_trajectories, num_masked_instances")  # fmt: skip
def lost(log: RunLog) -> Iterator[Finding]:
    """The share of a step's samples that ended in an error (of an environment, a verifier, a request), as logged or of
    logged counts, over 8 steps and more: its level in the last quarter .25 and more a warning, .1 worth knowing. Of
    those that were left out (dropped, cancelled, masked, timed out, too long), which a run may mean to: .6 a warning
    (.25 of those too old, where the age of the weights is 8 updates and more), .3 worth knowing. Worth knowing at most
    where the share falls. A share that comes late (a quarter of it at first) is a warning from .2 on where the reward
    falls meanwhile. Not of what is 1 less the reward: those are wrong answers.
    """
    told = False
    found: dict[bool, list[tuple[str, _Lost]]] = {True: [], False: []}
    for each in _shares(log):
        told = True
        severity = _severity(log, each)
        if severity is not None:
            found[each.broken].append((severity, each))
    skip_if(not told, f"needs what becomes of samples at {trends.MIN_STEPS} steps, as a share or beside a batch's size")
    for broken, every in found.items():
        if every:
            worst = max(every, key=lambda one: (one[0] == "warning", one[1].now))
            yield _told(log, worst[0], worst[1], [one for _, one in every if one is not worst[1]], broken)


def _severity(log: RunLog, each: _Lost) -> str | None:
    now, begun, drift = each.now, each.begun, trends.drift(each.values)
    least, most = (BROKEN, BROKEN_BAD) if each.broken else (LEFT, LEFT_BAD)
    if not each.broken and _OF_AGE.search(each.series.name) and _age(log) >= AGE:
        least = most = TOO_OLD
    late = begun <= LATER * now and drift > trends.DRIFT_Z
    if late and now >= max(least, 0.2) and falls(log):
        return "warning"
    if now < least:
        return None
    fades = drift < -trends.DRIFT_Z and now <= BETTER * begun
    return "warning" if now >= most and not fades else "info"


def _told(log: RunLog, severity: str, each: _Lost, others: list[_Lost], broken: bool) -> Finding:
    late = each.begun <= LATER * each.now and trends.rises(each.values)
    name, now = each.series.name, each.now
    groups = "groups" if of_groups(name) else "samples"
    what = (
        "end in an error" if broken else "outgrow the context" if _TOO_LONG.search(name) else "are thrown away"
        if regex(r"(?i)drop|discard|evict").search(name) else "are left out"
    )  # fmt: skip
    age = _age(log) if not broken and _OF_AGE.search(name) else math.nan
    return finding(
        "warning" if severity == "warning" else "info",
        f"{now:.0%} of the {groups} {what}: {name} is "
        + (f"{trends.level(each.series.finite, max(3, len(each.points) // 4)):.4g}" if each.of else f"{now:.3g}")
        + (f" of {trends.level(each.of.finite):.4g}" if each.of else "")
        + (f", and was {each.begun:.2g} of all at first" if late else ""),
        each.series.of(point for point in each.series.points if point.step in _over(each)),
        shown(f"share of {groups}", now, f"< {BROKEN if broken else LEFT:g}", each.series.source),
        *(shown(f"share of {one.series.name}", one.now) for one in others[:3]),
        *([] if math.isnan(age) else [shown("age of the weights that sampled, updates", age)]),
        cause="environments, sandboxes, verifiers or requests fail (limits of a service, time-outs, a crash for one "
        "kind of answer): what they would have earned is scored 0 or missing, and what is trained on is the part that "
        "gets through, which is no fair part of all"
        if broken
        else "prompts and answers (or the turns of an agent) together are longer than the engine's limit: those "
        "samples are cut, masked or scored 0, and the long ones never teach"
        if _TOO_LONG.search(name)
        else "what takes longest to sample is too old when it is done, and is given up: the longest answers are the "
        "ones that are never trained on"
        if _OF_AGE.search(name)
        else "a limit (of time, of turns, of the queue) or a filter takes them out: unless it is meant to, most of "
        "the work of the engine is lost, and the longest or hardest samples with it",
        next_step="read three of those errors in the rollout's or environment's own log, and count them by kind; mask "
        "such samples out of the loss and of their group's mean"
        if broken
        else "raise the limit (max_off_policy_steps, context, time-out), or sample less at once; look at the lengths "
        "of those that are left out",
    )


def _over(each: _Lost) -> set[int | None]:
    least = BROKEN if each.broken else TOO_OLD
    return {point.step for point in each.points if point.value >= least}


def _age(log: RunLog) -> float:
    return next((now for _, now in log.level("weight_lag")), 0.0)


def falls(log: RunLog) -> bool:
    """Whether the reward of training, or of an evaluation, falls by more than chance explains, or its last quarter is
    three quarters of the first one and less and hardly a step of it is as good: what broke once is learnt around, and
    the reward rises again from there.
    """
    return any(one is not None and _falls(one.finite) for one in (log.get("reward"), log.get("held_out")))


#: Of its first level, what a reward that is lost has left at most.
LOST = 0.75


def _falls(values: list[float]) -> bool:
    quarter = len(values) // 4
    if trends.drift(values) < -trends.DRIFT_Z:
        return True
    if quarter < 3:
        return False
    first, last = sorted(values[:quarter]), sorted(values[-quarter:])
    return 0 < LOST * median(first) >= median(last) and last[-1 - quarter // 10] < first[quarter // 10]


def _shares(log: RunLog) -> Iterator[_Lost]:
    for signal, broken in (("lost_share", True), ("left_share", False)):
        for series in log.all(signal):
            points = tuple(point for point in series.points if math.isfinite(point.value))
            # Of shares in hundredths nothing tells but a value that is none.
            most = max((point.value for point in points), default=0.0)
            if len(points) >= trends.MIN_STEPS and 0 <= most <= 1 and not _is_wrong(log, points):
                yield _Lost(series, points, None, broken)
    for signal, broken in (("lost_count", True), ("left_count", False)):
        for series in log.all(signal):
            of = _whole(log, series)
            if of is None or _SINCE_THE_START.search(series.name):
                continue
            size = {point.step: point.value for point in of.points}
            parts = tuple(
                Point(point.step, point.value / size[point.step], line=point.line, path=point.path)
                for point in series.points
                if size.get(point.step, 0) > 0 and math.isfinite(point.value)
            )
            if len(parts) >= trends.MIN_STEPS and all(0 <= point.value <= 1 for point in parts):
                yield _Lost(series, parts, of, broken)


def _whole(log: RunLog, series: Series) -> Series | None:
    """Of how many it is a part: of its own room, first."""
    every = log.all("group_count" if of_groups(series.name) else "batch_count")
    room = series.name.rpartition("/")[0]
    return min(every, key=lambda one: one.name.rpartition("/")[0] != room, default=None)


def _is_wrong(log: RunLog, points: tuple[Point, ...]) -> bool:
    """Whether it is 1 less the reward, step by step."""
    reward = log.get("reward")
    paid = {} if reward is None else {point.step: point.value for point in reward.points}
    both = [point.value + paid[point.step] for point in points if point.step in paid]
    return len(both) >= trends.MIN_STEPS and all(abs(total - 1) < 0.02 for total in both)


#: Of the samples, a part that is hardly any, a small one, and what it was before a fall; a reward that is all there is.
HARDLY, SMALL, BEFORE, SOLVED = 0.1, 0.25, 0.4, 0.8
#: How many times its first count, and groups, before what is drawn again is ever more.
MORE, FEWEST = 8.0, 50.0
_RIGHT = regex(r"(?i)(?:_|count_)1(?:\.0*)?$|solved|all_(?:right|correct|good)")


@rule("L81", "a small part of what is sampled is trained on", link="groups", scope="signals",
      needs=("kept_share|filtered_count",), lasts=True, explains=("D37", "D74"),
      source="prime-rl: Trainable; SkyRL: async/keep_rate; slime: dynamic_filter; arXiv 2503.14476")  # fmt: skip
def kept(log: RunLog) -> Finding | None:
    """The logged share of samples or groups that is trained on, over 8 steps and more: its level in the last quarter
    below .1 a warning, below .25 worth knowing, and so is a fall to half and less, from .4 and more, while the reward
    does not rise. Worth knowing at most where the reward has come to .8 (of 1) and rose: what is solved has nothing
    left to teach. Else groups that are thrown away and drawn again, by a count that grows to 8 times its first level
    and 50 and more, to its most of the run, by more than chance: a warning; worth knowing where what grows is those
    that are all right.
    """
    for series in log.all("kept_share"):
        values = [value / 100 for value in series.finite] if max(series.finite, default=0) > 1.5 else series.finite
        if len(values) < trends.MIN_STEPS or not all(0 <= value <= 1 for value in values):
            continue
        last = max(3, len(values) // 4)
        begun, now = trends.level(values[:last]), trends.level(values, last)
        lower = begun >= BEFORE and now <= 0.5 * begun and trends.drift(values) < -trends.DRIFT_Z
        if now >= SMALL and not (lower and not _rises(log)):
            continue
        solved = _is_solved(log)
        return finding(
            "warning" if now < HARDLY and not solved else "info",
            f"{now:.1%} of what is sampled is trained on: {series.name}"
            + (f" falls from {begun:.0%} of it" if lower else " is as low since its beginning"),
            series.ended,
            series.shown(trends.level(series.finite, last), f"> {SMALL:g} of all"),
            shown("share at first", begun),
            cause="prompts are solved by now: all answers of a group are right, and nothing is left to learn"
            if solved
            else "nearly all groups are of one reward (prompts too hard, or a reward that tells nothing apart), or "
            "samples are dropped as broken, too long or too old: each update is made of a few, and the time of the "
            "others is lost",
            next_step="count what is left out by its reason, and read three groups of it; filter prompts by solve rate",
        )
    for series in log.all("filtered_count"):
        if (found := _ever_more(log, series)) is not None:
            return found
    skip_if(not log.has("kept_share"), "no count of groups grows")
    return None


def _rises(log: RunLog) -> bool:
    reward = log.get("reward")
    return reward is not None and trends.rises(reward.finite)


def _is_solved(log: RunLog) -> bool:
    reward = log.get("reward")
    values = [] if reward is None else reward.finite
    return bool(values) and max(values) <= 1 and trends.level(values) >= SOLVED and trends.rises(values)


def _ever_more(log: RunLog, series: Series) -> Finding | None:
    values = series.finite
    last = max(3, len(values) // 4)
    if len(values) < trends.MIN_STEPS or min(values) < 0:
        return None
    begun, now = trends.level(values[:last]), trends.level(values, last)
    if now < max(FEWEST, MORE * max(begun, 1.0)) or 2 * now < max(values) or not trends.rises(values):
        return None
    right = _RIGHT.search(series.name) is not None
    return finding(
        "info" if right else "warning",
        f"ever more groups are thrown away and drawn again: {series.name} grows from {begun:.3g} to {now:.3g} a step",
        series.ended,
        series.shown(now, f"about {begun:.3g}"),
        shown("Mann-Kendall z", trends.drift(values)),
        cause="all answers of those groups are right: the prompts are learnt"
        if right
        else "the answers of ever more groups all get the same reward (all wrong, as a rule): prompts that are too "
        "hard, a grader that fails, or a policy that has become one answer. What is kept looks well, as it is chosen",
        next_step="score ten of those groups by hand; count them by reward; bring harder prompts"
        if right
        else "score ten of those groups by hand; look at the reward before the filter, and at an evaluation",
    )
