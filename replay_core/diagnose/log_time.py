"""Where the time goes, from logged times: warm-up told apart from regressions (D37)."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median

from replay_core.diagnose import expectations, trends
from replay_core.diagnose.finding import Evidence, Finding
from replay_core.diagnose.rule import Skip
from replay_core.diagnose.signals import Part, Point, Series, signal_rule

#: D37: a phase over that many of its own medians stalls (miles advisory).
STALL = 6.0
#: A step that a stall lengthens by less than this is not worth a word: short phases jitter by any factor.
_SHARE = 0.25
#: Iterations that compile: static, then once more for any length.
WARM_UP = 2
#: D37: the longest response over the mean one, from which on the step waits for it.
TAIL = 3.0
#: D37: how much longer the last quarter takes than the first half, to be a regression.
SLOWER = 1.5

_NEXT = "rldbg replay DUMP --compile inductor times compilation apart from steady steps"


def seconds(part: Part) -> Series | None:
    """The time of a whole step in seconds, whatever unit it is logged in."""
    series = part.get("step_seconds")
    if series is not None:
        return series
    series = part.get("iter_ms")
    if series is None:
        return None
    points = tuple(Point(p.step, p.value / 1000, p.micro, p.rank, p.line, p.path) for p in series.points)
    return Series("step_seconds", series.name, series.framework, "", points)


def phase_shares(part: Part) -> dict[str, float]:
    """Each phase's share of all the time that phases take, steady steps only."""
    total = {s.name: sum(s.finite[WARM_UP:] or s.finite) for s in part.all("phase_seconds")}
    whole = sum(total.values())
    return {} if whole <= 0 else {name: value / whole for name, value in sorted(total.items(), key=lambda i: -i[1])}


