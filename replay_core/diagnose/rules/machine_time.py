"""Where time goes, by counts beside the training: ranks that wait, requests made twice, drafts that fail."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import median

from msgspec import Struct

from replay_core.diagnose import trends
from replay_core.diagnose.finding import Finding, finding, info, shown
from replay_core.diagnose.rule import given, rule, skip_if
from replay_core.diagnose.rules.timing import seconds
from replay_core.diagnose.signals import Point, RunLog, Series
from replay_core.regexes import regex

#: Tokens of the busiest rank as a multiple of the least busy one's; the part of their time that ranks then wait.
APART, WAIT = 2.0, 0.5


@rule("L85", "ranks have unequal work", link="time", scope="signals", needs=("least_tokens", "most_tokens"),
      lasts=True, source="verl: global_seqlen/balanced_min, balanced_max")  # fmt: skip
def unequal(log: RunLog) -> Finding | None:
    """Tokens of the rank with most and of that with least, after they were balanced, over 8 steps and more: twice and
    more apart (the level of the last quarter) worth knowing; a warning where the mean of all is below half of the most,
    so that more than half of all ranks' time is spent waiting.
    """
    least, most, mean = given(log.get("least_tokens")), given(log.get("most_tokens")), log.get("mean_tokens")
    skip_if(min(len(least.finite), len(most.finite)) < trends.MIN_STEPS, f"needs {trends.MIN_STEPS} steps")
    last = max(3, len(most.finite) // 4)
    low, high = trends.level(least.finite, last), trends.level(most.finite, last)
    if not low >= 0 or not high >= APART * low or high <= 0:
        return None
    middle = (low + high) / 2 if mean is None or not mean.finite else trends.level(mean.finite, last)
    waits = 1 - middle / high
    return finding(
        "warning" if waits > WAIT else "info",
        f"one rank has {high:.4g} tokens where another has {low:.4g}: ranks wait for {waits:.0%} of an update on "
        "average",
        most.ended,
        most.shown(high, f"< {APART * low:.4g}"),
        least.shown(low),
        shown("tokens of the mean rank", middle),
        cause="samples are shared out by their number, or a few long ones are more than a rank's part of the batch: "
        "all ranks wait for the busiest at each collective",
        next_step="share samples out by tokens (balance_batch, dynamic batch sizes), with more samples to a batch",
    )


#: Preemptions of a request, on average: worth knowing, and a warning.
PREEMPTED, TWICE = 0.1, 1.0


@rule("L86", "requests are preempted", link="time", scope="signals", needs=("preempted",), explains=("D37",),
      lasts=True, source="verl: agent_loop/num_preempted/mean")  # fmt: skip
def preempted(log: RunLog) -> Finding | None:
    """How often a request is preempted by the engine, on average: 1 and more in the last quarter of 5 steps and more a
    warning (each is computed twice), .1 worth knowing. Where an engine does not tell, verl logs -1.
    """
    series = given(log.get("preempted"))
    values = series.finite
    skip_if(len(values) < 5, "needs 5 steps")
    now = trends.level(values, max(3, len(values) // 4))
    if now < PREEMPTED:
        return None
    return finding(
        "warning" if now >= TWICE else "info",
        f"the engine preempts requests, each {now:.2g} times on average: {series.name}",
        series.between(over=0),
        series.shown(now, "0"),
        cause="the KV cache is too small for the sequences that run at once: what was computed of a preempted one is "
        "thrown away and computed again",
        next_step="raise gpu_memory_utilization or tensor parallelism; lower max_num_seqs or the response length",
    )


#: How many times its first level the loss of drafts comes to.
GROWS = 2.0


@rule("L87", "the loss of drafts grows", link="trend", scope="signals", needs=("draft_loss",),
      source="slime: train/mtp_loss; multi-token prediction beside the policy")  # fmt: skip
def drafts(log: RunLog) -> Finding | None:
    """The loss of layers that predict several tokens (MTP, drafts) at twice its first level and more, in the last
    quarter of 8 steps and more, by more than chance: worth knowing. The policy is none the worse; sampling is slower.
    """
    for series in log.all("draft_loss"):
        values = series.finite
        last = max(3, len(values) // 4)
        if len(values) < trends.MIN_STEPS:
            continue
        begun, now = trends.level(values[:last]), trends.level(values, last)
        if begun > 0 and now >= GROWS * begun and trends.rises(values):
            return info(
                f"drafts fail ever more: {series.name} grows from {begun:.3g} to {now:.3g}",
                series.ended,
                series.shown(now, f"about {begun:.3g}"),
                cause="the policy moves and its layers that draft tokens do not follow (they are not trained, their "
                "gradient is cut off, or their loss has the wrong inputs): drafts are rejected, and sampling gets "
                "slower",
                next_step="look at the accepted length of drafts in the engine's log; train the layers along "
                "(enable-mtp-training), or sample without",
            )
    return None


#: How many times the median of the others' time makes a rank slow, in what share of the steps since it is, in how many
#: of them at least; what part of a step its excess is, before it is a warning; and ranks that tell.
SLOW, MOST_OF, AT_LEAST, PART_OF_STEP, RANKS = 1.4, 0.9, 5, 0.1, 3
#: Of what others wait, what the slow one does.
WAITS_LESS = 0.5
#: A time that is spent in waiting for others: who is late waits least.
_WAITS = regex(r"(?i)sync|wait|barrier|nccl|all[-_]?(?:reduce|gather)|reduce[-_]scatter|comm|idle|recv|bubble")
#: What a stage of a pipeline waits for its neighbours: the first receives nothing, the last sends nothing, and how long
#: the others wait is the schedule's.
_OF_STAGES = regex(r"(?i)(?:forward|backward)[-_ ](?:recv|send)|(?:recv|send)[-_](?:forward|backward)|bubble|p2p")
#: What each stage computes, and how many stages a run states.
_COMPUTES = regex(r"(?i)(?:forward|backward)[-_ ](?:compute|step)|forward[-_ ]backward")
_STAGES = ("pipeline_model_parallel_size", "pipeline_parallel_size", "pp_size", "pp", "pipeline_parallel_degree")
_WHO = regex(r"(?i)(rank|node|worker|host|gpu|actor|device)[_ -]?(\d{1,5})")


class _Slow(Struct, frozen=True):
    """Who is slow in which phase: since where, by how much, beside the others."""

    phase: str
    who: str
    since: Point
    points: list[Point]
    own: float
    others: float
    before: float | None


@rule("L100", "one rank is slower than the others", link="time", scope="signals",
      needs=("rank_seconds|rank_range|step_seconds|phase_seconds",), explains=("D37",), lasts=True,
      source="Megatron: timing_log_option all, minmax, and its straggler detection")  # fmt: skip
def straggler(log: RunLog) -> Iterator[Finding]:
    """Times of a phase by rank, node or worker (3 and more of them; Megatron's tables below an iteration, names with a
    rank in them, lines that ranks print for themselves): one that takes 1.4 times the others' median and more, from
    some step on in nine of ten steps, 5 and more. A warning where that is a tenth of a step and more, else worth
    knowing. What is spent waiting (a synchronisation, a collective) is told the other way: who waits less than half of
    what the others do, while they wait a tenth of a step, is who they wait for. Of the least and most of all ranks, it
    says that one is slow, and not which. No wait is what stages of a pipeline send and receive: how long each waits is
    the schedule's; and worth knowing at most is a stage of several (stated) that computes longer from the first step
    on, as the one with the head over the vocabulary does.
    """
    whole = seconds(log)
    step = math.nan if whole is None or not whole.finite else trends.level(whole.finite, 20)
    phases: dict[str, dict[str, list[Point]]] = {}
    for series in log.all("rank_seconds"):
        if (who := _WHO.search(series.name)) is not None:
            phase = (series.name[: who.start()] + series.name[who.end() :]).strip("/_. -").replace("//", "/")
            phases.setdefault(phase, {})[f"{who[1].lower()} {int(who[2])}"] = list(series.points)
    for signal in ("step_seconds", "phase_seconds"):
        for name, ranks in log.of_ranks(signal).items():
            phases.setdefault(name, {}).update({f"rank {rank}": points for rank, points in ranks.items()})
    skip_if(not any(len(each) >= RANKS for each in phases.values()) and not log.has("rank_range"),
            f"needs times of {RANKS} ranks")  # fmt: skip
    slow = [
        one for phase, ranks in phases.items()
        if not _WAITS.search(phase) and not _OF_STAGES.search(phase) and (one := _slow_in(phase, ranks))
    ]  # fmt: skip
    waits = [
        one for phase, ranks in phases.items()
        if _WAITS.search(phase) and not _OF_STAGES.search(phase) and (one := _waited_for(phase, ranks))
    ]  # fmt: skip
    if slow:
        worst = max(slow, key=lambda one: one.own - one.others)
        yield _of_rank(log, worst, next((one for one in waits if one.who == worst.who), None), whole, step)
    elif waits and max(one.others for one in waits) >= PART_OF_STEP * step:
        yield _of_wait(max(waits, key=lambda one: one.others), whole)
    else:
        yield from _of_range(log, step)


def _since(flags: list[bool]) -> int | None:
    """The first place from which nearly all hold, to the end; None where they are too few."""
    for at, flag in enumerate(flags):
        rest = flags[at:]
        if len(rest) < AT_LEAST:
            return None
        if flag and all(rest[:2]) and sum(rest) >= MOST_OF * len(rest):
            return at
    return None


def _rows(ranks: dict[str, list[Point]]) -> list[tuple[int | None, dict[str, Point]]]:
    by_step: dict[int | None, dict[str, Point]] = {}
    for who, points in ranks.items():
        for point in points:
            if math.isfinite(point.value):
                by_step.setdefault(point.step, {})[who] = point
    return [(step, by_step[step]) for step in sorted(by_step, key=lambda one: -1 if one is None else one)
            if len(by_step[step]) >= RANKS]  # fmt: skip


def _slow_in(phase: str, ranks: dict[str, list[Point]]) -> _Slow | None:
    rows = _rows(ranks)
    best: _Slow | None = None
    for who in ranks:
        told = [
            (row[who], median(point.value for other, point in row.items() if other != who))
            for _, row in rows if who in row
        ]  # fmt: skip
        flags = [others > 0 and own.value >= SLOW * others for own, others in told]
        if (at := _since(flags)) is None:
            continue
        since = told[at:]
        own, others = median(point.value for point, _ in since), median(each for _, each in since)
        before = median(point.value for point, _ in told[:at]) if at else None
        one = _Slow(phase, who, since[0][0], [point for point, _ in since], own, others, before)
        if best is None or own - others > best.own - best.others:
            best = one
    return best


def _waited_for(phase: str, ranks: dict[str, list[Point]]) -> _Slow | None:
    rows = _rows(ranks)
    for who in ranks:
        told = [
            (row[who], [point.value for other, point in row.items() if other != who]) for _, row in rows if who in row
        ]
        flags = [own.value < WAITS_LESS * min(others) for own, others in told]
        if (at := _since(flags)) is None:
            continue
        since = told[at:]
        own, others = median(point.value for point, _ in since), median(median(each) for _, each in since)
        before = median(median(each) for _, each in told[:at]) if at else None
        return _Slow(phase, who, since[0][0], [point for point, _ in since], own, others, before)
    return None


_CAUSE = (
    "this rank's machine is slower than the others' or has more to do: a GPU that is throttled (heat, power, ECC "
    "errors), a process that shares it, a slow link, disk or CPU of its node, longer sequences or another micro-batch "
    "size on it. All other ranks wait for it at the next collective"
)
_NEXT_STEP = (
    "nvidia-smi -q -d PERFORMANCE,CLOCK,ECC and dmesg on that node, beside another's; compare tokens per rank; leave "
    "the node out, and see whether the time goes back"
)


def _is_a_stage(log: RunLog, phase: str, always: bool) -> bool:
    """Whether a rank has more to compute as it is another stage of a pipeline than the others."""
    return always and _COMPUTES.search(phase) is not None and (log.algorithm.number(*_STAGES) or 1) > 1


_STAGE = (
    "stages of a pipeline are of unequal work: the last one has the head over the vocabulary and the loss beside its "
    "layers, the first one the embedding. The others wait for the longest in every micro-batch"
)
_OTHER_STAGES = "give that stage fewer layers (decoder-last-pipeline-num-layers, an uneven layout of the pipeline)"


def _of_rank(log: RunLog, slow: _Slow, wait: _Slow | None, whole: Series | None, step: float) -> Finding:
    excess = slow.own - slow.others
    grown = _grown(whole, slow.since.step)
    stage = _is_a_stage(log, slow.phase, slow.before is None)
    return finding(
        "warning" if not excess < PART_OF_STEP * step and not stage else "info",
        f"{slow.who} is a straggler: {slow.phase} takes {slow.own:.3g} s there"
        + ("" if slow.before is None else f" since step {slow.since.step} ({slow.before:.3g} before)")
        + f", and {slow.others:.3g} s on the others"
        + ("" if grown is None else f"; a step takes {grown[1]:.3g} s, and {grown[0]:.3g} before"),
        slow.since.where(f"{slow.phase}/{slow.who}"),
        shown(f"{slow.phase}, {slow.who}", slow.own, f"about {slow.others:.3g}", "median since then, in seconds"),
        shown(f"{slow.phase}, the others' median", slow.others),
        *(
            []
            if wait is None
            else [shown(f"{wait.phase}: what the others wait, and it", f"{wait.others:.3g} s and {wait.own:.2g} s")]
        ),
        cause=_STAGE if stage else _CAUSE,
        next_step=_OTHER_STAGES if stage else _NEXT_STEP,
        steps=[point.step for point in slow.points],
    )


def _of_wait(wait: _Slow, whole: Series | None) -> Finding:
    grown = _grown(whole, wait.since.step)
    return finding(
        "warning",
        f"all ranks wait for {wait.who}: {wait.phase} takes {wait.others:.3g} s on the others"
        + ("" if wait.before is None else f" since step {wait.since.step} ({wait.before:.3g} before)")
        + f", and {wait.own:.2g} s there"
        + ("" if grown is None else f"; a step takes {grown[1]:.3g} s, and {grown[0]:.3g} before"),
        wait.since.where(f"{wait.phase}/{wait.who}"),
        shown(f"{wait.phase}, the others' median", wait.others, f"about {wait.own:.2g}"),
        cause=_CAUSE,
        next_step=_NEXT_STEP,
        steps=[point.step for point in wait.points],
    )


def _of_range(log: RunLog, step: float) -> Iterator[Finding]:
    """Of the least and the most that ranks take, without which takes how much."""
    every = {series.name: series for series in log.all("rank_range")}
    found = []
    for name, most in every.items():
        phase, _, of = name.rpartition("/")
        least = every.get(f"{phase}/least of ranks")
        if of != "most of ranks" or least is None or _WAITS.search(phase) or _OF_STAGES.search(phase):
            continue
        low = {point.step: point.value for point in least.points}
        told = [(point, low[point.step]) for point in most.points if low.get(point.step, 0.0) > 0]
        if (at := _since([point.value >= SLOW * other for point, other in told])) is not None:
            since = told[at:]
            found.append((median(p.value for p, _ in since), median(each for _, each in since), phase, most, since))
    if not found:
        return
    top, bottom, phase, series, since = max(found, key=lambda each: each[0] - each[1])
    first = since[0][0]
    stage = _is_a_stage(log, phase, first.step == series.points[0].step)
    yield finding(
        "warning" if not top - bottom < PART_OF_STEP * step and not stage else "info",
        f"one rank is slower than the others: {phase} takes {top:.3g} s on the slowest and {bottom:.3g} s on the "
        f"fastest rank, since step {first.step}",
        series.of(point for point, _ in since),
        series.shown(top, f"about {bottom:.3g}"),
        cause=_STAGE if stage else _CAUSE,
        next_step=_OTHER_STAGES
        if stage
        else "print the times of every rank (Megatron: --timing-log-option all, or --log-straggler), which names it; "
        + _NEXT_STEP,
        steps=[point.step for point, _ in since],
    )


def _grown(whole: Series | None, since: int | None) -> tuple[float, float] | None:
    """What a step took before and takes since, where that is a fifth more."""
    if whole is None or since is None:
        return None
    before = [p.value for p in whole.points if p.step is not None and p.step < since and math.isfinite(p.value)]
    after = [p.value for p in whole.points if p.step is not None and p.step >= since and math.isfinite(p.value)]
    if len(before) < 3 or len(after) < 3 or median(after) < 1.2 * median(before):
        return None
    return median(before), median(after)
