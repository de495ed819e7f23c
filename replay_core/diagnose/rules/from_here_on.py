"""What is otherwise from one step on, to the end: an environment that pays nothing any more, a limit that is shorter.

No update makes either of one step: a grader, a server or a setting does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from statistics import median

from replay_core.diagnose.finding import Finding, error, shown, warning
from replay_core.diagnose.rule import given, rule, skip_if
from replay_core.diagnose.signals import Point, RunLog, Series
from replay_core.regexes import regex

#: Steps before and since, and the share of those before in which an environment may pay nothing.
BEFORE, SINCE, AT_NOTHING = 8, 5, 0.05


@rule("L62", "one environment pays nothing any more", link="rewards", scope="signals",
      needs=("source_reward|reward_function",), explains=("L08", "L17", "D74"), lasts=True,
      source="prime-rl and tinker-cookbook log the reward of each environment")  # fmt: skip
def source_dies(log: RunLog) -> Iterator[Finding]:
    """The mean reward of one environment (or data set) of several is exactly 0 from some step to the last, over 5 steps
    and more and a tenth of all, after 8 and more of which it was 0 in a twentieth at the most, while another one's is
    not: an error. So is it of the correct rate of one verifier, or one function's reward (none that is a penalty),
    where the last 5 steps before still paid half of what it paid: a policy may lose that by and by.
    """
    of_sources = log.all("source_reward")
    every = [*of_sources, *(one for one in log.all("reward_function") if not _OF_ALL.search(one.name))]
    skip_if(len(every) < 2, "needs the rewards of two environments, verifiers or functions")
    for series in every:
        points = [point for point in series.points if math.isfinite(point.value)]
        at = len(points)
        while at and points[at - 1].value == 0:
            at -= 1
        before, since = [point.value for point in points[:at]], points[at:]
        if len(before) < BEFORE or len(since) < max(SINCE, len(points) // 10):
            continue
        if sum(value == 0 for value in before) > AT_NOTHING * len(before):
            continue
        # A fine that nobody has to pay any more was learnt; what fades away by and by did not break.
        if (
            median(before[-10:]) <= 0
            or median(before[-3:]) < FADED * median(before[-10:])
            or _is_left(log, series, since[0])
        ):
            continue
        is_verifier = series not in of_sources or series.framework == "open-instruct"
        if is_verifier and not _is_paid(before):
            continue
        others = [one for one in every if one.name != series.name and any(_since(one, since[0]))]
        if not others:
            continue
        name = series.name.removesuffix("/Reward").removeprefix("reward/").removesuffix("/mean")
        yield error(
            f"one {'verifier' if is_verifier else 'environment'} pays nothing from step {since[0].step} on: the reward "
            f"of {name} is exactly 0 in all of "
            f"the last {len(since)} steps, {median(before[-10:]):.3g} before, while "
            + " and ".join(f"{one.name} is {median(_since(one, since[0])):.3g}" for one in others[:2]),
            series.of(since),
            series.shown_at(since[0], f"about {median(before[-10:]):.3g}"),
            shown("steps at 0", len(since)),
            *(one.shown(median(_since(one, since[0]))) for one in others[:2]),
            cause="its grader died or fails (a server that is down, a time-out or an exception "
            "that is scored 0, other ground truths): no policy loses all of one reward from one step to the next and "
            "keeps the others",
            next_step=f"grade one response of {name} from before step {since[0].step} by hand; its own log at that "
            "time; leave it out until it pays again",
        )


#: What is over all verifiers is none of them.
_OF_ALL = regex(r"(?:^|/)(?:verifiable_correct_rate|successes|format_scores)$")
#: The part of what it paid that a verifier still pays in the steps before it pays nothing.
STILL = 0.5
#: Of the median of its last ten values, what its last three keep where it breaks off and does not fade.
FADED = 0.4


def _is_left(log: RunLog, series: Series, first: Point) -> bool:
    """Whether nothing of an environment is sampled from there on, as its logged share says."""
    room = series.name.rpartition("/")[0]
    shares = [one for one in log.all("source_share") if one.name.rpartition("/")[0] == room]
    return any(max(_since(one, first), default=1.0) == 0 for one in shares)


def _is_paid(before: list[float]) -> bool:
    """Whether it paid, never took, and as good as to the last."""
    last = before[-SINCE:]
    return min(before) >= 0 and min(last) > 0 and sum(last) / len(last) >= STILL * sum(before) / len(before)


def _since(series: Series, first: Point) -> list[float]:
    return [point.value for point in series.points if (point.step or 0) >= (first.step or 0)]


#: Shares that are cut before and behind, steps that show it, and what part of their length responses keep at the most.
CUT_BEFORE, CUT_SINCE, AT_ONCE, SHORTER = 0.2, 0.5, 4, 0.8


@rule("L63", "responses are cut at a shorter limit from a step on", link="tokens", scope="signals",
      needs=("truncated", "response_length"), explains=("L08", "L09", "D20", "L18"), lasts=True,
      source="a run that is resumed with another limit of tokens")  # fmt: skip
def shorter_limit(log: RunLog) -> Finding | None:
    """From one step to the next the share of cut responses goes from under .2 in each of the 8 steps before to over .5
    in each of 4, while their mean length falls to .8 and less: a warning, as a policy that gets longer runs into its
    limit by and by, and at no shorter one. What begins there (a start of the program) is told.
    """
    cut, length = given(log.get("truncated")), given(log.get("response_length"))
    points = [point for point in cut.points if math.isfinite(point.value) and point.step is not None]
    skip_if(len(points) < BEFORE + AT_ONCE, f"needs {BEFORE + AT_ONCE} steps")
    long = {point.step: point.value for point in length.points}
    for at in range(BEFORE, len(points) - AT_ONCE + 1):
        before, since = points[at - BEFORE : at], points[at : at + AT_ONCE]
        if max(p.value for p in before) >= CUT_BEFORE or min(p.value for p in since) <= CUT_SINCE:
            continue
        was, now = ([long[p.step] for p in some if p.step in long] for some in (before, since))
        if not was or not now or max(now) > SHORTER * median(was):
            continue
        step = since[0].step
        lines = next(((a.line, b.line) for a, b in pairwise(points) if b.step == step), (None, None))
        starts = [one for one in log.events("started") if (lines[0] or 0) < (one.point.line or 0) < (lines[1] or 0)]
        reward = log.get("reward")
        paid = [] if reward is None else [p.value for p in reward.points if p.step in {q.step for q in before}]
        paid_now = [] if reward is None else [p.value for p in reward.points if p.step in {q.step for q in since}]
        falls = bool(paid and paid_now) and median(paid_now) < median(paid)
        return warning(
            f"most responses are cut from step {step} on{', where the run was started again' if starts else ''}: "
            f"{median(p.value for p in since):.0%} of them, {median(p.value for p in before):.1%} before, at a "
            f"shorter limit ({length.name} goes from {median(was):.0f} to {median(now):.0f} tokens)"
            + (f", and the reward with them, from {median(paid):.2g} to {median(paid_now):.2g}" if falls else ""),
            cut.of(points[at:]),
            cut.shown_at(since[0], f"< {CUT_BEFORE:g}"),
            length.shown(median(now), f"about {median(was):.0f}"),
            *(shown("started again", one.text.splitlines()[0][:160], None, f"line {one.point.line}") for one in starts),
            cause="the limit of tokens is shorter from there on (another max_tokens, max_new_tokens or context length "
            "of a resumed run, or of an engine that was started again): answers are cut before their end and earn "
            "nothing",
            next_step="compare the settings of both starts; set the limit back, and go on from the checkpoint before "
            f"step {step}",
        )
    return None