@signal_rule(
    "D37",
    "a step takes far longer than the others",
    link="time",
    needs=("step_seconds|iter_ms|phase_seconds",),
    source="miles advisory (6 x median); seed 002; torch.compile's automatic dynamic shapes",
)
def slow_steps(part: Part) -> Iterable[Finding]:
    """D37. After the first two steps (warm-up), a step or phase over 6 times its own median is a warning.

    8 steps or more, and only where it lengthens the step by a quarter. Steps that get 1.5 times slower for good (the
    last quarter over the first half, a rise that chance does not explain) are a warning. The second iteration slower
    than the first, or both far slower than the rest, is the signature of compilation: info. Seed 002's ranges are
    compared as info, and for its own log.
    """
    whole = seconds(part)
    yield from _warm_up(part, whole)
    yield from _expected(part, whole)
    phases = [
        s
        for s in [*part.all("phase_seconds"), *([whole] if whole else [])]
        if len(s.finite) >= trends.MIN_STEPS + WARM_UP
    ]
    if not phases:
        return
    typical = median(whole.finite[WARM_UP:]) if whole is not None and len(whole.finite) > WARM_UP else None
    typical = typical or sum(median(s.finite[WARM_UP:]) for s in phases)
    stalls = []
    for series in phases:
        steady = series.points[WARM_UP:]
        middle = median(point.value for point in steady)
        stalls += [
            (point.value / middle if middle else 0.0, series, point, middle)
            for point in steady
            if point.value > STALL * middle and point.value - middle > _SHARE * typical
        ]
    if stalls:
        # The whole step is slow because a phase is: the phase says more.
        named = [stall for stall in stalls if stall[1].signal == "phase_seconds"] or stalls
        factor, series, point, middle = max(named, key=lambda stall: stall[0])
        yield Finding(
            "D37",
            "warning",
            f"{series.name} takes {factor:.1f} times its own median at step {point.step}",
            (
                Evidence(
                    series.name,
                    point.value,
                    f"< {STALL:g} x {middle:.3g} s",
                    f"line {point.line}" if point.line else series.source,
                ),
                Evidence("such steps", len({p.step for _, _, p, _ in stalls}), source="log"),
            ),
            "a straggler, a long tail of responses, a recompile, or a checkpoint",
            "look at the longest response of the step; TORCH_LOGS=recompiles; " + _NEXT,
            "time",
            "miles advisory",
            point.where(series.name),
            tuple(sorted({p.step for _, _, p, _ in stalls if p.step is not None})),
        )
    for series in phases:
        values = series.finite[WARM_UP:]
        half, last = values[: len(values) // 2], values[-(len(values) // 4) :]
        before, after = median(half), median(last)
        length = part.get("response_length")
        longer = length is not None and trends.drift(length.finite) > trends.DRIFT_Z
        if series is whole and after > SLOWER * before and trends.drift(values) > trends.DRIFT_Z:
            yield Finding(
                "D37",
                "info" if longer else "warning",
                f"steps get slower: {before:.3g} s, then {after:.3g} s",
                (Evidence(series.name, after, f"< {SLOWER:g} x {before:.3g} s", series.source),),
                "responses get longer" if longer else "something accumulates: a growing buffer, logging, fragmentation",
                "compare the phases' trends; " + _NEXT,
                "time",
                "rldbg",
                series.last.where(series.name),
                tuple(p.step for p in series.points[-len(last) :] if p.step is not None),
            )


def _warm_up(part: Part, whole: Series | None) -> Iterable[Finding]:
    if whole is None or len(whole.points) < 2 or whole.points[0].step not in (0, 1) or part.is_counted:
        return
    first, second = whole.points[0], whole.points[1]
    rest = [p.value for p in whole.points[WARM_UP:]]
    grew = second.value > 1.5 * first.value and first.value > 1.0
    alone = not rest
    if rest and max(first.value, second.value) < 3 * median(rest):
        return
    if alone and not grew:
        return
    yield Finding(
        "D37",
        "info",
        "the second iteration is slower than the first: torch.compile's second compilation looks like this"
        if grew
        else "the first iterations are slower than the rest: warm-up",
        (
            Evidence(
                f"step {first.step} (s)",
                round(first.value, 3),
                source=f"line {first.line}" if first.line else whole.source,
            ),
            Evidence(
                f"step {second.step} (s)",
                round(second.value, 3),
                source=f"line {second.line}" if second.line else whole.source,
            ),
            *((Evidence("median of the rest (s)", round(median(rest), 3), source=whole.source),) if rest else ()),
        ),
        "a first graph for the first length, then one for any length: normal, if later iterations are fast",
        "let it run to the fourth iteration; with compile=False the first two are like the rest; " + _NEXT,
        "time",
        "seed 002, reproduced: 9.3 s, 7.7 s, then 0.0 s",
        second.where(whole.name),
        tuple(p.step for p in (first, second) if p.step is not None),
    )


def _expected(part: Part, whole: Series | None) -> Iterable[Finding]:
    """Seed 002's ranges, for the log that they were made for."""
    if whole is None or whole.framework != "seed-002":
        return
    rows = [row for row in expectations.seen(part) if row["holds"] is False]
    slow = [row for row in rows if row["seen"]["median"] > row["expected"][1]]
    if slow:
        yield Finding(
            "D37",
            "info",
            f"slower than seed 002 expects: {slow[0]['what']}",
            tuple(
                Evidence(
                    row["what"],
                    row["seen"]["median"],
                    f"{row['expected'][0]:g} to {row['expected'][1]:g} {row['unit']}",
                    row["source"],
                )
                for row in slow
            ),
            "a larger model, longer sequences, or a slower machine than the estimate is for; with compile, its warm-up",
            "compare phase against phase in the [Micro] lines; set compile=False for a moment; " + _NEXT,
            "time",
            "seed 002",
            whole.last.where(whole.name),
        )


@signal_rule(
    "L05",
    "a few long responses hold the step up",
    link="time",
    needs=("response_length", "response_length_max"),
    source="verl and slime long-tail discussions; catalogue D37 (tail > 3 x mean)",
)
def long_tail(part: Part) -> Iterable[Finding]:
    """L05. The longest response is over 3 times the mean one (level over 10 steps): info, generation waits for it."""
    mean, longest = part.get("response_length"), part.get("response_length_max")
    if mean is None or longest is None or not mean.finite or not longest.finite:
        raise Skip("needs finite response lengths")
    now, top = trends.level(mean.finite), trends.level(longest.finite)
    if now > 0 and top > TAIL * now:
        yield Finding(
            "L05",
            "info",
            f"the longest response has {top / now:.1f} times the mean length",
            (Evidence(longest.name, top, f"< {TAIL:g} x {now:.4g}", longest.source),),
            "synchronous generation waits for the longest response; the others' GPUs idle",
            "partial or asynchronous rollouts, or a smaller limit of tokens",
            "time",
            "catalogue D37",
            longest.last.where(longest.name),
        )
