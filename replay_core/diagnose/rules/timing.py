"""Where the time goes: warm-up told apart from regressions, and what torch.compile says (TORCH_LOGS, warnings)."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator
from itertools import pairwise
from statistics import mean, median

from replay_core.diagnose import trends
from replay_core.diagnose.finding import Finding, finding, info, shown, warning
from replay_core.diagnose.log_steps import steps_of
from replay_core.diagnose.rule import rule, skip_if
from replay_core.diagnose.series import seen
from replay_core.diagnose.signals import Point, RunLog, Series, Told
from replay_core.regexes import regex

#: D37: a phase over that many of its own medians stalls (miles advisory).
STALL = 6.0
#: A step that a stall lengthens by less than this is not worth a word: short phases jitter by any factor.
_SHARE = 0.25
#: Steps of which one alone that is slow costs next to nothing.
_MANY = 40
#: D37: the longest response over the mean one, from which on the step waits for it.
TAIL = 3.0
#: D37: how much longer the last quarter takes than the first half, to be a regression; and in seconds.
SLOWER, SLOWER_S = 1.5, 1.0
_NEXT = "rldbg replay DUMP --compile inductor times compilation apart from steady steps"


def seconds(log: RunLog) -> Series | None:
    """The time of a whole step in seconds, whatever unit it is logged in; of one that is called a total among its
    phases, and is no less than any of them, that one's.
    """
    if (series := log.get("step_seconds")) is not None:
        return series
    series = log.get("iter_ms")
    if series is None:
        return _total(_no_sums(log.all("phase_seconds"), None))
    points = tuple(Point(p.step, p.value / 1000, p.micro, p.rank, p.line, p.path) for p in series.points)
    return Series("step_seconds", series.name, series.framework, "", points)


#: What the whole is called where it stands among its parts: timeperf/total, timing/step_total.
_TOTAL = regex(r"(?i)(?:^|[/_.])(?:step_total|total_step|total)(?:_time)?$")


def _total(phases: list[Series]) -> Series | None:
    for series in phases:
        others = [median(one.finite) for one in phases if one.name != series.name and one.finite]
        if _TOTAL.search(series.name) and series.finite and others and median(series.finite) >= max(others):
            return Series("step_seconds", series.name, series.framework, "", series.points)
    return None


#: How far a sum's growth may lie from a step's time in the median step, as a share of it.
_NEAR = 0.25


def _no_sums(phases: list[Series], whole: Series | None) -> list[Series]:
    """The phases without running sums of the whole run (RAGEN's timing_s/total): what never falls, and grows in each
    step by what the step takes, or where that is not logged by what the other phases take together.
    """

    def is_sum(series: Series) -> bool:
        points = [point for point in series.points if math.isfinite(point.value)]
        grown = {b.step: b.value - a.value for a, b in pairwise(points)}
        if len(grown) < trends.MIN_STEPS or min(grown.values()) < 0:
            return False
        takes: dict[int | None, float] = {}
        for one in [whole] if whole is not None else [each for each in phases if each.name != series.name]:
            for point in one.points:
                takes[point.step] = takes.get(point.step, 0.0) + point.value
        off = [abs(by - takes[step]) / takes[step] for step, by in grown.items() if takes.get(step, 0.0) > 0]
        return len(off) >= trends.MIN_STEPS and median(off) < _NEAR

    return [series for series in phases if (whole is not None and series.name == whole.name) or not is_sum(series)]


@rule("D37", "a step takes far longer than the others", link="time", scope="signals",
      needs=("step_seconds|iter_ms|phase_seconds|tokens_per_second",),
      source="miles advisory (6 x median); torch.compile's automatic dynamic shapes; "
      "docs/evidence.md#grpo-notes")  # fmt: skip
def slow_steps(log: RunLog) -> Iterator[Finding]:
    """After the first two steps (warm-up), a step or phase over 6 times its own median is a warning
    (worth knowing of one in 40 steps and more, or where none takes a second more than the median: a machine that others
    use does that to short steps).

    8 steps or more, and only where it lengthens the step by a quarter; worth knowing alone where such steps (3 and
    more) come as often as an evaluation. Counts, the longest of many calls, and
    sums over the whole run are no phases. Steps that get 1.5 times
    and a second slower for good (the last quarter over the first half, a rise that chance does not explain) are a
    warning, info where responses get longer by as much, or more batches are generated for each (dynamic sampling), or
    where they take less than twice as long and several phases of work slow down alike, as on a busy machine; so
    is, where no time is logged, a throughput that falls by as much. The second iteration slower than the first, or both
    far slower than the rest, is the signature of compilation: info. The ranges of the GRPO notes are compared as info,
    and for the log of their own trainer. Where the rise is far beyond chance (z over 4) they may be as short as they
    like. A phase whose median takes a larger share of a step than it should is a warning: the synchronisation of
    weights over .35, writing checkpoints .4, scoring, waiting and evaluation .5 (no wait that is as long, to .15, as
    the generation beside it: they take turns), log-probabilities of old policy or reference .6; worth knowing alone of
    what takes place in every second step or less, shared among all. Read first of these: a phase (no wait) that takes 3
    times as long in the last quarter as in the first (z over 4, 16 steps and more), a second more, and .15 of a step,
    and a share that grows by a quarter, where neither longer responses nor
    more batches explain it: a warning.
    """
    whole = seconds(log)
    told = _no_sums(log.all("phase_seconds"), whole)
    if whole is None:
        yield from _throughput(log)
    yield from _warm_up(log, whole)
    yield from _expected(log, whole)
    phases = [
        series for series in [
            *(one for one in told if whole is None or one.name != whole.name),
            *([whole] if whole else []),
        ]
        if len(series.finite) >= trends.MIN_STEPS + trends.WARM_UP and not _NO_PHASE.search(series.name)
    ]  # fmt: skip
    if not phases:
        return
    steady = {series.name: series.points[trends.WARM_UP :] for series in phases}
    middles = {name: median(point.value for point in points) for name, points in steady.items()}
    typical = median(whole.finite[trends.WARM_UP :]) if whole and len(whole.finite) > trends.WARM_UP else 0.0
    typical = typical or sum(median(series.finite[trends.WARM_UP :]) for series in phases)
    stalls = [
        (point.value / middle if (middle := middles[series.name]) else 0.0, series, point)
        for series in phases
        for point in steady[series.name]
        if point.value > STALL * middles[series.name] and point.value - middles[series.name] > _SHARE * typical
    ]
    outgrown = _outgrows(phases, whole, log)
    if outgrown is not None:
        yield outgrown
    else:
        yield from _shares(phases, typical, max(len(series.finite) for series in phases))
    if stalls:
        # The whole step is slow because a phase is: the phase says more.
        named = [stall for stall in stalls if stall[1].signal == "phase_seconds"] or stalls
        factor, series, point = max(named, key=lambda stall: stall[0])
        slow = steps_of(point for _, _, point in stalls)
        every = _every(slow)
        yield finding(
            "info"
            if every
            or (len(slow) == 1 and len(series.points) >= _MANY)
            or max(p.value - middles[s.name] for _, s, p in stalls) < SLOWER_S
            else "warning",
            f"{series.name} takes {factor:.1f} times its own median at step {point.step}"
            + (f", as it does every {every} steps: an evaluation or a checkpoint" if every else ""),
            point.where(series.name),
            series.shown_at(point, f"< {STALL:g} x {middles[series.name]:.3g} s"),
            shown("such steps", len({point.step for _, _, point in stalls}), None, "log"),
            cause="a straggler, a long tail of responses, a recompile, or a checkpoint",
            next_step="look at the longest response of the step; TORCH_LOGS=recompiles; " + _NEXT,
            steps=slow,
        )
    if whole is None or whole.name not in steady:
        return
    values = whole.finite[trends.WARM_UP :]
    last = values[-(len(values) // 4) :]
    before, after = median(values[: len(values) // 2]), median(last)
    much = after - before > SLOWER_S or trends.drift(values) > SURELY
    if after > SLOWER * before and much and trends.rises(values):
        grown = _growing(phases, after - before)
        length = log.get("response_length")
        # DAPO generates batch after batch, until enough groups teach: more of them as the policy gets better.
        batches = log.get("generated_batches")
        more = _more(batches.finite[trends.WARM_UP :]) if batches is not None else 1.0
        longer = after / before < more * (_by_length(length.finite[trends.WARM_UP :]) if length is not None else 1.0)
        yield finding(
            # Without a phase that grows from step to step it may be the node's or the tasks' doing.
            "info"
            if longer
            or (grown is None and not _lies_above(last, values[: len(values) // 2]))
            or (grown is not None and after < TWICE * before and _is_shared(grown, phases, before))
            else "warning",
            f"steps get slower: {before:.3g} s, then {after:.3g} s"
            + (f": {grown.name} grows from step to step" if grown is not None else "")
            + ("" if longer or length is None else _not_by(length)),
            whole.last.where(whole.name),
            shown(whole.name, after, f"< {SLOWER:g} x {before:.3g} s", whole.source),
            cause="responses get longer" + (", or more of them are generated and left out" if more > 1.0 else "")
            if longer
            else "something accumulates in that phase: a queue or cache that is never emptied, requests that are not "
            "freed, sequences that are concatenated, fragmentation"
            if grown is not None
            else "each step has more to do, or something accumulates: a filter of groups (dynamic sampling) draws more "
            "batches as more groups are solved; a growing buffer, logging, fragmentation",
            next_step="compare the phases' trends; " + _NEXT,
            steps=steps_of(whole.points[-len(last) :]),
        )


#: How many times its time in the first quarter a phase takes in the last, and the share of a step that it comes to; and
#: steps of a quarter.
OUTGROWN, ITS_SHARE, _QUARTER = 3.0, 0.15, 4
#: How many times its share of a step grows, where the growth is its own.
_ITS_OWN = 1.25


def _outgrows(phases: list[Series], whole: Series | None, log: RunLog) -> Finding | None:
    """The phase that takes several times as long at the end as it did at the beginning, at the same work: a warning.
    No wait, which is as long as another's work is, and nothing that the length of responses or more batches explain.
    """
    if whole is None or len(whole.finite) < 4 * _QUARTER:
        return None
    length, batches = log.get("response_length"), log.get("generated_batches")
    longer = _ends_over_begins(length.finite) if length is not None else 1.0
    more = _ends_over_begins(batches.finite) if batches is not None else 1.0
    at_most = max(OUTGROWN, more * max(SLOWER * longer, longer**2))
    found = []
    for series in phases:
        values = series.finite[trends.WARM_UP :]
        quarter = len(values) // 4
        if series.signal != "phase_seconds" or quarter < _QUARTER or regex(_WAITS).search(series.name.lower()):
            continue
        if _GENERATES.search(series.name) and (length is None or batches is not None):
            continue
        first, last = values[:quarter], values[-quarter:]
        begun, now = median(first), median(last)
        if not begun > 0 or now < at_most * begun or now - begun < SLOWER_S:
            continue
        if now < ITS_SHARE * trends.level(whole.finite, quarter):
            continue
        if trends.drift(values) > SURELY and _lies_above(last, first):
            found.append((now / begun, series))
    if not found:
        return None
    series = max(found, key=lambda one: one[0])[1]
    begun, now = trends.level(series.finite[:3]), trends.level(series.finite, 3)
    first_share, share = begun / trends.level(whole.finite[:3]), now / trends.level(whole.finite, 3)
    # Steps that have more to do, as of more batches that are drawn for each, are longer in every phase.
    if share < _ITS_OWN * first_share:
        return None
    points = _grown(series, begun)
    since = "" if points[0].step is None else f", since step {points[0].step}"
    return warning(
        f"{series.name} grows from step to step{since}: from {begun:.3g} s in the first steps to {now:.3g} s in the "
        f"last, from {first_share:.0%} to {share:.0%} of a step" + ("" if length is None else _not_by(length)),
        series.last.where(series.name),
        series.shown(now, f"about {begun:.3g}"),
        shown("share of a step", share, f"about {first_share:.2g}", "log"),
        cause="something accumulates in that phase: a queue, buffer or cache that is never emptied, handles or "
        "connections that are opened anew each time, requests that are not freed, sequences or lists that are "
        "appended to, fragmentation",
        next_step="time what is in the phase alone, early and late; py-spy dump at a late step",
        steps=steps_of(points),
    )


def _grown(series: Series, begun: float) -> tuple[Point, ...]:
    """The points from the one on at which it is longer than at the beginning, and stays so."""
    short = [at for at, point in enumerate(series.points) if not point.value > SLOWER * begun]
    return series.points[short[-1] + 1 :] if short and short[-1] + 1 < len(series.points) else series.points


def _ends_over_begins(values: list[float]) -> float:
    """How many times the first quarter's median the last one's is; 1 and more."""
    quarter = len(values) // 4
    return 1.0 if quarter < 1 else max(1.0, median(values[-quarter:]) / max(median(values[:quarter]), 1e-12))


def _lies_above(last: list[float], first: list[float]) -> bool:
    """Whether nearly all of these steps take longer than nearly all of those: what accumulates slows every one down."""
    return sorted(last)[len(last) // 10] > sorted(first)[-1 - len(first) // 10]


#: A rise that no jitter of short steps makes, as a normal quantile.
SURELY = 4.0


#: What stands among the times of a step and is none of the step's own: counts, the longest and the mean of calls.
_NO_PHASE = regex(
    r":(?:count|num|n|max|min|std)$|(?:^|[/_])(?:num|count)(?:[/_]|$)|slowest|agent_loop[/_].*mean$|[/_](?:max|min)$"
)


def _every(steps: Collection[int]) -> int | None:
    """How many steps lie between these (3 and more), where it is always the same number, 2 and more."""
    apart = {b - a for a, b in pairwise(sorted(steps))}
    return min(apart) if len(steps) >= 3 and len(apart) == 1 and min(apart) > 1 else None


def _growing(phases: list[Series], by: float) -> Series | None:
    """The phase that makes over half of what a step has grown by."""
    for series in phases:
        values = series.finite[trends.WARM_UP :]
        if series.signal != "phase_seconds" or not trends.rises(values):
            continue
        if median(values[-(len(values) // 4) :]) - median(values[: len(values) // 2]) > by / 2:
            return series
    return None


#: What a phase is called in which one waits for another.
_WAITS = r"wait|idle|data_?load|dataloader"
#: What is waited for, and by what share of it the wait may be longer or shorter than it.
_GENERATES, _AS_LONG = regex(r"(?i)(?:^|[/_.])(?:rollout|gen|generat\w*)(?:_time|_seconds)?$"), 0.15


def _takes_turns(wait: Series, phases: list[Series]) -> bool:
    """Whether what is waited for is the whole of a generation that lies beside it, step by step: where the two take
    turns (on one set of GPUs, or in step) that is how it is made; what overlaps is waited for less.
    """
    for series in phases:
        told = {p.step: p.value for p in series.points if p.value > 0}
        pairs = [(p.value, told[p.step]) for p in wait.points if p.step in told]
        near = [a for a, b in pairs if abs(a - b) <= _AS_LONG * b]
        if series.name != wait.name and _GENERATES.search(series.name) and pairs and len(near) >= 0.9 * len(pairs):
            return True
    return False


#: Slower by less than this a busy machine may be; the part of one phase's growth that another's comes to where it is,
#: and the share of a step that makes a phase one of work.
TWICE, _ALIKE, _OF_WORK = 2.0, 0.6, 0.1


def _is_shared(grown: Series, phases: list[Series], step: float) -> bool:
    """Whether another phase of work, no wait for it, slows down with it: then it is the machine that does, and nothing
    in the phase.
    """

    def growth(series: Series) -> float:
        values = series.finite[trends.WARM_UP :]
        return median(values[-(len(values) // 4) :]) / max(median(values[: len(values) // 2]), 1e-12) - 1

    return any(
        trends.rises(one.finite[trends.WARM_UP :]) and growth(one) >= _ALIKE * growth(grown)
        for one in phases
        if one.signal == "phase_seconds"
        and one.name != grown.name
        and median(one.finite) >= _OF_WORK * step
        and not regex(_WAITS).search(one.name.lower())
    )


#: Share of a step that a phase may take before it is told: (words of its name, share, what it is, what it waits for).
_LIMITS: tuple[tuple[str, float, str, str], ...] = (
    (r"(?:update|sync|transfer|broadcast)\w*weights?|weights?\w*(?:update|sync|transfer)|param\w*sync", 0.35,
     "the synchronisation of weights to the engine",
     "weights are sent tensor by tensor, over the disk or the host, gathered on one rank, or the engine reloads and "
     "re-captures its graphs each time"),
    (r"reward|score|verif|judge", 0.5, "scoring the responses",
     "the reward function runs one response after the other, waits for a server or a sandbox, or for time-outs"),
    (_WAITS, 0.5, "waiting for data or for another process",
     "generation and training are out of balance: one waits for the other"),
    (r"old_?log_?prob|ref(?:$|[_/])|ref_?log_?prob|compute_log_prob", 0.6, "log-probabilities of old policy or "
     "reference",
     "micro-batches that are far too small, weights that are offloaded and loaded for each, or no packing"),
    (r"save|checkpoint", 0.4, "writing checkpoints", "they are written every step, or to a slow disk"),
    (r"eval|valid|testing", 0.5, "evaluation", "it runs every few steps, or over too many samples"),
)  # fmt: skip


#: Steps from one to the next of what is done now and then.
_RARE = 2.0


def _shares(phases: list[Series], typical: float, steps: int) -> Iterator[Finding]:
    """A phase that takes a larger share of the steps than it should: a warning. One of every tenth step is logged in
    those alone, and its time shared among all.
    """
    for words, limit, what, why in _LIMITS:
        for series in phases:
            if series.signal != "phase_seconds" or not regex(words).search(series.name.lower()):
                continue
            if words == _WAITS and _takes_turns(series, phases):
                continue
            now = median(series.finite[trends.WARM_UP :]) * len(series.finite) / steps
            if typical > 0 and limit * typical < now <= 1.05 * typical:
                every = steps / len(series.finite)
                yield finding(
                    # What every tenth step does is asked for so often.
                    "warning" if every < _RARE else "info",
                    f"{what} takes {now / typical:.0%} of a step: {series.name} is {now:.3g} of {typical:.3g} s"
                    + ("" if every < _RARE else f", spread over the {every:.3g} steps from one to the next"),
                    series.ended,
                    shown("share of the step", now / typical, f"< {limit:g}", series.source),
                    cause=why
                    if every < _RARE
                    else f"it takes place every {every:.3g} steps, as often as it was asked for, and is slow "
                    "beside steps this short",
                    next_step="time it alone; rldbg diagnose shows the trends of all phases",
                )
                return


def _not_by(length: Series) -> str:
    """That the length of responses does not explain it, in words; empty where too few are logged."""
    values = length.finite[trends.WARM_UP :]
    if len(values) < trends.MIN_STEPS:
        return ""
    before, after = median(values[: len(values) // 2]), median(values[-(len(values) // 4) :])
    return f", while the length of responses goes from {before:.3g} to {after:.3g} tokens: that does not explain it"


def _by_length(values: list[float]) -> float:
    """How many times slower steps may get by the length of the responses: by half more than it, or by its square."""
    if not trends.rises(values) or (begun := median(values[: len(values) // 2])) <= 0:
        return 1.0
    grown = median(values[-(len(values) // 4) :]) / begun
    return max(SLOWER * grown, grown**2)


def _more(values: list[float]) -> float:
    """How many times a count of a step has grown, in the mean; 1 where it has not."""
    return mean(values[-(len(values) // 4) :]) / mean(values[: len(values) // 2]) if trends.rises(values) else 1.0


def _throughput(log: RunLog) -> Iterator[Finding]:
    """Of a log without times: tokens per second that fall by as much as a step may not lengthen."""
    series = log.get("tokens_per_second")
    values = [] if series is None else series.finite[trends.WARM_UP :]
    if series is None or len(values) < 2 * trends.MIN_STEPS:
        return
    before, after = median(values[: len(values) // 2]), median(values[-(len(values) // 4) :])
    if 0 < SLOWER * after < before and trends.drift(values) < -trends.DRIFT_Z:
        yield warning(
            f"throughput falls: {series.name} goes from {before:.3g} to {after:.3g}",
            series.last.where(series.name),
            series.shown(after, f"> {before:.3g} / {SLOWER:g}"),
            cause="something accumulates (a growing buffer, logging, fragmentation), a machine slows down, or "
            "responses get shorter",
            next_step="log the time of a step's phases, and compare their trends",
            steps=series.steps(under=before / SLOWER),
        )


def _warm_up(log: RunLog, whole: Series | None) -> Iterator[Finding]:
    if whole is None or len(whole.points) < 2 or whole.points[0].step not in (0, 1) or log.is_counted:
        return
    first, second = whole.points[0], whole.points[1]
    rest = [point.value for point in whole.points[trends.WARM_UP :]]
    grew = second.value > 1.5 * first.value and first.value > 1.0
    if not (max(first.value, second.value) >= 3 * median(rest) > 0 if rest else grew):
        return
    yield info(
        "the second iteration is slower than the first: torch.compile's second compilation looks like this"
        if grew
        else "the first iterations are slower than the rest: warm-up",
        second.where(whole.name),
        *(
            shown(f"step {p.step} (s)", round(p.value, 3), None, f"line {p.line}" if p.line else whole.source)
            for p in (first, second)
        ),
        *([shown("median of the rest (s)", round(median(rest), 3), None, whole.source)] if rest else []),
        cause="a first graph for the first length, then one for any length: normal, if later iterations are fast",
        next_step="let it run to the fourth iteration; with compile=False the first two are like the rest; " + _NEXT,
        steps=steps_of([first, second]),
    )


def _expected(log: RunLog, whole: Series | None) -> Iterator[Finding]:
    """The ranges of the GRPO notes, for the log that they were made for."""
    if whole is None or whole.framework != "grpo_notes":
        return
    slow = [row for row in seen(log) if row["holds"] is False]
    if slow:
        yield info(
            f"slower than the GRPO notes expect: {slow[0]['what']}",
            whole.last.where(whole.name),
            *[
                shown(
                    row["what"],
                    row["seen"]["median"],
                    "{:g} to {:g} ".format(*row["expected"]) + row["unit"],
                    row["source"],
                )
                for row in slow
            ],
            cause="a larger model, longer sequences, or a slower machine than the estimate is for; with compile, its "
            "warm-up",
            next_step="compare phase against phase in the [Micro] lines; set compile=False for a moment; " + _NEXT,
        )


@rule("L05", "a few long responses hold the step up", link="time", scope="signals",
      needs=("response_length", "response_length_max"),
      source="verl and slime long-tail discussions (tail > 3 x mean)")  # fmt: skip
def long_tail(log: RunLog) -> Finding | None:
    """The longest response is over 3 times the mean one (level over 10 steps): info, generation waits for it."""
    pairs = [(*mean, *longest) for mean in log.level("response_length") for longest in log.level("response_length_max")]
    skip_if(not pairs, "needs finite response lengths")
    _, now, longest, top = pairs[0]
    if now > 0 and top > TAIL * now:
        return info(
            f"the longest response has {top / now:.1f} times the mean length",
            longest.last.where(longest.name),
            shown(longest.name, top, f"< {TAIL:g} x {now:.4g}", longest.source),
            cause="synchronous generation waits for the longest response; the others' GPUs idle",
            next_step="partial or asynchronous rollouts, or a smaller limit of tokens",
        )
    return None


#: D32: static, then with dynamic lengths, is normal: one recompile per function.
NORMAL_RECOMPILES = 1
_FUNCTION = regex(r"Recompiling function (\S+) in (\S+)")
_LIMIT = regex(r"hit config\.(\w+)(?: \((\d+)\))?")
_ITEM = regex(r"\.item\(\)|aten\._local_scalar_dense|data.dependent", re.IGNORECASE)
_UNPAD = regex(r"unpad|flash|varlen|max_seqlen|cu_seq", re.IGNORECASE)


#: Steps on each side of a change, and how much longer those behind it may take to be as fast.
ASIDE, AS_FAST = 5, 1.25


def _as_fast(log: RunLog, step: int | None) -> bool:
    """Whether the log tells that steps after this one take no longer than those before."""
    whole = seconds(log)
    points = [] if whole is None or step is None else [p for p in whole.points[trends.WARM_UP :] if p.step is not None]
    before = [p.value for p in points if step is not None and p.step is not None and p.step <= step]
    after = [p.value for p in points if step is not None and p.step is not None and p.step > step]
    return min(len(before), len(after)) >= ASIDE and median(after) <= AS_FAST * median(before)


@rule("D32", "compiled code is compiled again and again", link="time", scope="signals",
      needs=("event:recompile|event:recompile_limit",),
      source="torchtitan#2823, #3898; torch 2.x: recompile_limit 8")  # fmt: skip
def recompiles(log: RunLog) -> Finding | None:
    """More than one recompile of a function is a warning; the recompile limit (8) is a warning, an error where it is
    reached more than once; worth knowing alone where 5 steps and more on both sides of it tell that they take no
    longer.

    The first call compiles for its lengths, the second with a new length once more for any length, and that is
    normal: the second iteration may be slower than the first. dynamic=False compiles for every length; at the limit
    Dynamo falls back to eager without a further word.
    """
    hit, again = log.events("recompile_limit"), log.events("recompile")
    if hit:
        limit = _LIMIT.search(hit[0].text)
        number = limit.group(2) or limit.group(1) if limit else "8"
        same = _as_fast(log, hit[0].point.step)
        return finding(
            "info" if same else "error" if len(hit) > 1 else "warning",
            "the recompile limit is reached: the function runs without compilation from here on"
            + (", and steps take no longer for it" if same else ""),
            hit[0].point.where(),
            shown("limit", number, None, f"line {hit[0].point.line}"),
            shown("recompiles logged", len(again), None, "log"),
            cause="a new graph for every length or every value of a Python number",
            next_step="torch.compile(dynamic=True) or mark_dynamic on the token axis, or pad to few lengths; "
            "TORCH_LOGS=recompiles names the guard; rldbg replay DUMP --compile inductor --dynamic on times it",
            steps=steps_of(told.point for told in hit),
        )
    # One process each compiles its own: what counts is a function of one rank.
    by_function: dict[tuple[str, int | None], list[Told]] = {}
    for told in again:
        found = _FUNCTION.search(told.text)
        name = f"{found.group(1)} ({found.group(2)})" if found else "a function"
        by_function.setdefault((name, told.point.rank), []).append(told)
    (name, _), most = max(by_function.items(), key=lambda item: len(item[1]))
    if len(most) > NORMAL_RECOMPILES:
        return warning(
            f"{name} is compiled {len(most) + 1} times",
            most[0].point.where(),
            shown("recompiles", len(most), f"<= {NORMAL_RECOMPILES}", f"from line {most[0].point.line}"),
            cause="its inputs differ in a length or a Python number that Dynamo guards on",
            next_step="torch.compile(dynamic=True) or mark_dynamic on the token axis; "
            "rldbg replay DUMP --compile inductor --dynamic on",
            steps=steps_of(told.point for told in again),
        )
    return None


@rule("D33", "the graph breaks", link="time", scope="signals", needs=("event:graph_break",),
      source="transformers#35588, #33932, #41827; pytorch#148845")  # fmt: skip
def graph_breaks(log: RunLog) -> Finding | None:
    """A break at .item() (an unpadding attention reads its longest length) is a warning, other breaks are info.

    Passing cu_seq_lens and max_length as arguments, or capture_scalar_outputs, keeps the graph whole.
    """
    breaks = log.events("graph_break")
    items = [told for told in breaks if _ITEM.search(told.text)]
    told = (items or breaks)[0]
    unpads = " while attention is unpadded" if _UNPAD.search(told.text) else ""
    return finding(
        "warning" if items else "info",
        "the compiled graph breaks" + (f" at .item(){unpads}" if items else ""),
        told.point.where(),
        shown("graph breaks", len(breaks), "0", f"line {told.point.line}"),
        shown("the first", told.text.splitlines()[0][:160], None, f"line {told.point.line}"),
        cause="a tensor's value is needed in Python: in flash attention's unpadding it is the longest length"
        if items
        else "code that Dynamo does not trace; each break ends a graph and starts another",
        next_step="pass cu_seq_lens_q/k and max_length_q/k as arguments, or "
        "torch._dynamo.config.capture_scalar_outputs = True; rldbg replay DUMP --matrix shows what each setting costs"
        if items
        else "TORCH_LOGS=graph_breaks names the lines; rldbg replay DUMP --compile inductor",
        steps=steps_of(told.point for told in breaks),
    )
